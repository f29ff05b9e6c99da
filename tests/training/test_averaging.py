"""Averages of checkpoints against means of loaded state dicts, what is refused, and averaging at a training's end."""

import contextlib
import json
import shutil
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import library_models
import pytest
import tiny_trainer
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_seq2seq import make_tokenizer
from tiny_vanilla import SHARING, make_model, randomize
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig

from vanilla_transformer.commands import average
from vanilla_transformer.training import averaging
from vanilla_transformer.training.averaging import AverageCheckpoints, average_checkpoints, select_checkpoints
from vanilla_transformer.training.checkpoints import RecordWorldSize

IDS = torch.tensor([[5, 9, 2], [7, 2, 1]])


def make_marian(seed: int) -> Any:
    model = library_models.make_marian()
    randomize(model, seed)
    return model.eval()


def save_models(folder: Path, models: list[Any], **settings: Any) -> list[Path]:
    last = models[-1]
    last.generation_config = GenerationConfig.from_dict({**last.generation_config.to_dict(), "num_beams": 3})
    folders = [folder / f"model-{number}" for number in range(len(models))]
    for path, model in zip(folders, models, strict=True):
        model.save_pretrained(path, **settings)
        make_tokenizer().save_pretrained(path)
    return folders


def mean_of(folders: list[Path]) -> dict[str, torch.Tensor]:
    models = [AutoModelForSeq2SeqLM.from_pretrained(folder).state_dict() for folder in folders]
    return {
        name: torch.stack([state[name].double() for state in models]).mean(0).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in models[0].items()
    }


MAKERS: dict[str, Callable[[int], Any]] = {
    "ours": lambda seed: make_model(seed=seed),
    "ours-untied": lambda seed: make_model(seed=seed, **SHARING["separate-untied"]),
    "marian": make_marian,
}


