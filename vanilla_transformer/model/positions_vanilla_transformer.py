"""Section 3.5: what tells the Transformer the order of its tokens.

Shapes: B batch, L length, K number of keys, D d_model.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from transformers.cache_utils import Cache, StaticLayer

from .configuration_vanilla_transformer import VanillaTransformerConfig


def interleaved_sinusoids(positions: torch.Tensor, d_model: int) -> torch.Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d)); the paper's formula."""
    exponents = torch.arange(0, d_model, 2, dtype=positions.dtype, device=positions.device) / d_model
    angles = positions[..., None] * 10000**-exponents
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


def concatenated_sinusoids(positions: torch.Tensor, d_model: int) -> torch.Tensor:
    """The paper's values with all sines before all cosines (Marian)."""
    table = interleaved_sinusoids(positions, d_model)
    return torch.cat([table[..., 0::2], table[..., 1::2]], dim=-1)


def tensor2tensor_sinusoids(positions: torch.Tensor, d_model: int) -> torch.Tensor:
    """Sines before cosines, frequencies from 1 to exactly 1/10000 (tensor2tensor, fairseq, FSMT)."""
    half = d_model // 2
    exponents = torch.arange(half, dtype=positions.dtype, device=positions.device) / (half - 1)
    angles = positions[..., None] * 10000**-exponents
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


SINUSOIDS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sinusoidal": interleaved_sinusoids,
    "sinusoidal_concatenated": concatenated_sinusoids,
    "sinusoidal_tensor2tensor": tensor2tensor_sinusoids,
}


class SinusoidalPositions(nn.Module):
    """Sinusoids of any position: read from a table, computed where the table ends."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__()
        self.sinusoids = SINUSOIDS[config.position_embedding_type]
        self.d_model = config.d_model
        self.offset = config.position_offset
        weight = torch.empty(config.max_position_embeddings, config.d_model)
        self.register_buffer("weight", weight, persistent=False)
        self.weight: torch.Tensor
        self._fill()

    def make_table(self, rows: int) -> torch.Tensor:
        """The sinusoids of the first positions, (rows, D), of the table's type and on its device."""
        return self.encode(torch.arange(rows, device=self.weight.device)).to(self.weight.dtype)

    @torch.no_grad()
    def _fill(self) -> None:
        if not self.weight.is_meta:
            self.weight.copy_(self.make_table(len(self.weight)))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "SinusoidalPositions":
        """Computes the table anew after each change of type or device: no file has it, and `to_empty` forgets it."""
        super()._apply(fn, recurse)
        self._fill()
        return self

    def encode(self, positions: torch.Tensor) -> torch.Tensor:
        """Maps positions (...) to sinusoids (..., D) in float64: in float32 the angles err by 4e-4 at 5,000."""
        # MPS has no float64.
        precise = torch.float32 if positions.device.type == "mps" else torch.float64
        return self.sinusoids(positions.to(precise), self.d_model)

    def resize(self, rows: int) -> None:
        """Makes the table longer or shorter."""
        self.weight = self.make_table(rows)

    def forward(self, token_indices: torch.Tensor, upper_bound: int) -> torch.Tensor:
        """Maps indices of tokens (B or 1, L), all below `upper_bound`, to (B or 1, L, D)."""
        positions = token_indices + self.offset
        # The bound is a Python integer, so that no compiled graph has to look at the positions themselves.
        if upper_bound + self.offset <= self.weight.shape[0]:
            return nn.functional.embedding(positions, self.weight)
        return self.encode(positions).to(self.weight.dtype)


class LearnedPositions(nn.Embedding):
    """A trained vector per position (Table 3, row E)."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config.max_position_embeddings, config.d_model)
        self.offset = config.position_offset

    def resize(self, rows: int) -> None:
        """Makes the table longer, by vectors as those of a new model, or shorter."""
        kept = min(rows, self.num_embeddings)
        weight = self.weight.new_empty(rows, self.embedding_dim).normal_(std=self.embedding_dim**-0.5)
        weight[:kept] = self.weight.detach()[:kept]
        self.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)
        self.num_embeddings = rows

    def forward(self, token_indices: torch.Tensor, upper_bound: int) -> torch.Tensor:  # type: ignore[override]
        """Maps indices of tokens (B or 1, L), all below `upper_bound`, to (B or 1, L, D)."""
        if upper_bound + self.offset > self.num_embeddings:
            # Padding does not count. Looking at the indices is slow on a GPU, and impossible in a compiled graph.
            length = upper_bound if torch.compiler.is_compiling() else int(token_indices.max()) + 1
            if length + self.offset > self.num_embeddings:
                raise ValueError(
                    f"A sequence of {length} tokens is too long for learned positions: "
                    f"max_position_embeddings={self.num_embeddings} and position_offset={self.offset} allow "
                    f"{self.num_embeddings - self.offset}."
                )
        return super().forward(token_indices + self.offset)


def count_learned_positions(config: Any) -> int | None:
    """How many tokens a sequence of this package's models may have, by any configuration; `None`: any number."""
    if config.model_type != VanillaTransformerConfig.model_type or config.position_embedding_type != "learned":
        return None
    return int(config.max_position_embeddings - config.position_offset)


def count_positions(cache: Cache | None, length: int) -> tuple[int | torch.Tensor, int]:
    """Returns the number of cached positions, and an upper bound (int) of it after `length` more tokens."""
    past_length = 0 if cache is None else cache.get_seq_length()
    if cache is not None and cache.is_compileable:
        # A static cache keeps its length in a tensor, on which a compiled graph cannot branch.
        return past_length, cast(StaticLayer, cache.layers[0]).max_cache_len
    return past_length, past_length + length


def count_tokens_before(
    attention_mask: torch.Tensor | None, length: int, past_length: int | torch.Tensor, device: torch.device
) -> torch.Tensor:
    """Numbers the tokens of a sequence from 0, leaving out padding, so that padding on either side changes nothing.

    The mask is `None`, (B, past + L), or the causal mask (B, 1, L, K), whose rows allow as many keys as there have been
    tokens, their own included. Returns the indices (B or 1, L) of the last `length` positions.
    """
    if attention_mask is None:
        return (torch.arange(length, device=device) + past_length)[None]
    if attention_mask.ndim == 2:
        if isinstance(past_length, int) and not torch.compiler.is_compiling():
            expected = past_length + length
            if attention_mask.shape[1] != expected:
                raise ValueError(
                    f"The mask has {attention_mask.shape[1]} positions; it must have {expected}: {past_length} of the"
                    f" cache and {length} new ones."
                )
        counts = attention_mask.to(device=device, dtype=torch.long).cumsum(dim=-1)[:, -length:]
    else:
        allowed = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        counts = allowed[:, 0].to(device).sum(dim=-1)
    return (counts - 1).clamp(min=0)
