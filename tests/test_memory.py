"""Freed memory that stays with the process."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")

# As a beam search does: tensors of some megabytes come together, and go together.
PROGRAM = """
import resource, sys, torch
from vanilla_transformer.memory import keep_freed_memory
print(keep_freed_memory() if sys.argv[1] == "keep" else None)
def step():
    tensors = [torch.ones(4, 2**20) for _ in range(4)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(wish: str, **environment: str) -> tuple[str, int]:
    """What `keep_freed_memory` answers, and how many pages the system laid out anew in ten steps."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    words = [sys.executable, "-c", PROGRAM, wish]
    done = subprocess.run(words, env=mine | environment, capture_output=True, text=True, check=True)
    answer, faults = done.stdout.split()
    return answer, int(faults)


def test_no_page_is_laid_out_twice() -> None:
    _, without = run("leave")
    answer, faults = run("keep")
    assert answer == "True"
    # 64 MiB in pages of 4 KiB, ten times, would be 163,840.
    assert faults < 1000 < without


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_wishes_of_the_environment_win(name: str) -> None:
    assert run("keep", **{name: "131072"})[0] == "False"
