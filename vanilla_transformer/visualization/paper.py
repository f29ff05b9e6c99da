"""Pictures of what the paper describes: positions (section 3.5) and masks (section 3.2.3).

Shapes: B sentences, S source tokens, T target tokens, L positions, D d_model.
"""

import os
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.positions_vanilla_transformer import SINUSOIDS

from . import figures
from .attention import AttentionKind, pair_sides
from .heatmaps import SPACE_NOTE
from .labels import SPACE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Labels = Sequence[Sequence[str]]

_MASK_NOTE = "Each row is a token that looks, each column one that is looked at: blue if it may be, white if masked."
_PREDICTED_NOTE = (
    "\nThe rows of cross-attention are the tokens that are predicted, those of the decoder the ones that are read."
)
_LARGE, _MIDDLE, _LABEL = 12, 9, 8  # font sizes in points
_CELL, _GAP, _EDGE, _LINE = 0.22, 0.25, 0.12, 0.25  # inches; a cell is a token in a mask
_FEW = 40  # positions, of which each is marked
_MASK_TITLES: dict[AttentionKind, str] = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "cross": "cross-attention",
}


def position_table(model: PreTrainedModel | VanillaTransformerConfig, length: int | None = None) -> npt.NDArray[Any]:
    """What is added to the embeddings of the tokens, (L, D), the first row being that of the first token.

    `model` has a table of positions in its encoder, or is a configuration with sinusoids; `length` is the number of
    positions (`None`: 100, or as many as there are).
    """
    if length is not None and length < 1:
        raise ValueError(f"length is {length}; it must be at least 1.")
    config = model if isinstance(model, VanillaTransformerConfig) else model.config
    kind = getattr(config, "position_embedding_type", None)
    if isinstance(config, VanillaTransformerConfig) and kind in SINUSOIDS:
        first = config.position_offset
        positions = torch.arange(first, first + (length or 100), dtype=torch.float64)
        return SINUSOIDS[kind](positions, config.d_model).numpy()
    if isinstance(model, VanillaTransformerConfig):
        raise ValueError(f"position_embedding_type is {kind!r}: such positions are among a model's weights.")
    embedding: Any = getattr(model.get_encoder(), "embed_positions", None)
    weight = getattr(embedding, "weight", getattr(embedding, "weights", None))
    if not isinstance(weight, torch.Tensor):
        raise ValueError(f"{type(model).__name__} has no table of positions (embed_positions) in its encoder.")
    # FSMT and M2M100 count positions from the padding's id.
    padding_id = getattr(embedding, "padding_idx", None)
    first = getattr(embedding, "offset", 0) if padding_id is None else padding_id + 1
    table = weight.detach().float().cpu().numpy()[first:]
    if length is not None and length > len(table):
        raise ValueError(f"length is {length}; the model's table has {len(table)} positions.")
    return table[: length or 100]


