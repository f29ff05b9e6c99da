"""Reading other systems' files: what is damaged, of another kind, or would run code is refused, saying why."""

import argparse
import collections
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.conversion.weights import check_weights, read_checkpoint

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(1)}


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "old.pt"])
def test_weights_are_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith("safetensors"):
        save_file(WEIGHTS, path)
    else:
        torch.save(WEIGHTS, path, _use_new_zipfile_serialization=name != "old.pt")
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
    path = tmp_path / ("it.safetensors" if kind == "safetensors" else "it.pt")
    weights = {"a": torch.randn(50, 50), "b": torch.randn(3)}
    if kind == "safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path, _use_new_zipfile_serialization=kind == "zip")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ConversionError, match=r"it\.(pt|safetensors)"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"PK\x03\x04", b"<html>404</html>", b"version https://git-lfs", b"\x80\x02}"]
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "it.pt"
    path.write_bytes(content)
    with pytest.raises(ConversionError, match=r"it\.pt"):
        read_checkpoint(path)


def test_a_folder_or_nothing_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="is a folder"):
        read_checkpoint(tmp_path)
    with pytest.raises(ConversionError, match="is no file"):
        read_checkpoint(tmp_path / "absent.pt")


def test_what_is_no_state_dict_is_refused() -> None:
    contents: tuple[Any, ...] = (None, [1], {}, torch.ones(1))
    for content in contents:
        with pytest.raises(ConversionError, match=r"f\.pt, its entry 'model', is no state dict"):
            check_weights(content, "f.pt", "its entry 'model'")
    with pytest.raises(ConversionError, match=r"f\.pt holds more than weights: 'epoch'"):
        check_weights({"a": torch.ones(1), "epoch": 3}, "f.pt")
