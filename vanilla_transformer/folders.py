"""Folders and files that are there whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_new_folder(folder: str | os.PathLike[str]) -> Path:
    """Makes sure that a folder can be made, before long work is done for it.

    Args:
        folder: The folder to be: not there yet, or empty.

    Returns:
        Its path.

    Raises:
        FileExistsError: If it is a file, or a folder with something in it.
    """
    path = Path(folder)
    if path.is_dir() and not any(path.iterdir()):
        return path
    if os.path.lexists(path):
        kind = "a folder that is not empty" if path.is_dir() else "a file"
        raise FileExistsError(f"{path} is {kind}. Name a folder that is not there yet, or an empty one.")
    return path


@contextmanager
def new_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Makes a folder that is complete or absent, whenever the process ends.

    Args:
        folder: The folder to be: not there yet, or empty. Folders above it are made if need be.

    Yields:
        A folder beside it to fill. At the end it takes its place; after an exception it is removed.

    Raises:
        FileExistsError: If it is a file, or a folder with something in it.
    """
    path = check_new_folder(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=".partial", dir=path.resolve().parent))
    try:
        mask = os.umask(0)
        os.umask(mask)
        partial.chmod(0o777 & ~mask)  # what mkdtemp makes is for its owner alone
        yield partial
        check_new_folder(path)
        partial.replace(path.resolve())
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
