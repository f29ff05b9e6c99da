"""Where a training of the tests kills itself, and how."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Trainer, TrainerState, modeling_utils

from vanilla_transformer.training import averaging


def kill_group() -> None:
    """Kills this process and all that train with it."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


@dataclass(frozen=True)
class Kill:
    """Where a training kills itself: at a file or folder, relative to the output folder.

    The `moment` is "before" it is written, "within", "after", while it is "deleted", or "interrupted" by Ctrl-C once it
    is written. `amount` are bytes that are written before, or files that are deleted.
    """

    path: str
    moment: str
    amount: int = 0
    occurrence: int = 1


def arm(kill: Kill, output_dir: Path) -> None:
    """Makes this process kill itself when it gets there, or the kernel, within a file, whatever library is writing."""
    seen = 0

    def guard(owner: Any, name: str, path_of: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            path = Path(os.path.abspath(path_of(*args, **kwargs)))
            seen += path == output_dir / kill.path
            if path != output_dir / kill.path or seen != kill.occurrence:
                return original(*args, **kwargs)
            if kill.moment == "before":
                kill_group()
            if kill.moment == "within":
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_FSIZE, (kill.amount, kill.amount))
            result = original(*args, **kwargs)
            if kill.moment == "after":
                kill_group()
            if kill.moment == "interrupted":
                signal.raise_signal(signal.SIGINT)
            return result

        setattr(owner, name, guarded)

    guard(modeling_utils, "safe_save_file", lambda tensors, path, *_, **__: path)
    guard(averaging, "save_file", lambda tensors, path, *_, **__: path)
    guard(torch, "save", lambda content, path, *_, **__: path)
    guard(TrainerState, "save_to_json", lambda state, path: path)
    guard(PreTrainedTokenizerFast, "_save_pretrained", lambda _, path, *__, **___: Path(path, "tokenizer.json"))
    guard(Trainer, "save_metrics", lambda run, split, *_, **__: Path(run.args.output_dir, f"{split}_results.json"))
    guard(Path, "write_text", lambda path, *_, **__: path)

    if kill.moment == "deleted":
        rmtree, unlink = shutil.rmtree, os.unlink

        def count(*args: Any, **kwargs: Any) -> None:
            nonlocal seen
            if seen == kill.amount:
                kill_group()
            seen += 1
            unlink(*args, **kwargs)

        def remove(path: Any, *args: Any, **kwargs: Any) -> None:
            os.unlink = count
            rmtree(path, *args, **kwargs)
            os.unlink = unlink

        shutil.rmtree = remove  # type: ignore[assignment]
