"""Dropout whose mask is drawn quickly, against what dropout is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vanilla_transformer.model.dropout_vanilla_transformer import Dropout


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_are_dropped_alone_with_this_probability(p: float, dtype: torch.dtype) -> None:
    inputs = torch.full((500, 401), 2.0, dtype=dtype, requires_grad=True)
    outputs = Dropout(p)(inputs)
    kept = outputs.detach() != 0
    assert outputs.unique().tolist() == pytest.approx([0.0, float(torch.tensor(2 / (1 - p)).to(dtype))], rel=1e-4)
    count = kept.numel()
    # Five standard deviations of as many coins.
    tolerance = 5 * (p * (1 - p) / count) ** 0.5
    assert kept.float().mean() == pytest.approx(1 - p, abs=tolerance)
    # Neighbours, which share a drawn number of 64 bits, know nothing of each other.
    flat = kept.flatten().float()
    for distance in (1, 2, 3, 4, 401):
        both = (flat[distance:] * flat[:-distance]).mean()
        assert both == pytest.approx((1 - p) ** 2, abs=2 * tolerance)
    outputs.sum().backward()
    torch.testing.assert_close(inputs.grad, outputs.detach() / 2, check_dtype=True)


@given(st.lists(st.integers(0, 5), max_size=3), st.floats(0, 1), st.integers(0, 9))
def test_any_shape_and_probability(shape: list[int], p: float, seed: int) -> None:
    dropout, inputs = Dropout(p), torch.ones(shape)
    torch.manual_seed(seed)
    outputs = dropout(inputs)
    assert outputs.shape == inputs.shape
    assert not outputs.isnan().any()
    if p < 0.99:
        scaled = torch.full_like(outputs, 1 / (1 - p))
        torch.testing.assert_close(outputs, torch.where(outputs == 0, outputs, scaled), atol=0, rtol=1e-3)
    torch.manual_seed(seed)
    assert torch.equal(outputs, dropout(inputs))
    assert dropout.eval()(inputs) is inputs


def test_torch_sees_its_own_operator_where_it_transforms() -> None:
    dropout, inputs = Dropout(0.5), torch.ones(8, 3)
    torch.manual_seed(0)
    mapped = torch.func.vmap(dropout, randomness="different")(inputs)
    torch.manual_seed(0)
    assert torch.equal(mapped, torch.func.vmap(torch.nn.Dropout(0.5), randomness="different")(inputs))
    exported = torch.export.export(dropout, (inputs,)).graph
    assert any("dropout" in str(node.target) for node in exported.nodes)
