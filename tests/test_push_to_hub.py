"""A folder is checked, shown and pushed: damaged ones in this process, the script against a Hub of this machine.

Starting a process costs seconds, so one process runs the script for all tests, mostly with a BART, which needs no
trial without the package.
"""

import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from local_hub import LocalHub
from remote_process import RemotePython, remote_python
from safetensors.torch import load_file, save_file
from tiny_seq2seq import make_model as make_bart
from tiny_seq2seq import make_tokenizer as make_bart_tokenizer

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.hub import check_model_folder
from vanilla_transformer.hub_checks import PROBES, inspect_model_folder
from vanilla_transformer.hub_files import PACKAGE_FOLDER, select_files
from vanilla_transformer.model_card import write_model_card
from vanilla_transformer.tokenizer_training import train_separate_tokenizer, train_tokenizer

TEXTS = ["a man rides a horse", "two dogs rest", "7 horses"]
CODE = {path.name for path in PACKAGE_FOLDER.glob("*_vanilla_transformer.py")}
# In parts, so that nobody takes this file for one with a secret.
HUB_TOKEN = "hf_" + "abcDEF123" * 4


def save_vanilla(folder: Path, tokenizer: Any, **changes: Any) -> Path:
    """A model with random weights that translates into something, its tokenizer, its card."""
    torch.manual_seed(0)
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=len(tokenizer), **changes)
    model = VanillaTransformerForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + 0.1 * torch.randn_like(parameter))
    model.generation_config.max_new_tokens = 12
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_model_card(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = train_tokenizer(TEXTS * 3, vocab_size=275, show_progress=False)
    return save_vanilla(tmp_path_factory.mktemp("saved") / "model", tokenizer, langs=["en", "de"])


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def edit_json(path: Path, **changes: Any) -> None:
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def edit_weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def shard(folder: Path) -> dict[str, Any]:
    """Splits the weights into shards, and returns their index."""
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    index: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    return index


def write_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"weights": [1.0]}))


def lose_a_shard(folder: Path) -> None:
    shard(folder)
    next(folder.glob("model-00002*")).unlink()


def lose_an_entry(folder: Path) -> None:
    index = shard(folder)
    index["weight_map"].pop("model.decoder.layers.1.fc2.bias")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def keep_old_weights(folder: Path) -> None:
    old = (folder / "model.safetensors").read_bytes()
    shard(folder)
    (folder / "model.safetensors").write_bytes(old)


def store_tied_weights_twice(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights.update({"lm_head.weight": weights["model.shared.weight"].clone()}))


def spoil_a_weight(folder: Path) -> None:
    edit_weights(folder, lambda weights: weights["model.encoder.layers.0.fc1.bias"].fill_(torch.nan))


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


NORM = "model.encoder.layers.0.self_attn_layer_norm.bias"
FC1 = "model.encoder.layers.0.fc1.bias"

