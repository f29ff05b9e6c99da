"""What the benchmark scripts share: checks, processes, peak memory, the clock, and what repeating a run takes."""

import json
import multiprocessing
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from vanilla_transformer.processor import describe_processor


def check_at_least_one(arguments: Any, names: Iterable[str]) -> None:
    """Refuses arguments below one; `None` stands for a default that is found later.

    Args:
        arguments: A dataclass of arguments.
        names: Those that are numbers, or lists of them.

    Raises:
        ValueError: If one is smaller.
    """
    for name in names:
        value = getattr(arguments, name)
        if value is not None and min(value if isinstance(value, list) else [value]) < 1:
            raise ValueError(f"--{name} is {value}; it must be at least 1.")


def start_process(serve: Callable[..., None], *arguments: Any) -> tuple[Connection, BaseProcess]:
    """Starts a fresh process, which ends with this one.

    Args:
        serve: What it does; its last argument is its end of a connection.
        *arguments: The arguments before that.

    Returns:
        This process's end, and the process.
    """
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=serve, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    return connection, process


def check_device(device: str) -> None:
    """Refuses a device that is not here, or on which memory cannot be measured.

    Raises:
        ValueError: If the device is neither cpu nor cuda, or not usable.
    """
    kind = device.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"--device is {device}; it must be cpu or cuda.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, but torch finds no such device.")
    if kind == "cpu" and not Path("/proc/self/clear_refs").exists():
        raise ValueError("--device is cpu, of which only Linux tells the peak memory of a single step.")


class PeakMemory:
    """Megabytes that a block of code adds at its peak to what its process, or the GPU, held before."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        self.device = device
        self.megabytes = 0.0

    def __enter__(self) -> "PeakMemory":
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            # Linux takes this for: forget the peak so far.
            Path("/proc/self/clear_refs").write_text("5")
            self._before = self._read_status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        peak = torch.cuda.max_memory_allocated(self.device) if self.cuda else self._read_status("VmHWM")
        self.megabytes = (peak - self._before) / 2**20

    @staticmethod
    def _read_status(name: str) -> int:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(status[name].split()[0]) * 1024


class Clock:
    """Seconds, and processor seconds of all threads, that a block of code takes; a GPU's work included."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds = self.processor_seconds = 0.0

    def __enter__(self) -> "Clock":
        self._wait()
        self._start, self._processor_start = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds = time.perf_counter() - self._start
        self.processor_seconds = time.process_time() - self._processor_start

    def _wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)


def describe_run(script: str, argv: list[str] | None, distributions: Sequence[str]) -> dict[str, Any]:
    """What another machine needs to know to repeat the run; the version of what is not installed is null."""

    def find_version(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    words = [f"scripts/benchmarks/{script}", *(sys.argv[1:] if argv is None else argv)]
    return {
        "command": shlex.join(["python", *words]),
        "versions": {"python": platform.python_version(), **{name: find_version(name) for name in distributions}},
        "machine": platform.platform(),
        "processor": describe_processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
    }


def write_report(
    file: str | None, script: str, argv: list[str] | None, distributions: Sequence[str], arguments: Any, results: Any
) -> None:
    """Writes results (JSON's kinds of values) and how to repeat them; no file, no report."""
    if file is not None:
        report = {**describe_run(script, argv, distributions), "arguments": asdict(arguments), "results": results}
        Path(file).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
