"""Trainings that are killed at any moment, also within a save, reach the weights and the losses of an unbroken one."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from many_processes import KILLED, Launcher, launcher, write_pairs
from sudden_ends import Kill

# Each has a checkpoint. An epoch has 3: checkpoints lie within one and at its end, and the training ends within one.
MAX_STEPS = 4
# Printed with a failure, and taken from the environment to repeat it.
SEED = int(os.environ.get("RESUME_SEED", 0 if os.environ.get("CI") else random.SystemRandom().randrange(10**6)))


class Trainings:
    def __init__(self, folder: Path, processes: Launcher) -> None:
        self.folder = folder
        self.processes = processes
        self.arguments = [
            *("--preset", "tiny", "--config_overrides", "dropout=0.3,encoder_layers=1,decoder_layers=1"),
            *("--vocab_size", "280", "--max_steps", str(MAX_STEPS)),
            *("--train_file", *write_pairs(folder, "train", 15), "--validation_file", *write_pairs(folder, "val", 5)),
            *("--save_strategy", "steps", "--save_steps", "1", "--eval_strategy", "steps", "--eval_steps", "1"),
            *("--per_device_train_batch_size", "5", "--learning_rate", "0.005", "--warmup_steps", "2"),
            *("--predict_with_generate", "false", "--use_cpu", "--disable_tqdm", "true"),
            *("--logging_steps", "1", "--report_to", "none"),
        ]

    def run(
        self, name: str, *arguments: str, kill: Kill | None = None, after: float | None = None, ends: int = 0
    ) -> str:
        """What a training says, or the rest of one; it ends at `kill`, or is killed `after` so many seconds."""
        print(f"seed {SEED}: {name}, {kill}, after {after} seconds")
        own = ["--output_dir", str(self.folder / name), *self.arguments, *arguments]
        expected = KILLED if kill and not ends else (ends, *KILLED) if after else (ends,)
        options = {"arguments": own, "kill": kill and asdict(kill)}
        return self.processes.run("train", options, processes=1, after=after, ends=expected)


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    folder = tmp_path_factory.mktemp("trainings")
    with launcher(folder) as processes:
        yield Trainings(folder, processes)


class Result:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = (folder / "model.safetensors").read_bytes()
        self.tokenizer = (folder / "tokenizer.json").read_bytes()
        last = folder / f"checkpoint-{MAX_STEPS}"
        self.last_weights = (last / "model.safetensors").read_bytes()
        self.optimizer = torch.load(last / "optimizer.pt")["state"]
        self.random_state = torch.load(last / "rng_state.pth", weights_only=False)["cpu"]
        self.score = json.loads((folder / "eval_results.json").read_text())["eval_loss"]
        self.log = []
        for entry in json.loads((folder / "trainer_state.json").read_text())["log_history"]:
            if "train_runtime" not in entry:  # its means are over the steps of one process
                timed = ("runtime", "per_second")
                self.log.append({name: value for name, value in entry.items() if not name.endswith(timed)})

    def assert_equals(self, expected: Result) -> None:
        assert (self.log, self.score) == (expected.log, expected.score)
        assert self.weights == expected.weights
        assert self.last_weights == expected.last_weights
        assert self.tokenizer == expected.tokenizer
        torch.testing.assert_close(self.optimizer, expected.optimizer, rtol=0, atol=0)
        assert self.random_state.equal(expected.random_state)
        for name in ("config.json", "generation_config.json"):
            assert (self.folder / name).read_bytes() == (expected.folder / name).read_bytes()


@pytest.fixture(scope="module")
def unbroken(trainings: Trainings) -> Result:
    trainings.run("whole", "--save_total_limit", "99")
    result = Result(trainings.folder / "whole")
    losses = [entry["loss"] for entry in result.log if "loss" in entry]
    assert len(losses) == MAX_STEPS
    assert len(set(losses)) > MAX_STEPS / 2
    return result


def test_the_seed_matters(trainings: Trainings, unbroken: Result) -> None:
    trainings.run("other", "--seed", "7")
    other = Result(trainings.folder / "other")
    assert other.weights != unbroken.weights
    assert other.log != unbroken.log


@pytest.mark.parametrize("moment", ["within", "after"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json"])  # in this order
def test_killed_while_a_checkpoint_is_saved(trainings: Trainings, unbroken: Result, name: str, moment: str) -> None:
    chooser = random.Random(f"{SEED} {name} {moment}")
    step = chooser.randint(1, MAX_STEPS)
    size = (unbroken.folder / f"checkpoint-{step}" / name).stat().st_size
    kill = Kill(f"checkpoint-{step}/{name}", moment, amount=int(chooser.uniform(0, 0.9) * size))
    run = f"{name}-{moment}"
    for _ in range(2 if name == "optimizer.pt" else 1):  # nor does it do harm twice
        trainings.run(run, kill=kill)
    folder = trainings.folder / run
    is_whole = name == "trainer_state.json" and moment == "after"
    resumed = step if is_whole else step - 1
    assert (folder / f"checkpoint-{step}").is_dir()
    said = trainings.run(run)
    assert (f"Resuming from {folder / f'checkpoint-{resumed}'}\n" in said) == (resumed > 0)
    assert (folder / f"_incomplete-checkpoint-{step}").is_dir() != is_whole
    assert (f"It was renamed to _incomplete-checkpoint-{step}" in said) != is_whole
    Result(folder).assert_equals(unbroken)


def test_killed_while_an_old_checkpoint_is_deleted(trainings: Trainings, unbroken: Result) -> None:
    kill = Kill("*", "deleted", amount=random.Random(f"{SEED} deleted").randint(1, 10))
    trainings.run("deleted", kill=kill)
    folder = trainings.folder / "deleted"
    found = {entry.name for entry in folder.glob("*checkpoint-*")}
    assert found == {"_deleted-checkpoint-1", "checkpoint-2", "checkpoint-3"}
    assert f"Resuming from {folder / 'checkpoint-3'}\n" in trainings.run("deleted")
    Result(folder).assert_equals(unbroken)
    assert {entry.name for entry in folder.glob("*checkpoint-*")} == {"checkpoint-3", f"checkpoint-{MAX_STEPS}"}


@pytest.mark.parametrize(
    ("path", "moment", "time"),
    [
        ("_partial/arguments.json", "within", 1),
        ("_partial/tokenizer.json", "after", 1),
        ("_partial/model.safetensors", "within", 1),
        ("_partial/tokenizer.json", "within", 2),
        ("train_results.json", "before", 1),
        ("eval_results.json", "within", 1),
    ],
)
def test_killed_at_the_beginning_or_end(
    trainings: Trainings, unbroken: Result, path: str, moment: str, time: int
) -> None:
    chooser = random.Random(f"{SEED} {path} {moment}")
    size = (unbroken.folder / path.removeprefix("_partial/")).stat().st_size
    kill = Kill(path, moment, amount=int(chooser.uniform(0.1, 0.9) * size), occurrence=time)
    run = f"root-{Path(path).name}-{moment}-{time}"
    trainings.run(run, kill=kill)
    trainings.run(run)
    Result(trainings.folder / run).assert_equals(unbroken)


@pytest.mark.parametrize("within", [True, False], ids=["within a save", "after one"])
def test_ctrl_c_says_where_the_run_goes_on(trainings: Trainings, unbroken: Result, within: bool) -> None:
    name = "optimizer.pt" if within else "trainer_state.json"
    run = f"interrupted-{within}"
    said = trainings.run(run, kill=Kill(f"checkpoint-2/{name}", "interrupted"), ends=130)
    assert f"\nStopped at update 2. The same command goes on from checkpoint-{1 if within else 2}.\n" in said
    assert "Traceback" not in said
    assert (trainings.folder / run / "checkpoint-2").is_dir()
    said = trainings.run(run)
    assert (trainings.folder / run / "_incomplete-checkpoint-2").is_dir() == within
    assert f"The loss is that since update {1 if within else 2}, where this part began.\n" in said
    Result(trainings.folder / run).assert_equals(unbroken)


def test_ctrl_c_before_there_is_a_checkpoint(trainings: Trainings) -> None:
    said = trainings.run("early", kill=Kill("checkpoint-1/model.safetensors", "interrupted"), ends=130)
    assert "\nStopped at update 1. There is no checkpoint yet: the same command begins again.\n" in said


def test_killed_while_checkpoints_are_averaged(trainings: Trainings) -> None:
    average = ("--average_checkpoints", "2", "--load_best_model_at_end", "false")
    trainings.run("average-whole", *average)
    expected = Result(trainings.folder / "average-whole")
    assert expected.weights != expected.last_weights
    amount = random.Random(f"{SEED} averaged").uniform(0, 0.9) * len(expected.weights)
    kill = Kill("_averaged.partial/model.safetensors", "within", amount=int(amount))
    trainings.run("average", *average, kill=kill)
    assert (trainings.folder / "average" / "_averaged.partial").is_dir()
    trainings.run("average", *average)
    Result(trainings.folder / "average").assert_equals(expected)
    assert not (trainings.folder / "average" / "_averaged.partial").exists()


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param((), id="default"),
        pytest.param(("--train_sampling_strategy", "random"), id="random order"),
        pytest.param(("--max_source_tokens", "60"), id="token batches"),
        pytest.param(("--streaming", "--max_source_tokens", "60", "--streaming_window", "16"), id="streaming"),
    ],
)
def test_killed_from_outside_again_and_again(trainings: Trainings, mode: tuple[str, ...], request: Any) -> None:
    name = request.node.callspec.id.replace(" ", "-")
    chooser = random.Random(f"{SEED} {name}")
    start = time.perf_counter()
    trainings.run(f"{name}-whole", *mode)
    duration = time.perf_counter() - start
    kills = 0
    while kills < 2:
        trainings.run(name, *mode, after=round(chooser.uniform(0.2, 0.9) * duration, 3))
        kills += 1
        if trainings.processes.status == 0:
            # It was faster than the first one. Once more, and earlier.
            shutil.rmtree(trainings.folder / name)
            kills, duration = 0, 0.7 * duration
    trainings.run(name, *mode)
    Result(trainings.folder / name).assert_equals(Result(trainings.folder / f"{name}-whole"))
