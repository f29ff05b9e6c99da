"""scripts/recipes/ablation.py: rows of changes to a recipe are trained, scored on its validation data, and compared."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.commands import evaluate, train
from vanilla_transformer.training.setup import parse_overrides

ablation: Any = importlib.import_module("ablation")
steps: Any = importlib.import_module("steps")
pytestmark = pytest.mark.usefixtures("no_curves")

RECIPES = Path(ablation.__file__).parent


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    for language, words in {"en": "a man rides two horses", "de": "ein mann reitet zwei pferde"}.items():
        lines = [" ".join(words.split()[start:]) + "\n" for start in range(5)]
        (tmp_path / f"text.{language}").write_text("".join(lines))
    files = [str(tmp_path / f"text.{language}") for language in ("en", "de")]
    settings: dict[str, Any] = {"train_file": files, "validation_file": files, "source_lang": "en", "target_lang": "de"}
    settings |= {"preset": "tiny", "config_overrides": "encoder_layers=1,dropout=0.2", "vocab_size": 300}
    settings |= {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no", "report_to": "none", "use_cpu": True}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**settings, "disable_tqdm": True}))
    return path


def test_rows_are_trained_and_scored_once(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def call(*words: str) -> None:
        calls.append([*words])
        {"train": train, "evaluate": evaluate}[words[0]].main(calls[-1][1:])

    monkeypatch.setattr(steps, "call", call)
    changes, out = tmp_path / "changes.yaml", tmp_path / "out"
    options = {"config_overrides": "dropout=0", "max_steps": 2, "bf16": True}
    changes.write_text(yaml.safe_dump({"base": None, "other": {"options": options, "columns": {"paper": 5.5}}}))
    arguments = ["--recipe", str(recipe), "--changes", str(changes), "--output_dir", str(out), "--seeds", "1", "2"]
    ablation.main(arguments)
    assert [words[0] for words in calls] == ["train", "evaluate"] * 4
    folders = [words[words.index("--output_dir") + 1] for words in calls if words[0] == "train"]
    assert folders == [str(out / name) for name in ("base/seed1", "other/seed1", "base/seed2", "other/seed2")]
    config = VanillaTransformerConfig.from_pretrained(out / "other" / "seed1")
    assert (config.dropout, config.encoder_layers, config.decoder_layers) == (0.0, 1, 2)
    head, _, base, other = ((out / "results.md").read_text()).splitlines()
    names = ["", "paper", "perplexity", "BLEU", "parameters, millions", "updates", "minutes", "seeds"]
    assert [cell.strip() for cell in head.split("|")[1:-1]] == names
    scores = [json.loads((out / "base" / f"seed{seed}/validation/metrics.json").read_text()) for seed in (1, 2)]
    cells = [cell.strip() for cell in base.split("|")[1:-1]]
    assert cells[:3] == ["base", "", ablation.describe([score["perplexity"] for score in scores], 2)]
    assert [cell.strip() for cell in other.split("|")[1:-1]][::5] == ["other", "2 ± 0"]
    ablation.main([*arguments, "--rows", "other"])
    assert len(calls) == 8, "what is finished is not done again"
    with pytest.raises(SystemExit, match=r"made by[^$]*not by[^$]*--learning_rate 0\.1[^$]*another output folder"):
        ablation.main([*arguments, "--learning_rate", "0.1"])
    text = recipe.read_text()
    recipe.write_text(text.replace("vocab_size: 300", "vocab_size: 301"))
    with pytest.raises(SystemExit, match=r"made by[^$]*recipe\.yaml@[^$]*not by[^$]*recipe\.yaml@"):
        ablation.main(arguments)
    recipe.write_text(text)
    metrics = out / "other" / "seed2" / "metrics.json"  # of a training that was killed after its last update
    metrics.write_text(json.dumps(json.loads(metrics.read_text()) | {"runtime_seconds": None}))
    ablation.main(arguments)
    assert [row.split("|")[-3].strip() for row in (out / "results.md").read_text().splitlines()[2:]] == ["0 ± 0", "0"]


def test_other_data_are_another_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may move, and what a command writes is there only afterwards."""
    data, out = tmp_path / "data.tsv", tmp_path / "out"
    out.mkdir()
    calls: list[str] = []

    def call(*words: str) -> None:
        calls.append(words[-1])
        for name in ("made", "beside"):
            (out / name).write_text("x")

    monkeypatch.setattr(steps, "call", call)
    words = ["clean", "--output_file", out / "beside", "--file", data]
    data.write_text("one")
    for _ in range(2):
        steps.run_once(out, out / "made", *words)
    assert len(calls) == 1
    moved = tmp_path / "moved" / "data.tsv"
    moved.parent.mkdir()
    data.rename(moved)
    steps.run_once(out, out / "made", *words[:-1], moved)
    moved.write_text("another")
    with pytest.raises(SystemExit, match="made by"):
        steps.run_once(out, out / "made", *words[:-1], moved)


