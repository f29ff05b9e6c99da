"""Batch translation with any sequence-to-sequence model: sentences and streams of lines.

Sentences of like length share a batch, which is filled up to a budget of tokens; of a stream a window of lines is held.
Every input gives exactly one output, in order. A source that is empty or only white space gives an empty translation
without asking the model, which would make something up. A source longer than the limit is truncated, and a warning
names its line. The model's training flags are left as they were found.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from vanilla_transformer.data.vocabularies import check_text_target
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.pipeline_vanilla_transformer import (
    LIBRARY_MAX_LENGTH,
    WINDOW_SIZE,
    count_sentences,
    find_position_limit,
    is_vanilla,
    map_by_length,
    sequence_score_settings,
)
from vanilla_transformer.model.positions_vanilla_transformer import count_learned_positions

from .glossary import Glossary, ModelGlossary, SourceWords, check_beams

logger = logging.getLogger(__name__)

_NO_LENGTH_LIMIT = 10**20  # a tokenizer that knows no limit says 1e30
# Padded source tokens times beams of a batch when nothing else is said. The library's beam search copies what it knows
# of the sources for every beam at every step: on a CPU it is slower in larger batches.
DEFAULT_BATCH_TOKENS = 8192
DEFAULT_BATCH_TOKENS_OF_OTHERS = 4096
# Where models of the library have no limit of their own, such as T5.
_MAX_NEW_TOKENS_OF_OTHERS = 256


class TranslationModel(Protocol):
    """What can translate here, by `generate`, too: a model of the library, or one that was exported."""

    @property
    def device(self) -> torch.device:
        """Where its inputs have to be."""

    def modules(self) -> Iterator[torch.nn.Module]:
        """The model and all of its parts."""

    def state_dict(self) -> dict[str, Any]:
        """Its weights by name."""


@contextmanager
def inference(model: TranslationModel) -> Iterator[None]:
    """Evaluation mode without gradients; on leaving, every module gets its own training flag back."""
    flags = [(module, module.training) for module in model.modules()]
    for module, _ in flags:
        module.training = False
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, training in flags:
            module.training = training


def count_text_positions(config: Any) -> int | None:
    """How many tokens of a text a model has positions for, by its configuration; `None`: any number."""
    if config.model_type == VanillaTransformerConfig.model_type:
        return count_learned_positions(config)
    return find_position_limit(config)


def length_limit(tokenizer: PreTrainedTokenizerBase, max_length: int | None, model: Any = None) -> int | None:
    """How many tokens, special ones included, a text may have: `max_length`, else the tokenizer's own limit, if any.

    It is never more than a `model` has positions for.
    """
    least = tokenizer.num_special_tokens_to_add() + 1
    if max_length is not None and max_length < least:
        raise ValueError(f"The maximum length is {max_length} tokens; it must be at least {least} with this tokenizer.")
    own = tokenizer.model_max_length if tokenizer.model_max_length < _NO_LENGTH_LIMIT else None
    limits = [own if max_length is None else max_length]
    if model is not None:
        # An export to CTranslate2 has a table of them, which may end earlier.
        limits += [count_text_positions(model.config), getattr(model, "max_positions", None)]
    return min((limit for limit in limits if limit is not None), default=None)


def find_length_settings(model: Any, generate_kwargs: Mapping[str, Any]) -> dict[str, int]:
    """The limit of translations for `generate`, of a model of the library for which nothing else has one."""
    if is_vanilla(model) or any(generate_kwargs.get(name) is not None for name in ("max_length", "max_new_tokens")):
        return {}
    config = generate_kwargs.get("generation_config") or model.generation_config
    if config.max_new_tokens is not None or config.max_length not in (None, LIBRARY_MAX_LENGTH):
        return {}
    positions = count_text_positions(model.config) or _MAX_NEW_TOKENS_OF_OTHERS + 1
    return {"max_new_tokens": min(_MAX_NEW_TOKENS_OF_OTHERS, positions - 1)}


def encode_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    limit: int | None,
    line_numbers: Sequence[int] | None,
    side: Literal["source", "target"] = "source",
    name: str | None = None,
) -> list[list[int]]:
    """Token ids of each text, special tokens included; what is longer than `limit` is truncated with a warning.

    It names the line, and the file if that has a `name`, or without `line_numbers` how the text begins.
    """
    if not texts:
        return []
    if side == "target":
        check_text_target(tokenizer)
    argument = "text" if side == "source" else "text_target"
    # verbose=False: the tokenizer's own remark about overlong texts names no line and comes once.
    token_ids: list[list[int]] = tokenizer(**{argument: list(texts)}, verbose=False)["input_ids"]
    for index, ids in enumerate(token_ids):
        if limit is not None and len(ids) > limit:
            where = repr(texts[index][:40]) if line_numbers is None else f"line {line_numbers[index]}"
            where += f" of {name}" if name is not None else ""
            logger.warning("%s %s: truncated to %d of its %d tokens", side, where, limit, len(ids))
            token_ids[index] = tokenizer(**{argument: texts[index]}, truncation=True, max_length=limit)["input_ids"]
    return token_ids


def progress_bar(progress: bool | str, *, total: int | None, unit: str = "sentence") -> Any:
    """A bar on stderr if that is a terminal; `False` shows none, a string is its description."""
    description = progress if isinstance(progress, str) else None
    return tqdm(total=total, desc=description, unit=unit, disable=None if progress else True)


class Translation(NamedTuple):
    """A translation and, where asked for, beam search's score of it: its log-probability over the length penalty."""

    text: str
    score: float | None = None


