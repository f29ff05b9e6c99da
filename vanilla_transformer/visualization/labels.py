"""Tokens as a person reads them: a label for each, and the words that they make up, with any tokenizer.

A tokenizer's own names for its tokens have signs for spaces, and often for bytes. What every tokenizer can do is
decode, so that a token's text is what decoding gains by it.
"""

import re
import unicodedata
from collections.abc import Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from itertools import islice, pairwise
from os.path import commonprefix
from typing import Any

from transformers import FSMTTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from vanilla_transformer.data.vocabularies import get_vocabularies

SPACE, LINE_BREAK = "▁", "↵"
_MARK_HOLDER = "◌"  # under a combining mark that has no letter
_JOINERS = "\u200c\u200d"
_UNKNOWN = "\N{OBJECT REPLACEMENT CHARACTER}"
_CHUNK, _CONTEXT = 64, 8  # tokens that are decoded together, and those before them
_BYTE_NAME = re.compile("<0x([0-9A-F]{2})>")  # sentencepiece's name for a byte

# Scripts that are written without spaces, and whose characters mean something each.
_CHARACTERS = ("CJK UNIFIED", "CJK COMPAT", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA", "BOPOMOFO")

Words = tuple[tuple[int, ...], ...]
_Span = tuple[int, int]
# How a byte-level vocabulary writes bytes.
_BYTES = {symbol: byte for byte, symbol in bytes_to_unicode().items()}


@lru_cache(maxsize=2)
def _read_source_names(tokenizer: PreTrainedTokenizerBase, size: int) -> dict[int, str]:
    """The source's names of FSMTTokenizer, or MarianTokenizer with two vocabularies; `size` grows with added tokens."""
    return {token_id: token for token, token_id in get_vocabularies(tokenizer)[0].items()}


class _Reader:
    """Reads the tokens of one side; with `keep_unknown` an unknown token has a text, U+FFFC."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, is_source: bool, keep_unknown: bool) -> None:
        self.tokenizer: Any = tokenizer
        self.namer: Any = tokenizer if is_source else getattr(tokenizer, "target_tokenizer", tokenizer)
        self.side: dict[str, bool] = {}
        self.source_names: dict[int, str] | None = None
        # Only tokenizers with two vocabularies need to be told which, and others would refuse the argument.
        has_two = getattr(tokenizer, "separate_vocabs", False) or isinstance(tokenizer, FSMTTokenizer)
        if is_source and has_two and hasattr(tokenizer, "target_tokenizer"):
            self.side = {"use_source_tokenizer": True}
        elif is_source and has_two:
            self.source_names = _read_source_names(tokenizer, len(tokenizer))
        self.special = set(tokenizer.all_special_ids)
        self.keep_unknown = keep_unknown
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.is_byte_level = "ByteLevel" in repr(getattr(backend, "decoder", None))

    def has_no_text(self, token_id: int) -> bool:
        return token_id in self.special and not (self.keep_unknown and token_id == self.tokenizer.unk_token_id)

    def decode(self, ids: Sequence[int]) -> str:
        kept = [token_id for token_id in ids if not self.has_no_text(token_id)]
        if self.source_names is None:
            text: str = self.tokenizer.decode(kept, clean_up_tokenization_spaces=False, **self.side)
        else:
            text = self._join([self.source_names[token_id] for token_id in kept])
        return text.replace(self.tokenizer.unk_token, _UNKNOWN) if self.keep_unknown else text

    def _join(self, names: Sequence[str]) -> str:
        """Makes a text of a source's tokens."""
        if isinstance(self.tokenizer, FSMTTokenizer):
            words = "".join(names).replace("</w>", " ").split()
            return str(self.tokenizer.moses_detokenize(words, self.tokenizer.src_lang))
        # Marian joins tokens with the side's model that it decoded with last.
        self.tokenizer.decode([], use_source_tokenizer=True)
        return str(self.tokenizer.convert_tokens_to_string(names))

    def find_spans(self, ids: Sequence[int], text: str) -> list[_Span]:
        """Where in the text that they decode to each token is; a part of a character is where others complete it."""
        ends = [0]
        for first in range(0, len(ids), _CHUNK):
            last = min(first + _CHUNK, len(ids))
            start, offset = self._find_window(ids, text, first, last)
            for length in range(first + 1, last + 1):
                # Half a character decodes to a replacement character, which the whole does not have in its place.
                ends.append(max(offset + _count_common(self.decode(ids[start:length]), text, offset), ends[-1]))
        return list(pairwise(ends))

    def _find_window(self, ids: Sequence[int], text: str, first: int, last: int) -> tuple[int, int]:
        """A token from which on to decode, since to decode from the first one would take too long: index, place."""
        end = _count_common(self.decode(ids[:last]), text)
        # A window must not begin within a character, nor where decoding depends on what is before it.
        for start in range(first - _CONTEXT, first - 2 * _CONTEXT, -1) if first else ():
            window = self.decode(ids[start:last]).rstrip("\ufffd")
            if window and text.endswith(window, 0, end):
                return start, end - len(window)
        return 0, 0

    def name(self, token_id: int) -> str:
        """The token's name in its vocabulary; of a part of a character, the bytes."""
        names = self.source_names
        name = str(self.namer.convert_ids_to_tokens(token_id)) if names is None else names[token_id]
        found = _BYTE_NAME.fullmatch(name)
        if found is not None:
            content = bytes.fromhex(found.group(1))
        elif self.is_byte_level and token_id not in self.special and set(name) <= _BYTES.keys():
            content = bytes(_BYTES[symbol] for symbol in name)
        else:
            return name
        text = content.decode(errors="surrogateescape")
        return re.sub("[\udc80-\udcff]", lambda byte: f"<{ord(byte.group()) - 0xDC00:02X}>", text)


def _count_common(prefix: str, text: str, start: int = 0) -> int:
    """How many characters of `prefix` are those of the text from `start` on."""
    return len(commonprefix([prefix, text[start : start + len(prefix)]]))  # noqa: RUF071 (not of paths)


def label_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, is_source: bool = False) -> tuple[str, ...]:
    """Tokens as a person reads them: the text that each adds to those before it.

    "▁" is a space, "↵" a line break, "◌" holds an accent without its letter, `<U+200B>` and its like are what cannot be
    seen. A special token has its name, and a part of a character, which the tokens after it complete, its bytes:
    `<E7>`. `is_source` says that the tokens are of the source's vocabulary, where there are two.
    """
    reader = _Reader(tokenizer, is_source=is_source, keep_unknown=False)
    text = reader.decode(ids)
    pieces = [text[start:end] for start, end in reader.find_spans(ids, text)]
    # A part of a character that nothing completes decodes to a replacement character.
    shown = [
        reader.name(token_id) if token_id in reader.special or not piece or "\ufffd" in piece else piece
        for token_id, piece in zip(ids, pieces, strict=True)
    ]
    return tuple(map(_make_visible, shown))


