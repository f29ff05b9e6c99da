r"""Measures how fast a file of 10,000 lines is translated here and elsewhere, with the same weights, side by side.

    python scripts/benchmarks/benchmark_translation.py --model_name_or_path out/my-model --test_file test.en
    python scripts/benchmarks/benchmark_translation.py --model_name_or_path out/demo --output_file out.json

"Whole file" is what scripts/translate.py does with its defaults: it reads the file line by line, puts lines of like
length together within a window, and fills batches to a budget of tokens. "File order" is what one writes oneself: a
loop that gives `generate` --batch_size lines at a time as they come. MarianMT has the model's own weights, renamed and
with the dimensions in its order of sinusoids, so that both compute the same function; both search with the library's
scores and the same limit. Without --test_file the lines are those of the built-in corpus; too few are repeated.

Every side has a process of its own; they take turns. Memory is what translating adds at its peak to what the process
held before, the model included. Processor seconds tell more than seconds where other programs run too.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from benchmark_models import set_search
from benchmark_tools import Clock, PeakMemory, check_at_least_one, check_device, start_process, write_report
from transformers import AutoTokenizer

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.conversion.systems.marian import to_marian
from vanilla_transformer.data.lines import open_text
from vanilla_transformer.inference.translate import one_line, translate_lines

DISTRIBUTIONS = ("vanilla-transformer", "transformers", "torch", "tokenizers")
REFERENCE = "MarianMT, file order"
# The sides by their names: whether the model is MarianMT, and whether the file is translated as a whole.
SIDES = {
    "ours, whole file": (False, True),
    "ours, file order": (False, False),
    "MarianMT, whole file": (True, True),
    REFERENCE: (True, False),
}
SOURCE = "source.txt"
WARM_UP_LINES = 32

Results = list[dict[str, Any]]
# Seconds, processor seconds of all threads, peak megabytes.
Measurement = tuple[float, float, float]


@dataclass
class BenchmarkArguments:
    """What to translate, with which model, and how."""

    model_name_or_path: str = field(metadata={"help": "Folder of a trained model of this package."})
    test_file: str | None = field(
        default=None, metadata={"help": "UTF-8 text, one sentence per line, .gz too. Default: the built-in corpus."}
    )
    max_lines: int = field(default=10_000, metadata={"help": "Lines to translate. Default: 10000."})
    side: list[str] = field(
        default_factory=lambda: list(SIDES),
        metadata={"help": "Sides to measure. Default: all.", "choices": list(SIDES)},
    )
    num_beams: int = field(default=4, metadata={"help": "Beams. Default: 4."})
    max_new_tokens: int = field(default=128, metadata={"help": "Limit of a translation, in tokens. Default: 128."})
    batch_size: int = field(default=32, metadata={"help": "Lines of a batch in file order. Default: 32."})
    rounds: int = field(default=1, metadata={"help": "Times that each side translates the file. Default: 1."})
    device: str = field(default="cpu", metadata={"help": "Where to measure: cpu (default) or cuda."})
    dtype: str = field(
        default="float32", metadata={"help": "float32 (default) or bfloat16.", "choices": ["float32", "bfloat16"]}
    )
    output_file: str | None = field(default=None, metadata={"help": "JSON file for the figures."})

    def __post_init__(self) -> None:
        check_at_least_one(self, ("max_lines", "num_beams", "max_new_tokens", "batch_size", "rounds"))
        check_device(self.device)


make_parser = partial(make_argument_parser, BenchmarkArguments, __doc__)


def write_lines(arguments: BenchmarkArguments, path: Path) -> None:
    """Writes the lines to be translated, repeated where they are too few.

    Raises:
        ValueError: If there are none.
    """
    if arguments.test_file is not None:
        with open_text(arguments.test_file) as file:
            lines = [line.strip() for line in islice(file, arguments.max_lines)]
    else:
        # Its generators are needed for nothing else.
        from vanilla_transformer.data.numbers_and_dates import numbers_and_dates

        lines = numbers_and_dates(source_lang="en", target_lang="de", split="test")["source"]
    lines = [line for line in lines if line]
    if not lines:
        raise ValueError(f"--test_file is {arguments.test_file}, which has no sentences.")
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(one_line(line) + "\n" for line in islice(cycle(lines), arguments.max_lines))


class Side:
    """One way to translate a file.

    Args:
        name: One of `SIDES`.
        arguments: What to do.
    """

    def __init__(self, name: str, arguments: BenchmarkArguments) -> None:
        is_marian, is_whole = SIDES[name]
        dtype = getattr(torch, arguments.dtype)
        folder = arguments.model_name_or_path
        model: Any = VanillaTransformerForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        model = model.to(arguments.device).eval()
        self.model: Any = to_marian(model) if is_marian else model
        set_search(self.model, ends=True)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.batch_size = arguments.batch_size
        self.search: dict[str, Any] = {"num_beams": arguments.num_beams, "max_new_tokens": arguments.max_new_tokens}
        self.translate: Callable[..., None] = self.as_a_whole if is_whole else self.in_file_order

    def as_a_whole(self, source: Path, target: Path, max_lines: int | None = None) -> None:
        """Translates a file as this package does."""
        with open_text(source) as lines, open(target, "w", encoding="utf-8", newline="\n") as file:
            found = translate_lines(self.model, self.tokenizer, islice(lines, max_lines), progress=False, **self.search)
            file.writelines(line + "\n" for line in found)

    def in_file_order(self, source: Path, target: Path, max_lines: int | None = None) -> None:
        """Translates a file by giving `generate` some lines after the others."""
        with open_text(source) as lines, open(target, "w", encoding="utf-8", newline="\n") as file:
            remaining = islice(lines, max_lines)
            while batch := [line.rstrip("\n") for line in islice(remaining, self.batch_size)]:
                inputs = self.tokenizer(batch, padding=True, return_tensors="pt").to(self.model.device)
                tokens = self.model.generate(
                    input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **self.search
                )
                texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
                file.writelines(one_line(text) + "\n" for text in texts)


def serve(name: str, arguments: BenchmarkArguments, source: Path, connection: Connection) -> None:
    """The process of one side: translates the file whenever it is told where to, and sends what that took."""
    side = Side(name, arguments)
    side.translate(source, connection.recv(), WARM_UP_LINES)
    connection.send(None)
    while target := connection.recv():
        with PeakMemory(arguments.device) as memory, Clock(arguments.device) as clock:
            side.translate(source, target)
        connection.send((clock.seconds, clock.processor_seconds, memory.megabytes))


def measure(arguments: BenchmarkArguments, folder: Path) -> Results:
    """Lets the sides take turns, and returns a row for each."""
    targets = {name: folder / f"{number}.txt" for number, name in enumerate(arguments.side)}
    connections = {name: start_process(serve, name, arguments, folder / SOURCE)[0] for name in arguments.side}
    found: dict[str, list[Measurement]] = {name: [] for name in arguments.side}
    # The first time is for what is loaded or chosen at the first use.
    for number in range(1 + arguments.rounds):
        for name, connection in connections.items():
            connection.send(targets[name])
            measured = connection.recv()
            if number > 0:
                found[name].append(measured)
                print(f"{name}: {measured[0]:.1f} s, {measured[1]:.1f} processor s", flush=True)
    for connection in connections.values():
        connection.send(None)
    translations = {name: target.read_text(encoding="utf-8").split("\n")[:-1] for name, target in targets.items()}
    return make_rows(found, translations)


def make_rows(found: dict[str, list[Measurement]], translations: dict[str, list[str]]) -> Results:
    """One row per side: its medians, and what they are against the reference's where that has been measured."""
    rows: Results = []
    for name, measurements in found.items():
        seconds, processor_seconds, _ = map(statistics.median, zip(*measurements, strict=True))
        row: dict[str, Any] = {"side": name, "seconds": seconds, "processor_seconds": processor_seconds}
        row["sentences_per_second"] = len(translations[name]) / seconds
        row["peak_megabytes"] = max(megabytes for _, _, megabytes in measurements)
        row["rounds"] = measurements
        rows.append(row)
    reference = next((row for row in rows if row["side"] == REFERENCE), None)
    if reference is None:
        return rows
    for row in rows:
        pairs = zip(translations[row["side"]], translations[REFERENCE], strict=True)
        row["speedup"] = reference["seconds"] / row["seconds"]
        row["processor_speedup"] = reference["processor_seconds"] / row["processor_seconds"]
        row["same_as_reference"] = statistics.mean(float(one == other) for one, other in pairs)
    return rows


def make_table(rows: Results) -> str:
    """The rows as Markdown."""
    lines = [
        "| side | sentences/s | times MarianMT in file order | in processor seconds | peak MB | same translations |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [row["side"], f"{row['sentences_per_second']:.1f}"]
        cells += [f"{row[name]:.2f}" if name in row else "" for name in ("speedup", "processor_speedup")]
        cells += [f"{row['peak_megabytes']:,.0f}"]
        cells += [f"{row['same_as_reference']:.1%}" if "same_as_reference" in row else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments (`argv`, else the command line's), measure, and print a table."""
    parser = make_parser()
    with TemporaryDirectory() as folder:
        try:
            (arguments,) = parser.parse_args_into_dataclasses(args=argv)
            write_lines(arguments, Path(folder) / SOURCE)
        except (FileNotFoundError, ValueError) as error:
            parser.error(str(error))
        rows = measure(arguments, Path(folder))
    print(f"\n{arguments.max_lines:,} lines, {arguments.num_beams} beams, {arguments.dtype} on {arguments.device}\n")
    print(make_table(rows))
    write_report(arguments.output_file, "benchmark_translation.py", argv, DISTRIBUTIONS, arguments, rows)


if __name__ == "__main__":
    main()
