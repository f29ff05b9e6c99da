"""A sentence to translate, and what in it must come out as it went in: tags, placeholders, addresses."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from vanilla_transformer.data.detection import SPACELESS

# Letters of these scripts may stand at once beside an address; Korean adds particles to it.
_CLOSE = rf"{SPACELESS}\u1100-\u11ff\uac00-\ud7af"
_LETTER = rf"[^\W{_CLOSE}]"
_WEB = rf"[^\s<>\"{{}}—{_CLOSE}\u3000-\u303f\uff00-\uffef]"
# Placeholders ({name}, {{ name }}, ${name}, %s, %(name)d, %1$s), and addresses of the web and of e-mail. Repetitions
# are bounded, or begin where a word does, so that the time grows with the length of a text and no faster.
KEPT = re.compile(
    r"\{\{[^{}\n]{0,200}\}\}|\$?\{[^{}\n]{0,200}\}"
    r"|%(?:\(\w{1,100}\)|\d{1,3}\$)?[-+#0]{0,5}\d{0,9}(?:\.\d{1,9})?[sdifuxXeEgG@]"
    rf"(?![^\W\d_{_CLOSE}])"
    rf"|(?<!{_LETTER})(?:https?://|ftp://|www\.){_WEB}+(?<![.,;:!?)\]'”»…])"
    rf"|(?<!{_LETTER})(?<![.+-])(?:{_LETTER}|[.+-]){{1,64}}@{_LETTER}(?:{_LETTER}|-){{0,62}}"
    rf"(?:\.{_LETTER}(?:{_LETTER}|-){{0,62}}){{1,8}}"
)
_RUN = re.compile(r"([\s,.;:!?)\]…-]*)(.*\S)(\s*)", re.DOTALL)
_END = re.compile(r"[.!?。\uff01\uff1f…]+$")

Kind = Literal["text", "kept", "open", "close", "empty"]


class Piece(NamedTuple):
    """A part of a sentence: text to translate, what is kept, or a tag that opens, closes or encloses nothing."""

    kind: Kind
    text: str

    @property
    def is_tag(self) -> bool:
        """Whether it is no text."""
        return self.kind not in ("text", "kept")


def divide_text(text: str) -> Iterator[Piece]:
    """What is to be translated of a text without tags, and what is kept."""
    start = 0
    for found in KEPT.finditer(text):
        yield Piece("text", text[start : found.start()])
        yield Piece("kept", found[0])
        start = found.end()
    yield Piece("text", text[start:])


class Sentence:
    """A sentence with what is kept in it.

    It is translated as a whole, without its tags. If what is kept has come through, and the tags' places in the
    translation are known, because what stands between two of them is found there as it is translated by itself, that
    is the translation. Otherwise each run between what is kept is translated by itself, and nothing changes places.

    Attributes:
        sources: What to translate: the whole, and then its runs if anything is kept; nothing if there are no words.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._before, self._inside, self._behind = _peel([piece for piece in pieces if piece.text])
        self._runs: list[re.Match[str] | None] = [
            _RUN.fullmatch(piece.text) if piece.kind == "text" and _has_words(piece.text) else None
            for piece in self._inside
        ]
        whole = "".join(piece.text for piece in self._inside if not piece.is_tag)
        self._edges = whole[: len(whole) - len(whole.lstrip())], whole[len(whole.rstrip()) :]
        self.sources: list[str] = []
        if len(self._inside) == 1 and whole.strip() and self._inside[0].kind == "text":
            self.sources = [whole.strip()]
        elif any(self._runs):
            self.sources = [whole.strip(), *(run[2] for run in self._runs if run)]

    def join(self, translations: Sequence[str], escape: Callable[[str], str]) -> str:
        """The sentence with the translations of its `sources`; what is no tag goes through `escape`."""
        whole = translations[0].join(self._edges) if translations else ""
        if len(translations) == 1:
            inside = [Piece("text", whole)]
        elif whole and (placed := self._place(whole, translations[1:])):
            inside = placed
        else:
            inside = list(self._join_runs(iter(translations[1:])))
        pieces = (*self._before, *inside, *self._behind)
        return "".join(piece.text if piece.is_tag else escape(piece.text) for piece in pieces)

    def _join_runs(self, translations: Iterator[str]) -> Iterator[Piece]:
        """Each run's translation in its place, with a space where it would become one word with what is beside it."""
        source = written = ""
        for piece, run in zip(self._inside, self._runs, strict=True):
            text = run[1] + next(translations) + run[3] if run else piece.text
            if not piece.is_tag:
                pairs = (source, piece.text), (written, text)
                was, will_be = (_is_in_word(first + second, len(first), _CLOSE) for first, second in pairs)
                if will_be and not was:
                    yield Piece("text", " ")
                source, written = piece.text, text
            yield piece._replace(text=text)

    def _place(self, whole: str, runs: Sequence[str]) -> list[Piece] | None:
        """The translation of the whole with the tags in it; None if something is lost or has no known place."""
        if sorted(KEPT.findall(whole)) != sorted(piece.text for piece in self._inside if piece.kind == "kept"):
            return None
        found: list[tuple[int, int, list[Piece], list[Piece]]] = []
        for group, text in self._find_elements(iter(runs)):
            places = [] if text is None else _find(text, whole)
            if len(places) != 1:
                return None
            middle = next(index for index, piece in enumerate(group) if not piece.is_tag)
            (first, last), inner = places[0], group[middle].text
            # Spaces at the edges of an element stay in it.
            before, behind = len(inner) - len(inner.lstrip()), len(inner) - len(inner.rstrip())
            first = max(first - before, len(whole[:first].rstrip()))
            last = min(last + behind, len(whole) - len(whole[last:].lstrip()))
            found.append((first, last, group[:middle], group[middle + 1 :]))
        placed: list[Piece] = []
        end = 0
        for first, last, opening, closing in sorted(found, key=lambda each: each[:2]):
            if first < end:
                return None
            placed += [Piece("text", whole[end:first]), *opening, Piece("text", whole[first:last]), *closing]
            end = last
        return [*placed, Piece("text", whole[end:])]

    def _find_elements(self, runs: Iterator[str]) -> Iterator[tuple[list[Piece], str | None]]:
        """The pieces of each outermost element, and its text as it is translated by itself.

        It has none if it has several texts, or begins or ends within a word.
        """
        source = "".join(piece.text for piece in self._inside if not piece.is_tag)
        group: list[Piece] = []
        texts: list[str | None] = []
        depth = start = end = 0
        for piece, run in zip(self._inside, self._runs, strict=True):
            depth += {"open": 1, "close": -1}.get(piece.kind, 0)
            translated = next(runs) if run else piece.text if piece.kind == "kept" else None
            if run and translated and not _END.search(run[2]):
                translated = _END.sub("", translated)
            if depth > 0 or group or piece.is_tag:
                start = start if group else end
                group.append(piece)
                texts += [] if piece.is_tag else [translated]
            end += 0 if piece.is_tag else len(piece.text)
            if group and depth == 0:
                yield group, texts[0] if len(texts) == 1 and _is_apart(source, (start, end)) else None
                group, texts = [], []
        if group:
            yield group, None


