"""Which checkpoints of an interrupted training are whole, and writing files so that no interruption leaves a half."""

import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

logger = logging.get_logger(__name__)

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_SHARD = re.compile(r"(.+)-\d+-of-\d+\.safetensors")
# The Trainer never uploads what begins with an underscore.
_SET_ASIDE = "_incomplete-"
PARTIAL_FOLDER = "_partial"
# What a config.json says that changes no translation: it is for training, for the library, or about other files.
_NOT_ARCHITECTURE = {
    *("activation_dropout", "architectures", "attention_dropout", "auto_map", "config_version", "custom_pipelines"),
    *(
        "dropout",
        "dtype",
        "is_decoder",
        "label_smoothing",
        "langs",
        "processor_class",
        "task_specific_params",
        "tokenizer_class",
    ),
    *("torch_dtype", "transformers_version", "use_cache"),
}


class RecordWorldSize(TrainerCallback, ExportableState):
    """Writes into every checkpoint's trainer_state.json by how many processes it was saved.

    Each process saves its own random state; without this number nobody can tell a checkpoint in which some are missing
    from one that fewer processes saved. `find_problem` reads it.

    Args:
        streaming: Whether each process also saves its place in a stream of training data, as `data_state_<rank>.json`.
    """

    def __init__(self, streaming: bool = False) -> None:
        self.streaming = streaming
        self.world_size = 1

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Notes the number of this run's processes, which may differ from the one in a checkpoint it resumes."""
        self.world_size = args.world_size
        # A resumed state has only its checkpoint's entries, and the Trainer fails to update one that is not there.
        entries: Any = state.stateful_callbacks
        entries[type(self).__name__] = self.state()

    def state(self) -> dict[str, Any]:
        """What the Trainer writes."""
        return {
            "args": {"streaming": self.streaming},
            "attributes": {"world_size": self.world_size},
        }


def read_world_size(checkpoint: str | os.PathLike[str]) -> int | None:
    """Reads by how many processes a checkpoint was saved.

    Args:
        checkpoint: A folder `checkpoint-<step>`.

    Returns:
        The number that `RecordWorldSize` recorded, or `None` if it did not, or if the state cannot be read.
    """
    state = _read_json(Path(checkpoint) / TRAINER_STATE_NAME)
    world_size = _recorded(state, "attributes").get("world_size")
    return world_size if isinstance(world_size, int) and world_size > 0 else None


