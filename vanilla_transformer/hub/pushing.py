"""What of a training's output folder goes to the Hub, and pushing it while the training goes on."""

import os
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Unpack

from huggingface_hub import CommitInfo, hf_hub_download, upload_folder
from huggingface_hub.errors import RemoteEntryNotFoundError
from transformers.utils import logging

from vanilla_transformer.files import replacing_files

from .card import Card, CardMetadata, choose_card, make_card, read_card
from .files import CARD_NAME, select_files

logger = logging.get_logger(__name__)

# Of a checkpoint, what only a run that is resumed needs.
_RUN_STATE = ("*.bin", "*.pt", "*.pth", "data_state_*.json", "latest", "trainer_state.json", "zero_to_fp32.py")
_WEIGHTS = ("*.bin", "*.safetensors", "*.safetensors.index.json")
_PICKLED_ARGUMENTS = "training_args.bin"
# The Trainer never uploads what begins with an underscore.
_SNAPSHOT = "_push-"


def take_snapshot(
    output_dir: str | os.PathLike[str], checkpoint: str | os.PathLike[str], *, subfolder: str | None = None
) -> Path:
    """Puts what a push in the middle of a training consists of into a folder that nothing changes any more.

    The Trainer deletes checkpoints and overwrites files while an upload still reads them. Files of the checkpoint are
    not copied, where the file system can give one file two names.

    Args:
        output_dir: The run's folder. Its own files (card, code, metrics, curves) belong to the push, but not weights.
        checkpoint: A folder `checkpoint-<step>` in it, with model and tokenizer.
        subfolder: Where to put all of the checkpoint, with optimizer and random states, so that the run can be resumed
            from it; nowhere by default.

    Returns:
        A folder `_push-checkpoint-<step>` in the run's.

    Raises:
        ValueError: If the checkpoint has no weights that others can load.
    """
    folder, checkpoint = Path(output_dir), Path(checkpoint)
    if not any(checkpoint.glob("*.safetensors")):
        raise ValueError(
            f"{checkpoint} has no weights in safetensors: a model that is divided among processes is whole at the end."
        )
    snapshot = folder / f"{_SNAPSHOT}{checkpoint.name}"
    shutil.rmtree(snapshot, ignore_errors=True)
    snapshot.mkdir()
    for path in checkpoint.iterdir():
        if path.is_file() and not _matches(path.name, _RUN_STATE):
            _link_or_copy(path, snapshot / path.name)
    for path in folder.iterdir():
        target = snapshot / path.name
        if path.is_file() and not _matches(path.name, _WEIGHTS) and (path.name == CARD_NAME or not target.exists()):
            target.unlink(missing_ok=True)
            shutil.copyfile(path, target)  # it may be written again, in place
    if subfolder is not None:
        ignore = shutil.ignore_patterns(_PICKLED_ARGUMENTS)  # which no resumed run reads
        shutil.copytree(checkpoint, snapshot / subfolder, copy_function=_link_or_copy, ignore=ignore)
    return snapshot


def write_card_to_push(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    revision: str | None,
    token: str | None,
    **metadata: Unpack[CardMetadata],
) -> None:
    """Writes the card of a model that is about to be pushed, with what users wrote here or on the Hub.

    Where both were edited at the same place, the card here wins, with a warning; the other one stays in the
    repository's history.

    Args:
        folder: The model's folder, with a card or without.
        repo_id: The model's name on the Hub.
        revision: The branch that is pushed to.
        token: May read it.
        **metadata: As `build_model_card` takes them.

    Raises:
        ValueError: If a file of the folder, or the card on the Hub, is damaged.
    """
    here, there = read_card(Path(folder) / CARD_NAME), None
    try:
        path = Path(hf_hub_download(repo_id, CARD_NAME, revision=revision, token=token))
        there = Card.parse(path.read_bytes(), f"{CARD_NAME} of {repo_id} on the Hub")
    except RemoteEntryNotFoundError:
        pass
    try:
        existing = choose_card(here, there)
    except ValueError as error:
        logger.warning(f"{error} The one in {folder} is pushed; the other stays in the history of {repo_id}.")
        existing = here
    text = make_card(folder, existing, repo_id=repo_id, is_pushed=True, **metadata)
    with replacing_files(folder) as partial:
        (partial / CARD_NAME).write_text(text, encoding="utf-8", newline="")


def push_snapshot(
    snapshot: Path,
    repo_id: str,
    *,
    revision: str | None,
    token: str | None,
    message: str,
    own_card: bool,
    **metadata: Unpack[CardMetadata],
) -> CommitInfo:
    """Uploads what of a snapshot belongs on the Hub, and deletes it; made to run in the background.

    Args:
        snapshot: From `take_snapshot`.
        repo_id: The model's name on the Hub.
        revision: The branch to push to.
        token: May write.
        message: The commit's title.
        own_card: Whether to write this package's card.
        **metadata: As `build_model_card` takes them.

    Returns:
        The commit.

    Raises:
        Exception: Whatever kept it from being uploaded, after a warning, since in the background nobody sees it.
    """
    try:
        if own_card:
            write_card_to_push(snapshot, repo_id, revision=revision, token=token, **metadata)
        checkpoints = [f"{path.name}/*" for path in snapshot.iterdir() if path.is_dir()]
        chosen = [*select_files(snapshot).files, *checkpoints]
        return upload_folder(
            repo_id=repo_id,
            folder_path=snapshot,
            allow_patterns=chosen,
            commit_message=message,
            revision=revision,
            token=token,
        )
    except Exception as error:
        logger.warning(f"{message}: the push failed, and the training goes on. {describe_error(error)}")
        raise
    finally:
        shutil.rmtree(snapshot, ignore_errors=True)


def remove_snapshots(output_dir: str | os.PathLike[str]) -> None:
    """Deletes what a process that was killed while it pushed left behind.

    Args:
        output_dir: The run's folder, which need not exist.
    """
    for path in Path(output_dir).glob(f"{_SNAPSHOT}*"):
        shutil.rmtree(path, ignore_errors=True)


def describe_error(error: BaseException) -> str:
    """An error's kind and what it says, in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _link_or_copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    try:
        os.link(source, target)
    except OSError:  # not every file system has links
        shutil.copyfile(source, target)