class TestMean:
    @pytest.mark.parametrize(
        ("kind", "dtype"),
        [*((kind, torch.float32) for kind in MAKERS), ("ours", torch.bfloat16), ("marian", torch.half)],
    )
    def test_loads_as_the_model_whose_weights_are_the_means(self, tmp_path: Path, kind: str, dtype: Any) -> None:
        folders = save_models(tmp_path, [MAKERS[kind](seed).to(dtype) for seed in (1, 2, 3)])
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "new").symlink_to("elsewhere")
        (tmp_path / "elsewhere" / "empty").mkdir()
        (tmp_path / "elsewhere" / "averaged").symlink_to("empty")
        average_checkpoints(folders, tmp_path / "new" / "averaged")
        expected: Any = MAKERS[kind](4).to(dtype)
        expected.load_state_dict(mean_of(folders))
        model: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "new" / "averaged").eval()
        assert type(model) is type(expected)
        assert model.dtype == dtype
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
        with torch.no_grad():
            logits, expected_logits = (each(input_ids=IDS, labels=IDS).logits for each in (model, expected))
        torch.testing.assert_close(logits, expected_logits, rtol=0, atol=0)
        assert model.generation_config.num_beams == 3

    def test_what_belongs_to_the_model_comes_along_with_a_record_of_what_was_averaged(self, tmp_path: Path) -> None:
        folders = save_models(tmp_path, [make_model(seed=seed) for seed in (1, 2)])
        (folders[0] / "trainer_state.json").write_text('{"global_step": 70}')
        before = {entry.name for entry in folders[1].iterdir()}
        for name in ("optimizer.pt", "rng_state.pth", "trainer_state.json", "README.md", "eval_results.json"):
            (folders[1] / name).write_text("{}")
        (folders[1] / "modeling_other.py").write_text("# code\n")
        (folders[1] / "runs").mkdir()
        average_checkpoints(folders, tmp_path / "averaged")
        found = {entry.name for entry in (tmp_path / "averaged").iterdir()}
        assert found == {*before, "modeling_other.py", "averaging.json"}
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "averaged")
        assert tokenizer("w3 w4").input_ids == make_tokenizer()("w3 w4").input_ids
        assert {entry.name for entry in tmp_path.iterdir()} == {"model-0", "model-1", "averaged"}
        record = json.loads((tmp_path / "averaged" / "averaging.json").read_text())["checkpoints"]
        assert [(entry["name"], entry["step"]) for entry in record] == [("model-0", 70), ("model-1", None)]
        sums = [entry["sha256"]["model.safetensors"] for entry in record]
        assert [len(value) for value in sums] == [64, 64]
        assert len(set(sums)) == 2
        formats = []
        for folder in (folders[0], tmp_path / "averaged"):
            with safe_open(folder / "model.safetensors", framework="pt") as weights:
                formats.append((sorted(weights.keys()), weights.metadata()))
        assert formats[0] == formats[1]
        assert "lm_head.weight" not in formats[1][0]

    @pytest.mark.parametrize("sizes", [("2KB", "50GB"), ("50GB", "2KB"), ("3KB", "2KB")])
    def test_sharded_in_and_out(self, tmp_path: Path, sizes: tuple[str, str]) -> None:
        folders = save_models(tmp_path, [make_model(seed=seed) for seed in (1, 2)], max_shard_size=sizes[0])
        folders += save_models(tmp_path / "whole", [make_model(seed=3)])
        average_checkpoints(folders, tmp_path / "averaged", max_shard_size=sizes[1])
        files = sorted((tmp_path / "averaged").glob("*.safetensors"))
        assert (len(files) == 1) == (sizes[1] == "50GB")
        assert (tmp_path / "averaged" / "model.safetensors.index.json").exists() == (len(files) > 1)
        model: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "averaged")
        torch.testing.assert_close(model.state_dict(), mean_of(folders), rtol=0, atol=0)

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
    @given(data=st.data())
    def test_element_by_element_in_their_dtype(self, tmp_path_factory: Any, data: Any) -> None:
        folder = tmp_path_factory.mktemp("mean")
        count = data.draw(st.integers(min_value=1, max_value=6))
        dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
        shapes = {"scalar": (), "empty": (0, 3), "matrix": (4, 5)}
        states = [{name: torch.randn(shape).to(dtype) for name, shape in shapes.items()} for _ in range(count)]
        for number, state in enumerate(states):
            write_weights(folder / str(number), {**state, "steps": torch.arange(3), "flag": torch.tensor(True)})
        average_checkpoints([folder / str(number) for number in range(count)], folder / "out", progress=False)
        result = load_file(folder / "out" / "model.safetensors")
        for name in shapes:
            expected = torch.stack([state[name].double() for state in states]).mean(0).to(dtype)
            torch.testing.assert_close(result[name], expected, rtol=0, atol=0)
        assert result["steps"].equal(torch.arange(3))
        assert result["flag"].equal(torch.tensor(True))

    def test_no_two_tensors_of_the_checkpoints_are_in_memory_together(self, tmp_path: Path, monkeypatch: Any) -> None:
        folders = save_models(tmp_path, [make_model(seed=seed) for seed in (1, 2, 3)])
        alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        counts: list[int] = []
        read = averaging._Weights.read

        def count_read(weights: Any, name: str) -> torch.Tensor:
            tensor = read(weights, name)
            alive.add(tensor)
            counts.append(len(alive))
            return tensor

        monkeypatch.setattr(averaging._Weights, "read", count_read)
        average_checkpoints(folders, tmp_path / "averaged")
        assert len(counts) == 3 * len(load_file(folders[0] / "model.safetensors"))
        assert max(counts) == 1


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "bart", **(config or {})}))
    return folder


