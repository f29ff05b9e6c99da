"""Models on a Hub: real clients push to a local one and pull from it.

This process has the package and pushes; another one lacks it, and pulls. What the server saw and holds is what counts.
Branches, pull requests, tokens and failures: test_push_command.py.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import local_hub
import pytest
import torch
from hub_folders import CODE_FILES, contents, save_single_stack
from huggingface_hub import HfApi
from local_hub import LocalHub
from remote_process import RemoteError, RemotePython, run_as_at_a_prompt
from tiny_single_stacks import SINGLE_STACKS as CLASSES
from tiny_vanilla import make_loud_model
from transformers import AutoTokenizer

import vanilla_transformer
from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.data.tokenizer_training import train_tokenizer
from vanilla_transformer.hub import trial as hub_trial
from vanilla_transformer.hub.card import build_model_card
from vanilla_transformer.tasks import SINGLE_STACKS

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own

TEXTS = ["a man rides a horse", "two dogs", "", "a man rides a horse and two dogs rest 🐎"]
# What the Hub and the client add to the files of a folder.
ADDED = {".gitattributes", "README.md"}
LOADING = """
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, pipeline

def load(name, **kwargs):
    return AutoModelForSeq2SeqLM.from_pretrained(name, **kwargs), AutoTokenizer.from_pretrained(name, **kwargs)

def generate(name, **kwargs):
    model, tokenizer = load(name, **kwargs)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    return [model.generate(**batch, num_beams=beams).tolist() for beams in (1, 4)]

def translate(name, task="translation", **kwargs):
    pipe = pipeline(task, model=name, device="cpu", **kwargs)
    assert type(pipe).__name__ == "TranslationPipeline"
    return pipe(texts, num_beams=4)
"""

LOAD_TRIAL = """
import importlib.util
spec = importlib.util.spec_from_file_location("hub_trial", path)
trial = importlib.util.module_from_spec(spec)
spec.loader.exec_module(trial)
"""

BECOME_CLIENT = """
import sys, pytest
sys.path.append(support)
from local_hub import become_client
sys.path.remove(support)
patch = pytest.MonkeyPatch()
become_client(patch, *client)
"""
# A new process would not have its code in memory.
GO_OFFLINE = """
import huggingface_hub.constants, sys
huggingface_hub.constants.HF_HUB_OFFLINE = offline
for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
    del sys.modules[name]
"""


class Here:
    """This process, asked as `RemotePython` is."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] = {}

    def run(self, source: str, **names: Any) -> Any:
        self.namespace |= names
        return run_as_at_a_prompt(source, self.namespace)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Two models with one tokenizer, saved to `model` and `other`."""
    folder = tmp_path_factory.mktemp("saved")
    tokenizer = train_tokenizer(TEXTS * 3, vocab_size=275, show_progress=False)
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=len(tokenizer), d_k=5, langs=["en", "de"])
    for seed, name in enumerate(("model", "other")):
        torch.manual_seed(seed)
        make_loud_model(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return SimpleNamespace(model=folder / "model", other=folder / "other")


@pytest.fixture(scope="module")
def hub() -> Iterator[LocalHub]:
    tokens = {"hf_alice": "alice", "hf_bob": "bob"}
    with LocalHub(tokens=tokens, read_only_tokens={"hf_reader": "alice"}) as hub:
        yield hub


@pytest.fixture(scope="module")
def here(hub: LocalHub, folders: SimpleNamespace) -> Iterator[Here]:
    """A process with the package, and alice's token."""
    here = Here()
    with hub.client("hf_alice"):
        here.run(LOADING, texts=TEXTS)
        here.run("(model, tokenizer), other = load(one), load(another)[0]", one=folders.model, another=folders.other)
        yield here


@pytest.fixture(scope="module")
def expected(here: Here, folders: SimpleNamespace) -> SimpleNamespace:
    """What the process with the package makes of the folders."""
    found = SimpleNamespace(
        model=here.run("generate(one)"), other=here.run("generate(another)"), translations=here.run("translate(one)")
    )
    assert len({tuple(row) for rows in (*found.model, *found.other) for row in rows}) > 8, "all of it must matter"
    return found


@pytest.fixture(scope="module")
def pinned(hub: LocalHub, here: Here) -> str:
    """Fills alice/model with the other model, then with the right one; the first state's commit."""
    here.run('other.push_to_hub("alice/model", commit_message="the other one"); tokenizer.push_to_hub("alice/model")')
    commit = hub.repo("alice/model").find("main")["id"]
    here.run('model.push_to_hub("alice/model", commit_message="the right one")')
    return commit