# What is done to a folder, which check must name it, and by which words.
DAMAGES: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "no configuration": (lambda folder: (folder / "config.json").unlink(), "config", "config.json is missing"),
    "configuration cut off": (lambda folder: cut_off(folder / "config.json"), "config", "config.json"),
    "unknown kind of model": (
        lambda folder: edit_json(folder / "config.json", model_type="martian", auto_map=None, architectures=None),
        "config",
        "martian",
    ),
    "illegal value": (lambda folder: edit_json(folder / "config.json", dropout=2.0), "config", "dropout"),
    "misspelt field": (
        lambda folder: edit_json(folder / "config.json", normalise_before=True),
        "config",
        "without effect: normalise_before (did you mean normalize_before?)",
    ),
    "another number of layers": (
        lambda folder: edit_json(folder / "config.json", encoder_layers=3),
        "weights",
        "they fit encoder_layers=2 (not 3) in config.json. As it is, these weights that the model has are missing: ",
    ),
    "another vocabulary": (
        lambda folder: edit_json(folder / "config.json", vocab_size=300),
        "weights",
        "they fit vocab_size=275 (not 300) in config.json. As it is, these weights have other shapes",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "weights",
        "model.safetensors is missing: save the model",
    ),
    "weights cut off": (
        lambda folder: cut_off(folder / "model.safetensors"),
        "weights",
        "model.safetensors is cut off: its header announces",
    ),
    "a weight missing": (lambda folder: edit_weights(folder, lambda weights: weights.pop(NORM)), "weights", NORM),
    "a weight too many": (
        lambda folder: edit_weights(folder, lambda weights: weights.update(stranger=torch.ones(2))),
        "weights",
        "stranger",
    ),
    "a weight of another shape": (
        lambda folder: edit_weights(folder, lambda weights: weights.update({FC1: torch.ones(3)})),
        "weights",
        FC1,
    ),
    "a weight that is no number": (spoil_a_weight, "weights", f"not all finite numbers: {FC1}"),
    "tied weights stored twice": (store_tied_weights_twice, "weights", "stored 2 times"),
    "a shard missing": (lose_a_shard, "weights", "model-00002"),
    "a weight that the index lacks": (lose_an_entry, "weights", "do not agree on model.decoder.layers.1.fc2.bias"),
    "old weights beside shards": (keep_old_weights, "weights", "are both there"),
    "no generation config": (
        lambda folder: (folder / "generation_config.json").unlink(),
        "generation_config",
        "is missing",
    ),
    "illegal generation config": (
        lambda folder: edit_json(folder / "generation_config.json", max_new_tokens=-1),
        "generation_config",
        "max_new_tokens",
    ),
    "other special tokens": (
        lambda folder: edit_json(folder / "generation_config.json", pad_token_id=5),
        "tokenizer",
        "pad_token_id is 1 in config.json, 5 in generation_config.json, 1 in the tokenizer",
    ),
    "no tokenizer": (lambda folder: (folder / "tokenizer_config.json").unlink(), "tokenizer", "is missing"),
    "no vocabulary": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer", "tokenizer.json is missing"),
    "a larger tokenizer": (
        lambda folder: train_tokenizer(TEXTS * 9, vocab_size=280, show_progress=False).save_pretrained(folder),
        "tokenizer",
        "the tokenizer has 280 source tokens, but config.json says vocab_size=275",
    ),
    "no card": (lambda folder: (folder / "README.md").unlink(), "card", "README.md is missing"),
    "card without metadata": (lambda folder: (folder / "README.md").write_text("# Model"), "card", "has no metadata"),
    "card with damaged metadata": (
        lambda folder: (folder / "README.md").write_text("---\nlicense: [mit\n---\n"),
        "card",
        "cannot be read",
    ),
    "no names of code": (
        lambda folder: edit_json(folder / "config.json", auto_map=None, custom_pipelines=None),
        "code",
        "auto_map.AutoModelForSeq2SeqLM in config.json",
    ),
    "names of code that are none": (
        lambda folder: edit_json(folder / "config.json", custom_pipelines="pipeline.py"),
        "code",
        "custom_pipelines.translation in config.json",
    ),
    "a file of code missing": (
        lambda folder: (folder / "positions_vanilla_transformer.py").unlink(),
        "code",
        "positions_vanilla_transformer.py",
    ),
    "code that was changed": (
        lambda folder: append(folder / "pipeline_vanilla_transformer.py", "# mine\n"),
        "code",
        "pipeline_vanilla_transformer.py in the folder and in the installed package are not the same",
    ),
    "pickled weights": (
        lambda folder: write_pickle(folder / "pytorch_model.bin"),
        "files",
        "pytorch_model.bin is a pickle",
    ),
    "a pickle of another name": (
        lambda folder: write_pickle(folder / "vocab.json"),
        "files",
        "vocab.json is a pickle",
    ),
    "a secret in code": (
        lambda folder: (folder / "config.json").write_text(
            (folder / "config.json").read_text().replace("{", f'{{\n"finetuning_task": "{HUB_TOKEN}",', 1)
        ),
        "files",
        "config.json, line 2, has what looks like a token of the Hub",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_named(folder: Path, damage: str) -> None:
    do, check, words = DAMAGES[damage]
    do(folder)
    before = contents(folder)
    problems = check_model_folder(folder)
    assert any(problem.check == check and words in problem.message for problem in problems), problems
    # What is wrong with one part is not blamed on another.
    assert {problem.check for problem in problems} == {check}
    assert not any(str(problem).count("/push-") for problem in problems), "names the folder, not a copy"
    assert contents(folder) == before


def test_all_damages_are_named_at_once(folder: Path) -> None:
    chosen = [
        "a weight missing",
        "a weight of another shape",
        "illegal generation config",
        "a larger tokenizer",
        "no card",
        "code that was changed",
        "pickled weights",
    ]
    for damage in chosen:
        DAMAGES[damage][0](folder)
    problems = check_model_folder(folder)
    for damage in chosen:
        _, check, words = DAMAGES[damage]
        assert any(problem.check == check and words in problem.message for problem in problems), damage


class TestSelection:
    def test_a_training_leaves_more_than_the_model(self, folder: Path) -> None:
        model = set(contents(folder))
        for name in ("checkpoint-5", "runs", "_partial", "averaged", "test", "notes"):
            (folder / name).mkdir()
        (folder / "averaged" / "config.json").write_text("{}")
        (folder / "test" / "hypotheses.txt").write_text("eins\n")
        for name in ("training_args.bin", "optimizer.pt", "rng_state.pth"):
            write_pickle(folder / name)
        (folder / "arguments.json").write_text(json.dumps({"data": {"train_file": ["/home/me/train.en"]}}))
        (folder / "metrics.json").write_text(json.dumps({"command": "python train.py --output_dir out/model"}))
        (folder / "helper.py").touch()
        found = select_files(folder)
        assert set(found.files) == model | {"metrics.json"}
        assert found.left_out == {
            "_partial/": "hidden, unfinished or set aside",
            "arguments.json": "names folders of this machine (data.train_file)",
            "averaged/": "a model of its own; it can be pushed on its own",
            "checkpoint-5/": "a checkpoint of the training; it can be pushed on its own",
            "helper.py": "not a part of the model",
            "notes/": "not a part of the model",
            "optimizer.pt": "needed only to resume the training",
            "rng_state.pth": "needed only to resume the training",
            "runs/": "logs of the training",
            "test/": "an evaluation; its scores are in the model card",
            "training_args.bin": "needed only to resume the training",
        }

    def test_what_is_asked_for_is_pushed_but_not_a_pickle(self, folder: Path) -> None:
        (folder / "test").mkdir()
        (folder / "test" / "hypotheses.txt").write_text("eins\n")
        write_pickle(folder / "training_args.bin")
        assert "test/hypotheses.txt" in select_files(folder, ["test"]).files
        assert "test/hypotheses.txt" in select_files(folder, ["te*/hyp*"]).files
        (folder / "positions_vanilla_transformer.py").unlink()  # so that nothing is tried
        problems = check_model_folder(folder, include=["training_*"])
        assert "training_args.bin is a pickle" in problems[0].message
        with pytest.raises(ValueError, match=r"There is nothing to include in .* that is called or matches 'tset'"):
            select_files(folder, ["tset"])

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="There is no folder"):
            check_model_folder(tmp_path / "nowhere")

    def test_an_adapter_is_pushed_by_peft(self, tmp_path: Path) -> None:
        (tmp_path / "adapter_config.json").write_text("{}")
        (problem,) = check_model_folder(tmp_path)
        assert "PeftModel.push_to_hub" in problem.message


