"""Trainings that are killed at any moment, also within a save, reach the weights and the losses of an unbroken one.

Starting a Python that trains takes seconds, nearly all of them for imports. One process therefore imports everything,
trains nothing itself, and forks a new one for each training that is asked for (this file, run as a program).
"""

from __future__ import annotations

import importlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
# Of the 9 steps of an epoch: checkpoints lie within an epoch and at its end, and the training ends within one.
SAVE_STEPS = 3
MAX_STEPS = 12
STEPS = range(SAVE_STEPS, MAX_STEPS + 1, SAVE_STEPS)

# Printed with a failure, and taken from the environment to repeat it.
SEED = int(os.environ.get("RESUME_SEED", 0 if os.environ.get("CI") else random.SystemRandom().randrange(10**6)))


@dataclass(frozen=True)
class Kill:
    """Where a training kills itself.

    Args:
        path: The file or folder, relative to the output folder, or "*" for any of that kind.
        moment: "before" it is written, "within", "after", while it is being "deleted", or "interrupted" by Ctrl-C once
            it is written.
        amount: Bytes that are written before, or files that are deleted.
        occurrence: Which time this happens.
    """

    path: str
    moment: str
    amount: int = 0
    occurrence: int = 1


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(kill: Kill, output_dir: Path) -> None:
    """Makes this process kill itself when it gets there.

    Within a file the kernel does it, at the byte that is given, whatever library is writing: with the limit's signal in
    the place of SIGKILL, which ends a process as suddenly.
    """
    import transformers
    from transformers import Trainer, TrainerState, modeling_utils

    from vanilla_transformer.training import averaging

    seen = 0

    def guard(owner: Any, name: str, path_of: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def guarded(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            path = Path(os.path.abspath(path_of(*args, **kwargs)))
            seen += path == output_dir / kill.path
            if path != output_dir / kill.path or seen != kill.occurrence:
                return original(*args, **kwargs)
            if kill.moment == "before":
                die()
            if kill.moment == "within":
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_FSIZE, (kill.amount, kill.amount))
            result = original(*args, **kwargs)
            if kill.moment == "after":
                die()
            if kill.moment == "interrupted":
                signal.raise_signal(signal.SIGINT)
            return result

        setattr(owner, name, guarded)

    guard(modeling_utils, "safe_save_file", lambda tensors, path, *_, **__: path)
    guard(averaging, "save_file", lambda tensors, path, *_, **__: path)
    guard(torch, "save", lambda content, path, *_, **__: path)
    guard(TrainerState, "save_to_json", lambda state, path: path)
    tokenizer_class = transformers.PreTrainedTokenizerFast
    guard(tokenizer_class, "_save_pretrained", lambda _, path, *__, **___: Path(path, "tokenizer.json"))
    guard(Trainer, "save_metrics", lambda run, split, *_, **__: Path(run.args.output_dir, f"{split}_results.json"))
    guard(Path, "write_text", lambda path, *_, **__: path)

    if kill.moment == "deleted":
        rmtree, unlink = shutil.rmtree, os.unlink

        def count(*args: Any, **kwargs: Any) -> None:
            nonlocal seen
            if seen == kill.amount:
                die()
            seen += 1
            unlink(*args, **kwargs)

        def remove(path: Any, *args: Any, **kwargs: Any) -> None:
            os.unlink = count
            rmtree(path, *args, **kwargs)
            os.unlink = unlink

        shutil.rmtree = remove  # type: ignore[assignment]


def train(request: dict[str, Any], main: Callable[[list[str]], None]) -> None:
    """Trains in a process that was made for it, which ends with it."""
    status = 1
    try:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if request["kill"]:
            arm(Kill(**request["kill"]), Path(request["output_dir"]))
        # A shell has its background jobs ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        main(["--output_dir", request["output_dir"], *request["arguments"]])
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve() -> None:
    """Forks a training for each line of standard input, and answers with its wait status."""
    sys.path.insert(0, str(SCRIPTS))
    script = importlib.import_module("train")
    importlib.import_module("matplotlib.backends.backend_agg")  # else each training imports it for its curves
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if process == 0:
            train(request, script.main)
        if request["after"] is not None:
            time.sleep(request["after"])
            os.kill(process, signal.SIGKILL)  # which does nothing to one that has ended, but was not waited for
        print(os.waitpid(process, 0)[1], flush=True)


class Trainings:
    """Starts trainings with the same arguments, and says how they ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.arguments = [
            *("--preset", "tiny", "--config_overrides", "dropout=0.3", "--vocab_size", "280"),
            *("--train_file", *write_pairs(folder, "train", 45), "--validation_file", *write_pairs(folder, "val", 5)),
            *("--max_steps", str(MAX_STEPS), "--save_strategy", "steps", "--save_steps", str(SAVE_STEPS)),
            *("--eval_strategy", "steps", "--eval_steps", str(SAVE_STEPS), "--predict_with_generate", "false"),
            *("--per_device_train_batch_size", "5", "--learning_rate", "0.005", "--warmup_steps", "4"),
            *("--logging_steps", "1", "--report_to", "none", "--use_cpu", "--disable_tqdm", "true"),
        ]

    def close(self) -> None:
        self.server.communicate(timeout=60)

    def log_of(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def run(
        self, name: str, *arguments: str, kill: Kill | None = None, after: float | None = None, ends: int = 0
    ) -> int:
        """Trains in the folder `name`, which may hold an earlier part of the same training.

        It kills itself at `kill`, or is killed from outside `after` so many seconds. Returns its exit status, which
        must be `ends`, or minus the number of the signal that ended it.
        """
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        request = {
            "output_dir": str(self.folder / name),
            "arguments": [*self.arguments, *arguments],
            "log": str(self.folder / f"{name}.log"),
            "kill": kill and asdict(kill),
            "after": after,
        }
        (self.folder / f"{name}.log").unlink(missing_ok=True)
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        code = os.waitstatus_to_exitcode(int(self.server.stdout.readline()))
        assert code == ends or code < 0, f"seed {SEED}, {kill}: ended with status {code}\n{self.log_of(name)}"
        return code


def write_pairs(folder: Path, name: str, count: int) -> list[str]:
    chooser = random.Random(name)
    words = ["one", "two", "three", "four", "five", "six"]
    paths = [folder / f"{name}.{language}" for language in ("en", "de")]
    for path in paths:
        lines = (" ".join(chooser.choices(words, k=chooser.randint(1, 9))) for _ in range(count))
        path.write_text("".join(f"{line}\n" for line in lines))
    return [str(path) for path in paths]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    trainings = Trainings(tmp_path_factory.mktemp("trainings"))
    yield trainings
    trainings.close()


class Result:
    """What a finished training left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights = (folder / "model.safetensors").read_bytes()
        self.tokenizer = (folder / "tokenizer.json").read_bytes()
        last = folder / f"checkpoint-{MAX_STEPS}"
        self.last_weights = (last / "model.safetensors").read_bytes()
        self.optimizer = torch.load(last / "optimizer.pt")["state"]
        self.random_state = torch.load(last / "rng_state.pth", weights_only=False)["cpu"]
        self.log = []
        for entry in json.loads((folder / "trainer_state.json").read_text())["log_history"]:
            if "train_runtime" not in entry:  # its means are over the steps of one process
                timed = ("runtime", "per_second")
                self.log.append({name: value for name, value in entry.items() if not name.endswith(timed)})

    def assert_equals(self, expected: Result, why: str) -> None:
        assert self.log == expected.log, why
        assert self.weights == expected.weights, why
        assert self.last_weights == expected.last_weights, why
        assert self.tokenizer == expected.tokenizer, why
        torch.testing.assert_close(self.optimizer, expected.optimizer, rtol=0, atol=0)
        assert self.random_state.equal(expected.random_state), why
        for name in ("config.json", "generation_config.json"):
            assert (self.folder / name).read_bytes() == (expected.folder / name).read_bytes(), why
        scores = [json.loads((result.folder / "eval_results.json").read_text()) for result in (self, expected)]
        assert scores[0]["eval_loss"] == scores[1]["eval_loss"], why


@pytest.fixture(scope="module")
def unbroken(trainings: Trainings) -> Result:
    """A training that nobody interrupts, and that keeps all of its checkpoints."""
    assert trainings.run("whole", "--save_total_limit", "99") == 0
    result = Result(trainings.folder / "whole")
    losses = [entry["loss"] for entry in result.log if "loss" in entry]
    assert len(losses) == MAX_STEPS
    assert len(set(losses)) > MAX_STEPS / 2
    return result


def test_the_seed_matters(trainings: Trainings, unbroken: Result) -> None:
    """With other dropout and other batches the results are others: what follows could fail."""
    assert trainings.run("other", "--seed", "7") == 0
    other = Result(trainings.folder / "other")
    assert other.weights != unbroken.weights
    assert other.log != unbroken.log


# Some of what is written when a checkpoint is saved, in this order. Only with the last of them it is whole.
IN_A_CHECKPOINT = ["model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"]


@pytest.mark.parametrize(
    ("name", "moment"),
    [*((name, "within") for name in IN_A_CHECKPOINT), ("model.safetensors", "after"), ("trainer_state.json", "after")],
)
def test_killed_while_a_checkpoint_is_saved(trainings: Trainings, unbroken: Result, name: str, moment: str) -> None:
    chooser = random.Random(f"{SEED} {name} {moment}")
    step = chooser.choice(STEPS)
    size = (unbroken.folder / f"checkpoint-{step}" / name).stat().st_size
    kill = Kill(f"checkpoint-{step}/{name}", moment, amount=int(chooser.uniform(0, 0.9) * size))
    why = f"seed {SEED}, {kill}"
    run = f"{name}-{moment}"
    # Nor does it do harm when it happens twice.
    for _ in range(2 if name == "optimizer.pt" else 1):
        assert trainings.run(run, kill=kill) in (-signal.SIGKILL, -signal.SIGXFSZ), why
    folder = trainings.folder / run
    is_whole = name == "trainer_state.json" and moment == "after"
    resumed = step if is_whole else step - SAVE_STEPS
    assert (folder / f"checkpoint-{step}").is_dir(), why

    assert trainings.run(run) == 0
    said = trainings.log_of(run)
    assert (f"Resuming from {folder / f'checkpoint-{resumed}'}\n" in said) == (resumed > 0), why
    assert (folder / f"_incomplete-checkpoint-{step}").is_dir() != is_whole, why
    assert (f"It was renamed to _incomplete-checkpoint-{step}" in said) != is_whole, why
    Result(folder).assert_equals(unbroken, why)


def test_killed_while_an_old_checkpoint_is_deleted(trainings: Trainings, unbroken: Result) -> None:
    chooser = random.Random(f"{SEED} deleted")
    kill = Kill("*", "deleted", amount=chooser.randint(1, 10))
    why = f"seed {SEED}, {kill}"
    assert trainings.run("deleted", kill=kill) == -signal.SIGKILL
    folder = trainings.folder / "deleted"
    assert (folder / "checkpoint-9").is_dir(), why
    files = {entry: len(os.listdir(entry)) for entry in folder.glob("checkpoint-*")}
    half = [entry for entry, count in files.items() if count < files[folder / "checkpoint-9"]]
    assert len(half) == 1, why
    assert trainings.run("deleted") == 0
    assert f"Resuming from {folder / 'checkpoint-9'}\n" in trainings.log_of("deleted"), why
    Result(folder).assert_equals(unbroken, why)
    # The next deletion took the rest of it, and no checkpoint in its place.
    assert not half[0].exists() or "trainer_state.json" in os.listdir(half[0]), why


@pytest.mark.parametrize(
    ("path", "moment", "occurrence"),
    [
        ("_partial/arguments.json", "within", 1),
        ("_partial/tokenizer.json", "after", 1),
        ("_partial/model.safetensors", "within", 1),
        ("_partial/tokenizer.json", "within", 2),
        ("train_results.json", "before", 1),
        ("eval_results.json", "within", 1),
    ],
)
def test_killed_at_the_beginning_or_at_the_end(
    trainings: Trainings, unbroken: Result, path: str, moment: str, occurrence: int
) -> None:
    """While the folder is claimed, or the training is over and the model is saved."""
    chooser = random.Random(f"{SEED} {path} {moment}")
    size = (unbroken.folder / path.removeprefix("_partial/")).stat().st_size
    kill = Kill(path, moment, amount=int(chooser.uniform(0.1, 0.9) * size), occurrence=occurrence)
    why = f"seed {SEED}, {kill}"
    run = f"root-{Path(path).name}-{moment}-{occurrence}"
    assert trainings.run(run, kill=kill) in (-signal.SIGKILL, -signal.SIGXFSZ), why
    assert trainings.run(run) == 0
    Result(trainings.folder / run).assert_equals(unbroken, why)


@pytest.mark.parametrize("within", [True, False], ids=["within a save", "after one"])
def test_ctrl_c_says_where_the_run_goes_on(trainings: Trainings, unbroken: Result, within: bool) -> None:
    name = "optimizer.pt" if within else "trainer_state.json"
    kill = Kill(f"checkpoint-6/{name}", "interrupted")
    run = f"interrupted-{within}"
    assert trainings.run(run, kill=kill, ends=130) == 130
    said = trainings.log_of(run)
    assert f"\nStopped at update 6. The same command goes on from checkpoint-{3 if within else 6}.\n" in said
    assert "Traceback" not in said
    assert (trainings.folder / run / "checkpoint-6").is_dir()
    assert trainings.run(run) == 0
    assert (trainings.folder / run / "_incomplete-checkpoint-6").is_dir() == within
    said = trainings.log_of(run)
    assert f"Loss, seconds and tokens are those since update {3 if within else 6}, where this part began.\n" in said
    Result(trainings.folder / run).assert_equals(unbroken, run)


def test_ctrl_c_before_there_is_a_checkpoint(trainings: Trainings) -> None:
    assert trainings.run("early", kill=Kill("checkpoint-3/model.safetensors", "interrupted"), ends=130) == 130
    said = trainings.log_of("early")
    assert "\nStopped at update 3. There is no checkpoint yet: the same command begins again.\n" in said


AVERAGE = ("--average_checkpoints", "2", "--load_best_model_at_end", "false")


def test_killed_while_checkpoints_are_averaged(trainings: Trainings) -> None:
    chooser = random.Random(f"{SEED} averaged")
    assert trainings.run("average-whole", *AVERAGE) == 0
    expected = Result(trainings.folder / "average-whole")
    assert expected.weights != expected.last_weights
    size = (expected.folder / "averaged" / "model.safetensors").stat().st_size
    kill = Kill("_averaged.partial/model.safetensors", "within", amount=int(chooser.uniform(0, 0.9) * size))
    why = f"seed {SEED}, {kill}"
    assert trainings.run("average", *AVERAGE, kill=kill) == -signal.SIGXFSZ, why
    assert (trainings.folder / "average" / "_averaged.partial").is_dir()
    assert trainings.run("average", *AVERAGE) == 0
    Result(trainings.folder / "average").assert_equals(expected, why)
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
def test_killed_from_outside_again_and_again(
    trainings: Trainings, mode: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id.replace(" ", "-")
    chooser = random.Random(f"{SEED} {name}")
    start = time.perf_counter()
    assert trainings.run(f"{name}-whole", *mode) == 0
    duration = time.perf_counter() - start
    moments: list[float] = []
    while len(moments) < 2:
        moment = round(chooser.uniform(0.2, 0.9) * duration, 3)
        moments.append(moment)
        if trainings.run(name, *mode, after=moment) == 0:
            # It was faster than the first one. Once more, and earlier.
            shutil.rmtree(trainings.folder / name)
            moments, duration = [], 0.7 * duration
    why = f"seed {SEED}, killed after {moments} seconds"
    assert trainings.run(name, *mode) == 0
    Result(trainings.folder / name).assert_equals(Result(trainings.folder / f"{name}-whole"), why)


if __name__ == "__main__":
    serve()
