"""scripts/plot_attention.py: everything that it writes, and what it says to wrong input."""

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from library_models import make_marian, make_tokenizer
from matplotlib.image import imread

from vanilla_transformer.inference.loading import load_model_and_tokenizer
from vanilla_transformer.visualization.attention import align_words, collect_attention, format_pharaoh

Run = Callable[..., None]
TEXT, TARGET = "mike lima kilo juliet india", "papa mike"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_marian(encoder_layers=2, decoder_layers=2).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, model_folder: Path, tmp_path: Path) -> Run:
    """The script's main function, with the model and the folder to write to."""
    monkeypatch.chdir(tmp_path)
    main: Any = importlib.import_module("plot_attention").main
    shared = ["--model_name_or_path", str(model_folder), "--device", "cpu", "--max_new_tokens", "6"]
    return lambda *arguments: main([*shared, *arguments])


def test_everything_of_one_sentence(run: Run, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["new/cross.svg", "page.HTML"]
    run("--text", TEXT, "--output_files", *names, "--alignment_file", "a.align", "--align_layer", "-1")
    attention = collect_attention(*load_model_and_tokenizer(str(model_folder)), TEXT, max_new_tokens=6)
    out = capsys.readouterr().out
    assert f"Source: {TEXT}\nTarget: {attention.target_text}\n" in out
    for name in names:
        assert f"The attention is in {name}" in out
        assert Path(name).stat().st_size > 0
    alignment = align_words(attention, layer=-1)
    assert Path("a.align").read_text() == format_pharaoh(alignment) + "\n"
    source, target = alignment[0]
    assert f"{source}-{target}  {TEXT.split()[source]}  {attention.target_text.split()[target]}\n" in out
    page = Path("page.HTML").read_text(encoding="utf-8")
    assert f"<h1>Attention of {model_folder.name}</h1>" in page
    found = re.search('id="attention">(.*?)</script>', page)
    assert found is not None
    assert json.loads(found.group(1))["kinds"][2]["rows"] == list(attention.target)


def test_a_given_target_and_some_heads(run: Run) -> None:
    shared = ["--text", TEXT, "--target", TARGET, "--kind", "decoder", "--title", "mine"]
    run(*shared, "--output_files", "all.svg")
    run(*shared, "--output_files", "one.svg", "--layers", "-1", "--heads", "1")
    run(*shared, "--output_files", "mean.svg", "--average", "heads")
    for name, titles in (
        ("all", [f"layer {layer}, head {head}" for layer in (0, 1) for head in (0, 1)]),
        ("one", ["layer 1, head 1"]),
        ("mean", ["layer 0, mean of heads", "layer 1, mean of heads"]),
    ):
        text = Path(f"{name}.svg").read_text(encoding="utf-8")
        assert re.findall("(layer .*?)</text>", text) == titles
        assert all(f">{word}</text>" in text for word in ("mine", "papa", "&lt;pad&gt;"))  # pad starts the decoder


def test_positions_and_masks(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("--positions_file", "positions.png", "--num_positions", "20")
    run("--text", TEXT, "papa", "--target", TARGET, "lima", "--masks_file", "masks.png")
    out = capsys.readouterr().out
    for name in ("positions", "masks"):
        assert f"The {name} are in {name}.png" in out
        assert imread(f"{name}.png").std() > 0


def test_files_of_pairs(run: Run, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.en").write_text(f"{TEXT}\n\nkilo 你好\n", encoding="utf-8")
    Path("a.de").write_text(f"{TARGET}\nlima\ngolf\n", encoding="utf-8")
    files = ["--source_file", "a.en", "--target_file", "a.de", "--alignment_file", "a.align"]
    run(*files, "--align_head", "0", "--words", "spaces")
    first, second, third = Path("a.align").read_text().splitlines()
    attention = collect_attention(*load_model_and_tokenizer(str(model_folder)), TEXT, TARGET)
    assert first == format_pharaoh(align_words(attention, head=0))
    assert second == ""
    assert third in ("0-0", "1-0")
    output = capsys.readouterr()
    assert "The alignments of 3 sentences are in a.align" in output.out
    assert "3/3" not in output.err, "a bar is for a terminal"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--text TEXT", "Nothing is asked for; give --output_files,"),
        ("--output_files a.png", "--text is missing"),
        ("--text TEXT --positions_file a.png", "--text is not needed"),
        ("--text TEXT TEXT --output_files a.png", "--text has 2 sentences"),
        ("--text TEXT --target a b --output_files a.png", "--target has 2 sentences"),
        ("--text TEXT --masks_file a.html", "a.html: the name of a picture must end in one of"),
        ("--text TEXT --output_files a.png ./a.png", "Two files have one name"),
        ("--positions_file a.png --average all --heads 9", "--heads, --average: only for pictures of attention"),
        ("--text TEXT --output_files a.png --align_head 0", "--align_head: only for --alignment_file"),
        ("--text TEXT --masks_file a.png --num_positions 3", "--num_positions: only for --positions_file"),
        ("--text TEXT --alignment_file a.gz", "a.gz: the output is written as plain text"),
        ("--text TEXT --alignment_file a.xz", "a.xz: the output is written as plain text"),
        ("--source_file old.png --target_file old.png --alignment_file ./old.png --overwrite", "is the input file"),
        ("--text TEXT --output_files old.png", "old.png exists"),
        ("--text TEXT --output_files a.png --layers 5", "layers is [5]; they must be from 0 to 1"),
        ("--source_file a --alignment_file b", "--source_file and --target_file belong together"),
        ("--source_file a --target_file a --output_files b.png", "--source_file is for --alignment_file"),
    ],
)
def test_wrong_input_is_explained(arguments: str, message: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    Path("old.png").write_text("kept")
    with pytest.raises(SystemExit) as end:
        run(*(TEXT if word == "TEXT" else word for word in arguments.split(" ")))
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert [(path.name, path.read_text()) for path in Path().iterdir()] == [("old.png", "kept")]
