r"""Measures how fast models of equal sizes generate, side by side in one run, and how much memory that takes.

    python scripts/benchmarks/benchmark_generation.py
    python scripts/benchmarks/benchmark_generation.py --size small base --batch_size 1 8 32 128 --output_file out.json
    python scripts/benchmarks/benchmark_generation.py --part memory --num_beams 4 --batch_size 128 --source_length 512
    python scripts/benchmarks/benchmark_generation.py --part sentences --model_name_or_path out/demo --test_file test.en
    python scripts/benchmarks/benchmark_generation.py --device cuda --dtype bfloat16 --size base --batch_size 1 32 128 \
        --side ours "ours, static" "CTranslate2 float16" --output_file gpu.json

The sides are this package's model, MarianMT, FSMT, models of the architectures of BART and T5, `torch.nn.Transformer`
with a plain search (it has no cache), and CTranslate2 in float32, int8, bfloat16 and float16 where it is installed and
has them. MarianMT and CTranslate2 compute the same function with the same weights as ours. "ours, static" is ours with
`cache_implementation="static"`: on a GPU its step is recorded as a CUDA graph, in the round that is not timed. MarianMT
and the others are run as they always are, since the library's beam search compiles nothing.

Part `speed`: generated tokens per second from random sources of --source_length tokens, the shortest half as long.
Every side generates --new_tokens tokens for every sentence: nothing ends early. All sides live in one process and take
turns; the first round is not timed, and the medians of the others count. A ratio is a side's median divided by
MarianMT's. Processor seconds tell more than seconds where other programs run too.

Part `memory`: megabytes that generating adds at its peak to what was there before, the model included; the same inputs
as in part `speed`. Each side has a process of its own.

Part `sentences`: seconds to translate a file of real sentences, where sentences end by themselves, with a trained model
of this package (`--model_name_or_path`) and the same weights in MarianMT and CTranslate2; and the share of sentences
that become the same as MarianMT's. "File order" is `generate` on batches of --sentences_batch_size lines as they
come, "whole file" is `vanilla_transformer.inference.translate.translate`, as scripts/translate.py does it with its
defaults.

--output_file gets everything as JSON; the tables that are printed go beside it, as Markdown (.md).
"""

import copy
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from benchmark_models import (
    MODELS,
    PAD,
    SIZES,
    SPECIAL_TOKENS,
    list_compute_types,
    make_for_ctranslate2,
    make_ours,
    set_search,
)
from benchmark_tools import Clock, PeakMemory, check_at_least_one, check_device, start_process, write_report
from transformers import AutoTokenizer

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.conversion.systems.marian import to_marian
from vanilla_transformer.data.lines import open_text
from vanilla_transformer.inference.translate import translate

REFERENCE = "MarianMT"
# The sides by their names, with the type that CTranslate2 computes in.
CTRANSLATE2 = {f"CTranslate2 {name}": name for name in ("float32", "int8", "bfloat16", "float16")}
STATIC = "ours, static"
SIDES = (*MODELS, STATIC, *CTRANSLATE2)
SAME_WEIGHTS = ("ours", STATIC, REFERENCE, *CTRANSLATE2)
DISTRIBUTIONS = ("vanilla-transformer", "transformers", "torch", "ctranslate2")

Results = list[dict[str, Any]]


