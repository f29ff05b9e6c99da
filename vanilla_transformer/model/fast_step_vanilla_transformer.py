"""The decoder's layers for one more token, without calling modules.

A step of decoding does little arithmetic, so that what surrounds it counts: with one sentence, calling the modules of
modeling_vanilla_transformer.py takes as long as their arithmetic. Here the same sub-layers are written as functions of
the modules' weights, for one new token a row, in evaluation mode, where dropout does nothing. The modules are the
reference: this is used only while nobody has attached anything to one of them, and the tests compare the two.

Shapes: B  sentences, R  rows (the beams of all sentences, side by side), D  d_model, S  source length, V  vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .linear_vanilla_transformer import is_watched, linear


def can_step_fast(model: Any) -> bool:
    """Whether `step_fast` does what the model would: nothing is hooked, wrapped, quantised or in training mode."""
    if model.training or model.config._attn_implementation != "sdpa":
        return False
    modules = [model.model, *model.model.decoder.modules(), *model.lm_head.modules()]
    return not any(map(is_watched, modules)) and all(
        type(module) is nn.Linear for module in [model.lm_head, *_linear_maps(model.model.decoder)]
    )


def _linear_maps(decoder: Any) -> list[nn.Module]:
    """What must be linear maps for `step_fast`, whatever has been put in their places."""
    maps = []
    for layer in decoder.layers:
        for attention in (layer.self_attn, layer.encoder_attn):
            maps += [attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj]
        maps += [layer.fc1, layer.fc2]
    return maps


def step_fast(
    model: Any,
    hidden_states: torch.Tensor,
    histories: Sequence[Any],
    sources: Sequence[Any],
    mask: torch.Tensor | None,
    source_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Decodes one more token of each row.

    Args:
        model: A `VanillaTransformerForConditionalGeneration`.
        hidden_states: The new tokens' embeddings with positions, (R, D).
        histories: Each layer's history, whose `append` takes new keys and values (B, H, R / B, d) and returns all.
        sources: Each layer's keys and values of the source, as attributes `keys` and `values` (B, H, S, d).
        mask: Added to the scores of the history, (B, 1, R / B, entries).
        source_mask: The same for the source, (B, 1, 1, S).

    Returns:
        Logits of the next tokens, (R, V).
    """
    decoder = model.model.decoder
    for layer, history, source in zip(decoder.layers, histories, sources, strict=True):
        hidden_states = _step_layer(layer, hidden_states, history, source, mask, source_mask)
    return _apply(model.lm_head, decoder.layer_norm(hidden_states))


def _step_layer(
    layer: Any,
    hidden_states: torch.Tensor,
    history: Any,
    source: Any,
    mask: torch.Tensor | None,
    source_mask: torch.Tensor | None,
) -> torch.Tensor:
    norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
    for index, norm in enumerate(norms):
        inputs = _normalize(norm, hidden_states) if layer.normalize_before else hidden_states
        if index == 0:
            new_keys, new_values = (_split(layer.self_attn, name, inputs, source) for name in ("k", "v"))
            keys, values = history.append(new_keys, new_values)
            outputs = _attend(layer.self_attn, inputs, keys, values, mask)
        elif index == 1:
            outputs = _attend(layer.encoder_attn, inputs, source.keys, source.values, source_mask)
        else:
            outputs = _apply(layer.fc2, layer.activation_fn(_apply(layer.fc1, inputs)))
        hidden_states = hidden_states + outputs
        if not layer.normalize_before:
            hidden_states = _normalize(norm, hidden_states)
    return hidden_states


def _attend(
    attention: Any, inputs: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    queries = _apply(attention.q_proj, inputs).view(keys.shape[0], -1, attention.num_heads, keys.shape[3])
    context = nn.functional.scaled_dot_product_attention(
        queries.transpose(1, 2), keys, values, attn_mask=mask, scale=attention.scaling
    )
    return _apply(attention.out_proj, context.transpose(1, 2).reshape(inputs.shape[0], -1))


def _split(attention: Any, name: str, inputs: torch.Tensor, source: Any) -> torch.Tensor:
    """Projects to keys or values, (B, H, R / B, d)."""
    states = _apply(getattr(attention, f"{name}_proj"), inputs)
    sentences = source.keys.shape[0]
    heads = attention.num_heads
    return states.view(sentences, states.shape[0] // sentences, heads, states.shape[1] // heads).transpose(1, 2)


def _apply(layer: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    return linear(inputs, layer.weight, layer.bias)


def _normalize(norm: nn.LayerNorm, inputs: torch.Tensor) -> torch.Tensor:
    return torch.layer_norm(inputs, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
