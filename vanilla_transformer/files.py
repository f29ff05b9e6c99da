"""Files and folders: written whole or not at all, digests, damage, names of models; and packages that are missing."""

import hashlib
import json
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from safetensors import SafetensorError, safe_open

# Where training puts the average of its last checkpoints, and the file in it that says of which.
AVERAGED_FOLDER = "averaged"
AVERAGING_FILE = "averaging.json"
PARTIAL_FOLDER = "_partial"
LOCK_FILE = "_lock"
_SHARD = re.compile(r"(.+)-\d+-of-\d+\.safetensors")
# What a config.json says that changes no translation: it is for training, for the library, or about other files.
_NOT_ARCHITECTURE = {
    *("activation_dropout", "architectures", "attention_dropout", "auto_map", "config_version", "custom_pipelines"),
    *("dropout", "dtype", "initializer_gain", "is_decoder", "label_smoothing", "langs", "processor_class"),
    *("task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache"),
}


def check_new_folder(folder: str | os.PathLike[str]) -> Path:
    """Makes sure that a folder can be made, before long work is done for it; returns its path, else an `OSError`."""
    path = Path(folder)
    if os.path.lexists(path):
        reason = _find_reason_to_keep(path)
        if reason is not None:
            raise FileExistsError(f"{path} is {reason}. Name a folder that is not there yet, or an empty one.")
    _check_place(path)
    return path


