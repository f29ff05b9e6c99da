"""Freed memory that stays with the process."""

import json
import os
import platform
import subprocess
import sys

import pytest

from vanilla_transformer.memory import keep_freed_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")

# `step` does as a beam search: tensors of some megabytes come together, and go together. Then a small thing stays after
# each large one that goes.
PROGRAM = """
import json, torch
from pathlib import Path
from vanilla_transformer.memory import keep_freed_memory, release_kept_memory
def megabytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
def step():
    tensors = [torch.ones(4, 2**20) for _ in range(4)]
start = megabytes()
step()
without = megabytes() - start
answer = keep_freed_memory()
step()
held = megabytes() - start
tensors = [(torch.ones(2**20), torch.ones(2**10)) for _ in range(100)]
small = [each for _, each in tensors]
del tensors
kept = megabytes() - start
release_kept_memory()
print(json.dumps({"without": without, "answer": answer, "held": held, "kept": kept, "left": megabytes() - start}))
"""


def test_freed_memory_stays_with_the_process_until_it_is_released() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["answer"] is True
    assert found["without"] < 16 < 48 < found["held"]  # of 64 megabytes
    assert found["left"] < 100 < 300 < found["kept"]  # of 400


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_wishes_of_the_environment_win(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "131072")
    assert not keep_freed_memory()
