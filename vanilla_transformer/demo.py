"""What the page of `scripts/app.py` asks for: models by name, translations with scores, attention, example sentences.

Nothing here needs Gradio; the page itself is `demo_page.py`. A [`DemoError`] is written for the person at the page. Any
other error is a fault of the program.
"""

import json
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from .attention_maps import AttentionMap, collect_attention
from .pipeline_vanilla_transformer import is_vanilla
from .translation import (
    Translation,
    is_multilingual,
    length_limit,
    load_model_and_tokenizer,
    one_line,
    set_languages,
    translate_n_best,
)

logger = logging.getLogger(__name__)

MAX_BEAMS = 10
DEFAULT_BEAMS = 4
MAX_SOURCE_TOKENS = 200
# Of all layers and heads together; more are too many to be read, or to be sent to a browser with every translation.
MAX_MAP_WEIGHTS = 1_000_000
# The library's models would stop after 20 tokens where neither they nor the call set a limit.
_LIBRARY_MAX_LENGTH = 20
_MAX_NEW_TOKENS = 256
# What a strange checkpoint, or a Hub that cannot be reached, brings up.
_LOADING_ERRORS = (AttributeError, ImportError, KeyError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_LANGUAGE_TOKEN = re.compile(r"(?:__)?([a-z]{2,3}(?:_[A-Za-z]{2,4})?)(?:__)?")

OtherModels = Literal["any", "hub", "none"]

# Sentences by the two- and three-letter codes of their language.
_SENTENCES: dict[tuple[str, str], tuple[str, ...]] = {
    ("en", "eng"): (
        "A man in a blue shirt is riding a bicycle.",
        "Two children are playing with a dog in the park.",
        "A woman is reading a book by the window.",
    ),
    ("de", "deu"): (
        "Ein Mann in einem blauen Hemd fährt Fahrrad.",
        "Zwei Kinder spielen im Park mit einem Hund.",
        "Eine Frau liest am Fenster ein Buch.",
    ),
    ("fr", "fra"): (
        "Un homme en chemise bleue fait du vélo.",
        "Deux enfants jouent avec un chien dans le parc.",
        "Une femme lit un livre près de la fenêtre.",
    ),
    ("zh", "zho"): ("他每天骑自行车去上班。", "孩子们在公园里和狗玩。", "她坐在窗边看书。"),
}
# Of so many examples of the built-in corpus, every fourth in the order of length is shown.
_BUILTIN_EXAMPLES = 20
_EVERY = 4
_FIRST = 3


class DemoError(Exception):
    """What the person at the page should read and can do something about."""


@dataclass(frozen=True)
class Settings:
    """How to translate a text.

    Args:
        num_beams: 1 to `MAX_BEAMS`; 1 is greedy search, which has no scores.
        length_penalty: Above 0 favours longer translations; without effect on greedy search.
        source_lang: With multilingual tokenizers: the source language in the tokenizer's spelling.
        target_lang: The target language, likewise.
        source_prefix: Put before the text, for T5 and its like.
        max_source_tokens: The longest text, in tokens, special ones and prefix included.
    """

    num_beams: int = DEFAULT_BEAMS
    length_penalty: float = 1.0
    source_lang: str | None = None
    target_lang: str | None = None
    source_prefix: str = ""
    max_source_tokens: int = MAX_SOURCE_TOKENS


@dataclass
class DemoModel:
    """A model with all that the page shows of it.

    Args:
        name: Its folder or name on the Hub.
        model: An encoder-decoder model, in evaluation mode.
        tokenizer: Its tokenizer.
        examples: Sentences to try it with.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    examples: tuple[str, ...] = ()
    # Languages are set in the tokenizer and attention is switched in the model, so that requests take turns.
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    # What the page starts with: read once, since the tokenizer's languages change with every request.
    settings: Settings = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.generation_config
        length_penalty = getattr(config, "length_penalty", None)
        tasks = getattr(self.model.config, "task_specific_params", None) or {}
        prefixes = (task.get("prefix") for name, task in tasks.items() if name.startswith("translation"))
        self.settings = Settings(
            num_beams=min(getattr(config, "num_beams", None) or DEFAULT_BEAMS, MAX_BEAMS),
            length_penalty=1.0 if length_penalty is None else float(length_penalty),
            source_lang=getattr(self.tokenizer, "src_lang", None),
            target_lang=getattr(self.tokenizer, "tgt_lang", None),
            source_prefix=next((prefix for prefix in prefixes if prefix), ""),
        )

    @property
    def languages(self) -> list[str]:
        """The languages of a multilingual tokenizer, in its own spelling; none for one that has a fixed pair."""
        if not is_multilingual(self.tokenizer):
            return []
        found = (_LANGUAGE_TOKEN.fullmatch(str(token)) for token in self.tokenizer.all_special_tokens)
        return sorted(match[1] for match in found if match)

    @property
    def summary(self) -> str:
        """What the model is, in a line."""
        config = self.model.config
        langs = getattr(config, "langs", None)
        pair = f"{langs[0]} to {langs[1]}, " if isinstance(langs, list) and len(langs) == 2 else ""
        return f"{config.model_type}, {pair}{self.model.num_parameters():,} parameters, on {self.model.device}"


@dataclass(frozen=True)
class Answer:
    """What the page shows for a text.

    Args:
        translations: As many as there were beams, best first.
        attention: Where the model looked while it wrote the best one; `None`: see `note`.
        seconds: What the translation took.
        note: Why there is no attention to be shown.
    """

    translations: tuple[Translation, ...]
    attention: AttentionMap | None
    seconds: float
    note: str = ""


def translate_text(demo: DemoModel, text: str, settings: Settings) -> Answer:
    """Translates one text and looks into the model; texts of several people wait for each other.

    Args:
        demo: The model.
        text: The text; line breaks become spaces.
        settings: How to translate.

    Returns:
        The translations with their scores, and the attention weights of the best one.

    Raises:
        DemoError: If there is no text, it is too long, or a setting is not legal for this model.
    """
    if not text.strip():
        raise DemoError("There is nothing to translate yet: write a sentence, or take one of the examples.")
    if not 1 <= settings.num_beams <= MAX_BEAMS:
        raise DemoError(f"The beam size is {settings.num_beams}; it must be 1 to {MAX_BEAMS}.")
    source = one_line(text.strip())
    with demo.lock:
        start = time.perf_counter()
        options = _choose_options(demo, settings)
        _check_length(demo, settings, source)
        try:
            (translations,) = translate_n_best(
                demo.model,
                demo.tokenizer,
                [source],
                num_return_sequences=settings.num_beams,
                source_prefix=settings.source_prefix,
                progress=False,
                **options,
            )
            seconds = time.perf_counter() - start
            attention, note = _look_inside(demo, settings, source, translations[0].text)
        except torch.OutOfMemoryError as error:
            raise DemoError("The memory is too small for this: take fewer beams or a shorter text.") from error
    return Answer(translations=tuple(translations), attention=attention, seconds=seconds, note=note)


def _choose_options(demo: DemoModel, settings: Settings) -> dict[str, Any]:
    """The arguments of `generate`; sets the tokenizer's languages."""
    config = demo.model.generation_config
    options: dict[str, Any] = {"num_beams": settings.num_beams, "do_sample": False}
    if settings.num_beams > 1:
        options["length_penalty"] = settings.length_penalty
    if (
        not is_vanilla(demo.model)
        and config.max_new_tokens is None
        and config.max_length in (None, _LIBRARY_MAX_LENGTH)
    ):
        options["max_new_tokens"] = _MAX_NEW_TOKENS
    if not is_multilingual(demo.tokenizer):
        return options
    if not settings.source_lang or not settings.target_lang:
        raise DemoError("This model knows many languages: choose that of the text, and one to translate into.")
    try:
        languages = set_languages(demo.tokenizer, source_lang=settings.source_lang, target_lang=settings.target_lang)
    except ValueError as error:
        raise DemoError(str(error)) from error
    return {**options, **languages}


def _check_length(demo: DemoModel, settings: Settings, source: str) -> None:
    """Refuses a text of too many tokens, or of none."""
    num_tokens = len(demo.tokenizer(settings.source_prefix + source, verbose=False)["input_ids"])
    own_limit = length_limit(demo.tokenizer, None) or settings.max_source_tokens
    limit = min(own_limit, settings.max_source_tokens)
    if num_tokens > limit:
        raise DemoError(
            f"The text has {num_tokens} tokens; {limit} are the most that are translated here. Take a shorter one, or "
            "one sentence at a time."
        )
    if num_tokens <= demo.tokenizer.num_special_tokens_to_add():
        raise DemoError("The model's tokenizer finds nothing that it knows in this text.")


def _look_inside(demo: DemoModel, settings: Settings, source: str, translation: str) -> tuple[AttentionMap | None, str]:
    """The attention weights, or why there are none."""
    if not translation.strip():
        return None, "The translation is empty, so that there is no attention to be shown."
    prefix = settings.source_prefix
    try:
        attention = collect_attention(demo.model, demo.tokenizer, source, translation, source_prefix=prefix)
    except (NotImplementedError, ValueError) as error:
        return None, f"No attention can be shown: {error}"
    if attention.encoder.size + attention.decoder.size + attention.cross.size > MAX_MAP_WEIGHTS:
        return None, "The text is too long for its attention to be shown."
    return attention, ""


class ModelShelf:
    """The models of a page, each loaded once and shared by everybody, the ones not used for longest given up.

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
        self._models: OrderedDict[str, DemoModel] = OrderedDict()
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
        demo = self._take(name)
        if demo is not None:
            return demo
        # One at a time, while the models that are here go on translating.
        with self._loading:
            demo = self._take(name)
            if demo is None:
                self._check_name(name)
                demo = self._load(name)
                with self._access:
                    self._models[name] = demo
                    while len(self._models) > self.size:
                        self._models.popitem(last=False)
            return demo

    def _take(self, name: str) -> DemoModel | None:
        with self._access:
            if name in self._models:
                self._models.move_to_end(name)
            return self._models.get(name)

    def _check_name(self, name: str) -> None:
        if name == self.name or self.others == "any":
            return
        if self.others == "none":
            raise DemoError("This page shows one model, and loads no other.")
        # A folder of that name would be taken for the model.
        if not _HUB_NAME.fullmatch(name) or os.path.exists(name):
            raise DemoError("This page loads models by their names on the Hub, such as Helsinki-NLP/opus-mt-en-de.")

    def _load(self, name: str) -> DemoModel:
        revision, trust = (self.revision, self.trust_remote_code) if name == self.name else ("main", False)
        try:
            config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust)
            if not config.is_encoder_decoder:
                raise DemoError(f"{name!r} is a {config.model_type} model; this page needs an encoder-decoder model.")
            model, tokenizer = load_model_and_tokenizer(
                name, device=self.device, dtype=self.dtype, revision=revision, trust_remote_code=trust
            )
        except _LOADING_ERRORS as error:
            logger.info("%r could not be loaded", name, exc_info=True)
            place = "" if os.path.isdir(name) else " from the Hub"
            raise DemoError(f"{name!r} could not be loaded{place}. {_first_line(error)}") from error
        examples = self.examples
        if examples is None:
            examples = find_examples(name, model, tokenizer, revision=revision)
        return DemoModel(name=name, model=model, tokenizer=tokenizer, examples=tuple(examples))


def _first_line(error: Exception) -> str:
    """What an error of the library begins with; the rest is for programmers."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def find_examples(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, revision: str = "main"
) -> tuple[str, ...]:
    """Finds sentences that suit a model.

    Args:
        name: The model's folder or name on the Hub, whose record of its training is read if there is one.
        model: The model.
        tokenizer: Its tokenizer.
        revision: Branch, tag or commit on the Hub.

    Returns:
        Examples of the built-in corpus for a model that was trained on it, else everyday sentences in the model's
        source language (English, where it cannot be known), else none.
    """
    data = _read_training_record(name, revision)
    langs = getattr(model.config, "langs", None) or [None]
    own = (getattr(tokenizer, side, None) for side in ("src_lang", "source_lang"))
    language = next((str(lang) for lang in (data.get("source_lang"), langs[0], *own) if lang), "en")
    if data.get("builtin_corpus"):
        try:
            from .numbers_and_dates import numbers_and_dates

            target = str(data.get("target_lang"))
            corpus = numbers_and_dates(
                split="test", test_size=_BUILTIN_EXAMPLES, source_lang=language, target_lang=target
            )
        except (ImportError, ValueError):
            logger.info("The examples are not those of the built-in corpus.", exc_info=True)
        else:
            return tuple(sorted(corpus["source"], key=len)[_FIRST::_EVERY])
    code = re.split("[-_]", language)[0].lower()
    return next((sentences for codes, sentences in _SENTENCES.items() if code in codes), ())


def _read_training_record(name: str, revision: str) -> dict[str, Any]:
    """What `scripts/train.py` noted of the data, or nothing."""
    problems = ("gated_repo", "missing_entries", "connection_errors")
    quiet = {f"_raise_exceptions_for_{problem}": False for problem in problems}
    try:
        path = cached_file(name, "arguments.json", revision=revision, **quiet)
        record = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    data = record.get("data") if isinstance(record, dict) else None
    return data if isinstance(data, dict) else {}


__all__ = ["Answer", "DemoError", "DemoModel", "ModelShelf", "Settings", "find_examples", "translate_text"]
