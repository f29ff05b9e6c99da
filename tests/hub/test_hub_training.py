"""Trainings that push to a Hub: real clients in processes of their own, and what the Hub saw of them.

One process imports everything and forks each training.
"""

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus_files import command_line
from hub_folders import CODE_FILES, edit_on_the_hub
from huggingface_hub import ModelCard
from local_hub import LocalHub
from many_processes import launcher, write_pairs
from remote_process import RemotePython
from safetensors.torch import load as load_weights
from tiny_seq2seq import make_model as make_bart
from tiny_seq2seq import make_tokenizer as make_bart_tokenizer
from tiny_vanilla import make_model
from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainingArguments, TrainerControl, TrainerState

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.training.arguments import TranslationTrainingArguments
from vanilla_transformer.training.callbacks import ShipCode

PROGRESS = ["Training in progress, step 2", "Training in progress, step 4"]
WITH_CHECKPOINTS = [title + end for title in PROGRESS for end in ("", ", checkpoint")]
# Of the commits during a training.
TITLES: dict[str, list[str]] = {"end": [], "every_save": PROGRESS}
TITLES |= dict.fromkeys(("checkpoint", "all_checkpoints"), WITH_CHECKPOINTS)
TOKEN = "hf_alice"

Trained = dict[str, list[Any]]


@pytest.fixture(scope="module")
def hub() -> Iterator[LocalHub]:
    with LocalHub(tokens={TOKEN: "alice"}, read_only_tokens={"hf_reader": "alice"}) as hub:
        yield hub


