"""`vanilla-transformer clean`: which rules its options choose, and what it prints."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_translations import random_sentences, save_model

from vanilla_transformer.commands import clean
from vanilla_transformer.data.cleaning import default_rules, make_rules, read_rules

LANGUAGES = ["--source_lang", "en", "--target_lang", "de"]


def refuse(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        clean.main(list(words))
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def corpus(tmp_path: Path) -> list[str]:
    pairs = [("It is a horse.", "Es ist ein Pferd."), ("<b>", "Es ist ein Hund."), ("Tom, 5", "Tom, 6")]
    (tmp_path / "in.tsv").write_text("".join(f"{one}\t{two}\n" for one, two in pairs), encoding="utf-8")
    return ["--files", str(tmp_path / "in.tsv"), "--output_files", str(tmp_path / "out.tsv"), "--disable_tqdm"]


def test_a_summary_says_what_rules_have_done(
    corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean.main([*corpus, *LANGUAGES])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["rule", "seen", "removed", "changed"]
    assert ["HtmlTagFilter", "3", "1", "33.3%", "0"] in lines
    assert ["num_mismatch", "2", "1", "50.0%", "0"] in lines
    assert lines[-1] == ["1", "of", "3", "pairs", "stay", "(33.3%)"]
    assert (tmp_path / "out.tsv").read_text(encoding="utf-8") == "source\ttarget\nIt is a horse.\tEs ist ein Pferd.\n"


def test_rules_that_are_shown_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean.main([*LANGUAGES, "--show_rules"])
    (tmp_path / "rules.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    assert read_rules(tmp_path / "rules.yaml") == make_rules(default_rules("en", "de"))
    clean.main(["--config", str(tmp_path / "rules.yaml"), "--show_rules", "--without", "HtmlTagFilter", "duplicates"])
    shown = {next(iter(each.values()))["name"] for each in yaml.safe_load(capsys.readouterr().out)}
    assert {"near_duplicates", "LengthFilter"} <= shown
    assert not {"HtmlTagFilter", "duplicates"} & shown


def test_options_change_rules(corpus: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "LengthFilter.max_length=[80, 90]", "num_mismatch.ratio=0.25", "--without", "HtmlTagFilter"]
    clean.main([*corpus, *LANGUAGES, *settings])
    rules = {rule["name"]: rule for rule in json.loads((tmp_path / "out.tsv.report.json").read_text())["rules"]}
    assert rules["LengthFilter"]["parameters"]["max_length"] == [80, 90]
    assert rules["LengthFilter"]["parameters"]["min_length"] == [1, 1], "the others stay"
    assert rules["num_mismatch"]["removed"] == 0
    assert "HtmlTagFilter" not in rules


def test_models_choose_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_model(tmp_path / "model")
    texts = [random_sentences(20, seed=seed) for seed in (0, 1)]
    for name, lines in zip(("s", "t"), texts, strict=True):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (tmp_path / "rules.yaml").write_text("[]", encoding="utf-8")
    words = ["--config", "rules.yaml", "--files", "s", "t", "--output_files", "out.s", "out.t", "--keep_share", "0.25"]
    words += [
        "--model_name_or_path",
        folder,
        "--reverse_model_name_or_path",
        folder,
        "--device",
        "cpu",
        "--window_size",
        "6",
    ]
    clean.main([str(tmp_path / word) if word in ("rules.yaml", "s", "t", "out.s", "out.t") else word for word in words])
    assert capsys.readouterr().out.endswith("5 of 20 pairs stay (25.0%)\n")
    kept = list(zip(*((tmp_path / name).read_text().splitlines() for name in ("out.s", "out.t")), strict=True))
    assert [pair for pair in zip(*texts, strict=True) if pair in kept] == kept


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Give --source_lang and --target_lang, or rules of your own (--config)."),
        (LANGUAGES, "Give --output_files"),
        ([*LANGUAGES, "--output_files", "a.tsv"], "give exactly one of them"),
        ([*LANGUAGES, "--keep_share", "0.5"], "--keep_share needs --model_name_or_path."),
        ([*LANGUAGES, "--batch_size", "1", "--device", "cpu"], "--batch_size and --device need --model_name_or_path."),
        (
            [*LANGUAGES, "--split", "x", "--dataset_config_name", "y"],
            "--dataset_config_name and --split need --dataset_name",
        ),
        ([*LANGUAGES, "--model_name_or_path", "x"], "needs either --keep_share or --max_score."),
        (
            [*LANGUAGES, "--show_rules", "--without", "Lenght"],
            "--without Lenght: there is no such rule; the rules are Fix",
        ),
        (
            [*LANGUAGES, "--show_rules", "--set", "LengthFilter.max=3"],
            "no parameter 'max'; its parameters are name, min",
        ),
        ([*LANGUAGES, "--show_rules", "--set", "LengthFilter.max_length=[80"], "max_length=[80: while parsing"),
        ([*LANGUAGES, "--show_rules", "--set", "LengthFilter"], "--set LengthFilter: it must be RULE.PARAMETER=VALUE"),
        (["--config", "nowhere.yaml", "--show_rules"], "nowhere.yaml"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: Any, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refuse(*words, capsys=capsys)