def _check_place(path: Path) -> None:
    """Makes sure that the lowest folder above it that is there is one that may be written to."""
    lowest = next(parent for parent in Path(os.path.realpath(path)).parents if os.path.lexists(parent))
    if not lowest.is_dir():
        raise NotADirectoryError(f"{path} cannot be made: {lowest} is a file, not a folder.")
    if not os.access(lowest, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be made: nothing may be written to {lowest}.")


def _find_reason_to_keep(path: Path) -> str | None:
    """Why no folder can take the place of what is there, if there is a reason."""
    if not path.is_dir():
        return "a file"
    if any(path.iterdir()):
        return "a folder that is not empty"
    if os.path.ismount(path.resolve()):
        return "where a file system is mounted, which no other folder can replace"
    if path.samefile(os.curdir):
        return "the current folder, which no other folder can replace without being left"
    return None


@contextmanager
def new_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Makes a folder that is complete or absent, whenever the process ends.

    Yields a folder beside it to fill, `.NAME-*.partial`, which takes its place at the end, and is removed after an
    exception; only a process that is killed leaves it behind. The folder may be there if it is empty, and then keeps
    its permissions. Folders above it are made if need be.
    """
    path = check_new_folder(folder).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=".partial", dir=path.parent))
    try:
        if path.is_dir():
            mode = stat.S_IMODE(path.stat().st_mode)
        else:
            # What mkdtemp makes is for its owner alone. What else it has is inherited.
            mode = stat.S_IMODE(partial.stat().st_mode) | (0o777 & ~_read_umask())
        partial.chmod(mode | stat.S_IRWXU)
        yield partial
        open_weights(partial)
        check_new_folder(path)
        partial.chmod(mode)
        partial.replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def open_weights(folder: str | os.PathLike[str]) -> None:
    """Gives weights the mode of every other new file: safetensors lets nobody but their owner read them."""
    mode = 0o666 & ~_read_umask()
    for path in Path(folder).glob("*.safetensors"):
        path.chmod(mode)


def check_new_file(path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Makes sure that a file can be written, before long work is done for it; returns its path, else an `OSError`."""
    file = Path(path)
    if file.is_dir():
        raise FileExistsError(f"{file} is a folder. Name a file.")
    if os.path.lexists(file) and not overwrite:
        raise FileExistsError(f"{file} exists: choose another name, or replace it with --overwrite (overwrite=True).")
    _check_place(file)
    return file


def check_text_output(
    path: str | os.PathLike[str], *, inputs: Iterable[str | os.PathLike[str]], overwrite: bool = False
) -> Path:
    """Makes sure, as `check_new_file`, that a file can be written as plain text, and is none of its `inputs`."""
    file = Path(path)
    if file.suffix.lower() in (".gz", ".bz2", ".xz"):
        raise ValueError(f"{file}: the output is written as plain text; leave out {file.suffix}.")
    if file.exists() and any(file.samefile(source) for source in inputs):
        raise ValueError(f"{file}: the output file is the input file.")
    return check_new_file(file, overwrite=overwrite)


@contextmanager
def new_file(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Writes a file that is complete or absent, whenever the process ends.

    Yields a path beside it to write to. At the end it takes its place, and replaces a file of this name if `overwrite`
    allows that; after an exception it is removed. Folders above it are made if need be.
    """
    file = check_new_file(path, overwrite=overwrite)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}-{os.getpid()}.partial")
    try:
        yield partial
        check_new_file(file, overwrite=overwrite)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def locked(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Lets one process at a time work on `what`. Any other is refused by a `BlockingIOError`, which names the first.

    The lock is the operating system's, and ends with the process, however that ends; its file may then stay behind.
    """
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    holder = ""
    with suppress(FileNotFoundError):
        holder = file.read_text(encoding="utf-8")
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise BlockingIOError(
            f"{what} is in use by {holder or 'another process'}. Wait for its end, or end it; two would spoil each "
            "other's files."
        ) from error
    try:
        with suppress(PermissionError):  # Windows lets nobody write into a locked file
            file.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        yield
    finally:
        with suppress(PermissionError):
            file.unlink()
        lock.release()


@contextmanager
def replacing_files(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Writes files in such a way that a process that is killed leaves each of them as it was, or as it shall be.

    Yields an empty folder `_partial` in `folder` to write them into. At the end they take their places, in the order of
    their names; after an exception they do not.
    """
    partial = Path(folder) / PARTIAL_FOLDER
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        open_weights(partial)
        for path in sorted(partial.iterdir()):
            path.replace(Path(folder) / path.name)
    finally:
        shutil.rmtree(partial)


def digest_files(paths: Iterable[Path]) -> dict[str, str]:
    """The SHA-256 of each file's content, by the file's name."""
    digests = {}
    for path in paths:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def digest_weights(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Digests of a folder's weights in safetensors, which tell them from those that it holds after more training."""
    return digest_files(sorted(Path(folder).glob("model*.safetensors")))


def read_architecture(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json with other values of which the same weights would translate differently."""
    return {name: value for name, value in config.items() if name not in _NOT_ARCHITECTURE and not name.startswith("_")}


def read_json(path: Path) -> Any:
    """Its content, or `None` if there is no such file, or no JSON in it. One that may not be read is an error."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    # RecursionError: nested too deeply.
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, RecursionError):
        return None


LFS_POINTER = "is a pointer of git-lfs and not the weights: run `git lfs pull` in the folder"


def is_lfs_pointer(path: str | os.PathLike[str]) -> bool:
    """Whether a file only names what git-lfs is to put in its place; an `OSError` if it may not be read."""
    with Path(path).open("rb") as file:
        return file.read(8) == b"version "


def find_damage(path: str | os.PathLike[str]) -> str | None:
    """Says what is wrong with a file of safetensors, as the end of a sentence; no tensor is read.

    The format has no checksum: a file of the right length with other numbers in it is not found.
    """
    if not Path(path).is_file():
        return "is missing"
    if is_lfs_pointer(path):
        return LFS_POINTER
    try:
        with safe_open(path, framework="pt"):
            return None
    except SafetensorError as error:
        return f"is cut off or damaged ({error})"


def find_weights_problem(checkpoint: str | os.PathLike[str]) -> str | None:
    """What `list_weights_problems` finds first."""
    return next(iter(list_weights_problems(checkpoint)), None)


def list_weights_problems(checkpoint: str | os.PathLike[str]) -> list[str]:
    """Says what is missing from a checkpoint's weights, sharded or not; nothing else of it is looked at."""
    folder = Path(checkpoint)
    paths = set(folder.glob("*.safetensors"))
    for path in sorted(folder.glob("*.safetensors.index.json")):
        index = read_json(path)
        if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
            return [f"{path.name} is damaged"]
        paths |= {folder / str(name) for name in index["weight_map"].values()}
    problems = [] if paths else ["there are no weights"]
    for path in sorted(paths):
        shard = _SHARD.fullmatch(path.name)
        if shard and not (folder / f"{shard[1]}.safetensors.index.json").is_file():
            problems.append(f"{path.name} is a part of weights without an index")
        if not path.is_file():
            problems.append(f"{path.name} is missing")
        elif find_damage(path):
            problems.append(f"{path.name} is cut off or damaged")
    return problems


def check_model_name(model_name_or_path: str | os.PathLike[str]) -> None:
    """Makes sure that it is a folder, or may be a name on the Hub, whose client explains other names badly."""
    # Unlike Path's, these take what is too long to be a path, or may not be looked at, for what is not there.
    if os.path.isdir(model_name_or_path):
        return
    if os.path.exists(model_name_or_path):
        raise NotADirectoryError(f"{model_name_or_path} is a file. Name the folder of a model, or a model on the Hub.")
    try:
        validate_repo_id(os.fspath(model_name_or_path))
    except HFValidationError as error:
        raise FileNotFoundError(f"There is no folder {model_name_or_path}.") from error


def check_revision(model_name_or_path: str | os.PathLike[str], revision: str) -> None:
    """Makes sure that no commit, branch or tag is asked of a folder."""
    if revision != "main" and os.path.isdir(model_name_or_path):
        raise ValueError(f"--revision {revision} is for models on the Hub, and {model_name_or_path} is a folder.")


def check_runs_here(folder: str | os.PathLike[str]) -> None:
    """Makes sure that a folder was not exported for JavaScript, where alone it runs."""
    path = Path(folder)
    kinds = {"transformersjs": path / "onnx" / "decoder_model_merged.onnx", "web": path / "model" / "decoder.onnx"}
    for kind, file in kinds.items():
        if file.is_file() and not list(path.glob("*.safetensors*")):
            raise ValueError(
                f"{folder} was made by export --format {kind}, for JavaScript; nothing else runs it. Name the folder "
                "of the model that was exported, or export that with --format onnx for --engine onnx."
            )


def _check_config(folder: str | os.PathLike[str]) -> None:
    """Makes sure that a folder holds a model, which one whose training has not ended does not."""
    path = Path(folder)
    if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        return
    checkpoints = [each.parent for each in path.glob("checkpoint-*/config.json")]
    last = max(checkpoints, key=lambda each: (len(each.name), each.name), default=None)
    advice = "Name a folder that a training has come to its end in, or that a model was saved to."
    if last is not None:
        advice = f"Its training has not come to its end: resume it, or name a checkpoint, {last} say."
    raise FileNotFoundError(f"{folder} holds no model: it has no config.json. {advice}")


@contextmanager
def explain_missing_model(model_name_or_path: str | os.PathLike[str]) -> Iterator[None]:
    """Says of a model that cannot be loaded within that there is no such folder, before what the Hub's client says."""
    check_model_name(model_name_or_path)
    try:
        if os.path.isdir(model_name_or_path):
            check_runs_here(model_name_or_path)
            _check_config(model_name_or_path)
        else:
            _ask_the_hub(os.fspath(model_name_or_path))
        yield
    except OSError as error:
        if os.path.isdir(model_name_or_path):
            raise
        reason = next(iter(str(error).splitlines()), "")
        raise OSError(
            f"There is no folder {model_name_or_path}, and no model of that name could be loaded from the Hub: {reason}"
        ) from error


def _ask_the_hub(name: str) -> None:
    """Asks once for a model that was never fetched, where loading would ask for every file many times."""
    if Path(HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model")).is_dir():
        return
    try:
        HfApi().model_info(name)
    except RepositoryNotFoundError as error:
        raise FileNotFoundError("It has none of that name, or you may not see it.") from error
    except HfHubHTTPError:  # loading may wait for a busy Hub
        return
    except Exception as error:  # those of a connection have several kinds
        raise ConnectionError(f"{error}") from error


@contextmanager
def explain_missing(reason: str, *, extra: str, packages: str) -> Iterator[None]:
    """Lets an import that fails say how to install what it needs.

    `reason` begins the message ("BLEU, chrF and TER need sacrebleu"); `extra` of this package brings the `packages`.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f'{reason}: pip install "vanilla-transformer[{extra}]" (or pip install {packages}).'
        ) from error
