"""Training of byte-level BPE: one vocabulary that source and target share, or one for each of them."""

import logging
import re
import sys
from collections.abc import Iterable, Iterator, Sized
from itertools import islice

from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer

from .corpora import Tally

logger = logging.getLogger(__name__)

# An untrained vocabulary: the special tokens and the 256 bytes, without which some character could not be spelled.
MINIMUM_VOCAB_SIZE = len(VanillaTransformerTokenizer())

_BATCH_SIZE = 1000
# The time to train on a word grows with the square of its length. A longer one is cut.
_LONGEST_WORD = 1000
_TOO_LONG = re.compile(rf"\w{{{_LONGEST_WORD + 1}}}|[^\w\s]{{{_LONGEST_WORD + 1}}}")


def _batches(texts: Iterable[str], *, name: str) -> Iterator[list[str]]:
    """Yields the texts in batches, which the trainer reads in parallel, and checks them on the way."""
    texts, has_text, done = iter(texts), False, 0
    cut = Tally()
    while batch := list(islice(texts, _BATCH_SIZE)):
        for index, text in enumerate(batch, start=done):
            if not isinstance(text, str):
                raise ValueError(f"{name}[{index}] is {text!r}, of type {type(text).__name__}: it must be a string.")
            has_text = has_text or bool(text.strip())
        yield [piece for text in batch for piece in _cut(text, cut)]
        done += len(batch)
    if not has_text:
        raise ValueError(f"{name} holds no text at all: there is nothing to train a tokenizer on.")


def _cut(text: str, cut: Tally) -> list[str]:
    """The text in pieces that have no longer words; nearly always the text itself."""
    if len(text) <= _LONGEST_WORD or not _TOO_LONG.search(text):
        return [text]
    cut.add(f"The text that begins {text[:40]!r} has a word of more than {_LONGEST_WORD} characters: it is cut.")
    return [text[start : start + _LONGEST_WORD] for start in range(0, len(text), _LONGEST_WORD)]


def _train(
    texts: Iterable[str],
    name: str,
    vocab_size: int,
    length: int | None,
    min_frequency: int,
    show_progress: bool,
    model_max_length: int,
) -> VanillaTransformerTokenizer:
    if length is None and isinstance(texts, Sized):
        length = len(texts)
    tokenizer = VanillaTransformerTokenizer(model_max_length=model_max_length).train_new_from_iterator(
        _batches(texts, name=name),
        vocab_size=vocab_size,
        length=length,
        min_frequency=min_frequency,
        # Where there is no terminal, the bars would come out as blank lines on standard output.
        show_progress=show_progress and sys.stderr.isatty(),
    )
    if len(tokenizer) < vocab_size:
        logger.warning(
            f"The vocabulary has {len(tokenizer)} tokens instead of vocab_size={vocab_size}: no further pair of tokens "
            f"occurs at least min_frequency={min_frequency} times in the {name.replace('_', ' ')}."
        )
    return tokenizer


def _check(
    min_frequency: int, model_max_length: int, texts: dict[str, Iterable[str]], vocab_sizes: dict[str, int]
) -> None:
    for name, sentences in texts.items():
        if isinstance(sentences, str):
            raise ValueError(f"{name} is a single string, {sentences[:40]!r}: pass an iterable of strings.")
    for name, size in vocab_sizes.items():
        if size < MINIMUM_VOCAB_SIZE:
            least = f"at least {MINIMUM_VOCAB_SIZE} (4 special tokens and 256 bytes)"
            raise ValueError(f"{name}={size} is too small: it must be {least}.")
    for name, number in (("min_frequency", min_frequency), ("model_max_length", model_max_length)):
        if number < 1:
            raise ValueError(f"{name}={number}: must be at least 1.")


def train_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int = 37000,
    min_frequency: int = 2,
    length: int | None = None,
    show_progress: bool = True,
    model_max_length: int = 1024,
) -> VanillaTransformerTokenizer:
    """Trains a tokenizer on `texts`; for a shared vocabulary these are the source and the target sentences.

    The result depends on the texts only, neither on their order nor on the number of threads: the same corpus gives the
    same files, byte for byte. A warning says so where the texts have too few frequent pairs for so many tokens.

    Args:
        texts: The sentences, read once.
        vocab_size: Number of tokens to reach, special tokens and the 256 bytes included. The paper's English-German
            models share 37000; for tens of thousands of sentences 8000 to 10000 is a good start.
        min_frequency: How often a pair of tokens must occur in order to be merged.
        length: Number of texts, for the progress bar; needed only where `texts` has no `len()`.
        show_progress: Whether to draw progress bars on a terminal's standard error.
        model_max_length: Tokens beyond which the tokenizer warns, and to which `truncation=True` cuts; the
            configuration's `max_position_embeddings`.

    Raises:
        ValueError: If `texts` is one string, holds something else than strings or no text at all, or if a number is out
            of its range.
    """
    _check(min_frequency, model_max_length, {"texts": texts}, {"vocab_size": vocab_size})
    return _train(texts, "texts", vocab_size, length, min_frequency, show_progress, model_max_length)


def train_separate_tokenizer(
    source_texts: Iterable[str],
    target_texts: Iterable[str],
    *,
    vocab_size: int = 37000,
    target_vocab_size: int | None = None,
    min_frequency: int = 2,
    length: int | None = None,
    target_length: int | None = None,
    show_progress: bool = True,
    model_max_length: int = 1024,
) -> VanillaTransformerTokenizer:
    """Trains a tokenizer with a vocabulary for each side, as languages with different scripts may prefer.

    The model then needs two embedding tables: `vocab_size=len(tokenizer)`,
    `decoder_vocab_size=tokenizer.target_vocab_size`, `share_encoder_decoder_embeddings=False`. Arguments and errors are
    those of [`train_tokenizer`] for each side; `target_vocab_size=None` stands for `vocab_size`.
    """
    target_vocab_size = vocab_size if target_vocab_size is None else target_vocab_size
    sizes = {"vocab_size": vocab_size, "target_vocab_size": target_vocab_size}
    _check(min_frequency, model_max_length, {"source_texts": source_texts, "target_texts": target_texts}, sizes)
    shared = (min_frequency, show_progress, model_max_length)
    source = _train(source_texts, "source_texts", vocab_size, length, *shared)
    target = _train(target_texts, "target_texts", target_vocab_size, target_length, *shared)
    return VanillaTransformerTokenizer(
        tokenizer_object=source.backend_tokenizer,
        target_tokenizer_object=target.backend_tokenizer,
        model_max_length=model_max_length,
    )
