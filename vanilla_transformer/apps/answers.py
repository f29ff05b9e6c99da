"""What the page asks of a model: translations with scores, and where it looked; nothing here needs Gradio."""

import math
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer.hub.facts import public_name
from vanilla_transformer.hub.words import as_code, escape
from vanilla_transformer.inference.loading import is_multilingual, set_languages
from vanilla_transformer.inference.translate import Translation, length_limit, one_line, translate_n_best
from vanilla_transformer.model.pipeline_vanilla_transformer import find_directions, is_vanilla
from vanilla_transformer.tasks import TRANSLATION, Task, find_prefix, find_task
from vanilla_transformer.visualization.attention import AttentionMap, collect_attention

MAX_BEAMS = 10
DEFAULT_BEAMS = 4
# Of all layers and heads together; more are too many to be read, or to be sent to a browser with every translation.
MAX_MAP_WEIGHTS = 1_000_000
# A text of more is too long in any language; to find that out by its tokens would take far longer.
_CHARACTERS_PER_TOKEN = 20
_LANGUAGE_TOKEN = re.compile(r"(?:__)?([a-z]{2,3}(?:_[A-Za-z]{2,4})?)(?:__)?")
# How T5 calls its tasks.
_PAIR = re.compile(r"translation_([^_]+)_to_([^_]+)")


class DemoError(Exception):
    """What the person at the page should read and can do something about; `whole` is for a terminal or a log."""

    def __init__(self, message: str, whole: str | None = None) -> None:
        super().__init__(message)
        self.whole = message if whole is None else whole


@dataclass(frozen=True)
class Settings:
    """How to translate a text."""

    num_beams: int = DEFAULT_BEAMS  # 1 to MAX_BEAMS; 1 is greedy search, which has no scores
    length_penalty: float = 1.0  # above 0 favours longer translations; without effect on greedy search
    source_lang: str | None = None  # of multilingual models, in the tokenizer's spelling
    target_lang: str | None = None
    source_prefix: str = ""  # put before the text, for T5 and its like
    max_source_tokens: int | None = None  # special ones and prefix included; default: as the model was trained with


@dataclass
class DemoModel:
    """An encoder-decoder model in evaluation mode, with all that the page shows of it."""

    name: str  # its folder or name on the Hub
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    examples: tuple[str, ...] = ()
    max_source_length: int | None = None  # what sources were cut to in training, in tokens
    # Languages are set in the tokenizer and attention is switched in the model, so that requests take turns.
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    task: Task = field(init=False)
    # What the page starts with: read once, since the tokenizer's languages change with every request.
    settings: Settings = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.generation_config
        length_penalty = getattr(config, "length_penalty", None)
        self.task = find_task(self.model.config)
        num_beams = min(getattr(config, "num_beams", None) or DEFAULT_BEAMS, MAX_BEAMS)
        source, target = (getattr(self.tokenizer, name, None) for name in ("src_lang", "tgt_lang"))
        prefix = find_prefix(self.model.config, self.task, langs=self._find_langs())
        if self.directions:
            (source, target), prefix = next(iter(self.directions)), ""
        penalty = 1.0 if length_penalty is None else float(length_penalty)
        self.settings = Settings(num_beams, penalty, source, target, prefix)

    def _find_langs(self) -> Sequence[str] | None:
        """Source and target language: the configuration's, or of T5's several pairs the first."""
        config = self.model.config
        if langs := getattr(config, "langs", None):
            return [str(lang) for lang in langs]
        pairs = map(_PAIR.fullmatch, getattr(config, "task_specific_params", None) or {})
        return next((pair.groups() for pair in pairs if pair), None)

    def count_most_tokens(self, max_source_tokens: int | None = None) -> int:
        """The longest text that is taken, in tokens: what is given or was usual in training, but what it can read."""
        wanted = max_source_tokens or self.max_source_length or self.task.max_source_length
        positions = getattr(self.model.config, "max_position_embeddings", None)
        limits = (wanted, length_limit(self.tokenizer, None, self.model), positions)
        return min(limit for limit in limits if limit)

    def count_most_characters(self, max_source_tokens: int | None = None) -> int:
        """The longest text that is worth counting its tokens, in characters."""
        return _CHARACTERS_PER_TOKEN * self.count_most_tokens(max_source_tokens)

    @property
    def directions(self) -> dict[tuple[str, str], str]:
        """What a model of this package for several pairs of languages wants before a source of each; of others none."""
        found = find_directions(self.model.config) if is_vanilla(self.model) else {}
        return found if len(found) > 1 else {}

    @property
    def languages(self) -> list[str]:
        """The languages of a model for several, of a tokenizer in its own spelling; none for a fixed pair."""
        if self.directions:
            return sorted({language for pair in self.directions for language in pair})
        if not is_multilingual(self.tokenizer):
            return []
        found = (_LANGUAGE_TOKEN.fullmatch(str(token)) for token in self.tokenizer.all_special_tokens)
        return sorted(match[1] for match in found if match)

    @property
    def summary(self) -> str:
        """What the model is, in a line of Markdown; of a folder its name alone, since others may read it."""
        config = self.model.config
        langs = getattr(config, "langs", None)
        pair = f"{langs[0]} to {langs[1]}, " if isinstance(langs, list) and len(langs) == 2 else ""
        facts = f"{config.model_type}, {pair}{self.model.num_parameters():,} parameters, on {self.model.device}"
        return f"Model {as_code(public_name(self.name))}: {escape(facts)}"