def list_checkpoints(output_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """Lists the checkpoints of a run, whole or not.

    Args:
        output_dir: The Trainer's output folder, which need not exist.

    Returns:
        Their folders by step, the first step first.
    """
    entries = Path(output_dir).glob("checkpoint-*")
    found = {int(match[1]): entry for entry in entries if (match := _CHECKPOINT.fullmatch(entry.name))}
    return dict(sorted(found.items()))


def find_problem(checkpoint: str | os.PathLike[str], *, world_size: int = 1) -> str | None:
    """Says what is missing from a checkpoint of the Trainer, so that training cannot go on from it.

    Nothing is unpickled, and no tensor is read: of the files of safetensors and torch it is checked that all that their
    tables of contents announce is there, which it is not after a write that was cut off. Of folders in other layouts:

    * FSDP: those of torch's distributed checkpoints, `pytorch_model_fsdp_<n>` and `optimizer_<n>`, must hold data and
      the `.metadata` that is written last.
    * DeepSpeed: the folder that `latest` names must hold model states, and each of its files must be whole.

    Args:
        checkpoint: A folder `checkpoint-<step>`.
        world_size: Number of processes that saved it, where `RecordWorldSize` did not record it. Each must have left
            its random state, and, if it trained on a stream, its `data_state_<rank>.json`.

    Returns:
        The first problem found, or `None` if the checkpoint is whole.
    """
    folder = Path(checkpoint)
    return next(_problems(folder, read_world_size(folder) or world_size), None)


def find_weights_problem(checkpoint: str | os.PathLike[str]) -> str | None:
    """Says what is missing from a checkpoint's weights, and does not care about what else it takes to resume.

    Args:
        checkpoint: A folder with a model in safetensors, sharded or not.

    Returns:
        The first problem found, or `None` if the weights are whole.
    """
    return next(_safetensors_problems(Path(checkpoint)), None)


def list_weights_problems(checkpoint: str | os.PathLike[str]) -> list[str]:
    """Says all that is missing from a checkpoint's weights, where `find_weights_problem` says what it finds first.

    Args:
        checkpoint: A folder with a model in safetensors, sharded or not.

    Returns:
        The problems, none if the weights are whole.
    """
    return list(_safetensors_problems(Path(checkpoint)))


def digest_files(paths: Iterable[Path]) -> dict[str, str]:
    """The SHA-256 of each file's content, by the file's name."""
    digests = {}
    for path in paths:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def digest_weights(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Tells a model's weights from those that the same folder holds after more training.

    Args:
        folder: A folder with a model in safetensors, sharded or not.

    Returns:
        As `digest_files`, of the files of weights; empty if there are none.
    """
    return digest_files(sorted(Path(folder).glob("model*.safetensors")))


def read_architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """Tells a configuration from others with which the same weights would translate differently.

    Args:
        config: The content of a config.json.

    Returns:
        Its fields, without those that training or the library only looks at.
    """
    return {name: value for name, value in config.items() if name not in _NOT_ARCHITECTURE and not name.startswith("_")}


def find_last_whole_checkpoint(
    output_dir: str | os.PathLike[str], *, world_size: int = 1, set_aside: bool = True
) -> Path | None:
    """Finds the checkpoint to resume from: the last one that is whole.

    A later one that is not, left by a process that was killed while it saved, is renamed to
    `_incomplete-checkpoint-...` with a warning, so that the Trainer neither counts it nor writes into it. An earlier
    one that is not, left by a process that was killed while it deleted it, is dated back: the Trainer deletes the
    oldest first, and the interrupted deletion has made this one look new.

    One that was saved by another number of processes will do, with a warning.

    Args:
        output_dir: The Trainer's output folder.
        world_size: Number of processes that will train.
        set_aside: Whether to rename and to date back; otherwise nothing is changed.

    Returns:
        Its path, or `None` if there is none.
    """
    last: Path | None = None
    for checkpoint in reversed(list_checkpoints(output_dir).values()):
        problem = find_problem(checkpoint, world_size=world_size)
        if problem is None:
            last = last or checkpoint
        elif last is None:
            _set_aside(checkpoint, problem, rename=set_aside)
        elif set_aside:
            os.utime(checkpoint, (0, 0))
    saved_by = read_world_size(last) if last is not None else None
    if saved_by is not None and saved_by != world_size:
        logger.warning(
            f"{last} was saved by {saved_by} process(es), and now there are {world_size}. Training goes on from it, "
            f"but with other batches and other dropout than with {saved_by}."
        )
    return last


@contextmanager
def replacing_files(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Writes files in such a way that a process that is killed leaves each of them as it was, or as it shall be.

    Args:
        folder: Where the files belong; it is made if need be.

    Yields:
        An empty folder `_partial` in it to write them into. At the end they take their places, in the order of their
        names; after an exception they do not.
    """
    partial = Path(folder) / PARTIAL_FOLDER
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in sorted(partial.iterdir()):
            path.replace(Path(folder) / path.name)
    finally:
        shutil.rmtree(partial)


def _set_aside(checkpoint: Path, problem: str, *, rename: bool) -> None:
    message = f"Not resuming from {checkpoint}: {problem}."
    if rename:
        aside = _free_name(checkpoint.with_name(f"{_SET_ASIDE}{checkpoint.name}"))
        checkpoint.rename(aside)
        message += f" It was renamed to {aside.name}."
    logger.warning(message)


def _free_name(path: Path) -> Path:
    candidates = [path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 1000))]
    return next(candidate for candidate in candidates if not candidate.exists())


def _problems(folder: Path, world_size: int) -> Iterator[str]:
    # Written last of all by the main process.
    state = _read_json(folder / TRAINER_STATE_NAME)
    if not isinstance(state, dict):
        yield f"{TRAINER_STATE_NAME} is missing or damaged"
        return
    if (folder / "latest").exists() or any(folder.glob("global_step*")):
        yield from _deepspeed_problems(folder)
    else:
        yield from _zip_problems(folder / "scheduler.pt")
        yield from _optimizer_problems(folder)
        yield from _weights_problems(folder)
    for name in ["rng_state.pth"] if world_size == 1 else [f"rng_state_{rank}.pth" for rank in range(world_size)]:
        yield from _zip_problems(folder / name)
    if (folder / "scaler.pt").exists():  # of mixed precision with float16 only
        yield from _zip_problems(folder / "scaler.pt")
    if _recorded(state, "args").get("streaming") or any(folder.glob("data_state_*.json")):
        for rank in range(world_size):
            if _read_json(folder / f"data_state_{rank}.json") is None:
                yield f"data_state_{rank}.json is missing or damaged"


