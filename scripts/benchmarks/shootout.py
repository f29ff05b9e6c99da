r"""Train the same model on the same files with four systems, and compare quality, speed and memory.

    python scripts/benchmarks/shootout.py --data_folder data/multi30k_bpe/en-de
    python scripts/benchmarks/shootout.py --data_folder data/multi30k_bpe/en-de --systems ours marian --seeds 1 2 \
        --updates 4000 --batch_tokens 8192 --threads 4 --output_dir out/short

The systems are JoeyNMT 2.3, OpenNMT-py 3.5.1, MarianMT trained by transformers' own Seq2SeqTrainer, and this package.
Each is installed by pip into an environment of its own under --environments, all with the versions of torch and
transformers that run this script; it was tried with Python 3.11. The folder of data holds train, valid and test files,
such as train.en(.gz) and test.2016.de(.gz), whose sentences are cut into pieces ("pul@@ ley").

The systems take turns: each trains with the first seed, then each with the second. What is finished is not run again:
give the same command after an interruption. Results are JSON files under --output_dir, and the table is table.md there.
Everything runs on the CPU. Run nothing else meanwhile.

What is the same: the shape (4 + 4 layers, d_model 128, ffn 256, 4 heads, biases, sinusoidal positions, one table for
all embeddings and the output), the pieces, dropout 0.3, label smoothing 0.1, Adam(0.9, 0.98), the number of updates,
the peak of the learning rate and the update where it is reached, the mean of the loss over tokens, no clipping of
gradients, float32, the weights of the last update, beam 5, 64 sentences in a batch of a translation, and its limit of
128 tokens. Nothing is validated or saved in between, and no checkpoints are averaged: two of the systems have no
command for that.

What differs by design:

- Batches of --batch_tokens: this package and OpenNMT-py fill each side up to it with padding, in sorted batches.
  Seq2SeqTrainer counts pairs: it gets as many as this package's batches have on average. JoeyNMT does not sort, so more
  of its batch is padding: its limit is raised until its batches have as many pairs on average. The table tells the real
  target tokens of an update.
- OpenNMT-py normalises before each sub-layer and once at the end of a stack, the others after each sub-layer. Its
  output layer has a bias. It reads the corpus ahead as a whole, as the others do.
- Dropout is on embeddings and on the outputs of sub-layers everywhere. JoeyNMT and OpenNMT-py drop also inside the
  feed-forward layer, JoeyNMT also attention weights.
- Initial values, the epsilon of Adam and that of the norms are each system's own. This package's initial values are
  halved (initializer_gain=0.5), as its documentation advises for translation.
- Warm-up: the rate grows linearly and falls with the inverse square root everywhere. OpenNMT-py's schedule has a factor
  in place of a peak, which is set so that the rates agree. The library's schedule is one update late.
- The length penalty is 1: MarianMT divides by the length, the others by GNMT's (5 + length) / 6.

How it is measured: updates/s from the first line of the log to the last one, so that imports are not in it; target
tokens/s are updates/s times the real target tokens of an update, with the end mark and without padding; memory is the
resident memory of the training's processes, at its peak until the last update; a translation is the whole command on
the test set, and its start the same command on one sentence. BLEU is sacreBLEU's with tokenize none, after the pieces
are joined.
"""

import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import threading
import time
import venv
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import psutil  # type: ignore[import-untyped]
import sacrebleu
from benchmark_tools import check_at_least_one, check_device
from shootout_systems import SYSTEMS, Command, Run, Settings, System

from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.data.batching import TokenBatchSampler
from vanilla_transformer.data.lines import read_lines
from vanilla_transformer.inference.evaluate import join_pieces
from vanilla_transformer.processor import describe_processor

MARK = "@@"
PARTS, SIDES = ("train", "valid", "test"), ("src", "tgt")
LOG_LINES = 40  # of a training
SAMPLE_SECONDS = 0.25  # between two looks at the memory; more of them would take time from what is measured
# Columns of the table: title, name in the results, form.
COLUMNS = (
    ("BLEU", "bleu", "{:.2f}"),
    ("updates/s", "updates_per_second", "{:.2f}"),
    ("target tokens/s", "target_tokens_per_second", "{:,.0f}"),
    ("target tokens/update", "target_tokens_per_update", "{:,.0f}"),
    ("peak memory (MB)", "peak_megabytes", "{:,.0f}"),
    ("translation (s)", "translation_seconds", "{:.1f}"),
    ("its start (s)", "translation_start_seconds", "{:.1f}"),
    ("parameters", "parameters", "{:,.0f}"),
)

Result = dict[str, Any]


