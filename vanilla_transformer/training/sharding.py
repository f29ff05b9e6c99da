"""FSDP2 and tables of embeddings that several modules share: dividing the model among processes, and saving it.

Two things that accelerate and transformers do on top of `fully_shard` go wrong with encoder-decoder models:

- accelerate (1.15) makes a group of the input's table and the output layer. Where tables are shared, the encoder and
  the decoder have the same weights outside that group, which torch refuses (from 2.13) or unties (before).
- Each name of a shared table would be saved as a tensor of its own, and with the code of torch's class.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.accelerator import Accelerator
from torch import nn
from transformers import PreTrainedModel


def is_sharded(model: nn.Module | None) -> bool:
    """Whether `fully_shard` (FSDP2) divided the model."""
    return torch.distributed.is_available() and _is_sharded_class(type(model))


def _is_sharded_class(kind: type) -> bool:
    """Whether a class is FSDP2's own, or one that it made of another."""
    from torch.distributed.fsdp import FSDPModule

    return issubclass(kind, FSDPModule)


def keep_tables_together(accelerator: Accelerator) -> None:
    """Makes `accelerator.prepare` divide tables and output layer with all that is in no layer, where it uses FSDP2."""
    if getattr(accelerator, "is_fsdp2", False):
        accelerator.prepare = partial(_prepare_without_tables, accelerator.prepare)


def _prepare_without_tables(prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Hides tables and output layer from accelerate, which would make a group of them."""
    models = [model for model in args if isinstance(model, PreTrainedModel)]
    hidden = [(model, name) for model in models for name in ("get_input_embeddings", "get_output_embeddings")]
    for model, name in hidden:
        setattr(model, name, lambda: None)
    try:
        return prepare(*args, **kwargs)
    finally:
        for model, name in hidden:
            delattr(model, name)


@contextmanager
def unsharded_class(model: nn.Module) -> Iterator[None]:
    """Gives a model that `fully_shard` divided its own class back for a while, for code that looks at the class."""
    sharded = type(model)
    if is_sharded(model):
        model.__class__ = next(kind for kind in sharded.__mro__[1:] if not _is_sharded_class(kind))
    try:
        yield
    finally:
        model.__class__ = sharded


def drop_tied_copies(model: PreTrainedModel, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves one name of each shared table of gathered weights, the one that an undivided model is saved with."""
    tied = model.all_tied_weights_keys
    return {name: tensor for name, tensor in state_dict.items() if tied.get(name) not in state_dict}


def save_sharded_model(model: PreTrainedModel, folder: str) -> None:
    """Saves a model that `fully_shard` divided as if it had not. All processes call it, and the first writes."""
    if not is_sharded(model):
        raise ValueError(f"{type(model).__name__} was not divided by fully_shard: call its own save_pretrained.")
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if torch.distributed.get_rank() == 0:
        with unsharded_class(model):
            model.save_pretrained(folder, state_dict=drop_tied_copies(model, weights))
    torch.distributed.barrier()