def _optimizer_problems(folder: Path) -> Iterator[str]:
    """A folder or files of FSDP, or else the Trainer's own file."""
    folders = [entry for entry in sorted(folder.glob("optimizer_*")) if entry.is_dir()]
    for entry in folders:
        yield from _distributed_problems(entry)
    files = sorted(folder.glob("optimizer*.bin"))
    if not folders and not files:
        files = [folder / "optimizer.pt"]
    for path in files:
        yield from _zip_problems(path)


def _weights_problems(folder: Path) -> Iterator[str]:
    """FSDP's, or else safetensors."""
    sharded = sorted(folder.glob("pytorch_model_fsdp*"))
    for entry in sharded:
        yield from _distributed_problems(entry) if entry.is_dir() else _zip_problems(entry)
    if not sharded:
        yield from _safetensors_problems(folder)


def _safetensors_problems(folder: Path) -> Iterator[str]:
    paths = set(folder.glob("*.safetensors"))
    for path in sorted(folder.glob("*.safetensors.index.json")):
        index = _read_json(path)
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
            yield f"{path.name} is damaged"
            return
        paths |= {folder / str(name) for name in index["weight_map"].values()}
    if not paths:
        yield "there are no weights"
    for path in sorted(paths):
        shard = _SHARD.fullmatch(path.name)
        if shard and not (folder / f"{shard[1]}.safetensors.index.json").is_file():
            yield f"{path.name} is a part of weights without an index"
        if not path.is_file():
            yield f"{path.name} is missing"
        elif not _is_whole_safetensors(path):
            yield f"{path.name} is cut off or damaged"


def _distributed_problems(folder: Path) -> Iterator[str]:
    if not (folder / ".metadata").is_file():
        yield f"{folder.name}/.metadata is missing"
    if not any(folder.glob("*.distcp")):
        yield f"there are no data in {folder.name}"


def _deepspeed_problems(folder: Path) -> Iterator[str]:
    try:
        # Written once every process has written its part.
        tag = (folder / "latest").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        tag = ""
    if not tag or not (folder / tag).is_dir():
        yield "latest is missing or names no folder"
        return
    files = sorted((folder / tag).glob("*.pt"))
    if not any(path.name.endswith("model_states.pt") for path in files):
        yield f"there are no weights in {tag}"
    for path in files:
        yield from _zip_problems(path)


def _zip_problems(path: Path) -> Iterator[str]:
    if not path.is_file():
        yield f"{path.name} is missing"
    elif not _is_whole_zip(path):
        yield f"{path.name} is cut off or damaged"


def _is_whole_safetensors(path: Path) -> bool:
    """Opening such a file reads no tensor, but compares its size with the one that its header announces."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False


def _is_whole_zip(path: Path) -> bool:
    """What torch.save writes ends with a table of contents, which opening it finds and reads, and nothing else."""
    try:
        with zipfile.ZipFile(path) as archive:
            return all(entry.header_offset + entry.compress_size < archive.start_dir for entry in archive.infolist())
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return False


def _read_json(path: Path) -> Any:
    """Its content, or `None` if there is none that can be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _recorded(state: Any, part: str) -> dict[str, Any]:
    """What `RecordWorldSize` left in a Trainer's state; files may hold anything."""
    for key in ("stateful_callbacks", RecordWorldSize.__name__, part):
        state = state.get(key) if isinstance(state, dict) else None
    return state if isinstance(state, dict) else {}


__all__ = [
    "PARTIAL_FOLDER",
    "RecordWorldSize",
    "digest_files",
    "digest_weights",
    "find_last_whole_checkpoint",
    "find_problem",
    "find_weights_problem",
    "list_checkpoints",
    "list_weights_problems",
    "read_architecture",
    "read_world_size",
    "replacing_files",
]
