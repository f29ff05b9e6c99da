"""Pictures of attention weights: a heat map for each head, side by side, or for their mean.

Shapes: S source tokens, T target tokens, H heads, N layers.
"""

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from . import figures
from .attention import AttentionKind, AttentionMap, Weights
from .labels import SPACE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Average = Literal["none", "heads", "all"]
AVERAGES: tuple[Average, ...] = ("none", "heads", "all")

_AXIS_NAMES: dict[AttentionKind, tuple[str, str, str]] = {
    "encoder": ("Encoder self-attention", "source token", "looks at source token"),
    "decoder": ("Decoder self-attention", "target token that is read", "looks at target token"),
    "cross": ("Cross-attention", "target token that is predicted", "looks at source token"),
}
SPACE_NOTE = f'"{SPACE}" is a space'
_SMALL, _MIDDLE, _LARGE = 8, 9, 11  # font sizes in points
# All in inches.
_CELL_SIZES = ((1, 0.26), (8, 0.2), (10**9, 0.13))  # with up to so many panels
_GAP, _EDGE, _LINE = 0.14, 0.12, 0.2


class _Panel(NamedTuple):
    title: str
    weights: Weights  # (rows, columns)


class _Grid(NamedTuple):
    """Where the panels are, in inches, counted row by row; labels stand around the grid and widen the picture."""

    rows: int
    columns: int
    panel_width: float
    panel_height: float
    slot_width: float
    slot_height: float

    @property
    def size(self) -> tuple[float, float]:
        """Width and height."""
        return self.columns * self.slot_width, self.rows * self.slot_height

    def place(self, number: int) -> tuple[float, float, float, float]:
        """Left, bottom, width and height of a panel, as shares of the grid; it is in the middle of its slot."""
        row, column = divmod(number, self.columns)
        width, height = self.size
        x = column * self.slot_width + (self.slot_width - self.panel_width) / 2
        y = (self.rows - 1 - row) * self.slot_height + (self.slot_height - self.panel_height - _LINE - _GAP) / 2
        return x / width, y / height, self.panel_width / width, self.panel_height / height


def plot_attention(
    attention: AttentionMap,
    path: str | os.PathLike[str] | None = None,
    *,
    kind: AttentionKind = "cross",
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    average: Average = "none",
    title: str | None = None,
    max_weight: float | None = 1.0,
    overwrite: bool = False,
) -> "Figure":
    """Draws attention weights as heat maps, whose rows are the tokens that look, and whose columns are looked at.

    Works without a display and in any thread. The rows of self-attention are tokens that are read, those of
    cross-attention tokens that are predicted. Returns the figure, which a notebook shows; no `path`, no file.

    `kind` is "encoder" or "decoder" for self-attention, "cross" for that from target to source; `layers` and `heads`
    are those to draw, counted from 0, negative ones from the last (`None`: all). `average` is "none" for a heat map for
    each layer and head, "heads" for the mean of each layer's heads, or "all" for one, the mean of all. `title` is
    written above; `None`: the kind of attention. `max_weight` is that of the darkest colour, in all pictures the same,
    unless `None` asks for the largest weight drawn. The picture is a .png, .svg or .pdf, and one that exists is
    replaced only if `overwrite` says so; one that would be too large to be read is a ValueError.
    """
    figure_class = figures.import_figure("Attention maps")
    picture_format = figures.check_picture(path, overwrite=overwrite)
    weights, row_labels, column_labels = attention.select(kind)
    panels, columns = _make_panels(weights, layers, heads, average)
    kind_name, row_name, column_name = _AXIS_NAMES[kind]
    if any(SPACE in label for label in [*row_labels, *column_labels]):
        column_name += f"\n{SPACE_NOTE}"
    max_weight = max_weight or max(float(panel.weights.max()) for panel in panels)
    title = kind_name if title is None else title
    families = figures.find_families([*row_labels, *column_labels, title], picture_format)
    rows = math.ceil(len(panels) / columns)
    # Titles may be wider than panels, and the rows' name longer than all of them are high.
    least_width = figures.measure([panel.title for panel in panels], _SMALL, families)
    least_height = figures.measure([row_name], _MIDDLE, families) / rows

    def lay_out(cell: float) -> _Grid:
        width, height = cell * len(column_labels), cell * len(row_labels)
        slot = max(width, least_width) + _GAP, max(height + _LINE + _GAP, least_height)
        return _Grid(rows, columns, width, height, *slot)

    cell, dpi = figures.fit_cells(
        next(size for most, size in _CELL_SIZES if len(panels) <= most),
        lambda cell: lay_out(cell).size,
        what=f"{len(panels)} heat maps of {len(row_labels)} by {len(column_labels)} tokens",
        advice="Draw fewer layers or heads, or their mean (average), or write a page (.html).",
    )
    figure = figure_class(figsize=(grid := lay_out(cell)).size, dpi=dpi)
    labels = [figures.shorten(label) for label in row_labels], [figures.shorten(label) for label in column_labels]
    text: dict[str, Any] = {"parse_math": False, "family": families, "fontsize": min(cell * 72 * 0.75, 10.0)}
    _draw_panels(figure, grid, panels, labels, text, max_weight)
    x, y, *_ = grid.place(len(panels) - 1 - (len(panels) - 1) % columns)
    widths = [figures.measure(side, text["fontsize"], families) + 0.15 for side in labels]
    corner = min(x - widths[0] / grid.size[0], 0.0), y - widths[1] / grid.size[1]
    _write_names(figure, grid, corner, (row_name, column_name, title), text)
    with figures.ignore_missing_glyphs():
        return figures.save_picture(figure, path, overwrite=overwrite, bbox_inches="tight", pad_inches=_EDGE)