class TestCode:
    def test_the_installed_code_can_replace_the_folders(self, folder: Path) -> None:
        (folder / "pipeline_vanilla_transformer.py").write_text("raise ImportError('old')\n")
        (folder / "positions_vanilla_transformer.py").unlink()
        edit_json(folder / "generation_config.json", pad_token_id=5)  # so that nothing is tried
        found = inspect_model_folder(folder, card=(folder / "README.md").read_text(), code="installed")
        assert {problem.check for problem in found.problems} == {"tokenizer"}
        assert {name for name in found.files if name.endswith(".py")} == CODE
        assert set(found.replaced) == {"pipeline_vanilla_transformer.py", "positions_vanilla_transformer.py"}
        assert all(path.parent == PACKAGE_FOLDER for path in found.replaced.values())
        assert found.replaced.items() <= found.files.items()

    def test_a_trial_tells_what_the_folders_own_code_does(self, tmp_path: Path) -> None:
        tokenizer = make_bart_tokenizer()  # the library's own needs no code
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        folder = save_vanilla(tmp_path / "model", tokenizer, **ids)
        path = folder / "pipeline_vanilla_transformer.py"
        assert "HF_TOKEN" not in path.read_text()
        text = path.read_text() + (
            "\n\nimport os\n"
            "class TranslationPipeline(TranslationPipeline):\n"
            "    def __call__(self, texts, **kwargs):\n"
            "        return [{'translation_text': str(os.environ.get('HF_TOKEN'))} for text in texts]\n"
        )
        path.write_text(text)
        problems = check_model_folder(folder, code="folder")
        assert [problem.check for problem in problems] == ["code"] * len(PROBES)
        assert "but 'None' in a process without this package" in problems[0].message


