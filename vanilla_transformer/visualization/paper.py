"""Pictures of what the paper describes: positions (section 3.5) and masks (section 3.2.3).

Shapes: B sentences, S source tokens, T target tokens, L positions, D d_model.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from vanilla_transformer.files import check_new_file
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.positions_vanilla_transformer import SINUSOIDS

from .attention import AttentionKind
from .figures import (
    Lettering,
    choose_color,
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
    from matplotlib.axes import Axes

Labels = Sequence[Sequence[str]]

_MASK_NOTE = (
    "Each row is a token that looks, each column one that is looked at: blue if it may be, white if it is masked."
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
    """Returns what is added to the embeddings of the tokens: a row of numbers for each position.

    Args:
        model: A model, whose encoder has a table of positions, or a configuration with sinusoids.
        length: How many positions; `None`: 100, or as many as there are.

    Returns:
        (L, D), the first row being that of the first token.

    Raises:
        ValueError: If there is no such table, or it is shorter.
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
    table = _find_table(model)
    if length is not None and length > len(table):
        raise ValueError(f"length is {length}; the model's table has {len(table)} positions.")
    return table[: length or 100]


def _find_table(model: PreTrainedModel) -> npt.NDArray[Any]:
    encoder: Any = model.get_encoder()
    positions = getattr(encoder, "embed_positions", None)
    weight = getattr(positions, "weight", getattr(positions, "weights", None))
    if not isinstance(weight, torch.Tensor):
        raise ValueError(f"{type(model).__name__} has no table of positions (embed_positions) in its encoder.")
    return weight.detach().float().cpu().numpy()[getattr(positions, "offset", 0) :]


