"""Which checkpoints of an interrupted training are whole."""

import os
import re
import shutil
import zipfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.utils import CONFIG_NAME, logging

from vanilla_transformer.files import digest_weights, list_weights_problems, read_json

logger = logging.get_logger(__name__)

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# The Trainer never uploads what begins with an underscore.
_SET_ASIDE = "_incomplete-"
_DELETED = "_deleted-"


class CheckpointError(ValueError):
    """A training cannot go on from a checkpoint as it is asked to."""


class RecordWorldSize(TrainerCallback, ExportableState):
    """Writes into every checkpoint's trainer_state.json how many processes saved it, for `find_problem`.

    Also whether each saved its place in a stream, and digests of the weights: safetensors has no checksum.
    """

    def __init__(self, streaming: bool = False) -> None:
        self.streaming = streaming
        self.world_size = 1
        self._training: tuple[Path, TrainerState] | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Notes the number of this run's processes, which may differ from the one in a checkpoint it resumes."""
        self.world_size = args.world_size
        # A resumed state has only its checkpoint's entries, and the Trainer fails to update one that is not there.
        entries: Any = state.stateful_callbacks
        entries[type(self).__name__] = self.state()
        folder = Path(str(args.output_dir))
        self._training = (folder, state)
        # The state has paths, which a run that was moved or copied has left.
        best = folder / f"checkpoint-{state.best_global_step}"
        if best.is_dir():
            state.best_model_checkpoint = str(best)

    def state(self) -> dict[str, Any]:
        """What the Trainer writes, once all other files of the checkpoint are there."""
        attributes: dict[str, Any] = {"world_size": self.world_size}
        if self._training is not None:
            folder, state = self._training
            attributes["weights"] = digest_weights(folder / f"checkpoint-{state.global_step}")
        return {"args": {"streaming": self.streaming}, "attributes": attributes}


def read_world_size(checkpoint: str | os.PathLike[str]) -> int | None:
    """The number of processes that saved a checkpoint, or `None` if `RecordWorldSize` did not record it."""
    state = read_json(Path(checkpoint) / TRAINER_STATE_NAME)
    world_size = _recorded(state, "attributes").get("world_size")
    return world_size if isinstance(world_size, int) and world_size > 0 else None


