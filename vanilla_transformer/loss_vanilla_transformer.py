"""Section 5.4: the training loss with label smoothing."""

import torch
from torch import nn


def label_smoothed_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float,
    num_items_in_batch: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """Cross-entropy with the target smoothed towards the uniform distribution (5.4), in nats per token.

    Args:
        logits: (B, T, V).
        labels: (B, T); positions with -100 do not count.
        label_smoothing: The paper's epsilon_ls.
        num_items_in_batch: Number of tokens to divide by, where a batch is processed in parts (gradient accumulation,
            several processes); `None`: the number of labels that count.

    Returns:
        A scalar.
    """
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten().to(logits.device),
        ignore_index=-100,
        label_smoothing=label_smoothing,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


__all__ = ["label_smoothed_cross_entropy"]
