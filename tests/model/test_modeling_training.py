"""What a training step computes: gradients, counted tokens, attention and loss in the number formats of a CPU."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from test_single_stack import labels_for
from tiny_single_stacks import TRAINABLE, make_single_stack
from tiny_vanilla import assert_close, loss_and_gradients, make_model, make_sentences, pad
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vanilla_transformer.model.attention_vanilla_transformer import (
    attend_without_kernel,
    fold_rows,
    is_slow_kernel,
    unfold_weights,
)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["post-norm", "pre-norm", *TRAINABLE])
def test_gradients_under_checkpointing(name: str, reentrant: bool) -> None:
    changes: dict[str, Any] = {"dropout": 0.2, "attention_dropout": 0.1, "normalize_before": name == "pre-norm"}
    model: Any = make_single_stack(name, **changes) if name in TRAINABLE else make_model(**changes)
    ids, mask = pad(make_sentences([3, 6]))
    labels = labels_for(name, ids, mask) if name in TRAINABLE else {"labels": torch.tensor([[4, 5, 6], [7, 8, 2]])}
    inputs = {"input_ids": ids, "attention_mask": mask, **labels}
    calls: list[int] = []
    for module_name, module in model.train().named_modules():
        if module_name.endswith("fc1"):
            module.register_forward_hook(lambda *_: calls.append(1))

    def step() -> dict[str, torch.Tensor]:
        calls.clear()
        torch.manual_seed(3)
        return loss_and_gradients(model, **inputs)

    expected, plain_calls = step(), len(calls)
    assert len(expected) == 1 + len(list(model.parameters()))
    assert all(gradient.abs().max() > 0 for gradient in expected.values())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = step()
    assert found["loss"].equal(expected["loss"])
    assert len(calls) == 2 * plain_calls
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def attention_step(function: Any, mask: torch.Tensor | None, dtype: torch.dtype, causal: bool) -> list[torch.Tensor]:
    """Context and gradients of queries, keys and values, which are numbers of half precision in any case."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, 3, 9, 8, generator=generator).bfloat16().to(dtype).requires_grad_() for _ in range(3)]
    module = nn.Module()
    module.is_causal = causal  # type: ignore[assignment]
    context, weights = function(module, *states, mask, scaling=0.4, dropout=0.0)
    assert weights is None
    assert context.dtype == dtype
    return [context.detach(), *torch.autograd.grad(context.square().sum(), states)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "causal", "true and false", "added to the scores"])
def test_attention_without_torchs_kernel_is_the_same(kind: str, dtype: torch.dtype) -> None:
    mask = None
    if kind in ("true and false", "added to the scores"):
        mask = torch.ones(2, 1, 9, 9, dtype=torch.bool)
        mask[0, :, :, 6:] = False
    added = None if mask is None else torch.zeros(mask.shape).masked_fill(~mask, -1e9)
    causal = kind == "causal"
    exact = attention_step(sdpa_attention_forward, None if added is None else added.double(), torch.float64, causal)
    if kind == "added to the scores":
        mask = cast(torch.Tensor, added).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        found = attention_step(attend_without_kernel, mask, dtype, causal)
    for ours, oracle in zip(found, exact, strict=True):
        assert (ours.double() - oracle).norm() / oracle.norm() < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("autocast", [False, True])
def test_training_in_bfloat16_goes_without_torchs_kernel(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training mode only; and nobody is given weights who would have none from the kernel."""
    seen: list[bool] = []

    def watch(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        seen.append(module.training)
        return sdpa_attention_forward(module, *arguments, **options)

    model = make_model(attention="sdpa")
    model = model if autocast else model.bfloat16()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", watch)
    ids, mask = pad(make_sentences([3, 6, 2]))
    for training in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs = model.train(training)(input_ids=ids, attention_mask=mask, labels=ids, output_hidden_states=True)
        outputs.loss.backward()
        assert outputs.decoder_hidden_states[1].dtype == (torch.float32 if autocast else torch.bfloat16)
    assert set(seen) == {False}


def test_where_torchs_kernel_is_slow() -> None:
    module, key = nn.Module(), torch.zeros(1, 1, 256, 1, dtype=torch.bfloat16)
    assert is_slow_kernel("sdpa", module, key)
    assert not is_slow_kernel("eager", module, key)
    assert not is_slow_kernel("sdpa", module, key.float())
    assert not is_slow_kernel("sdpa", module, key.to("meta"))
    assert not is_slow_kernel("sdpa", module, torch.zeros(1, 1, 257, 1, dtype=torch.bfloat16))
    assert not is_slow_kernel("sdpa", module.eval(), key)


def test_folding_rows() -> None:
    states = torch.arange(6 * 2 * 3).view(6, 2, 3)
    folded = fold_rows(states, 2)
    assert folded.tolist() == [states[:3].flatten(0, 1).tolist(), states[3:].flatten(0, 1).tolist()]
    weights = folded[:, None].expand(-1, 4, -1, -1)
    assert unfold_weights(weights, 6, 2).equal(states[:, None].expand(-1, 4, -1, -1))  # type: ignore[union-attr]
    assert fold_rows(states, 6) is states
    assert unfold_weights(states, 6, 2) is states
    assert unfold_weights(None, 6, 2) is None
    with pytest.raises(ValueError, match="6 target rows cannot be divided among 4 sources"):
        fold_rows(states, 4)


def make_inputs(lengths: list[int], vocab_size: int = 13) -> dict[str, torch.Tensor]:
    ids, mask = pad(make_sentences(lengths, vocab_size=vocab_size))
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def test_a_loss_without_gradients_is_the_same_loss() -> None:
    model, inputs = make_model(label_smoothing=0.1).train(), make_inputs([3, 6, 2])
    expected = model(**inputs).loss
    with torch.no_grad():
        found = model(**inputs).loss
    assert not found.requires_grad
    assert found.equal(expected.detach())
    loss = model.requires_grad_(False)(**inputs).loss
    assert not loss.requires_grad
    assert loss.equal(found)


def test_gradients_by_function_transforms() -> None:
    model, inputs = make_model(label_smoothing=0.1).train(), make_inputs([3, 6, 2])

    def loss_of(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return cast(torch.Tensor, torch.func.functional_call(model, parameters, (), inputs).loss)

    found = torch.func.grad(loss_of)(dict(model.named_parameters()))
    expected = loss_and_gradients(model, **inputs)
    for name, gradient in found.items():
        assert_close(gradient, expected[name])


def test_a_step_gives_the_same_bits_every_time() -> None:
    """With dropout, from the same state of the random numbers, and large enough to be shared out among threads."""
    sizes: dict[str, Any] = {"d_model": 128, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "vocab_size": 700}
    model = make_model(label_smoothing=0.1, dropout=0.1, scale=0.05, **sizes).train()
    inputs, results = make_inputs([22, 20, 24, 19] * 8, vocab_size=700), []
    for _ in range(2):
        torch.manual_seed(0)
        results.append(loss_and_gradients(model, **inputs))
    torch.testing.assert_close(results[0], results[1], rtol=0.0, atol=0.0)
