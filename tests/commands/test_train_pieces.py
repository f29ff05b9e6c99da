"""Corpora that are cut into pieces already ("pul@@ ley"): trained on as they stand, scored as words; and early ends."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sacrebleu
import yaml
from corpus_files import command_line
from transformers import AutoTokenizer, TrainerControl

from vanilla_transformer.commands import evaluate, train
from vanilla_transformer.inference.evaluate import join_pieces
from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.training.callbacks import StopEarly
from vanilla_transformer.training.setup import build_config

pytestmark = pytest.mark.usefixtures("no_curves")

SOURCES = ["a pul@@ ley is here .", "two pul@@ leys are here .", "a man is here .", "two men are here ."] * 6
TARGETS = ["da ist eine rol@@ le .", "da sind zwei rol@@ len .", "da ist ein mann .", "da sind zwei männ@@ er ."] * 6


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    files = {"source": tmp_path / "pairs.en", "target": tmp_path / "pairs.de"}
    for name, lines in (("source", SOURCES), ("target", TARGETS)):
        files[name].write_text("\n".join(lines) + "\n", encoding="utf-8")
    pairs = [str(path) for path in files.values()]
    return {
        "preset": "tiny",
        "tokenizer_type": "wordlevel",
        "remove_bpe": "@@",
        "bleu_tokenize": "none",
        "train_file": pairs,
        "validation_file": pairs,
        "learning_rate": 0.01,
        "warmup_steps": 5,
        "use_cpu": True,
        "num_train_epochs": 60,
        "per_device_train_batch_size": 4,
        "early_stopping_patience": 8,
        "disable_tqdm": True,
        "output_dir": str(tmp_path / "run"),
        "generation_max_length": 12,
    }


def test_pieces_are_learned_and_words_scored(settings: dict[str, Any], tmp_path: Path) -> None:
    every = {"eval_strategy": "steps", "eval_steps": 30, "save_strategy": "steps", "save_steps": 30}
    train.main(command_line(settings | every | {"early_stopping_patience": 2}))
    run = tmp_path / "run"
    tokenizer = AutoTokenizer.from_pretrained(run)
    assert tokenizer.tokenize("two pul@@ ley .") == ["two", "pul@@", "ley", "."]
    state = json.loads((run / "trainer_state.json").read_text())
    bleu = [record["eval_bleu"] for record in state["log_history"] if "eval_bleu" in record]
    assert max(bleu) == pytest.approx(100), "else this tests nothing"
    assert state["global_step"] < state["max_steps"], "it has ended early"

    scored = tmp_path / "scored"
    arguments = {"model_name_or_path": run, "test_file": settings["train_file"], "output_dir": scored}
    evaluate.main(command_line(arguments | {"remove_bpe": "@@", "bleu_tokenize": "none", "disable_tqdm": True}))
    metrics = json.loads((scored / "metrics.json").read_text())
    assert metrics["exact_match"] == 100
    assert "tok:none" in metrics["bleu_signature"]
    for name, lines in (("references", TARGETS), ("hypotheses", TARGETS), ("sources", SOURCES)):
        joined = [line.replace("@@ ", "") for line in lines]
        assert (scored / f"{name}.txt").read_text(encoding="utf-8").splitlines() == joined


@pytest.mark.parametrize(
    ("cut", "joined"),
    [("pul@@ ley .", "pulley ."), ("pul@@", "pul"), ("a@@ b c@@ d", "ab cd"), ("a@ b ", "a@ b "), ("", "")],
)
def test_pieces_are_joined(cut: str, joined: str) -> None:
    assert join_pieces([cut], "@@") == [joined]


def test_pieces_are_joined_to_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Systems and references; cut or joined, they have the same scores."""
    files = {name: tmp_path / f"{name}.de" for name in ("one", "other", "reference")}
    files["one"].write_text("".join(f"{line}\n" for line in TARGETS))
    files["other"].write_text("".join(f"{line.replace('@@ ', '').replace('ein', 'x')}\n" for line in TARGETS))
    files["reference"].write_text("".join(f"{line}\n" for line in TARGETS))
    words = ["--compare", files["one"], files["other"], "--test_file", files["one"], files["reference"]]
    words += [
        "--remove_bpe",
        "@@",
        "--bleu_tokenize",
        "none",
        "--compare_samples",
        "10",
        "--output_dir",
        tmp_path / "out",
    ]
    evaluate.main([str(word) for word in words])
    report = json.loads((tmp_path / "out" / "comparison.json").read_text())
    joined = [line.replace("@@ ", "") for line in TARGETS]
    expected = [
        sacrebleu.corpus_bleu(each, [joined], tokenize="none", force=True).score
        for each in (joined, [line.replace("ein", "x") for line in joined])
    ]
    assert [system["bleu"]["score"] for system in report["systems"]] == pytest.approx(expected, abs=0.01)