@dataclass(frozen=True)
class Answer:
    """What the page shows for a text."""

    text: str  # of a model for translation as many lines as the text had
    translations: tuple[Translation, ...]  # of the first line: as many as there were beams, best first
    attention: AttentionMap | None  # of the best one
    seconds: float
    note: str = ""  # in Markdown: of which line this is, and why there is no attention


def translate_text(demo: DemoModel, text: str, settings: Settings) -> Answer:
    """Translates one text and looks into the model; a `DemoError` says why not. Several people wait for each other.

    A model for translation gets each line as a sentence, without white space around it; others get the text as it is.
    """
    settings = _name_languages(demo, _check_settings(settings))
    sources = _check_text(demo, settings, text)
    with demo.lock:
        start = time.perf_counter()
        options = _choose_options(demo, settings)
        num_tokens = _check_length(demo, settings, sources)
        first = next(index for index, source in enumerate(sources) if source.strip())
        try:
            found = translate_n_best(demo.model, demo.tokenizer, sources, **options)
            seconds = time.perf_counter() - start
            source, translations = sources[first], tuple(found[first])
            attention, note = _look_inside(demo, settings, source, num_tokens[first], translations[0].text)
        except torch.OutOfMemoryError as error:
            raise DemoError("The memory is too small for this: take fewer beams or a shorter text.") from error
    best = [each[0].text for each in found]
    if len(sources) > 1:
        best = [one_line(each) for each in best]
        note = f"The list and the attention are of the first line. {note}".rstrip()
    return Answer("\n".join(best), translations, attention, seconds, note)


def _check_settings(settings: Settings) -> Settings:
    """Refuses numbers that are none, which come from programs and not from the page."""
    penalty = settings.length_penalty
    if settings.num_beams not in range(1, MAX_BEAMS + 1):
        raise DemoError(f"The beam size is {settings.num_beams}; it must be a whole number, 1 to {MAX_BEAMS}.")
    if not isinstance(penalty, int | float) or not math.isfinite(penalty):
        raise DemoError(f"The length penalty is {penalty}; it must be a number.")
    return replace(settings, num_beams=int(settings.num_beams))


