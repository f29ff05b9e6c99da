"""Which checkpoints of an interrupted training are whole."""

import json
import os
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers.utils import logging

logger = logging.get_logger(__name__)

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_SET_ASIDE = "incomplete-"


def find_problem(checkpoint: str | os.PathLike[str], *, world_size: int = 1) -> str | None:
    """Says what is missing from a checkpoint of the Trainer.

    Args:
        checkpoint: A folder `checkpoint-<step>`.
        world_size: Number of processes that trained, each of which saves its random state.

    Returns:
        The first problem found, or `None` if the checkpoint is whole. Of the folders that FSDP and DeepSpeed write,
        nothing is checked.
    """
    folder = Path(checkpoint)
    try:
        # Written last of all by the main process.
        json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "trainer_state.json is missing or damaged"
    if any(entry.is_dir() for entry in folder.iterdir()):
        # FSDP and DeepSpeed write weights and optimizer into folders of a layout of their own.
        return None
    random_states = ["rng_state.pth"] if world_size == 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]
    for name in ["scheduler.pt", "optimizer.pt", *random_states]:
        if not (folder / name).is_file():
            return f"{name} is missing"
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        return "there are no weights"
    for path in weights:
        if not _is_whole_safetensors(path):
            return f"{path.name} is cut off or damaged"
    return None


def _is_whole_safetensors(path: Path) -> bool:
    """Opening such a file reads no tensor, but compares its size with the one that its header announces."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def find_last_whole_checkpoint(
    output_dir: str | os.PathLike[str], *, world_size: int = 1, set_aside: bool = True
) -> Path | None:
    """Finds the checkpoint to resume from: the last one that is whole.

    A later one that is not, left by a process that was killed while it saved, is renamed to `incomplete-checkpoint-...`
    with a warning, so that the Trainer neither counts it nor writes into it.

    Args:
        output_dir: The Trainer's output folder.
        world_size: Number of processes that trained.
        set_aside: Whether to rename those that are not whole.

    Returns:
        Its path, or `None` if there is none.
    """
    folder = Path(output_dir)
    if not folder.is_dir():
        return None
    steps = {int(match[1]): entry for entry in folder.iterdir() if (match := _CHECKPOINT.fullmatch(entry.name))}
    for _, checkpoint in sorted(steps.items(), reverse=True):
        problem = find_problem(checkpoint, world_size=world_size)
        if problem is None:
            return checkpoint
        if not set_aside:
            logger.warning(f"Not resuming from {checkpoint}: {problem}.")
            continue
        aside = _free_name(folder / f"{_SET_ASIDE}{checkpoint.name}")
        checkpoint.rename(aside)
        logger.warning(f"Not resuming from {checkpoint}: {problem}. It was renamed to {aside.name}.")
    return None


def _free_name(path: Path) -> Path:
    candidates = [path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 1000))]
    return next(candidate for candidate in candidates if not candidate.exists())


__all__ = ["find_last_whole_checkpoint", "find_problem"]
