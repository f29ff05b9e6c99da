"""The linear map by oneDNN against torch.nn.Linear, value and derivatives, and where it steps aside."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from vanilla_transformer import linear_vanilla_transformer
from vanilla_transformer.linear_vanilla_transformer import Linear, multiply, onednn_is_faster

needs_onednn = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")),
    reason="this torch has no oneDNN",
)


@pytest.fixture
def always_onednn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes every processor one that uses oneDNN, and counts the products."""
    calls: list[int] = []

    def count(*arguments: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return multiply(*arguments)

    monkeypatch.setattr(linear_vanilla_transformer, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(linear_vanilla_transformer, "multiply", count)
    return calls


def twins(inputs: int, outputs: int, bias: bool = True) -> tuple[Linear, nn.Linear]:
    ours, theirs = Linear(inputs, outputs, bias=bias), nn.Linear(inputs, outputs, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@needs_onednn
@hypothesis.given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=2),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    bias=st.booleans(),
    contiguous=st.booleans(),
)
def test_product_and_derivatives(shape: list[int], sizes: tuple[int, int], bias: bool, contiguous: bool) -> None:
    generator = torch.Generator().manual_seed(sum(shape) + sum(sizes))
    inputs = torch.randn(*shape, 3, sizes[0], generator=generator, dtype=torch.float32)
    if not contiguous:
        inputs = inputs.transpose(0, -2).contiguous().transpose(0, -2)
    weight = torch.randn(sizes[1], sizes[0], generator=generator)
    offset = torch.randn(sizes[1], generator=generator) if bias else None
    results = []
    for product in (multiply, nn.functional.linear):
        tensors = [tensor.clone().requires_grad_() for tensor in (inputs, weight, offset) if tensor is not None]
        output = product(*tensors)
        output.cos().sum().backward()
        results.append([output.detach(), *(tensor.grad for tensor in tensors)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@needs_onednn
def test_second_derivative() -> None:
    inputs, weight = torch.randn(20, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    second = []
    for product in (multiply, nn.functional.linear):
        (first,) = torch.autograd.grad(product(inputs, weight).tanh().sum(), inputs, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), [inputs, weight]))
    torch.testing.assert_close(second[0], second[1], atol=1e-4, rtol=1e-4)


@needs_onednn
def test_frozen_weights_get_no_gradient(always_onednn: list[int]) -> None:
    layer = Linear(6, 5).requires_grad_(False)
    inputs = torch.randn(32, 6, requires_grad=True)
    layer(inputs).sum().backward()
    assert inputs.grad is not None
    assert layer.weight.grad is None
    assert layer.bias.grad is None
    assert always_onednn


@needs_onednn
@pytest.mark.parametrize("grad", [True, False])
def test_it_is_used_where_it_is_faster(always_onednn: list[int], grad: bool) -> None:
    ours, theirs = twins(6, 5)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(ours(torch.ones(4, 8, 6)), theirs(torch.ones(4, 8, 6)))
    assert always_onednn == [1]


def test_elsewhere_it_is_torch_s_own(always_onednn: list[int]) -> None:
    """Same bits, and no call of oneDNN."""
    ours, theirs = twins(6, 5)
    inputs = torch.randn(32, 6)
    assert ours(inputs[:3]).equal(theirs(inputs[:3])), "few rows"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(inputs).equal(theirs(inputs))
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        assert ours(inputs).equal(theirs(inputs))
    with torch.no_grad():
        assert torch.func.vmap(ours)(inputs).shape == (32, 5)
    assert ours.double()(inputs.double()).equal(theirs.double()(inputs.double()))
    assert always_onednn == []


def test_state_and_name_are_linear_s() -> None:
    ours, theirs = twins(6, 5)
    assert isinstance(ours, nn.Linear)
    assert str(ours) == str(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_what_this_processor_uses() -> None:
    """Whatever it is, the question has an answer, and the layer agrees with torch's."""
    assert onednn_is_faster() in (True, False)
    ours, theirs = twins(64, 48)
    inputs = torch.randn(64, 64)
    torch.testing.assert_close(ours(inputs), theirs(inputs), atol=1e-5, rtol=1e-5)
