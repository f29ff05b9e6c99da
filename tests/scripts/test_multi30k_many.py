"""scripts/recipes/multi30k_many.py: one model of three languages and six of one pair are trained, and scored."""

import gzip
import importlib
from pathlib import Path
from typing import Any

import pytest

from vanilla_transformer.commands import evaluate, train

recipe: Any = importlib.import_module("multi30k_many")
pytestmark = pytest.mark.usefixtures("no_curves")

WORDS = {"en": "a man rides two horses", "de": "ein mann reitet zwei pferde", "fr": "un homme monte deux chevaux"}
TINY = ["--preset", "tiny", "--vocab_size", "300", "--max_steps", "1", "--eval_strategy", "steps", "--eval_steps", "1"]
TINY += ["--save_strategy", "steps", "--save_steps", "1", "--report_to", "none", "--disable_tqdm", "true"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for language, text in WORDS.items():
        for part in ("train", "val", "test_2016_flickr"):
            words = text.split()
            lines = "".join(f"{' '.join(words[start:])}\n" for start in range(len(words)))
            (tmp_path / f"{part}.{language}.gz").write_bytes(gzip.compress(lines.encode()))
    return tmp_path


def test_seven_models_are_trained_and_scored_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []

    def call(*words: str) -> None:
        calls.append([*words])
        {"train": train, "evaluate": evaluate}[words[0]].main(calls[-1][1:])

    monkeypatch.setattr(importlib.import_module("steps"), "call", call)
    arguments = ["--data", str(data), "--output_dir", str(tmp_path / "out"), *TINY]
    recipe.main(arguments)
    assert [words[0] for words in calls].count("train") == 7
    assert [words[0] for words in calls].count("evaluate") == 12
    rows = (tmp_path / "out" / "results.md").read_text().splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == [
        *("en to de", "en to fr", "de to en", "de to fr (zero-shot)", "fr to en", "fr to de (zero-shot)"),
    ]
    recipe.main(arguments)
    assert len(calls) == 19, "what is finished is not done again"
    (data / "val.fr.gz").unlink()
    with pytest.raises(SystemExit, match=r"val\.fr\.gz missing"):
        recipe.main(arguments)


def test_the_table_averages_seeds() -> None:
    table = recipe.make_table({("de", "fr"): {"many": [10.0, 12.0], "single": [20.0, 20.0]}})
    assert table.splitlines()[-1] == "| de to fr (zero-shot) | 11.00 ± 1.41 | 20.00 ± 0.00 |"
