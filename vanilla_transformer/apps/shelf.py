"""The models of the page: which may be loaded, each held once, and example sentences for them."""

import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig
from transformers.utils.hub import cached_file

from vanilla_transformer.files import check_model_name, explain_missing_model
from vanilla_transformer.inference.loading import load_model_and_tokenizer

from .answers import DemoError, DemoModel

logger = logging.getLogger(__name__)

OtherModels = Literal["any", "hub", "none"]

# Whatever is in a model's folder, a change of these makes it another model.
_MODEL_FILES = ("*.safetensors", "*.bin", "*config.json", "tokenizer*", "*vocab*", "*.model", "*.spm")
_SHOWN_LINES, _SHOWN_CHARACTERS = 8, 300  # of a message on the page, and of its lines

# Of each file its name, the time of its last change in nanoseconds, and its size.
_Stamp = frozenset[tuple[str, int, int]]


@dataclass
class ModelShelf:
    """The models of a page, each loaded once and shared by everybody, the ones not used for longest given up.

    A folder whose files have changed is loaded anew. The first model, `name`, is loaded with `revision` and
    `trust_remote_code`; `others` may be "any", "hub" (no folders of this machine) or "none", and bring no code along.
    """

    name: str | None
    _: KW_ONLY
    others: OtherModels = "none"
    size: int = 2
    examples: Sequence[str] | None = None
    device: str = "auto"
    dtype: str = "auto"
    revision: str = "main"
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.name is None and self.others == "none":
            raise ValueError("There is no model to show: name one, or let the people at the page do so.")
        self._models: OrderedDict[str, tuple[_Stamp, DemoModel]] = OrderedDict()
        self._access = threading.Lock()
        self._loading = threading.Lock()

    def get(self, name: str | None) -> DemoModel:
        """Returns a model, loading it if need be; a `DemoError` says why it may not be loaded, or cannot."""
        name = (name or "").strip()
        if not name:
            raise DemoError("There is no model yet: name one, by its folder or its name on the Hub.")
        key = self._find_key(name)
        if demo := self._take(key):
            return demo
        # One at a time, while the models that are here go on translating.
        with self._loading:
            if demo := self._take(key):
                return demo
            is_first = self.name is not None and key == self._find_key(self.name)
            if not is_first:
                self._check_name(name)
            stamp = _stamp(key)  # before it is read, so that no change meanwhile is missed
            demo = self._load(name, is_first)
            with self._access:
                self._models[key] = (stamp, demo)
                self._models.move_to_end(key)
                while len(self._models) > self.size:
                    self._models.popitem(last=False)
            return demo

    def _find_key(self, name: str) -> str:
        """One name for all spellings of a folder, also when it is gone; a name on the Hub has one spelling."""
        try:
            name.encode()  # as the page is, which shows it
            path = os.path.realpath(os.path.expanduser(name))
        except (OSError, ValueError) as error:
            raise _shortened(f"{name!r} is neither a folder that can be read nor a name on the Hub: {error}") from error
        return path if os.path.isdir(path) or path in self._models else name

    def _take(self, key: str) -> DemoModel | None:
        """The model, if it is here and its files have not changed; that they are gone is no change."""
        with self._access:
            held, demo = self._models.get(key, (None, None))
            if held is None or _stamp(key) not in (held, frozenset()):
                return None
            self._models.move_to_end(key)
            return demo

    def _check_name(self, name: str) -> None:
        """Refuses models that the people at the page may not load."""
        if self.others == "none":
            raise DemoError("This page shows one model, and loads no other.")
        if self.others == "hub":
            only_hub = "This page loads models by their names on the Hub, such as Helsinki-NLP/opus-mt-en-de."
            if os.path.exists(name):  # a folder of that name would be taken for the model
                raise DemoError(only_hub)
            try:
                check_model_name(name)
            except OSError as error:
                raise DemoError(only_hub) from error

    def _load(self, name: str, is_first: bool) -> DemoModel:
        revision, trust = (self.revision, self.trust_remote_code) if is_first else ("main", False)
        place = os.path.expanduser(name)
        source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust}
        try:
            check_model_name(place)
        except OSError as error:
            raise _shortened(str(error), is_first) from error
        # Strange files bring up errors of every kind, and none of them is the program's fault.
        try:
            with explain_missing_model(place):
                config = AutoConfig.from_pretrained(place, **source)
            if not config.is_encoder_decoder:
                kind = (config.architectures or [f"{config.model_type} model"])[0]
                raise ValueError(f"It holds a {kind}, which is not an encoder with a decoder: this page needs both.")
            model, tokenizer = load_model_and_tokenizer(place, device=self.device, dtype=self.dtype, **source)
        except Exception as error:
            # A bare KeyError says no more than the name of the key.
            reason = str(error) if " " in str(error).strip() else f"{type(error).__name__}: {error}"
            raise _shortened(f"{name!r} could not be loaded. {reason}", is_first) from error
        data = read_training_data(place, revision)
        examples = make_examples(data) if self.examples is None else self.examples
        length = data.get("max_source_length")
        return DemoModel(name, model, tokenizer, tuple(examples), length if isinstance(length, int) else None)


def _stamp(folder: str) -> _Stamp:
    """What changes when the files of a model change; nothing where there is no folder."""
    try:
        found = [(path, path.stat()) for pattern in _MODEL_FILES for path in Path(folder).glob(pattern)]
    except (OSError, ValueError):  # no path, or files that are going as they are looked at
        return frozenset()
    return frozenset((path.name, status.st_mtime_ns, status.st_size) for path, status in found)


def _shortened(message: str, is_first: bool = False) -> DemoError:
    """An error that shows its first lines on the page, and all in a terminal."""
    if is_first:  # visitors have not named it, and the message may say where it lies
        return DemoError("The model of this page could not be loaded; the program's log says why.", whole=message)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    most = _SHOWN_CHARACTERS
    shown = [line if len(line) <= most else f"{line[:most]}..." for line in lines[:_SHOWN_LINES]]
    return DemoError("\n".join([*shown, "..."] if len(lines) > _SHOWN_LINES else shown), whole=message)


def read_training_data(name: str, revision: str = "main") -> dict[str, Any]:
    """The arguments of the data that a model, a folder or one on the Hub, was trained on, if training noted them."""
    problems = ("gated_repo", "missing_entries", "connection_errors")
    quiet = {f"_raise_exceptions_for_{problem}": False for problem in problems}
    try:
        path = cached_file(name, "arguments.json", revision=revision, **quiet)
        record = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    data = record.get("data") if isinstance(record, dict) else None
    return data if isinstance(data, dict) else {}


def make_examples(data: dict[str, Any]) -> tuple[str, ...]:
    """Short and long examples of the built-in corpus for a model that was trained on it; none for others."""
    if not data.get("builtin_corpus"):
        return ()
    try:
        from vanilla_transformer.data.numbers_and_dates import numbers_and_dates

        source, target = str(data.get("source_lang") or "en"), str(data.get("target_lang"))
        corpus = numbers_and_dates(split="test", test_size=20, source_lang=source, target_lang=target)
    except (ImportError, ValueError) as error:
        logger.warning("No examples of the built-in corpus can be shown: %s", error)
        return ()
    return tuple(sorted(corpus["source"], key=len)[3::4])
