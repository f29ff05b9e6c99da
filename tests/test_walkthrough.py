"""The walk through the Transformer: it runs in every language, and what it says is true."""

import importlib
import re
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def walkthrough() -> Iterator[ModuleType]:
    scripts = str(Path(__file__).resolve().parent.parent / "scripts")
    sys.path.insert(0, scripts)
    yield importlib.import_module("walkthrough")
    sys.path.remove(scripts)


@pytest.fixture(scope="module")
def output(walkthrough: ModuleType) -> str:
    """What a whole walk prints; the model is trained as a user's is."""
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *texts, end="\n", **_: printed.append(" ".join(map(str, texts)) + end))
        walkthrough.main(["--disable_tqdm"])
    return "".join(printed)


def test_the_languages_say_the_same_things_with_the_same_numbers(walkthrough: ModuleType) -> None:
    english, *others = walkthrough.TEXTS.values()
    for other in others:
        assert other.keys() == english.keys()
        for name, text in english.items():
            fields = [
                sorted((name, spec) for _, name, spec, _ in string.Formatter().parse(each) if name)
                for each in (text, other[name])
            ]
            assert set(fields[0]) == set(fields[1]), name


def test_the_corpus_puts_adjectives_behind_their_nouns_and_makes_them_agree(walkthrough: ModuleType) -> None:
    corpus = {" ".join(source): " ".join(target) for source, target in walkthrough.make_corpus()}
    assert corpus["a green car and a small book"] == "une voiture verte et un livre petit"
    assert len(corpus) == 36 + 36 * 36


def test_the_hand_calculations_agree_with_the_model(output: str) -> None:
    text = " ".join(output.split())
    differences = re.findall(r"(?:weights differ from these by|first layer differs by) (\S+e-\d+|0\.0e\+00)", text)
    assert len(differences) == 2
    assert all(float(difference) < 1e-5 for difference in differences)
    by_hand, in_table = re.findall(r"= (0\.\d{4}); the model's table has (0\.\d{4})", text)[0]
    assert by_hand == in_table


def test_the_model_learns_the_task(output: str) -> None:
    right, total = re.findall(r"translated right: (\d+) of (\d+)", output)[0]
    assert int(total) == 100
    assert int(right) >= 95
    assert re.search(r"<s> une balle petite et un chien -> +</s> 0\.[89]", output)


def test_the_best_beam_has_the_score_that_the_formula_gives(output: str) -> None:
    first = float(re.findall(r"\n +(-\d\.\d{4})  une balle petite et un chien </s>", output)[0])
    by_hand = float(re.findall(r"-> (-\d\.\d{4})", output)[-1])
    assert by_hand == pytest.approx(first, abs=1e-4)


def test_the_chinese_walk_runs_and_bad_arguments_are_named(
    walkthrough: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    walkthrough.main(["--disable_tqdm", "--lang", "zh", "--steps", "2"])
    assert "注意力" in capsys.readouterr().out
    for arguments, message in ((["--steps", "0"], "at least 1"), (["--lang", "xx"], "invalid choice")):
        with pytest.raises(SystemExit):
            walkthrough.main(arguments)
        assert message in capsys.readouterr().err
