"""scripts/recipes/g2p.py: the files of the task are made into those of one model, trained on, and scored."""

import importlib
from pathlib import Path
from typing import Any

import pytest

g2p: Any = importlib.import_module("g2p")

WORDS = {"fre": [("abc", "a b c"), ("ca", "k a")], "vie": [("a b", "a p"), ("한", "h a n")]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for language, words in WORDS.items():
        for part in ("train", "dev", "test"):
            text = "".join(f"{word}\t{sounds}\n" for word, sounds in words)
            (tmp_path / f"{language}_{part}.tsv").write_text(text, encoding="utf-8")
    return tmp_path


def test_letters_and_languages_become_tokens(data: Path, tmp_path: Path) -> None:
    assert g2p.write_data(data, tmp_path / "made") == ["fre", "vie"]
    test = (tmp_path / "made" / "test.vie.tsv").read_text(encoding="utf-8")
    assert test == "<vie> a _ b\ta p\n<vie> ᄒ ᅡ ᆫ\th a n\n"
    train = (tmp_path / "made" / "train.tsv").read_text(encoding="utf-8").splitlines()
    assert sorted(train) == sorted(["<fre> a b c\ta b c", "<fre> c a\tk a", *test.splitlines()])


@pytest.mark.parametrize("line", ["no tab", "\tsounds", "word\t", "three\tcells\there"])
def test_damaged_lines_are_named(data: Path, tmp_path: Path, line: str) -> None:
    path = data / "vie_dev.tsv"
    path.write_text(f"a b\ta p\n{line}\n", encoding="utf-8")
    with pytest.raises(SystemExit, match=r"vie_dev\.tsv, line 2"):
        g2p.write_data(data, tmp_path / "made")


def test_missing_files_are_named(data: Path, tmp_path: Path) -> None:
    (data / "fre_test.tsv").unlink()
    with pytest.raises(SystemExit, match=r"fre_test\.tsv missing"):
        g2p.write_data(data, tmp_path / "made")
    with pytest.raises(SystemExit, match="holds no"):
        g2p.write_data(tmp_path / "made", tmp_path / "made")


def test_the_table_averages_seeds_and_then_languages() -> None:
    runs = [{"fre": (10.0, 2.0), "vie": (20.0, 4.0)}, {"fre": (12.0, 2.0), "vie": (26.0, 4.0)}]
    together = {"fre": (9.0, 1.0), "vie": (19.0, 3.0)}
    *_, fre, vie, average = g2p.make_table(["fre", "vie"], [*runs, together], together=True).splitlines()
    assert fre == "| fre | 11.0 ± 1.4 | 2.0 ± 0.0 | 9.0 | 1.0 |"
    assert vie == "| vie | 23.0 ± 4.2 | 4.0 ± 0.0 | 19.0 | 3.0 |"
    assert average == "| macro average | 17.0 ± 2.8 | 3.0 ± 0.0 | 14.0 | 2.0 |"
