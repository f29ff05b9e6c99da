"""Pictures of attention weights: a heat map for each head, side by side, or for their mean.

Shapes: S source tokens, T target tokens, H heads, N layers.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vanilla_transformer.files import check_new_file

from .attention import AttentionKind, AttentionMap, Weights
from .figures import (
    Lettering,
    choose_dpi,
    choose_fonts,
    find_format,
    fit_cells,
    import_figure,
    measure,
    save_picture,
    shorten,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Average = Literal["none", "heads", "all"]
AVERAGES: tuple[Average, ...] = ("none", "heads", "all")

_AXIS_NAMES: dict[AttentionKind, tuple[str, str, str]] = {
    "encoder": ("Encoder self-attention", "source token", "looks at source token"),
    "decoder": ("Decoder self-attention", "target token that is read", "looks at target token"),
    "cross": ("Cross-attention", "target token that is predicted", "looks at source token"),
}
_LEAST_HIGHEST = 0.5  # weight of the darkest colour
_SMALL, _MIDDLE, _LARGE = 8, 9, 11  # font sizes in points
# All in inches.
_CELL_SIZES = ((1, 0.26), (8, 0.2), (10**9, 0.13))  # with up to so many panels
_GAP, _EDGE, _LINE = 0.14, 0.12, 0.2


class _Panel(NamedTuple):
    title: str
    weights: Weights  # (rows, columns)


class _Content(NamedTuple):
    """What is to be drawn and written."""

    panels: list[_Panel]
    side_by_side: int
    rows: list[str]
    columns: list[str]
    title: str
    row_name: str
    column_name: str
    families: list[str]


@dataclass(frozen=True)
class _Layout:
    """Where everything is, in inches; panels are counted row by row."""

    rows: int
    columns: int
    panel_width: float
    panel_height: float
    slot_width: float
    left: float
    bottom: float
    right: float
    top: float
    font_size: float  # points

    @property
    def width(self) -> float:
        return self.left + self.columns * self.slot_width + self.right

    @property
    def height(self) -> float:
        return self.bottom + self.rows * (self.panel_height + _LINE + _GAP) + self.top

    def place(self, number: int) -> tuple[float, float, float, float]:
        """Left, bottom, width and height of a panel, as shares of the figure; it is in the middle of its slot."""
        row, column = divmod(number, self.columns)
        x = self.left + column * self.slot_width + (self.slot_width - _GAP - self.panel_width) / 2
        y = self.bottom + (self.rows - 1 - row) * (self.panel_height + _LINE + _GAP)
        return x / self.width, y / self.height, self.panel_width / self.width, self.panel_height / self.height


def plot_attention(
    attention: AttentionMap,
    path: str | os.PathLike[str],
    *,
    kind: AttentionKind = "cross",
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    average: Average = "none",
    title: str | None = None,
    overwrite: bool = False,
) -> None:
    """Draws attention weights as heat maps, whose rows are the tokens that look, and whose columns are looked at.

    Works without a display and in any thread. Labels are written in whatever installed fonts have their characters.

    Args:
        attention: The weights.
        path: The picture to write, as .png, .svg or .pdf.
        kind: "encoder" and "decoder" for self-attention, "cross" for that from target to source.
        layers: The layers to draw, counted from 0, negative ones from the last; `None`: all.
        heads: The heads to draw, counted from 0; `None`: all.
        average: "none": a heat map for each layer and head. "heads": one for each layer, the mean of the heads. "all":
            one, the mean of all.
        title: Written above the picture. `None`: the kind of attention.
        overwrite: Whether an existing file may be replaced.

    Raises:
        FileExistsError: If the file exists and must not be replaced.
        ImportError: If matplotlib is not installed.
        OSError: If the file cannot be written.
        ValueError: If there is no such kind, layer or head, the picture would be too large to be read, or the name has
            another ending.
    """
    figure_class = import_figure("Attention maps")
    picture_format = find_format(path)
    check_new_file(path, overwrite=overwrite)
    weights, row_labels, column_labels = attention.select(kind)
    panels, columns = _make_panels(weights, layers, heads, average)
    kind_name, row_name, column_name = _AXIS_NAMES[kind]
    lettering = choose_fonts([*row_labels, *column_labels, title or ""])
    if picture_format == "svg":
        # What is missing here may be there where the file is looked at.
        lettering = Lettering(lettering.families, frozenset())
    lettering.warn()
    content = _Content(
        panels,
        columns,
        [lettering.show(shorten(label)) for label in row_labels],
        [lettering.show(shorten(label)) for label in column_labels],
        kind_name if title is None else lettering.show(title),
        row_name,
        column_name,
        lettering.families,
    )
    layout = _lay_out(content)
    figure = figure_class(figsize=(layout.width, layout.height), dpi=choose_dpi(layout))
    _draw_panels(figure, layout, content)
    _write_names(figure, layout, content)
    save_picture(figure, path, overwrite=overwrite)


def _make_panels(
    weights: Weights, layers: Sequence[int] | None, heads: Sequence[int] | None, average: Average
) -> tuple[list[_Panel], int]:
    """Returns the heat maps in their order, and how many are side by side."""
    if average not in AVERAGES:
        raise ValueError(f"average is {average!r}; it must be one of {', '.join(AVERAGES)}.")
    chosen_layers = _check_numbers("layers", layers, len(weights))
    chosen_heads = _check_numbers("heads", heads, weights.shape[1])
    kept = weights[chosen_layers][:, chosen_heads]
    some_layers = "all layers" if layers is None else f"layers {_write_numbers(chosen_layers)}"
    some_heads = "heads" if heads is None else f"heads {_write_numbers(chosen_heads)}"
    if average == "all":
        return [_Panel(f"mean of {some_layers} and {some_heads}", kept.mean(axis=(0, 1)))], 1
    if average == "heads":
        panels = [
            _Panel(f"layer {layer}, mean of {some_heads}", mean)
            for layer, mean in zip(chosen_layers, kept.mean(axis=1), strict=True)
        ]
        return panels, _choose_columns(len(panels))
    panels = [
        _Panel(f"layer {layer}, head {head}", kept[row, column])
        for row, layer in enumerate(chosen_layers)
        for column, head in enumerate(chosen_heads)
    ]
    return panels, len(chosen_heads) if len(chosen_layers) > 1 else _choose_columns(len(panels))


def _choose_columns(count: int) -> int:
    return count if count <= 3 else math.ceil(count / math.ceil(math.sqrt(count / 2)))


def _check_numbers(name: str, numbers: Sequence[int] | None, count: int) -> list[int]:
    """Returns the numbers of layers or heads, counted from 0."""
    chosen = list(range(count)) if numbers is None else list(numbers)
    wrong = [number for number in chosen if not -count <= number < count]
    if wrong or not chosen:
        raise ValueError(f"{name} is {chosen}; they must be from 0 to {count - 1}, or from -{count} to -1.")
    counted = [number % count for number in chosen]
    if twice := sorted({number for number in counted if counted.count(number) > 1}):
        raise ValueError(f"{name} is {chosen}; {', '.join(map(str, twice))} must be named once.")
    return counted


def _write_numbers(numbers: Sequence[int]) -> str:
    """Writes 0, 1, 2, 3, 5 as "0-3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [[f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run) for run in runs]
    return ", ".join(chain.from_iterable(parts))


