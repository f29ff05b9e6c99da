"""Folders of models to push, and what is done to them: what the tests of checks and pushes share."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from local_hub import LocalHub
from safetensors.torch import load_file, save_file
from tiny_single_stacks import make_single_stack
from tiny_vanilla import make_loud_model

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.data.tokenizer_training import train_tokenizer
from vanilla_transformer.hub.card import write_model_card
from vanilla_transformer.hub.files import CODE_FOLDER

Damage = Callable[[Path], Any]

TEXTS = ["a man rides a horse", "two dogs rest", "7 horses"]
# What an encoder-decoder's folder brings, with a tokenizer.
SINGLE_STACK_CODE = {f"{side}_only_vanilla_transformer.py" for side in ("encoder", "decoder")}
CODE = {path.name for path in CODE_FOLDER.glob("*_vanilla_transformer.py")} - SINGLE_STACK_CODE
CODE_FILES = {name: (CODE_FOLDER / name).read_bytes() for name in CODE}


def save_vanilla(folder: Path, tokenizer: Any, **changes: Any) -> Path:
    """A model with random weights that translates into something, its tokenizer, its card."""
    torch.manual_seed(0)
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=len(tokenizer), **changes)
    make_loud_model(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_model_card(folder)
    return folder


def save_translator(folder: Path) -> Path:
    tokenizer = train_tokenizer(TEXTS * 3, vocab_size=275, show_progress=False)
    return save_vanilla(folder, tokenizer, langs=["en", "de"])


def save_single_stack(folder: Path, name: str, **changes: Any) -> Path:
    """A half with random weights of the class with this name, its tokenizer, its card."""
    tokenizer: Any = train_tokenizer(TEXTS * 3, vocab_size=275, show_progress=False)
    make_single_stack(name, vocab_size=len(tokenizer), **changes).save_pretrained(folder)
    if name.endswith("CausalLM"):
        tokenizer.add_bos_token, tokenizer.add_eos_token = True, False
    tokenizer.save_pretrained(folder)
    write_model_card(folder, license="mit")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit_json(path: Path, **changes: Any) -> None:
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"weights": [1.0]}))


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def configure(**changes: Any) -> Damage:
    return lambda folder: edit_json(folder / "config.json", **changes)


def weigh(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Damage:
    return lambda folder: edit_weights(folder, edit)


def larger_tokenizer(folder: Path) -> None:
    train_tokenizer(TEXTS * 9, vocab_size=280, show_progress=False).save_pretrained(folder)


def edit_on_the_hub(hub: LocalHub, repo_id: str, path: str, old: str, new: str, branch: str = "main") -> None:
    repo, text = hub.repo(repo_id), hub.read(repo_id, path, branch).decode()
    assert old in text
    files = {**hub.files(repo_id, branch), path: hub.small_file(text.replace(old, new).encode())}
    repo.commit(f"refs/heads/{branch}", "alice", "by hand", files, [path])
