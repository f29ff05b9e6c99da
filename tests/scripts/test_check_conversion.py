"""benchmarks/check_conversion.py where the systems are not installed; it is run by hand where they are."""

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