def _lay_out(content: _Content) -> _Layout:
    """Finds cells that are as large as the number of panels allows and the picture's size bears.

    Raises:
        ValueError: If the picture would be too large with the smallest ones.
    """
    count = len(content.panels)
    return fit_cells(
        next(size for most, size in _CELL_SIZES if count <= most),
        partial(_lay_out_cells, content),
        what=f"{count} heat maps of {len(content.rows)} by {len(content.columns)} tokens",
        advice="Draw fewer layers or heads, or their mean (average), or write a page (.html), which shows one layer at "
        "a time.",
    )


def _lay_out_cells(content: _Content, cell: float) -> _Layout:
    font_size = min(cell * 72 * 0.75, 10.0)
    rows = math.ceil(len(content.panels) / content.side_by_side)
    panel_width, panel_height = cell * len(content.columns), cell * len(content.rows)
    titles = measure([panel.title for panel in content.panels], _SMALL, content.families)
    slot_width = max(panel_width, titles) + _GAP
    beside = (slot_width - _GAP - panel_width) / 2  # of a panel whose title is wider
    left = _EDGE + _LINE + max(measure(content.rows, font_size, content.families) + 0.1 - beside, 0.05)
    bottom = _EDGE + _LINE + measure(content.columns, font_size, content.families) + 0.1
    right, top = 0.85, _EDGE + (0.25 if content.title else 0.0)
    # A title may be longer than the picture is wide, and the name of its rows longer than it is high.
    width = 2 * _EDGE + measure([content.title], _LARGE, content.families)
    height = 2 * _EDGE + measure([content.row_name], _MIDDLE, content.families)
    more_height = max(height - bottom - rows * (panel_height + _LINE + _GAP), 0.0)
    return _Layout(
        rows=rows,
        columns=content.side_by_side,
        panel_width=panel_width,
        panel_height=panel_height,
        slot_width=slot_width,
        left=left,
        bottom=bottom + more_height / 2,
        right=max(right, width - left - content.side_by_side * slot_width),
        top=top + more_height / 2,
        font_size=font_size,
    )