def _peel(pieces: Sequence[Piece]) -> tuple[list[Piece], list[Piece], list[Piece]]:
    """The pieces in three: tags and spaces before all text, the sentence, and tags and spaces behind it.

    Where an element begins or ends within the sentence, the sentence gets its other end, too.
    """
    filled = [index for index, piece in enumerate(pieces) if not piece.is_tag and piece.text.strip()]
    if not filled:
        return list(pieces), [], []
    first, last = filled[0], filled[-1] + 1
    opened = closed = 0
    for piece in pieces[first:last]:
        if piece.kind == "open":
            opened += 1
        elif piece.kind == "close" and opened:
            opened -= 1
        elif piece.kind == "close":
            closed += 1
    while closed and first and pieces[first - 1].kind == "open":
        first, closed = first - 1, closed - 1
    while opened and last < len(pieces) and pieces[last].kind == "close":
        last, opened = last + 1, opened - 1
    return list(pieces[:first]), list(pieces[first:last]), list(pieces[last:])


def _has_words(text: str) -> bool:
    return any(character.isalnum() for character in text)


def _find(text: str, whole: str) -> list[tuple[int, int]]:
    """Where a text stands in a whole, as words of it, whether its letters are capital or not; not within what is kept.

    What is kept may be the text.
    """
    if not text:
        return []
    kept = [found.span() for found in KEPT.finditer(whole)]
    # Looking ahead finds places that overlap, too.
    starts = (found.start() for found in re.finditer(f"(?={re.escape(text)})", whole, re.IGNORECASE))
    spans = ((start, start + len(text)) for start in starts)
    return [
        span
        for span in spans
        if _is_apart(whole, span)
        and all(last <= span[0] or span[1] <= first or span == (first, last) for first, last in kept)
    ]


def _is_apart(text: str, span: tuple[int, int]) -> bool:
    """Whether words end where a part of a text begins and ends."""
    return not any(_is_in_word(text, edge, SPACELESS) for edge in span)


def _is_in_word(text: str, position: int, units: str) -> bool:
    """Whether a word goes on from before a position to behind it; letters of the scripts `units` are words each."""
    edges = text[max(position - 1, 0) : position + 1]
    return len(edges) == 2 and edges.isalnum() and not re.search(f"[{units}]", edges)
