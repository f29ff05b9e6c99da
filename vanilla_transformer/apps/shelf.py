"""The models of the page of `scripts/app.py`: which may be loaded, each held once, and why one cannot be loaded."""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedConfig
from transformers.utils.hub import cached_file

from vanilla_transformer.data.vocabularies import load_needed_tokenizer
from vanilla_transformer.files import check_model_name, explain_missing_model, find_damage
from vanilla_transformer.inference.loading import load_model_and_tokenizer

from .answers import DemoError, DemoModel
from .examples import find_examples, read_training_data

OtherModels = Literal["any", "hub", "none"]

# Whatever is in a model's folder, a change of these makes it another model.
_MODEL_FILES = ("*.safetensors", "*.bin", "*config.json", "tokenizer*", "*vocab*", "*.model", "*.spm")
_JSON_FILES = (
    *("config.json", "tokenizer*.json", "*vocab.json", "special_tokens_map.json", "added_tokens.json"),
    "*.index.json",
)
_LISTED_SHAPES = 3
# What the page shows of a message; the command line shows all of it.
_SHOWN_LINES = 8
_SHOWN_CHARACTERS = 300  # of a line

# Of each file its name, the time of its last change in nanoseconds, and its size.
_Stamp = frozenset[tuple[str, int, int]]


class ModelShelf:
    """The models of a page, each loaded once and shared by everybody, the ones not used for longest given up.

    However a folder is spelled, it is one model; if its files have changed, it is loaded anew.

    Args:
        name: The first model, which is loaded with `revision` and `trust_remote_code`; `None`: none yet.
        others: Which other models the people at the page may load: `"any"`, `"hub"` (no folders of this machine), or
            `"none"`. None of them may bring code along.
        size: How many models are held at a time.
        examples: Example sentences for every model; `None`: such as suit it.
        device: See [`load_model_and_tokenizer`].
        dtype: See [`load_model_and_tokenizer`].
        revision: See [`load_model_and_tokenizer`].
        trust_remote_code: See [`load_model_and_tokenizer`].
    """

    def __init__(
        self,
        name: str | None,
        *,
        others: OtherModels = "none",
        size: int = 2,
        examples: Sequence[str] | None = None,
        device: str = "auto",
        dtype: str = "auto",
        revision: str = "main",
        trust_remote_code: bool = False,
    ) -> None:
        if name is None and others == "none":
            raise ValueError("There is no model to show: name one, or let the people at the page do so.")
        if size < 1:
            raise ValueError(f"size is {size}; it must be at least 1 model.")
        self.name = name
        self.others = others
        self.size = size
        self.examples = examples
        self.device, self.dtype = device, dtype
        self.revision, self.trust_remote_code = revision, trust_remote_code
        self._models: OrderedDict[str, tuple[_Stamp, DemoModel]] = OrderedDict()
        self._access = threading.Lock()
        self._loading = threading.Lock()

    def get(self, name: str | None) -> DemoModel:
        """Returns a model, loading it if need be.

        Raises:
            DemoError: If the model may not be loaded, or cannot.
        """
        name = (name or "").strip()
        if not name:
            raise DemoError("There is no model yet: name one, by its folder or its name on the Hub.")
        key = self._find_key(name)
        demo = self._take(key)
        if demo is not None:
            return demo
        # One at a time, while the models that are here go on translating.
        with self._loading:
            demo = self._take(key)
            if demo is None:
                is_first = self.name is not None and key == self._find_key(self.name)
                if not is_first:
                    self._check_name(name)
                stamp = _stamp(key)  # before it is read, lest a change meanwhile be missed
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
            message = f"{name!r} is neither a folder that can be read nor a name on the Hub: {error}"
            raise DemoError(_shorten(message), whole=message) from error
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
        if self.others == "any":
            return
        if self.others == "none":
            raise DemoError("This page shows one model, and loads no other.")
        only_hub = "This page loads models by their names on the Hub, such as Helsinki-NLP/opus-mt-en-de."
        # A folder of that name would be taken for the model.
        if os.path.exists(name):
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
            raise DemoError(_shorten(str(error)), whole=str(error)) from error
        config = None
        # Strange files bring up errors of every kind, and none of them is the program's fault.
        try:
            with explain_missing_model(place):
                config = AutoConfig.from_pretrained(place, **source)
            _check_kind(name, config)
            model, tokenizer = load_model_and_tokenizer(place, device=self.device, dtype=self.dtype, **source)
        except DemoError:
            raise
        except Exception as error:
            message = f"{name!r} could not be loaded. {_explain(place, error, config, source)}"
            raise DemoError(_shorten(message), whole=message) from error
        data = read_training_data(place, revision)
        examples = find_examples(model, tokenizer, data) if self.examples is None else self.examples
        length = data.get("max_source_length")
        return DemoModel(name, model, tokenizer, tuple(examples), length if isinstance(length, int) else None)


