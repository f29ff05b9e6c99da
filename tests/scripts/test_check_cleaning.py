"""benchmarks/check_cleaning.py: which noise it makes, and how it counts what is found of it."""

import gzip
import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

script: Any = importlib.import_module("check_cleaning")
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
ZAHLEN = ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn"]
PAIRS = [
    (f"I have {one} books and {other} cats here.", f"Ich habe hier {eins} Bücher und auch {zwei} Katzen.")
    for one, eins in zip(NUMBERS, ZAHLEN, strict=True)
    for other, zwei in zip(NUMBERS, ZAHLEN, strict=True)
]


def test_noise_is_of_all_kinds() -> None:
    corpus = script.add_noise(PAIRS, ["我很喜欢你。"], count=90, noise=0.4, seed=0)
    assert Counter(each.kind for each in corpus) == {"": 54, **dict.fromkeys(script.KINDS, 6)}
    right = dict(PAIRS)
    for number, (source, target, kind) in enumerate(corpus):
        assert (right.get(source) == target) is (kind == "")
        if kind == "truncated":
            assert right[source].startswith(f"{target} ")
        if kind == "copied":
            assert source == target
        if kind == "repeated":
            before = [(one.upper(), other.upper()) for one, other, _ in corpus[:number]]
            assert (source, target) in before
    assert script.add_noise(PAIRS, ["我"], count=90, noise=0.4, seed=1) != corpus


def test_precision_and_recall_are_counted() -> None:
    corpus = [script.Noisy("a", "b", kind) for kind in ("", "", "", "copied", "copied", "shuffled")]
    lines = script.describe(corpus, [None, "One", None, "One", "Two", None]).splitlines()
    rows = {line.split("  ")[0]: line.split() for line in lines}
    assert rows["One"][1:5] == ["2", "50.0%", "1", "0"]
    assert rows["Two"][1:3] == ["1", "100.0%"]
    assert rows["removed"][1:3] == ["33.3%", "0.0%"]
    assert lines[-1] == "precision 66.7%, recall 66.7%"


def test_the_script_cleans_and_writes_three_corpora(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.main(["--folder", str(tmp_path)])
    assert (
        capsys.readouterr().out == f"Skipped, since {tmp_path} has no train.en-de.tsv.gz and no train.en-zh.tsv.gz.\n"
    )
    for name, pairs in (("de", PAIRS), ("zh", [("I like you.", "我很喜欢你。")] * 3)):
        text = "".join(f"{one}\t{other}\n" for one, other in pairs)
        (tmp_path / f"train.en-{name}.tsv.gz").write_bytes(gzip.compress(text.encode()))
    script.main(["--folder", str(tmp_path), "--num_pairs", "60", "--output_dir", str(tmp_path / "out")])
    rows = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert rows["pairs"][1:] == ["42", *["3"] * 6]
    assert rows["removed"][1:] == ["0.0%", "0.0%", "100.0%", "100.0%", "100.0%", "0.0%", "100.0%"]
    counts = {path.stem: len(path.read_text().splitlines()) - 1 for path in (tmp_path / "out").iterdir()}
    assert counts == {"clean": 42, "noisy": 60, "cleaned": 48}
