"""Why a model cannot be brought in or out."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.data.vocabularies import get_vocabularies
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.positions_vanilla_transformer import LearnedPositions, SinusoidalPositions


class ConversionError(ValueError):
    """A model cannot be converted; the message says why, all reasons together."""


def refuse(subject: str, reasons: Iterable[str]) -> None:
    """Raises a `ConversionError` with all reasons, each on a line of its own, if there is at least one."""
    listed = list(reasons)
    if listed:
        raise ConversionError(f"{subject}:" + "".join(f"\n  - {reason}" for reason in listed))


def find_differences(settings: object, wanted: dict[str, tuple[object, ...]]) -> list[str]:
    """Returns a reason for each attribute of `settings` whose value is not wanted; absent ones are None."""
    found = {name: getattr(settings, name, None) for name in wanted}
    different = [name for name, value in found.items() if value not in wanted[name]]
    return [f"{name} is {found[name]!r} (can be: {', '.join(map(repr, wanted[name]))})" for name in different]


def find_non_finite(weights: Mapping[str, torch.Tensor]) -> list[str]:
    """Returns a reason for each weight that holds NaN or infinity, of which every translation would be nonsense."""
    counts = {name: tensor.numel() - int(tensor.isfinite().count_nonzero()) for name, tensor in weights.items()}
    return [f"{name} holds NaN or infinity ({count} of its numbers)" for name, count in counts.items() if count]


def find_strange_weights(model: nn.Module) -> list[str]:
    """Returns a reason for each weight that is not finite, or one for the first in a form that says not all of it.

    Such a form is that of adapters, or of fewer bits: the weight would be taken out as if it were all there is.
    """
    known = (nn.Linear, nn.LayerNorm, nn.Embedding, SinusoidalPositions, LearnedPositions)
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and (type(module) not in known or not weight.is_floating_point()):
            kind = f"{type(module).__module__}.{type(module).__name__}"
            return [f"{name} is {kind}, whose weights may be others: merge adapters, and load the model unquantized"]
    return find_non_finite(model.state_dict())


def find_excess_tokens(tokenizer: PreTrainedTokenizerBase | None, config: VanillaTransformerConfig) -> list[str]:
    """Returns a reason for each side of a tokenizer, if there is one, that has ids beyond the model's embeddings."""
    sizes = {"source": config.vocab_size, "target": config.target_vocab_size}
    vocabularies = () if tokenizer is None else get_vocabularies(tokenizer)
    largest = [max(vocabulary.values(), default=-1) for vocabulary in vocabularies]
    return [
        f"the {name} vocabulary has the id {found}, and the model {sizes[name]} tokens"
        for name, found in zip(sizes, largest, strict=False)
        if found >= sizes[name]
    ]


def list_head_sizes(config: VanillaTransformerConfig) -> tuple[int | None, ...]:
    """Returns the values of `d_k` and `d_v` that a system can hold whose heads divide d_model among them."""
    sizes = {config.d_model / heads for heads in (config.encoder_attention_heads, config.decoder_attention_heads)}
    # With another number of heads in each stack, one given size cannot be both's.
    return (None, *(int(size) for size in sizes if len(sizes) == 1 and size.is_integer()))
