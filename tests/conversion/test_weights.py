"""The strict key renamer: everything fits, or everything that does not is named."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vanilla_transformer.conversion.errors import ConversionError, find_differences, refuse
from vanilla_transformer.conversion.weights import Rule, rename_weights

RULES = (
    Rule(r"layers\.(\d+)\.in_proj", (r"l.\1.q", r"l.\1.k", r"l.\1.v")),
    Rule(r"layers\.(\d+)\.out", r"l.\1.o", change=lambda tensor: tensor.T.contiguous()),
    Rule(r"table", (), check=lambda tensor: None if (tensor == 1).all() else "is not all ones"),
    Rule(r"(?:encoder|decoder)\.version", ()),
    Rule(r"embed\.(source|target)", r"e.\1"),
)


def make_weights(layers: int) -> dict[str, torch.Tensor]:
    weights = {f"layers.{layer}.in_proj": torch.randn(6, 3) for layer in range(layers)}
    weights |= {f"layers.{layer}.out": torch.randn(3, 4) for layer in range(layers)}
    return weights | {"table": torch.ones(5), "encoder.version": torch.tensor(3.0), "embed.source": torch.randn(7, 3)}


def make_shapes(layers: int) -> dict[str, torch.Size]:
    shapes = {f"l.{layer}.{name}": torch.Size([2, 3]) for layer in range(layers) for name in "qkv"}
    shapes |= {f"l.{layer}.o": torch.Size([4, 3]) for layer in range(layers)}
    return shapes | {"e.source": torch.Size([7, 3]), "e.target": torch.Size([7, 3])}


TIES = {"e.target": "e.source"}


@given(layers=st.integers(0, 12), seed=st.integers(0, 1000))
def test_every_weight_finds_its_place(layers: int, seed: int) -> None:
    weights = make_weights(layers)
    order = torch.randperm(len(weights), generator=torch.Generator().manual_seed(seed))
    shuffled = {name: weights[name] for name in [list(weights)[index] for index in order]}
    renamed = rename_weights(shuffled, RULES, make_shapes(layers), source="it", ties=TIES)
    assert renamed.keys() == make_shapes(layers).keys()
    for layer in range(layers):
        joined = torch.cat([renamed[f"l.{layer}.{name}"] for name in "qkv"])
        assert torch.equal(joined, weights[f"layers.{layer}.in_proj"])
        assert torch.equal(renamed[f"l.{layer}.o"], weights[f"layers.{layer}.out"].T)
    assert renamed["e.source"] is renamed["e.target"] is weights["embed.source"]


@given(
    lost=st.sets(st.sampled_from(sorted(make_weights(2).keys() - {"table", "encoder.version"}))),
    strange=st.sets(st.sampled_from(["bias", "layers.x.out", "layers.0.in_proj.weight"])),
    bad=st.sets(st.sampled_from(["layers.0.out", "layers.1.in_proj"])),
)
def test_all_that_does_not_fit_is_named_together(lost: set[str], strange: set[str], bad: set[str]) -> None:
    weights = make_weights(2)
    weights |= {name: weights[name][:3, :2] for name in bad}
    weights = {name: tensor for name, tensor in weights.items() if name not in lost}
    weights |= dict.fromkeys(strange, torch.zeros(1))
    if not lost | strange | (bad - lost):
        assert rename_weights(weights, RULES, make_shapes(2), source="it", ties=TIES)
        return
    with pytest.raises(ConversionError, match=r"The weights of it do not fit the model") as caught:
        rename_weights(weights, RULES, make_shapes(2), source="it", ties=TIES)
    message = str(caught.value)
    for name in strange:
        assert f"{name} (1,)" in message
    for name in lost:
        for rule in RULES:
            if match := re.fullmatch(rule.pattern, name):
                targets = [rule.targets] if isinstance(rule.targets, str) else rule.targets
                assert all(f"{match.expand(target)} (" in message for target in targets)
    assert ("instead of" in message) == bool(bad - lost)
    for name in bad - lost:
        assert re.search(r"l\.0\.o has the shape" if "out" in name else r"l\.1\.[qkv] has the shape", message)


def test_a_table_that_is_computed_must_be_what_is_computed() -> None:
    weights = make_weights(1) | {"table": torch.zeros(5)}
    with pytest.raises(ConversionError, match="table is not all ones"):
        rename_weights(weights, RULES, make_shapes(1), source="it", ties=TIES)


def test_tied_weights_must_be_equal_and_one_is_enough() -> None:
    weights = make_weights(1)
    both = weights | {"embed.target": weights["embed.source"].clone()}
    assert rename_weights(both, RULES, make_shapes(1), source="it", ties=TIES)
    with pytest.raises(ConversionError, match=r"e\.target differs from e\.source"):
        rename_weights(both | {"embed.target": both["embed.target"] + 1}, RULES, make_shapes(1), source="it", ties=TIES)
    only_target = {name: tensor for name, tensor in both.items() if name != "embed.source"}
    renamed = rename_weights(only_target, RULES, make_shapes(1), source="it", ties=TIES)
    assert torch.equal(renamed["e.source"], weights["embed.source"])
    with pytest.raises(ConversionError, match=r"missing:\n    e\.target"):
        rename_weights(weights, RULES, make_shapes(1), source="it")


def test_a_chain_of_ties_needs_one_of_them() -> None:
    rules = (Rule(r"(.*)", r"\1"),)
    ties = {"encoder": "shared", "decoder": "shared", "output": "shared"}
    shapes = {name: torch.Size([2]) for name in ("shared", "encoder", "decoder", "output")}
    for name in shapes:
        renamed = rename_weights({name: torch.ones(2)}, rules, shapes, source="it", ties=ties)
        assert renamed.keys() == shapes.keys()


def test_two_weights_that_become_one_are_refused() -> None:
    rules = (Rule(r"(?:old|new)", "name"),)
    weights = {"old": torch.zeros(1), "new": torch.ones(1)}
    with pytest.raises(ConversionError, match="new becomes name, which another weight became already"):
        rename_weights(weights, rules, {"name": torch.Size([1])}, source="it")


def test_what_cannot_be_divided_is_refused() -> None:
    weights = make_weights(1) | {"layers.0.in_proj": torch.zeros(7, 3)}
    with pytest.raises(
        ConversionError, match=r"layers\.0\.in_proj has the shape \(7, 3\), which cannot be divided by 3"
    ):
        rename_weights(weights, RULES, make_shapes(1), source="it", ties=TIES)


def test_long_lists_are_cut_and_counted() -> None:
    with pytest.raises(ConversionError, match=r"and 88 more"):
        rename_weights({}, RULES, {f"w.{index}": torch.Size([1]) for index in range(100)}, source="it")


def test_a_refusal_names_all_reasons_and_none_is_no_refusal() -> None:
    class Settings:
        width = 3
        depth = 2

    reasons = find_differences(Settings(), {"width": (4, 5), "depth": (2,), "heads": (8,)})
    assert reasons == ["width is 3 (can be: 4, 5)", "heads is None (can be: 8)"]
    with pytest.raises(ConversionError, match=r"^X cannot:\n  - width is 3 \(can be: 4, 5\)\n  - heads is None"):
        refuse("X cannot", reasons)
    refuse("X cannot", [])