@pytest.fixture(scope="module")
def run(hub: LocalHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Runs a program of `hub_programs`, in a process of its own unless `processes` are asked for."""
    folder = tmp_path_factory.mktemp("processes")
    with launcher(folder, module="hub_programs", environment=hub.env(TOKEN, hf_home=folder / "home")) as processes:
        yield partial(processes.run, processes=1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the trainings write; one called "x" goes to alice/x."""
    return tmp_path_factory.mktemp("runs")


def commits(hub: LocalHub, name: str) -> list[Any]:
    """Those after the first, the oldest one first."""
    return hub.repo(f"alice/{name}").history()[-2::-1]


def titles(hub: LocalHub, name: str, revision: str = "main") -> list[str]:
    return hub.titles(f"alice/{name}", revision)[-2::-1]


def assert_is_whole(files: dict[str, bytes]) -> None:
    """Configuration, code, weights and tokenizer are there, and agree."""
    config = json.loads(files["config.json"])
    assert config["auto_map"].keys() >= {"AutoConfig", "AutoModelForSeq2SeqLM"}
    assert {name: files.get(name) for name in CODE_FILES} == CODE_FILES
    weights = load_weights(files["model.safetensors"])
    assert weights["model.shared.weight"].shape == (config["vocab_size"], config["d_model"])
    assert files.keys() >= {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}


def test_every_commit_of_the_librarys_trainer_has_the_code(hub: LocalHub, run: Callable[..., str], runs: Path) -> None:
    run("train", {"trainer": "library", "hub_strategy": "checkpoint", "output_dir": str(runs / "library")})
    assert titles(hub, "library") == [*WITH_CHECKPOINTS, "End of training"]
    for commit in commits(hub, "library"):
        assert_is_whole(hub.contents("alice/library", commit["id"]))


@pytest.fixture(scope="module")
def trained(hub: LocalHub, run: Callable[..., str], runs: Path) -> Trained:
    """The commits of one training of the package's trainer per strategy, in two processes and with absolute paths."""
    found = {}
    (runs / "secret").write_text("mine")
    for strategy in TITLES:
        name = f"package-{strategy}"
        (runs / name).mkdir()
        (runs / name / "LICENSE").symlink_to("../secret")
        options: dict[str, Any] = {"trainer": "package", "hub_strategy": strategy, "output_dir": str(runs / name)}
        limit = {"save_total_limit": 1} if strategy == "all_checkpoints" else {}
        run("train", {**options, **limit, "hub_token": TOKEN}, processes=2 if strategy == "checkpoint" else 1)
        found[strategy] = commits(hub, name)
    return found


class TestTranslationTrainer:
    def test_each_commit_is_whole_and_has_a_card(self, hub: LocalHub, trained: Trained, runs: Path) -> None:
        for strategy, found in trained.items():
            # Where nothing has changed since the last checkpoint, there is no commit at the end.
            expected = TITLES[strategy] or ["End of training"]
            assert [commit["title"] for commit in found] == expected, strategy
            for commit in found:
                files = hub.contents(f"alice/package-{strategy}", commit["id"])
                assert_is_whole(files)
                card = ModelCard(files["README.md"].decode())
                assert card.data.to_dict()["pipeline_tag"] == "translation"
                assert f"alice/package-{strategy}" in card.text
        for step, commit in zip((2, 4), trained["every_save"], strict=True):
            pushed = hub.read("alice/package-every_save", "model.safetensors", commit["id"])
            assert pushed == (runs / f"package-every_save/checkpoint-{step}/model.safetensors").read_bytes()

    def test_nothing_tells_of_this_machine_or_the_token(self, hub: LocalHub, trained: Trained, runs: Path) -> None:
        for strategy in trained:
            name = f"package-{strategy}"
            files = hub.contents(f"alice/{name}")
            assert not [path for path in files if path.endswith(("training_args.bin", ".pkl", "LICENSE"))]
            # What it takes to resume is pushed on request, the state with its own folder among it.
            told = {path for path, data in files.items() if str(runs).encode() in data}
            assert all(path.endswith("/trainer_state.json") for path in told)
            local = [path for path in (runs / name).rglob("*") if path.is_file()]
            assert any(path.name == "training_args.bin" for path in local)
            for data in [*files.values(), *(path.read_bytes() for path in local)]:
                assert TOKEN.encode() not in data
            assert not list((runs / name).glob("_*"))

    def test_a_pulled_checkpoint_is_resumed(
        self, hub: LocalHub, trained: Trained, run: Callable[..., str], runs: Path, tmp_path: Path
    ) -> None:
        assert [path.name for path in (runs / "package-all_checkpoints").glob("checkpoint-*")] == ["checkpoint-4"]
        files = hub.contents("alice/package-all_checkpoints")
        for step in (2, 4):
            (tmp_path / f"checkpoint-{step}").mkdir()
            assert json.loads(files[f"checkpoint-{step}/trainer_state.json"])["global_step"] == step
        for path, data in files.items():
            if path.startswith("checkpoint-"):
                (tmp_path / path).write_bytes(data)
        options = {"trainer": "package", "output_dir": str(runs / "resumed"), "hub_strategy": "checkpoint"}
        run("train", {**options, "resume": str(tmp_path / "checkpoint-2")})
        assert titles(hub, "resumed") == [PROGRESS[1], f"{PROGRESS[1]}, checkpoint"]
        resumed = hub.read("alice/resumed", "last-checkpoint/model.safetensors")
        assert resumed == files["checkpoint-4/model.safetensors"]

    def test_checkpoints_may_be_deleted_during_a_push(self, hub: LocalHub, run: Callable[..., str], runs: Path) -> None:
        doomed = runs / "deleting" / "checkpoint-1"
        doomed.mkdir(parents=True)
        options = {"trainer": "package", "output_dir": str(doomed.parent), "hub_strategy": "every_save"}
        assert "the push failed" not in run("train_beside_a_deletion", {"doomed": str(doomed), **options})
        assert titles(hub, "deleting") == PROGRESS

    @pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
    def test_a_slow_push_is_of_the_step_that_its_title_says(
        self, strategy: str, hub: LocalHub, run: Callable[..., str], runs: Path
    ) -> None:
        """Both pushes begin when the training is over, and only one checkpoint is to stay."""
        folder = runs / f"slow-{strategy}"
        options: dict[str, Any] = {"trainer": "package", "output_dir": str(folder), "hub_strategy": strategy}
        said = run("train", {**options, "save_total_limit": 1, "hold_pushes": True, "push": False})
        assert "the push failed" not in said
        assert titles(hub, folder.name) == WITH_CHECKPOINTS
        pushed = [hub.contents(f"alice/{folder.name}", commit["id"]) for commit in commits(hub, folder.name)]
        weights = [files["model.safetensors"] for files in pushed]
        assert weights[0] != weights[2]
        for index, step in ((1, 2), (3, 4)):
            place = f"checkpoint-{step}" if strategy == "all_checkpoints" else "last-checkpoint"
            assert json.loads(pushed[index][f"{place}/trainer_state.json"])["global_step"] == step
            assert pushed[index][f"{place}/model.safetensors"] == weights[index - 1] == weights[index]
        assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-4"]

    def test_branch_and_privacy_and_an_edited_card(self, hub: LocalHub, run: Callable[..., str], runs: Path) -> None:
        folder, repo_id = runs / "private", "alice/private"
        options: dict[str, Any] = {"trainer": "package", "output_dir": str(folder), "hub_strategy": "every_save"}
        options |= {"hub_private_repo": True, "hub_revision": "trial"}
        run("train", options)
        assert hub.repo(repo_id).private
        assert (titles(hub, "private"), titles(hub, "private", "trial")) == ([], PROGRESS)
        with (folder / "README.md").open("a") as card_file:
            card_file.write("\nTrained by Alice.\n")
        told = {"commit_message": "again", "license": "mit", "finetuned_from": "alice/first"}
        run("train", {**options, "max_steps": 2, "push": told})
        card = ModelCard(hub.read(repo_id, "README.md", "trial").decode())
        assert "Trained by Alice." in card.text
        assert {"license": "mit", "base_model": "alice/first"}.items() <= card.data.to_dict().items()
        edit_on_the_hub(hub, repo_id, "README.md", "Trained by Alice.", "Trained by Alice and Bob.", "trial")
        run("train", {**options, "max_steps": 2})
        for content in (hub.read(repo_id, "README.md", "trial"), (folder / "README.md").read_bytes()):
            assert b"Alice and Bob" in content

        def edit_here(old: str, new: str) -> None:
            (folder / "README.md").write_text((folder / "README.md").read_text().replace(old, new))

        # What a failing push has not brought there is brought by the next one.
        edit_here("Alice and Bob.", "Alice.")
        hub.failures.append(["POST", "/alice/private/commit/", 500, 99])
        assert "the push failed" in run("train", {**options, "max_steps": 2, "push": False})
        hub.failures.clear()
        run("train", {**options, "max_steps": 2})
        assert b"Trained by Alice." in hub.read(repo_id, "README.md", "trial")
        edit_on_the_hub(hub, repo_id, "README.md", "by Alice.", "by others.", "trial")
        edit_here("by Alice.", "by Carol.")
        said = run("train", {**options, "max_steps": 2, "push": {"commit_message": "once more"}})
        assert "The training pushes no card to alice/private: README.md was edited both" in said
        assert b"by others." in hub.read(repo_id, "README.md", "trial")

    def test_other_models_keep_the_librarys_card(self, hub: LocalHub, run: Callable[..., str], runs: Path) -> None:
        options = {"trainer": "package", "model": "bart", "output_dir": str(runs / "bart")}
        run("train", {**options, "hub_strategy": "every_save"})
        assert titles(hub, "bart") == [*PROGRESS, "End of training"]
        card = ModelCard(hub.read("alice/bart", "README.md").decode())
        assert "generated_from_trainer" in card.data.to_dict()["tags"]
        assert card.text.count("# bart") == 1

    def test_it_loads_without_the_package(
        self, hub: LocalHub, trained: Trained, without_the_package: RemotePython, runs: Path, tmp_path: Path
    ) -> None:
        checkpoint = runs / "package-every_save" / "checkpoint-2"
        batch = VanillaTransformerTokenizer()("abc", return_tensors="pt")
        expected = AutoModelForSeq2SeqLM.from_pretrained(checkpoint).generate(**batch, max_new_tokens=5).tolist()
        for path, data in hub.contents("alice/package-every_save", trained["every_save"][0]["id"]).items():
            (tmp_path / path).write_bytes(data)
        source = """
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True)
model.generate(**tokenizer("abc", return_tensors="pt"), max_new_tokens=5).tolist()
"""
        assert without_the_package.run(source, folder=str(tmp_path)) == expected


class TestScript:
    @pytest.fixture
    def argv(self, tmp_path: Path, runs: Path) -> list[str]:
        files = write_pairs(tmp_path, "pairs", 8)
        settings = {"preset": "tiny", "vocab_size": 270, "source_lang": "en", "target_lang": "de", "max_steps": 4}
        settings |= {"eval_steps": 2, "save_steps": 2, "logging_steps": 1, "learning_rate": 0.001, "warmup_steps": 1}
        settings |= {"per_device_train_batch_size": 4, "use_cpu": True, "output_dir": runs / "script"}
        settings |= {"push_to_hub": True, "hub_strategy": "every_save", "hub_token": TOKEN}
        settings |= {"hub_license": "mit", "hub_datasets": "alice/numbers"}
        return command_line({**settings, "train_file": files, "validation_file": files})

    def test_failures_end_nothing_and_the_same_command_completes_it(
        self, hub: LocalHub, run: Callable[..., str], runs: Path, argv: list[str]
    ) -> None:
        folder = runs / "script"
        hub.failures.append(["POST", "/alice/script/commit/", 500, 99])
        said = run("run_script", {"argv": argv})
        hub.failures.clear()
        assert titles(hub, "script") == []
        assert "Training in progress, step 2: the push failed, and the training goes on. HfHubHTTPError: " in said
        assert f"ended with: The model is in {folder}, but it could not be pushed to alice/script: " in said
        metrics = json.loads((folder / "metrics.json").read_text())["metrics"]

        said = run("run_script", {"argv": argv})
        assert "It is on the Hub: " in said
        assert titles(hub, "script") == ["End of training"]
        files = hub.contents("alice/script")
        assert_is_whole(files)
        card = ModelCard(files["README.md"].decode())
        expected = {"language": ["en", "de"], "license": "mit", "datasets": ["alice/numbers"]}
        assert expected.items() <= card.data.to_dict().items()
        assert f"BLEU {metrics['eval_bleu']:.2f}" in card.text
        assert not [path for path in files if path.startswith(("runs", "arguments.json", "training_args.bin"))]
        assert json.loads((folder / "arguments.json").read_text())["training"]["hub_token"] == "<HUB_TOKEN>"
        assert not [path for path in folder.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
        assert not [path for path, data in files.items() if str(runs).encode() in data]

    @pytest.mark.parametrize(
        ("token", "words"), [("hf_wrong", "The Hub does not accept the token"), ("hf_reader", "is read-only")]
    )
    def test_a_token_that_cannot_push_is_found_before_anything_is_done(
        self, run: Callable[..., str], runs: Path, argv: list[str], token: str, words: str
    ) -> None:
        said = run("run_script", {"argv": [*argv, "--hub_token", token, "--output_dir", str(runs / token)]})
        assert f"error: push_to_hub: {words}" in said.replace("The token of alice ", "")
        assert not (runs / token).exists()


class TestShipCode:
    def push(self, folder: Path, model: Any, tokenizer: Any, *, is_main: bool = True) -> dict[str, int]:
        """Lets the callback act, and returns the folder's files with their inodes."""
        arguments = TranslationTrainingArguments(output_dir=str(folder), warmup_steps=1, use_cpu=True)
        state = TrainerState(is_world_process_zero=is_main)
        ShipCode().on_push_begin(arguments, state, TrainerControl(), model=model, processing_class=tokenizer)
        return {path.name: path.stat().st_ino for path in folder.iterdir()} if folder.exists() else {}

    def test_only_what_changes_is_replaced(self, tmp_path: Path) -> None:
        model, tokenizer = make_model(), VanillaTransformerTokenizer()
        before = model.config.to_dict()
        first = self.push(tmp_path, model, tokenizer)
        assert {name: (tmp_path / name).read_bytes() for name in first} == CODE_FILES
        assert model.config.to_dict() == before
        changed = tmp_path / "loss_vanilla_transformer.py"
        changed.write_text("# of an older version\n")
        with changed.open("rb") as reader:  # an upload, say
            second = self.push(tmp_path, model, tokenizer)
            assert reader.read() == b"# of an older version\n"
        assert {name for name in CODE_FILES if first[name] != second[name]} == {changed.name}
        assert changed.read_bytes() == CODE_FILES[changed.name]

    def test_where_there_is_nothing_to_do(self, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        assert self.push(folder, make_bart(), make_bart_tokenizer()) == {}
        assert self.push(folder, make_model(), VanillaTransformerTokenizer(), is_main=False) == {}

    def test_compiled_models(self, tmp_path: Path) -> None:
        written = self.push(tmp_path, torch.compile(make_model()), VanillaTransformerTokenizer())
        assert written.keys() == CODE_FILES.keys()

    def test_a_token_that_would_be_published_is_warned_of(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def begin(kind: Any, is_main: bool = True, **settings: Any) -> str:
            caplog.clear()
            arguments = kind(str(tmp_path), use_cpu=True, **settings)
            ShipCode().on_train_begin(arguments, TrainerState(is_world_process_zero=is_main), TrainerControl())
            assert TOKEN not in caplog.text
            return caplog.text

        monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
        monkeypatch.setattr(logging.getLogger("vanilla_transformer"), "propagate", True)
        pushing: dict[str, Any] = {"push_to_hub": True, "hub_token": TOKEN}
        assert "training_args.bin, which the library's Trainer pushes" in begin(Seq2SeqTrainingArguments, **pushing)
        assert not begin(Seq2SeqTrainingArguments, is_main=False, **pushing)
        assert not begin(Seq2SeqTrainingArguments, push_to_hub=True)
        assert not begin(Seq2SeqTrainingArguments, hub_token=TOKEN)
        assert not begin(TranslationTrainingArguments, **pushing), "TranslationTrainer puts it away"
