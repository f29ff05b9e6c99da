"""Losses that make their gradients themselves, against the same formulas differentiated by torch in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_trainer import make_trainer
from torch import nn

from vanilla_transformer.training import token_losses
from vanilla_transformer.training.distillation import TeacherLoss
from vanilla_transformer.training.r_drop import RDropLoss
from vanilla_transformer.training.token_losses import RowLoss, sum_token_losses


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The sum over rows of KL(p || q), of logarithms."""
    return (p.exp() * (p - q)).sum()


def define(logits: torch.Tensor, labels: torch.Tensor, wanted: torch.Tensor, smoothing: float, weight: float) -> Any:
    """The loss of one pass with a teacher, or of two passes: logits (C B, T, V), labels (B, T), wanted (B, T, V)."""
    counted, copies = labels != -100, len(logits) // len(labels)
    passes = [each[counted].double().log_softmax(dim=-1) for each in logits.chunk(copies)]
    words = nn.functional.one_hot(labels[counted], logits.shape[-1])
    targets = (1 - smoothing) * words + smoothing / logits.shape[-1]
    entropies = torch.stack([-(targets * each).sum() for each in passes]).sum()
    if copies == 1:
        teacher = wanted[counted].double().log_softmax(dim=-1)
        return (1 - weight) * entropies + weight * kl(teacher, passes[0])
    one, other = passes
    return entropies + weight * (kl(one, other) + kl(other, one)) / 2


@pytest.mark.parametrize("copies", [1, 2])
@given(
    length=st.sampled_from([1, 3, 20]),
    chunk=st.sampled_from([1, 50, 2**18]),  # a token at a time, several, all
    vocab_size=st.sampled_from([2, 7, 40]),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    smoothing=st.sampled_from([0.0, 0.1]),
    weight=st.sampled_from([0.0, 0.3, 1.0]),
    scale=st.sampled_from([0.1, 1.0, 100.0]),  # at 100 many probabilities are 0 in float32
    seed=st.integers(0, 1000),
)
def test_value_and_gradient_are_those_of_the_formula(
    copies: int,
    length: int,
    chunk: int,
    vocab_size: int,
    ignored: float,
    smoothing: float,
    weight: float,
    scale: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(2 * copies, length, vocab_size, generator=generator)).requires_grad_()
    wanted = torch.randn(2, length, vocab_size, generator=generator)
    labels = torch.randint(vocab_size, (2, length), generator=generator)
    labels[torch.rand(2, length, generator=generator) < ignored] = -100
    row_loss: RowLoss = RDropLoss(smoothing, weight) if copies == 2 else TeacherLoss(wanted, smoothing, weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_losses, "_CPU_CHUNK", chunk)
        found = sum_token_losses(logits, labels, row_loss)
    expected = define(logits, labels, wanted, smoothing, weight)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-4)
    # An update in parts has a factor.
    gradients = [torch.autograd.grad(each / 3, logits)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5 * max(scale, 1.0))


def test_half_precision_and_a_second_derivative() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 5, 30).bfloat16().requires_grad_(), torch.randint(30, (2, 5))
    loss = sum_token_losses(logits, labels, RDropLoss(0.1, 5.0))
    expected = define(logits, labels, logits[:2], 0.1, 5.0)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(*(torch.autograd.grad(each, logits)[0] for each in (loss, expected)))
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(sum_token_losses(logits, labels, RDropLoss(0.1, 5.0)), logits, create_graph=True)


def test_a_loss_of_the_callers_own_is_refused_beside_these(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compute_loss_func"):
        make_trainer(tmp_path, r_drop=1.0, compute_loss_func=lambda *_: None)
