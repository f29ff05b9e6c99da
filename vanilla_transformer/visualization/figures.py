"""What all pictures share: their files, sizes, colours, and fonts that have every character of a text."""

import logging
import os
import threading
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from vanilla_transformer.files import explain_missing, new_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

PICTURE_FORMATS = ("png", "svg", "pdf")

# Okabe and Ito's colours, which colour-blind people can tell apart, without the yellow that is lost on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")

_MOST_PIXELS, _LEAST_DPI, _MOST_DPI = 10_000, 80, 150
_LEAST_CELL = 0.11  # inches
_LONGEST_LABEL = 24  # characters
_MISSING = "□"
_SVG_LOCK = threading.Lock()
# Joiners, variation selectors and skin colours change their neighbours, and say nothing where no font has them.
_SILENT = frozenset(map(chr, [0x200C, 0x200D, *range(0xFE00, 0xFE10), *range(0x1F3FB, 0x1F400)]))
_FIRST_EMOJI = "\U0001f000"  # where the blocks of pictographs begin
_warned: set[str] = set()  # characters that a warning has named


def import_figure(what: str) -> "type[Figure]":
    """Imports matplotlib's figure, which draws without a display and in any thread, unlike pyplot.

    Args:
        what: What needs it, for the message.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    with explain_missing(f"{what} need matplotlib", extra="train", packages="matplotlib"):
        from matplotlib.figure import Figure
    return Figure


def find_format(path: str | os.PathLike[str]) -> str:
    """Returns the format that a picture's name asks for.

    Raises:
        ValueError: If it is none of `PICTURE_FORMATS`.
    """
    picture_format = Path(path).suffix.removeprefix(".").lower()
    if picture_format not in PICTURE_FORMATS:
        endings = ", ".join(f".{name}" for name in PICTURE_FORMATS)
        raise ValueError(f"{path}: the name of a picture must end in one of {endings}.")
    return picture_format


def save_picture(figure: "Figure", path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes a picture, whole or not at all. The words of an SVG file stay text, for search and for the viewer's fonts.

    Args:
        figure: What to write.
        path: The file, whose ending says the format.
        overwrite: Whether an existing file may be replaced.

    Raises:
        FileExistsError: If there is such a file and it must not be replaced.
        OSError: If the file cannot be written.
        ValueError: If the name has another ending than those of `PICTURE_FORMATS`.
    """
    picture_format = find_format(path)
    with new_file(path, overwrite=overwrite) as partial:
        if picture_format == "svg":
            with _text_in_svg():
                figure.savefig(partial, format=picture_format)
            _let_texts_choose_their_direction(partial)
        else:
            figure.savefig(partial, format=picture_format)


@contextmanager
def _text_in_svg() -> Iterator[None]:
    from matplotlib import rcParams

    with _SVG_LOCK, ignore_missing_glyphs():
        before = rcParams["svg.fonttype"]
        rcParams["svg.fonttype"] = "none"
        try:
            yield
        finally:
            rcParams["svg.fonttype"] = before


def _let_texts_choose_their_direction(path: Path) -> None:
    """Has a text whose first letter is Hebrew or Arabic run from right to left, as in the other formats."""
    text = path.read_text(encoding="utf-8")
    path.write_text(
        text.replace("</style>", "text{unicode-bidi: plaintext}</style>", 1), encoding="utf-8", newline="\n"
    )


@contextmanager
def ignore_missing_glyphs() -> Iterator[None]:
    """Lets matplotlib measure text that the viewer of a file will draw, perhaps with fonts that are not here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def plain(text: str) -> str:
    """Keeps matplotlib from reading dollar signs as a formula, and from leaving out names that begin with a line."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def choose_color(number: int, count: int) -> str:
    """Returns one of so many colours that are told apart as well as they can be."""
    if count <= len(COLORS):
        return COLORS[number]
    from matplotlib import colormaps, colors

    return colors.to_hex(colormaps["turbo"](number / (count - 1)))


class Sized(Protocol):
    """What has a size in inches."""

    @property
    def width(self) -> float:
        """Inches."""

    @property
    def height(self) -> float:
        """Inches."""


_Layout = TypeVar("_Layout", bound=Sized)


def fit_cells(largest: float, lay_out: Callable[[float], _Layout], *, what: str, advice: str) -> _Layout:
    """Lays out a picture of cells, which are tokens, that are as large as its size bears.

    Args:
        largest: The size of a cell in inches, where there is room.
        lay_out: Makes a layout of cells of a size.
        what: What is drawn, for the message.
        advice: What to do about a picture that is too large.

    Returns:
        The layout.

    Raises:
        ValueError: If the picture would be too large with the smallest cells that can be read.
    """
    cell, layout = largest, lay_out(largest)
    while max(layout.width, layout.height) * _MOST_DPI > _MOST_PIXELS and cell > _LEAST_CELL:
        cell = max(cell - 0.02, _LEAST_CELL)
        layout = lay_out(cell)
    if max(layout.width, layout.height) * _LEAST_DPI > _MOST_PIXELS:
        raise ValueError(
            f"{what} make a picture of {layout.width:.0f} by {layout.height:.0f} inches; it must be at most "
            f"{_MOST_PIXELS // _LEAST_DPI}. {advice}"
        )
    return layout


