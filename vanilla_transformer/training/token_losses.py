"""Losses of logits that make their gradients themselves, for some tokens at a time.

Differentiated by torch, a loss of two distributions keeps a dozen tensors as large as the logits. Here it is one.

Shapes: B batch, T target length, V vocabulary, C passes over each sentence, N tokens that count, n some of them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from vanilla_transformer.model.loss_vanilla_transformer import IGNORED_LABEL

_CPU_CHUNK = 2**18  # logits at a time, of each pass: a megabyte, which the cache of a core holds
_CHUNK = 2**24  # the same on an accelerator, where many small kernels would wait for each other

# Given logits (C, n, V) in float32, labels (n, 1) and which of the B T tokens these are (n,): the sum of their losses,
# and the gradient, which may be made in the place of the logits.
RowLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def sum_token_losses(logits: torch.Tensor, labels: torch.Tensor, row_loss: RowLoss) -> torch.Tensor:
    """The sum over all tokens but those of -100 in labels (B, T), of logits (C B, T, V): a scalar.

    It has no second derivatives.
    """
    total: torch.Tensor = _SumOfLosses.apply(logits, labels, row_loss)
    return total


class _SumOfLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, row_loss: RowLoss) -> torch.Tensor:
        labels = labels.flatten().to(logits.device)
        rows = logits.reshape(-1, len(labels), logits.shape[-1])
        gradient = torch.zeros_like(rows)
        total = rows.new_zeros((), dtype=torch.float32)
        size = max(1, (_CPU_CHUNK if rows.device.type == "cpu" else _CHUNK) // rows.shape[-1])
        for places in (labels != IGNORED_LABEL).nonzero()[:, 0].split(size):
            loss, by_rows = row_loss(rows[:, places].float(), labels[places, None], places)
            total += loss
            gradient[:, places] = by_rows.to(gradient.dtype)
        ctx.save_for_backward(gradient.view_as(logits))
        return total

    @staticmethod
    def backward(ctx: Any, by_total: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if torch.is_grad_enabled():  # only with create_graph=True
            raise RuntimeError("Losses of R-Drop and of a teacher cannot be differentiated twice.")
        (gradient,) = ctx.saved_tensors
        return gradient * by_total.to(gradient.dtype), None, None


def normalize(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of logits (..., V), and log Z (..., 1) from them: logsumexp makes all exponentials once more."""
    probabilities = logits.softmax(dim=-1)
    return probabilities, logits.amax(dim=-1, keepdim=True) - probabilities.amax(dim=-1, keepdim=True).log_()


def score(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """The mean of logits (..., n, V) by smoothed labels (n, 1) (5.4): (..., n, 1). Cross-entropy is log Z minus it."""
    found = (1 - label_smoothing) * logits.gather(-1, labels.expand(*logits.shape[:-1], 1))
    return found + label_smoothing * logits.mean(dim=-1, keepdim=True) if label_smoothing else found


def subtract_labels_(gradient: torch.Tensor, labels: torch.Tensor, label_smoothing: float, share: float) -> None:
    """Subtracts, in place, `share` times the smoothed labels (n, 1) from (..., n, V): that of their `score`."""
    if label_smoothing:
        gradient -= share * label_smoothing / gradient.shape[-1]
    labels = labels.expand(*gradient.shape[:-1], 1)
    gradient.scatter_add_(-1, labels, gradient.new_full(labels.shape, share * (label_smoothing - 1)))


def make_inputs_for_logits(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch for a model that shall return logits and needs no loss: targets begin with that model's own symbol."""
    own = {name: value for name, value in inputs.items() if name != "labels" and not name.startswith("decoder_")}
    shift: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    labels = inputs["labels"]
    own |= {"labels": labels} if shift is None else {"decoder_input_ids": shift(labels=labels)}
    return own | {"use_cache": False}
