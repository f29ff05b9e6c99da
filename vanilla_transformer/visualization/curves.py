"""Pictures of a training: the learning curves of one run, or of several in one picture."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from .figures import (
    check_picture,
    choose_color,
    find_families,
    ignore_missing_glyphs,
    import_figure,
    plain,
    save_picture,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LogHistory = Sequence[Mapping[str, Any]]

_LineStyle = Literal["-", "--", ":", "-."]
_LINE_STYLES: tuple[_LineStyle, ...] = ("-", "--", ":", "-.")
_WIDE = 10  # times the lowest value: a wider panel may be logarithmic
_MOST_MARKERS = 40  # a curve of more points is drawn without markers
_MOST_POINTS = 400  # a noisy curve of more points is drawn pale, and its moving average over it


@dataclass(frozen=True)
class _Panel:
    """A pair of axes, with the label of each curve by the name (a regular expression) under which it is logged."""

    title: str
    unit: str
    names: Mapping[str, str]
    scale: Literal["linear", "zero", "log"] = "linear"  # from zero; logarithmic if values differ enough
    factor: float = 1.0
    is_noisy: bool = True


# With several validation sets the Trainer logs eval_<set>_loss and so on.
_EVAL, _SIDES = "eval_(?:(.+)_)?", ("source", "target")
_PANELS = (
    _Panel("Loss", "loss (nats per target token)", {"loss": "training", _EVAL + "loss": "validation"}),
    _Panel("Validation perplexity", "perplexity (per target token)", {_EVAL + "perplexity": "perplexity"}, "log"),
    _Panel("Validation BLEU and chrF", "score (0 to 100)", {_EVAL + "bleu": "BLEU", _EVAL + "chrf": "chrF"}),
    _Panel("Validation ROUGE", "score (0 to 100)", {f"{_EVAL}rouge{kind}": f"ROUGE-{kind}" for kind in "12L"}),
    _Panel("Learning rate", "learning rate (per update)", {"learning_rate": "learning rate"}, "zero", 1.0, False),
    _Panel("Gradient norm", "L2 norm (before clipping)", {"grad_norm": "gradient norm"}, "log"),
    _Panel("Speed", "tokens per second (no padding)", {f"{side}_tokens_per_second": side for side in _SIDES}, "zero"),
    _Panel("Padding", "padding (% of batch)", {"padding_share": "padding"}, "zero", 100.0),
)


class _Key(NamedTuple):
    """Which curve; sorts in the order of drawing."""

    panel: int
    is_validation: bool
    label: str


_Curve = tuple[np.ndarray, np.ndarray]  # steps, and values: what is not finite is NaN, which interrupts the line
_Curves = Mapping[_Key, _Curve]


class _Line(NamedTuple):
    key: _Key
    curve: _Curve
    color: str
    style: _LineStyle
    best_step: int | None


def plot_learning_curves(
    log_history: LogHistory,
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
    best_step: int | None = None,
    overwrite: bool = False,
) -> "Figure":
    """Draws what a Trainer logged: loss, perplexity, scores, learning rate, gradient norm, speed and padding.

    Works without a display and in any thread. Evaluations after the training's end are left out, since they may be of
    another model, the best one. A value that is not finite leaves a gap.

    `log_history` is a Trainer's `state.log_history`. `best_step`, that of the best checkpoint, is marked. The picture
    is a .png, .svg or .pdf, and one that exists is replaced, in one go, only if `overwrite` says so; without a `path`
    none is written. Returns the figure.
    """
    best_steps = None if best_step is None else {"": best_step}
    return compare_learning_curves({"": log_history}, path, title=title, best_steps=best_steps, overwrite=overwrite)


def compare_learning_curves(
    log_histories: Mapping[str, LogHistory],
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
    best_steps: Mapping[str, int] | None = None,
    overwrite: bool = False,
) -> "Figure":
    """Draws the learning curves of several runs, by their names, into one picture, each run in a colour of its own.

    The logs and the picture are those of [`plot_learning_curves`]; `best_steps` are marked, by the name of the run.
    """
    if not log_histories:
        raise ValueError("log_histories is empty; there must be at least one run.")
    picture_format = check_picture(path, overwrite=overwrite)
    runs = {name: _read_curves(history) for name, history in log_histories.items()}
    if empty := [f" of {name}" if name else "" for name, curves in runs.items() if not curves]:
        raise ValueError(f"The log{empty[0]} has nothing to draw: no loss, no score, no speed.")
    known_steps = {run: step for run, step in (best_steps or {}).items() if run in runs}
    labels = [key.label for curves in runs.values() for key in curves]
    figure_class = import_figure("Learning curves")
    families = find_families([*runs, *labels, title or ""], picture_format)
    figure = _make_figure(figure_class, families, runs, title=title, best_steps=known_steps)
    with ignore_missing_glyphs():
        return save_picture(figure, path, overwrite=overwrite)


def load_trainer_state(run: str | os.PathLike[str]) -> TrainerState:
    """The state of a training, which may still be going on: of a run's output folder and its checkpoints the furthest.

    `run` is an output folder, one of its checkpoints, or a `trainer_state.json`.
    """
    found = Path(run)
    folders = [found, *found.glob("checkpoint-*")]
    paths = [found] if found.is_file() else [folder / TRAINER_STATE_NAME for folder in folders]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise FileNotFoundError(f"{found} is not, and does not hold, the {TRAINER_STATE_NAME} of a training.")
    states, problems = [], []
    for path in paths:
        try:
            states.append(_read_state(path))
        except (TypeError, ValueError) as error:
            problems.append(f"{path} cannot be read as the state of a Trainer: {error}")
    if not states:
        raise ValueError("\n".join(problems))
    # Of those that are as far, the first is the output folder's own.
    return max(states, key=lambda state: state.global_step)


def _read_state(path: Path) -> TrainerState:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("log_history"), list):
        raise ValueError("it has no log_history.")
    # Another version of transformers may have written more.
    known = {item.name for item in fields(TrainerState)}
    return TrainerState(**{name: value for name, value in content.items() if name in known})


def _read_curves(log_history: LogHistory) -> _Curves:
    """Finds the curves in a log; of several values for one step, the first is taken."""
    points: dict[_Key, dict[int, float]] = {}
    for position, entry in enumerate(log_history):
        if "step" not in entry:
            raise ValueError(f"log_history[{position}] has no step: {dict(entry)}.")
        if "train_loss" in entry:
            break  # the summary, with which a training ends
        for name, value in entry.items():
            key = _find_place(name)
            if key is not None and isinstance(value, int | float):
                scaled = value * _PANELS[key.panel].factor
                points.setdefault(key, {}).setdefault(entry["step"], scaled if math.isfinite(scaled) else math.nan)
    drawable = {key: values for key, values in points.items() if not all(map(math.isnan, values.values()))}
    return {key: (np.array(list(found)), np.array(list(found.values()))) for key, found in drawable.items()}


def _find_place(name: str) -> _Key | None:
    for number, panel in enumerate(_PANELS):
        for pattern, label in panel.names.items():
            if match := re.fullmatch(pattern, name):
                dataset = match.group(1) if match.re.groups else None
                return _Key(number, name.startswith("eval_"), f"{label}, {dataset}" if dataset else label)
    return None


def _style_lines(runs: Mapping[str, _Curves], best_steps: Mapping[str, int]) -> list[_Line]:
    """Of one run each curve of a panel has its colour; of several, each run has one, and each curve its line style."""
    keys = sorted({key for curves in runs.values() for key in curves})
    lines: list[_Line] = []
    style: _LineStyle
    for row, (run, curves) in enumerate(runs.items()):
        for key, curve in curves.items():
            neighbours = [other for other in keys if other.panel == key.panel]
            color, style = choose_color(neighbours.index(key), len(neighbours)), "-"
            if len(runs) > 1:
                color = choose_color(row, len(runs))
                style = _LINE_STYLES[neighbours.index(key) % len(_LINE_STYLES)]
            lines.append(_Line(key, curve, color, style, best_steps.get(run)))
    return sorted(lines, key=lambda line: line.key)


def _make_figure(
    figure_class: "type[Figure]",
    families: list[str],
    runs: Mapping[str, _Curves],
    *,
    title: str | None,
    best_steps: Mapping[str, int],
) -> "Figure":
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    lines = _style_lines(runs, best_steps)
    panels = sorted({line.key.panel for line in lines})
    rows = 1 if len(panels) <= 3 else 2
    columns = math.ceil(len(panels) / rows)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    # Not by pyplot, which wants a display, keeps every figure until it is closed, and is not for threads.
    figure = figure_class(figsize=(4.4 * columns, 3.2 * rows + 0.6), dpi=120, layout=layout)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    last_step = max(int(line.curve[0][-1]) for line in lines)
    for axes, number in zip(grid, panels, strict=False):
        here = [line for line in lines if line.key.panel == number]
        for line in here:
            _draw_line(axes, line)
        _finish_axes(axes, _PANELS[number], here, last_step)
        _add_legend(axes, families, _PANELS[number], here, several_runs=len(runs) > 1)
    for axes in grid[len(panels) :]:
        axes.remove()
    _add_figure_legend(figure, families, list(runs), best_steps)
    if title:
        figure.suptitle(plain(title), fontsize=13, family=families)
    return figure


def _draw_line(axes: "Axes", line: _Line) -> None:
    steps, values = line.curve
    marker = "." if len(steps) <= _MOST_MARKERS else ""
    looks: dict[str, Any] = {"color": line.color, "linestyle": line.style, "linewidth": 1.5, "marker": marker}
    if len(steps) > _MOST_POINTS and _PANELS[line.key.panel].is_noisy:
        axes.plot(steps, values, color=line.color, linewidth=0.6, alpha=0.25)
        values = _moving_average(values, width=len(steps) // 50)
    axes.plot(steps, values, **looks)
    if line.best_step is not None and line.key.is_validation:
        best = steps == line.best_step
        axes.plot(steps[best], values[best], "*", color=line.color, markeredgecolor="black", markersize=12, zorder=3)


def _moving_average(values: np.ndarray, width: int) -> np.ndarray:
    """The mean of the finite ones of `width` values around each; NaN stays NaN."""
    window = np.ones(width)
    finite = np.isfinite(values)
    sums = np.convolve(np.where(finite, values, 0.0), window, mode="same")
    counts = np.convolve(finite, window, mode="same")
    return np.where(finite, sums / np.maximum(counts, 1), np.nan)


def _finish_axes(axes: "Axes", panel: _Panel, lines: list[_Line], last_step: int) -> None:
    axes.set_title(panel.title, fontsize=11)
    axes.set_xlabel("training step (updates)", fontsize=9)
    axes.set_ylabel(panel.unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, max(last_step, 1) * 1.02)
    axes.locator_params(axis="x", nbins=6, integer=True)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    from matplotlib.ticker import LogLocator

    values = np.concatenate([line.curve[1] for line in lines])
    lowest, highest = np.nanmin(values), np.nanmax(values)
    if panel.scale == "zero":
        axes.set_ylim(0, 1.05 * highest if highest > 0 else 1)
    elif panel.scale == "log" and lowest > 0 and highest > _WIDE * lowest:
        axes.set_yscale("log", subs=[])
        axes.yaxis.set_major_locator(LogLocator(subs=[1, 2, 5] if highest < 1e3 * lowest else [1]))
    axes.yaxis.set_major_formatter("{x:,.6g}")


def _add_legend(axes: "Axes", families: list[str], panel: _Panel, lines: list[_Line], *, several_runs: bool) -> None:
    """Names a panel's curves, where it has several or could have others."""
    from matplotlib.lines import Line2D

    looks = {line.key: (line.style, "0.3" if several_runs else line.color) for line in lines}
    if max(len(looks), len(panel.names)) > 1:
        handles = [Line2D([], [], linestyle=style, color=color) for style, color in looks.values()]
        font: Any = {"family": families, "size": 8}
        axes.legend(handles, [plain(key.label) for key in looks], prop=font, frameon=False)


def _add_figure_legend(figure: "Figure", families: list[str], runs: list[str], best_steps: Mapping[str, int]) -> None:
    """Says which run has which colour, and what the stars are."""
    from matplotlib.lines import Line2D

    several = runs if len(runs) > 1 else []
    colors = [choose_color(row, len(several)) for row in range(len(several))]
    entries = [
        (Line2D([], [], color=color, linewidth=2), plain(run)) for color, run in zip(colors, several, strict=True)
    ]
    if best_steps:
        step = f" (step {best_steps[runs[0]]:,})" if len(runs) == 1 else ""
        star = Line2D([], [], color="white", marker="*", markeredgecolor="black", markersize=11, linestyle="")
        entries.append((star, f"best checkpoint{step}"))
    if entries:
        handles, labels = zip(*entries, strict=True)
        width = 0.6 + 0.09 * max(map(len, labels))  # inches that an entry takes
        columns = max(1, min(len(entries), int(figure.get_figwidth() / width)))
        font: Any = {"family": families, "size": 9}
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, prop=font, frameon=False)
