"""Section 3.2: attention, from equation 1 to the three uses of multi-head attention.

Shapes: B  batch, R  rows (of which several may share a source), L  length, K  number of keys (cached ones included),
D  d_model, H  heads, d_k and d_v  size of one head's keys and values.
"""

from collections.abc import Callable
from typing import Any, Unpack, cast

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import TransformersKwargs

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .linear_vanilla_transformer import project

# Beyond this, the weights of all heads would take more memory than the rest of a layer.
_MOST_KEYS = 256

AttentionFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def scaled_dot_product_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equation 1: Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V; the library's "eager" attention.

    From queries (B, H, L, d_k), keys (B, H, K, d_k) and values (B, H, K, d_v) to the context (B, L, H, d_v) and the
    weights (B, H, L, K). The mask (B or 1, 1, L, K) is true where allowed, or added to the scores; `scaling` is
    1 / sqrt(d_k), and `dropout` the probability of dropping a weight.
    """
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None and attention_mask.dtype is torch.bool:
        least = torch.finfo(scores.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=scores.dtype).masked_fill(~attention_mask, least)
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights = nn.functional.dropout(weights.to(value.dtype), p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class MultiHeadAttention(nn.Module):
    """3.2.2: MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O, head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V).

    The matrices of all heads lie side by side in one linear map: `q_proj` and `k_proj` are (H * d_k, D), `v_proj` is
    (H * d_v, D) and `out_proj` is (D, H * d_v).
    """

    def __init__(self, config: VanillaTransformerConfig, num_heads: int, layer_idx: int, is_causal: bool) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.is_causal = is_causal
        self.num_heads = num_heads
        d_k = config.d_model // num_heads if config.d_k is None else config.d_k
        d_v = config.d_model // num_heads if config.d_v is None else config.d_v
        self.scaling = d_k**-0.5
        self.attention_dropout = config.attention_dropout
        self.q_proj = nn.Linear(config.d_model, num_heads * d_k, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.d_model, num_heads * d_k, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.d_model, num_heads * d_v, bias=config.attention_bias)
        self.out_proj = nn.Linear(num_heads * d_v, config.d_model, bias=config.attention_bias)

    def split_heads(self, states: torch.Tensor) -> torch.Tensor:
        """Maps (B, L, H * d) to (B, H, L, d)."""
        return states.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def attend(
        self,
        hidden_states: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attends from (B, L, D) to keys (B, H, K, d_k) and values (B, H, K, d_v); also gives weights (B, H, L, K)."""
        # The beams of a sentence, side by side, share the row of its source as one longer sequence of queries.
        queries = fold_rows(hidden_states, key.shape[0])
        context, weights = choose_attention(self, key)(
            self,
            self.split_heads(project(self.q_proj, queries)),
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        weights = unfold_weights(weights, *hidden_states.shape[:2])
        return project(self.out_proj, context.flatten(2)).view(hidden_states.shape), weights


class SelfAttention(MultiHeadAttention):
    """Queries, keys and values come from the same sequence (3.2.3, second and third item)."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Maps (B, L, D) to (B, L, D) and the weights (B, H, L, K); appends to the cache, if there is one."""
        hidden_states = cast_once(hidden_states)
        key = self.split_heads(project(self.k_proj, hidden_states))
        value = self.split_heads(project(self.v_proj, hidden_states))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        return self.attend(hidden_states, key, value, attention_mask, **kwargs)


class CrossAttention(MultiHeadAttention):
    """Queries come from the decoder, keys and values from the encoder's output (3.2.3, first item)."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Maps (B, T, D) to (B, T, D) and the weights (B, H, T, S); projects the source once per cache."""
        if past_key_values is not None and past_key_values.is_updated.get(self.layer_idx):
            cached: Any = past_key_values.cross_attention_cache.layers[self.layer_idx]
            return self.attend(hidden_states, cached.keys, cached.values, attention_mask, **kwargs)
        states = cast_once(cast(torch.Tensor, encoder_hidden_states))
        key, value = self.split_heads(project(self.k_proj, states)), self.split_heads(project(self.v_proj, states))
        if past_key_values is not None:
            key, value = past_key_values.cross_attention_cache.update(key, value, self.layer_idx)
            past_key_values.is_updated[self.layer_idx] = True
        return self.attend(hidden_states, key, value, attention_mask, **kwargs)


# How it is computed


def cast_once(states: torch.Tensor) -> torch.Tensor:
    """Casts (..., D) to what autocast multiplies in: once, or each map that reads it would, and keep a copy."""
    kind = states.device.type
    if states.dtype is torch.float32 and torch.is_autocast_enabled(kind):
        return states.to(torch.get_autocast_dtype(kind))
    return states


def choose_attention(module: MultiHeadAttention, key: torch.Tensor) -> AttentionFunction:
    """Returns what computes equation 1 for keys (B, H, K, d_k), as `attn_implementation` says; "eager" is ours."""
    implementation = module.config._attn_implementation
    attention: AttentionFunction = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, scaled_dot_product_attention)
    return attend_without_kernel if is_slow_kernel(implementation, module, key) else attention


def check_cache_implementation(implementation: str | None, cache_implementation: str | None) -> None:
    """Refuses flex attention with a static cache of `generate`."""
    if implementation == "flex_attention" and "static" in (cache_implementation or ""):
        raise ValueError(
            f"cache_implementation={cache_implementation!r} needs masks that are tensors, and those of flex attention "
            'are not: load the model with attn_implementation="sdpa", or leave the cache as it is.'
        )


def fold_rows(states: torch.Tensor, rows: int) -> torch.Tensor:
    """Lays groups of rows end to end: (R, L, D) to (rows, R / rows * L, D)."""
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


def is_slow_kernel(implementation: str | None, module: nn.Module, key: torch.Tensor) -> bool:
    """Whether "sdpa" is the slow kernel of bfloat16 in training on a CPU: ten times as long as equation 1."""
    return (
        implementation == "sdpa"
        and key.device.type == "cpu"
        and key.dtype is torch.bfloat16
        and module.training
        and key.shape[2] <= _MOST_KEYS
    )


def attend_without_kernel(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Equation 1 with the masks of "sdpa", which are `None` where only the future is hidden, and with no weights."""
    length, keys = query.shape[2], key.shape[2]
    if attention_mask is None and module.is_causal and length > 1:
        attention_mask = torch.ones(1, 1, length, keys, dtype=torch.bool, device=query.device).tril()
    return scaled_dot_product_attention(module, query, key, value, attention_mask, **kwargs)[0], None