class SourceTokens(list[int]):
    """A source's token ids, and what a glossary makes appear in its translation."""

    forced = SourceWords([])


class Translator:
    """What stays the same from one batch to the next; the arguments are those of [`translate`]."""

    def __init__(
        self,
        model: TranslationModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        n_best: int | None = None,
        batch_size: int | None = None,
        max_batch_tokens: int | None = None,
        max_source_length: int | None = None,
        source_prefix: str = "",
        glossary: Glossary | Mapping[str, Any] | None = None,
        **generate_kwargs: Any,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("max_batch_tokens", max_batch_tokens), ("n_best", n_best)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        self.model = cast(Any, model)
        self.tokenizer = tokenizer
        self.source_prefix = source_prefix
        self.limit = length_limit(tokenizer, max_source_length, self.model)
        configs = (generate_kwargs.get("generation_config"), self.model.generation_config)
        found = [generate_kwargs.get("num_beams"), *(getattr(config, "num_beams", None) for config in configs)]
        self.num_beams = next((value for value in found if value is not None), 1)
        self.glossary = ModelGlossary(glossary, model, tokenizer) if glossary else None
        if self.glossary:
            check_beams(self.num_beams, generate_kwargs.get("do_sample"))
        self.n_best = n_best
        self.num_translations = n_best or 1
        self.has_scores = n_best is not None and self.num_beams > 1
        own = sequence_score_settings(self.model) if self.has_scores else {"return_dict_in_generate": False}
        limit = find_length_settings(self.model, generate_kwargs)
        self.generate_kwargs = {**generate_kwargs, "num_return_sequences": self.num_translations, **own, **limit}
        if batch_size is None and max_batch_tokens is None:
            max_batch_tokens = DEFAULT_BATCH_TOKENS if is_vanilla(self.model) else DEFAULT_BATCH_TOKENS_OF_OTHERS
        rows = max(self.num_beams, self.num_translations)
        self.fits = partial(count_sentences, batch_size=batch_size, max_batch_tokens=max_batch_tokens, rows=rows)

    def check_n_best(self) -> None:
        """Makes sure that the search finds as many translations as were asked for, with scores."""
        if self.n_best is not None and not (self.has_scores and self.n_best <= self.num_beams):
            given = f"n_best is {self.n_best} and num_beams is {self.num_beams}"
            raise ValueError(f"{given}; n_best needs beam search, with no fewer beams than translations.")

    def translate_all(
        self, sentences: Sequence[str], progress: bool | str, *, first_line: int = 1
    ) -> list[list[Translation]]:
        """The translations of each sentence, best first."""
        if isinstance(sentences, str):
            raise TypeError("sentences is one string; pass a list of them.")
        with progress_bar(progress, total=len(sentences)) as bar:
            return list(self.translate(sentences, first_line=first_line, window_size=None, bar=bar))

    def translate(
        self, lines: Iterable[str], *, first_line: int, window_size: int | None, bar: Any, name: str | None = None
    ) -> Iterator[list[Translation]]:
        """Yields the translations of each line, best first; `bar` moves on by one per line. Warnings say `name`."""
        remaining = iter(lines)

        def read(count: int) -> list[tuple[int, list[int]]]:
            nonlocal first_line
            texts = list(islice(remaining, count))
            token_ids = self.encode(texts, first_line, name=name)
            first_line += len(texts)
            return [(len(ids), ids) for ids in token_ids]

        def run(token_ids: list[list[int]]) -> list[list[Translation]]:
            translations = self.run(token_ids)
            bar.update(len(token_ids))
            return translations

        return map_by_length(run, read, fits=self.fits, window_size=window_size)

    def encode(
        self, texts: list[str], first_line: int, source_prefix: str = "", name: str | None = None
    ) -> list[list[int]]:
        """The sources' token ids, after one more prefix; none for a text without words."""
        filled = [index for index, text in enumerate(texts) if text.strip()]
        sources = [self.source_prefix + source_prefix + texts[index] for index in filled]
        lines = [first_line + index for index in filled]
        encoded = encode_texts(self.tokenizer, sources, limit=self.limit, line_numbers=lines, name=name)
        token_ids: list[list[int]] = [[] for _ in texts]
        for index, ids, source_prefixed in zip(filled, encoded, sources, strict=True):
            token_ids[index] = ids
            if self.glossary is not None:
                token_ids[index] = source = SourceTokens(ids)
                all_ids = self.tokenizer(source_prefixed).input_ids if len(ids) == self.limit else ()
                source.forced = self.glossary.find(texts[index], ids, all_ids)
        return token_ids

    def run(self, token_ids: list[list[int]]) -> list[list[Translation]]:
        """Translates a batch of sources that all have tokens, or none of which has any; best translations first."""
        # Evaluation and inference mode end with the batch: the consumer's code is not ours to change.
        with inference(self.model):
            return self._translate_batch(token_ids)

    def _translate_batch(self, token_ids: list[list[int]]) -> list[list[Translation]]:
        count = self.num_translations
        if not token_ids[0]:
            return [[Translation("", 0.0 if self.has_scores else None)] * count for _ in token_ids]
        inputs = self.tokenizer.pad({"input_ids": token_ids}, return_attention_mask=True, return_tensors="pt")
        forced = {}
        if self.glossary is not None:
            forced = self.glossary.make_arguments([cast(SourceTokens, ids).forced for ids in token_ids])
        output = self.model.generate(**inputs.to(self.model.device), **self.generate_kwargs, **forced)
        sequences = output.sequences if self.has_scores else output
        scores = output.sequences_scores.tolist() if self.has_scores else [None] * len(sequences)
        texts = self.tokenizer.batch_decode(sequences, skip_special_tokens=True)
        rows = list(map(Translation, texts, scores))
        return [rows[start : start + count] for start in range(0, len(rows), count)]


def translate(
    model: TranslationModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    *,
    batch_size: int | None = None,
    max_batch_tokens: int | None = None,
    max_source_length: int | None = None,
    source_prefix: str = "",
    glossary: Glossary | Mapping[str, Any] | None = None,
    first_line: int = 1,
    progress: bool | str = True,
    **generate_kwargs: Any,
) -> list[str]:
    """Translates sentences: one translation for each, in their order (see [`translate_n_best`] for more).

    Args:
        model: Any sequence-to-sequence model, or a `CTranslate2Model`; the inputs are moved to its device.
        tokenizer: Its tokenizer.
        sentences: The source sentences. One without text gives an empty translation.
        batch_size: The most sentences per call of `generate`.
        max_batch_tokens: The most tokens per call, counted as sentences * tokens of the longest source * beams, where a
            source counts as 16 tokens at the least. When neither this nor `batch_size` is given, 8192, or 4096 with a
            model of the library. A sentence that alone exceeds it has a call of its own.
        max_source_length: Tokens, special ones included; longer sources are truncated with a warning that names the
            line. `None`: the tokenizer's `model_max_length`.
        source_prefix: Put before each source, for models such as T5 (`"translate English to German: "`).
        glossary: What must appear in the translations of sources that have its terms: a [`Glossary`], or the
            translation of each term, `{"term": "Begriff"}`. It needs beam search, and no exported model.
        first_line: What warnings call the first sentence.
        progress: Whether to show a bar on stderr; a string is its description.
        **generate_kwargs: Passed on to `model.generate`; what is not given comes from the model's generation config.
    """
    num_return_sequences = generate_kwargs.pop("num_return_sequences", 1)
    if num_return_sequences != 1:
        raise ValueError(f"num_return_sequences is {num_return_sequences}; for more than one use translate_n_best.")
    limits: dict[str, Any] = {"batch_size": batch_size, "max_batch_tokens": max_batch_tokens}
    limits["max_source_length"] = max_source_length
    translator = Translator(
        model, tokenizer, source_prefix=source_prefix, glossary=glossary, **limits, **generate_kwargs
    )
    return [best.text for (best,) in translator.translate_all(sentences, progress, first_line=first_line)]


def translate_n_best(
    model: TranslationModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str],
    *,
    num_return_sequences: int,
    progress: bool | str = True,
    **options: Any,
) -> list[list[Translation]]:
    """Translates sentences as [`translate`] does, giving several translations of each.

    `num_return_sequences` of them need as many beams, or sampling; they come best first (empty ones for an empty
    sentence), with their scores where beam search found them. `options` are those of [`translate`] and of `generate`.
    """
    translator = Translator(model, tokenizer, n_best=num_return_sequences, **options)
    return translator.translate_all(sentences, progress)


