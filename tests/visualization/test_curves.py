"""Learning curves: the figure's lines checked against the log, the files, and scripts/plot_learning_curves.py."""

import json
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.lines import Line2D

from vanilla_transformer.visualization import compare_learning_curves, load_trainer_state, plot_learning_curves

Log = list[dict[str, Any]]


def make_log(steps: int = 30, *, loss: float = 5.0) -> Log:
    """What a `TranslationTrainer` logs, with an evaluation every ten steps and one after the training's end."""
    log: Log = []
    for step in range(1, steps + 1):
        training = {"loss": loss + 3 / step, "grad_norm": 1 + 1 / step, "learning_rate": 1e-4 * step}
        speed = {"source_tokens_per_second": 2000.0 + step, "target_tokens_per_second": 2200.0 - step}
        log.append({**training, **speed, "padding_share": 0.03 + 0.001 * (step % 3), "step": step})
        if step % 10 == 0:
            evaluation = {"eval_loss": loss - step / 100, "eval_bleu": float(step), "eval_chrf": 20.0 + step}
            evaluation["eval_perplexity"] = math.exp(evaluation["eval_loss"])
            log.append({**evaluation, "eval_runtime": 1.5, "epoch": step / 10, "step": step})
    log.append({"train_runtime": 9.0, "train_loss": 5.5, "epoch": steps / 10, "step": steps})
    log.append({"eval_loss": 77.0, "eval_bleu": 88.0, "epoch": steps / 10, "step": steps})
    return log


def find_axes(figure: Figure, title: str) -> Axes:
    (axes,) = [axes for axes in figure.axes if axes.get_title() == title]
    return axes


def points(log: Log, name: str, factor: float = 1.0) -> list[tuple[float, float]]:
    return [(entry["step"], entry[name] * factor) for entry in log if name in entry]


def drawn(line: Line2D) -> list[tuple[float, float]]:
    return [(float(step), float(value)) for step, value in np.asarray(line.get_xydata())]


def legend_texts(legend: Any) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def test_every_panel_shows_what_was_logged() -> None:
    log = make_log()
    figure = plot_learning_curves(log, title="a run")
    during = log[:-1]
    expected = {
        "Loss": [points(during, "loss"), points(during, "eval_loss")],
        "Validation perplexity": [points(during, "eval_perplexity")],
        "Validation BLEU and chrF": [points(during, "eval_bleu"), points(during, "eval_chrf")],
        "Learning rate": [points(during, "learning_rate")],
        "Gradient norm": [points(during, "grad_norm")],
        "Speed": [points(during, "source_tokens_per_second"), points(during, "target_tokens_per_second")],
        "Padding": [points(during, "padding_share", 100.0)],
    }
    assert [axes.get_title() for axes in figure.axes] == list(expected)
    for axes in figure.axes:
        assert [drawn(line) for line in axes.lines] == expected[axes.get_title()]
        assert axes.get_xlabel() == "training step (updates)"
        assert axes.get_ylabel()
    assert legend_texts(find_axes(figure, "Loss").get_legend()) == ["training", "validation"]
    assert figure.get_suptitle() == "a run"


def test_a_curve_is_named_where_its_panel_could_have_another() -> None:
    log: Log = [{"eval_chrf": 40.0, "eval_perplexity": 9.0, "target_tokens_per_second": 1000.0, "step": 5}]
    for runs in ({"run": log}, {"run": log, "other": log}):
        legends = {axes.get_title(): axes.get_legend() for axes in compare_learning_curves(runs).axes}
        assert legend_texts(legends["Validation BLEU and chrF"]) == ["chrF"]
        assert legend_texts(legends["Speed"]) == ["target"]
        assert legends["Validation perplexity"] is None


values = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf]))
entries = st.fixed_dictionaries(
    {"step": st.integers(0, 20)}, optional={"loss": values, "eval_loss": values, "eval_fr_loss": values}
)


@settings(max_examples=25)
@given(log=st.lists(entries, max_size=12))
def test_gaps_and_repeated_steps(log: Log) -> None:
    expected = {}
    for name in ("loss", "eval_loss", "eval_fr_loss"):
        first = {entry["step"]: entry[name] for entry in reversed(log) if name in entry}
        if any(map(math.isfinite, first.values())):
            expected[name] = {step: value if math.isfinite(value) else math.nan for step, value in first.items()}
    if not expected:
        with pytest.raises(ValueError, match="nothing to draw"):
            plot_learning_curves(log)
        return
    lines = plot_learning_curves(log).axes[0].lines
    assert len(lines) == len(expected)
    for line, (name, values) in zip(lines, expected.items(), strict=True):
        np.testing.assert_equal(dict(drawn(line)), values, err_msg=name)