@dataclass
class BenchmarkArguments:
    """What to measure, and at which sizes."""

    part: list[str] = field(
        default_factory=lambda: ["speed"],
        metadata={
            "help": "Parts to run: speed, memory, sentences. Default: speed.",
            "choices": ["speed", "memory", "sentences"],
        },
    )
    side: list[str] = field(
        default_factory=lambda: [name for name in SIDES if name != STATIC],
        metadata={
            "help": f"Sides besides MarianMT, to which all are compared. Default: all but {STATIC}.",
            "choices": list(SIDES),
        },
    )
    output_file: str | None = field(default=None, metadata={"help": "JSON file for the figures."})
    device: str = field(default="cpu", metadata={"help": "Where to measure: cpu (default) or cuda."})
    dtype: list[str] = field(
        default_factory=lambda: ["float32"],
        metadata={"help": "Of the weights: float32 (default), bfloat16.", "choices": ["float32", "bfloat16"]},
    )
    size: list[str] = field(
        default_factory=lambda: ["small"],
        metadata={"help": "tiny (to try this script), small (default), base, big (for a GPU).", "choices": list(SIZES)},
    )
    batch_size: list[int] = field(
        default_factory=lambda: [1, 32], metadata={"help": "Sentences generated at once. Default: 1 32."}
    )
    num_beams: list[int] = field(
        default_factory=lambda: [1, 4], metadata={"help": "Beams; 1 is greedy search. Default: 1 4."}
    )
    source_length: int = field(default=32, metadata={"help": "Tokens of the longest source. Default: 32."})
    new_tokens: int = field(default=32, metadata={"help": "Tokens to generate for each sentence. Default: 32."})
    rounds: int = field(default=5, metadata={"help": "Timed turns of each side. Default: 5."})
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Part sentences: a trained model of this package, with its tokenizer."}
    )
    test_file: str | None = field(
        default=None, metadata={"help": "Part sentences: source text, one sentence per line, .gz too."}
    )
    max_sentences: int | None = field(default=None, metadata={"help": "Part sentences: lines to read. Default: all."})
    sentences_batch_size: int = field(
        default=32, metadata={"help": "Part sentences: lines of a batch in file order. Default: 32."}
    )
    max_new_tokens: int = field(
        default=128, metadata={"help": "Part sentences: longest translation, in tokens. Default: 128."}
    )
    length_penalty: float = field(
        default=1.0, metadata={"help": "Part sentences: exponent of the length that divides scores. Default: 1.0."}
    )

    def __post_init__(self) -> None:
        names = ("rounds", "new_tokens", "batch_size", "num_beams", "sentences_batch_size", "max_new_tokens")
        check_at_least_one(self, names)
        if self.source_length < 2:
            raise ValueError(f"--source_length is {self.source_length}; it must be at least 2.")
        if "sentences" in self.part and None in (self.model_name_or_path, self.test_file):
            raise ValueError("--model_name_or_path and --test_file must be given for the part sentences.")
        check_device(self.device)
        chosen = {*self.side, REFERENCE}
        types = list_compute_types(self.device)
        if missing := [name for name, kind in CTRANSLATE2.items() if name in chosen and kind not in types]:
            reason = f"ctranslate2 is not installed or cannot compute so on {self.device}"
            print(f"Left out, since {reason}: {', '.join(missing)}.")
            chosen -= set(missing)
        self.side = [name for name in SIDES if name in chosen]


make_parser = partial(make_argument_parser, BenchmarkArguments, __doc__)


# Inputs and models of the parts "speed" and "memory"