class TestStopEarly:
    @staticmethod
    def find_end(values: list[float], *, patience: int, greater: bool) -> int:
        """After how many validations a training with these scores ends."""
        arguments: Any = SimpleNamespace(metric_for_best_model="chrf", greater_is_better=greater, save_strategy="no")
        state: Any = SimpleNamespace(log_history=[{"loss": 1.0}])
        for count, value in enumerate(values, start=1):
            state.log_history.append({"eval_chrf": value, "step": count})
            control = TrainerControl()
            # A new one each time, as in a run that is resumed.
            StopEarly(patience).on_evaluate(arguments, state, control)
            if control.should_training_stop:
                return count
        return -1

    def test_it_waits_for_the_best_to_be_beaten(self) -> None:
        assert self.find_end([1, 3, 2, 3, 2, 4], patience=3, greater=True) == 5
        assert self.find_end([1, 3, 2, 2, 4, 2, 2], patience=3, greater=True) == -1
        assert self.find_end([3, 1, 2, 2, 0], patience=2, greater=False) == 4

    def test_a_score_that_is_not_measured_is_named(self) -> None:
        arguments: Any = SimpleNamespace(metric_for_best_model="eval_ter", greater_is_better=False)
        state: Any = SimpleNamespace(log_history=[{"eval_bleu": 1.0}])
        with pytest.raises(ValueError, match="eval_ter is not among what was measured: eval_bleu"):
            StopEarly(1).on_evaluate(arguments, state, TrainerControl())

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"early_stopping_patience": 0}, "early_stopping_patience=0: must be at least 1"),
            ({"eval_strategy": "no"}, "early_stopping_patience needs validations"),
            ({"validation_file": None}, "early_stopping_patience needs validation data"),
            (
                {"validation_file": None, "early_stopping_patience": None, "save_strategy": "best"},
                "save_strategy=best needs validation data",
            ),
            ({"tokenizer_type": "words"}, "tokenizer_type=words: must be one of bpe, unigram, wordlevel, char"),
            ({"target_tokenizer_type": "char"}, "target_tokenizer_type=char needs separate_vocabularies"),
        ],
    )
    def test_what_cannot_be_is_refused(
        self, settings: dict[str, Any], changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        changed = {name: value for name, value in (settings | changes).items() if value is not None}
        with pytest.raises((SystemExit, ValueError)) as error:
            train.main(command_line(changed))
        assert message in f"{error.value} {capsys.readouterr().err}".replace("\n", " ")


def test_a_file_of_arguments_may_be_followed_by_others(settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    words = [str(path), "--seed", "7", "--bf16", "--learning_rate", "2e-3", "--train_file", "one.tsv"]
    _, model, data, arguments = train.parse(train.make_parser(), words)
    assert (arguments.seed, arguments.bf16, arguments.learning_rate, data.train_file) == (7, True, 0.002, ["one.tsv"])
    assert (model.tokenizer_type, arguments.num_train_epochs, arguments.output_dir) == (
        "wordlevel",
        60,
        settings["output_dir"],
    )


def test_the_best_checkpoint_is_kept_beside_those_that_are_averaged(settings: dict[str, Any]) -> None:
    words = [*command_line(settings), "--average_checkpoints", "3", "--metric_for_best_model", "loss"]
    *_, arguments = train.parse(train.make_parser(), words)
    assert (arguments.save_total_limit, arguments.load_best_model_at_end, arguments.greater_is_better) == (
        4,
        False,
        False,
    )


RECIPES = sorted((Path(__file__).parents[2] / "scripts" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_a_command(path: Path) -> None:
    _, model, data, arguments = train.parse(train.make_parser(), [str(path)])
    assert all([data.train_file, data.validation_file, arguments.use_cpu])
    assert build_config(model, VanillaTransformerTokenizer()).dropout == (0.2 if path.stem == "g2p" else 0.3)
