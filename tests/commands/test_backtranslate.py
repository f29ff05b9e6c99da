"""`backtranslate` and `distill`: what their options come to, and a training on what they made."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_translations import random_sentences, save_model, translate_alone

from vanilla_transformer.commands import backtranslate, distill


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Sentences, which are written to texts.txt."""
    sentences = random_sentences(6)
    (tmp_path / "texts.txt").write_text("".join(f"{line}\n" for line in sentences), encoding="utf-8")
    return sentences


Run = Callable[..., list[list[str]]]


@pytest.fixture
def run(model: str, tmp_path: Path) -> Run:
    def run(command: Any, *options: str, name: str = "texts.txt") -> list[list[str]]:
        files = [f"--input_file={tmp_path / name}", f"--output_file={tmp_path}/pairs.tsv", "--overwrite"]
        command.main([f"--model_name_or_path={model}", "--device=cpu", "--disable_tqdm", *files, *options])
        lines = (tmp_path / "pairs.tsv").read_text(encoding="utf-8").splitlines()
        return [line.split("\t") for line in lines[1:]]

    return run


def test_beams_tags_and_limits(run: Run, texts: list[str]) -> None:
    found = run(backtranslate, "--num_beams=2", "--tag=<BT>", "--max_length_ratio=99")
    expected = {text: translate_alone(text, num_beams=2) for text in texts}
    assert found == [[f"<BT> {source}", text] for text, source in expected.items() if source]
    limit = 6
    short = run(backtranslate, "--max_length_ratio=99", f"--max_length={limit}")
    sources = {text: translate_alone(text) for text in texts}
    lengths = {text: max(len(text.split()), len(source.split())) + 1 for text, source in sources.items()}
    assert short == [[source, text] for text, source in sources.items() if source and lengths[text] <= limit]
    assert run(backtranslate, "--max_length_ratio=99", "--max_source_length=6") == [
        [source, text] for source, text in run(backtranslate, "--max_length_ratio=99") if len(text.split()) < limit
    ], "what is cut off has no translation"


def test_samples(run: Run, texts: list[str]) -> None:
    options = ["--method=sampling", "--max_length_ratio=99"]
    first, again, other = (run(backtranslate, *options, f"--seed={seed}") for seed in (1, 1, 2))
    assert first == again != other
    greedy = run(backtranslate, *options, "--top_k=1")
    assert greedy == [[source, text] for text in texts if (source := translate_alone(text))]
    assert run(backtranslate, *options, "--top_p=0.0001") == greedy
    assert run(backtranslate, *options, "--temperature=0.0001") == greedy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top_k=5"], "--top_k need --method sampling"),
        (["--method=sampling", "--num_beams=4"], "--num_beams is 4; sampling takes no beams"),
        (["--method=sampling", "--top_p=0"], "top_p above 0 and at most 1"),
        (["--method=sampling", "--temperature=0"], "temperature must be above 0"),
        (["--seed=3"], "--seed needs --method sampling or noised"),
        (["--tag=a b"], "tag is 'a b'; it must be one word"),
        (["--input_file=nowhere"], "There is no file nowhere"),
    ],
)
def test_impossible_wishes_are_refused(
    run: Run, texts: list[str], options: list[str], message: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit):
        run(backtranslate, *options)
    assert message in capsys.readouterr().err


def test_distilling(run: Run, texts: list[str], tmp_path: Path, capsys: Any) -> None:
    beams = ["--num_beams=3", "--n_best=3"]
    references = random_sentences(6, seed=4)
    rows = [{"source": text, "target": other} for text, other in zip(texts, references, strict=True)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "other.txt").write_text("".join(f"{line}\n" for line in references), encoding="utf-8")
    found = run(distill, *beams, name="pairs.jsonl")
    assert found == run(distill, *beams, f"--reference_file={tmp_path}/other.txt")
    assert [row[::-1] for row in found] == run(distill, *beams, "--swap", name="pairs.jsonl")
    assert len(run(distill, *beams, "--select=bleu", "--min_similarity=10", name="pairs.jsonl")) < len(found)
    best = run(distill, "--select=best", "--num_beams=2")
    assert best == [[text, target] for text in texts if (target := translate_alone(text, num_beams=2))]
    with pytest.raises(SystemExit):
        run(distill, *beams)
    assert "has no references: name a file of them (--reference_file)" in capsys.readouterr().err
