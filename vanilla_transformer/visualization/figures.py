"""What all pictures share: their files, sizes, colours, and fonts that have the characters of their texts."""

import io
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vanilla_transformer.files import check_new_file, explain_missing, new_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

PICTURE_FORMATS = ("png", "svg", "pdf")

# Okabe and Ito's colours, which colour-blind people can tell apart, without the yellow that is lost on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")

_MOST_PIXELS, _LEAST_DPI, _MOST_DPI = 10_000, 80, 150
_LEAST_CELL = 0.11  # inches
_LONGEST_LABEL = 24  # characters
_SVG_LOCK = threading.Lock()
_warned: set[str] = set()  # characters that a warning has named


def import_figure(what: str) -> "type[Figure]":
    """Matplotlib's figure, which draws without a display and in any thread, unlike pyplot; `what` needs it."""
    with explain_missing(f"{what} need matplotlib", extra="train", packages="matplotlib"):
        from matplotlib.figure import Figure
    return _make_picture_class(Figure)


@cache
def _make_picture_class(figure_class: "type[Figure]") -> "type[Figure]":
    def draw(self: "Figure") -> bytes:
        """Makes what a notebook shows: labels may stand outside the figure."""
        buffer = io.BytesIO()
        with ignore_missing_glyphs():
            self.savefig(buffer, format="png", bbox_inches="tight", pad_inches=0.12)
        return buffer.getvalue()

    return type("Picture", (figure_class,), {"_repr_png_": draw})


def find_format(path: str | os.PathLike[str]) -> str:
    """The format that a picture's name asks for."""
    picture_format = Path(path).suffix.removeprefix(".").lower()
    if picture_format not in PICTURE_FORMATS:
        raise ValueError(f"{path}: the name of a picture must end in one of .{', .'.join(PICTURE_FORMATS)}.")
    return picture_format


def check_picture(path: str | os.PathLike[str] | None, *, overwrite: bool = False) -> str:
    """Returns the format of a picture that can be written to `path`; without one, that of notebooks."""
    if path is None:
        return "png"
    picture_format = find_format(path)
    check_new_file(path, overwrite=overwrite)
    return picture_format


def save_picture(
    figure: "Figure", path: str | os.PathLike[str] | None, *, overwrite: bool = False, **options: Any
) -> "Figure":
    """Writes a picture, whole or not at all, if there is a path; returns the figure, which a notebook shows.

    The words of an SVG file stay text, for search and for the viewer's fonts. `options` are those of `Figure.savefig`.
    """
    if path is None:
        return figure
    picture_format = find_format(path)
    with new_file(path, overwrite=overwrite) as partial:
        if picture_format != "svg":
            figure.savefig(partial, format=picture_format, **options)
            return figure
        from matplotlib import rc_context

        with _SVG_LOCK, ignore_missing_glyphs(), rc_context({"svg.fonttype": "none"}):
            figure.savefig(partial, format=picture_format, **options)
        # A text whose first letter is Hebrew or Arabic runs from right to left, as in the other formats.
        text = partial.read_text(encoding="utf-8")
        text = text.replace("</style>", "text{unicode-bidi: plaintext}</style>", 1)
        partial.write_text(text, encoding="utf-8", newline="\n")
    return figure


@contextmanager
def ignore_missing_glyphs() -> Iterator[None]:
    """Keeps matplotlib quiet about characters without a font, which [`find_families`] has named once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from|Matplotlib currently does not support")
        yield


def plain(text: str) -> str:
    """Keeps matplotlib from reading dollar signs as a formula, and from leaving out names that begin with a line."""
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def choose_color(number: int, count: int) -> str:
    """One of so many colours that are told apart as well as they can be."""
    if count <= len(COLORS):
        return COLORS[number]
    from matplotlib import colormaps, colors

    return colors.to_hex(colormaps["turbo"](number / (count - 1)))


def fit_cells(
    largest: float, find_size: Callable[[float], tuple[float, float]], *, what: str, advice: str
) -> tuple[float, float]:
    """The size in inches of a cell, which is a token, and the dots per inch, as large as the picture's size bears.

    `find_size` maps a cell's size to the picture's width and height. A picture of `what` that is too large even with
    the smallest cells that can be read is a ValueError, with `advice`.
    """
    cell = largest
    while max(find_size(cell)) * _MOST_DPI > _MOST_PIXELS and cell > _LEAST_CELL:
        cell = max(cell - 0.02, _LEAST_CELL)
    width, height = find_size(cell)
    if max(width, height) * _LEAST_DPI > _MOST_PIXELS:
        size, most = f"{width:.0f} by {height:.0f} inches", _MOST_PIXELS // _LEAST_DPI
        raise ValueError(f"{what} make a picture of {size}; it must be at most {most}. {advice}")
    return cell, min(_MOST_DPI, _MOST_PIXELS / max(width, height))


def shorten(label: str) -> str:
    """Cuts the label of a token that has no end."""
    return label if len(label) <= _LONGEST_LABEL else label[: _LONGEST_LABEL - 1] + "…"


def measure(texts: Iterable[str], font_size: float, families: list[str]) -> float:
    """The width of the widest of some texts, in inches; the font size is in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=families, size=font_size)
    with ignore_missing_glyphs():
        sizes = [text_to_path.get_text_width_height_descent(text, font, ismath=False) for text in set(texts)]
    return max((width for width, _, _ in sizes), default=0.0) / 72


def find_families(texts: Iterable[str], picture_format: str) -> list[str]:
    """Matplotlib's own font, and installed ones that have the characters it lacks: it takes the first that has one.

    Characters that no font has are boxes, and named in a warning, once; of an SVG file the viewer's fonts decide.
    """
    from matplotlib import rcParams
    from matplotlib.font_manager import FontProperties, findfont, fontManager

    families = list(rcParams["font.family"])
    missing = {character for text in texts for character in text if not character.isspace()}
    missing -= _read_characters(findfont(FontProperties(family=families)))
    if missing:
        _add_new_fonts()
    for entry in sorted(fontManager.ttflist, key=lambda entry: ("Sans" not in entry.name, entry.name)):
        # The "last resort" draws a box for everything.
        found = set() if not missing or "Last" in entry.name else missing & _read_characters(entry.fname)
        if found:
            families.append(entry.name)
            missing -= found
    named = sorted(missing - _warned)
    if named and picture_format != "svg":
        _warned.update(named)
        logger.warning(
            "No installed font that can be used has %d of the characters (%s%s): they are drawn as boxes. Install one, "
            "such as Noto (Debian: fonts-noto-core, fonts-noto-cjk; for emoji fonts-symbola, since colours cannot be "
            "drawn), or write SVG or HTML, which leave it to the viewer's fonts.",
            len(named),
            " ".join(named[:8]),
            " ..." if len(named) > 8 else "",
        )
    return families


@cache
def _add_new_fonts() -> None:
    """Tells matplotlib of fonts that were installed after it made its list, which it keeps for good."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    known = {os.path.realpath(entry.fname) for entry in fontManager.ttflist}
    for path in findSystemFonts():
        if os.path.realpath(path) not in known:
            with suppress(OSError, RuntimeError, ValueError):  # FreeType cannot read it
                fontManager.addfont(path)


@cache
def _read_characters(path: str) -> frozenset[str]:
    """The characters that a font can draw."""
    from matplotlib.ft2font import FT2Font

    try:
        font = FT2Font(path)
        return frozenset(map(chr, font.get_charmap())) if font.scalable else frozenset()
    except (OSError, RuntimeError):
        return frozenset()