@dataclass
class ShootoutArguments:
    """What to train, and where."""

    data_folder: str = field(
        default="data/multi30k_bpe/en-de",
        metadata={"help": "Folder of train, valid and test files. Default: data/multi30k_bpe/en-de."},
    )
    source_lang: str = field(default="en", metadata={"help": "How names of source files end. Default: en."})
    target_lang: str = field(default="de", metadata={"help": "How names of target files end. Default: de."})
    systems: list[str] = field(
        default_factory=lambda: list(SYSTEMS),
        metadata={"help": f"Which systems. Default: {', '.join(SYSTEMS)}.", "choices": list(SYSTEMS)},
    )
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3], metadata={"help": "Default: 1 2 3."})
    updates: int = field(default=8000, metadata={"help": "Updates of each training. Default: 8000."})
    batch_tokens: int = field(default=4096, metadata={"help": "Tokens of a batch, of each side. Default: 4096."})
    warmup_steps: int = field(default=2000, metadata={"help": "Updates of the warm-up. Default: 2000."})
    learning_rate: float = field(default=0.005, metadata={"help": "At the end of the warm-up. Default: 0.005."})
    threads: int = field(
        default_factory=lambda: os.cpu_count() or 1, metadata={"help": "Of each process. Default: one for each core."}
    )
    environments: str = field(
        default="out/environments", metadata={"help": "Folder for the environments. Default: out/environments."}
    )
    output_dir: str = field(default="out/shootout", metadata={"help": "Folder of results. Default: out/shootout."})

    def __post_init__(self) -> None:
        check_device("cpu")
        check_at_least_one(self, ("updates", "batch_tokens", "warmup_steps", "threads"))
        if self.updates < 2:
            raise ValueError("--updates is 1; it must be at least 2, between which the time is taken.")
        if self.learning_rate <= 0:
            raise ValueError(f"--learning_rate is {self.learning_rate}; it must be positive.")


make_parser = partial(make_argument_parser, ShootoutArguments, __doc__)


# The data


def find_file(folder: Path, part: str, language: str) -> Path:
    """The one file of a part of the corpus, compressed or not: test.2016.de.gz is the test file of de."""
    found = sorted({*folder.glob(f"{part}*.{language}"), *folder.glob(f"{part}*.{language}.gz")})
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ValueError(f"{folder} must have one file {part}*.{language} or {part}*.{language}.gz; it has {names}.")
    return found[0]


def prepare_data(source: Path, languages: tuple[str, str], target: Path) -> None:
    """Writes train.src, train.tgt and so on as plain text, and vocabulary.txt with the pieces of both languages."""
    target.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    for part in PARTS:
        sides = [read_lines(find_file(source, part, language)) for language in languages]
        if len(sides[0]) != len(sides[1]):
            raise ValueError(f"The {part} files have {len(sides[0])} and {len(sides[1])} lines: they must be aligned.")
        for side, lines in zip(SIDES, sides, strict=True):
            (target / f"{part}.{side}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            if part == "train":
                counts.update(piece for line in lines for piece in line.split())
    pieces = sorted(counts, key=lambda piece: (-counts[piece], piece))
    (target / "vocabulary.txt").write_text("".join(f"{piece}\n" for piece in pieces), encoding="utf-8")


def describe_data(folder: Path) -> str:
    """A short hash of the prepared files: results of other files are no results of these."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def measure_lengths(data: Path) -> list[list[int]]:
    """The tokens of each source, and of each target, of the training, end marks included."""
    return [[len(line.split()) + 1 for line in read_lines(data / f"train.{side}")] for side in SIDES]


def count_pairs_per_batch(lengths: list[list[int]], batch_tokens: int) -> int:
    """How many pairs this package's batches of so many tokens have on average."""
    sampler = TokenBatchSampler(*lengths, max_source_tokens=batch_tokens, max_target_tokens=batch_tokens)
    return max(1, round(len(lengths[0]) / len(sampler)))


def count_unsorted_tokens(lengths: list[list[int]], pairs_per_batch: int) -> int:
    """The tokens of the longer side, with padding, of so many pairs in any order, on average."""
    sizes = list(map(max, *lengths))
    random.Random(0).shuffle(sizes)
    batches = [sizes[start : start + pairs_per_batch] for start in range(0, len(sizes), pairs_per_batch)]
    return round(pairs_per_batch * statistics.mean(map(max, batches)))


# Environments


def make_environment(folder: Path, system: System) -> Path:
    """Installs a system into an environment of its own, unless it is there; returns the environment's Python."""
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    requirements = system.list_requirements()
    if stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")) == requirements:
        return python
    print(f"Installing {system.title} into {folder} ...", flush=True)
    venv.create(folder, clear=True, with_pip=True)
    for words in requirements:
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *words], check=True)
    stamp.write_text(json.dumps(requirements), encoding="utf-8")
    return python


