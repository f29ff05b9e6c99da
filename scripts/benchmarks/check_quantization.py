r"""Measure what quantized weights cost and save: size, quality and speed of each scheme that works here, side by side.

    python scripts/benchmarks/check_quantization.py --model_name_or_path out/demo
    python scripts/benchmarks/check_quantization.py --model_name_or_path out/demo --test_file test.en test.de
    python scripts/benchmarks/check_quantization.py --model_name_or_path out/my-model --schemes torchao-int8 bnb-8bit

The first row is the model as it was saved, or in --dtype; `same` is the share of translations that are the same as its.
Without --test_file it translates generated numbers and dates. The size is that of the saved weights. A scheme that this
machine lacks is named with the reason. Needs torchao or bitsandbytes, whichever is there.
"""

import gc
import importlib.util
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import (
    AutoModelForSeq2SeqLM,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TorchAoConfig,
)

from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.data.corpora import load_parallel_corpus
from vanilla_transformer.inference.arguments import InferenceArguments
from vanilla_transformer.inference.evaluate import score_translations
from vanilla_transformer.inference.loading import select_device
from vanilla_transformer.inference.scores import find_bleu_tokenizer
from vanilla_transformer.inference.translate import translate

NUMBERS = ("megabytes", "bleu", "chrf", "exact_match", "same", "tokens_per_second")
HEADINGS = ("MB", "BLEU", "chrF", "exact", "same", "tokens/s")


class Scheme(NamedTuple):
    """A way to load a model: the library it takes, the type of what is not quantized, the library's configuration."""

    library: str
    dtype: str | None
    configure: Callable[[], Any]


def torchao(name: str, **settings: Any) -> Callable[[], Any]:
    """Makes a configuration of torchao, which is imported only then."""

    def configure() -> Any:
        quantization = importlib.import_module("torchao.quantization")
        return TorchAoConfig(getattr(quantization, name)(**settings))

    return configure


