"""Texts in pieces: what of a text is a sentence to translate, and what stays as it is, such as spaces and markup."""

import html
import re
from collections.abc import Iterator, Sequence

from babel.core import Locale, get_global
from sentencex import segment

# What has no end before the next `<` is no tag, so that the time grows with the length of a text and no faster.
_TAG = re.compile(r"(<[A-Za-z/!?][^<>]*>)")
_CODE = re.compile(r"<(/?)(script|style)\b", re.IGNORECASE)
_CHARACTERS = 2000  # given to sentencex at a time, whose time grows with their square in the worst case
_EDGES = re.compile(r"(\s*)(.*\S)(\s*)", re.DOTALL)


def find_iso_code(language: str) -> str:
    """The code of two letters, where there is one: "de" of "de_DE", "deu" and "deu_Latn"."""
    base = re.split("[-_]", language)[0].lower()
    return str(get_global("language_aliases").get(base, base))


def name_language(language: str) -> str:
    """The English name of a language, or its code where that is not known."""
    return str(Locale("en").languages.get(find_iso_code(language), language))


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


class Pieces:
    """A text, cut into sentences and what is between them: white space, line breaks, and in HTML its tags.

    Each line is cut by the rules of its language. In HTML the text between two tags is translated by itself.
    """

    def __init__(self, text: str, language: str, *, is_html: bool = False, cuts_lines: bool = True) -> None:
        self.language = find_iso_code(language)
        self.is_html = is_html
        self.cuts_lines = cuts_lines
        self.sentences: list[str] = []
        self._parts: list[str | None] = []  # None: the next sentence
        if not is_html:
            self._add_text(text)
            return
        is_code = False
        for index, part in enumerate(_TAG.split(text)):
            if index % 2:  # a tag
                if found := _CODE.match(part):
                    is_code = not found[1]
                self._parts.append(part)
            elif is_code:
                self._parts.append(part)
            else:
                self._add_text(html.unescape(part))

    def _add_text(self, text: str) -> None:
        for line in text.splitlines(keepends=True):
            for sentence in cut_line(line, self.language) if self.cuts_lines else [line]:
                match = _EDGES.fullmatch(sentence)
                if match is None:  # nothing but white space
                    self._parts.append(self._escape(sentence))
                    continue
                self._parts += [self._escape(match[1]), None, self._escape(match[3])]
                self.sentences.append(match[2])

    def _escape(self, text: str) -> str:
        return html.escape(text, quote=False) if self.is_html else text

    def join(self, translations: Sequence[str]) -> str:
        """The text with a translation in the place of each sentence."""
        remaining = iter(translations)
        return "".join(self._escape(next(remaining)) if part is None else part for part in self._parts)