def _stamp(folder: str) -> _Stamp:
    """What changes when the files of a model change; nothing where there is no folder."""
    try:
        found = [(path, path.stat()) for path in _find_files(Path(folder), _MODEL_FILES)]
    except OSError:  # no path, or files that are going as they are looked at
        return frozenset()
    return frozenset((path.name, status.st_mtime_ns, status.st_size) for path, status in found)


def _find_files(folder: Path, patterns: Sequence[str]) -> Iterator[Path]:
    return (path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file())


def _check_kind(name: str, config: PreTrainedConfig) -> None:
    """Refuses a model that does not make one text of another."""
    if config.is_encoder_decoder:
        return
    classes = config.architectures or [f"{config.model_type} model"]
    raise DemoError(
        f"{name!r} holds a {classes[0]}, which is not an encoder with a decoder. This page needs both, as "
        "VanillaTransformerForConditionalGeneration, MarianMTModel and T5ForConditionalGeneration have them."
    )


def _explain(place: str, error: Exception, config: PreTrainedConfig | None, source: dict[str, Any]) -> str:
    """Why a model cannot be loaded, with the name of the file that is to blame, where that can be found."""
    folder = _find_folder(place, source["revision"])
    if folder is not None:
        reasons = [_find_broken_json(folder)]
        if isinstance(error, SafetensorError):
            weights = [(path, find_damage(path)) for path in _find_files(folder, ("*.safetensors",))]
            reasons += [f"{path} {damage}" for path, damage in weights if damage]
        # So the library begins where shapes differ; which these are it writes to its log only.
        if isinstance(error, RuntimeError) and "ignore_mismatched_sizes" in str(error).partition("\n")[0]:
            reasons.append(_find_wrong_shapes(place, source))
        if found := next(filter(None, reasons), None):
            return found
    # A bare KeyError says no more than the name of the key.
    text = str(error).strip()
    if len(text.split()) < 3:
        text = f"{type(error).__name__}: {text}"
    if config is None:
        return text
    return f"Its tokenizer cannot be read. {text}" if _is_about_tokenizer(place, error, source) else text


def _find_folder(place: str, revision: str) -> Path | None:
    """Where the files of a model are on this machine."""
    if os.path.isdir(place):
        return Path(place)
    try:
        found = cached_file(place, "config.json", revision=revision, local_files_only=True)
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found).parent


def _find_broken_json(folder: Path) -> str | None:
    for path in _find_files(folder, _JSON_FILES):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return f"{path} cannot be read as JSON: {error}"
    return None


def _find_wrong_shapes(place: str, source: dict[str, Any]) -> str | None:
    """Names the weights whose shapes are not those of the configuration."""
    options: dict[str, Any] = {"ignore_mismatched_sizes": True, "output_loading_info": True, **source}
    _, report = AutoModelForSeq2SeqLM.from_pretrained(place, **options)
    wrong = sorted(report["mismatched_keys"])
    if not wrong:
        return None
    rows = [f"{key}: {tuple(held)} and {tuple(asked)}" for key, held, asked in wrong[:_LISTED_SHAPES]]
    if len(wrong) > _LISTED_SHAPES:
        rows.append(f"and {len(wrong) - _LISTED_SHAPES} more")
    return "\n".join(["Its weights have other shapes than config.json asks for (in the file, by config.json):", *rows])


def _is_about_tokenizer(place: str, error: Exception, source: dict[str, Any]) -> bool:
    """Whether it is the tokenizer that fails so; that takes its files, but not the model's."""
    if not os.path.isdir(place):
        return False
    try:
        load_needed_tokenizer(place, **source)
    except Exception as again:  # such as came before, whatever that was
        return (type(again), str(again)) == (type(error), str(error))
    return False


def _shorten(message: str) -> str:
    """The first lines that say something."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    shown = [
        line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}..." for line in lines[:_SHOWN_LINES]
    ]
    return "\n".join([*shown, "..."] if len(lines) > _SHOWN_LINES else shown)