@pytest.mark.parametrize("separate", [False, True])
def test_vocabularies_of_both_sides_are_compared(tmp_path: Path, separate: bool) -> None:
    tokenizer = train_separate_tokenizer(
        TEXTS * 3, ["ein Mann", "zwei Hunde"] * 3, vocab_size=270, target_vocab_size=266
    )
    target = len(tokenizer.target_tokenizer)
    folder = save_vanilla(
        tmp_path / "model",
        tokenizer,
        decoder_vocab_size=target + (0 if separate else 2),
        share_encoder_decoder_embeddings=False,
    )
    if not separate:
        one = train_tokenizer(TEXTS * 3, vocab_size=270, show_progress=False)
        (folder / "target_tokenizer.json").unlink()
        one.save_pretrained(folder)
    (folder / "positions_vanilla_transformer.py").unlink()  # so that nothing is tried
    checks = {problem.check: problem.message for problem in check_model_folder(folder)}
    assert checks.keys() - {"code"} == (set() if separate else {"tokenizer"})
    assert separate or f"270 target tokens, but config.json says decoder_vocab_size={target + 2}" in checks["tokenizer"]


def test_spare_rows_are_legal(folder: Path) -> None:
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    model.resize_token_embeddings(275, pad_to_multiple_of=256)
    model.save_pretrained(folder)
    (folder / "positions_vanilla_transformer.py").unlink()  # so that nothing is tried
    assert {problem.check for problem in check_model_folder(folder)} == {"code"}


