"""R-Drop (Liang et al., 2021): two passes with different dropout, whose predictions are to agree.

Shapes: B batch, T target length, V vocabulary.
"""

from typing import Any

import torch

from vanilla_transformer.model.loss_vanilla_transformer import IGNORED_LABEL


def repeat_rows(inputs: dict[str, Any]) -> dict[str, Any]:
    """The batch twice, as one of 2 B rows: dropout treats every row on its own."""
    return {name: torch.cat([each, each]) if torch.is_tensor(each) else each for name, each in inputs.items()}


def sum_divergences(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over tokens of (KL(p || q) + KL(q || p)) / 2 between the two halves of logits (2 B, T, V): a scalar.

    `labels` (2 B, T) say which tokens count: all but those of -100.
    """
    counted = labels != IGNORED_LABEL
    one, other = logits[counted].float().log_softmax(dim=-1).chunk(2)
    return ((one.exp() - other.exp()) * (one - other)).sum() / 2
