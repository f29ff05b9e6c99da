r"""Measures what a student gains: how well and how fast models translate a test set, side by side.

    python scripts/benchmarks/benchmark_students.py --num_beams 1 --test_file test.en.gz test.de.gz \
        --model_name_or_path out/teacher out/student out/student/ctranslate2

The others are held against the first. All are loaded, and take turns in each of --rounds rounds; a speed is the median
of the rounds, of translating the whole file as `vanilla-transformer translate` does, without starting and loading. A
folder that was exported is computed by its own engine, any other by torch, unless --engine says otherwise.
OMP_NUM_THREADS says how many threads torch has. Where a file is not there, nothing is measured, and the script says so.
"""

import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from check_alignments import read_pairs

from vanilla_transformer.commands.command_line import make_argument_parser, make_main
from vanilla_transformer.export.engines import EngineArguments, find_engine_of
from vanilla_transformer.inference.scores import Bleu, Chrf, find_bleu_tokenizer
from vanilla_transformer.inference.translate import translate
from vanilla_transformer.options import option


@dataclass
class BenchmarkArguments(EngineArguments):
    """Which models, and what they translate."""

    IS_ENSEMBLE: ClassVar[bool] = False

    test_file: list[str] = field(
        default_factory=list, metadata={"help": "Sentences and their references: two files of UTF-8, .gz too."}
    )
    rounds: int = option("How often each model translates the file. Default: 5.", 5)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.test_file) != 2:
            raise ValueError("--test_file must name two files, sentences and their translations.")
        if self.rounds < 1:
            raise ValueError(f"--rounds is {self.rounds}; it must be at least 1.")


def load(arguments: EngineArguments) -> tuple[Any, Any, dict[str, Any]]:
    """A model, its tokenizer, and the options of `translate`."""
    if arguments.engine == "auto":
        own: Any = find_engine_of(arguments.model_name_or_path)
        arguments.engine = own or "transformers"
    model, tokenizer, options = arguments.load()
    names = ("batch_size", "max_batch_tokens", "max_source_length")
    options |= {name: getattr(arguments, name) for name in names}
    return model, tokenizer, options | {"source_prefix": arguments.find_prefix(model), "progress": False}


def measure(arguments: BenchmarkArguments) -> list[list[str]]:
    """A row of cells for each model."""
    sources, references = map(list, zip(*read_pairs(arguments.test_file), strict=True))
    loaded = [load(each) for each in arguments.divide()]
    seconds: list[list[float]] = [[] for _ in loaded]
    found: list[list[str]] = [[] for _ in loaded]
    for _ in range(arguments.rounds):
        for number, (model, tokenizer, options) in enumerate(loaded):
            start = time.perf_counter()
            found[number] = translate(model, tokenizer, sources, **options)
            seconds[number].append(time.perf_counter() - start)
    target = arguments.target_lang or (getattr(loaded[0][0].config, "langs", None) or [None])[-1]
    bleu = Bleu.make_scorer(tokenize=find_bleu_tokenizer(None if target is None else [target]))
    first = statistics.median(seconds[0])
    rows = []
    for name, (model, *_), own, texts in zip(arguments.model_names, loaded, seconds, found, strict=True):
        millions = f"{model.num_parameters() / 1e6:.1f}M" if hasattr(model, "num_parameters") else ""
        scores = [scorer.corpus_score(texts, [references]).score for scorer in (bleu, Chrf.make_scorer())]
        median = statistics.median(own)
        speeds = [f"{len(sources) / median:,.0f}", f"{first / median:.2f}"]
        rows.append([Path(name).as_posix(), millions, *(f"{score:.2f}" for score in scores), *speeds])
    return rows


def run(arguments: BenchmarkArguments) -> None:
    """Measures and prints a table in Markdown."""
    if absent := [name for name in arguments.test_file if not Path(name).is_file()]:
        print(f"Skipped, since there is no {' and no '.join(absent)}.")
        return
    rows = measure(arguments)
    head = ["model", "parameters", "BLEU", "chrF", "sentences/s", "times the first"]
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |")


make_parser = partial(make_argument_parser, BenchmarkArguments, __doc__)
main = make_main(make_parser, run)


if __name__ == "__main__":
    main()