def one_line(text: str) -> str:
    """`text` with each line break (line feed, carriage return) turned into a space, so that it fills one line."""
    return text.replace("\r\n", " ").replace("\n", " ").replace("\r", " ")


def format_lines(number: int, translations: list[Translation], n_best: int | None) -> Iterator[str]:
    """A source's lines of text: its translation, or so many, each with the source's number and a score."""
    for text, score in translations:
        yield one_line(text) if n_best is None else f"{number}\t{score:.4f}\t{one_line(text)}"


def translate_lines(
    model: TranslationModel,
    tokenizer: PreTrainedTokenizerBase,
    lines: Iterable[str],
    *,
    n_best: int | None = None,
    window_size: int = WINDOW_SIZE,
    first_line: int = 1,
    total: int | None = None,
    progress: bool | str = True,
    **options: Any,
) -> Iterator[str]:
    """Translates a stream of lines that need not fit in memory, in order and as soon as the order allows.

    `lines` may be an open text file. With `n_best` there are so many output lines per input line, best first: the
    source's number, the score and the translation, with tabs in between. Reading runs ahead of what has been yielded by
    at most `window_size` lines, of which those of like length are translated together. `first_line` and `total` are the
    numbers of the first and last line. `options` are those of [`translate`] and of `generate`.
    """
    if window_size < 1:
        raise ValueError(f"window_size is {window_size}; it must be at least 1 line.")
    translator = Translator(model, tokenizer, n_best=n_best, **options)
    translator.check_n_best()
    with progress_bar(progress, total=total, unit="line") as bar:
        bar.update(first_line - 1)
        sources = (line.rstrip("\r\n") for line in lines)
        found = translator.translate(sources, first_line=first_line, window_size=window_size, bar=bar)
        for number, translations in enumerate(found, start=first_line):
            yield from format_lines(number, translations, n_best)