def test_options_of_the_command_line_are_those_of_all_rows(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def call(*words: str) -> None:
        calls.append([*words])
        folder = Path(calls[-1][calls[-1].index("--output_dir") + 1])
        folder.mkdir(parents=True)
        names = ("perplexity", "bleu", "parameters", "steps", "runtime_seconds")
        (folder / "metrics.json").write_text(json.dumps(dict.fromkeys(names, 1)))

    monkeypatch.setattr(steps, "call", call)
    rows = {"base": None, "wide": {"options": {"config_overrides": "d_model=32", "train_file": ["a.en", "a.de"]}}}
    (tmp_path / "changes.yaml").write_text(yaml.safe_dump(rows))
    words = [
        "--recipe",
        str(recipe),
        "--changes",
        str(tmp_path / "changes.yaml"),
        "--output_dir",
        str(tmp_path / "out"),
    ]
    more = ["--config_overrides", "dropout=0.5", "--validation_file", "b.en", "b.fr", "--target_lang", "fr"]
    ablation.main([*words, *more, "--bf16", "false"])
    trains = [words for words in calls if words[0] == "train"]
    overrides = [words[words.index("--config_overrides") + 1] for words in trains]
    own = "encoder_layers=1,dropout=0.2,dropout=0.5"
    assert overrides == [own, f"{own},d_model=32"]
    assert [words.count("--config_overrides") for words in trains] == [1, 1]
    assert all(words[words.index("--bf16") + 1] == "false" for words in trains)
    assert trains[1][trains[1].index("--train_file") :][:3] == ["--train_file", "a.en", "a.de"]
    for words in calls:
        if words[0] == "evaluate":
            assert words[words.index("--test_file") :][:3] == ["--test_file", "b.en", "b.fr"]
            assert words[words.index("--target_lang") + 1] == "fr"


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("[1]", [], "must hold rows by name"),
        ("base: {option: {}}", [], "row base: option is neither `options` nor `columns`"),
        ("base:", ["--rows", "bass"], "--rows bass: the rows of .* are base"),
    ],
)
def test_what_is_no_file_of_rows(recipe: Path, tmp_path: Path, text: str, more: list[str], message: str) -> None:
    (tmp_path / "changes.yaml").write_text(text)
    arguments = ["--recipe", str(recipe), "--changes", str(tmp_path / "changes.yaml"), "--output_dir", str(tmp_path)]
    with pytest.raises(SystemExit, match=message):
        ablation.main([*arguments, *more])


def test_rows_of_table_3_change_the_recipe_as_the_paper_changes_its_model() -> None:
    """Each row differs from base in the very fields in which the preset of its name does."""
    recipe = yaml.safe_load((RECIPES / "multi30k_en_de.yaml").read_text(encoding="utf-8"))
    rows = ablation.read_changes(RECIPES / "ablations" / "multi30k_table3.yaml", None)
    paper_base = VanillaTransformerConfig.from_preset("base").to_dict()
    mine: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        merged = ablation.merge_options(recipe, row.get("options", {}))
        text = merged.get("config_overrides", recipe["config_overrides"])
        mine[name] = VanillaTransformerConfig.from_preset("base", **parse_overrides(text)).to_dict()
    for name, config in mine.items():
        paper = VanillaTransformerConfig.from_preset(name).to_dict()
        changed = {key for key in paper if paper[key] != paper_base[key]} - {"d_k", "d_v"}
        assert {key for key in config if config[key] != mine["base"][key]} - {"d_k", "d_v"} == changed, name
        for key in changed:
            assert (config[key] > mine["base"][key]) == (paper[key] > paper_base[key]), name
