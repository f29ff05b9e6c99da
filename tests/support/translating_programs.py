"""What processes of `many_processes` run that translate and evaluate together, and where one of them kills itself."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_seq2seq import make_tokenizer

from vanilla_transformer.commands import backtranslate, clean, distill, evaluate, translate
from vanilla_transformer.inference import files, parts, scores, synthetic

torch.set_num_threads(1)
# What the commands import when they run.
for _name in (
    "vanilla_transformer.export.engines",
    "vanilla_transformer.export.onnx_model",
    "vanilla_transformer.inference.cleaning",
    "sacrebleu",
    "datasets",
):
    importlib.import_module(_name)
_IMPORTED = (files, scores, synthetic, make_tokenizer)


def kill_at(event: int, folder: Path) -> None:
    """Makes this process kill itself where it would change something in a folder for that many times."""
    seen = itertools.count(1)

    def kill(name: str, arguments: tuple[Any, ...]) -> None:
        is_change = name in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate")
        is_change |= name == "open" and isinstance(arguments[2], int) and bool(arguments[2] & os.O_CREAT)
        if is_change and str(folder) in str(arguments[0]) and next(seen) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)


def run_until(event: int, folder: Path, run: Callable[[], Any]) -> bool:
    """Runs it in a child process, which is killed at that change of the folder; returns whether it came to that."""
    child = os.fork()
    if child == 0:
        kill_at(event, folder)
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def run(
    command: str, arguments: list[str], kill: tuple[int, int, str] | None = None, elsewhere: int | None = None
) -> None:
    """A command with its command line.

    `kill` are rank, change and folder of a process that kills itself; `elsewhere` is the rank of one that is on another
    machine, where the folder of parts is not there.
    """
    if elsewhere is not None and int(os.environ["RANK"]) == elsewhere:
        check = parts.Work.check

        def check_elsewhere(work: parts.Work, *args: Any) -> None:
            check(dataclasses.replace(work, folder=work.folder / "nowhere"), *args)

        parts.Work.check = check_elsewhere  # type: ignore[assignment, method-assign]
    if kill is not None and int(os.environ.get("RANK", 0)) == kill[0]:
        kill_at(kill[1], Path(kill[2]))
    commands: dict[str, Any] = {"translate": translate, "backtranslate": backtranslate, "distill": distill}
    (commands | {"clean": clean, "evaluate": evaluate})[command].main(arguments)
