"""recipes/tatoeba_en_de.py: what becomes pairs, noise and text, and the whole of it with tiny models."""

from __future__ import annotations

import gzip
import importlib
import json
import random
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vanilla_transformer.__main__ import main as command
from vanilla_transformer.apps.server import Metrics
from vanilla_transformer.commands import serve

SIZES = {"PAIRS": 40, "NOISE": 20, "TEXTS": 20, "VOCABULARY": 300, "STEPS": 2, "PRESET": "tiny"}
# Models that were hardly trained do not end, and have nothing of the references.
SIZES |= {"RATIO": 99, "SIMILARITY": 0}
WORDS = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf", "six": "sechs", "ten": "zehn"}

script: Any = importlib.import_module("tatoeba_en_de")
Sides = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("stuvwxyz")), max_size=20)


@given(train=Sides, others=Sides, pairs=st.integers(0, 8), texts=st.integers(0, 8), seed=st.integers(0, 3))
def test_texts_are_in_no_pair(train: Any, others: Any, pairs: int, texts: int, seed: int) -> None:
    kept, mono = script.divide(train, others, pairs=pairs, texts=texts, seed=seed)
    assert (kept, mono) == script.divide(train, others, pairs=pairs, texts=texts, seed=seed)
    assert len(kept) == min(pairs, len(train))
    known = {target for _, target in [*kept, *others]}
    assert len(mono) == len(set(mono)) == min(texts, len({target for _, target in train} - known))
    assert not known & set(mono)


@given(count=st.integers(1, 40), noise=st.floats(0, 0.6), seed=st.integers(0, 3))
def test_noise_is_added_to_pairs_that_all_stay(count: int, noise: float, seed: int) -> None:
    pairs = [(f"source {number}", f"the target of {number}") for number in range(count)]
    found = script.add_noise(pairs, noise=noise, seed=seed)
    assert noise * len(found) == pytest.approx(len(found) - count, abs=1)
    wrong = list(found)
    for pair in pairs:
        wrong.remove(pair)
    targets = [target for _, target in pairs]
    for source, target in wrong:
        assert target == source or target == "the target" or target in targets


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Words and what they mean, in files as Tatoeba's."""
    chooser = random.Random(0)
    for part, count in (("train", 90), ("val", 4), ("test", 6)):
        sentences = [chooser.choices(list(WORDS), k=chooser.randint(3, 6)) for _ in range(count)]
        lines = (f"{' '.join(each)}\t{' '.join(WORDS[word] for word in each)}\n" for each in sentences)
        with gzip.open(tmp_path / f"{part}.en-de.tsv.gz", "wt", encoding="utf-8") as file:
            file.writelines(lines)
    return tmp_path


@pytest.mark.usefixtures("no_curves")
def test_from_text_to_server(data: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name, value in (SIZES | {"DATA": data, "OUT": data / "out"}).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(data)
    importlib.reload(script)
    called: list[str] = []

    def call(*words: str) -> None:
        """Runs the command in this process, which has imported everything; the fifth is interrupted, once."""
        if len(called) == 4 and called[-1] != "interrupted":
            called.append("interrupted")
            raise KeyboardInterrupt
        called.append(words[0])
        command([*words, *(["--report_to", "none"] if words[0] == "train" else [])])

    monkeypatch.setattr(importlib.import_module("steps"), "call", call)
    with pytest.raises(KeyboardInterrupt):
        script.main()
    script.main()
    made = ["clean", "train-tokenizer", *["train"] * 2, "interrupted", "train", "backtranslate", "train"]
    assert called == [*made, "distill", "train", "export", "evaluate", *["evaluate"] * 8]

    said = capsys.readouterr().out
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if line.startswith("| ")]
    assert table[0] == ["step", "BLEU", "chrF", "gain in BLEU", "sentences/s", "minutes"]
    assert [row[0] for row in table[1:]] == ["as it is", "cleaned", "back-translated", "student", "in 8 bits"]
    before = None
    for (row, model), (_, bleu, chrf, gain, *_) in zip(script.MODELS.items(), table[1:], strict=True):
        metrics = json.loads(Path(model, "test", "metrics.json").read_text(encoding="utf-8"))
        assert (bleu, chrf) == (f"{metrics['bleu']:.2f}", f"{metrics['chrf']:.2f}"), row
        if before is not None:
            assert float(gain.split()[0]) == pytest.approx(metrics["bleu"] - before, abs=0.006)
            assert re.search(r"\(p = [01]\.\d{3}\)$", gain)
        before = metrics["bleu"]

    read = {name: Path(name).read_text(encoding="utf-8").splitlines() for name in ("train.en", "mono.de")}
    assert {name: len(lines) for name, lines in read.items()} == {"train.en": 50, "mono.de": 20}
    for name in ("clean", "back"):
        header, *rows = Path("corpora", f"{name}.tsv").read_text(encoding="utf-8").splitlines()
        assert header == "source\ttarget"
        assert all(row.split("\t")[1].split()[0] in WORDS.values() for row in rows)
    # The other direction was trained and validated from German to English.
    settings = json.loads(Path("reverse", "config.json").read_text(encoding="utf-8"))
    assert settings["langs"] == ["de", "en"]

    called.clear()
    for name, value in {"STEPS": 3, "TEXTS": 21}.items():
        with monkeypatch.context() as changed:
            changed.setenv(name, str(value))
            changed.setenv("OUT", ".")
            importlib.reload(script)
            with pytest.raises(SystemExit, match=r"(not by[^$]*max_steps 3|not of .*'TEXTS': 21)[^$]*another"):
                script.main()
    importlib.reload(script)
    monkeypatch.setattr(script, "DATA", data / "nowhere")  # which own text has no need of
    script.main()
    assert not called
    check_server(shlex.split(said.splitlines()[-2])[2:])


def check_server(words: list[str]) -> None:
    """The server's models are loaded as the command line says: the export translates."""
    arguments, *_ = serve.make_parser().parse_args_into_dataclasses(words)
    translator: Any
    ((languages, translator),) = serve.load_translators(arguments, Metrics()).items()
    try:
        assert languages == ("en", "de")
        assert len(translator.submit(["one two", "ten"]).result(timeout=60)) == 2
        assert "CTranslate2" in type(translator.translator.translator.model).__name__
    finally:
        translator.stop()


def test_missing_data_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.en-de.tsv.gz").touch()
    monkeypatch.setattr(script, "DATA", tmp_path)
    monkeypatch.setattr(script, "OUT", tmp_path / "out")
    absent = " and no ".join(str(tmp_path / f"{part}.en-de.tsv.gz") for part in ("val", "test"))
    with pytest.raises(SystemExit, match=rf"There is no {re.escape(absent)}\. For text of your own"):
        script.main()
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mono.de").touch()
    with pytest.raises(SystemExit, match=r"holds some files of text, but no train\.en and no .* and no test\.de\."):
        script.main()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("STEPS", "0", "STEPS is '0'; it must be a whole number of at least 1."),
        ("NOISE", "-5", "NOISE is '-5'; it must be a whole number of at least 0."),
        ("NOISE", "100", "NOISE is 100; it must be below 100."),
        ("PAIRS", "91", "has 90 pairs and 0 other texts; 91 and 20 are asked for."),
    ],
)
def test_wrong_settings_are_named(
    name: str, value: str, message: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, own in (SIZES | {"DATA": data, "OUT": data / "out", name: value}).items():
        monkeypatch.setenv(key, str(own))
    monkeypatch.chdir(data)
    with pytest.raises(SystemExit, match=re.escape(message)):
        importlib.reload(script).main()