class TestPush:
    def test_model_and_tokenizer_make_a_commit_each_and_bring_their_code(
        self, hub: LocalHub, pinned: str, folders: SimpleNamespace
    ) -> None:
        found, saved = hub.contents("alice/model"), contents(folders.model)
        assert {path: found[path] for path in found.keys() - ADDED} == saved
        assert CODE_FILES.items() <= found.items()
        assert hub.titles("alice/model") == ["the right one", "Upload tokenizer", "the other one", "initial commit"]

    def test_a_pipeline_makes_one_commit_with_all_of_it(
        self, hub: LocalHub, here: Here, folders: SimpleNamespace
    ) -> None:
        here.run('pipeline("translation", model=one, device="cpu").push_to_hub("alice/pipeline")')
        found = hub.contents("alice/pipeline")
        assert {path: found[path] for path in found.keys() - ADDED} == contents(folders.model)
        assert len(hub.titles("alice/pipeline")) == 2

    def test_a_configuration_alone(self, hub: LocalHub, here: Here, folders: SimpleNamespace) -> None:
        here.run('model.config.push_to_hub("alice/config")')
        found = hub.contents("alice/config")
        assert found["config.json"] == (folders.model / "config.json").read_bytes()
        assert {path for path in found if path.endswith(".py")} == {"configuration_vanilla_transformer.py"}


@pytest.fixture(scope="module")
def there(hub: LocalHub, without_the_package: RemotePython) -> Iterator[RemotePython]:
    """A process without the package, with alice's token and a cache of its own."""
    client = [hub.endpoint, str(hub.root / "there"), "hf_alice"]
    without_the_package.run(BECOME_CLIENT, support=str(Path(local_hub.__file__).parent), client=client)
    without_the_package.run(LOADING, texts=TEXTS)
    yield without_the_package
    without_the_package.run("patch.undo()\nNone")


@pytest.fixture(scope="module")
def pulled(there: Here, pinned: str) -> SimpleNamespace:
    """What it makes of alice/model."""
    return SimpleNamespace(
        main=there.run('generate("alice/model", trust_remote_code=True)'),
        pinned=there.run('generate("alice/model", trust_remote_code=True, revision=pinned)', pinned=pinned),
        translations=there.run('translate("alice/model", trust_remote_code=True)'),
        task=there.run('translate("alice/model", task="translation_en_to_de", trust_remote_code=True)'),
    )


class TestPullWithoutThePackage:
    def test_by_id_and_by_either_name_of_its_task(self, pulled: SimpleNamespace, expected: SimpleNamespace) -> None:
        assert pulled.main == expected.model
        assert pulled.translations == pulled.task == expected.translations

    def test_not_without_the_flag(self, there: Here, pinned: str) -> None:
        with pytest.raises(RemoteError, match="trust_remote_code=True"):
            there.run('load("alice/model", trust_remote_code=False)')

    def test_at_a_pinned_commit(self, pulled: SimpleNamespace, expected: SimpleNamespace) -> None:
        assert pulled.pinned == expected.other

    def test_a_language_model_made_of_the_decoder(
        self, hub: LocalHub, here: Here, there: Here, folders: SimpleNamespace
    ) -> None:
        program = """
from transformers import AutoModelForCausalLM
half = AutoModelForCausalLM.from_pretrained(name, **options)
half.generate(max_new_tokens=5, do_sample=False).tolist()
"""
        expected = here.run(program, name=str(folders.model), options={})
        here.run('half.push_to_hub("alice/writer")')
        code = {path for path in hub.files("alice/writer") if path.endswith(".py")}
        names = "attention configuration decoder_only decoding dropout linear loss modeling positions pretrained"
        assert code == {f"{name}_vanilla_transformer.py" for name in names.split()}
        assert there.run(program, name="alice/writer", options={"trust_remote_code": True}) == expected

    def test_each_single_stack_does_its_task(self, hub: LocalHub, here: Here, there: Here, tmp_path: Path) -> None:
        """As `checks` tries it, and as the second example of its card says."""
        there.run(LOAD_TRIAL, path=hub_trial.__file__)
        for name, half in (
            (name, half) for half in SINGLE_STACKS for name in CLASSES if name.endswith(half.class_name)
        ):
            folder, repo_id = save_single_stack(tmp_path / name, name), f"alice/{name}"
            report = tmp_path / f"{name}.json"
            (folder / "README.md").write_text(build_model_card(folder, repo_id=repo_id).content, encoding="utf-8")
            HfApi().create_repo(repo_id)
            HfApi().upload_folder(repo_id=repo_id, folder_path=folder)
            there.run("trial.main(*arguments)", arguments=[half.pipeline, repo_id, str(report), *TEXTS[:2]])
            found = json.loads(report.read_text())
            model = getattr(vanilla_transformer, name).from_pretrained(folder)
            user = hub_trial.make_user(half.pipeline, model, AutoTokenizer.from_pretrained(folder))
            outcomes = hub_trial.use(half.pipeline, user, TEXTS[:2])
            assert found["outcomes"] == [[words, pytest.approx(numbers, rel=1e-5)] for words, numbers in outcomes]
            assert {"VanillaTransformerConfig", "VanillaTransformerTokenizer", name} <= found["modules"].keys()
            for kind, module in found["modules"].items():
                assert module.startswith((f"transformers_modules.alice.{name}.", "transformers.pipelines.")), kind
            _, example = re.findall(r"```python\n(.*?)```", hub.read(repo_id, "README.md").decode(), re.DOTALL)
            assert "trust_remote_code=True" in example
            there.run(f"{example}\nNone")

    def test_a_private_model_needs_its_owners_token(
        self, hub: LocalHub, here: Here, there: Here, expected: SimpleNamespace
    ) -> None:
        here.run('model.push_to_hub("alice/private", private=True); tokenizer.push_to_hub("alice/private")')
        assert hub.repo("alice/private").private
        for token, reason in ((False, "private repository"), ("hf_bob", "private repository"), ("hf_nobody", "401")):
            with pytest.raises(RemoteError, match=reason):
                there.run('generate("alice/private", trust_remote_code=True, token=token)', token=token)
        assert there.run('generate("alice/private", trust_remote_code=True, token="hf_reader")') == expected.model

    def test_offline_from_the_cache(
        self, hub: LocalHub, there: RemotePython, pinned: str, pulled: SimpleNamespace, expected: SimpleNamespace
    ) -> None:
        seen = len(hub.requests)
        there.run(GO_OFFLINE, offline=True)
        try:
            assert there.run('generate("alice/model", trust_remote_code=True)') == expected.model
            assert there.run('translate("alice/model", trust_remote_code=True)') == expected.translations
            options = {"trust_remote_code": True, "revision": pinned}
            assert there.run('generate("alice/model", **options)', options=options) == expected.other
        finally:
            there.run(GO_OFFLINE, offline=False)
        assert len(hub.requests) == seen