def plot_positions(
    table: npt.NDArray[Any],
    path: str | os.PathLike[str],
    *,
    dimensions: Sequence[int] | None = None,
    title: str | None = None,
    overwrite: bool = False,
) -> None:
    """Draws a table of positions as a heat map, and the curves of a few of its dimensions below.

    Args:
        table: Numbers (L, D), such as [`position_table`] returns.
        path: The picture to write, as .png, .svg or .pdf.
        dimensions: Whose curves to draw, counted from 0. `None`: four, from the fastest to slower ones.
        title: Written above the picture. `None`: the table's size.
        overwrite: Whether an existing file may be replaced.

    Raises:
        FileExistsError: If the file exists and must not be replaced.
        ImportError: If matplotlib is not installed.
        OSError: If the file cannot be written.
        ValueError: If there is no such dimension, or the name has another ending.
    """
    figure_class = import_figure("Pictures of positions")
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    find_format(path)
    check_new_file(path, overwrite=overwrite)
    length, size = table.shape
    shown = list(dict.fromkeys([0, size // 16, size // 8, size // 4])) if dimensions is None else list(dimensions)
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
        color = choose_color(number, len(shown))
        looks: dict[str, Any] = {"color": color, "marker": "." if length <= _FEW else ""}
        lower.plot(range(length), table[:, dimension], label=f"dimension {dimension}", **looks)
    for axis in (upper.yaxis, lower.xaxis):
        axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    lower.set(xlabel="position", ylabel="value", xlim=(-0.5, length - 0.5), ylim=(-1.05 * limit, 1.05 * limit))
    lower.grid(color="0.9")
    lower.spines[["top", "right"]].set_visible(False)
    figure.legend(*lower.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    default = f"Positions: {length} of them, {size} dimensions"
    figure.suptitle(default if title is None else title, fontsize=12, parse_math=False)
    save_picture(figure, path, overwrite=overwrite)


def attention_masks(
    source_lengths: Sequence[int], target_lengths: Sequence[int]
) -> dict[AttentionKind, npt.NDArray[np.bool_]]:
    """Returns which token may look at which, in a batch that is padded on the right; the model's own masks.

    Args:
        source_lengths: Tokens of each source, B of them.
        target_lengths: Tokens of each target, as many.

    Returns:
        By kind of attention, true where a row may look at a column: "encoder" (B, S, S), "decoder" (B, T, T), "cross"
        (B, T, S).
    """
    config = VanillaTransformerConfig.from_preset("tiny")
    config._attn_implementation = "eager"
    source, target = (
        (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
        for lengths in (source_lengths, target_lengths)
    )
    states, queries = (torch.zeros(*mask.shape, 1) for mask in (source, target))
    common: dict[str, Any] = {"config": config}
    masks: dict[AttentionKind, Any] = {
        "encoder": create_bidirectional_mask(inputs_embeds=states, attention_mask=source, **common),
        "decoder": create_causal_mask(inputs_embeds=queries, attention_mask=target, past_key_values=None, **common),
        "cross": create_bidirectional_mask(
            inputs_embeds=queries, attention_mask=source, encoder_hidden_states=states, **common
        ),
    }
    sizes = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
    return {
        # A mask is added to the scores: 0 where it allows. Where everything is allowed, there may be none.
        kind: np.broadcast_to(
            True if mask is None else (mask[:, 0] == 0).numpy(), (*sizes[kind][0].shape, sizes[kind][1].shape[1])
        )
        for kind, mask in masks.items()
    }


class _Masks(NamedTuple):
    """What is to be drawn: for each sentence and kind of attention a mask, (rows, columns), with the labels of both."""

    masks: list[list[npt.NDArray[np.bool_]]]
    rows: list[list[list[str]]]
    columns: list[list[list[str]]]
    titles: list[list[str]]
    title: str
    families: list[str]


@dataclass(frozen=True)
class _MaskLayout:
    """Where everything is, in inches; each kind of attention has a column of masks, each sentence a row."""

    cell: float
    lefts: tuple[float, ...]  # of the masks of each kind
    width: float
    row_height: float
    height: float

    @property
    def font_size(self) -> float:
        """In points."""
        return min(self.cell * 72 * 0.75, _LABEL)

    def place(self, sentence: int, kind: int, size: tuple[int, ...]) -> tuple[float, float, float, float]:
        """Left, bottom, width and height of a mask, as shares of the figure."""
        height, width = self.cell * size[0], self.cell * size[1]
        top = self.height - _EDGE - 2 * _LINE - sentence * self.row_height
        return self.lefts[kind] / self.width, (top - height) / self.height, width / self.width, height / self.height


def plot_masks(
    source: Labels,
    target: Labels,
    path: str | os.PathLike[str],
    *,
    pad_token: str = "<pad>",
    title: str | None = None,
    overwrite: bool = False,
) -> None:
    """Draws the masks of a batch: padding, at which nobody looks, and the future, which the decoder must not see.

    Args:
        source: The tokens of each source, as a person reads them, B lists; shorter ones are padded as in a batch.
        target: The tokens that the decoder is fed with each, B lists.
        path: The picture to write, as .png, .svg or .pdf.
        pad_token: How padding is called.
        title: Written above the picture.
        overwrite: Whether an existing file may be replaced.

    Raises:
        FileExistsError: If the file exists and must not be replaced.
        ImportError: If matplotlib is not installed.
        OSError: If the file cannot be written.
        ValueError: If there are not as many targets as sources, one has no tokens, the picture would be too large to be
            read, or the name has another ending.
    """
    figure_class = import_figure("Pictures of masks")
    picture_format = find_format(path)
    check_new_file(path, overwrite=overwrite)
    if len(source) != len(target) or not all([source, *source, *target]):
        raise ValueError(f"{len(source)} sources and {len(target)} targets: there must be as many, each with tokens.")
    title = "Masks" if title is None else title
    lettering = choose_fonts([title, pad_token, *(token for tokens in [*source, *target] for token in tokens)])
    if picture_format == "svg":
        lettering = Lettering(lettering.families, frozenset())
    lettering.warn()
    content = _make_masks(source, target, pad_token, title, lettering)
    layout = fit_cells(
        _CELL,
        partial(_lay_out_masks, content),
        what=f"The masks of {len(source)} sentences of up to {max(map(len, [*source, *target]))} tokens",
        advice="Draw fewer or shorter sentences.",
    )
    figure = figure_class(figsize=(layout.width, layout.height), dpi=choose_dpi(layout))
    for sentence, masks in enumerate(content.masks):
        for kind, mask in enumerate(masks):
            axes = figure.add_axes(layout.place(sentence, kind, mask.shape))
            labels = content.rows[sentence][kind], content.columns[sentence][kind]
            _draw_mask(axes, mask, *labels, layout.font_size, content.families)
            axes.set_title(content.titles[sentence][kind], fontsize=_MIDDLE, pad=3)
    text: dict[str, Any] = {"ha": "center", "parse_math": False, "family": content.families}
    figure.text(0.5, 1 - _EDGE / layout.height, content.title, va="top", fontsize=_LARGE, **text)
    figure.text(0.5, _EDGE / layout.height, _MASK_NOTE, va="bottom", fontsize=_MIDDLE, **text)
    save_picture(figure, path, overwrite=overwrite)


def _make_masks(source: Labels, target: Labels, pad_token: str, title: str, lettering: Lettering) -> _Masks:
    masks = attention_masks([len(tokens) for tokens in source], [len(tokens) for tokens in target])
    sources, targets = (
        [
            [lettering.show(shorten(token)) for token in [*tokens, *[pad_token] * (max(map(len, side)) - len(tokens))]]
            for tokens in side
        ]
        for side in (source, target)
    )
    sides = {"encoder": (sources, sources), "decoder": (targets, targets), "cross": (targets, sources)}
    sentences = range(len(source))
    return _Masks(
        masks=[[masks[kind][sentence] for kind in _MASK_TITLES] for sentence in sentences],
        rows=[[sides[kind][0][sentence] for kind in _MASK_TITLES] for sentence in sentences],
        columns=[[sides[kind][1][sentence] for kind in _MASK_TITLES] for sentence in sentences],
        titles=[[f"{name}, sentence {sentence}" for name in _MASK_TITLES.values()] for sentence in sentences],
        title=lettering.show(title),
        families=lettering.families,
    )


def _lay_out_masks(content: _Masks, cell: float) -> _MaskLayout:
    layout = _MaskLayout(cell=cell, lefts=(), width=0.0, row_height=0.0, height=0.0)
    lefts, x = [], _EDGE
    for kind in range(len(_MASK_TITLES)):
        labels = [label for rows in content.rows for label in rows[kind]]
        width = cell * content.masks[0][kind].shape[1]
        beside = (measure([titles[kind] for titles in content.titles], _MIDDLE, content.families) - width) / 2
        lefts.append(x + max(measure(labels, layout.font_size, content.families) + 0.1, beside))
        x = lefts[-1] + width + max(beside, 0.0) + _GAP
    needed = max(measure([content.title], _LARGE, content.families), measure([_MASK_NOTE], _MIDDLE, content.families))
    more = max(needed + 2 * _EDGE - x, 0.0)
    below = measure(
        [label for columns in content.columns for label in chain(*columns)], layout.font_size, content.families
    )
    row_height = _LINE + cell * max(mask.shape[0] for mask in content.masks[0]) + below + 0.1
    return replace(
        layout,
        lefts=tuple(left + more / 2 for left in lefts),
        width=x + more,
        row_height=row_height,
        height=2 * _EDGE + 2 * _LINE + len(content.masks) * row_height,
    )


def _draw_mask(
    axes: "Axes",
    mask: npt.NDArray[np.bool_],
    rows: Sequence[str],
    columns: Sequence[str],
    font_size: float,
    families: list[str],
) -> None:
    from matplotlib.colors import ListedColormap

    text: dict[str, Any] = {"fontsize": font_size, "parse_math": False, "family": families}
    axes.pcolormesh(mask, cmap=ListedColormap(["white", "#8CBCE0"]), vmin=0, vmax=1, edgecolors="0.8", linewidth=0.5)
    axes.invert_yaxis()
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=90, **text)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows, **text)
    axes.tick_params(length=0, pad=2)
    axes.spines[:].set_visible(False)
