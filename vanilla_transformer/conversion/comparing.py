"""Compares a converted model with the original where the original is other people's code.

Shapes: B  sentences, S  source length, T  target length, V  target vocabulary.
"""

import copy
from collections.abc import Callable

import torch

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

_LENGTHS, _TARGET_LENGTH = (12, 7, 1), 9

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
    special = {config.pad_token_id, config.bos_token_id, config.eos_token_id, config.decoder_start_token_id}

    def draw(vocab_size: int, length: int) -> torch.Tensor:
        legal = torch.tensor([token for token in range(vocab_size) if token not in special])
        return legal[torch.randint(len(legal), (len(_LENGTHS), length), generator=generator)]

    mask = torch.arange(max(_LENGTHS)) < torch.tensor(_LENGTHS)[:, None]
    sources = draw(config.vocab_size, max(_LENGTHS)).masked_fill(~mask, config.pad_token_id or 0)
    targets = draw(config.target_vocab_size, _TARGET_LENGTH)
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
    if model.dtype != torch.float32:
        model = copy.deepcopy(model).float()
    with torch.no_grad():
        return compute(batch), model(**batch, use_cache=False).logits
