"""Training of tokenizers: one vocabulary that source and target share, or one for each of them.

| model type  | tokens                                     | what has no token     | decoding gives back            |
|-------------|--------------------------------------------|-----------------------|--------------------------------|
| `bpe`       | merged pairs of bytes                      | nothing               | every text, in Unicode's NFC   |
| `unigram`   | the likeliest pieces of bytes (Kudo, 2018) | nothing               | every text, in Unicode's NFC   |
| `wordlevel` | words as they stand, cut at white space    | words not seen        | known words, one space between |
| `char`      | characters (code points), spaces too       | characters not seen   | every text of known characters |

What has no token is `<unk>`. The first two cut texts into words as the tokenizer does; the others normalise nothing.
"""

import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any, Literal, get_args

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer

from .corpora import Tally

logger = logging.getLogger(__name__)

ModelType = Literal["bpe", "unigram", "wordlevel", "char"]

# An untrained vocabulary: the special tokens and the 256 bytes, without which some character could not be spelled.
_UNTRAINED = VanillaTransformerTokenizer()
MINIMUM_VOCAB_SIZE = len(_UNTRAINED)
SPECIAL_TOKENS: Any = _UNTRAINED.convert_ids_to_tokens(sorted(_UNTRAINED.all_special_ids))

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
    model_type: ModelType,
    vocab_size: int,
    length: int | None,
    min_frequency: int | None,
    show_progress: bool,
    model_max_length: int,
) -> VanillaTransformerTokenizer:
    if length is None and isinstance(texts, Sized):
        length = len(texts)
    batches = _batches(texts, name=name)
    where = name.replace("_", " ")
    if model_type in ("wordlevel", "char"):
        backend = _train_whole_pieces(batches, where, model_type, vocab_size, min_frequency or 1)
        return VanillaTransformerTokenizer(tokenizer_object=backend, model_max_length=model_max_length)
    # Where there is no terminal, the bars would come out as blank lines on standard output.
    show_progress = show_progress and sys.stderr.isatty()
    tokenizer = VanillaTransformerTokenizer(model_max_length=model_max_length)
    if model_type == "unigram":
        backend = _train_unigram(tokenizer, batches, vocab_size, length, show_progress)
        tokenizer = VanillaTransformerTokenizer(tokenizer_object=backend, model_max_length=model_max_length)
        reason = "there are no further pieces"
    else:
        options = {"length": length, "min_frequency": min_frequency or 2, "show_progress": show_progress}
        tokenizer = tokenizer.train_new_from_iterator(batches, vocab_size=vocab_size, **options)
        reason = f"no further pair of tokens occurs at least min_frequency={min_frequency or 2} times"
    if len(tokenizer) < vocab_size:
        logger.warning(f"The vocabulary has {len(tokenizer)} tokens instead of {vocab_size=}: {reason} in the {where}.")
    return tokenizer


def _train_unigram(
    untrained: VanillaTransformerTokenizer,
    batches: Iterable[list[str]],
    vocab_size: int,
    length: int | None,
    show_progress: bool,
) -> Tokenizer:
    backend = untrained.backend_tokenizer
    backend.model = models.Unigram()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    backend.train_from_iterator(batches, trainer=trainer, length=length)
    # The trainer gives special tokens the best score of all, so that text which looks like one would become it.
    vocab = json.loads(backend.to_str())["model"]["vocab"]
    backend.model = models.Unigram([(piece, -1e9 if piece in SPECIAL_TOKENS else score) for piece, score in vocab])
    return backend


def _train_whole_pieces(
    batches: Iterable[list[str]], where: str, model_type: ModelType, vocab_size: int, min_frequency: int
) -> Tokenizer:
    """Gives words or characters a token each, the most frequent first, those of one frequency in their own order."""
    cut: Callable[[str], Iterable[str]] = str.split if model_type == "wordlevel" else iter
    counts: Counter[str] = Counter()
    respaced = 0
    for text in (text for batch in batches for text in batch):
        counts.update(cut(text))
        respaced += model_type == "wordlevel" and " ".join(text.split()) != text
    ranked = sorted(((-count, piece) for piece, count in counts.items() if piece not in SPECIAL_TOKENS))
    chosen = [piece for count, piece in ranked if -count >= min_frequency][: vocab_size - len(SPECIAL_TOKENS)]
    if len(chosen) < len(ranked):
        share = 1 - sum(counts[piece] for piece in chosen) / counts.total()
        logger.warning(
            f"{len(ranked) - len(chosen)} of {len(ranked)} different pieces have no token, {share:.2%} of the {where}: "
            f"they become <unk>. {vocab_size=} and {min_frequency=} decide which."
        )
    if respaced:
        logger.warning(
            f"{respaced} of the {where} have other white space than single spaces between words: decoding loses it."
        )
    vocab = {piece: index for index, piece in enumerate([*SPECIAL_TOKENS, *chosen])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL_TOKENS[-1]))
    if model_type == "wordlevel":
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    else:
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        backend.decoder = decoders.Fuse()
    return backend