def _draw_panels(figure: "Figure", layout: _Layout, content: _Content) -> None:
    # Even attention over a short sentence must not look like a sharp one.
    highest = max(_LEAST_HIGHEST, *(float(panel.weights.max()) for panel in content.panels))
    text: dict[str, Any] = {"fontsize": layout.font_size, "parse_math": False, "family": content.families}
    image: Any = None
    for number, panel in enumerate(content.panels):
        axes = figure.add_axes(layout.place(number))
        image = axes.imshow(panel.weights, cmap="Blues", vmin=0.0, vmax=highest, aspect="auto", interpolation="nearest")
        axes.set_title(panel.title, fontsize=_SMALL, pad=3)
        axes.tick_params(length=2, pad=2)
        # Only the outer heat maps have labels, which hold for those beside and above them.
        rows = content.rows if number % layout.columns == 0 else []
        columns = content.columns if number + layout.columns >= len(content.panels) else []
        axes.set_yticks(range(len(rows)), rows, **text)
        axes.set_xticks(range(len(columns)), columns, rotation=90, **text)
        axes.spines[:].set_color("0.7")
    height = min(layout.rows * (layout.panel_height + _LINE + _GAP) - _LINE, 3.0)
    x = layout.left + layout.columns * layout.slot_width + 0.1
    y = layout.height - layout.top - _LINE - height
    bar = figure.add_axes((x / layout.width, y / layout.height, 0.12 / layout.width, height / layout.height))
    figure.colorbar(image, cax=bar).ax.tick_params(labelsize=7)
    bar.set_ylabel("attention weight", fontsize=_SMALL)


def _write_names(figure: "Figure", layout: _Layout, content: _Content) -> None:
    """Writes what the rows and columns of all are, and the title."""
    text: dict[str, Any] = {"parse_math": False, "family": content.families}
    x, y = _EDGE / layout.width, _EDGE / layout.height
    middle = (layout.left + (layout.columns * layout.slot_width - _GAP) / 2) / layout.width
    length = measure([content.row_name], _MIDDLE, content.families)
    center = layout.bottom + (layout.height - layout.bottom - layout.top) / 2
    center = min(max(center, _EDGE + length / 2), layout.height - 2 * _EDGE - _LINE - length / 2)
    figure.text(x, center / layout.height, content.row_name, rotation=90, va="center", fontsize=_MIDDLE, **text)
    figure.text(middle, y, content.column_name, ha="center", fontsize=_MIDDLE, **text)
    figure.text(0.5, 1 - y, content.title, ha="center", va="top", fontsize=_LARGE, **text)
