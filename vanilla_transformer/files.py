"""Folders and files that are there whole or not at all."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def check_new_folder(folder: str | os.PathLike[str]) -> Path:
    """Makes sure that a folder can be made, before long work is done for it.

    Args:
        folder: The folder to be: not there yet, or empty.

    Returns:
        Its path.

    Raises:
        FileExistsError: If it is a file, a folder with something in it, the current folder, or a mount point.
        NotADirectoryError: If a file is in the place of a folder above it.
        PermissionError: If it may not be made there.
    """
    path = Path(folder)
    if path.is_dir():
        reason = _find_reason_to_keep(path)
        if reason is not None:
            raise FileExistsError(f"{path} is {reason}. Name a folder that is not there yet, or an empty one.")
    elif os.path.lexists(path):
        raise FileExistsError(f"{path} is a file. Name a folder that is not there yet, or an empty one.")
    _check_parents(path)
    return path


def _find_reason_to_keep(path: Path) -> str | None:
    """Says what it is about a folder that forbids that another takes its place, if anything."""
    if any(path.iterdir()):
        return "a folder that is not empty"
    if os.path.ismount(path.resolve()):
        return "where a file system is mounted, which no other folder can replace"
    if path.samefile(os.curdir):
        return "the current folder, which no other folder can replace without being left"
    return None


def _check_parents(path: Path) -> None:
    """Makes sure that the folders above are there and can be written to, or can be made.

    Raises:
        NotADirectoryError: If one of them is a file.
        PermissionError: If nothing may be made in the lowest that is there.
    """
    parents = Path(os.path.realpath(path)).parents
    lowest = next(parent for parent in parents if os.path.lexists(parent))
    if not lowest.is_dir():
        raise NotADirectoryError(f"{path} cannot be made: {lowest} is a file, not a folder.")
    if not os.access(lowest, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be made: nothing may be written to {lowest}.")


@contextmanager
def new_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Makes a folder that is complete or absent, whenever the process ends.

    Args:
        folder: The folder to be: not there yet, or empty, in which case it keeps its permissions. Folders above it are
            made if need be.

    Yields:
        A folder beside it to fill, named `.NAME-*.partial`. At the end it takes its place; after an exception it is
        removed. It is left behind, to be deleted by hand, only by a process that is killed (SIGKILL, a power cut).

    Raises:
        FileExistsError: If it is a file, a folder with something in it, the current folder, or a mount point.
        NotADirectoryError: If a file is in the place of a folder above it.
        PermissionError: If it may not be made there.
    """
    path = check_new_folder(folder).resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=".partial", dir=path.parent))
    try:
        if path.is_dir():
            mode = stat.S_IMODE(path.stat().st_mode)
        else:
            mask = os.umask(0)
            os.umask(mask)
            # What mkdtemp makes is for its owner alone. What else it has is inherited.
            mode = stat.S_IMODE(partial.stat().st_mode) | (0o777 & ~mask)
        partial.chmod(mode | stat.S_IRWXU)
        yield partial
        check_new_folder(path)
        partial.chmod(mode)
        partial.replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_new_file(path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Makes sure that a file can be written, before long work is done for it.

    Args:
        path: The file to be.
        overwrite: Whether a file of this name may be replaced.

    Returns:
        Its path.

    Raises:
        FileExistsError: If it is there and must not be replaced, or is a folder.
    """
    file = Path(path)
    if file.is_dir():
        raise FileExistsError(f"{file} is a folder. Name a file.")
    if os.path.lexists(file) and not overwrite:
        raise FileExistsError(f"{file} exists; choose another name or allow overwriting it (overwrite).")
    return file


def check_text_output(
    path: str | os.PathLike[str], *, inputs: Iterable[str | os.PathLike[str]], overwrite: bool = False
) -> Path:
    """Makes sure that a text can be written to a file, as plain text and without harm to those that it is made from.

    Args:
        path: The file to be.
        inputs: The files that are read.
        overwrite: Whether a file of this name may be replaced.

    Returns:
        Its path.

    Raises:
        FileExistsError: If it is there and must not be replaced, or is a folder.
        ValueError: If it ends in `.gz`, or is one of `inputs`.
    """
    file = Path(path)
    if file.suffix == ".gz":
        raise ValueError(f"{file}: the output is written as plain text; leave out .gz.")
    if file.exists() and any(file.samefile(source) for source in inputs):
        raise ValueError(f"{file}: the output file is the input file.")
    return check_new_file(file, overwrite=overwrite)


@contextmanager
def new_file(path: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[Path]:
    """Writes a file that is complete or absent, whenever the process ends.

    Args:
        path: The file to be. Folders above it are made if need be.
        overwrite: Whether a file of this name may be replaced, which happens at the end.

    Yields:
        A path beside it to write to. At the end it takes its place; after an exception it is removed.

    Raises:
        FileExistsError: If it is there and must not be replaced, or is a folder.
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
