"""benchmarks/check_backtranslation.py: what becomes pairs and what text, and the whole of it with tiny models."""

import gzip
import importlib
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vanilla_transformer.__main__ import main as command

script: Any = importlib.import_module("check_backtranslation")

Sides = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("stuvwxyz")), max_size=20)


@given(train=Sides, others=Sides, pairs=st.integers(0, 8), texts=st.integers(0, 8), seed=st.integers(0, 3))
def test_texts_are_in_no_pair(train: Any, others: Any, pairs: int, texts: int, seed: int) -> None:
    kept, mono = script.divide(train, others, pairs=pairs, texts=texts, seed=seed)
    assert (kept, mono) == script.divide(train, others, pairs=pairs, texts=texts, seed=seed)
    assert len(kept) == min(pairs, len(train))
    known = {target for _, target in [*kept, *others]}
    assert len(mono) == len(set(mono)) == min(texts, len({target for _, target in train} - known))
    assert not known & set(mono)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Words and what they mean, in files as Tatoeba's."""
    chooser = random.Random(0)
    words = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf"}
    for part, count in (("train", 60), ("val", 4), ("test", 6)):
        sentences = [chooser.choices(list(words), k=chooser.randint(2, 6)) for _ in range(count)]
        lines = (f"{' '.join(each)}\t{' '.join(words[word] for word in each)}\n" for each in sentences)
        with gzip.open(tmp_path / f"{part}.en-de.tsv.gz", "wt", encoding="utf-8") as file:
            file.writelines(lines)
    return tmp_path


@pytest.mark.usefixtures("no_curves")
def test_everything_runs_and_is_not_run_twice(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    called: list[list[str]] = []

    def call(*words: str | Path) -> None:
        called.append(list(map(str, words)))
        # In this process, which has imported everything. A model that was hardly trained does not end.
        command([*called[-1], *(["--max_length_ratio", "99"] if words[0] == "backtranslate" else [])])

    monkeypatch.setattr(script, "call", call)
    sizes = ["--pairs", 30, "--texts", 20, "--vocab_size", 280, "--preset", "tiny", "--steps", 2, "--eval_steps", 2]
    sizes += ["--tokens", 80, "--warmup_steps", 1, "--methods", "tagged", "noised"]
    words = ["--data", data, "--output_dir", data / "out", *sizes, "--use_cpu", "--disable_tqdm", "true"]
    words += ["--generation_max_length", 12, "--report_to", "none"]
    script.main(list(map(str, words)))
    kinds = [each[0] for each in called]
    assert kinds == [*("train-tokenizer", "train", "train"), *["backtranslate", "train"] * 2, *["evaluate"] * 4]
    trainings = {Path(each[each.index("--output_dir") + 1]).name: each for each in called if each[0] == "train"}
    assert list(trainings) == ["pairs", "reverse", "tagged", "noised"]
    assert trainings["tagged"].count("--train_file") == 2
    said = capsys.readouterr().out
    assert "30 pairs, " in said
    for name in ("tagged", "noised"):
        assert re.search(rf"^{name}: [+-]\d+\.\d\d BLEU \(p = [01]\.\d{{4}}\), less than the 2.0", said, re.MULTILINE)
        assert (data / "out" / "data" / f"{name}.tsv").read_text(encoding="utf-8").startswith("source\ttarget\n")
    called.clear()
    script.main(list(map(str, words)))
    assert [each[:2] for each in called] == [["evaluate", "--compare"]]
    with pytest.raises(SystemExit, match=r"settings\.json has other settings"):
        script.main([*map(str, words), "--steps", "3"])


def test_missing_data_are_said(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "train.en-de.tsv.gz").touch()
    script.main(["--data", str(tmp_path), "--output_dir", str(tmp_path / "out")])
    absent = " and no ".join(str(tmp_path / f"{part}.en-de.tsv.gz") for part in ("val", "test"))
    assert capsys.readouterr().out == f"Skipped, since there is no {absent}.\n"
    assert not (tmp_path / "out").exists()
