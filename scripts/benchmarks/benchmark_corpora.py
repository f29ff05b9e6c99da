r"""Measures how many sentences a core translates in a second, and prints what a corpus of 10^9 sentences costs.

    python scripts/benchmarks/benchmark_corpora.py --model_name_or_path out/demo --test_file in.txt
    python scripts/benchmarks/benchmark_corpora.py --model_name_or_path out/demo --test_file in.txt --num_beams 4 \
        --num_sentences 4000 --num_processes 2 --price_per_core_hour 0.04

The lines of --test_file are repeated up to --num_sentences. `translate` runs on one process of one thread, on one
process of --num_processes threads, and under torchrun on --num_processes processes of one thread; of --repeats runs in
turn the median counts. What counts is the time that a corpus of twice the size takes longer, so that starting, loading
and the last parts' waiting are left out. The table has sentences per second, the same per core, and for 10^9 sentences
core-hours, days on --cores cores and the price. Below it stands where else the time goes: reading the corpus to divide
it, and joining the parts, both in one process. GPUs are not measured.
"""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from vanilla_transformer.commands.command_line import make_argument_parser, make_main
from vanilla_transformer.data.records import EVERYTHING, RecordFile
from vanilla_transformer.inference.outputs import Piece, check_records, write_translations
from vanilla_transformer.inference.translate import Translation
from vanilla_transformer.options import option

CORPUS = 10**9


@dataclass
class BenchmarkArguments:
    """What to translate, and on what."""

    model_name_or_path: str = option("Folder or Hub name of a sequence-to-sequence model.")
    test_file: str = option("UTF-8 text, one sentence per line.")
    engine: str = option("transformers or ctranslate2. Default: transformers.", "transformers")
    num_beams: int = option("Beams. Default: 1.", 1)
    num_sentences: int = option("Of the smaller corpus. Default: 2000.", 2000)
    num_processes: int = option("Processes, or threads. Default: 2.", 2)
    repeats: int = option("Runs of each. Default: 3.", 3)
    cores: int = option("For the days of the table. Default: 1000.", 1000)
    price_per_core_hour: float = option("For the price of the table. Default: 0.04.", 0.04)


@dataclass(frozen=True)
class Setting:
    """Processes, and threads of each."""

    processes: int
    threads: int

    @property
    def cores(self) -> int:
        """What it keeps busy."""
        return self.processes * self.threads


def time_translation(arguments: BenchmarkArguments, setting: Setting, source: Path, target: Path) -> float:
    """The seconds of the command from its start to its end."""
    command = [sys.executable]
    if setting.processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={setting.processes}"]
    command += ["-m", "vanilla_transformer", "translate", "--model_name_or_path", arguments.model_name_or_path]
    command += ["--engine", arguments.engine, "--num_beams", str(arguments.num_beams), "--device", "cpu"]
    command += ["--input_file", str(source), "--output_file", str(target), "--disable_tqdm"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(setting.threads)}
    start = time.perf_counter()
    subprocess.run(command, check=True, env=environment)
    seconds = time.perf_counter() - start
    target.unlink()
    return seconds


def write_lines(arguments: BenchmarkArguments, count: int, path: Path) -> Path:
    """The sentences of the test file, again and again."""
    lines = [line for line in Path(arguments.test_file).read_text(encoding="utf-8").splitlines() if line.strip()]
    path.write_text("".join(f"{line}\n" for line in islice(cycle(lines), count)), encoding="utf-8")
    return path


def measure(arguments: BenchmarkArguments, folder: Path) -> dict[Setting, float]:
    """Sentences per second of each setting; nan if there are too few to tell."""
    settings = dict.fromkeys([Setting(1, 1), Setting(1, arguments.num_processes), Setting(arguments.num_processes, 1)])
    count = arguments.num_sentences
    sources = [write_lines(arguments, count * times, folder / f"source-{times}.txt") for times in (1, 2)]
    seconds: dict[Setting, list[float]] = {setting: [] for setting in settings}
    for _ in range(arguments.repeats):
        for setting in settings:
            short, long = (time_translation(arguments, setting, path, folder / "target.txt") for path in sources)
            seconds[setting].append(long - short)
    medians = {setting: median(found) for setting, found in seconds.items()}
    # Where twice as many sentences took no longer, there were too few to tell.
    return {setting: count / found if found > 0 else float("nan") for setting, found in medians.items()}


def measure_files(arguments: BenchmarkArguments, folder: Path) -> tuple[float, float]:
    """Sentences per second of one process that checks and divides a corpus, and of one that joins its parts."""
    count = 100 * arguments.num_sentences
    file = RecordFile(str(write_lines(arguments, count, folder / "corpus.txt")))
    start = time.perf_counter()
    check_records([file], None)
    file.divide(file.scan(), 4096)
    divided = time.perf_counter()
    translations = ([Translation(text)] for text in file.texts(EVERYTHING))
    options: Any = {"files": [file], "target_column": "translation", "n_best": None}
    write_translations(folder / "joined.txt", [Piece(file, EVERYTHING, translations)], **options)
    return count / (divided - start), count / (time.perf_counter() - divided)


def make_table(arguments: BenchmarkArguments, speeds: dict[Setting, float]) -> str:
    """The rows in Markdown."""
    days = f"days on {arguments.cores} cores"
    rows = [f"| processes x threads | sentences/s | of a core | core-hours of 10^9 | {days} | price |"]
    rows.append("|---|---|---|---|---|---|")
    for setting, speed in speeds.items():
        hours = CORPUS / speed * setting.cores / 3600
        cells = [f"{setting.processes} x {setting.threads}", f"{speed:,.1f}", f"{speed / setting.cores:,.1f}"]
        cells += [
            f"{hours:,.0f}",
            f"{hours / arguments.cores / 24:,.2f}",
            f"{hours * arguments.price_per_core_hour:,.0f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, "| GPU | not measured | | | | |"])


def run(arguments: BenchmarkArguments) -> None:
    """Measures and prints."""
    with tempfile.TemporaryDirectory() as name:
        print(make_table(arguments, measure(arguments, Path(name))))
        dividing, joining = measure_files(arguments, Path(name))
    for what, speed in (("checking and dividing", dividing), ("joining", joining)):
        print(f"{what} in one process: {speed:,.0f} sentences/s, {CORPUS / speed / 3600:,.2f} hours for 10^9")


make_parser = partial(make_argument_parser, BenchmarkArguments, __doc__)
main = make_main(make_parser, run)


if __name__ == "__main__":
    main()
