"""What every test gets: no network, no trace in the user's home, fixed seeds, one thread."""

import atexit
import builtins
import gc
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

_REPOSITORY_ROOT = Path(__file__).resolve().parent.parent
_NETWORK_GUARD = _REPOSITORY_ROOT / "tests" / "support" / "network_guard"
_SCRATCH = Path(tempfile.mkdtemp(prefix="vanilla-transformer-tests-"))
atexit.register(shutil.rmtree, _SCRATCH, ignore_errors=True)


def _prepare_environment() -> None:
    """Sets what libraries read when they are imported; the processes that tests start inherit it."""
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_", "WANDB_", "XDG_")):
            del os.environ[name]
    home = _SCRATCH / "home"
    home.mkdir()
    os.environ |= {
        "HF_HOME": str(_SCRATCH / "huggingface"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(home),
        # The models are so small that a second thread costs more than it brings; and threads do not survive a fork.
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(_NETWORK_GUARD),
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "warning",
    }
    # Or every process that a test starts compiles the package anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def _block_network() -> None:
    """Puts the guard into this process, where Python has already looked for a sitecustomize module."""
    sys.modules.pop("sitecustomize", None)
    sys.path.insert(0, str(_NETWORK_GUARD))
    importlib.import_module("sitecustomize")
    sys.path.remove(str(_NETWORK_GUARD))


def _allow_interrupts() -> None:
    """Undoes what a shell does to its background jobs, since some tests press Ctrl-C."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


gc.disable()  # until the first test: nothing that is imported is garbage
_prepare_environment()
_block_network()
_allow_interrupts()

import hypothesis  # noqa: E402 (these read the environment)
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from remote_process import BLOCK_THE_PACKAGE, RemotePython  # noqa: E402


def _seed_torch(seed: int) -> None:
    """Seeds the CPU alone where no GPU is used: `torch.manual_seed` records the stack for each kind of them."""
    (torch if torch.cuda.is_initialized() else torch.default_generator).manual_seed(seed)


class _TorchRandom:
    """torch's generator as hypothesis wants it, so that an example draws the same tensors whenever it is tried."""

    def seed(self, seed: int) -> None:
        _seed_torch(seed)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


# Hypothesis keeps only a weak reference.
_TORCH_RANDOM = _TorchRandom()
hypothesis.register_random(_TORCH_RANDOM)

# How long an example takes says something about the machine, not about the code.
hypothesis.settings.register_profile(
    "default", deadline=None, max_examples=50, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("default"), derandomize=True, database=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


# The type of the fixture `run_python`.
RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    _seed_torch(0)


@pytest.fixture(autouse=True, scope="module")
def _quick_garbage_collection() -> None:
    """Puts aside what imports left: each training collects garbage, and would look through it for half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def repository_root() -> Path:
    """The folder that holds pyproject.toml."""
    return _REPOSITORY_ROOT


@pytest.fixture(scope="session")
def scripts_directory(repository_root: Path) -> Path:
    """The folder of the command-line scripts."""
    return repository_root / "scripts"


@pytest.fixture
def main() -> Callable[[str], Callable[..., None]]:
    """The main function of a script, by the script's name; pyproject.toml puts the scripts on the path."""

    def get(name: str) -> Callable[..., None]:
        function: Any = importlib.import_module(name).main
        return lambda *arguments: function([str(argument) for argument in arguments])

    return get


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library's registry of pipelines as it is without this package."""
    from transformers import pipelines
    from transformers.pipelines.base import PipelineRegistry

    own = ("text2text-generation", "summarization", "translation")
    supported = {task: entry for task, entry in pipelines.SUPPORTED_TASKS.items() if task not in own}
    fresh = PipelineRegistry(supported_tasks=supported, task_aliases=dict(pipelines.TASK_ALIASES))
    monkeypatch.setattr(pipelines, "PIPELINE_REGISTRY", fresh)
    if hasattr(pipelines, "REMOVED_TASKS"):
        monkeypatch.setattr(pipelines, "REMOVED_TASKS", {**dict.fromkeys(own, "It is gone."), "question-answering": ""})
    return fresh


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every figure that is saved, in order; rendering them, which takes half a second each, is left to other tests."""
    from matplotlib.figure import Figure

    saved: list[Any] = []

    def savefig(self: Figure, file: Path, **kwargs: Any) -> None:
        saved.append(self)
        file.write_bytes(b"a picture")

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings draw no learning curves, which take a second each."""
    monkeypatch.setattr("vanilla_transformer.training.records.plot_learning_curves", lambda *_, **__: None)


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing matplotlib, or a part of it, fails as if it were not installed."""
    original = builtins.__import__

    def import_others(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", import_others)


@pytest.fixture(scope="session")
def without_the_package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemotePython]:
    """One process for all tests, in which the package cannot be imported: models come with their own code."""
    folder = tmp_path_factory.mktemp("without_the_package")
    python = RemotePython(folder, {**os.environ, "HF_MODULES_CACHE": str(folder / "modules")})
    python.run(BLOCK_THE_PACKAGE)
    yield python
    python.close()


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Runs this Python in a process of its own, in the test's `tmp_path`, cut off from the network as this one is."""

    def run(
        *arguments: str | Path,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        input: str | None = None,
        timeout: float = 300.0,
        returncode: int = 0,
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *map(str, arguments)]
        options: Any = {"cwd": cwd or tmp_path, "env": {**os.environ, **(environment or {})}, "timeout": timeout}
        result = subprocess.run(command, capture_output=True, check=False, input=input or "", text=True, **options)
        if result.returncode != returncode:
            pytest.fail(
                f"{command} ended with status {result.returncode} instead of {returncode}\n"
                f"--- stdout ---\n{result.stdout}\n--- stderr ---\n{result.stderr}"
            )
        return result

    return run
