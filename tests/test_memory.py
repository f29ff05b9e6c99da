"""Freed memory that stays with the process."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")

# As a beam search does: tensors of some megabytes come together, and go together.
PROGRAM = """
import sys, torch
from pathlib import Path
from vanilla_transformer.memory import keep_freed_memory
def megabytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
def step():
    tensors = [torch.ones(4, 2**20) for _ in range(4)]
print(keep_freed_memory() if sys.argv[1] == "keep" else None)
before = megabytes()
step()
print(megabytes() - before)
"""


def without_wishes() -> dict[str, str]:
    """The environment, but for what it says of memory."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}


def run(wish: str, **environment: str) -> tuple[str, float]:
    """What `keep_freed_memory` answers, and how many megabytes the process holds on to after tensors of 64."""
    words = [sys.executable, "-c", PROGRAM, wish]
    done = subprocess.run(words, env=without_wishes() | environment, capture_output=True, text=True, check=True)
    answer, held = done.stdout.split()
    return answer, float(held)


def test_memory_of_freed_tensors_stays_with_the_process() -> None:
    _, without = run("leave")
    answer, held = run("keep")
    assert answer == "True"
    assert without < 16 < 48 < held


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_wishes_of_the_environment_win(name: str) -> None:
    assert run("keep", **{name: "131072"})[0] == "False"


GAPS = """
import torch
from pathlib import Path
from vanilla_transformer.memory import keep_freed_memory, release_kept_memory
def megabytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
keep_freed_memory()
start = megabytes()
# A small thing that stays after each large one that goes.
tensors = [(torch.ones(2**20), torch.ones(2**10)) for _ in range(100)]
small = [each for _, each in tensors]
del tensors
kept = megabytes() - start
release_kept_memory()
print(kept, megabytes() - start)
"""


def test_gaps_are_given_back_when_it_is_asked() -> None:
    words = [sys.executable, "-c", GAPS]
    done = subprocess.run(words, env=without_wishes(), capture_output=True, text=True, check=True)
    kept, left = map(float, done.stdout.split())
    assert kept > 300  # of 400
    assert left < 100