def _make_visible(text: str) -> str:
    shown = []
    for index, character in enumerate(text):
        category = unicodedata.category(character)
        is_joiner = character in _JOINERS and len(text) > 1
        if character == "\n":
            shown.append(LINE_BREAK)
        elif character.isspace():
            shown.append(SPACE)
        elif category in ("Cc", "Cf", "Cn", "Cs") and not is_joiner:
            shown.append(f"<U+{ord(character):04X}>")
        else:
            is_alone = category.startswith("M") and (index == 0 or text[index - 1].isspace())
            shown.append(_MARK_HOLDER + character if is_alone else character)
    return "".join(shown)


def split_words(text: str, *, split_characters: bool = True) -> list[str]:
    """The words of a text: what spaces divide, and with `split_characters` each Chinese and Japanese character."""
    numbers = _number_words(text, split_characters)
    words = [""] * (max(numbers, default=-1) + 1)
    for character, number in zip(text, numbers, strict=True):
        if number >= 0:
            words[number] += character
    return words


def _number_words(text: str, split_characters: bool) -> list[int]:
    """For each character the index of its word, -1 for spaces."""
    numbers: list[int] = []
    word, is_open = -1, False
    for character in text:
        if character.isspace():
            numbers.append(-1)
            is_open = False
            continue
        # A combining mark stays with the character before it, also with one that stands alone.
        follows = unicodedata.category(character).startswith("M") and bool(numbers) and numbers[-1] >= 0
        if not follows:
            is_alone = split_characters and _stands_alone(character)
            word += is_alone or not is_open
            is_open = not is_alone
        numbers.append(word)
    return numbers


def _stands_alone(character: str) -> bool:
    is_wide = unicodedata.east_asian_width(character) in ("W", "F")
    is_punctuation = unicodedata.category(character).startswith("P")
    return unicodedata.name(character, "").startswith(_CHARACTERS) or (is_wide and is_punctuation)


def find_words(
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    text: str | None = None,
    *,
    is_source: bool = False,
    prefix_length: int = 0,
    split_characters: bool = True,
) -> Words:
    """For each token the indices of its words (see [`split_words`]): none for special tokens.

    A token of several Chinese characters belongs to several words, and a space that has a token of its own to the word
    behind it. `text` is what the tokens were made from, since a tokenizer may change a text or not know a part of it;
    `None`: what they decode to. The first `prefix_length` characters of it, such as those of T5's prefix, do not count.
    """
    reader = _Reader(tokenizer, is_source=is_source, keep_unknown=text is not None)
    if text is None:
        text = reader.decode(ids)
        spans = reader.find_spans(ids, text)
    else:
        spans = _read_offsets(tokenizer, ids, text, is_source) or _guess_offsets(reader, ids, text)
    numbers = [-1] * prefix_length + _number_words(text[prefix_length:], split_characters)
    found: list[tuple[int, ...]] = []
    for token_id, (start, end) in zip(ids, spans, strict=True):
        is_outside = reader.has_no_text(token_id) or 0 < end <= prefix_length
        found.append(() if is_outside else _words_between(numbers, start, end))
    return tuple(found)


def _read_offsets(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], text: str, is_source: bool
) -> list[_Span] | None:
    """Where in a text its tokens are, if the tokenizer keeps book of it."""
    if not (tokenizer.is_fast and ids):
        return None
    texts: Any = {"text" if is_source else "text_target": text}
    encoding = tokenizer(**texts, return_offsets_mapping=True, truncation=True, max_length=len(ids))
    return encoding["offset_mapping"] if encoding["input_ids"] == list(ids) else None


def _guess_offsets(reader: _Reader, ids: Sequence[int], text: str) -> list[_Span]:
    """Where in a text its tokens are, by what is alike in it and in what they decode to."""
    decoded = reader.decode(ids)
    blocks = SequenceMatcher(None, decoded, text, autojunk=False).get_opcodes()

    def carry_over(position: int) -> int:
        for _, start, end, text_start, text_end in blocks:
            if start <= position <= end:
                return text_end if position == end else min(text_start + position - start, text_end)
        return len(text)

    return [(carry_over(start), carry_over(end)) for start, end in reader.find_spans(ids, decoded)]


def _words_between(numbers: Sequence[int], start: int, end: int) -> tuple[int, ...]:
    """The words from one character to another; between words, the next one, at the end the last one."""
    inside = sorted({number for number in numbers[start:end] if number >= 0})
    near = (number for number in [*numbers[end:], *reversed(numbers[:start])] if number >= 0)
    return tuple(inside or islice(near, 1))
