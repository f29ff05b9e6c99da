"""The systems that models can come from and go to: how each is called, recognised and asked to convert."""

import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig

from vanilla_transformer.files import check_revision

from .converted import ConvertedModel, Origin
from .errors import ConversionError
from .systems.annotated import AnnotatedSettings, convert_annotated
from .systems.fairseq import convert_fairseq
from .systems.fsmt import convert_fsmt
from .systems.joeynmt import convert_joeynmt
from .systems.library import READING_ERRORS
from .systems.marian import convert_marian, save_as_marian
from .systems.opennmt_py import convert_opennmt_py
from .systems.torch_module import WEIGHTS_NAME, save_as_torch_nn
from .systems.torch_nn import TorchSettings, convert_torch_nn, read_torch_settings
from .weights import scan_pickles


@dataclass(frozen=True)
class Option:
    """What a user may say of a model of some format: a `str`, `int`, `float` or `bool`."""

    name: str
    type: type
    default: Any
    help: str


@dataclass(frozen=True)
class Source:
    """A system that models can come from."""

    convert: Callable[..., ConvertedModel]  # whose first argument is the path or the name of the model
    settings: type | None = None  # the class of the converter's argument `settings`, if its options are there
    read_settings: Callable[[str], dict[str, Any] | None] | None = None  # those of them that stand beside the model

    def list_options(self) -> list[Option]:
        """What may be said besides the path, as the converter's signature and docstring have it."""
        described: Any = self.settings or self.convert
        signature, hints = inspect.signature(described), typing.get_type_hints(described)
        section = re.search(r"^Args:\n(.*?)(?:\n\n|\Z)", inspect.getdoc(described) or "", re.DOTALL | re.MULTILINE)
        entries = re.split(r"\n(?=    \w+: )", "\n" + section[1])[1:] if section else []
        pairs = [entry.strip().partition(": ") for entry in entries]
        help_texts = {name: " ".join(text.split()) for name, _, text in pairs}
        return [
            Option(name, _simple_type(hints[name]), parameter.default, help_texts[name])
            for name, parameter in signature.parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        ]

    def __call__(self, path: str, **options: Any) -> ConvertedModel:
        """Converts the model at a path, or of a name."""
        if self.settings is None:
            return self.convert(path, **options)
        saved = self.read_settings(path) if self.read_settings is not None else None
        return self.convert(path, self.settings(**{**(saved or {}), **options}))


SOURCES: dict[str, Source] = {
    "marian": Source(convert_marian),
    "fsmt": Source(convert_fsmt),
    "fairseq": Source(convert_fairseq),
    "torch_nn": Source(convert_torch_nn, TorchSettings, read_torch_settings),
    "annotated": Source(convert_annotated, AnnotatedSettings),
    "opennmt_py": Source(convert_opennmt_py),
    "joeynmt": Source(convert_joeynmt),
}

# Each takes our model, its tokenizer and the folder to make, complete or absent.
TARGETS: dict[str, Callable[..., Path]] = {"marian": save_as_marian, "torch_nn": save_as_torch_nn}


def _simple_type(hint: Any) -> type:
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) else (hint,)
    return next(member for member in (bool, int, float, str) if member in members)


def detect_format(path: str, revision: str = "main") -> str:
    """Finds out which of `SOURCES` a folder, a file or a name on the Hub is of; nothing in it is run.

    `revision` is the branch, tag or commit of what is on the Hub.
    """
    if os.path.isfile(path):
        found = _detect_names(Path(path))
    else:
        found = (_detect_folder(Path(path)) if os.path.isdir(path) else None) or _detect_library_model(path, revision)
    if found is None:
        known = ", ".join(SOURCES)
        raise ConversionError(f"{path} is not recognised as a model of one of {known}. Say which it is of, if it is.")
    return found


def _detect_library_model(name: str, revision: str) -> str | None:
    """By the configuration of a folder, or of a model on the Hub."""
    try:
        # The fields alone, since a class for them may be code of the model's own.
        fields, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    except READING_ERRORS as error:
        if os.path.isdir(name):
            file = Path(name, "config.json")
            if file.exists():
                raise ConversionError(f"{file}, which is to name the system, cannot be read: {error}") from error
            return None
        raise ConversionError(f"{name} is no file or folder, nor to be read from the Hub: {error}") from error
    if not isinstance(fields, dict):
        raise ConversionError(f"The config.json of {name} is no configuration: it holds a {type(fields).__name__}.")
    model_type = fields.get("model_type")
    if model_type is None:
        return None
    if model_type not in list(SOURCES):
        known = "this package's own" if model_type == "vanilla_transformer" else "another architecture"
        raise ConversionError(f"{name} is a model of the type {model_type}: {known}. Nothing to convert.")
    return str(model_type)


def _detect_folder(folder: Path) -> str | None:
    if (folder / "config.yaml").is_file() and any(folder.glob("*.ckpt")):
        return "joeynmt"
    if any(folder.glob("dict.*.txt")) and (checkpoints := sorted(path.name for path in folder.glob("*.pt"))):
        raise ConversionError(f"{folder} looks like fairseq's: name the checkpoint, one of {', '.join(checkpoints)}.")
    if (folder / WEIGHTS_NAME).is_file() and read_torch_settings(folder) is not None:
        return "torch_nn"
    return None


def _detect_names(path: Path) -> str | None:
    """By the strings in a pickle, or the names of the weights."""
    names = set(_list_names(path))
    if any(name.endswith("self_attn.linears.0.weight") for name in names):
        return "annotated"
    if any(name.endswith("decoder.layers.0.multihead_attn.in_proj_weight") for name in names):
        return "torch_nn"  # with "model" and "args" beside the weights perhaps, as fairseq has them
    if {"model_state", "steps"} <= names:
        return "joeynmt"
    if {"opt", "vocab"} <= names:
        return "opennmt_py"
    if "model" in names and {"args", "cfg"} & names:
        return "fairseq"
    if any(name.endswith("encoder.layers.0.self_attn.in_proj_weight") for name in names):
        return "torch_nn"
    return None


def _list_names(path: Path) -> Iterator[str]:
    """The names of the weights of a safetensors file, or all strings of a pickle, without reading what they name."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                yield from file.keys()
        except SafetensorError as error:
            raise ConversionError(f"{path} is not a whole safetensors file: {error}") from error
        return
    yield from (str(argument) for name, argument in scan_pickles(path) if "UNICODE" in name)


def convert(path: str, source_format: str | None = None, **options: Any) -> ConvertedModel:
    """Converts a model of another system: a folder, a file, or a name on the Hub.

    `source_format` is a key of `SOURCES`; `None`: it is found out. `options` are what else is to be said of models of
    that format (see `Source.list_options`). Returns the model, unchecked (see `ConvertedModel.check`). Raises a
    `ConversionError` if it cannot be converted, or there is no such format or option.
    """
    if source_format is None:
        source_format = detect_format(path, options.get("revision") or "main")
    if source_format not in SOURCES:
        raise ConversionError(f"There is no format {source_format!r}. There are: {', '.join(SOURCES)}.")
    source = SOURCES[source_format]
    legal = [option.name for option in source.list_options()]
    if strange := [name for name in options if name not in legal]:
        known = ", ".join(legal) or "none"
        raise ConversionError(f"{source_format} has no option {', '.join(strange)}; it has {known}.")
    is_local = os.path.exists(path)
    check_revision(path, options.get("revision") or "main")
    name, revision = (Path(path).resolve().name, None) if is_local else (path, options.get("revision", "main"))
    return replace(source(path, **options), origin=Origin(system=source_format, name=name, revision=revision))
