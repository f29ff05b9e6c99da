"""Files of other systems are read without running code; the strict renamer: everything fits, or all else is named."""

import argparse
import collections
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from vanilla_transformer.conversion.errors import ConversionError, find_differences, refuse
from vanilla_transformer.conversion.weights import Rule, check_sinusoids, check_weights, read_checkpoint, rename_weights

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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table": torch.zeros(5)}, "table is not all ones"),
        ({"layers.0.in_proj": torch.zeros(7, 3)}, r"in_proj has the shape \(7, 3\), which cannot be divided by 3"),
        ({"decoder.version": torch.ones(1), "embed. ": torch.ones(1)}, r"no place for:\n    embed.  \(1,\)"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        rename_weights(make_weights(1) | changes, RULES, make_shapes(1), source="it", ties=TIES)
    for shape in ((3, 5), (3, 2), (2, 3, 4), (8,)):
        assert "which is no table of at least four" in str(check_sinusoids(torch.zeros(shape), kind="sinusoidal"))


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
    # A chain of ties needs one of them.
    rules = (Rule(r"(.*)", r"\1"),)
    ties = {"encoder": "shared", "decoder": "shared", "output": "shared"}
    shapes = {name: torch.Size([2]) for name in ("shared", "encoder", "decoder", "output")}
    for name in shapes:
        renamed = rename_weights({name: torch.ones(2)}, rules, shapes, source="it", ties=ties)
        assert renamed.keys() == shapes.keys()


def test_two_weights_that_become_one_are_refused_and_long_lists_are_cut() -> None:
    weights = {"old": torch.zeros(1), "new": torch.ones(1)}
    with pytest.raises(ConversionError, match="new becomes name, which another weight became already"):
        rename_weights(weights, (Rule(r"(?:old|new)", "name"),), {"name": torch.Size([1])}, source="it")
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


WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(1)}


def write(folder: Path, weights: dict[str, torch.Tensor], kind: str) -> Path:
    path = folder / ("it.safetensors" if kind == "safetensors" else "it.pt")
    if kind == "safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=kind == "zip")
    return path


@pytest.mark.parametrize("kind", ["zip", "old", "safetensors"])
def test_weights_are_read(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, WEIGHTS, kind)
    read = check_weights(read_checkpoint(path), path)
    assert read.keys() == WEIGHTS.keys()
    assert all(torch.equal(read[key], WEIGHTS[key]) for key in WEIGHTS)


def test_what_else_a_pickle_may_hold_is_told_by_the_caller(tmp_path: Path) -> None:
    content = {"args": argparse.Namespace(width=3), "model": WEIGHTS, "order": collections.OrderedDict(a=1)}
    torch.save(content, tmp_path / "it.pt")
    with pytest.raises(ConversionError, match=r"holds more than weights: it needs argparse\.Namespace"):
        read_checkpoint(tmp_path / "it.pt")
    assert read_checkpoint(tmp_path / "it.pt", allowed=[argparse.Namespace])["args"].width == 3
    with pytest.raises(ConversionError, match="needs"):  # what one call may read, the next may not
        read_checkpoint(tmp_path / "it.pt")


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Bomb()}, "bomb.pt")
    Path("bomb.pkl").write_bytes(pickle.dumps(Bomb()))
    for name in ("bomb.pt", "bomb.pkl"):
        with pytest.raises(ConversionError):
            read_checkpoint(name)
    assert not Path("exploded").exists()


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["zip", "old", "safetensors"])
def test_a_truncated_file_is_named(tmp_path: Path, share: float, kind: str) -> None:
    path = write(tmp_path, {"a": torch.randn(50, 50), "b": torch.randn(3)}, kind)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ConversionError, match=r"it\.(pt|safetensors)"):
        read_checkpoint(path)


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    for content in (b"", b"\n", b"PK\x03\x04", b"<html>404</html>", b"version https://git-lfs", b"\x80\x02}"):
        (tmp_path / "it.pt").write_bytes(content)
        with pytest.raises(ConversionError, match=r"it\.pt"):
            read_checkpoint(tmp_path / "it.pt")
    for name in ("pointer.pt", "pointer.safetensors"):
        (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
        with pytest.raises(ConversionError, match=f"{name} is a pointer of git-lfs .* `git lfs pull`"):
            read_checkpoint(tmp_path / name)
    for path, message in ((tmp_path, "is a folder"), (tmp_path / "absent.pt", "is no file")):
        with pytest.raises(ConversionError, match=message):
            read_checkpoint(path)


def test_what_is_no_state_dict_is_refused() -> None:
    contents: tuple[Any, ...] = (None, [1], {}, torch.ones(1))
    for content in contents:
        with pytest.raises(ConversionError, match=r"f\.pt, its entry 'model', is no state dict"):
            check_weights(content, "f.pt", "its entry 'model'")
    with pytest.raises(ConversionError, match=r"f\.pt holds more than weights: 'epoch'"):
        check_weights({"a": torch.ones(1), "epoch": 3}, "f.pt")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_named_unless_the_model_does_not_need_them(value: float) -> None:
    weights = make_weights(2)
    weights["encoder.version"].fill_(value)
    assert rename_weights(weights, RULES, make_shapes(2), source="it", ties=TIES)
    weights["layers.1.in_proj"][3:5, 1] = value
    weights["embed.source"][0, 0] = value
    with pytest.raises(ConversionError) as caught:
        rename_weights(weights, RULES, make_shapes(2), source="it", ties=TIES)
    for name, count in (("layers.1.in_proj", 2), ("embed.source", 1)):
        assert f"{name} holds NaN or infinity ({count} of its numbers)" in str(caught.value)
    assert "layers.0" not in str(caught.value)
