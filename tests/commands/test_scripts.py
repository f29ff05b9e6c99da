"""One model from training to translation by the commands, and what training says to wrong input."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from corpus_files import command_line
from many_processes import write_pairs
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, pipeline

from vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerTokenizer

pytestmark = pytest.mark.usefixtures("no_curves")
SCRIPTS = Path(__file__).parents[2] / "scripts"

Main = Callable[..., None]
Refuse = Callable[[list[Any]], str]


@pytest.fixture
def train(main: Callable[[str], Main]) -> Main:
    return main("train")


@pytest.fixture
def refuse(train: Main, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Expects scripts/train.py to end with an error, and returns what it says."""

    def run(words: list[Any]) -> str:
        with pytest.raises(SystemExit) as end:
            train(*words)
        assert end.value.code == 2
        return capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Arguments of scripts/train.py for one epoch of three steps."""
    folder = tmp_path_factory.mktemp("data")
    return {
        "preset": "tiny",
        "config_overrides": "encoder_layers=1,decoder_layers=1,d_k=4",
        "vocab_size": 280,
        "train_file": write_pairs(folder, "train", 30),
        "validation_file": write_pairs(folder, "validation", 6),
        "per_device_train_batch_size": 10,
        "learning_rate": 0.003,
        "warmup_steps": 2,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "label_smoothing_factor": 0.1,
        "use_cpu": True,
        "disable_tqdm": True,
    }


@pytest.fixture(scope="module")
def trained(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained for three steps in a process of its own, from a file of arguments."""
    folder = tmp_path_factory.mktemp("trained")
    output_dir = folder / "model"
    (folder / "arguments.yaml").write_text(yaml.safe_dump({**settings, "output_dir": str(output_dir)}))
    command = [sys.executable, str(SCRIPTS / "train.py"), "arguments.yaml"]
    result = subprocess.run(command, capture_output=True, check=False, cwd=folder, input="", text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert "pairs: 30 train, 6 validation" in result.stdout
    assert f"The model is in {output_dir}" in result.stdout
    return output_dir


@pytest.mark.parametrize("name", ["demo", "test"])
def test_bash_scripts_explain_themselves(name: str, tmp_path: Path) -> None:
    result = subprocess.run([SCRIPTS / name, "--help"], capture_output=True, check=True, cwd=tmp_path, text=True)
    assert f"scripts/{name}" in result.stdout
    assert "#" not in result.stdout
    assert result.stderr == ""


class TestTraining:
    def test_all_that_belongs_to_the_model_is_saved(self, trained: Path, settings: dict[str, Any]) -> None:
        names = ("arguments", "config", "generation_config", "tokenizer", "tokenizer_config", "train_results")
        expected = {"model.safetensors", "modeling_vanilla_transformer.py", "pipeline_vanilla_transformer.py"}
        assert expected | {f"{name}.json" for name in names} <= {path.name for path in trained.iterdir()}
        scores = json.loads((trained / "eval_results.json").read_text())
        assert all(0 <= scores[name] <= 100 for name in ("eval_bleu", "eval_chrf"))
        assert scores["eval_loss"] > 0
        recorded = json.loads((trained / "arguments.json").read_text())
        assert recorded["model"]["config_overrides"] == settings["config_overrides"]
        assert recorded["data"]["train_file"] == settings["train_file"]
        search = GenerationConfig.from_pretrained(trained)
        assert (search.num_beams, search.max_length, search.max_new_tokens) == (4, None, None)

    def test_the_model_is_what_the_arguments_asked_for(self, trained: Path) -> None:
        model: Any = AutoModelForSeq2SeqLM.from_pretrained(trained)
        tokenizer = AutoTokenizer.from_pretrained(trained)
        assert type(model) is VanillaTransformerForConditionalGeneration
        assert type(tokenizer) is VanillaTransformerTokenizer
        assert (model.config.encoder_layers, model.config.d_k, model.config.d_model) == (1, 4, 32)
        assert model.config.label_smoothing == 0.1
        assert model.config.vocab_size == len(tokenizer)
        # Any, since the library types the names of its own tasks only.
        make_pipeline: Any = pipeline
        (translation,) = make_pipeline("translation", model=str(trained), device="cpu")("one two", max_new_tokens=5)
        assert isinstance(translation["translation_text"], str)

    def test_the_same_command_with_more_epochs_goes_on(
        self, trained: Path, settings: Any, train: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        model = Path(shutil.copytree(trained, tmp_path / "model"))
        train(*command_line(settings, output_dir=model, num_train_epochs=2))
        assert f"Resuming from {model / 'checkpoint-3'}" in capsys.readouterr().out
        before, after = (json.loads((folder / "trainer_state.json").read_text()) for folder in (trained, model))
        assert (before["global_step"], after["global_step"]) == (3, 6)
        losses = [[entry["loss"] for entry in state["log_history"] if "loss" in entry] for state in (before, after)]
        assert len(losses[0]) == 3
        assert losses[1][:3] == losses[0], "the first three steps are those of the first part"
        assert len(losses[1]) == 6
        old, new = (load_file(folder / "checkpoint-3" / "model.safetensors") for folder in (trained, model))
        assert all(old[name].equal(new[name]) for name in old)

    def test_the_checkpoint_that_a_run_goes_on_from_may_be_deleted_meanwhile(
        self, settings: dict[str, Any], train: Main, tmp_path: Path
    ) -> None:
        model = tmp_path / "model"
        changes = {"output_dir": model, "load_best_model_at_end": False, "save_total_limit": 1}
        train(*command_line(settings, **changes))
        train(*command_line(settings, **changes, num_train_epochs=3))
        assert [folder.name for folder in model.glob("checkpoint-*")] == ["checkpoint-9"]
        assert json.loads((model / "train_results.json").read_text())["epoch"] == 3

    def test_a_finished_run_keeps_its_record(self, trained: Path, settings: Any, train: Main, tmp_path: Path) -> None:
        model = Path(shutil.copytree(trained, tmp_path / "model"))
        before = (model / "train_results.json").read_bytes()
        train(*command_line(settings, output_dir=model))
        assert (model / "train_results.json").read_bytes() == before

    def test_a_run_of_other_arguments_is_refused(self, trained: Path, settings: Any, refuse: Refuse) -> None:
        before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
        changed = command_line(settings, output_dir=trained, vocab_size=300)
        assert "vocab_size: 280 there, 300 now" in refuse(changed)
        assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before

    def test_its_model_is_scored_and_translates(
        self, trained: Path, settings: Any, main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        named = ["--model_name_or_path", trained, "--device", "cpu", "--max_new_tokens", "8", "--disable_tqdm"]
        test_file = settings["validation_file"]
        main("evaluate_translation")(*named, "--test_file", *test_file, "--output_dir", tmp_path / "scores")
        assert re.search(r"^sentences +6  4 beams$", capsys.readouterr().out, flags=re.MULTILINE)
        hypotheses = (tmp_path / "scores" / "hypotheses.txt").read_text(encoding="utf-8")
        main("translate")(*named, "--input_file", test_file[0], "--output_file", tmp_path / "output.de")
        assert (tmp_path / "output.de").read_text(encoding="utf-8") == hypotheses
        assert hypotheses.count("\n") == 6


class TestErrorsOfTraining:
    """Each ends with one message, and leaves no folder behind that would refuse the command when it is put right."""

    @pytest.mark.parametrize(
        ("german", "changes", "message"),
        [
            (b"eins\n" * 29, {}, r"train\.en has 30 lines, but .*train\.de has 29"),
            (b"eins\nf\xfcnf\n" * 15, {}, r"train\.de, line 2: byte 0xfc"),
            (b"eins\n" * 30, {"config_overrides": "dropout=1.5"}, r"dropout must be in \[0, 1\), not 1\.5"),
            (b"eins\n" * 30, {"config_overrides": "d_model=wide"}, r"d_model.*(?s:.*)'?wide"),
            (b"eins\n" * 30, {"vocab_size": 9}, r"vocab_size=9 is too small"),
        ],
    )
    def test_text_files_and_arguments(
        self, german: bytes, changes: Any, message: str, settings: Any, refuse: Refuse, tmp_path: Path
    ) -> None:
        files = write_pairs(tmp_path, "train", 30)
        Path(files[1]).write_bytes(german)
        said = refuse(command_line({**settings, "train_file": files}, output_dir=tmp_path / "out", **changes))
        assert re.search(message, said), said
        assert said.index("usage: ") < 3
        assert len(said.split("error:")[0].splitlines()) <= 3, "the message is not buried under a hundred arguments"
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(("name", "write"), [("a.json", json.dumps), ("a.yaml", yaml.safe_dump)])
    def test_a_file_of_arguments(self, name: str, write: Any, refuse: Refuse, tmp_path: Path) -> None:
        (tmp_path / name).write_text(write({"builtin_corpus": True, "preset": "tiny", "presett": "big"}))
        assert "presett" in refuse([tmp_path / name])
        assert "missing" in refuse([tmp_path / f"missing-{name}"])