def _check(
    model_types: Iterable[str],
    min_frequency: int | None,
    model_max_length: int,
    texts: dict[str, Iterable[str]],
    vocab_sizes: dict[str, int],
) -> None:
    for name, sentences in texts.items():
        if isinstance(sentences, str):
            raise ValueError(f"{name} is a single string, {sentences[:40]!r}: pass an iterable of strings.")
    for model_type, (name, size) in zip(model_types, vocab_sizes.items(), strict=True):
        if model_type not in get_args(ModelType):
            raise ValueError(f"model_type={model_type!r}: must be one of {', '.join(get_args(ModelType))}.")
        least, why = MINIMUM_VOCAB_SIZE, "4 special tokens and 256 bytes"
        if model_type in ("wordlevel", "char"):
            least, why = len(SPECIAL_TOKENS) + 1, "4 special tokens and one of the texts"
        if size < least:
            raise ValueError(f"{name}={size} is too small: it must be at least {least} ({why}).")
    for name, number in (("min_frequency", min_frequency), ("model_max_length", model_max_length)):
        if number is not None and number < 1:
            raise ValueError(f"{name}={number}: must be at least 1.")


def _check_added(tokens: Sequence[str]) -> None:
    if isinstance(tokens, str) or (wrong := [token for token in tokens if len(token.split()) != 1]):
        raise ValueError(f"added_tokens has {tokens if isinstance(tokens, str) else wrong[0]!r}: give a list of words.")


def train_tokenizer(
    texts: Iterable[str],
    *,
    model_type: ModelType = "bpe",
    vocab_size: int = 37000,
    min_frequency: int | None = None,
    length: int | None = None,
    show_progress: bool = True,
    model_max_length: int = 1024,
    added_tokens: Sequence[str] = (),
) -> VanillaTransformerTokenizer:
    """Trains a tokenizer on `texts`; for a shared vocabulary these are the source and the target sentences.

    The result depends on the texts only, neither on their order nor on the number of threads: the same corpus gives the
    same files, byte for byte. With `unigram` the pieces are the same, but neither the last digits of their
    probabilities nor the ids of pieces that are about as likely. A warning says so where the texts have too few
    frequent pairs for so many tokens, and where words or characters of theirs get no token.

    Args:
        texts: The sentences, read once.
        model_type: What tokens are (see the table above).
        vocab_size: Number of tokens to reach, special tokens and the 256 bytes included; of words and characters, the
            largest number. The paper's English-German models share 37000; for tens of thousands of sentences 8000 to
            10000 is a good start.
        min_frequency: How often a pair of tokens must occur in order to be merged (default: 2), or a word or character
            in order to get a token (default: 1); it has no effect on `unigram`.
        length: Number of texts, for the progress bar; needed only where `texts` has no `len()`.
        show_progress: Whether to draw progress bars on a terminal's standard error.
        model_max_length: Tokens beyond which the tokenizer warns, and to which `truncation=True` cuts; the
            configuration's `max_position_embeddings`.
        added_tokens: Words that are never cut, such as tags at the heads of sources ("<BT>"); they come on top of
            `vocab_size`.

    Raises:
        ValueError: If `texts` is one string, holds something else than strings or no text at all, if there is no such
            model type, if a number is out of its range, or if an added token is not one word.
    """
    _check_added(added_tokens)
    _check([model_type], min_frequency, model_max_length, {"texts": texts}, {"vocab_size": vocab_size})
    tokenizer = _train(texts, "texts", model_type, vocab_size, length, min_frequency, show_progress, model_max_length)
    tokenizer.add_tokens(list(added_tokens))
    return tokenizer


def train_separate_tokenizer(
    source_texts: Iterable[str],
    target_texts: Iterable[str],
    *,
    model_type: ModelType = "bpe",
    target_model_type: ModelType | None = None,
    vocab_size: int = 37000,
    target_vocab_size: int | None = None,
    min_frequency: int | None = None,
    length: int | None = None,
    target_length: int | None = None,
    show_progress: bool = True,
    model_max_length: int = 1024,
    added_tokens: Sequence[str] = (),
) -> VanillaTransformerTokenizer:
    """Trains a tokenizer with a vocabulary for each side, as languages with different scripts may prefer.

    The model then needs two embedding tables: `vocab_size=len(tokenizer)`,
    `decoder_vocab_size=tokenizer.target_vocab_size`, `share_encoder_decoder_embeddings=False`. Arguments and errors are
    those of [`train_tokenizer`] for each side; without a `target_model_type` or a `target_vocab_size` the target's are
    the source's. Added tokens are added to both.
    """
    _check_added(added_tokens)
    target_vocab_size = vocab_size if target_vocab_size is None else target_vocab_size
    target_model_type = target_model_type or model_type
    texts = {"source_texts": source_texts, "target_texts": target_texts}
    sizes = {"vocab_size": vocab_size, "target_vocab_size": target_vocab_size}
    _check([model_type, target_model_type], min_frequency, model_max_length, texts, sizes)
    shared = (min_frequency, show_progress, model_max_length)
    source = _train(source_texts, "source_texts", model_type, vocab_size, length, *shared)
    target = _train(target_texts, "target_texts", target_model_type, target_vocab_size, target_length, *shared)
    tokenizer = VanillaTransformerTokenizer(
        tokenizer_object=source.backend_tokenizer,
        target_tokenizer_object=target.backend_tokenizer,
        model_max_length=model_max_length,
    )
    tokenizer.add_tokens(list(added_tokens))
    return tokenizer
