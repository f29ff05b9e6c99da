"""benchmarks/check_conversion.py without the systems, with which it is run by hand; what all benchmarks refuse."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

script: Any = importlib.import_module("check_conversion")


def test_systems_not_installed_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("joeynmt", "onmt"):
        monkeypatch.setitem(sys.modules, name, None)  # what importing it then raises is an ImportError
    script.main(["--sentences", "2"])
    missing = capsys.readouterr().out.split("|\n")[-1]
    assert "joeynmt was not checked: it is not installed here" in missing
    assert "opennmt_py was not checked" in missing


def test_the_toy_languages_mirror_each_other(tmp_path: Path) -> None:
    corpus = script.Corpus.write(tmp_path, 3)
    assert [" ".join(reversed(line.split())).upper() for line in corpus.sources] == corpus.targets
    assert len((tmp_path / "train.src").read_text(encoding="utf-8").splitlines()) == 1000
    assert set(corpus.vocabulary.read_text(encoding="utf-8").split()) >= set(" ".join(corpus.targets).split())


def test_a_command_that_fails_says_so() -> None:
    assert "usage" in script.run("json.tool", "--help")
    with pytest.raises(RuntimeError, match=r"json\.tool absent failed"):
        script.run("json.tool", "absent")


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("generation", ["--part=sentences"], "--model_name_or_path and --test_file must be given"),
        ("generation", ["--batch_size", "4", "0"], "--batch_size is [4, 0]; it must be at least 1"),
        ("training", ["--part=throughput"], "--train_file must be given"),
        ("training", ["--d_model=100"], "--d_model is 100; it must be a multiple of 64"),
        ("training", ["--target_tokens=3"], "--target_tokens is 3; it must be at least 32"),
        ("translation", ["--model_name_or_path=nowhere", "--device=tpu"], "--device is tpu; it must be cpu or cuda"),
        ("translation", ["--model_name_or_path=nowhere", "--test_file=nowhere.txt"], "nowhere.txt"),
        ("alignments", ["--pairs", "a", "b", "--corpus", "c"], "--pairs, and --corpus if given, must name two files"),
        ("alignments", ["--pairs", "absent", "b"], "No such file"),
    ],
)
def test_wrong_arguments_are_explained(name: str, words: list[str], message: str, main: Any, capsys: Any) -> None:
    script = main("check_alignments") if name == "alignments" else main(f"benchmark_{name}")
    with pytest.raises(SystemExit):
        script(*words, *(["--model_name_or_path=x"] if name == "alignments" else []))
    assert message in capsys.readouterr().err
