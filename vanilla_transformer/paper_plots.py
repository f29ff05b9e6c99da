"""Pictures of what the paper describes: positions (section 3.5) and masks (section 3.2.3).

Shapes: B sentences, S source tokens, T target tokens, L positions, D d_model.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

from .attention_maps import AttentionKind
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .folders import check_new_file
from .pictures import Lettering, choose_color, choose_fonts, find_format, import_figure, save_picture
from .positions_vanilla_transformer import SINUSOIDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Labels = Sequence[Sequence[str]]

_PAD = "<pad>"
_CELL = 0.22  # inches of a token in a mask
_LEAST_WIDTH = 2.8  # inches of a mask, for its title
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
        lower.plot(range(length), table[:, dimension], color=color, label=f"dimension {dimension}")
    lower.set(xlabel="position", ylabel="value", xlim=(0, max(length - 1, 1)), ylim=(-1.05 * limit, 1.05 * limit))
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


def plot_masks(
    source: Labels,
    target: Labels,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    overwrite: bool = False,
) -> None:
    """Draws the masks of a batch: padding, at which nobody looks, and the future, which the decoder must not see.

    Args:
        source: The tokens of each source, as a person reads them, B lists; shorter ones are padded as in a batch.
        target: The tokens that the decoder is fed with each, B lists.
        path: The picture to write, as .png, .svg or .pdf.
        title: Written above the picture.
        overwrite: Whether an existing file may be replaced.

    Raises:
        FileExistsError: If the file exists and must not be replaced.
        ImportError: If matplotlib is not installed.
        OSError: If the file cannot be written.
        ValueError: If there are not as many targets as sources, one has no tokens, or the name has another ending.
    """
    figure_class = import_figure("Pictures of masks")
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    picture_format = find_format(path)
    check_new_file(path, overwrite=overwrite)
    if len(source) != len(target) or not all([source, *source, *target]):
        raise ValueError(f"{len(source)} sources and {len(target)} targets: there must be as many, each with tokens.")
    masks = attention_masks([len(tokens) for tokens in source], [len(tokens) for tokens in target])
    title = "Masks: blue cells may be looked at" if title is None else title
    lettering = choose_fonts([title, *(token for tokens in [*source, *target] for token in tokens)])
    if picture_format == "svg":
        lettering = Lettering(lettering.families, frozenset())
    lettering.warn()
    sources, targets = (
        [[*map(lettering.show, tokens), *[_PAD] * (max(map(len, side)) - len(tokens))] for tokens in side]
        for side in (source, target)
    )
    widths = [max(1.2 + _CELL * len(side[0]), _LEAST_WIDTH) for side in (sources, targets, sources)]
    height = 0.5 + len(source) * (1.2 + _CELL * max(len(sources[0]), len(targets[0])))
    figure = figure_class(figsize=(sum(widths), height), dpi=120, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    grid = figure.subplots(len(source), 3, squeeze=False, width_ratios=widths)
    for row, axes in enumerate(grid):
        sides = {"encoder": (sources, sources), "decoder": (targets, targets), "cross": (targets, sources)}
        for cell, (kind, name) in zip(axes, _MASK_TITLES.items(), strict=True):
            rows, columns = sides[kind]
            _draw_mask(cell, masks[kind][row], rows[row], columns[row], lettering.families)
            cell.set_title(f"{name}, sentence {row}", fontsize=9)
    figure.suptitle(lettering.show(title), fontsize=12, parse_math=False, family=lettering.families)
    save_picture(figure, path, overwrite=overwrite)


def _draw_mask(
    axes: "Axes", mask: npt.NDArray[np.bool_], rows: Sequence[str], columns: Sequence[str], families: list[str]
) -> None:
    from matplotlib.colors import ListedColormap

    text: dict[str, Any] = {"fontsize": 8, "parse_math": False, "family": families}
    axes.pcolormesh(mask, cmap=ListedColormap(["white", "#8CBCE0"]), vmin=0, vmax=1, edgecolors="0.8", linewidth=0.5)
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.set_xticks(np.arange(len(columns)) + 0.5, columns, rotation=90, **text)
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows, **text)
    axes.tick_params(length=0, pad=2)
    axes.spines[:].set_visible(False)


__all__ = ["attention_masks", "plot_masks", "plot_positions", "position_table"]