class TestRefusals:
    @pytest.fixture(autouse=True)
    def _nothing_is_written(self, tmp_path: Path) -> Any:
        yield
        assert not list(tmp_path.glob("*averaged*"))

    def test_all_differences_of_configs_and_tensors(self, tmp_path: Path) -> None:
        one, two, three = torch.zeros(2, 3), torch.zeros(3), torch.zeros(3)
        config: dict[str, Any] = {"d_model": 8, "only": 1, "text_config": {"heads": 2, "same": 5}, "dtype": "float32"}
        config |= {"dropout": 0.1, "label_smoothing": 0.1}  # which change nothing that the model computes
        changed = {
            "d_model": 9,
            "new": None,
            "dropout": 0.2,
            "text_config": {"heads": 4, "same": 5},
            "_name_or_path": "x",
        }
        tensors = {"shape": one, "dtype": two, "gone": three, "int": torch.arange(2)}
        others = {"shape": one.T.contiguous(), "dtype": two.half(), "int": torch.arange(2) + 1}
        first = write_weights(tmp_path / "a", tensors, config)
        other = write_weights(tmp_path / "b", others, changed)
        third = write_weights(tmp_path / "c", tensors, config)
        with pytest.raises(ValueError, match="cannot be averaged") as error:
            average_checkpoints([first, third, other], tmp_path / "averaged")
        where = f"in {first}, {{}} in {other}".format
        assert str(error.value).splitlines()[1:] == [
            f"  config.d_model: 8 {where(9)}",
            f"  config.only: 1 {where('absent')}",
            f"  config.text_config.heads: 2 {where(4)}",
            f"  config.new: absent {where('None')}",
            f"  tensor dtype: float32 [3] {where('float16 [3]')}",
            f"  tensor gone: float32 [3] {where('absent')}",
            f"  tensor shape: float32 [2, 3] {where('float32 [3, 2]')}",
            f"  tensor int: of torch.int64, which has no mean, and not the same in {first} and {other}",
        ]

    def test_other_vocabularies(self, tmp_path: Path) -> None:
        folders = save_models(tmp_path, [make_marian(0), make_marian(1)])
        tokenizer = make_tokenizer()
        tokenizer.add_tokens(["<new>"])
        tokenizer.save_pretrained(folders[0])
        with pytest.raises(ValueError, match=r"vocabulary: not the same in .*model-0 and .*model-1"):
            average_checkpoints(folders, tmp_path / "averaged")

    def test_every_unusable_folder_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no checkpoint to average"):
            average_checkpoints([], tmp_path / "averaged")
        cut = write_weights(tmp_path / "cut", {"x": torch.zeros(3)})
        (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-1])
        pickled = tmp_path / "pickled"
        pickled.mkdir()
        (pickled / "config.json").write_text("{}")
        torch.save({"x": torch.zeros(3)}, pickled / "pytorch_model.bin")
        adapter = write_weights(tmp_path / "adapter", {"x": torch.zeros(3)})
        (adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
        good = write_weights(tmp_path / "good", {"x": torch.zeros(3)})
        with pytest.raises(ValueError, match="Only safetensors are read") as error:
            average_checkpoints([good, good, cut, pickled, adapter, tmp_path / "none"], tmp_path / "averaged")
        for part in (
            f"{good} is named more than once",
            f"{cut}: model.safetensors is cut off or damaged",
            f"{pickled}: there are no weights",
            f"{adapter} has neither model.safetensors nor model.safetensors.index.json",
            f"{tmp_path / 'none'} has no config.json",
        ):
            assert part in str(error.value)

    def test_only_a_whole_folder_appears_and_none_is_replaced(self, tmp_path: Path, monkeypatch: Any) -> None:
        good = write_weights(tmp_path / "good", {"x": torch.zeros(3)})

        def stop(*args: Any, **kwargs: Any) -> None:
            save_file(*args, **kwargs)
            raise KeyboardInterrupt

        monkeypatch.setattr(averaging, "save_file", stop)
        for output, error in ((tmp_path / "averaged", KeyboardInterrupt), (good, FileExistsError)):
            with pytest.raises(error):
                average_checkpoints([good], output)
        assert {entry.name for entry in tmp_path.iterdir()} == {"good"}


def write_run(folder: Path, scores: dict[int, dict[str, float]], **state: Any) -> Path:
    """A checkpoint per step, whose only weight is the step, and its log in every later one."""
    for step in scores:
        checkpoint = write_weights(folder / f"checkpoint-{step}", {"x": torch.tensor([float(step)])})
        log = [{"step": past, "epoch": past / 10, **scores[past]} for past in scores if past <= step]
        content = {"global_step": step, "log_history": log, **state}
        (checkpoint / "trainer_state.json").write_text(json.dumps(content))
    return folder


def steps_of(folders: list[Path]) -> list[int]:
    return [int(folder.name.removeprefix("checkpoint-")) for folder in folders]


class TestSelect:
    SCORES = {
        2: {"eval_loss": 3.0, "eval_bleu": 5.0, "eval_ter": 70.0},
        4: {"eval_loss": 1.0, "eval_bleu": 4.0, "eval_ter": 60.0},
        9: {"eval_loss": 2.0, "eval_bleu": 9.0, "eval_ter": 80.0},
        10: {"eval_loss": 2.0, "eval_bleu": 9.0, "eval_ter": float("nan")},
        30: {"loss": 0.1},
    }

    @pytest.mark.parametrize(
        ("best", "metric", "greater", "expected"),
        [
            (2, "loss", None, [4, 10]),  # of equals the later
            (3, "eval_bleu", None, [2, 9, 10]),
            (2, "ter", None, [2, 4]),  # not a number is no score
            (1, "ter", True, [9]),
            (1, "bleu", False, [4]),
        ],
    )
    def test_the_best(self, tmp_path: Path, best: int, metric: str, greater: bool | None, expected: list[int]) -> None:
        run = write_run(tmp_path, self.SCORES)
        chosen = select_checkpoints(run, best=best, metric=metric, greater_is_better=greater)
        assert steps_of(chosen) == expected

    def test_by_what_the_run_chose_its_best(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "chose", self.SCORES, best_metric=9.0, best_global_step=9)
        assert steps_of(select_checkpoints(run, best=2)) == [9, 10]
        with pytest.raises(ValueError, match="Give metric: eval_bleu, eval_loss, eval_ter"):
            select_checkpoints(write_run(tmp_path / "chose-none", self.SCORES), best=2)

    def test_the_last_by_step_of_those_that_are_whole(self, tmp_path: Path) -> None:
        run = write_run(tmp_path, self.SCORES)
        assert steps_of(select_checkpoints(str(run), last=3)) == [9, 10, 30]
        weights = run / "checkpoint-30" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-2])
        (run / "checkpoint-10" / "trainer_state.json").write_text('{"global_')
        (run / "checkpoint-4" / "config.json").unlink()
        shutil.copytree(run / "checkpoint-2", run / "_incomplete-checkpoint-40")
        assert steps_of(select_checkpoints(run, last=2)) == [2, 9]

    def test_too_few_are_listed(self, tmp_path: Path) -> None:
        run = write_run(tmp_path, {2: {"eval_loss": 1.0}, 10: {"eval_loss": 2.0}, 11: {"loss": 3.0}})
        with pytest.raises(ValueError, match=r"last=4: .* 3 whole .*: checkpoint-2, checkpoint-10, checkpoint-11\."):
            select_checkpoints(run, last=4)
        with pytest.raises(ValueError, match=r"best=3: .* 2 whole .* with eval_loss: checkpoint-2, checkpoint-10\."):
            select_checkpoints(run, best=3, metric="loss")
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match=r"0 whole checkpoint\(s\): none"):
            select_checkpoints(tmp_path / "empty", last=1)
        with pytest.raises(ValueError, match=r"There is no folder .*nothing"):
            select_checkpoints(tmp_path / "nothing", last=1)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"last": 1, "best": 2}, "exactly one of last and best; got last=1 and best=2"),
            ({"best": -1}, "best=-1: must be at least 1"),
            ({"last": 1, "metric": "bleu"}, "metric='bleu' goes with best"),
            ({"last": 1, "greater_is_better": False}, "greater_is_better=False goes with best"),
        ],
    )
    def test_a_choice_that_makes_no_sense(self, tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            select_checkpoints(tmp_path, **arguments)


make_trainer = partial(tiny_trainer.make_trainer, save_steps=1, eval_steps=1)


class TestCallback:
    def record(self, run: Path) -> list[int]:
        return [entry["step"] for entry in json.loads((run / "averaged" / "averaging.json").read_text())["checkpoints"]]

    def test_the_last_ones_at_the_end(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, AverageCheckpoints(last=3), save_total_limit=3)
        trainer.train()
        folders = [tmp_path / f"checkpoint-{step}" for step in (4, 5, 6)]
        averaged: Any = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "averaged")
        torch.testing.assert_close(averaged.state_dict(), mean_of(folders), rtol=0, atol=0)
        assert self.record(tmp_path) == [4, 5, 6]
        AutoTokenizer.from_pretrained(tmp_path / "averaged")

        # The finished run started again leaves the average alone; gone on with, it replaces it.
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "averaged").iterdir()}
        trainer = make_trainer(tmp_path, AverageCheckpoints(last=3), save_total_limit=3)
        trainer.train(resume_from_checkpoint=str(folders[-1]))
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "averaged").iterdir()} == before
        trainer = make_trainer(tmp_path, AverageCheckpoints(last=3), save_total_limit=3, max_steps=7)
        trainer.train(resume_from_checkpoint=str(folders[-1]))
        assert self.record(tmp_path) == [5, 6, 7]
        assert not list(tmp_path.glob("_averaged*"))

    def test_an_average_of_a_run_of_which_only_the_names_are_the_same_is_replaced(self, tmp_path: Path) -> None:
        run = write_run(tmp_path, {1: {}, 2: {}})
        average_checkpoints(select_checkpoints(run, last=2), run / "averaged")
        write_weights(run / "checkpoint-2", {"x": torch.tensor([9.0])})
        averaging._replace_average(select_checkpoints(run, last=2), run / "averaged", progress=False)
        assert load_file(run / "averaged" / "model.safetensors")["x"].item() == 5

    def test_checkpoints_of_an_abandoned_branch_are_left_out(self, tmp_path: Path) -> None:
        make_trainer(tmp_path, AverageCheckpoints(last=2)).train()
        trainer = make_trainer(tmp_path, AverageCheckpoints(last=2), max_steps=4)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert (tmp_path / "checkpoint-6").is_dir()
        assert self.record(tmp_path) == [3, 4]

    def test_fewer_than_asked_for_are_averaged_with_a_warning(self, tmp_path: Path, caplog: Any) -> None:
        make_trainer(tmp_path, AverageCheckpoints(last=9), max_steps=2).train()
        assert self.record(tmp_path) == [1, 2]
        assert "has 2 checkpoint(s) to average, not 9" in caplog.text

    def test_only_the_main_process_averages(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, AverageCheckpoints(last=2))
        write_run(tmp_path, {1: {}, 2: {}})
        trainer.state.global_step = 2
        for is_main in (False, True):
            trainer.state.is_world_process_zero = is_main
            trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
            assert (tmp_path / "averaged").exists() == is_main

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"save_strategy": "no"}, r"AverageCheckpoints\(last=3\) needs checkpoints: set save_strategy"),
            ({"save_total_limit": 2}, "save_total_limit=2 keeps: set it to at least 3, or to None"),
            ({"save_total_limit": 3, "metric_for_best_model": "loss"}, r"at least 4 \(the Trainer keeps the best one"),
            ({}, "holds something else"),
        ],
    )
    def test_what_cannot_work_is_refused_before_training(self, tmp_path: Path, changes: Any, message: str) -> None:
        (tmp_path / "averaged").mkdir()
        (tmp_path / "averaged" / "thesis.txt").write_text("mine")
        trainer = make_trainer(tmp_path, AverageCheckpoints(last=3), **changes)
        with pytest.raises(ValueError, match=message):
            trainer.train()
        assert trainer.state.global_step == 0
        with pytest.raises(ValueError, match="last=0: must be at least 1"):
            AverageCheckpoints(last=0)

    def test_the_best_one_is_kept_beside_the_last_ones(self, tmp_path: Path) -> None:
        changes = {"metric_for_best_model": "loss", "greater_is_better": True, "learning_rate": 0.01}
        trainer = make_trainer(tmp_path, AverageCheckpoints(last=3), save_total_limit=4, **changes)
        trainer.train()
        assert (trainer.state.best_global_step or 9) < 4
        assert (tmp_path / f"checkpoint-{trainer.state.best_global_step}").is_dir()
        assert self.record(tmp_path) == [4, 5, 6]


