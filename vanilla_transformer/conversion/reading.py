"""Reads the files of other systems, and runs nothing that they contain."""

import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .errors import ConversionError

# What torch says of a pickle that names more than tensors.
CODE_IN_PICKLE = re.compile(r"GLOBAL ([\w.]+)")


def read_checkpoint(path: str | os.PathLike[str], *, allowed: Sequence[Any] = ()) -> Any:
    """Reads what `torch.save` wrote, or a safetensors file.

    Args:
        path: The file.
        allowed: Classes and functions that the pickle may name besides tensors and Python's own containers; each as in
            `torch.serialization.safe_globals`: itself, or (itself, the name that the file has for it).

    Returns:
        What the file holds, on the CPU.

    Raises:
        ConversionError: If there is no such file, it is damaged or of another kind, or it needs code to be run.
    """
    path = Path(path)
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "no file"
        raise ConversionError(f"{path} is {kind}: name the file of the checkpoint.")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ConversionError(f"{path} is not a whole safetensors file: {error}") from error
    try:
        with torch.serialization.safe_globals(list(allowed)), warnings.catch_warnings():
            # That it was not torch.save that wrote the pickle is said in the error, if it is one.
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConversionError(_explain_refusal(path, str(error))) from error
    except Exception as error:  # there is nothing that the bytes of a damaged pickle cannot raise
        raise ConversionError(f"{path} ({path.stat().st_size:,} bytes) is truncated or damaged: {error}") from error


def _explain_refusal(path: Path, message: str) -> str:
    found = CODE_IN_PICKLE.search(message)
    if found is None:
        return f"{path} is no checkpoint that torch.save wrote, or it is damaged: {message.splitlines()[0]}"
    return (
        f"{path} holds more than weights: it needs {found[1]}, and reading that would run code of the file. Save its "
        "weights alone (with torch.save, or as safetensors) in the system that made it."
    )


def scan_pickles(path: str | os.PathLike[str]) -> Iterator[tuple[str, Any]]:
    """Goes through the operations in a file of `torch.save`, and does none of them.

    Args:
        path: The file, an archive or, in torch's old format, several pickles one behind the other.

    Yields:
        The name and the argument of each operation, as `pickletools` has them; as many as are legible. What is wrong
        with the file is told by whoever reads it next.
    """
    with Path(path).open("rb") as file:
        try:
            if zipfile.is_zipfile(file):
                archive = zipfile.ZipFile(file)
                pickles: list[IO[bytes]] = [
                    archive.open(name) for name in archive.namelist() if name.endswith("/data.pkl")
                ]
            else:
                file.seek(0)
                pickles = [file] * 4  # the format's number, its version, the machine, the content
            for stream in pickles:
                yield from ((opcode.name, argument) for opcode, argument, _ in pickletools.genops(stream))
        except Exception:  # there is nothing that the bytes of a damaged pickle cannot raise
            return


def check_weights(content: Any, path: str | os.PathLike[str], place: str = "") -> dict[str, torch.Tensor]:
    """Makes sure that something read is a dictionary of tensors.

    Args:
        content: What was read.
        path: Where from, for messages.
        place: Where in the file, such as "its entry 'model'".

    Returns:
        The same, typed.

    Raises:
        ConversionError: If it is anything else.
    """
    where = f"{path}, {place}," if place else f"{path}"
    if not isinstance(content, Mapping) or not content:
        raise ConversionError(f"{where} is no state dict (a dictionary of weights) but {type(content).__name__}.")
    strange = [name for name, value in content.items() if not isinstance(value, torch.Tensor)]
    if strange:
        raise ConversionError(f"{where} holds more than weights: {', '.join(map(repr, strange[:8]))}.")
    return dict(content)