def test_the_best_checkpoint_is_marked_on_the_validation_curves() -> None:
    figure = plot_learning_curves(make_log(), best_step=20)
    lines = [(axes.get_title(), line) for axes in figure.axes for line in axes.lines]
    stars = {(title, *drawn(line)[0]) for title, line in lines if line.get_marker() == "*"}
    scores = {("Validation BLEU and chrF", 20, 20), ("Validation BLEU and chrF", 20, 40)}
    assert stars == {("Loss", 20, 4.8), ("Validation perplexity", 20, math.exp(4.8)), *scores}
    assert legend_texts(figure.legends[0]) == ["best checkpoint (step 20)"]


@pytest.mark.parametrize("count", [2, 3, 12])
def test_runs_have_colours_and_curves_line_styles(count: int) -> None:
    logs = {f"run {number}": make_log(loss=5.0 + number) for number in range(count)}
    figure = compare_learning_curves(logs, best_steps={"run 1": 10})
    axes = find_axes(figure, "Loss")
    curves = [line for line in axes.lines if line.get_marker() != "*"]
    found = {(line.get_color(), line.get_linestyle()): drawn(line) for line in curves}
    assert len(found) == 2 * count
    (legend,) = figure.legends
    assert legend_texts(legend) == [*logs, "best checkpoint"]
    for handle, log in zip(legend.legend_handles, logs.values(), strict=False):
        color = handle.get_color()  # type: ignore[union-attr]
        assert found[color, "-"] == points(log[:-1], "loss")
        assert found[color, "--"] == points(log[:-1], "eval_loss")
    assert sum(line.get_marker() == "*" for line in axes.lines) == 1


@pytest.mark.parametrize(("highest", "scale"), [(9.0, "linear"), (500.0, "log"), (1e6, "log"), (math.inf, "linear")])
def test_wide_ranges_are_logarithmic(highest: float, scale: str) -> None:
    log: Log = [{"eval_perplexity": value, "step": step} for step, value in enumerate([highest, 3.0, 2.0])]
    (axes,) = plot_learning_curves(log).axes
    assert axes.get_yscale() == scale
    bottom, top = axes.get_ylim()
    shown = [label.get_text() for label in axes.get_yticklabels() if bottom <= label.get_position()[1] <= top]
    assert 3 <= len(shown) <= 12
    assert not any("$" in text for text in shown)


def test_long_noisy_curves_get_a_moving_average() -> None:
    generator = np.random.default_rng(0)
    losses = generator.normal(3, 1, size=500)
    losses[100] = math.inf
    log: Log = [{"loss": loss, "learning_rate": 1e-3 * step, "step": step} for step, loss in enumerate(losses, start=1)]
    figure = plot_learning_curves(log)
    pale, average = find_axes(figure, "Loss").lines
    assert pale.get_alpha() is not None
    assert np.isnan(pale.get_ydata()[100])  # type: ignore[index]
    for position in (0, 3, 104, 250, 499):
        window = losses[max(position - 5, 0) : position + 5]
        expected = window[np.isfinite(window)].mean()
        assert average.get_ydata()[position] == pytest.approx(expected)  # type: ignore[index]
    (rate,) = find_axes(figure, "Learning rate").lines
    assert drawn(rate) == points(log, "learning_rate")


@pytest.mark.parametrize("several", [False, True])
def test_nothing_overlaps_or_is_cut_off(several: bool) -> None:
    # Dollar signs: a name that is read as a formula would be an error.
    if several:
        names = [f"_out/a-run-with-rather-a-long-${{name$-{number}" for number in range(5)]
        logs = {name: make_log() for name in names}
        figure = compare_learning_curves(logs, best_steps={names[0]: 10}, title="runs")
    else:
        figure = plot_learning_curves(make_log(), best_step=10, title=r"a run of $\nonsense$")
    figure.draw_without_rendering()
    parts = [axes.get_tightbbox() for axes in figure.axes]
    parts += [legend.get_window_extent() for legend in figure.legends]
    width, height = figure.get_size_inches() * figure.dpi
    for part in parts:
        assert part is not None
        assert 0 <= part.x0 < part.x1 <= width
        assert 0 <= part.y0 < part.y1 <= height
    for one, other in combinations(parts, 2):
        assert not one.overlaps(other)  # type: ignore[union-attr, arg-type]


