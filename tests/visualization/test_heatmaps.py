"""Pictures of attention, positions and masks: what is drawn checked against the numbers, and that it fits."""

import re
from collections.abc import Iterator
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from library_models import MODELS, make_fsmt, make_m2m100
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from tiny_vanilla import make_config, make_model

from vanilla_transformer.visualization.attention import KINDS, AttentionMap
from vanilla_transformer.visualization.curves import compare_learning_curves, plot_learning_curves
from vanilla_transformer.visualization.heatmaps import plot_attention
from vanilla_transformer.visualization.page import save_attention_page
from vanilla_transformer.visualization.paper import attention_masks, plot_masks, plot_positions, position_table

SIGNATURES = {".png": b"\x89PNG\r\n", ".svg": b"<?xml", ".pdf": b"%PDF"}
AWKWARD = ("$a$", "▁<b>&", "_x", "猫", "\U0010fffd", "</script>", "</s>")


def make_map(
    layers: int = 2, heads: int = 3, source: Any = ("a", "▁b", "</s>"), target: Any = ("x", "</s>")
) -> AttentionMap:
    generator = np.random.default_rng(0)

    def weights(rows: int, columns: int) -> Any:
        return generator.dirichlet(np.full(columns, 0.3), size=(layers, heads, rows)).astype(np.float32)

    sizes = len(source), len(target)
    maps = weights(sizes[0], sizes[0]), weights(sizes[1], sizes[1]), weights(sizes[1], sizes[0])
    source_words, target_words = (tuple((index,) for index in range(size)) for size in sizes)
    tokens = tuple(source), tuple(target), ("<s>", *target[:-1])
    return AttentionMap(*tokens, *maps, source_words, target_words, " ".join(source), " ".join(target))


def maps_of(figure: Figure) -> dict[str, Any]:
    """The numbers of each heat map, by its title."""
    return {axes.get_title(): np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images}


def labels_of(axes: Axes) -> tuple[list[str], list[str]]:
    return [t.get_text() for t in axes.get_yticklabels()], [t.get_text() for t in axes.get_xticklabels()]


@pytest.mark.parametrize("kind", KINDS)
def test_every_head_is_drawn(kind: Any) -> None:
    attention = make_map()
    figure = plot_attention(attention, kind=kind)
    weights, rows, columns = attention.select(kind)
    found = maps_of(figure)
    assert list(found) == [f"layer {layer}, head {head}" for layer in range(2) for head in range(3)]
    for (layer, head), values in zip(product(range(2), range(3)), found.values(), strict=True):
        np.testing.assert_array_equal(values, weights[layer, head])
    # The outer ones have labels.
    assert labels_of(figure.axes[3]) == (list(rows), list(columns))
    assert labels_of(figure.axes[1]) == ([], [])


def test_some_heads_and_means() -> None:
    attention = make_map(layers=3)
    cross = attention.cross
    some = cross[[0, 2]][:, [1, 2]].mean(axis=(0, 1))
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"layers": [-1], "heads": [1]}, {"layer 2, head 1": cross[2, 1]}),
        ({"average": "all"}, {"mean of all layers and heads": cross.mean(axis=(0, 1))}),
        ({"average": "all", "layers": [0, 2], "heads": [1, 2]}, {"mean of layers 0, 2 and heads 1, 2": some}),
        ({"average": "heads"}, {f"layer {layer}, mean of heads": cross[layer].mean(axis=0) for layer in range(3)}),
        ({"average": "heads", "layers": [1], "heads": [0]}, {"layer 1, mean of heads 0": cross[1, 0]}),
        ({"average": "all", "heads": [2, 1, 0]}, {"mean of all layers and heads 2, 1, 0": cross.mean(axis=(0, 1))}),
        ({"average": "all", "layers": range(3)}, {"mean of layers 0-2 and heads": cross.mean(axis=(0, 1))}),
    ]
    for options, expected in cases:
        found = maps_of(plot_attention(attention, **options))
        assert list(found) == list(expected)
        for title, values in expected.items():
            np.testing.assert_allclose(found[title], values, atol=1e-7)


def words(count: int) -> list[str]:
    return [f"▁word{index}" * (1 + 4 * (index == 1)) for index in range(count - 1)] + ["</s>"]