DRIVER = """
import contextlib, io, os, sys, time
sys.path.insert(0, scripts)
import huggingface_hub.constants
import push_to_hub
from vanilla_transformer.hub import PushError, plan_push
time.sleep = lambda seconds: None  # between attempts

def push(*argv, xet=True, endpoint=None):
    huggingface_hub.constants.HF_HUB_DISABLE_XET = not xet  # the variables of these names were read at import
    usual, huggingface_hub.constants.ENDPOINT = huggingface_hub.constants.ENDPOINT, endpoint or hub
    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        try:
            push_to_hub.main(list(argv))
            status = 0
        except SystemExit as error:
            status = error.code
            if isinstance(status, str):  # as the interpreter does at its end
                print(status, file=sys.stderr)
                status = 1
    return {"status": status, "said": said.getvalue(), "errors": " ".join(errors.getvalue().split())}
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[LocalHub]:
    tokens = {"hf_alice": "alice", "hf_bob": "bob"}
    with LocalHub(tokens=tokens, read_only_tokens={"hf_reader": "alice"}) as hub:
        yield hub


@pytest.fixture(scope="module")
def python(hub: LocalHub, scripts_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemotePython]:
    """A process that runs the script again and again, with alice's token."""
    folder = tmp_path_factory.mktemp("python")
    quick = {"HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms", "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "2"}
    with remote_python(folder, hub.env("hf_alice", hf_home=folder / "home", **quick)) as python:
        python.run(DRIVER, scripts=str(scripts_directory), hub=hub.endpoint)
        yield python


@pytest.fixture(scope="module")
def saved_bart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bart") / "bart"
    make_bart().save_pretrained(folder)
    make_bart_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def bart(saved_bart: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved_bart, tmp_path / "bart")


@pytest.fixture
def push(python: RemotePython, bart: Path) -> Callable[..., SimpleNamespace]:
    """Runs the script with the folder `bart` and these arguments."""

    def run(repo_id: str, *arguments: str, status: int = 0, **options: Any) -> SimpleNamespace:
        argv = ["--model_name_or_path", str(bart), "--repo_id", repo_id, *arguments]
        found = SimpleNamespace(**python.run("push(*argv, **options)", argv=argv, options=options))
        assert found.status == status, found
        for token in ("hf_alice", "hf_bob", "hf_reader", "hf_nobody"):
            assert token not in found.said + found.errors
        return found

    return run


def edit_on_the_hub(hub: LocalHub, repo_id: str, path: str, old: str, new: str) -> None:
    repo, text = hub.repo(repo_id), hub.read(repo_id, path).decode()
    assert old in text
    files = {**hub.files(repo_id), path: hub.small_file(text.replace(old, new).encode())}
    repo.commit("refs/heads/main", "alice", "by hand", "", files, [path])


def commits(hub: LocalHub, repo_id: str) -> list[str]:
    return [commit["title"] for commit in hub.repo(repo_id).history()]


Push = Callable[..., SimpleNamespace]
TRANSPORTS = pytest.mark.parametrize("xet", [True, False], ids=["xet", "lfs"])


class TestPush:
    @TRANSPORTS
    def test_one_commit_brings_it_all(self, hub: LocalHub, push: Push, bart: Path, xet: bool) -> None:
        repo_id, before = f"alice/whole-{xet}", contents(bart)
        write_pickle(bart / "training_args.bin")
        options = ["--license", "apache-2.0", "--datasets", "multi30k", "--private", "--commit_message", "The first"]
        found = push(repo_id, *options, "--language", "en", "de", xet=xet)
        commit = hub.repo(repo_id).find("main")["id"]
        assert found.said.splitlines()[-2:] == [
            f"Pushed: {hub.endpoint}/{repo_id}",
            f"Commit: {hub.endpoint}/{repo_id}/commit/{commit}",
        ]
        assert "license" not in found.said
        assert re.search(r"model\.safetensors +\d+\.\d kB  new", found.said)
        assert re.search(r"training_args\.bin +needed only to resume", found.said)
        assert commits(hub, repo_id) == ["The first", "initial commit"]
        assert hub.repo(repo_id).private
        pushed = {name: hub.read(repo_id, name) for name in hub.files(repo_id)}
        assert {name: pushed[name] for name in before} == before
        assert pushed.keys() - before.keys() == {"README.md", ".gitattributes"}
        assert b"license: apache-2.0" in pushed["README.md"]
        assert (bart / "README.md").read_bytes() == pushed["README.md"]
        assert any("/_cas/" in request["path"] for request in hub.requests if request["method"] == "POST") or not xet
        # Again, there is nothing to do.
        again = push(repo_id, xet=xet).said
        assert again.splitlines()[-1] == f"Nothing has changed: {hub.endpoint}/{repo_id}"
        assert "model.safetensors" not in again
        assert len(commits(hub, repo_id)) == 2

    def test_a_dry_run_changes_nothing(self, hub: LocalHub, push: Push, bart: Path) -> None:
        before, seen = contents(bart), len(hub.requests)
        found = push("alice/dry", "--dry_run")
        assert found.said.splitlines()[-1] == "Nothing is wrong with it. Nothing was pushed (--dry_run)."
        assert "It translates 'A man rides a horse.' as 'w" in found.said
        assert "No license is given" in found.said
        assert {request["method"] for request in hub.requests[seen:]} <= {"GET", "HEAD"}
        assert "alice/dry" not in hub.repos
        assert contents(bart) == before

    def test_a_folder_that_is_not_in_order_stays_here(self, hub: LocalHub, push: Push, bart: Path) -> None:
        write_pickle(bart / "pytorch_model.bin")
        (bart / ".env").touch()
        (bart / "generation_config.json").unlink()
        before = contents(bart)
        for options in ([], ["--dry_run"]):
            found = push("alice/refused", *options, status=1)
            errors = found.errors
            assert "usage:" not in errors
            assert found.said == ""
            for words in (
                "pytorch_model.bin is a pickle",
                ".env looks like a secret",
                "generation_config.json is missing",
            ):
                assert words in errors
        assert "alice/refused" not in hub.repos
        assert contents(bart) == before

    def test_only_changes_are_sent_and_old_weights_are_deleted(self, hub: LocalHub, push: Push, bart: Path) -> None:
        push("alice/shards")
        (bart / "model.safetensors").unlink()
        make_bart().save_pretrained(bart, max_shard_size="5KB")
        found = push("alice/shards")
        assert re.search(r"model\.safetensors +\d+\.\d kB  deleted", found.said)
        newest = hub.repo("alice/shards").history()[0]
        assert "model.safetensors" not in newest["files"]
        assert "config.json" not in newest["changed"]
        push("alice/shards", "--include", "config.json")  # the same files once more
        assert len(commits(hub, "alice/shards")) == 3

    def test_a_new_branch(self, hub: LocalHub, push: Push, bart: Path) -> None:
        push("alice/branches")
        before = hub.files("alice/branches")
        edit_json(bart / "generation_config.json", max_new_tokens=5)
        found = push("branches", "--revision", "short")  # in the user's own namespace
        assert f"Pushed: {hub.endpoint}/alice/branches/tree/short" in found.said.splitlines()
        assert "revision=" not in hub.read("alice/branches", "README.md", "short").decode()
        assert hub.files("alice/branches") == before
        assert json.loads(hub.read("alice/branches", "generation_config.json", "short"))["max_new_tokens"] == 5

    def test_examples_name_a_branch_that_alone_has_the_model(self, hub: LocalHub, push: Push) -> None:
        for _ in range(2):  # a new repository, and one with an empty main branch
            push("alice/exp", "--revision", "exp")
            card = hub.read("alice/exp", "README.md", "exp").decode()
            assert 'from_pretrained("alice/exp", revision="exp")' in card
        push("alice/exp")
        push("alice/exp", "--revision", "exp")
        assert "revision=" not in hub.read("alice/exp", "README.md", "exp").decode()

    def test_a_new_branch_without_a_change(self, hub: LocalHub, push: Push) -> None:
        push("alice/same")
        assert "Pushed: " in push("alice/same", "--revision", "copy").said
        assert hub.files("alice/same", "copy") == hub.files("alice/same")
        assert "Nothing has changed: " in push("alice/same", "--revision", "copy").said

    def test_a_pull_request_by_somebody_else(self, hub: LocalHub, push: Push, bart: Path) -> None:
        push("alice/open")
        before = hub.files("alice/open")
        edit_json(bart / "generation_config.json", max_new_tokens=5)
        assert "propose the change with --create_pr" in push("alice/open", "--token", "hf_bob", status=1).errors
        found = push("alice/open", "--token", "hf_bob", "--create_pr")
        assert f"Pushed: {hub.endpoint}/alice/open/discussions/1" in found.said.splitlines()
        assert hub.files("alice/open") == before
        assert hub.repo("alice/open").find("refs/pr/1")["author"] == "bob"


class TestCard:
    def test_edits_on_the_hub_survive(self, hub: LocalHub, push: Push, bart: Path) -> None:
        push("alice/card", "--license", "mit")
        edit_on_the_hub(hub, "alice/card", "README.md", "# card", "# card\n\nHello from the Hub.")
        push("alice/card", "--tags", "shiny")
        card = hub.read("alice/card", "README.md")
        for words in (b"Hello from the Hub.", b"license: mit", b"- shiny"):
            assert words in card
        assert (bart / "README.md").read_bytes() == card

    def test_edits_in_the_folder_survive(self, hub: LocalHub, push: Push, bart: Path) -> None:
        push("alice/here")
        for words in ("Hello from here.", "Goodbye from here."):
            append(bart / "README.md", f"\n{words}\n")
            push("alice/here")
            assert words.encode() in hub.read("alice/here", "README.md")

    @pytest.mark.parametrize("choice", ["folder", "hub"])
    def test_the_same_place_edited_on_both_sides_is_for_the_user_to_choose(
        self, hub: LocalHub, push: Push, bart: Path, choice: str
    ) -> None:
        repo_id = f"alice/both-{choice}"
        push(repo_id)
        edit_on_the_hub(hub, repo_id, "README.md", "## Limits", "## Limits of the Hub")
        edit_on_the_hub(hub, repo_id, "README.md", "## Use", "## Use of the Hub")
        card = bart / "README.md"
        card.write_text(card.read_text().replace("## Limits", "## Limits of the folder"))
        append(card, "\nFrom the folder.\n")
        before = contents(bart)
        errors = push(repo_id, status=1).errors
        assert (
            "README.md was edited both in the folder and on the Hub, at the same place: the section limits." in errors
        )
        assert contents(bart) == before
        assert len(commits(hub, repo_id)) == 4
        found = push(repo_id, "--card", choice)
        pushed = hub.read(repo_id, "README.md").decode()
        for words in ("## Use of the Hub", "From the folder.", f"## Limits of the {choice.replace('hub', 'Hub')}"):
            assert words in pushed
        assert pushed.count("## Limits") == 1
        # What is lost on the Hub is in its history; what is lost here stays beside the card.
        backup = bart / "README.md.bak-1"
        assert backup.exists() == (choice == "hub") == ("README.md.bak-1" in found.said)
        if choice == "hub":
            assert backup.read_bytes() == before["README.md"]
            push(repo_id)
            assert [path.name for path in bart.glob("*.bak*")] == [backup.name]

    def test_edits_of_different_places_are_merged_again_and_again(self, hub: LocalHub, push: Push, bart: Path) -> None:
        push("alice/merged")
        for number in range(2):
            edit_on_the_hub(hub, "alice/merged", "README.md", "## Limits", f"## Limits\n\n- Hub {number}.")
            append(bart / "README.md", f"\nFolder {number}.\n")
            push("alice/merged", "--tags", f"tag-{number}")
        card = hub.read("alice/merged", "README.md").decode()
        for words in ("- Hub 0.", "- Hub 1.", "Folder 0.", "Folder 1.", "- tag-0", "- tag-1"):
            assert card.count(words) == 1
        assert (bart / "README.md").read_text() == card
        assert not list(bart.glob("*.bak*"))

    def test_ordinary_edits_of_the_folders_card_can_be_pushed(self, hub: LocalHub, push: Push, bart: Path) -> None:
        card = write_model_card(bart)
        text = card.read_text()
        limits = re.search(r"<!-- generated: limits .*?<!-- end: limits -->\n", text, re.DOTALL)
        assert limits is not None
        edits = {
            "deleted": text.replace(limits[0], ""),
            "without-body": text.replace("\n".join(limits[0].splitlines()[1:-1]) + "\n", ""),
            "without-comments": text.replace(limits[0], "\n".join(limits[0].splitlines()[1:-1]) + "\n"),
            "moved": text.replace(limits[0], "").replace("<!-- generated: use", f"{limits[0]}\n<!-- generated: use"),
            "windows": text.replace("\n", "\r\n"),
        }
        for name, edited in edits.items():
            card.write_bytes(edited.encode())
            push(f"alice/{name}", "--dry_run")
            if name == "deleted":
                push("alice/deleted")
                assert b"## Limits" not in hub.read("alice/deleted", "README.md")
                (bart / "_pushed.json").unlink()  # as if by another machine

    def test_a_damaged_card_on_one_side_gives_way_to_the_other(self, hub: LocalHub, push: Push, bart: Path) -> None:
        push("alice/damaged")
        (bart / "README.md").write_text("---\nlicense: [mit\n---\nMine.\n")
        errors = push("alice/damaged", status=1).errors
        assert "the one in the folder cannot be read" in errors
        assert errors.count("card:") == 1
        push("alice/damaged", "--card", "hub")
        assert "Mine." in (bart / "README.md.bak-1").read_text()


class TestTrouble:
    @TRANSPORTS
    def test_a_failing_hub_leaves_all_as_it_was_and_the_next_push_completes(
        self, hub: LocalHub, push: Push, bart: Path, xet: bool
    ) -> None:
        repo_id, before = f"alice/unlucky-{xet}", contents(bart)
        edit_weights(bart, lambda weights: weights["model.shared.weight"].add_(1e-3 * (1 + xet)))
        before = contents(bart)
        upload = ["POST", "^/_cas/v1/xorbs/"] if xet else ["PUT", "^/_lfs/"]
        for failure in ([*upload, 500, 1000], ["POST", "/commit/", 500, 1]):
            hub.failures.append(failure)
            errors = push(repo_id, status=1, xet=xet).errors
            hub.failures.clear()
            assert "the same command again completes the push" in errors
            assert set(hub.files(repo_id)) == {".gitattributes"}
            assert contents(bart) == before
        push(repo_id, xet=xet)
        assert before.items() <= {name: hub.read(repo_id, name) for name in hub.files(repo_id)}.items()
        assert len(commits(hub, repo_id)) == 2

    def test_a_concurrent_push_is_not_overwritten(
        self, hub: LocalHub, push: Push, bart: Path, python: RemotePython
    ) -> None:
        push("alice/busy")
        edit_json(bart / "generation_config.json", max_new_tokens=5)
        python.run('plan = plan_push(folder, "alice/busy")', folder=str(bart))
        edit_on_the_hub(hub, "alice/busy", "config.json", "{", "{ ")
        found = python.run("try:\n    plan.push()\nexcept PushError as error:\n    said = str(error)\nsaid")
        assert "alice/busy has changed on the Hub meanwhile. Nothing was pushed" in found
        assert commits(hub, "alice/busy")[0] == "by hand"

    def test_tokens_that_may_not(self, hub: LocalHub, push: Push, bart: Path) -> None:
        push("alice/guarded", "--private")
        before = hub.repo("alice/guarded").refs.copy(), set(hub.repos)
        edit_json(bart / "generation_config.json", max_new_tokens=5)
        says = {
            ("alice/guarded", "hf_nobody"): "does not accept the token",
            ("alice/guarded", "hf_reader"): "The token may not write to alice/guarded",
            ("alice/guarded", "hf_bob"): "The token may not make the repository alice/guarded",
            ("alice/another", "hf_reader"): "The token may not make the repository alice/another",
        }
        for (repo_id, token), words in says.items():
            assert words in push(repo_id, "--token", token, status=1).errors
        assert (hub.repo("alice/guarded").refs.copy(), set(hub.repos)) == before

    def test_no_token(self, hub: LocalHub, push: Push, python: RemotePython) -> None:
        python.run('token = os.environ.pop("HF_TOKEN")')
        try:
            found = push("alice/anonymous", status=1)
        finally:
            python.run('os.environ["HF_TOKEN"] = token')
        assert "needs a token of the Hub. Log in with `hf auth login`" in found.errors
        assert "alice/anonymous" not in hub.repos

    def test_arguments_that_cannot_be(self, hub: LocalHub, push: Push) -> None:
        push("alice/public")
        says = {
            ("alice/public", "--private"): "alice/public exists and is public",
            ("alice/public/model",): "repo_id must be like 'me/my-model'",
            ("alice/new", "--create_pr"): "There is no repository alice/new to open a pull request against",
            ("alice/public", "--create_pr", "--revision", "dev"): "opened against the main branch",
            ("alice/public", "--include", "nothing"): "There is nothing to include",
        }
        for arguments, words in says.items():
            assert words in push(*arguments, status=2).errors
        found = push("alice/new", "--license", "No Such", status=1)
        assert "license='No Such' is none that the Hub knows" in found.said
        assert 'The Hub, or its client, refuses: Invalid metadata in README.md. - "license"' in found.errors
        assert len(commits(hub, "alice/public")) == 2

    def test_no_network(self, push: Push) -> None:
        nobody = "http://127.0.0.1:9"
        assert f"{nobody} cannot be reached" in push("alice/far", status=1, endpoint=nobody).errors
        found = push("alice/far", "--dry_run", endpoint=nobody)
        assert "All files are listed as new." in found.said


def test_a_model_that_brings_its_code_is_tried_without_the_package(
    hub: LocalHub, python: RemotePython, folder: Path
) -> None:
    append(folder / "pipeline_vanilla_transformer.py", "raise ImportError('out of order')\n")
    tasks = json.loads((folder / "config.json").read_text())["custom_pipelines"]
    edit_json(folder / "config.json", langs=None, custom_pipelines={"translation": tasks["translation"]})
    (folder / "arguments.json").write_text(json.dumps({"data": {"source_lang": "en", "target_lang": "de"}}))
    (folder / "test").mkdir()
    (folder / "test" / "sources.txt").write_text(f"{'a man rides ' * 20}\n")
    arguments = ["--model_name_or_path", str(folder), "--repo_id", "alice/vanilla", "--code"]
    before = contents(folder)
    refused = python.run("push(*argv)", argv=[*arguments, "folder"])
    assert refused["status"] == 1
    assert (
        "in a process without this package loading the model or translating fails: ImportError: out of order"
        in (refused["errors"])
    )
    assert "alice/vanilla" not in hub.repos
    assert contents(folder) == before
    pushed = python.run("push(*argv)", argv=[*arguments, "installed"])
    assert "From the installed package, not from the folder: pipeline_vanilla_transformer.py." in pushed["said"]
    assert "here and without this package." in pushed["said"]
    assert "config.json gets langs=['en', 'de'], which brings the task translation_en_to_de." in pushed["said"]
    assert f"It translates '{('a man rides ' * 20)[:99]}…' as '" in pushed["said"]
    assert f"Pushed: {hub.endpoint}/alice/vanilla" in pushed["said"].splitlines()
    config = json.loads(hub.read("alice/vanilla", "config.json"))
    assert (config["langs"], config["custom_pipelines"]) == (["en", "de"], tasks)
    assert hub.read("alice/vanilla", "config.json") == (folder / "config.json").read_bytes()
    assert "`translation_en_to_de`" in hub.read("alice/vanilla", "README.md").decode()
    assert len(commits(hub, "alice/vanilla")) == 2
    for name in CODE:
        assert hub.read("alice/vanilla", name) == (folder / name).read_bytes() == (PACKAGE_FOLDER / name).read_bytes()