def _write_names(
    figure: "Figure", grid: _Grid, corner: tuple[float, float], names: tuple[str, str, str], text: dict[str, Any]
) -> None:
    """Writes the names of rows and columns beside the labels, which reach down to the corner, and the title."""
    row_name, column_name, title = names
    middle = {**text, "fontsize": _MIDDLE}
    figure.text(corner[0], 0.5, row_name, rotation=90, ha="right", va="center", **middle)
    figure.text(0.5, corner[1], column_name, ha="center", va="top", **middle)
    figure.text(0.5, 1 + _EDGE / grid.size[1], title, ha="center", va="bottom", **{**text, "fontsize": _LARGE})


def _make_panels(
    weights: Weights, layers: Sequence[int] | None, heads: Sequence[int] | None, average: Average
) -> tuple[list[_Panel], int]:
    """The heat maps in their order, and how many are side by side."""
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
        means = zip(chosen_layers, kept.mean(axis=1), strict=True)
        panels = [_Panel(f"layer {layer}, mean of {some_heads}", mean) for layer, mean in means]
        return panels, _choose_columns(len(panels))
    names = [f"layer {layer}, head {head}" for layer in chosen_layers for head in chosen_heads]
    panels = [_Panel(name, values) for name, values in zip(names, kept.reshape(-1, *kept.shape[2:]), strict=True)]
    return panels, len(chosen_heads) if len(chosen_layers) > 1 else _choose_columns(len(panels))


def _choose_columns(count: int) -> int:
    return count if count <= 3 else math.ceil(count / math.ceil(math.sqrt(count / 2)))


def _check_numbers(name: str, numbers: Sequence[int] | None, count: int) -> list[int]:
    """The numbers of layers or heads, counted from 0."""
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
        if not runs or number != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(number)
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _draw_panels(
    figure: "Figure",
    grid: _Grid,
    panels: list[_Panel],
    labels: tuple[list[str], list[str]],
    text: dict[str, Any],
    max_weight: float,
) -> None:
    """The heat maps, and the bar of their colours to the right of them."""
    image: Any = None
    looks: dict[str, Any] = {"cmap": "Blues", "vmin": 0.0, "aspect": "auto", "interpolation": "nearest"}
    for number, panel in enumerate(panels):
        axes = figure.add_axes(grid.place(number))
        image = axes.imshow(panel.weights, vmax=max_weight, **looks)
        axes.set_title(panel.title, fontsize=_SMALL, pad=3)
        axes.tick_params(length=2, pad=2)
        # Only the outer heat maps have labels, which hold for those beside and above them.
        rows = labels[0] if number % grid.columns == 0 else []
        columns = labels[1] if number + grid.columns >= len(panels) else []
        axes.set_yticks(range(len(rows)), rows, **text)
        axes.set_xticks(range(len(columns)), columns, rotation=90, **text)
        axes.spines[:].set_color("0.7")
    width, height = grid.size
    length = min(height - 2 * (_LINE + _GAP), 3.0)
    bar = figure.add_axes((1 + 0.1 / width, 1 - (_LINE + _GAP + length) / height, 0.12 / width, length / height))
    figure.colorbar(image, cax=bar).ax.tick_params(labelsize=7)
    bar.set_ylabel("attention weight", fontsize=_SMALL)
