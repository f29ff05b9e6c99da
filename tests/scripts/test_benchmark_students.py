"""benchmark_students.py with tiny models: a row each, with the scores of what it translates."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
from tiny_seq2seq import make_model
from tiny_translations import TOKENIZER, random_sentences

from vanilla_transformer.inference.translate import translate

benchmark: Any = importlib.import_module("benchmark_students")
SENTENCES, REFERENCES = random_sentences(6), random_sentences(6, seed=1)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / "test.en", tmp_path / "test.de"]
    for path, lines in zip(paths, (SENTENCES, REFERENCES), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines))
    return [str(path) for path in paths]


def test_models_side_by_side(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, scores = [], []
    for seed in (1, 2):
        model: Any = make_model(seed=seed)
        names.append(str(tmp_path / f"model{seed}"))
        for part in (model, TOKENIZER):
            part.save_pretrained(names[-1])
        texts = translate(model, TOKENIZER, SENTENCES, num_beams=2, progress=False)
        scores.append(f"{sacrebleu.corpus_bleu(texts, [REFERENCES]).score:.2f}")
    words = ["--device", "cpu", "--num_beams", "2", "--rounds", "2"]
    benchmark.main(["--model_name_or_path", *names, "--test_file", *files, *words])
    _, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == names
    assert [row[2] for row in rows] == scores
    assert rows[0][-1] == "1.00"
    assert float(rows[1][-1]) > 0


@pytest.mark.parametrize(
    ("words", "message"), [(["--test_file", "a"], "must name two files"), (["--rounds", "0"], "--rounds is 0")]
)
def test_what_is_wrong_is_said(
    words: list[str], message: str, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(["--model_name_or_path", "m", "--test_file", *files, *words])
    assert message in capsys.readouterr().err
