"""Training of a byte-level BPE vocabulary, shared by source and target unless the texts are of one language only."""

import logging
import sys
from collections.abc import Iterable, Iterator, Sized

from .tokenization_vanilla_transformer import VanillaTransformerTokenizer

logger = logging.getLogger(__name__)

# An untrained vocabulary: the special tokens and the 256 bytes, without which some character could not be spelled.
MINIMUM_VOCAB_SIZE = len(VanillaTransformerTokenizer())

_BATCH_SIZE = 1000


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yields the texts in batches, which the trainer reads in parallel, and checks them on the way."""
    batch: list[str] = []
    has_text = False
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"texts[{index}] is {text!r}, of type {type(text).__name__}: every text must be a string.")
        has_text = has_text or bool(text.strip())
        batch.append(text)
        if len(batch) == _BATCH_SIZE:
            yield batch
            batch = []
    if not has_text:
        raise ValueError("texts holds no text at all: there is nothing to train a tokenizer on.")
    yield batch


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
    same files, byte for byte.

    Args:
        texts: The sentences, read once.
        vocab_size: Number of tokens to reach, special tokens and the 256 bytes included. The paper's English-German
            models share 37000; for tens of thousands of sentences 8000 to 10000 is a good start.
        min_frequency: How often a pair of tokens must occur in order to be merged.
        length: Number of texts, for the progress bar; needed only where `texts` has no `len()`.
        show_progress: Whether to draw progress bars on a terminal's standard error.
        model_max_length: Tokens beyond which the tokenizer warns, and to which `truncation=True` cuts; the
            configuration's `max_position_embeddings`.

    Returns:
        The tokenizer. It has fewer than `vocab_size` tokens if the texts have too few pairs that occur `min_frequency`
        times; a warning says so.

    Raises:
        ValueError: If `texts` is one string, holds something else than strings or no text at all, or if a number is out
            of its range.
    """
    if isinstance(texts, str):
        raise ValueError(f"texts is a single string, {texts[:40]!r}: pass an iterable of strings.")
    for name, value, minimum in (
        ("vocab_size", vocab_size, MINIMUM_VOCAB_SIZE),
        ("min_frequency", min_frequency, 1),
        ("model_max_length", model_max_length, 1),
    ):
        if value < minimum:
            why = " (4 special tokens and 256 bytes)" if name == "vocab_size" else ""
            raise ValueError(f"{name}={value} is too small: it must be at least {minimum}{why}.")
    if length is None and isinstance(texts, Sized):
        length = len(texts)
    tokenizer = VanillaTransformerTokenizer(model_max_length=model_max_length).train_new_from_iterator(
        _batches(texts),
        vocab_size=vocab_size,
        length=length,
        min_frequency=min_frequency,
        # Where there is no terminal, the bars would come out as blank lines on standard output.
        show_progress=show_progress and sys.stderr.isatty(),
    )
    if len(tokenizer) < vocab_size:
        logger.warning(
            "The vocabulary has %d tokens instead of vocab_size=%d: no further pair of tokens occurs at least "
            "min_frequency=%d times in the texts.",
            len(tokenizer),
            vocab_size,
            min_frequency,
        )
    return tokenizer
