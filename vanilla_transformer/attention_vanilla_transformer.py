"""How the attention of section 3.2 is laid out and computed, apart from what it is.

Shapes: R rows, B batch, L length, H heads, K number of keys, D d_model.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# With more keys torch's kernel for half precision is as fast as the one for float32.
_MOST_KEYS = 256

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def fold_rows(states: torch.Tensor, rows: int) -> torch.Tensor:
    """Lays groups of rows end to end: (R, L, D) to (rows, R / rows * L, D).

    Raises:
        ValueError: If the rows cannot be divided.
    """
    if states.shape[0] == rows:
        return states
    if states.shape[0] % rows:
        raise ValueError(f"{states.shape[0]} target rows cannot be divided among {rows} sources.")
    return states.reshape(rows, -1, states.shape[-1])


def unfold_weights(weights: torch.Tensor | None, rows: int, length: int) -> torch.Tensor | None:
    """Takes groups of rows that were laid end to end apart: (B, H, rows / B * L, K) to (rows, H, L, K)."""
    if weights is None or weights.shape[0] == rows:
        return weights
    return weights.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1)


def is_faster_in_float32(implementation: str | None, module: nn.Module, key: torch.Tensor) -> bool:
    """Whether "sdpa" trains faster by way of float32, the keys being (B, H, K, d).

    On a CPU torch's backward pass takes four times as long in half precision as in float32, up to some length. Float32
    is the more exact way, too.
    """
    return (
        implementation == "sdpa"
        and key.device.type == "cpu"
        and key.dtype in (torch.bfloat16, torch.float16)
        and module.training
        and key.shape[2] <= _MOST_KEYS
    )


def in_float32(attention: AttentionFunction) -> AttentionFunction:
    """Returns the same attention computed in float32, with its context (B, L, H, d) in the queries' type."""

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if attention_mask is not None and attention_mask.is_floating_point():
            attention_mask = attention_mask.float()
        with torch.autocast(query.device.type, enabled=False):
            context, weights = attention(module, query.float(), key.float(), value.float(), attention_mask, **kwargs)
        return context.to(query.dtype), weights

    return attend


__all__ = ["fold_rows", "in_float32", "is_faster_in_float32", "unfold_weights"]