def choose_dpi(size: Sized) -> float:
    """Returns how many pixels an inch of a picture has."""
    return min(_MOST_DPI, _MOST_PIXELS / max(size.width, size.height))


def shorten(label: str) -> str:
    """Cuts the label of a token that has no end."""
    return label if len(label) <= _LONGEST_LABEL else label[: _LONGEST_LABEL - 1] + "…"


def measure(texts: Iterable[str], font_size: float, families: list[str]) -> float:
    """Returns the width of the widest of some texts, in inches; the font size is in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=families, size=font_size)
    with ignore_missing_glyphs():
        sizes = [text_to_path.get_text_width_height_descent(text, font, ismath=False) for text in set(texts)]
    return max((width for width, _, _ in sizes), default=0.0) / 72


class Lettering(NamedTuple):
    """Fonts for some texts.

    Attributes:
        families: The fonts' names, the first of which has most characters and the others what is missing there.
        missing: Characters that no font has.
    """

    families: list[str]
    missing: frozenset[str]

    def show(self, text: str) -> str:
        """Returns the text with a box for each character that cannot be drawn."""
        kept = [character for character in text if character not in self.missing & _SILENT]
        return "".join(_MISSING if character in self.missing else character for character in kept)

    def warn(self) -> None:
        """Says which characters are drawn as boxes, if any, and what to do; once for each character."""
        named = sorted(self.missing - _SILENT - _warned)
        if not named:
            return
        _warned.update(named)
        advice = []
        if named[0] < _FIRST_EMOJI:
            advice.append("Install a font that has them, such as Noto (Debian: fonts-noto-core, fonts-noto-cjk).")
        if named[-1] >= _FIRST_EMOJI:
            advice.append(
                "For emoji install one of outlines, such as Symbola (Debian: fonts-symbola); colours cannot be drawn."
            )
        logger.warning(
            "No installed font that can be used has %d of the characters (%s%s): they are drawn as %s. %s Or write SVG "
            "or HTML, which leave it to the viewer's fonts.",
            len(named),
            " ".join(named[:8]),
            " ..." if len(named) > 8 else "",
            _MISSING,
            " ".join(advice),
        )


def choose_fonts(texts: Iterable[str]) -> Lettering:
    """Finds installed fonts that together have every character of some texts, beginning with matplotlib's own."""
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties, findfont

    default = list(rcParams["font.family"])
    characters = {character for text in texts for character in text if not character.isspace()}
    missing = {ord(character) for character in characters}
    missing -= _read_characters(str(findfont(FontProperties(family=default))))
    families = _find_families(missing, _choose_region(characters), _list_fonts()) if missing else []
    left = frozenset(map(chr, missing.difference(*(coverage for _, coverage in families))))
    return Lettering([*default, *(name for name, _ in families)], left)


def _choose_region(characters: Iterable[str]) -> str:
    """Fonts for Chinese, Japanese and Korean are named after regions, which write some characters differently."""
    names = {unicodedata.name(character, "").partition(" ")[0] for character in characters}
    if names & {"HIRAGANA", "KATAKANA"}:
        return "JP"
    return "KR" if "HANGUL" in names else "SC"


def _find_families(missing: set[int], region: str, fonts: dict[str, str]) -> list[tuple[str, frozenset[int]]]:
    """Takes the font that has most of what is missing, and so on; among equals, one for texts, of the region."""

    def fit(family: str) -> tuple[int, bool, bool, str]:
        is_plain = "Sans" in family and "Mono" not in family
        return -len(rest & _read_characters(fonts[family])), not is_plain, not family.endswith(region), family

    found: list[tuple[str, frozenset[int]]] = []
    rest = set(missing)
    while rest and fonts:
        best = min(fonts, key=fit)
        coverage = _read_characters(fonts[best])
        if not rest & coverage:
            break
        found.append((best, coverage))
        rest -= coverage
    return found


def _list_fonts() -> dict[str, str]:
    """Maps the name of each family to its file of regular weight."""
    from matplotlib.font_manager import fontManager, weight_dict

    _add_new_fonts()
    weights: dict[Any, Any] = dict(weight_dict)
    entries = sorted(
        fontManager.ttflist,
        key=lambda entry: (entry.style == "normal", -abs(int(weights.get(entry.weight, entry.weight)) - 400)),
    )
    # The last one of a name stays. The "last resort" draws a box for everything.
    named = {entry.name: str(entry.fname) for entry in entries}
    return {name: path for name, path in named.items() if "lastresort" not in name.lower().replace(" ", "")}


@cache
def _add_new_fonts() -> None:
    """Tells matplotlib of fonts that were installed after it made its list, which it keeps for good."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    known = {os.path.realpath(entry.fname) for entry in fontManager.ttflist}
    for path in findSystemFonts():
        if os.path.realpath(path) not in known:
            # FreeType's ways to say that it cannot read a font.
            with suppress(OSError, RuntimeError, ValueError):
                fontManager.addfont(path)


@cache
def _read_characters(path: str) -> frozenset[int]:
    """The characters that a font can draw."""
    from matplotlib.ft2font import FT2Font

    try:
        font = FT2Font(path)
        return frozenset(font.get_charmap()) if font.scalable else frozenset()
    except (OSError, RuntimeError):
        return frozenset()