def list_changed_weights(checkpoint: Path, digests: Mapping[str, str]) -> list[str]:
    """Says which files of weights, by their digests now, are not those that `RecordWorldSize` recorded."""
    saved = _recorded(read_json(checkpoint / TRAINER_STATE_NAME), "attributes").get("weights")
    changed = [name for name in digests if isinstance(saved, dict) and saved.get(name, digests[name]) != digests[name]]
    return [f"{name} is damaged: it has changed since it was saved" for name in changed]


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is one of a run's checkpoints, by its name, and not the run's own."""
    return _CHECKPOINT.fullmatch(folder.resolve().name) is not None


def list_checkpoints(output_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """The checkpoints of a run by step, the first step first, whole or not. The folder need not exist."""
    entries = Path(output_dir).glob("checkpoint-*")
    found = {int(match[1]): entry for entry in entries if (match := _CHECKPOINT.fullmatch(entry.name))}
    return dict(sorted(found.items()))


def find_problem(checkpoint: str | os.PathLike[str], *, world_size: int = 1, contents: bool = False) -> str | None:
    """Says what is missing from a checkpoint of the Trainer, so that training cannot go on from it.

    Nothing is unpickled; with `contents` all is read, and compared with checksums. Of DeepSpeed's checkpoints only
    `latest` is looked at. `world_size` counts where none was recorded. Returns the first problem found, or `None`.
    """
    folder = Path(checkpoint)
    return next(_problems(folder, read_world_size(folder) or world_size, contents), None)


def find_last_whole_checkpoint(
    output_dir: str | os.PathLike[str], *, world_size: int = 1, set_aside: bool = True
) -> Path | None:
    """Finds the checkpoint to resume from: the last one that is whole.

    With `set_aside` a later one, half saved or damaged, is renamed to `_incomplete-checkpoint-...`, and what was set
    aside before is deleted. If all are damaged, that is a ValueError.
    """
    last: Path | None = None
    broken: dict[Path, str] = {}
    for checkpoint in reversed(list_checkpoints(output_dir).values()):
        problem = find_problem(checkpoint, world_size=world_size, contents=last is None)
        if problem is None:
            last = last or checkpoint
        elif last is None:
            broken[checkpoint] = problem
    # Without a state it was never whole.
    if last is None and any(isinstance(read_json(folder / TRAINER_STATE_NAME), dict) for folder in broken):
        listed = "; ".join(f"{folder.name}: {problem}" for folder, problem in broken.items())
        raise ValueError(
            f"No checkpoint in {output_dir} can be resumed ({listed}). Mend one, or begin again in another output_dir."
        )
    if set_aside:
        _clear_leftovers(Path(output_dir), has_whole=last is not None)
    for checkpoint, problem in broken.items():
        _set_aside(checkpoint, problem, rename=set_aside)
    saved_by = read_world_size(last) if last is not None else None
    if saved_by is not None and saved_by != world_size:
        logger.warning(
            f"{last} was saved by {saved_by} process(es), and now there are {world_size}. Training goes on from it, "
            f"but with other batches and other dropout than with {saved_by}."
        )
    return last


def delete_old_checkpoints(
    output_dir: str | os.PathLike[str], limit: int, *, step: int, kept: Collection[int | None] = ()
) -> None:
    """Deletes a run's first checkpoints until `limit` are left. Those of `step`, just saved, and of `kept` stay.

    Each folder is renamed first, so that a deletion that is cut off leaves no half checkpoint.
    """
    folder = Path(output_dir)
    for rest in folder.glob(f"{_DELETED}*"):
        shutil.rmtree(rest, ignore_errors=True)
    checkpoints = list_checkpoints(folder)
    # Later ones are left from before the run went back to an earlier step: they go first.
    old = sorted(checkpoints.keys() - {step, *kept}, key=lambda each: (each < step, each))
    for each in old[: max(len(checkpoints) - limit, 0)]:
        path = checkpoints[each]
        shutil.rmtree(path.rename(path.with_name(_DELETED + path.name)), ignore_errors=True)


def _clear_leftovers(folder: Path, *, has_whole: bool) -> None:
    """Deletes what earlier parts of the run left or set aside, but not the weights that may be all that is left."""
    patterns = (f"{_DELETED}*", f"{_SET_ASIDE}*", ".*.partial")
    for path in [entry for pattern in patterns for entry in folder.glob(pattern)]:
        if not path.is_dir():
            path.unlink(missing_ok=True)
        elif has_whole or not isinstance(read_json(path / TRAINER_STATE_NAME), dict):
            shutil.rmtree(path, ignore_errors=True)


def _set_aside(checkpoint: Path, problem: str, *, rename: bool) -> None:
    message = f"Not resuming from {checkpoint}: {problem}."
    if rename:
        aside = checkpoint.with_name(_SET_ASIDE + checkpoint.name)
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
        message += f" It was renamed to {aside.name}."
    logger.warning(message)


def _problems(folder: Path, world_size: int, contents: bool) -> Iterator[str]:
    # Written last of all by the main process.
    state = read_json(folder / TRAINER_STATE_NAME)
    if not isinstance(state, dict):
        yield f"{TRAINER_STATE_NAME} is missing or damaged"
        return
    if unknown := sorted(state.keys() - {field.name for field in fields(TrainerState)}):
        yield f"{TRAINER_STATE_NAME} has fields that this version of transformers does not know: {', '.join(unknown)}"
    if (folder / CONFIG_NAME).is_file() and not isinstance(read_json(folder / CONFIG_NAME), dict):
        yield f"{CONFIG_NAME} is damaged"
    if any(folder.glob("global_step*")):  # DeepSpeed's
        if not (folder / "latest").is_file():
            yield "latest is missing"
    else:
        yield from _part_problems(folder / "scheduler.pt", contents)
        # FSDP's files or folders, or else the Trainer's own.
        for part in sorted(folder.glob("optimizer*")) or [folder / "optimizer.pt"]:
            yield from _part_problems(part, contents)
        sharded = sorted(folder.glob("pytorch_model_fsdp*"))
        for part in sharded:
            yield from _part_problems(part, contents)
        if not sharded:
            yield from list_weights_problems(folder)
        if contents:
            yield from list_changed_weights(folder, digest_weights(folder))
    for name in ["rng_state.pth"] if world_size == 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]:
        yield from _part_problems(folder / name, contents)
    if (folder / "scaler.pt").exists():  # of mixed precision with float16 only
        yield from _part_problems(folder / "scaler.pt", contents)
    if _recorded(state, "args").get("streaming") or any(folder.glob("data_state_*.json")):
        for rank in range(world_size):
            if read_json(folder / f"data_state_{rank}.json") is None:
                yield f"data_state_{rank}.json is missing or damaged"


def _part_problems(path: Path, contents: bool) -> Iterator[str]:
    """Of a file that torch.save writes, or of a folder of torch's distributed checkpoints (`.metadata` comes last)."""
    if path.is_dir():
        if not (path / ".metadata").is_file():
            yield f"{path.name}/.metadata is missing"
    elif not path.is_file():
        yield f"{path.name} is missing"
    elif not _is_whole_zip(path, contents):
        yield f"{path.name} is cut off or damaged"


def _is_whole_zip(path: Path, contents: bool) -> bool:
    """What torch.save writes ends with a table of contents, which is all that is read without `contents`."""
    with path.open("rb") as file:  # one that may not be read is an error
        try:
            archive = zipfile.ZipFile(file)
            ends = [entry.header_offset + entry.compress_size for entry in archive.infolist()]
            is_whole = all(end < archive.start_dir for end in ends)
            return is_whole and not (contents and archive.testzip())  # the first entry with a wrong checksum
        except Exception:  # of many kinds, where bytes are not what they should be
            return False


def _recorded(state: Any, part: str) -> dict[str, Any]:
    """What `RecordWorldSize` left in a Trainer's state; files may hold anything."""
    for key in ("stateful_callbacks", RecordWorldSize.__name__, part):
        state = state.get(key) if isinstance(state, dict) else None
    return state if isinstance(state, dict) else {}