def test_pictures_made_in_threads_without_pyplot_are_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it fails
    monkeypatch.delenv("DISPLAY", raising=False)
    paths = [tmp_path / f"{number}.png" for number in range(3)]
    log: Log = [{"loss": 1.0 / step, "step": step} for step in range(1, 9)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda path: plot_learning_curves(log, path), paths))
    pictures = [imread(path) for path in paths]
    assert pictures[0].std() > 0
    for picture in pictures[1:]:
        np.testing.assert_array_equal(picture, pictures[0])


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    without_step: Log = [{"loss": 1.0, "step": 1}, {"loss": 1.0}]
    for runs, name, message in (
        ({"other": []}, "curves.png", "The log of other has nothing to draw"),
        ({"it": [{"train_loss": 2.0, "step": 3}, {"eval_loss": 2.0, "step": 3}]}, "curves.png", "nothing to draw"),
        ({"it": without_step}, "curves.png", r"log_history\[1\] has no step"),
        ({"it": make_log()}, "curves.jpg", r"curves\.jpg: .* one of \.png, \.svg, \.pdf"),
        ({"it": make_log()}, "curves", r"one of \.png, \.svg, \.pdf"),
        ({}, "curves.png", "at least one run"),
    ):
        with pytest.raises(ValueError, match=message):
            compare_learning_curves(runs, tmp_path / name)
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_learning_curves([], tmp_path / "curves.png")
    assert not list(tmp_path.iterdir())


def write_state(folder: Path, step: int, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    state = {"global_step": step, "best_global_step": 10, "log_history": make_log(step), **changes}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def test_the_state_that_has_come_furthest_is_read(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_state(run / "checkpoint-30", 30)
    write_state(run / "checkpoint-100", 100)
    assert load_trainer_state(run).global_step == 100
    assert load_trainer_state(run / "checkpoint-30").global_step == 30
    assert load_trainer_state(run / "checkpoint-30" / "trainer_state.json").log_history == make_log(30)
    write_state(run, 100, epoch=7.0, of_a_later_version=True)
    assert load_trainer_state(run).epoch == 7.0
    write_state(run / "checkpoint-120", 120)  # the run was continued
    assert load_trainer_state(run).global_step == 120
    (run / "checkpoint-120" / "trainer_state.json").write_text('{"global_step": 120, "log_')
    assert load_trainer_state(run).global_step == 100
    with pytest.raises(FileNotFoundError, match=r"trainer_state\.json"):
        load_trainer_state(tmp_path)
    for content in ("", "[]", '{"global_step": 3}', '{"log_history": 3}'):
        (tmp_path / "trainer_state.json").write_text(content)
        with pytest.raises(ValueError, match=r"trainer_state\.json cannot be read"):
            load_trainer_state(tmp_path / "trainer_state.json")


@pytest.fixture
def script(main: Callable[[str], Callable[..., None]]) -> Callable[..., None]:
    return partial(main("plot_learning_curves"), "--runs")


def test_the_script_draws_runs(
    script: Callable[..., None], figures: list[Figure], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_state(tmp_path / "a" / "run", 30)
    script(run)
    assert (run / "curves.png").is_file()
    assert f"The picture is in {run / 'curves.png'}" in capsys.readouterr().out
    assert figures[0].get_suptitle() == "run"
    assert legend_texts(figures[0].legends[0]) == ["best checkpoint (step 10)"]
    script(run / "trainer_state.json", "--output_file", tmp_path / "a.svg", "--title", "other")
    assert (tmp_path / "a.svg").is_file()
    assert figures[1].get_suptitle() == "other"
    other, namesake = write_state(tmp_path / "b" / "other", 30), tmp_path / "b" / "run"
    write_state(namesake, 30, best_global_step=None)
    script(run, other, "--output_file", tmp_path / "two.png")
    assert legend_texts(figures[2].legends[0]) == ["run", "other", "best checkpoint"]
    script(run, namesake, other, "--output_file", tmp_path / "three.png")
    assert legend_texts(figures[3].legends[0]) == [*map(str, (run, namesake, other)), "best checkpoint"]
    script(run)  # the run's own picture is drawn again as the training goes on
    script(run, "--output_file", tmp_path / "a.svg", "--title", "again", "--overwrite")
    assert figures[-1].get_suptitle() == "again"


def test_the_script_says_what_is_wrong(script: Callable[..., None], tmp_path: Path, capsys: Any) -> None:
    run = write_state(tmp_path / "run", 30)
    other = write_state(tmp_path / "other", 30)
    picture = tmp_path / "x.png"
    existing = tmp_path / "existing.png"
    existing.write_text("something else")
    for arguments, message in (
        ((run, "--output_file", existing), "existing.png"),
        ((run, other, "--output_file", existing), "--overwrite"),
        ((run, other), "2 runs in one picture need --output_file"),
        ((run, run, "--output_file", picture), "names a run twice"),
        ((tmp_path / "nothing",), "trainer_state.json of a training"),
        ((run, "--output_file", tmp_path / "x.gif"), "x.gif: the name of a picture must end in"),
    ):
        with pytest.raises(SystemExit) as end:
            script(*arguments)
        assert end.value.code == 2
        assert message in capsys.readouterr().err
    assert not picture.exists()
    assert existing.read_text() == "something else"