def check_places(figure: Figure) -> None:
    figure.draw_without_rendering()
    parts: list[Any] = [axes.get_tightbbox() for axes in figure.axes]
    parts += [text.get_window_extent() for text in figure.texts]
    for one, other in combinations(parts, 2):
        assert not one.overlaps(other)


@pytest.mark.parametrize(
    ("layers", "heads", "source", "target", "options"),
    [
        (3, 3, 14, 12, {}),
        (2, 3, 3, 2, {}),
        (1, 1, 2, 2, {"title": "a title that is much longer than the picture below it is wide, as titles are"}),
        (1, 2, 30, 25, {}),
        (5, 2, 20, 9, {"average": "heads"}),
        (12, 16, 3, 3, {"average": "all", "layers": range(0, 11, 2), "heads": range(15)}),
        (2, 3, 1, 1, {}),
    ],
)
def test_nothing_overlaps(layers: int, heads: int, source: int, target: int, options: dict[str, Any]) -> None:
    figure = plot_attention(make_map(layers, heads, words(source), words(target)), **options)
    check_places(figure)
    # Each label has room for itself, and is large enough to be read.
    for labels in (figure.axes[0].get_yticklabels(), figure.axes[-2].get_xticklabels()):
        assert labels
        assert all(float(label.get_fontsize()) * figure.dpi / 72 >= 7 for label in labels)
        boxes = [label.get_window_extent() for label in labels]
        assert not any(one.overlaps(other) for one, other in pairwise(boxes))