@dataclass(frozen=True)
class Setting:
    """What all sides do at a time; sent to the processes that measure memory."""

    size: str
    dtype: str
    num_beams: int
    batch_size: int
    source_length: int
    new_tokens: int
    device: str

    @property
    def search(self) -> str:
        """The name of the search."""
        return "greedy" if self.num_beams == 1 else f"beam {self.num_beams}"

    def inputs(self) -> dict[str, torch.Tensor]:
        """Random sources (B, S) of all lengths from half of S to S, padded, and their mask."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch_size, self.source_length)
        ids = torch.randint(SPECIAL_TOKENS, SIZES[self.size].vocab_size, shape, generator=generator)
        lengths = torch.linspace(self.source_length, self.source_length / 2, self.batch_size).round()
        mask = torch.arange(self.source_length) < lengths[:, None]
        inputs = {"input_ids": ids.masked_fill(~mask, PAD), "attention_mask": mask.long()}
        return {name: tensor.to(self.device) for name, tensor in inputs.items()}


def make_settings(arguments: BenchmarkArguments) -> list[Setting]:
    """All combinations asked for, those of a model next to each other."""
    common = {name: getattr(arguments, name) for name in ("source_length", "new_tokens", "device")}
    return [
        Setting(size=size, dtype=dtype, num_beams=beams, batch_size=batch, **common)
        for size in arguments.size
        for dtype in arguments.dtype
        for beams in arguments.num_beams
        for batch in arguments.batch_size
    ]


def make_models(sides: Iterable[str], setting: Setting) -> dict[str, Any]:
    """Random models of the sides, of which those that can have the same weights."""
    torch.manual_seed(0)
    size, dtype = SIZES[setting.size], getattr(torch, setting.dtype)
    models: dict[str, Any] = {}
    ours = make_ours(size).to(device=setting.device, dtype=dtype).eval()
    for side in sides:
        if side in ("ours", STATIC):
            models[side] = ours if side == "ours" else copy.deepcopy(ours)
        elif side in CTRANSLATE2:
            models[side] = make_for_ctranslate2(ours, CTRANSLATE2[side], setting.device)
        elif side == REFERENCE:
            models[side] = to_marian(ours)
        else:
            models[side] = MODELS[side](size).to(device=setting.device, dtype=dtype).eval()
        if hasattr(models[side], "generation_config"):
            set_search(models[side], ends=False, is_static=side == STATIC)
    return models


def generate(model: Any, setting: Setting) -> torch.Tensor:
    """Generates (B, 1 + new tokens) with any of the models."""
    tokens: torch.Tensor = model.generate(
        **setting.inputs(), num_beams=setting.num_beams, max_new_tokens=setting.new_tokens
    )
    if tokens.shape != (setting.batch_size, 1 + setting.new_tokens):
        raise RuntimeError(f"{type(model).__name__} generated {tuple(tokens.shape)} tokens in setting {setting}.")
    return tokens.cpu()


# Part "speed"


def take_turns(tasks: dict[str, Callable[[], Any]], rounds: int, device: str) -> tuple[dict[str, Any], Results]:
    """Runs the tasks in turns; another one is the first in each round, and the first round is not timed.

    Returns:
        The results of the untimed round, and for each task a row with all times, in seconds, and their medians.
    """
    outputs = {side: task() for side, task in tasks.items()}
    watches: dict[str, list[Clock]] = {side: [] for side in tasks}
    sides = list(tasks)
    for number in range(rounds):
        first = number % len(sides)
        for side in sides[first:] + sides[:first]:
            with Clock(device) as watch:
                tasks[side]()
            watches[side].append(watch)
    rows: Results = []
    for side, of_side in watches.items():
        times = {name: [getattr(watch, name) for watch in of_side] for name in ("seconds", "processor_seconds")}
        rows.append({"side": side, **{name: statistics.median(values) for name, values in times.items()}})
        rows[-1]["rounds"] = times
    return outputs, rows


def add_ratios(rows: Results, names: Iterable[str]) -> None:
    """Adds to each row how many times MarianMT's figure its own is."""
    (reference,) = (row for row in rows if row["side"].startswith(REFERENCE) and row.get("is_reference", True))
    for row in rows:
        for name in names:
            row[f"{name}_over_marian"] = row[name] / reference[name] if reference[name] else None


def share_of_equal(ours: Iterable[Any], theirs: Iterable[Any]) -> float:
    """The share of sentences of which both have the same translation."""
    return statistics.mean(float(one == other) for one, other in zip(ours, theirs, strict=True))


def measure_speed(arguments: BenchmarkArguments) -> Results:
    """Part `speed`: every side in every setting."""
    results: Results = []
    models: dict[str, Any] = {}
    previous = None
    for setting in make_settings(arguments):
        if (setting.size, setting.dtype) != previous:
            models = make_models(arguments.side, setting)
            previous = (setting.size, setting.dtype)
        rows = measure_speed_in(setting, models, arguments.rounds)
        results += rows
        figures = (f"{row['side']} {row['tokens_per_second']:,.0f}" for row in rows)
        print(f"{setting.size} {setting.dtype} {setting.search} {setting.batch_size}:", ", ".join(figures), flush=True)
    return results


def measure_speed_in(setting: Setting, models: dict[str, Any], rounds: int) -> Results:
    """One row per side."""
    tasks: dict[str, Callable[[], Any]] = {side: partial(generate, model, setting) for side, model in models.items()}
    outputs, rows = take_turns(tasks, rounds, setting.device)
    for row in rows:
        num_tokens = setting.batch_size * setting.new_tokens
        row |= {**asdict(setting), "search": setting.search}
        row["tokens_per_second"] = num_tokens / row["seconds"]
        row["tokens_per_processor_second"] = num_tokens / row["processor_seconds"]
        if row["side"] in SAME_WEIGHTS:
            same = share_of_equal(outputs[row["side"]].tolist(), outputs[REFERENCE].tolist())
            row["share_equal_to_marian"] = same
    add_ratios(rows, ("tokens_per_second", "tokens_per_processor_second"))
    return rows


