"""Texts in sentences, and put together again, with white space, markup and placeholders as they were."""

import html
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from sentencex import segment

from vanilla_transformer.data.detection import find_iso_code

from .sentences import KEPT, Kind, Piece, Sentence, divide_text

# What has no end before the next `<` is no tag, so that the time grows with the length of a text and no faster.
# In quotes there may be both; where they have no end within some hundred characters, they are none.
_TAG = re.compile(r"""(<[A-Za-z/!?](?:[^<>"']++|"[^"]{0,500}+"|'[^']{0,500}+')*+>|<[A-Za-z/!?][^<>]*>)""")
# What is surely a tag where a text is no HTML, rather than "a <b and c> d".
_PLAIN_TAG = re.compile(r"""(</?[A-Za-z][\w:-]*(?:\s+[\w:-]+=(?:"[^"<>]*"|'[^'<>]*'|[\w:%#./-]+))*\s*/?>)""")
_NAME = re.compile(r"</?([A-Za-z][\w:-]*)")
_CODE = frozenset({"code", "kbd", "samp", "script", "style", "var"})
# These tags stand within a sentence; all others end one.
_INLINE = frozenset({"code", "kbd", "samp", "var", "a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "data"})
_INLINE |= {"del", "dfn", "em", "font", "i", "ins", "mark", "q", "s", "small", "span", "strike", "strong", "sub", "sup"}
_INLINE |= {"time", "tt", "u"}
_PREFORMATTED = frozenset({"pre", "textarea"})
_SPACES = re.compile(r"[ \t\r\f\n]+")  # HTML's, of which a no-break space is none
_CHARACTERS = 2000  # given to sentencex at a time, whose time grows with their square in the worst case


def cut_line(line: str, language: str) -> Iterator[str]:
    """The sentences of a line, spaces included; what has no end for very long is cut anywhere."""
    rest = ""
    for start in range(0, len(line), _CHARACTERS):
        # The last one may go on.
        *whole, rest = segment(language, rest + line[start : start + _CHARACTERS])
        yield from whole
        if len(rest) > 2 * _CHARACTERS:
            yield rest
            rest = ""
    if rest:
        yield rest


def _find_kind(tag: str) -> Kind:
    if tag.startswith("</"):
        return "close"
    return "empty" if tag.endswith("/>") else "open"


def _cut_html(text: str) -> list[str]:
    """What is between tags, and the tags, in turns; a comment is a tag, whatever is in it."""
    found: list[str] = []
    position = 0
    while (start := text.find("<!--", position)) >= 0 and (end := text.find("-->", start)) >= 0:
        found += [*_TAG.split(text[position:start]), text[start : end + 3]]
        position = end + 3
    return [*found, *_TAG.split(text[position:])]


class Pieces:
    """A text, cut into sentences and what is between them.

    Each line is cut by the rules of its language. In HTML code is left alone, a line break is a space unless the text
    is preformatted, and most tags end a sentence; those of words and phrases, and in other texts whatever is surely a
    tag, belong to it.

    Attributes:
        sentences: What to translate of the text; runs of sentences, too (see `Sentence`).
    """

    def __init__(self, text: str, language: str, *, is_html: bool = False, cuts_lines: bool = True) -> None:
        self.language = find_iso_code(language)
        self.is_html = is_html
        self.cuts_lines = cuts_lines
        self._parts: list[str | Sentence] = []  # strings stay as they are
        self._read: list[Piece] = []  # text and tags that have no sentence yet
        self._has_lines = not is_html
        if is_html:
            self._read_html(text)
        else:
            for index, part in enumerate(_PLAIN_TAG.split(text)):
                self._read.append(Piece(_find_kind(part) if index % 2 else "text", part))
        self._end()
        self.sentences = [source for part in self._parts if isinstance(part, Sentence) for source in part.sources]

    def _read_html(self, text: str) -> None:
        code: list[str] = []  # a tag of code and what follows, up to its end
        name = ""
        for index, part in enumerate(_cut_html(text)):
            found = _NAME.match(part) if index % 2 else None
            if code:
                code.append(part)
                if found and part.startswith("</") and found[1].lower() == name:
                    self._read.append(Piece("empty", "".join(code)))
                    code = []
                continue
            name = found[1].lower() if found else ""
            if index % 2 == 0:
                self._read.append(Piece("text", html.unescape(part)))
            elif name in _CODE and not part.startswith("</"):
                code = [part]
            elif name in _INLINE:
                self._read.append(Piece(_find_kind(part), part))
            else:
                self._end()
                self._parts.append(part)
                if name in _PREFORMATTED:
                    self._has_lines = not part.startswith("</")
        self._read.append(Piece("empty", "".join(code)))

    def _end(self) -> None:
        """Cuts what has been read into sentences."""
        if not self._has_lines:
            self._join_lines()
        text = "".join(piece.text for piece in self._read if piece.kind == "text")
        ends = self._find_ends(text)
        sentence: list[Piece] = []
        position, end = 0, next(ends, 0)

        def finish() -> None:
            nonlocal end
            self._parts.append(Sentence(sentence))
            sentence.clear()
            end = next(ends, end)

        for piece in self._read:
            if piece.kind != "text":
                # Of the tags between two sentences the first ones that close belong to the one before.
                if position == end and piece.kind != "close" and sentence:
                    finish()
                sentence.append(piece)
            start = position
            while piece.kind == "text" and position < start + len(piece.text):
                if position == end:
                    finish()
                last = min(end, start + len(piece.text))
                sentence += divide_text(text[position:last])
                position = last
        finish()
        self._read = []

    def _join_lines(self) -> None:
        """Makes spaces of line breaks, but for those around all of the text."""
        text = "".join(piece.text for piece in self._read if piece.kind == "text")
        first, last = len(text) - len(text.lstrip()), len(text.rstrip())
        start = 0
        for index, piece in enumerate(self._read):
            if piece.kind == "text":
                size = len(piece.text)
                begin, end = (min(max(edge - start, 0), size) for edge in (first, last))
                inside = _SPACES.sub(lambda found: " " if "\n" in found[0] else found[0], piece.text[begin:end])
                self._read[index] = Piece("text", piece.text[:begin] + inside + piece.text[max(begin, end) :])
                start += size

    def _find_ends(self, text: str) -> Iterator[int]:
        """Where the sentences of a text end: with lines, and between them, but not within what is kept."""
        end = 0
        for line in text.splitlines(keepends=True):
            start, end = end, end + len(line)
            if self.cuts_lines and not line.isspace():
                kept = [found.span() for found in KEPT.finditer(line)]
                firsts = [first for first, _ in kept]
                position = 0
                for sentence in cut_line(line, self.language):
                    position += len(sentence)
                    before = bisect_left(firsts, position) - 1
                    if position < len(line) and (before < 0 or kept[before][1] <= position):
                        yield start + position
            yield end

    def _escape(self, text: str) -> str:
        return html.escape(text, quote=False) if self.is_html else text

    def join(self, translations: Sequence[str]) -> str:
        """The text with a translation in the place of each of `sentences`."""
        remaining = iter(translations)
        return "".join(
            part if isinstance(part, str) else part.join([next(remaining) for _ in part.sources], self._escape)
            for part in self._parts
        )
