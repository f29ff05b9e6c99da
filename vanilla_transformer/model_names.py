"""What a user calls a model: the folder that it is in, or its name on the Hub."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]


def check_model_name(model_name_or_path: str | os.PathLike[str]) -> None:
    """Makes sure that it is a folder, or may be a name on the Hub: where it is neither, the Hub's client only puzzles.

    Args:
        model_name_or_path: What the user gave.

    Raises:
        FileNotFoundError: If there is no such folder, and no model on the Hub can have that name.
        NotADirectoryError: If it is a file.
    """
    # Unlike Path's, these take what is too long to be a path, or may not be looked at, for what is not there.
    if os.path.isdir(model_name_or_path):
        return
    if os.path.exists(model_name_or_path):
        raise NotADirectoryError(f"{model_name_or_path} is a file. Name the folder of a model, or a model on the Hub.")
    try:
        validate_repo_id(os.fspath(model_name_or_path))
    except HFValidationError as error:
        raise FileNotFoundError(f"There is no folder {model_name_or_path}.") from error


@contextmanager
def explain_missing_model(model_name_or_path: str | os.PathLike[str]) -> Iterator[None]:
    """Says of a model that cannot be loaded that there is no such folder, before what the Hub's client has to say.

    Args:
        model_name_or_path: The model that is loaded within.

    Raises:
        OSError: If there is no such model (see [`check_model_name`]), or the Hub cannot be asked.
    """
    check_model_name(model_name_or_path)
    try:
        yield
    except OSError as error:
        if os.path.isdir(model_name_or_path):
            raise
        raise OSError(
            f"There is no folder {model_name_or_path}, and no model of that name could be loaded from the Hub: {error}"
        ) from error


__all__ = ["check_model_name", "explain_missing_model"]