def plot_positions(
    table: npt.NDArray[Any],
    path: str | os.PathLike[str] | None = None,
    *,
    dimensions: Sequence[int] | None = None,
    title: str | None = None,
    overwrite: bool = False,
) -> "Figure":
    """Draws a table of positions as a heat map, and the curves of a few of its dimensions below.

    `table` has numbers (L, D), such as [`position_table`] returns; `dimensions` are those whose curves to draw, counted
    from 0 (`None`: sine and cosine of the fastest frequency and of a slower one). The picture is a .png, .svg or .pdf,
    and one that exists is replaced only if `overwrite` says so; without a `path` none is written. `title` is written
    above it; `None`: the table's size. Returns the figure, which a notebook shows.
    """
    figure_class = figures.import_figure("Pictures of positions")
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    picture_format = figures.check_picture(path, overwrite=overwrite)
    length, size = table.shape
    shown = _choose_dimensions(table) if dimensions is None else list(dimensions)
    wrong = [dimension for dimension in shown if not 0 <= dimension < size]
    if wrong or not shown:
        raise ValueError(f"dimensions is {shown}; they must be from 0 to {size - 1}.")
    figure = figure_class(figsize=(9, 7), dpi=120, layout=ConstrainedLayoutEngine(h_pad=0.1))
    upper, lower = figure.subplots(2, 1, height_ratios=[3, 2])
    limit = float(np.abs(table).max()) or 1.0
    image = upper.imshow(table, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
    upper.set(xlabel="dimension", ylabel="position")
    figure.colorbar(image, ax=upper, label="value added to the embedding", pad=0.01)
    for number, dimension in enumerate(shown):
        color = figures.choose_color(number, len(shown))
        looks: dict[str, Any] = {"color": color, "marker": "." if length <= _FEW else ""}
        lower.plot(range(length), table[:, dimension], label=f"dimension {dimension}", **looks)
    for axis in (upper.yaxis, lower.xaxis):
        axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    lower.set(xlabel="position", ylabel="value", xlim=(-0.5, length - 0.5), ylim=(-1.05 * limit, 1.05 * limit))
    lower.grid(color="0.9")
    lower.spines[["top", "right"]].set_visible(False)
    figure.legend(*lower.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    title = f"Positions: {length} of them, {size} dimensions" if title is None else title
    families = figures.find_families([title], picture_format)
    figure.suptitle(title, fontsize=12, parse_math=False, family=families)
    with figures.ignore_missing_glyphs():
        return figures.save_picture(figure, path, overwrite=overwrite)


def _choose_dimensions(table: npt.NDArray[Any]) -> list[int]:
    """Two sines, each with its cosine: the next dimension where they are interleaved, else that half a table later."""
    size = table.shape[1]
    interleaved = size > 1 and np.allclose(table[:, 0] ** 2 + table[:, 1] ** 2, 1, atol=0.02)
    distance, slower = (1, size // 8 // 2 * 2) if interleaved else (size // 2, size // 16)
    return list(dict.fromkeys([0, distance, slower, slower + distance]))


def attention_masks(
    source_lengths: Sequence[int], target_lengths: Sequence[int]
) -> dict[AttentionKind, npt.NDArray[np.bool_]]:
    """Which token may look at which, in a batch that is padded on the right; the model's own masks.

    Of B sources and targets with so many tokens each; by kind of attention, True where a row may look at a column:
    "encoder" (B, S, S), "decoder" (B, T, T), "cross" (B, T, S).
    """
    config = VanillaTransformerConfig.from_preset("tiny")
    config._attn_implementation = "eager"
    source, target = (
        (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        for lengths in (source_lengths, target_lengths)
    )
    states, queries = (torch.zeros(*mask.shape, 1) for mask in (source, target))
    masks: dict[AttentionKind, Any] = {
        "encoder": create_bidirectional_mask(config, states, source),
        "decoder": create_causal_mask(config, queries, target, past_key_values=None),
        "cross": create_bidirectional_mask(config, queries, source, encoder_hidden_states=states),
    }
    allowed: dict[AttentionKind, npt.NDArray[np.bool_]] = {}
    for kind, (rows, columns) in pair_sides(source, target).items():
        # A mask is added to the scores: 0 where it allows. Where everything is allowed, there may be none.
        allows = True if masks[kind] is None else (masks[kind][:, 0] == 0).numpy()
        allowed[kind] = np.broadcast_to(allows, (*rows.shape, columns.shape[1]))
    return allowed


class _Mask(NamedTuple):
    """A mask, (rows, columns), with the labels of both."""

    allowed: npt.NDArray[np.bool_]
    rows: list[str]
    columns: list[str]
    title: str


def plot_masks(
    source: Labels,
    target: Labels,
    path: str | os.PathLike[str] | None = None,
    *,
    predicted: Labels | None = None,
    pad_token: str = "<pad>",
    title: str | None = None,
    overwrite: bool = False,
) -> "Figure":
    """Draws the masks of a batch: padding, at which nobody looks, and the future, which the decoder must not see.

    `source` and `target` have, for each of B sentences, the tokens that are read, as a person reads them; shorter ones
    are padded with `pad_token`, as in a batch. `predicted` has as many tokens as `target`: those that are predicted
    there (`None`: `target` again). The picture is a .png, .svg or .pdf; one that exists is replaced only if `overwrite`
    says so. Returns the figure.
    """
    figure_class = figures.import_figure("Pictures of masks")
    picture_format = figures.check_picture(path, overwrite=overwrite)
    if len(source) != len(target) or not all([source, *source, *target]):
        raise ValueError(f"{len(source)} sources and {len(target)} targets: there must be as many, each with tokens.")
    predicted = target if predicted is None else predicted
    if list(map(len, predicted)) != list(map(len, target)):
        raise ValueError("predicted must have as many tokens as target, sentence by sentence.")
    title = "Masks" if title is None else title
    tokens = [pad_token, *chain.from_iterable([*source, *target, *predicted])]
    families = figures.find_families([title, *tokens], picture_format)
    masks = _make_masks(source, target, predicted, pad_token)
    note = _MASK_NOTE + ("" if predicted is target else _PREDICTED_NOTE)
    note += f"\n{SPACE_NOTE}" if any(SPACE in token for token in tokens) else ""
    cell, dpi = figures.fit_cells(
        _CELL,
        lambda cell: _lay_out(masks, cell, families)[1:],
        what=f"The masks of {len(source)} sentences of up to {max(map(len, [*source, *target]))} tokens",
        advice="Draw fewer or shorter sentences.",
    )
    lefts, width, height = _lay_out(masks, cell, families)
    figure = figure_class(figsize=(width, height), dpi=dpi)
    text: dict[str, Any] = {"parse_math": False, "family": families}
    for sentence, row in enumerate(masks):
        top = 1 - (sentence * height / len(masks) + _LINE) / height
        for left, mask in zip(lefts, row, strict=True):
            rows, columns = (cell * count for count in mask.allowed.shape)
            axes = figure.add_axes((left / width, top - rows / height, columns / width, rows / height))
            _draw_mask(axes, mask, {**text, "fontsize": _find_font_size(cell)})
    figure.text(0.5, 1, title, ha="center", va="bottom", fontsize=_LARGE, **text)
    figure.text(0.5, -_EDGE / height, note, ha="center", va="top", fontsize=_MIDDLE, **text)
    with figures.ignore_missing_glyphs():
        return figures.save_picture(figure, path, overwrite=overwrite, bbox_inches="tight", pad_inches=_EDGE)


def _make_masks(source: Labels, target: Labels, predicted: Labels, pad_token: str) -> list[list[_Mask]]:
    """For each sentence the masks of the three kinds of attention."""
    allowed = attention_masks([len(tokens) for tokens in source], [len(tokens) for tokens in target])

    def pad(side: Labels) -> list[list[str]]:
        filled = [[*tokens, *[pad_token] * (max(map(len, side)) - len(tokens))] for tokens in side]
        return [list(map(figures.shorten, tokens)) for tokens in filled]

    sources, targets, predictions = map(pad, (source, target, predicted))
    sides = pair_sides(sources, targets) | {"cross": (predictions, sources)}

    def make(kind: AttentionKind, sentence: int) -> _Mask:
        rows, columns = (side[sentence] for side in sides[kind])
        return _Mask(allowed[kind][sentence], rows, columns, f"{_MASK_TITLES[kind]}, sentence {sentence}")

    return [[make(kind, sentence) for kind in _MASK_TITLES] for sentence in range(len(source))]


def _find_font_size(cell: float) -> float:
    """In points, of a label beside a cell of so many inches."""
    return min(cell * 72 * 0.75, _LABEL)


def _lay_out(masks: list[list[_Mask]], cell: float, families: list[str]) -> tuple[list[float], float, float]:
    """Where the masks of each kind begin on the left, and the width and height of all, in inches."""
    lefts, x, font_size = [], 0.0, _find_font_size(cell)
    for column in zip(*masks, strict=True):
        width = cell * column[0].allowed.shape[1]
        beside = (figures.measure([mask.title for mask in column], _MIDDLE, families) - width) / 2  # what a title needs
        labels = figures.measure([label for mask in column for label in mask.rows], font_size, families) + 0.1
        lefts.append(x + max(labels, beside))
        x = lefts[-1] + width + max(beside, 0.0) + _GAP
    labels_below = [label for row in masks for mask in row for label in mask.columns]
    below = figures.measure(labels_below, font_size, families) + 0.1
    highest = max(mask.allowed.shape[0] for mask in masks[0])
    return lefts, x, len(masks) * (_LINE + cell * highest + below)


def _draw_mask(axes: "Axes", mask: _Mask, text: dict[str, Any]) -> None:
    from matplotlib.colors import ListedColormap

    colors = ListedColormap(["white", "#8CBCE0"])
    axes.pcolormesh(mask.allowed, cmap=colors, vmin=0, vmax=1, edgecolors="0.8", linewidth=0.5)
    axes.invert_yaxis()
    axes.set_xticks(np.arange(len(mask.columns)) + 0.5, mask.columns, rotation=90, **text)
    axes.set_yticks(np.arange(len(mask.rows)) + 0.5, mask.rows, **text)
    axes.tick_params(length=0, pad=2)
    axes.spines[:].set_visible(False)
    axes.set_title(mask.title, fontsize=_MIDDLE, pad=3)
