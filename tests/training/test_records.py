"""Watching real trainings of a tiny model: progress bar, curves.png, metrics.json and TensorBoard."""

import json
import logging
import math
import re
import time
from functools import partial
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_trainer
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from tiny_trainer import make_dataset
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import PrinterCallback, ProgressCallback

import vanilla_transformer
from vanilla_transformer.training import records as watching
from vanilla_transformer.training.records import (
    LogLines,
    TokenProgressCallback,
    WriteCurves,
    close_progress,
    use_token_progress,
    write_metrics,
)
from vanilla_transformer.training.trainer import TranslationTrainer
from vanilla_transformer.visualization import plot_learning_curves

STEPS = 6

Pictures = list[dict[str, Any]]


make_trainer = partial(tiny_trainer.make_trainer, metric_for_best_model="loss", greater_is_better=False)


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> Pictures:
    calls: Pictures = []

    def draw(log_history: list[dict[str, Any]], path: Path, **kwargs: Any) -> None:
        calls.append({"log": list(log_history), "path": path, **kwargs})
        plot_learning_curves(log_history, path, **kwargs)

    monkeypatch.setattr(watching, "plot_learning_curves", draw)
    return calls


@pytest.fixture
def propagated(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(watching.logger, "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


class TestCurves:
    def test_they_are_drawn_after_evaluations_and_at_the_end(self, pictures: Pictures, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path / "run", WriteCurves(min_interval=0))
        trainer.train()
        trainer.evaluate()  # belongs to no training
        assert [call["log"][-1]["step"] for call in pictures] == [2, 4, 6, 6]
        *evaluations, end = pictures
        assert all("eval_loss" in call["log"][-1] for call in evaluations)
        assert "train_loss" in end["log"][-1]
        for call in pictures:
            losses = {entry["step"]: entry["eval_loss"] for entry in call["log"] if "eval_loss" in entry}
            if call is not end:
                losses.popitem()  # is compared with the others, and its checkpoint saved, only afterwards
            assert call["best_step"] == min(losses, key=lambda step: losses[step], default=None)
            assert call["path"] == tmp_path / "run" / "curves.png"
            assert call["title"] == "run"
        assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(("strategy", "logged"), [("steps", [4, 6]), ("no", [])])
    def test_the_last_update_is_logged(self, strategy: str, logged: list[int], tmp_path: Path) -> None:
        for steps in (4, 100):
            changes = {"eval_strategy": "no", "logging_steps": steps, "logging_strategy": strategy}
            trainer = make_trainer(tmp_path / str(steps), WriteCurves(), **changes)
            trainer.train()
            found = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
            assert found == [step for step in logged if step % steps == 0 or step == STEPS]
            assert (tmp_path / str(steps) / "curves.png").is_file() == bool(logged)

    def test_other_processes_draw_and_write_nothing(self, tmp_path: Path) -> None:
        trainer: Any = make_trainer(tmp_path / "run")
        state = TrainerState(is_world_process_zero=False, log_history=[{"loss": 1.0, "step": 1}])
        WriteCurves().on_train_end(trainer.args, state, trainer.control)
        assert write_metrics(tmp_path / "run", state, {}, args=trainer.args, model=trainer.model) is None
        assert not list(tmp_path.glob("run/*"))

    @pytest.mark.usefixtures("without_matplotlib")
    def test_a_picture_that_cannot_be_written_is_reported_once(self, propagated: Any, tmp_path: Path) -> None:
        assert make_trainer(tmp_path, WriteCurves(min_interval=0)).train().global_step == STEPS
        (message,) = [message for message in propagated.messages if "was not written" in message]
        assert message.startswith(f"{tmp_path / 'curves.png'} was not written: ")
        assert 'pip install "vanilla-transformer[train]"' in message

    def test_pictures_are_not_made_too_often_and_every_panel_has_data(self, pictures: Pictures, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, WriteCurves("curves.svg"), trainer_class=TranslationTrainer, run_name="a run")
        trainer.train()
        assert [call["log"][-1]["step"] for call in pictures] == [2, 6]
        assert pictures[0]["title"] == "a run"
        texts = re.findall("<text[^>]*>(.*?)</text>", (tmp_path / "curves.svg").read_text())
        for title in ("Loss", "Validation perplexity", "Learning rate", "Gradient norm", "Speed", "Padding"):
            assert title in texts


class TestProgress:
    def train(self, tmp_path: Path, capsys: Any, resume: str | None = None, **changes: Any) -> tuple[str, str]:
        trainer = make_trainer(tmp_path, disable_tqdm=False, **changes)
        use_token_progress(trainer)
        trainer.train(resume_from_checkpoint=resume)
        captured = capsys.readouterr()
        return captured.out, captured.err

    def test_the_bar_shows_speed_and_padding(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        out, err = self.train(tmp_path, capsys, trainer_class=TranslationTrainer)
        state = TrainerState.load_from_json(str(tmp_path / f"checkpoint-{STEPS}" / "trainer_state.json"))
        logs = [entry for entry in state.log_history if "loss" in entry]
        assert len(logs) == STEPS
        for entry in logs:
            assert (
                f"loss {entry['loss']:.3f}, {entry['target_tokens_per_second']:,.0f} target tokens/s, "
                f"padding {100 * entry['padding_share']:.1f}%, lr {entry['learning_rate']:.2e}"
            ) in err
        assert f"training: 100%|██████████| {STEPS}/{STEPS}" in err
        scores = [entry for entry in state.log_history if "eval_loss" in entry]
        assert out.splitlines() == [
            f"step {entry['step']}: loss {entry['eval_loss']:.4g}, perplexity {entry['eval_perplexity']:.4g}"
            for entry in scores
        ]

    def test_a_plain_trainer_and_one_that_goes_on(self, capsys: Any, tmp_path: Path) -> None:
        _, err = self.train(tmp_path, capsys, max_steps=4)
        assert re.search(r"step/s, loss \d\.\d{3}, lr \d\.\d\de-\d\d\]", err)
        assert "tokens/s" not in err
        _, err = self.train(tmp_path, capsys, resume=str(tmp_path / "checkpoint-4"))
        positions = [int(number) for number in re.findall(rf"(\d+)/{STEPS} ", err)]
        assert (positions[0], positions[-1]) == (4, STEPS)
        assert positions == sorted(positions)

    def test_nothing_is_drawn_after_it_is_closed(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        class Interrupt(TrainerCallback):
            def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
                raise KeyboardInterrupt

        trainer = make_trainer(tmp_path, Interrupt(), disable_tqdm=False)
        use_token_progress(trainer)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        close_progress(trainer)
        assert capsys.readouterr().err.endswith("\n")
        (progress,) = [each for each in trainer.callback_handler.callbacks if isinstance(each, TokenProgressCallback)]
        bar: Any = progress.training_bar
        bar.close()
        assert capsys.readouterr().err == ""

    def test_it_takes_the_place_of_the_librarys_own_bar_only(self, tmp_path: Path) -> None:
        for disabled, own in ((False, TokenProgressCallback), (True, LogLines)):
            trainer = make_trainer(tmp_path, disable_tqdm=disabled)
            use_token_progress(trainer)
            kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
            assert [kind for kind in kinds if issubclass(kind, (ProgressCallback, PrinterCallback))] == [own]

        class OwnProgress(ProgressCallback):
            pass

        trainer = make_trainer(tmp_path, disable_tqdm=False)
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(OwnProgress())
        before = list(trainer.callback_handler.callbacks)
        use_token_progress(trainer)
        assert trainer.callback_handler.callbacks == before


def strict_json(path: Path) -> Any:
    """Reads JSON as the standard has it, without NaN and Infinity."""
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)


def write(trainer: Any, folder: Path, state: TrainerState, metrics: dict[str, float]) -> Any:
    path = write_metrics(folder, state, metrics, args=trainer.args, model=trainer.model)
    assert path == folder / "metrics.json"
    return strict_json(path)


class TestMetrics:
    def test_they_say_what_came_out_and_what_it_took(self, tmp_path: Path) -> None:
        trainer: Any = make_trainer(tmp_path, trainer_class=TranslationTrainer)
        metrics = {**trainer.train().metrics, **trainer.evaluate()}
        content = write(trainer, tmp_path, trainer.state, metrics)
        assert content["metrics"] == metrics
        assert (content["steps"], content["epochs"]) == (STEPS, trainer.state.epoch)
        assert content["runtime_seconds"] == metrics["train_runtime"]
        losses = {e["step"]: e["eval_loss"] for e in reversed(trainer.state.log_history) if "eval_loss" in e}
        best = min(losses, key=lambda step: losses[step])
        best_entry = {"metric": "loss", "value": losses[best], "step": best, "checkpoint": f"checkpoint-{best}"}
        assert content["best"] == best_entry
        assert content["last_log"] == next(entry for entry in trainer.state.log_history[::-1] if "loss" in entry)
        assert content["tokens_seen"] == {side: metrics[f"train_{side}_tokens"] for side in ("source", "target")}
        assert content["resumed_at_step"] is None
        assert content["tokens_seen"]["source"] == 2 * sum(map(len, make_dataset()["input_ids"]))
        count = sum(parameter.numel() for parameter in trainer.model.parameters())  # each shared one once
        assert content["parameters"] == content["trainable_parameters"] == count
        assert (content["device"], content["processes"]) == ("cpu", 1)
        assert content["device_name"]
        assert content["versions"]["torch"] == str(torch.__version__)
        assert content["versions"]["vanilla_transformer"] == vanilla_transformer.__version__

    def test_those_of_a_part_say_where_it_began(self, tmp_path: Path) -> None:
        make_trainer(tmp_path, trainer_class=TranslationTrainer, max_steps=4).train()
        trainer = make_trainer(tmp_path, trainer_class=TranslationTrainer)
        checkpoint = tmp_path / "checkpoint-4"
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        state["stateful_callbacks"].pop("TranslationTrainer")  # as older code left it
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        metrics = trainer.train(resume_from_checkpoint=str(checkpoint)).metrics
        assert metrics["train_resumed_at_step"] == 4
        content = write(trainer, tmp_path, trainer.state, metrics)
        assert (content["resumed_at_step"], content["steps"]) == (4, STEPS)
        # The last two of three updates of the second pass, four sentences each.
        every = sum(map(len, make_dataset()["input_ids"]))
        assert 0 < content["tokens_seen"]["source"] < every

    def test_of_a_training_in_parts_all_parts_count(self, tmp_path: Path) -> None:
        first = make_trainer(tmp_path, trainer_class=TranslationTrainer, max_steps=4)
        start = time.perf_counter()
        first.train()
        spent = time.perf_counter() - start
        state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
        seconds = state["stateful_callbacks"]["TranslationTrainer"]["seconds"]
        assert 0 < seconds <= spent
        trainer = make_trainer(tmp_path, trainer_class=TranslationTrainer)
        metrics = trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4")).metrics
        content = write(trainer, tmp_path, trainer.state, metrics)
        assert content["resumed_at_step"] is None
        assert content["tokens_seen"]["source"] == 2 * sum(map(len, make_dataset()["input_ids"]))
        assert content["runtime_seconds"] == metrics["train_runtime"] > seconds
        pairs = 2 * len(make_dataset())
        seconds = metrics["train_runtime"]
        assert metrics["train_samples_per_second"] == pytest.approx(pairs / seconds, rel=0.01)
        assert metrics["train_steps_per_second"] == pytest.approx(trainer.state.global_step / seconds, rel=0.01)

    def write(self, folder: Path, metrics: dict[str, Any], **changes: Any) -> Any:
        return write(make_trainer(folder), folder, TrainerState(**{"global_step": 10, **changes}), metrics)

    def test_a_source_that_is_not_installed_has_no_version(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def from_name(name: str, find: Any = Distribution.from_name) -> Distribution:
            if name == "vanilla-transformer":
                raise PackageNotFoundError(name)
            return find(name)

        monkeypatch.setattr(Distribution, "from_name", from_name)
        assert set(self.write(tmp_path, {})["versions"]) == {"python", "torch", "transformers", "accelerate"}

    def test_what_json_does_not_know_is_null(self, tmp_path: Path) -> None:
        metrics: dict[str, Any] = {"eval_perplexity": math.inf, "a": np.float32("nan"), "b": np.int64(3)}
        metrics |= {"c": torch.tensor([1.5, -math.inf]), "d": {"e": (True, "ß", None)}}
        content = self.write(tmp_path, metrics, log_history=[{"loss": math.nan, "step": 10}])
        expected = {"eval_perplexity": None, "a": None, "b": 3, "c": [1.5, None], "d": {"e": [True, "ß", None]}}
        assert content["metrics"] == expected
        assert content["last_log"] == {"loss": None, "step": 10}
        assert content["best"] is None
        assert content["tokens_seen"] == {"source": None, "target": None}

    def test_a_finished_training_that_is_started_again_keeps_its_record(self, tmp_path: Path) -> None:
        self.write(tmp_path, {"train_loss": 1.0, "eval_bleu": 30.0})
        assert self.write(tmp_path, {"eval_bleu": 31.0})["metrics"] == {"train_loss": 1.0, "eval_bleu": 31.0}
        assert self.write(tmp_path, {"eval_bleu": 32.0}, global_step=20)["metrics"] == {"eval_bleu": 32.0}
        (tmp_path / "metrics.json").write_text("[broken")
        assert self.write(tmp_path, {"eval_bleu": 33.0}, global_step=20)["metrics"] == {"eval_bleu": 33.0}

        with pytest.raises(TypeError, match="object"):
            self.write(tmp_path, {"eval_bleu": object()})
        assert strict_json(tmp_path / "metrics.json")["metrics"] == {"eval_bleu": 33.0}, "a failure leaves the old file"
        assert not list(tmp_path.glob("*.partial"))


class TestTensorBoard:
    def test_everything_that_is_logged_arrives(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
        trainer = make_trainer(tmp_path, WriteCurves(), trainer_class=TranslationTrainer, report_to="tensorboard")
        trainer.train()
        (folder,) = (tmp_path / "runs").iterdir()
        events = EventAccumulator(str(folder)).Reload()
        tags = events.Tags()["scalars"]
        training = {"train/target_tokens_per_second", "train/padding_share", "train/learning_rate", "train/grad_norm"}
        assert training | {"eval/loss", "eval/perplexity"} <= {*tags}
        for entry in trainer.state.log_history:
            for name in entry.keys() - {"step"}:
                tag = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
                logged = {event.step: event.value for event in events.Scalars(tag)}
                assert logged[entry["step"]] == pytest.approx(entry[name], rel=1e-6)


def test_without_a_bar_each_log_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(tmp_path, disable_tqdm=True, logging_steps=1, max_steps=2)
    use_token_progress(trainer)
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if "lr " in line]
    assert [line.partition(": loss ")[0] for line in lines] == ["step 1 of 2", "step 2 of 2"]
    scores = {"eval_bleu": 12.345, "eval_runtime": 1.0}
    trainer.callback_handler.on_log(trainer.args, trainer.state, trainer.control, scores)
    assert capsys.readouterr().out == "step 2 of 2: bleu 12.35\n"
