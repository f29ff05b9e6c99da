"""Reads fairseq's checkpoints, dictionaries with the weights under "model".

The settings are under "args", an `argparse.Namespace` (before 2021), or under "cfg", where "model" is such a namespace
and "task" and "generation" are dictionaries. Around them lies what training needs to go on: meters, optimizers.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.conversion.weights import check_weights, read_checkpoint, scan_pickles

# Whose objects a checkpoint may hold: they are read as `Remnant`s. None of this code runs, nor need it be installed.
_PACKAGES = ("fairseq.", "numpy.", "omegaconf.", "typing.")
_TYPES = (
    *("argparse.Namespace", "collections.defaultdict", "_operator.getitem"),
    *(f"builtins.{name}" for name in ("bool", "bytes", "dict", "float", "int", "list", "str", "tuple", "type")),
)

_BOTH_SIDES = {"layers": 6, "attention_heads": 8, "normalize_before": False, "learned_pos": False}
_FLAGS = ("share_all_embeddings", "share_decoder_input_output_embed", "no_scale_embedding", "layernorm_embedding")
_BASE: dict[str, Any] = {"encoder_embed_dim": 512, "encoder_ffn_embed_dim": 2048, "activation_fn": "relu"}
_BASE |= {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in _BOTH_SIDES.items()}
_BASE |= {"dropout": 0.1, "attention_dropout": 0.0, "activation_dropout": 0.0, **dict.fromkeys(_FLAGS, False)}
_BASE |= dict.fromkeys(("max_source_positions", "max_target_positions"), 1024)
_TINY = {"encoder_embed_dim": 64, "encoder_ffn_embed_dim": 64, "encoder_layers": 2, "encoder_attention_heads": 2}
_IWSLT = {"encoder_ffn_embed_dim": 1024, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
_VASWANI = {"encoder_embed_dim": 1024, "encoder_ffn_embed_dim": 4096, "dropout": 0.3}
_VASWANI |= {"encoder_attention_heads": 16, "decoder_attention_heads": 16}
_PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}

# The named architectures of the model, with what they change of the first one's defaults (fairseq 0.12.2).
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "transformer": {},
    "transformer_tiny": {**_TINY, "decoder_layers": 2, "decoder_attention_heads": 2},
    "transformer_iwslt_de_en": _IWSLT,
    "transformer_wmt_en_de": {},
    "transformer_vaswani_wmt_en_de_big": _VASWANI,
    "transformer_vaswani_wmt_en_fr_big": {**_VASWANI, "dropout": 0.1},
    "transformer_wmt_en_de_big": {**_VASWANI, "attention_dropout": 0.1},
    "transformer_wmt_en_de_big_t2t": {**_VASWANI, **_PRE_NORM, "attention_dropout": 0.1, "activation_dropout": 0.1},
}


class Remnant:
    """What is left of an object whose class is not here: what the file says of it, and nothing that it did."""

    state: Any = None

    def __new__(cls, *args: Any) -> "Remnant":
        """Takes whatever the class's own constructor would have been given."""
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Takes the object's attributes."""
        self.state = state


@dataclass(frozen=True, kw_only=True)
class FairseqCheckpoint:
    """What is of use in a checkpoint; `absent` has the architecture's defaults of what the model's settings lack."""

    path: Path
    weights: dict[str, torch.Tensor]
    model: dict[str, Any]
    task: dict[str, Any]
    generation: dict[str, Any]
    label_smoothing: float
    absent: dict[str, Any]


def read_fairseq(path: str | os.PathLike[str]) -> FairseqCheckpoint:
    """Reads a checkpoint and completes its settings as fairseq does; nothing in the file is run."""
    path = Path(path)
    names = (*_TYPES, *(name for name in _find_classes(path) if name.startswith(_PACKAGES)))
    content = read_checkpoint(path, allowed=[(Remnant, name) for name in names])
    if not isinstance(content, Mapping) or "model" not in content:
        raise ConversionError(f"{path} is no checkpoint of fairseq's, which is a dictionary with the entry 'model'.")
    args, cfg = (_simplify(content.get(name)) for name in ("args", "cfg"))
    settings = cfg if isinstance(cfg, dict) else {"model": args, "task": args}
    if not isinstance(settings.get("model"), dict):
        entries = ", ".join(map(repr, content))
        raise ConversionError(f"{path} holds weights and no settings ('args' or 'cfg'): it has {entries} only.")
    weights = check_weights(content["model"], path, "its entry 'model'")
    parts = {name: settings.get(name) or {} for name in ("task", "generation")}
    criterion = settings.get("criterion") or settings["model"]
    model, absent = _complete(_flatten(settings["model"]))
    smoothing = criterion.get("label_smoothing") or 0.0
    return FairseqCheckpoint(path=path, weights=weights, model=model, label_smoothing=smoothing, absent=absent, **parts)


def _find_classes(path: Path) -> set[str]:
    """Names the classes and functions that a file of `torch.save` speaks of; as many as are legible."""
    if not path.is_file():
        return set()
    return {str(argument).replace(" ", ".") for name, argument in scan_pickles(path) if name == "GLOBAL"}


def _simplify(value: Any) -> Any:
    """Makes dictionaries and lists of namespaces and of omegaconf's containers."""
    if isinstance(value, Remnant):
        state = value.state
        if not isinstance(state, dict):
            return None
        return _simplify(state.get("_content", state.get("_val", None if "_metadata" in state else state)))
    if isinstance(value, Mapping):
        return {name: _simplify(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_simplify(item) for item in value]
    return value


def _flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the settings of a side, where they are a group of their own, the names that they have in a namespace."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name}_{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _complete(settings: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the settings with the architecture's defaults of those that are absent, and these defaults."""
    settings = {name: value for name, value in settings.items() if value is not None}
    architecture = settings.get("arch") or settings.get("_name")
    defaults = {**_BASE, **ARCHITECTURES.get(str(architecture), {})}
    if "max_positions" in settings:  # of both sides, once
        defaults |= dict.fromkeys(("max_source_positions", "max_target_positions"), settings["max_positions"])
    if "relu_dropout" in settings and not settings.get("activation_dropout"):  # its older name
        settings = {**settings, "activation_dropout": settings["relu_dropout"]}
    encoder = {**defaults, **settings}
    for size in ("embed_dim", "ffn_embed_dim"):
        defaults[f"decoder_{size}"] = encoder[f"encoder_{size}"]
    absent = {name: value for name, value in defaults.items() if name not in settings}
    return {**settings, **absent, "arch": architecture}, absent
