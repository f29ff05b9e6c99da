"""The systems that our models can be taken back to."""

from collections.abc import Callable
from pathlib import Path

from .systems.marian import save_as_marian
from .systems.torch_module import save_as_torch_nn

# Each takes the model, its tokenizer and the folder to make, complete or absent.
TARGETS: dict[str, Callable[..., Path]] = {"marian": save_as_marian, "torch_nn": save_as_torch_nn}
