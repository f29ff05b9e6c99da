r"""Make a parallel corpus of text in the target language: a model of the other direction writes the sources.

    vanilla-transformer backtranslate --model_name_or_path out/de-en --input_file mono.de --output_file bt.tsv
    vanilla-transformer backtranslate --model_name_or_path out/de-en --input_file mono.de --output_file bt.tsv \
        --tag "<BT>"
    vanilla-transformer backtranslate --model_name_or_path out/de-en --input_file mono.de --output_file bt.tsv \
        --method sampling --top_k 10
    vanilla-transformer backtranslate --model_name_or_path out/de-en --input_file mono.de --output_file bt.tsv \
        --method noised
    torchrun --nproc_per_node 8 -m vanilla_transformer backtranslate --model_name_or_path out/de-en \
        --input_file "mono/*.txt.gz" --output_file bt.parquet

The output is a table of the columns source (the translation) and target (the text). Then train on both:

    vanilla-transformer train --preset small --train_file train.en train.de --train_file bt.tsv \
        --added_tokens "<BT>" --output_dir out/en-de

The input is all that `translate` reads. Translations are found by beam search (the default), drawn (--method sampling),
or found and then noised: words are dropped, replaced by a blank, and shuffled (--method noised). What is drawn depends
on --seed. Pairs that are empty or too long are left out, and counted.

An interrupted run goes on with the parts that it had not finished when the same command is given again.
"""

from __future__ import annotations  # the types are not imported: --help does not wait for torch

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from vanilla_transformer.export.engines import EngineArguments
from vanilla_transformer.options import option

from .command_line import make_argument_parser, make_main

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(kw_only=True)
class CorpusArguments(EngineArguments):
    """The command-line arguments of what translates files into a parallel corpus."""

    input_file: str = option(
        "UTF-8 text, one sentence per line, or a .tsv, .jsonl or .parquet; .gz, .bz2 and .xz too; a folder of them, a "
        "pattern, or a URL of fsspec."
    )
    output_file: str = option(
        "The pairs: a .tsv, .jsonl or .parquet, compressed too; a new folder if it ends with a slash."
    )
    parts_dir: str | None = option(
        "Folder for unfinished parts, which all processes share. Default: beside a local output.", None
    )
    overwrite: bool = option("Replace an existing output file, or a run that was begun with other settings.", False)
    window_size: int = option("Lines of a part, which an interruption may cost. Default: 4096.", 4096)

    def load_all(self) -> tuple[Any, PreTrainedTokenizerBase, dict[str, Any]]:
        """The model, its tokenizer, and the options of `translate_file` that were given."""
        from vanilla_transformer.inference.processes import Processes

        logging.getLogger("vanilla_transformer").setLevel(logging.INFO)
        model, tokenizer, options = self.load()
        names = ("batch_size", "max_batch_tokens", "max_source_length", "parts_dir", "overwrite", "window_size")
        options |= {name: getattr(self, name) for name in names}
        options |= {"source_prefix": self.find_prefix(model), "progress": not self.disable_tqdm}
        return model, tokenizer, options | {"processes": Processes.from_environment()}


@dataclass(kw_only=True)
class BackTranslationArguments(CorpusArguments):
    """What to translate back, with which model, and how."""

    text_column: str | None = option(
        "Column of the texts in tables. Default: source or text, the only one, or the first of a .tsv without names.",
        None,
    )
    method: Literal["beam", "sampling", "noised"] = option("How sources are found. Default: beam.", "beam")
    temperature: float = option("Of sampling: below 1 favours likely tokens. Default: 1.", 1.0)
    top_k: int = option("Of sampling: draw from so many tokens, the likeliest; 0: from all. Default: 0.", 0)
    top_p: float = option("Of sampling: draw from the likeliest tokens that have this share. Default: 1.", 1.0)
    seed: int = option("Seed of sampling and noise. Default: 0.", 0)
    tag: str | None = option(
        "A token at the head of each source, such as <BT>; the next model's tokenizer must have it (--added_tokens).",
        None,
    )
    blank: str = option("What the noise puts in the place of words. Default: <BLANK>.", "<BLANK>")
    max_length: int = option("The most tokens of a side; longer pairs are left out. Default: 250.", 250)
    max_length_ratio: float = option(
        "The most tokens of a translation, in those of its text; longer ones are left out. Default: 2.", 2.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method == "beam" and self.seed:
            raise ValueError("--seed needs --method sampling or noised: beam search draws nothing.")
        if self.method != "noised" and self.blank != "<BLANK>":
            raise ValueError("--blank needs --method noised.")
        if self.method == "sampling":
            if (self.num_beams or 1) > 1:
                raise ValueError(f"--num_beams is {self.num_beams}; sampling takes no beams.")
        elif given := [name for name, value in self.sampling.items() if value != _ALL[name]]:
            raise ValueError(f"--{' and --'.join(given)} need --method sampling.")
        if self.temperature <= 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            values = ", ".join(f"--{name} {value}" for name, value in self.sampling.items())
            raise ValueError(f"{values}: temperature must be above 0, top_k at least 0, top_p above 0 and at most 1.")

    @property
    def sampling(self) -> dict[str, float]:
        """What tokens are drawn from."""
        return {name: getattr(self, name) for name in _ALL}

    def collect_settings(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """The arguments of `generate`; engines that cannot sample see that they are asked to."""
        settings = super().collect_settings(model, tokenizer)
        if self.method == "sampling":
            settings |= {**self.sampling, "do_sample": True, "num_beams": 1}
        return settings


_ALL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}  # sampling from the whole distribution


def run(arguments: BackTranslationArguments) -> None:
    """Translates the texts, and writes the pairs."""
    from vanilla_transformer.inference.files import translate_file
    from vanilla_transformer.inference.synthetic import BackTranslation
    from vanilla_transformer.inference.translate import length_limit

    model, tokenizer, options = arguments.load_all()
    own = {name: getattr(arguments, name) for name in ("tag", "blank", "max_length", "max_length_ratio")}
    # What is cut off has no translation.
    own["max_source_length"] = length_limit(tokenizer, arguments.max_source_length, model)
    own["source_prefix"] = options["source_prefix"]
    noise: dict[str, Any] = {"noise": True, "seed": arguments.seed} if arguments.method == "noised" else {}
    translate_file(
        model,
        tokenizer,
        arguments.input_file,
        arguments.output_file,
        source_column=arguments.text_column,
        seed=arguments.seed if arguments.method == "sampling" else None,
        make_pairs=BackTranslation(tokenizer, **own, **noise),
        **options,
    )


make_parser = partial(make_argument_parser, BackTranslationArguments, __doc__)
main = make_main(
    make_parser, run, "Interrupted: the same command goes on with the parts that are missing.", divides_work=True
)