def test_what_there_is_not_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    for options, message in (
        ({"layers": [2]}, r"layers is \[2\]; they must be from 0 to 1"),
        ({"heads": []}, r"heads is \[\]"),
        ({"heads": [0, 0, 1]}, r"heads is \[0, 0, 1\]; 0 must be named once"),
        ({"layers": [-1, 0, 1], "average": "all"}, r"layers is \[-1, 0, 1\]; 1 must be named once"),
        ({"kind": "self"}, "kind is 'self'"),
        ({"average": "mean"}, "average is 'mean'; it must be one of none, heads, all"),
    ):
        with pytest.raises(ValueError, match=message):
            plot_attention(make_map(), path, **options)
    with pytest.raises(ValueError, match="must end in one of"):
        plot_attention(make_map(), tmp_path / "a.jpg")
    with pytest.raises(ValueError, match=r"make a picture of .* inches; .* fewer layers or heads"):
        plot_attention(make_map(1, 16, words(400), words(2)), path)
    with pytest.raises(ValueError, match=r"masks of 1 sentences of up to 400 tokens make .* fewer or shorter"):
        plot_masks([["t"] * 400], [["t"] * 400], path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ending", [*SIGNATURES, ".PNG"])
def test_files_are_written_and_kept(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / f"a{ending}"
    attention = make_map(1, 1)
    plot_attention(attention, path)
    before = path.read_bytes()
    assert before.startswith(SIGNATURES[ending.lower()])
    for draw in (plot_attention, save_attention_page):
        with pytest.raises(FileExistsError, match="exists: choose another name"):
            draw(attention, path)
    assert path.read_bytes() == before
    plot_attention(attention, path, kind="encoder", overwrite=True)
    assert path.read_bytes() != before
    assert list(path.parent.iterdir()) == [path]


def test_an_svg_file_has_every_label_as_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.svg"
    plot_attention(make_map(1, 1, source=AWKWARD, target=AWKWARD), path, title="$猫</svg>")
    root = ElementTree.parse(path)
    texts = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    for label in ("$a$", "▁<b>&", "_x", "猫", "</script>", "</s>"):
        assert texts.count(label) == 2
    assert "$猫</svg>" in texts
    assert not caplog.records  # the viewer's fonts decide
    # Each text runs in its own direction.
    rules = "".join(node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}style"))
    assert re.search(r"(?:^|})\s*text\s*{\s*unicode-bidi:\s*plaintext\s*}", rules)


@pytest.fixture
def cat_font(tmp_path: Path) -> Iterator[str]:
    """The name of a font that can draw one character, 猫, and the letter x."""
    pen = TTGlyphPen(None)
    pen.moveTo((100, 0))
    for point in ((100, 700), (800, 700), (800, 0)):
        pen.lineTo(point)
    pen.closePath()
    box = pen.glyph()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", "cat"])
    builder.setupCharacterMap({ord("猫"): "cat", ord("x"): "cat"})
    builder.setupGlyf({".notdef": box, "cat": box})
    builder.setupHorizontalMetrics({".notdef": (900, 100), "cat": (900, 100)})
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({"familyName": "Cat Sans", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(tmp_path / "cat.ttf")
    before = list(fontManager.ttflist)
    # So that what is installed on this machine does not matter.
    fontManager.ttflist[:] = [entry for entry in before if entry.name in ("DejaVu Sans", "Last Resort High-Efficiency")]
    fontManager.addfont(tmp_path / "cat.ttf")
    yield "Cat Sans"
    fontManager.ttflist[:] = before


def test_titles_and_names_of_curves_and_positions_have_fonts(cat_font: str) -> None:
    log = [{"loss": 1.0, "eval_猫_loss": 1.0, "step": 1}]
    for figure in (
        plot_learning_curves(log, title="猫"),
        compare_learning_curves({"猫": log, "b": log}, best_steps={"b": 1}),
        plot_positions(np.eye(3), title="猫"),
    ):
        figure.draw_without_rendering()  # a missing glyph would be a warning, and that an error


def test_a_font_that_has_the_characters_is_found(cat_font: str, caplog: pytest.LogCaptureFixture) -> None:
    figure = plot_attention(make_map(1, 1, source=["猫", "</s>"]))
    (_, labels), (label, _) = labels_of(figure.axes[0]), figure.axes[0].get_xticklabels()
    assert labels == ["猫", "</s>"]
    assert label.get_fontfamily() == ["sans-serif", cat_font]
    assert not caplog.records
    figure.draw_without_rendering()  # a missing glyph would be a warning, and that an error


def test_characters_without_a_font_are_boxes_with_one_warning(
    cat_font: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vanilla_transformer.visualization.figures._warned", set())

    def draw(*source: str) -> list[str]:
        caplog.clear()
        for ending in (".png", ".pdf"):
            plot_attention(make_map(1, 1, source=source), tmp_path / f"a{ending}", title="狗", overwrite=True)
        return caplog.messages

    (message,) = draw("猫狗", "狗\ufe0f", "שלום", "</s>")
    assert "No installed font that can be used has 1 of the characters (狗): they are drawn as boxes." in message
    assert "fonts-noto-cjk" in message
    (message,) = draw("狗", "🦜", "👩\u200d👧")
    assert "has 3 of the characters (👧 👩 🦜)" in message
    assert not draw("狗", "🦜")


def test_sinusoids_are_the_formula() -> None:
    table = position_table(make_config(d_model=16, position_offset=2), 30)
    for position, i in product((0, 7, 29), range(8)):
        angle = (position + 2) / 10000 ** (2 * i / 16)
        np.testing.assert_allclose(table[position, 2 * i : 2 * i + 2], [np.sin(angle), np.cos(angle)], atol=1e-12)
    upper, lower = plot_positions(table, dimensions=[0, 15]).axes[:2]
    np.testing.assert_array_equal(np.asarray(upper.images[0].get_array()), table)
    for line, dimension in zip(lower.lines, (0, 15), strict=True):
        np.testing.assert_array_equal(line.get_ydata(), table[:, dimension])
    for wrong in ([16], [-1], []):
        with pytest.raises(ValueError, match="they must be from 0 to 15"):
            plot_positions(table, dimensions=wrong)


def test_a_single_position_can_be_seen() -> None:
    figure = plot_positions(position_table(make_config(d_model=16), 1))
    upper, lower = figure.axes[:2]
    figure.draw_without_rendering()
    for axis in (upper.yaxis, lower.xaxis):
        low, high = sorted(axis.get_view_interval())
        assert [tick for tick in axis.get_majorticklocs() if low <= tick <= high] == [0]
        assert low < 0 < high
    assert all(line.get_marker() == "." for line in lower.lines)


def test_positions_of_any_model_with_a_table() -> None:
    assert len(position_table(make_config())) == 100
    learned = make_model(position_embedding_type="learned", position_offset=1)
    half: Any = make_model(position_embedding_type="learned")
    assert position_table(half.to(torch.bfloat16), 3).dtype == np.float32
    weight = learned.model.encoder.embed_positions.weight.detach().numpy()
    np.testing.assert_array_equal(position_table(learned, 5), weight[1:6])
    for model, name, first in (
        (MODELS["marian"](), "weight", 0),
        (MODELS["bart"](), "weight", 2),
        (make_m2m100(20), "weights", 2),
        (make_fsmt(), "weight", 2),
    ):
        encoder = model.model.encoder
        table = getattr(encoder.embed_positions, name).detach()
        np.testing.assert_array_equal(position_table(model, 5), table[first : first + 5])
        # What it adds to a sentence of five tokens, none of which is padding.
        added: list[torch.Tensor] = []
        hook = encoder.embed_positions.register_forward_hook(lambda _, __, output, kept=added: kept.append(output))
        encoder(torch.tensor([[3, 4, 5, 6, 2]]))
        hook.remove()
        np.testing.assert_allclose(position_table(model, 5), added[0].detach().reshape(5, -1), atol=1e-6)
    for argument, length, message in (
        (make_config(position_embedding_type="learned"), None, "among a model's weights"),
        (MODELS["t5"](), None, "T5ForConditionalGeneration has no table of positions"),
        (learned, 24, "length is 24; the model's table has 23 positions"),
        (make_config(), 0, "length is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            position_table(argument, length)


def test_masks_are_the_rules() -> None:
    sources, targets = [["a", "b", "c"], ["d"]], [["<s>", "e"], ["<s>", "f"]]
    masks = attention_masks([3, 1], [2, 2])
    for sentence, row, column in product(range(2), range(3), range(3)):
        assert masks["encoder"][sentence, row, column] == (column < len(sources[sentence]))
        if row < 2:
            assert masks["cross"][sentence, row, column] == (column < len(sources[sentence]))
            if column < 2:
                assert masks["decoder"][sentence, row, column] == (column <= row)
    assert all(mask.all() for kind, mask in attention_masks([2, 2], [1, 1]).items())
    figure = plot_masks(sources, targets)
    assert len(figure.axes) == 6
    for axes, (sentence, kind) in zip(figure.axes, product(range(2), KINDS), strict=True):
        (mesh,) = [part for part in axes.collections if isinstance(part, QuadMesh)]
        mask = masks[kind][sentence]
        np.testing.assert_array_equal(np.asarray(mesh.get_array()).reshape(mask.shape), mask)
    assert labels_of(figure.axes[5]) == (["<s>", "f"], ["d", "<pad>", "<pad>"])
    check_places(figure)
    wrongs: list[tuple[Any, Any]] = [([], []), ([["a"]], []), ([["a"]], [[]])]
    for wrong_sources, wrong_targets in wrongs:
        with pytest.raises(ValueError, match="there must be as many, each with tokens"):
            plot_masks(wrong_sources, wrong_targets)


@pytest.mark.parametrize(
    ("source", "target", "options"),
    [
        ([["Donaudampfschiff" * 4, "x"], ["y"]], [["<s>", "z"]] * 2, {"pad_token": "[PAD]"}),
        ([["a"]], [["b"]], {"title": "a title that is much longer than the picture " * 3}),
        ([words(20)], [words(16)], {}),
    ],
)
def test_masks_have_room_and_say_who_looks(source: Any, target: Any, options: dict[str, Any]) -> None:
    figure = plot_masks(source, target, **options)
    check_places(figure)
    for axes in figure.axes:
        for label in [*axes.get_yticklabels(), *axes.get_xticklabels()]:
            assert len(label.get_text()) <= 24
            assert float(label.get_fontsize()) * figure.dpi / 72 >= 7
        rows, columns = labels_of(axes)
        assert axes.bbox.width / axes.bbox.height == pytest.approx(len(columns) / len(rows))
    assert "Each row is a token that looks, each column one that is looked at" in figure.texts[1].get_text()
    if "pad_token" in options:
        assert labels_of(figure.axes[3])[0] == ["y", "[PAD]"]


def test_a_large_picture_of_masks_has_no_more_pixels_than_can_be_shown() -> None:
    figure = plot_masks([["t"] * 110], [["t"] * 110])
    assert max(figure.get_size_inches()) * figure.dpi <= 10_000


@pytest.mark.usefixtures("without_matplotlib")
def test_a_page_needs_no_matplotlib_and_a_picture_says_what_it_needs(tmp_path: Path) -> None:
    attention = make_map(1, 9)
    save_attention_page(attention, tmp_path / "a.html")
    cases: list[tuple[Any, list[Any]]] = [
        (plot_attention, [attention]),
        (plot_positions, [np.ones((2, 2))]),
        (plot_masks, [[["a"]], [["b"]]]),
        (plot_learning_curves, [[{"loss": 1.0, "step": 1}]]),
    ]
    for plot, arguments in cases:
        with pytest.raises(ImportError, match=r'need matplotlib: pip install "vanilla-transformer\[train\]"'):
            plot(*arguments, tmp_path / "a.png")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


def test_all_pictures_have_one_scale_unless_another_is_asked_for() -> None:
    attention = make_map()
    scales: list[tuple[dict[str, Any], float]] = [({}, 1.0), ({"kind": "encoder", "layers": [1]}, 1.0)]
    scales += [({"max_weight": 0.25}, 0.25), ({"max_weight": None, "heads": [1]}, float(attention.cross[:, 1].max()))]
    for options, highest in scales:
        images = [image for axes in plot_attention(attention, **options).axes for image in axes.images]
        assert all(image.get_clim() == pytest.approx((0.0, highest)) for image in images)


def test_the_sign_for_spaces_is_explained_where_it_is_drawn() -> None:
    note = '"▁" is a space'
    assert [note in text.get_text() for text in plot_attention(make_map()).texts] == [False, True, False]
    assert not any(note in text.get_text() for text in plot_attention(make_map(), kind="decoder").texts)
    assert [note in text.get_text() for text in plot_masks([["▁a"]], [["b"]]).texts] == [False, True]
    assert not any(note in text.get_text() for text in plot_masks([["a"]], [["b"]]).texts)


@pytest.mark.parametrize("kind", ["sinusoidal", "sinusoidal_concatenated", "sinusoidal_tensor2tensor"])
def test_the_curves_of_positions_are_sines_and_cosines(kind: str) -> None:
    table = position_table(make_config(d_model=64, position_embedding_type=kind, position_offset=2), 50)
    curves = [np.asarray(line.get_ydata()) for line in plot_positions(table).axes[1].lines]
    assert len(curves) == 4
    for sine, cosine in (curves[:2], curves[2:]):
        np.testing.assert_allclose(sine**2 + cosine**2, 1, atol=1e-6)
        assert np.abs(sine - cosine).max() > 0.5
    assert len(plot_positions(np.ones((3, 1))).axes[1].lines) == 1


def test_the_rows_of_cross_attention_are_predicted_tokens_in_masks_too() -> None:
    figure = plot_masks([["a"], ["b"]], [["<s>", "c"], ["<s>"]], predicted=[["c", "</s>"], ["</s>"]])
    rows = [labels_of(axes)[0] for axes in figure.axes]
    assert rows[1:3] == [["<s>", "c"], ["c", "</s>"]]
    assert rows[4:] == [["<s>", "<pad>"], ["</s>", "<pad>"]]
    check_places(figure)
    with pytest.raises(ValueError, match="predicted must have as many tokens as target"):
        plot_masks([["a"]], [["<s>", "c"]], predicted=[["c"]])


def test_a_notebook_shows_every_picture_whole(tmp_path: Path) -> None:
    attention, log = make_map(1, 1), [{"loss": 1.0, "step": 1}, {"loss": 0.5, "step": 2}]
    plots: list[tuple[Any, Any]] = [(plot_attention, [attention]), (plot_masks, [[["a"]], [["b"]]])]
    plots += [(plot_positions, [np.eye(3)]), (plot_learning_curves, [log])]
    for plot, arguments in plots:
        figure = plot(*arguments, tmp_path / f"{plot.__name__}.png")
        assert isinstance(figure, Figure)
        assert figure._repr_png_().startswith(SIGNATURES[".png"])  # type: ignore[attr-defined]
    assert len(list(tmp_path.iterdir())) == len(plots)