def find_versions(python: Path, system: System) -> dict[str, str]:
    """The versions of the system, of torch and of Python in an environment."""
    code = "import json, platform, sys; from importlib.metadata import version; "
    code += "print(json.dumps({'python': platform.python_version(), **{name: version(name) for name in sys.argv[1:]}}))"
    words = [str(python), "-c", code, system.distribution, "torch"]
    return dict(json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout))


# Running


def read_peak(process: psutil.Process) -> float:
    """The most megabytes that a process was resident with so far: Linux keeps this; 0 if the process has ended."""
    try:
        text = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM:")) / 1024


class TreeMemory:
    """The peak of the resident megabytes of a process and all that it started, while a block of code runs."""

    def __init__(self, process: psutil.Process) -> None:
        self.process = process
        self.megabytes = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "TreeMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            try:
                tree = [self.process, *self.process.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            self.megabytes = max(self.megabytes, sum(map(read_peak, tree)))


@dataclass(frozen=True)
class Tick:
    """A line of a log that names an update: when it came, and the peak of the memory so far."""

    update: int
    seconds: float
    megabytes: float


@contextmanager
def started(command: Command, environment: dict[str, str]) -> Iterator[tuple[psutil.Popen, TextIO]]:
    """A process, and what it prints; it ends with the block, and so does all that it started."""
    with ExitStack() as files:
        stdin = files.enter_context(command.stdin.open("rb")) if command.stdin else subprocess.DEVNULL
        stdout = files.enter_context(command.stdout.open("wb")) if command.stdout else subprocess.PIPE
        process = psutil.Popen(
            command.words,
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE if command.stdout else subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        printed = files.enter_context(process.stderr if command.stdout else process.stdout)
        try:
            yield process, printed
        finally:
            if process.poll() is None:
                for each in [*process.children(recursive=True), process]:
                    each.kill()
            process.wait()


def run(command: Command, system: System, log_file: Path, threads: int) -> list[Tick]:
    """Runs a command, keeps what it prints, and returns when it named which update.

    Raises:
        RuntimeError: If the command fails.
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    environment = {**os.environ, **dict.fromkeys(names, str(threads)), "PYTHONUNBUFFERED": "1"}
    # The older systems read their own checkpoints as pickles. These were just written.
    environment |= {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "TOKENIZERS_PARALLELISM": "false"}
    ticks = []
    with (
        started(command, environment) as (process, printed),
        TreeMemory(process) as memory,
        log_file.open("w", encoding="utf-8") as log,
    ):
        for line in printed:
            log.write(line)
            if found := system.update.search(line):
                update = int(found[1].replace(",", ""))
                ticks.append(Tick(update, time.perf_counter(), memory.megabytes))
        status = process.wait()
    if status:
        last = "\n".join(log_file.read_text(encoding="utf-8").splitlines()[-20:])
        raise RuntimeError(f"{system.title} failed with status {status}; the log is {log_file}:\n{last}")
    return ticks


def measure_speed(ticks: list[Tick]) -> float:
    """Updates per second, from the first line to the last."""
    if len({tick.update for tick in ticks}) < 2:
        raise ValueError(f"The log names {len(ticks)} updates: the time is taken between two of them.")
    return (ticks[-1].update - ticks[0].update) / (ticks[-1].seconds - ticks[0].seconds)


def score(data: Path, translations: list[str]) -> float:
    """BLEU of translations in pieces."""
    references = join_pieces(read_lines(data / "test.tgt"), MARK)
    if len(translations) != len(references):
        raise ValueError(f"There are {len(translations)} translations of {len(references)} sentences.")
    hypotheses = join_pieces(translations, MARK)
    return float(sacrebleu.corpus_bleu(hypotheses, [references], tokenize="none", force=True).score)


def train_and_measure(system: System, one: Run, threads: int) -> Result:
    """Trains, translates the test set, and tells what the table needs; an earlier attempt's files are deleted."""
    shutil.rmtree(one.folder, ignore_errors=True)
    one.folder.mkdir(parents=True)
    system.prepare(one)
    log = one.folder / "train.log"
    ticks = run(system.train(one), system, log, threads)
    updates_per_second = measure_speed(ticks)
    counts = system.count(one, log.read_text(encoding="utf-8"))
    first, test = one.folder / "first.src", one.data / "test.src"
    first.write_text(f"{read_lines(test)[0]}\n", encoding="utf-8")
    seconds = {}
    for source in (first, test):
        output = one.folder / f"{source.stem}.translation"
        start = time.perf_counter()
        run(system.translate(one, source, output), system, output.with_suffix(".log"), threads)
        seconds[source] = time.perf_counter() - start
    per_update = counts.target_tokens / one.settings.updates
    return {
        "bleu": score(one.data, read_lines(one.folder / "test.translation")),
        "updates_per_second": updates_per_second,
        "target_tokens_per_second": updates_per_second * per_update,
        "target_tokens_per_update": per_update,
        "peak_megabytes": ticks[-1].megabytes,
        "translation_seconds": seconds[test],
        "translation_start_seconds": seconds[first],
        "parameters": counts.parameters,
    }


def load_result(path: Path, conditions: dict[str, Any]) -> Result | None:
    """A finished result, if there is one.

    Raises:
        ValueError: If it was measured under other conditions.
    """
    if not path.exists():
        return None
    result: Result = json.loads(path.read_text(encoding="utf-8"))
    other = {name: value for name, value in result["conditions"].items() if conditions[name] != value}
    if other:
        now = {name: conditions[name] for name in other}
        raise ValueError(f"{path} was measured with {other}, not with {now}: give another --output_dir.")
    return result


# The table


def format_cell(values: list[float], form: str) -> str:
    """The mean, and the standard deviation of several values where it is not 0."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    mean = form.format(statistics.mean(values))
    return f"{mean} ± {form.format(deviation)}" if deviation else mean


def make_table(results: list[Result]) -> str:
    """A Markdown table of a row for each system, and a line with seeds, machine and versions."""
    lines = [f"| system | {' | '.join(title for title, *_ in COLUMNS)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    versions = []
    for name in dict.fromkeys(result["system"] for result in results):
        own = [result for result in results if result["system"] == name]
        cells = [format_cell([result[key] for result in own], form) for _, key, form in COLUMNS]
        lines.append(f"| {SYSTEMS[name].title} | {' | '.join(cells)} |")
        seeds = ", ".join(str(result["seed"]) for result in own)
        described = ", ".join(" ".join(item) for item in own[0]["versions"].items())
        versions.append(f"- {SYSTEMS[name].title}: {described}; seeds {seeds}")
    first = results[0]
    conditions = ", ".join(f"{key} {value}" for key, value in first["conditions"].items())
    return "\n".join([*lines, "", f"Mean ± standard deviation. {first['processor']}; {conditions}.", "", *versions])


def run_all(arguments: ShootoutArguments, output: Path, settings: Settings) -> list[Result]:
    """Lets the systems take turns; each result is written as soon as it is there, and so is the table so far."""
    conditions = {**asdict(settings), "threads": arguments.threads, "data": describe_data(output / "data")}
    results = []
    for seed in arguments.seeds:
        for name in arguments.systems:
            system, path = SYSTEMS[name], output / f"{name}-{seed}.json"
            result = load_result(path, conditions)
            if result is None:
                python = make_environment(Path(arguments.environments).resolve() / name, system)
                print(f"Training {system.title}, seed {seed} ...", flush=True)
                one = Run(output / "data", output / f"{name}-{seed}", python, settings, seed)
                result = {"system": name, "seed": seed, "conditions": conditions, "processor": describe_processor()}
                result |= {"versions": find_versions(python, system)}
                result |= train_and_measure(system, one, arguments.threads)
                path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
            results.append(result)
            (output / "table.md").write_text(make_table(results) + "\n", encoding="utf-8")
    return results


def main(argv: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = make_parser()
    try:
        (arguments,) = parser.parse_args_into_dataclasses(argv)
        output = Path(arguments.output_dir).resolve()
        languages = (arguments.source_lang, arguments.target_lang)
        prepare_data(Path(arguments.data_folder), languages, output / "data")
    except ValueError as error:
        parser.error(str(error))
    lengths = measure_lengths(output / "data")
    pairs_per_batch = count_pairs_per_batch(lengths, arguments.batch_tokens)
    settings = Settings(
        updates=arguments.updates,
        batch_tokens=arguments.batch_tokens,
        pairs_per_batch=pairs_per_batch,
        unsorted_batch_tokens=count_unsorted_tokens(lengths, pairs_per_batch),
        warmup_steps=arguments.warmup_steps,
        learning_rate=arguments.learning_rate,
        logging_steps=max(1, arguments.updates // LOG_LINES),
    )
    try:
        results = run_all(arguments, output, settings)
    except (RuntimeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    print(make_table(results))


if __name__ == "__main__":
    main()