def _name_languages(demo: DemoModel, settings: Settings) -> Settings:
    """Puts before the prefix that by which a model of several pairs of languages is told which."""
    if not demo.directions:
        return settings
    pair = (settings.source_lang or "", settings.target_lang or "")
    if pair not in demo.directions:
        known = ", ".join(map(" to ".join, demo.directions))
        raise DemoError(f"This model translates {known}, not {pair[0]!r} to {pair[1]!r}.")
    return replace(settings, source_prefix=demo.directions[pair] + settings.source_prefix)


def _check_text(demo: DemoModel, settings: Settings, text: str) -> list[str]:
    """What the model is to read, each without its prefix; refuses what is no text, or far too long a one."""
    num_characters = len(settings.source_prefix) + len(text)
    limit = demo.count_most_characters(settings.max_source_tokens)
    if num_characters > limit:
        raise DemoError(f"The text has {num_characters} characters; {limit} are the most that are taken here.")
    if not text.strip():
        raise DemoError("There is no text yet: write one, or take one of the examples.")
    if re.search("[\ud800-\udfff]", settings.source_prefix + text):
        raise DemoError("The text holds half of a character (U+D800 to U+DFFF), which is no text.")
    return [line.strip() for line in re.split("\r\n?|\n", text)] if demo.task is TRANSLATION else [text]


def _choose_options(demo: DemoModel, settings: Settings) -> dict[str, Any]:
    """The arguments of `translate_n_best`; sets the tokenizer's languages."""
    options: dict[str, Any] = {"num_beams": settings.num_beams, "num_return_sequences": settings.num_beams}
    options |= {"do_sample": False, "source_prefix": settings.source_prefix, "progress": False}
    if settings.num_beams > 1:
        options["length_penalty"] = settings.length_penalty
    if not is_multilingual(demo.tokenizer):
        return options
    if not settings.source_lang or not settings.target_lang:
        raise DemoError("This model knows many languages: choose that of the text, and one to translate into.")
    try:
        languages = set_languages(demo.tokenizer, source_lang=settings.source_lang, target_lang=settings.target_lang)
    except ValueError as error:
        raise DemoError(str(error)) from error
    return {**options, **languages}


def _check_length(demo: DemoModel, settings: Settings, sources: Sequence[str]) -> list[int]:
    """The number of each source's tokens, special ones included; refuses too many together, or none at all."""
    texts = [settings.source_prefix + source for source in sources]
    num_tokens = [len(demo.tokenizer(text, verbose=False)["input_ids"]) for text in texts]
    total = sum(number for number, source in zip(num_tokens, sources, strict=True) if source.strip())
    limit = demo.count_most_tokens(settings.max_source_tokens)
    if total > limit:
        raise DemoError(f"The text has {total} tokens; {limit} are the most that are taken here. Write less.")
    if max(num_tokens) <= demo.tokenizer.num_special_tokens_to_add():
        raise DemoError("The model's tokenizer finds nothing that it knows in this text.")
    return num_tokens


def _look_inside(
    demo: DemoModel, settings: Settings, source: str, num_tokens: int, translation: str
) -> tuple[AttentionMap | None, str]:
    """The attention weights, or why there are none."""
    too_long = "The text is too long for its attention to be shown."
    config = demo.model.config
    heads = getattr(config, "num_hidden_layers", 1) * getattr(config, "num_attention_heads", 1)
    # The encoder's alone; it would take long to compute what is not shown.
    if heads * num_tokens**2 > MAX_MAP_WEIGHTS:
        return None, too_long
    if not translation.strip():
        return None, "The translation is empty, so that there is no attention to be shown."
    prefix = settings.source_prefix
    try:
        attention = collect_attention(demo.model, demo.tokenizer, source, translation, source_prefix=prefix)
    except (NotImplementedError, ValueError) as error:
        return None, f"No attention can be shown: {escape(str(error))}"
    if attention.encoder.size + attention.decoder.size + attention.cross.size > MAX_MAP_WEIGHTS:
        return None, too_long
    return attention, ""
