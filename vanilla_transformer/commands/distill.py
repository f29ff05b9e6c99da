r"""Make the training data of a smaller model: a teacher translates the sources, as the student is to translate them.

    vanilla-transformer distill --model_name_or_path out/teacher --input_file train.en --reference_file train.de \
        --output_file distilled.tsv
    vanilla-transformer distill --model_name_or_path out/seed1 out/seed2 --input_file train.tsv \
        --output_file distilled.tsv --num_beams 8 --n_best 8 --min_similarity 40
    vanilla-transformer distill --model_name_or_path out/teacher --input_file mono.en --output_file more.tsv \
        --select best
    vanilla-transformer distill --model_name_or_path out/de-en --input_file train.de --reference_file train.en \
        --output_file back.tsv --swap

Of the n-best translations of each source, the one that is most like the reference is kept (--select chrf or bleu), or
the best (--select best), or with --keep several of them. Pairs whose translation is less like the reference than
--min_similarity are left out, and counted. The output is a table of the columns source and target; with --swap the
translations are the sources, as `backtranslate` writes them. Then train a student on it:

    vanilla-transformer train --preset student --tokenizer_name out/teacher --train_file distilled.tsv ...

The input is all that `translate` reads; torchrun and interruptions are as there: the same command goes on.
"""

from __future__ import annotations  # the types are not imported: --help does not wait for torch

from dataclasses import dataclass
from functools import partial
from typing import Literal

from vanilla_transformer.options import option

from .backtranslate import CorpusArguments
from .command_line import make_argument_parser, make_main


@dataclass(kw_only=True)
class DistillationArguments(CorpusArguments):
    """What to translate, with which teacher, and what to keep."""

    source_column: str | None = option(
        "Column of the sources in tables. Default: source or text, the only one, or the first of a .tsv without names.",
        None,
    )
    reference_file: str | None = option(
        "The references, line by line those of the input. Default: a column of the input.", None
    )
    reference_column: str | None = option(
        "Column of the references in tables. Default: target, or the second of a .tsv without names.", None
    )
    select: Literal["chrf", "bleu", "best"] = option(
        "Keep the translation that is most like the reference, by chrF or BLEU of the sentence, or the best. "
        "Default: chrf.",
        "chrf",
    )
    n_best: int | None = option(
        "So many translations of each source to choose from. Default: 4, or --keep if it is more.", None
    )
    keep: int = option(
        "Keep so many translations of each source; for more than the beams, give --num_beams, too. Default: 1.", 1
    )
    min_similarity: float = option("Leave out what is less like its reference, from 0 to 100. Default: 0.", 0.0)
    swap: bool = option("Make the translations the sources, and what was translated the targets.", False)
    bleu_tokenize: str | None = option("SacreBLEU's tokeniser. Default: that of the target language.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bleu_tokenize is not None and self.select != "bleu":
            raise ValueError("--bleu_tokenize needs --select bleu.")
        if self.n_best is not None and self.select == "best":
            raise ValueError("--n_best needs --select chrf or bleu.")
        if self.n_best is not None and self.n_best < 1:
            raise ValueError(f"--n_best is {self.n_best}; it must be at least 1.")
        if not 1 <= self.keep <= self.count:
            raise ValueError(f"--keep is {self.keep}; it must be from 1 to --n_best, {self.count}.")

    @property
    def count(self) -> int:
        """How many translations of each source are asked for."""
        return max(self.keep, 1 if self.select == "best" else 4) if self.n_best is None else self.n_best


def run(arguments: DistillationArguments) -> None:
    """Translates the sources, chooses, and writes the pairs."""
    from vanilla_transformer.inference.files import translate_file
    from vanilla_transformer.inference.scores import find_bleu_tokenizer
    from vanilla_transformer.inference.synthetic import Distillation, find_references
    from vanilla_transformer.inference.translate import length_limit

    names = (arguments.input_file, arguments.reference_file, arguments.reference_column)
    is_free = arguments.select == "best" and not (arguments.min_similarity or any(names[1:]))
    references = None if is_free else find_references(*names, source_column=arguments.source_column)
    model, tokenizer, options = arguments.load_all()
    target_lang = [arguments.target_lang] if arguments.target_lang else getattr(model.config, "langs", None)
    tokenize = arguments.bleu_tokenize or find_bleu_tokenizer(target_lang)
    make_pairs = Distillation(
        references,
        arguments.select,
        arguments.min_similarity,
        tokenize,
        tokenizer=tokenizer,
        source_prefix=options["source_prefix"],
        max_source_length=length_limit(tokenizer, arguments.max_source_length, model),
        keep=arguments.keep,
        swap=arguments.swap,
    )
    translate_file(
        model,
        tokenizer,
        arguments.input_file,
        arguments.output_file,
        source_column=arguments.source_column,
        n_best=None if arguments.select == "best" and arguments.keep == 1 else arguments.count,
        make_pairs=make_pairs,
        **options,
    )


make_parser = partial(make_argument_parser, DistillationArguments, __doc__)
main = make_main(
    make_parser, run, "Interrupted: the same command goes on with the parts that are missing.", divides_work=True
)