# Part "memory"


def serve_memory(side: str, setting: Setting, connection: Connection) -> None:
    """The process of one side: sends the memory that generating takes."""
    model = make_models([side], setting)[side]
    # What is loaded or allocated at the first use, of products of few rows or many, is no part of generating.
    tokens = torch.full((1, 32), SPECIAL_TOKENS, device=setting.device)
    model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), num_beams=setting.num_beams, max_new_tokens=2
    )
    with PeakMemory(setting.device) as memory:
        generate(model, setting)
    connection.send(memory.megabytes)


def measure_memory(arguments: BenchmarkArguments) -> Results:
    """Part `memory`: one row per side and setting, one process after the other."""
    results: Results = []
    for setting in make_settings(arguments):
        rows: Results = []
        for side in arguments.side:
            connection, process = start_process(serve_memory, side, setting)
            row = {"side": side, **asdict(setting), "search": setting.search, "peak_megabytes": connection.recv()}
            rows.append(row)
            process.join()
        add_ratios(rows, ["peak_megabytes"])
        results += rows
        print(
            f"{setting.size} {setting.dtype} {setting.search} {setting.batch_size}:",
            ", ".join(f"{row['side']} {row['peak_megabytes']:,.0f} MB" for row in rows),
            flush=True,
        )
    return results


# Part "sentences"


@dataclass
class Sentences:
    """A trained model in all its forms, and what it is to translate."""

    arguments: BenchmarkArguments
    lines: list[str]
    tokenizer: Any
    models: dict[str, Any]
    num_beams: int

    def in_file_order(self, side: str) -> list[str]:
        """Translates batches of lines as they come, as one does with `generate`."""
        translations: list[str] = []
        size = self.arguments.sentences_batch_size
        for start in range(0, len(self.lines), size):
            inputs = self.tokenizer(self.lines[start : start + size], padding=True, return_tensors="pt")
            tokens = self.models[side].generate(
                input_ids=inputs["input_ids"].to(self.arguments.device),
                attention_mask=inputs["attention_mask"].to(self.arguments.device),
                num_beams=self.num_beams,
                max_new_tokens=self.arguments.max_new_tokens,
            )
            translations += self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return translations

    def as_a_whole(self, side: str) -> list[str]:
        """Translates the file as this package does."""
        return translate(
            self.models[side],
            self.tokenizer,
            self.lines,
            progress=False,
            num_beams=self.num_beams,
            max_new_tokens=self.arguments.max_new_tokens,
        )

    def tasks(self) -> dict[str, Callable[[], list[str]]]:
        """What is timed, by the names of the rows."""
        tasks: dict[str, Callable[[], list[str]]] = {}
        for side in self.models:
            tasks[f"{side}, whole file"] = partial(self.as_a_whole, side)
            tasks[f"{side}, file order"] = partial(self.in_file_order, side)
        return tasks


def load_sentences(arguments: BenchmarkArguments, dtype: str) -> Sentences:
    """The file, and the trained model with its counterparts of the same weights.

    Raises:
        ValueError: If the file has no sentences, or MarianMT cannot be the same function.
    """
    folder = str(arguments.model_name_or_path)
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder, dtype=getattr(torch, dtype))
    ours: Any = model.to(arguments.device).eval()  # type: ignore[arg-type]
    marian = to_marian(ours)
    models: dict[str, Any] = {}
    for side in arguments.side:
        if side in CTRANSLATE2:
            models[side] = make_for_ctranslate2(ours, CTRANSLATE2[side], arguments.device)
        elif side in SAME_WEIGHTS:
            models[side] = {"ours": ours, REFERENCE: marian}.get(side) or copy.deepcopy(ours)
        if side in models:
            set_search(models[side], ends=True, length_penalty=arguments.length_penalty, is_static=side == STATIC)
    with open_text(str(arguments.test_file)) as file:
        lines = [line.strip() for line in file if line.strip()][: arguments.max_sentences]
    if not lines:
        raise ValueError(f"--test_file is {arguments.test_file}, which has no sentences.")
    return Sentences(arguments, lines, AutoTokenizer.from_pretrained(folder), models, arguments.num_beams[0])