SCHEMES = {
    "bfloat16": Scheme("torch", "bfloat16", lambda: None),
    "torchao-int8": Scheme("torchao", None, torchao("Int8WeightOnlyConfig")),
    "torchao-int8-dynamic": Scheme("torchao", None, torchao("Int8DynamicActivationInt8WeightConfig")),
    "torchao-float8": Scheme("torchao", None, torchao("Float8WeightOnlyConfig")),
    "torchao-float8-dynamic": Scheme("torchao", "bfloat16", torchao("Float8DynamicActivationFloat8WeightConfig")),
    "torchao-int4": Scheme(
        "torchao", "bfloat16", torchao("Int4WeightOnlyConfig", group_size=32, int4_packing_format="tile_packed_to_4d")
    ),
    "bnb-8bit": Scheme("bitsandbytes", None, lambda: BitsAndBytesConfig(load_in_8bit=True)),
    "bnb-nf4": Scheme("bitsandbytes", None, lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
}


@dataclass
class QuantizationArguments(InferenceArguments):
    """What to quantize, how, and what to translate."""

    schemes: list[str] = field(
        default_factory=lambda: list(SCHEMES), metadata={"help": f"Some of {', '.join(SCHEMES)}. Default: all."}
    )
    test_file: list[str] | None = field(
        default=None,
        metadata={"help": "Two aligned text files, source first, or one .tsv, .csv, .json(l) or .parquet; .gz too."},
    )
    max_samples: int = field(default=200, metadata={"help": "Translate the first so many pairs. Default: 200."})
    output_file: str | None = field(default=None, metadata={"help": "Write the rows there too, as JSON."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [name for name in self.schemes if name not in SCHEMES]:
            raise ValueError(f"--schemes: {unknown[0]} is none of {', '.join(SCHEMES)}.")
        if self.max_samples < 1:
            raise ValueError(f"--max_samples is {self.max_samples}; it must be at least 1.")


make_parser = partial(make_argument_parser, QuantizationArguments, __doc__)


def load_pairs(arguments: QuantizationArguments) -> tuple[list[str], list[str]]:
    """The sources and their references."""
    if arguments.test_file is not None:
        pairs = load_parallel_corpus(files=arguments.test_file, max_samples=arguments.max_samples)
    else:
        # Its generators are needed for nothing else.
        from vanilla_transformer.data.numbers_and_dates import numbers_and_dates

        pairs = numbers_and_dates(
            source_lang=arguments.source_lang or "en", target_lang=arguments.target_lang or "de", split="test"
        )
        pairs = pairs.select(range(min(arguments.max_samples, len(pairs))))
    return list(pairs["source"]), list(pairs["target"])


def find_obstacle(scheme: Scheme, device: torch.device) -> str | None:
    """Why a scheme cannot work here, if that is known before a model is loaded."""
    if importlib.util.find_spec(scheme.library) is None:
        return f"{scheme.library} is not installed"
    if scheme.library != "torchao":
        return None
    # On one layer, since a model reports the same obstacle for every layer it has.
    quantize = importlib.import_module("torchao.quantization").quantize_
    layer = nn.Linear(128, 128, device=device, dtype=getattr(torch, scheme.dtype or "float32"))
    try:
        quantize(layer, scheme.configure().quant_type)
        layer(torch.zeros(1, 128, device=device, dtype=layer.bias.dtype))
    except (AssertionError, ImportError, NotImplementedError, RuntimeError, ValueError) as error:
        return first_line(error)
    return None


def first_line(error: Exception) -> str:
    """What went wrong, in a line."""
    return (str(error) or type(error).__name__).splitlines()[0]


def load(arguments: QuantizationArguments, scheme: Scheme, device: torch.device) -> PreTrainedModel:
    """The model, loaded as the scheme says."""
    return AutoModelForSeq2SeqLM.from_pretrained(
        arguments.model_name_or_path,
        device_map={"": device},
        dtype=scheme.dtype or arguments.dtype,
        quantization_config=scheme.configure(),
        revision=arguments.revision,
        trust_remote_code=arguments.trust_remote_code,
    )


def saved_megabytes(model: PreTrainedModel) -> float:
    """The size of the model's weights in a file, in millions of bytes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / 1e6


class Check:
    """The test set, translated by one model after another."""

    def __init__(self, arguments: QuantizationArguments, sources: list[str], references: list[str]) -> None:
        self.arguments = arguments
        self.sources, self.references = sources, references
        self.first: list[str] | None = None

    def measure(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, generate_kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Size, scores and speed of a model."""
        # Saved first: on some CPUs its use packs four-bit weights in a way that files do not hold.
        megabytes = saved_megabytes(model)
        settings: dict[str, Any] = {
            "batch_size": self.arguments.batch_size,
            "max_batch_tokens": self.arguments.max_batch_tokens,
            "max_source_length": self.arguments.max_source_length,
            "source_prefix": self.arguments.find_prefix(model),
            "progress": False,
            **generate_kwargs,
        }
        translate(model, tokenizer, self.sources[:32], **settings)  # to warm up
        start = time.perf_counter()
        hypotheses = translate(model, tokenizer, self.sources, **settings)
        seconds = time.perf_counter() - start
        self.first = self.first or hypotheses
        tokens = sum(map(len, tokenizer(text_target=hypotheses, verbose=False)["input_ids"]))
        bleu_tokenize = find_bleu_tokenizer(getattr(model.config, "langs", None))
        scores = score_translations(hypotheses, self.references, tokenize=bleu_tokenize)
        same = sum(one == other for one, other in zip(hypotheses, self.first, strict=True))
        return {
            "megabytes": megabytes,
            "bleu": scores["bleu"],
            "chrf": scores["chrf"],
            "exact_match": scores["exact_match"],
            "same": 100 * same / len(hypotheses),
            "tokens_per_second": tokens / seconds,
        }

    def rows(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, generate_kwargs: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """One for the model as it is, and one for each scheme: its measurements, or the reason why it has none."""
        device = model.device
        yield {"scheme": str(model.dtype).removeprefix("torch."), **self.measure(model, tokenizer, generate_kwargs)}
        del model
        for name in self.arguments.schemes:
            scheme = SCHEMES[name]
            if obstacle := find_obstacle(scheme, device):
                yield {"scheme": name, "obstacle": obstacle}
                continue
            try:
                row = self.measure(load(self.arguments, scheme, device), tokenizer, generate_kwargs)
            except (AssertionError, ImportError, NotImplementedError, RuntimeError, ValueError) as error:
                row = {"obstacle": first_line(error)}
            yield {"scheme": name, **row}
            gc.collect()


def format_row(row: dict[str, Any]) -> str:
    """A line of the table."""
    if "obstacle" in row:
        return f"{row['scheme']:<24}not here: {row['obstacle']}"
    return f"{row['scheme']:<24}" + "".join(f"{row[name]:>10.2f}" for name in NUMBERS)


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments (`argv`, else the command line's), measure, and print a table."""
    parser = make_parser()
    # It says at every step that it computes in half precision.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        (arguments,) = parser.parse_args_into_dataclasses(args=argv)
        check = Check(arguments, *load_pairs(arguments))
        device = select_device(arguments.device)
        measured = check.rows(*arguments.load())  # and no name for the model here, which is to make room for others
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{len(check.sources):,} sentences on {device}, {torch.get_num_threads()} threads")
    print(f"{'':<24}" + "".join(f"{heading:>10}" for heading in HEADINGS))
    rows = []
    for row in measured:
        print(format_row(row), flush=True)
        rows.append(row)
    if arguments.output_file is not None:
        Path(arguments.output_file).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