@pytest.fixture(scope="module")
def again(hub: LocalHub, there: Here, pulled: SimpleNamespace) -> dict[str, bytes]:
    """What alice/again holds, pushed by a process without the package that pulled it by its id."""
    there.run(
        'pipe = pipeline("translation", model="alice/model", device="cpu", trust_remote_code=True)\n'
        'pipe.push_to_hub("alice/again")'
    )
    return hub.contents("alice/again")


class TestPushedAgainWithoutThePackage:
    def test_it_is_the_same_model_with_its_code(self, again: dict[str, bytes], folders: SimpleNamespace) -> None:
        saved = contents(folders.model)
        assert again.keys() - ADDED == saved.keys()
        assert CODE_FILES.items() <= again.items()
        for name in ("config.json", "tokenizer_config.json"):
            for key in ("auto_map", "custom_pipelines"):
                assert json.loads(again[name]).get(key) == json.loads(saved[name]).get(key)
        assert "translation_en_to_de" in json.loads(again["config.json"])["custom_pipelines"]
        assert again["model.safetensors"] == saved["model.safetensors"]

    def test_it_runs_without_the_package(self, again: dict[str, bytes], there: Here, expected: SimpleNamespace) -> None:
        assert there.run('generate("alice/again", trust_remote_code=True)') == expected.model
        module = there.run('type(load("alice/again", trust_remote_code=True)[0]).__module__')
        assert module.startswith("transformers_modules.alice.again.")

    def test_it_runs_with_the_package_and_no_remote_code(
        self, again: dict[str, bytes], here: Here, expected: SimpleNamespace
    ) -> None:
        modules = {name for name in sys.modules if name.startswith("transformers_modules")}
        assert here.run('generate("alice/again")') == expected.model
        for task in ("translation", "translation_en_to_de"):
            assert here.run('translate("alice/again", task=task)', task=task) == expected.translations
        assert {name for name in sys.modules if name.startswith("transformers_modules")} == modules


def test_contents_travel_without_the_token(hub: LocalHub, pinned: str, pulled: SimpleNamespace) -> None:
    for path in ("/_lfs/", "/_cdn/"):
        tokens = {request["auth"] for request in hub.requests if request["path"].startswith(path)}
        assert tokens
        assert not [token for token in tokens if token and "hf_" in token]


def test_nothing_pushed_is_a_pickle(hub: LocalHub, pinned: str, again: dict[str, bytes]) -> None:
    """Neither by its name nor by how it begins: torch's are zip archives."""
    commits = {name: repo for repo in hub.repos.values() for name in repo.commits}
    assert len(commits) > 5
    for name, repo in commits.items():
        for path, content in hub.contents(repo.id, name).items():
            assert not path.endswith((".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"))
            assert not re.match(rb"PK|\x80[\x02-\x05]", content), path