def measure_sentences(arguments: BenchmarkArguments) -> Results:
    """Part `sentences`: one row per side, and way to batch, for each dtype and number of beams."""
    results: Results = []
    for dtype in arguments.dtype:
        sentences = load_sentences(arguments, dtype)
        for num_beams in arguments.num_beams:
            sentences.num_beams = num_beams
            translations, rows = take_turns(sentences.tasks(), arguments.rounds, arguments.device)
            reference = translations[f"{REFERENCE}, file order"]
            for row in rows:
                texts = translations[row["side"]]
                row |= {"dtype": dtype, "num_beams": num_beams, "sentences": len(texts)}
                row["is_reference"] = row["side"] == f"{REFERENCE}, file order"
                row["sentences_per_second"] = len(texts) / row["seconds"]
                row["sentences_per_processor_second"] = len(texts) / row["processor_seconds"]
                row["share_equal_to_marian"] = share_of_equal(texts, reference)
            add_ratios(rows, ("sentences_per_second", "sentences_per_processor_second"))
            results += rows
    return results


# Tables


def make_grid(results: Results, figure: str, title: str) -> str:
    """A Markdown table, a column per side and a row per setting: the figure, and how many times MarianMT's it is."""
    sides = list(dict.fromkeys(row["side"] for row in results))
    groups: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in results:
        key = (row["size"], row["dtype"], row["search"], row["batch_size"])
        ratio = row[f"{figure}_over_marian"]
        times = "" if ratio is None else f" ({ratio:.2f}x)"
        groups.setdefault(key, {})[row["side"]] = f"{row[figure]:,.0f}{times}"
    heads = ["model", "dtype", "search", "batch"]
    lines = [f"{title} (times MarianMT's)", "", f"| {' | '.join([*heads, *sides])} |"]
    lines.append(f"|{'---|' * len(heads)}{'---:|' * len(sides)}")
    for key, cells in groups.items():
        lines.append(f"| {' | '.join([*map(str, key), *(cells.get(side, '') for side in sides)])} |")
    return "\n".join(lines)


def make_sentences_table(results: Results) -> str:
    """A Markdown table with a row per side."""
    lines = [
        f"Translation of {results[0]['sentences']:,} sentences (times that of MarianMT in file order)",
        "",
        "| dtype | beams | side | seconds | sentences/s | per CPU second | same as MarianMT |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for row in results:
        speeds = " | ".join(
            f"{row[name]:,.1f} ({row[f'{name}_over_marian']:.2f}x)"
            for name in ("sentences_per_second", "sentences_per_processor_second")
        )
        lines.append(
            f"| {row['dtype']} | {row['num_beams']} | {row['side']} | {row['seconds']:.2f} | {speeds} "
            f"| {row['share_equal_to_marian']:.1%} |"
        )
    return "\n".join(lines)


def make_speed_tables(results: Results) -> str:
    """Tokens per second, and per second of all processors together."""
    seconds = make_grid(results, "tokens_per_second", "Generated tokens per second")
    return f"{seconds}\n\n{make_grid(results, 'tokens_per_processor_second', 'Generated tokens per CPU second')}"


def make_memory_table(results: Results) -> str:
    """Megabytes."""
    return make_grid(results, "peak_megabytes", "Peak megabytes that generating adds")


# The parts, by the names that --part takes: what measures, and what shows it.
PARTS: dict[str, tuple[Callable[[BenchmarkArguments], Results], Callable[[Results], str]]] = {
    "speed": (measure_speed, make_speed_tables),
    "memory": (measure_memory, make_memory_table),
    "sentences": (measure_sentences, make_sentences_table),
}


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments (`argv`, else the command line's), measure, print, and write the figures."""
    (arguments,) = make_parser().parse_args_into_dataclasses(args=argv)
    results: dict[str, Results] = {}
    tables = []
    for name in dict.fromkeys(arguments.part):
        measure, make_tables = PARTS[name]
        results[name] = measure(arguments)
        tables.append(make_tables(results[name]))
        print(f"\n{tables[-1]}\n", flush=True)
        if arguments.output_file is not None:
            # After each part, so that a long run that is interrupted leaves what it found.
            write_report(arguments.output_file, "benchmark_generation.py", argv, DISTRIBUTIONS, arguments, results)
            Path(arguments.output_file).with_suffix(".md").write_text("\n\n".join(tables) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
