"""Compares a converted model with the original where the original is other people's code.

Shapes: B  sentences, S  source length, T  target length, V  target vocabulary.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch

from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

from .errors import ConversionError

TOLERANCE = 1e-5  # of logits in float32, relative to the largest

_LENGTHS, _TARGET_LENGTH = (12, 7, 1), 9  # less where the positions end before

Batch = dict[str, torch.Tensor]


def draw_batch(config: VanillaTransformerConfig) -> Batch:
    """Draws sources of unequal lengths, padded on the right, and targets of equal ones.

    Args:
        config: The model's configuration.

    Returns:
        `input_ids` and `attention_mask` (B, S), `decoder_input_ids` (B, T), which begin with the start symbol. Apart
        from that, no token is a special one.
    """
    generator = torch.Generator().manual_seed(0)
    most = max(config.max_position_embeddings - config.position_offset, 1)
    lengths = [min(length, most) for length in _LENGTHS]
    special = {config.pad_token_id, config.bos_token_id, config.eos_token_id, config.decoder_start_token_id}

    def draw(vocab_size: int, length: int) -> torch.Tensor:
        legal = torch.tensor([token for token in range(vocab_size) if token not in special])
        return legal[torch.randint(len(legal), (len(_LENGTHS), length), generator=generator)]

    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    sources = draw(config.vocab_size, max(lengths)).masked_fill(~mask, config.pad_token_id or 0)
    targets = draw(config.target_vocab_size, min(_TARGET_LENGTH, most))
    targets[:, 0] = config.decoder_start_token_id or 0
    return {"input_ids": sources, "attention_mask": mask.long(), "decoder_input_ids": targets}


def compare_with(
    compute: Callable[[Batch], torch.Tensor], model: VanillaTransformerForConditionalGeneration
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the same batch to the original and to the model.

    Args:
        compute: Computes the original's logits (B, T, V) of a batch from `draw_batch`, in float32.
        model: The converted model.

    Returns:
        The original's logits and the model's, (B, T, V), in float32.
    """
    batch = draw_batch(model.config)
    with torch.no_grad():
        expected = compute(batch)  # with a copy in float32 that is gone before the next is made
        return expected, as_float32(model)(**batch, use_cache=False).logits


def check_logits(expected: torch.Tensor, actual: torch.Tensor, subject: str) -> float:
    """Makes sure that two models compute the same.

    Args:
        expected: Logits of the one (B, T, V).
        actual: Logits of the other, for the same batch.
        subject: What the other is, and computes otherwise if so: "The converted model computes something else than X".

    Returns:
        The largest difference as a fraction of the largest logit.

    Raises:
        ConversionError: If it is above 1e-5 (`TOLERANCE`), or a logit is not a number.
    """
    difference = float((expected - actual).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:
        raise ConversionError(
            f"{subject}: logits differ by {difference:.1e} of the largest, and may by {TOLERANCE:.0e}. This is an error"
            " of the converter, or the original has a feature that it does not know of."
        )
    return difference


def check_counterpart(
    compute: Callable[[Batch], torch.Tensor], model: VanillaTransformerForConditionalGeneration, subject: str
) -> float:
    """Makes sure that what was made of a model computes the same as the model.

    Args:
        compute: Computes the counterpart's logits (B, T, V) of a batch from `draw_batch`, which is on the model's
            device, in float32.
        model: The model, which may be in training mode.
        subject: As in [`check_logits`].

    Returns:
        The largest difference as a fraction of the largest logit.

    Raises:
        ConversionError: As [`check_logits`] does.
    """
    batch = {name: tensor.to(model.device) for name, tensor in draw_batch(model.config).items()}
    was_training = model.training
    try:
        with torch.no_grad():
            expected = as_float32(model.eval())(**batch, use_cache=False).logits
            return check_logits(expected, compute(batch), subject)
    finally:
        model.train(was_training)


def as_float32(model: Any) -> Any:
    """Returns a model, or a copy of it if it is not in float32."""
    is_precise = all(tensor.dtype == torch.float32 for tensor in model.parameters())
    return model if is_precise else copy.deepcopy(model).float()