def test_a_finished_run_may_have_other_weights_than_its_last_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer = make_trainer(run, RecordWorldSize(), AverageCheckpoints(last=2))
    trainer.train()
    trainer.model = AutoModelForSeq2SeqLM.from_pretrained(run / "averaged")
    trainer.save_model()
    trainer.save_state()
    average_checkpoints([run], tmp_path / "out")
    assert_close = torch.testing.assert_close
    assert_close(load_file(tmp_path / "out/model.safetensors"), load_file(run / "model.safetensors"), rtol=0, atol=0)
    weights = run / "checkpoint-6" / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"checkpoint-6 cannot be averaged: model\.safetensors is damaged"):
        average_checkpoints([run / "checkpoint-6"], tmp_path / "new")


class TestScript:
    def test_of_a_run_or_of_named_folders(self, tmp_path: Path) -> None:
        run = write_run(tmp_path / "run", TestSelect.SCORES, best_metric=1.0, best_global_step=4)
        named = [str(run / f"checkpoint-{step}") for step in (2, 4)]
        of_run = ["--model_dir", str(run)]
        for words, expected in (
            ([*of_run, "--last", "2"], 20),
            ([*of_run, "--best", "2"], 7),
            ([*of_run, "--best", "1", "--metric", "ter", "--greater_is_better", "true"], 9),
            (["--checkpoints", *named, "--max_shard_size", "1GB"], 3),
        ):
            output = tmp_path / "out" / str(expected)
            average.main([*words, "--disable_tqdm", "--output_dir", str(output)])
            assert load_file(output / "model.safetensors")["x"].item() == expected

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--output_dir", "out", "--model_dir", "run", "--checkpoints", "a"], "Give either --model_dir"),
            (["--output_dir", "out", "--checkpoints", "a", "--last", "2"], "--last chooses among"),
            (["--output_dir", "out", "--checkpoints", "nowhere"], "nowhere has no config.json"),
            (["--model_dir", "run", "--last", "2"], "--output_dir"),
        ],
    )
    def test_what_is_wrong_is_said(self, words: list[str], message: str, capsys: Any, tmp_path: Path) -> None:
        with contextlib.chdir(tmp_path), pytest.raises(SystemExit) as stop:
            average.main(words)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
