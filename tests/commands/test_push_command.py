"""A folder is checked, shown and pushed by the script, against a Hub of this machine.

Mostly with a BART, which needs no trial without the package: that takes a process of its own, and seconds.
"""

import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hub_folders import (
    CODE_FILES,
    append,
    contents,
    edit_json,
    edit_on_the_hub,
    edit_weights,
    save_single_stack,
    save_translator,
)
from huggingface_hub import constants
from local_hub import LocalHub
from tiny_seq2seq import make_model as make_bart
from tiny_seq2seq import make_tokenizer as make_bart_tokenizer

from vanilla_transformer.hub import checks
from vanilla_transformer.hub.push import PushError, plan_push, take_card

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own


Push = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def hub() -> Iterator[LocalHub]:
    """The Hub of this process, with alice's token."""
    tokens = {"hf_alice": "alice", "hf_bob": "bob"}
    with LocalHub(tokens=tokens, read_only_tokens={"hf_reader": "alice"}) as hub, hub.client("hf_alice") as patch:
        patch.setattr("time.sleep", lambda seconds: None)  # between attempts
        yield hub


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
def run(hub: LocalHub, main: Callable[[str], Callable[..., None]], capsys: pytest.CaptureFixture[str]) -> Push:
    """Runs the script with a folder and these arguments; no token may be printed."""

    def run(folder: Path, repo_id: str, *arguments: str, status: int = 0) -> SimpleNamespace:
        ended: Any = 0
        try:
            main("push_to_hub")("--model_name_or_path", folder, "--repo_id", repo_id, *arguments)
        except SystemExit as error:
            ended = error.code
        said, errors = capsys.readouterr()
        if isinstance(ended, str):  # as the interpreter does at its end
            errors, ended = errors + ended, 1
        assert ended == status, (said, errors)
        for token in ("hf_alice", "hf_bob", "hf_reader", "hf_nobody"):
            assert token not in said + errors
        return SimpleNamespace(said=said, errors=" ".join(errors.split()))

    return run


@pytest.fixture
def push(run: Push, bart: Path) -> Push:
    """Runs the script with the folder `bart`."""
    return partial(run, bart)


class TestPush:
    def test_one_commit_brings_it_all(self, hub: LocalHub, push: Push, bart: Path) -> None:
        repo_id, before = "alice/whole", contents(bart)
        (bart / "training_args.bin").touch()
        options = ["--license", "apache-2.0", "--datasets", "multi30k", "--private", "--commit_message", "The first"]
        found = push(repo_id, *options, "--language", "en", "de")
        commit = hub.repo(repo_id).find("main")["id"]
        url = f"{hub.endpoint}/{repo_id}"
        assert found.said.splitlines()[-2:] == [f"Pushed: {url}", f"Commit: {url}/commit/{commit}"]
        assert "license" not in found.said
        assert re.search(r"model\.safetensors +\d+\.\d kB\n", found.said)
        assert re.search(r"training_args\.bin +needed only to resume", found.said)
        assert hub.titles(repo_id) == ["The first", "initial commit"]
        assert hub.repo(repo_id).private
        assert "from_pretrained" not in found.said, "the card"
        pushed = hub.contents(repo_id)
        assert {name: pushed[name] for name in before} == before
        assert pushed.keys() - before.keys() == {"README.md", ".gitattributes"}
        assert b"license: apache-2.0" in pushed["README.md"]
        assert (bart / "README.md").read_bytes() == pushed["README.md"]
        # Again, there is nothing to do.
        again = push(repo_id).said
        assert again.splitlines()[-1] == f"Nothing has changed: {hub.endpoint}/{repo_id}"
        assert len(hub.titles(repo_id)) == 2

    def test_a_dry_run_changes_nothing(self, hub: LocalHub, push: Push, bart: Path) -> None:
        before, seen = contents(bart), len(hub.requests)
        found = push("alice/dry", "--dry_run", "--tags", "shown")
        assert "\nREADME.md:\n\n---\n" in found.said
        assert "\n- shown\n" in found.said
        assert 'from_pretrained("alice/dry")' in found.said
        assert found.said.splitlines()[-1] == "Nothing is wrong with it. Nothing was pushed (--dry_run)."
        assert "Tried: 'A man rides a horse.' becomes 'w" in found.said
        assert "No license is given" in found.said
        assert {request["method"] for request in hub.requests[seen:]} <= {"GET", "HEAD"}
        assert "alice/dry" not in hub.repos
        assert contents(bart) == before

    def test_a_folder_that_is_not_in_order_stays_here(self, hub: LocalHub, push: Push, bart: Path) -> None:
        (bart / "pytorch_model.bin").touch()
        (bart / ".env").touch()
        (bart / "generation_config.json").unlink()
        before = contents(bart)
        for options in ([], ["--dry_run"]):
            found = push("alice/refused", *options, status=1)
            assert "usage:" not in found.errors
            assert found.said == ""
            for words in ("pytorch_model.bin is a pickle", ".env looks like a secret", "generation_config: "):
                assert words in found.errors
        assert "alice/refused" not in hub.repos
        assert contents(bart) == before

    def test_only_changes_are_sent_and_old_weights_are_deleted(self, hub: LocalHub, push: Push, bart: Path) -> None:
        push("alice/shards")
        (bart / "model.safetensors").unlink()
        make_bart().save_pretrained(bart, max_shard_size="5KB")
        found = push("alice/shards")
        assert re.search(r"model\.safetensors +deleted", found.said)
        newest = hub.repo("alice/shards").history()[0]
        assert "model.safetensors" not in newest["files"]
        assert "config.json" not in newest["changed"]
        push("alice/shards", "--include", "config.json")  # the same files once more
        assert len(hub.titles("alice/shards")) == 3

    def test_a_new_branch(self, hub: LocalHub, push: Push, bart: Path) -> None:
        push("alice/branches")
        before = hub.files("alice/branches")
        edit_json(bart / "generation_config.json", max_new_tokens=5)
        found = push("branches", "--revision", "short")  # in the user's own namespace
        assert f"Pushed: {hub.endpoint}/alice/branches/tree/short" in found.said.splitlines()
        assert "revision=" not in hub.read("alice/branches", "README.md", "short").decode()
        assert hub.files("alice/branches") == before
        assert json.loads(hub.read("alice/branches", "generation_config.json", "short"))["max_new_tokens"] == 5
        assert "Nothing has changed: " in push("branches", "--revision", "short").said
        push("branches")
        assert "Pushed: " in push("branches", "--revision", "copy").said, "a branch without a commit of its own"
        assert hub.files("alice/branches", "copy") == hub.files("alice/branches")

    def test_examples_name_a_branch_that_alone_has_the_model(self, hub: LocalHub, push: Push) -> None:
        for _ in range(2):  # a new repository, and one with an empty main branch
            push("alice/exp", "--revision", "exp")
            card = hub.read("alice/exp", "README.md", "exp").decode()
            assert 'from_pretrained("alice/exp", revision="exp")' in card
        push("alice/exp")
        push("alice/exp", "--revision", "exp")
        assert "revision=" not in hub.read("alice/exp", "README.md", "exp").decode()

    def test_a_pull_request_by_somebody_else(self, hub: LocalHub, push: Push, bart: Path) -> None:
        push("alice/open")
        before = hub.files("alice/open")
        edit_json(bart / "generation_config.json", max_new_tokens=5)
        assert "403" in push("alice/open", "--token", "hf_bob", status=1).errors
        found = push("alice/open", "--token", "hf_bob", "--create_pr")
        assert f"Pushed: {hub.endpoint}/alice/open/discussions/1" in found.said.splitlines()
        assert hub.files("alice/open") == before
        assert hub.repo("alice/open").find("refs/pr/1")["author"] == "bob"


class TestCard:
    def test_edits_on_one_side_survive(self, hub: LocalHub, push: Push, bart: Path) -> None:
        push("alice/card", "--license", "mit")
        edit_on_the_hub(hub, "alice/card", "README.md", "license: mit", "license: mit\nthumbnail: a.png")
        push("alice/card", "--tags", "shiny")
        append(bart / "README.md", "\nHello from here.\n")
        found = push("alice/card")
        card = hub.read("alice/card", "README.md")
        for words in (b"Hello from here.", b"license: mit", b"- shiny", b"thumbnail: a.png"):
            assert words in card
        assert (bart / "README.md").read_bytes() == card
        assert "README.md.bak" not in found.said

    @pytest.mark.parametrize("choice", ["folder", "hub"])
    def test_edits_on_both_sides_are_for_the_user_to_choose(
        self, hub: LocalHub, push: Push, bart: Path, choice: str
    ) -> None:
        repo_id = f"alice/both-{choice}"
        push(repo_id)
        content = hub.read(repo_id, "README.md").decode()
        edit_on_the_hub(hub, repo_id, "README.md", content, content + "\nFrom the hub.\n")
        append(bart / "README.md", "\nFrom the folder.\n")
        before = contents(bart)
        assert "README.md was edited both in the folder and on the Hub." in push(repo_id, status=1).errors
        assert contents(bart) == before
        assert len(hub.titles(repo_id)) == 3
        found = push(repo_id, "--card", choice)
        pushed = hub.read(repo_id, "README.md").decode()
        assert ("From the hub." in pushed, "From the folder." in pushed) == (choice == "hub", choice == "folder")
        # What is lost on the Hub is in its history; what is lost here stays beside the card.
        backup = bart / "README.md.bak-1"
        assert backup.exists() == (choice == "hub") == ("README.md.bak-1" in found.said)
        if choice == "hub":
            assert backup.read_bytes() == before["README.md"]
            push(repo_id)
            assert [path.name for path in bart.glob("*.bak*")] == [backup.name]

    def test_before_a_push_of_another_kind_edits_of_the_hub_are_taken_over(
        self, hub: LocalHub, push: Push, bart: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logging.getLogger("vanilla_transformer"), "propagate", True)
        repo_id, card = "alice/taken", bart / "README.md"
        assert take_card(bart, repo_id)
        assert not card.exists()
        push(repo_id)
        content = hub.read(repo_id, "README.md").decode()
        edit_on_the_hub(hub, repo_id, "README.md", content, content + "\nFrom the hub.\n")
        assert take_card(bart, repo_id)
        assert "From the hub." in card.read_text()
        edit_on_the_hub(hub, repo_id, "README.md", "From the hub.", "From there.")
        append(card, "\nFrom the folder.\n")
        before = contents(bart)
        assert not take_card(bart, repo_id)
        assert contents(bart) == before
        assert "The training pushes no card to alice/taken: README.md was edited both" in caplog.text

    def test_a_card_by_hand_is_pushed_as_it_is(self, hub: LocalHub, push: Push, bart: Path) -> None:
        card = b"---\nlicense: mit\n---\n# Mine\r\n"
        (bart / "README.md").write_bytes(card)
        assert "README.md was not made by this package and is pushed as it is" in push("alice/hand").said
        assert hub.read("alice/hand", "README.md") == (bart / "README.md").read_bytes() == card

    def test_a_damaged_card_on_one_side_gives_way_to_the_other(self, hub: LocalHub, push: Push, bart: Path) -> None:
        push("alice/damaged")
        (bart / "README.md").write_text("---\nlicense: [mit\n---\nMine.\n")
        errors = push("alice/damaged", status=1).errors
        assert "README.md cannot be read as a model card" in errors
        assert "is missing" not in errors
        push("alice/damaged", "--card", "hub")
        assert "Mine." in (bart / "README.md.bak-1").read_text()


class TestTrouble:
    def test_a_failing_hub_leaves_all_as_it_was_and_the_next_push_completes(
        self, hub: LocalHub, push: Push, bart: Path
    ) -> None:
        edit_weights(bart, lambda weights: weights["model.shared.weight"].add_(1e-3))
        before = contents(bart)
        for failure in (["PUT", "^/_lfs/", 500, 1000], ["POST", "/commit/", 500, 1]):
            hub.failures.append(failure)
            errors = push("alice/unlucky", status=1).errors
            hub.failures.clear()
            assert "The same command again sends nothing twice that arrived." in errors
            assert set(hub.files("alice/unlucky")) == {".gitattributes"}
            assert contents(bart) == before
        push("alice/unlucky")
        assert before.items() <= hub.contents("alice/unlucky").items()
        assert len(hub.titles("alice/unlucky")) == 2

    def test_a_concurrent_push_is_not_overwritten(self, hub: LocalHub, push: Push, bart: Path) -> None:
        push("alice/busy")
        edit_json(bart / "generation_config.json", max_new_tokens=5)
        plan = plan_push(bart, "alice/busy")
        edit_on_the_hub(hub, "alice/busy", "config.json", "{", "{ ")
        with pytest.raises(PushError, match="412"):
            plan.push()
        assert hub.titles("alice/busy")[0] == "by hand"

    def test_tokens_that_may_not(self, hub: LocalHub, push: Push, bart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        push("alice/guarded", "--private")
        before = hub.repo("alice/guarded").refs.copy(), set(hub.repos)
        edit_json(bart / "generation_config.json", max_new_tokens=5)
        for repo_id, token, status in (
            ("alice/guarded", "hf_nobody", "401"),
            ("alice/guarded", "hf_reader", "403"),
            ("alice/guarded", "hf_bob", "403"),
            ("alice/another", "hf_reader", "403"),
        ):
            errors = push(repo_id, "--token", token, status=1).errors
            assert f"{status} " in errors
            assert "same command" not in errors
        monkeypatch.delenv("HF_TOKEN")
        assert "Log in with `hf auth login`" in push("alice/anonymous", status=1).errors
        assert (hub.repo("alice/guarded").refs.copy(), set(hub.repos)) == before

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
        errors = push("alice/new", "--license", "No Such", status=1).errors
        assert 'Invalid metadata in README.md. - "license"' in errors
        assert len(hub.titles("alice/public")) == 2

    def test_no_network(self, push: Push, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        errors = push("alice/far", status=1).errors
        assert "refuses: ConnectError" in errors
        assert errors.endswith("command again when the Hub can be reached: what has arrived is not sent twice.")
        assert "http://127.0.0.1:9 cannot be reached" in push("alice/far", "--dry_run").said


def test_a_single_stack_is_tried_at_its_own_task(
    hub: LocalHub, run: Push, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_push.py tries each kind without the package."""
    tried = Mock(return_value=())
    monkeypatch.setattr(checks, "_try_without_the_package", tried)
    folder = save_single_stack(tmp_path / "model", "VanillaTransformerForCausalLM")
    said = run(folder, "alice/writer", "--base_model", "alice/translator").said
    assert f"Pushed: {hub.endpoint}/alice/writer" in said.splitlines()
    assert re.search(r"Tried: 'A man rides a horse\.' becomes .*, here and without this package\.", said)
    assert tried.call_args[0][1] == "text-generation"
    card = hub.read("alice/writer", "README.md").decode()
    for words in ("pipeline_tag: text-generation", "base_model: alice/translator", "base_model_relation: finetune"):
        assert f"\n{words}\n" in card
    for path in (*folder.glob("*.py"), folder / "model.safetensors", folder / "tokenizer.json"):
        assert hub.read("alice/writer", path.name) == path.read_bytes()


def test_a_model_that_brings_its_code_is_tried_without_the_package(
    hub: LocalHub, run: Push, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_translator(tmp_path / "model")
    append(folder / "pipeline_vanilla_transformer.py", "raise ImportError('out of order')\n")
    # Another interpreter, which fails at once; test_checks.py has one that runs the code, which takes seconds.
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho 'ImportError: out of order' >&2; exit 1\n")
    interpreter.chmod(0o700)
    tasks = json.loads((folder / "config.json").read_text())["custom_pipelines"]
    edit_json(folder / "config.json", langs=None, custom_pipelines={"translation": tasks["translation"]})
    (folder / "arguments.json").write_text(json.dumps({"data": {"source_lang": "en", "target_lang": "de"}}))
    (folder / "test").mkdir()
    (folder / "test" / "sources.txt").write_text(f"{'a man rides ' * 20}\n")
    before = contents(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(interpreter))
        errors = run(folder, "alice/vanilla", "--code", "folder", status=1).errors
    assert "in a process without this package loading or using the model fails: ImportError: out of order" in errors
    assert "alice/vanilla" not in hub.repos
    assert contents(folder) == before
    tried: dict[str, bytes] = {}

    def note(stage: Path, *_: Any) -> Any:
        tried.update({path.name: path.read_bytes() for path in stage.glob("*.py")})
        return ()

    monkeypatch.setattr(checks, "_try_without_the_package", note)
    said = run(folder, "alice/vanilla", "--code", "installed").said
    assert tried == CODE_FILES
    assert "From the installed package, not from the folder: pipeline_vanilla_transformer.py." in said
    assert "here and without this package." in said
    assert "config.json gets langs=['en', 'de']." in said
    assert f"Tried: '{('a man rides ' * 20)[:99]}…' becomes '" in said
    assert f"Pushed: {hub.endpoint}/alice/vanilla" in said.splitlines()
    config = json.loads(hub.read("alice/vanilla", "config.json"))
    assert (config["langs"], config["custom_pipelines"]) == (["en", "de"], tasks)
    assert hub.read("alice/vanilla", "config.json") == (folder / "config.json").read_bytes()
    assert "`translation_en_to_de`" in hub.read("alice/vanilla", "README.md").decode()
    assert len(hub.titles("alice/vanilla")) == 2
    assert CODE_FILES.items() <= contents(folder).items()
    assert CODE_FILES.items() <= hub.contents("alice/vanilla").items()


POLICY = '"fixed window";"api";q=500;w=300'


class TestAdvice:
    @pytest.mark.parametrize(
        ("request_", "headers", "wait"),
        [
            (["GET", "/api/models/"], {"Retry-After": "120"}, "wait 120 seconds"),
            (["POST", "/commit/"], {"Retry-After": "Wed, 21 Oct 2037 07:28:00 GMT"}, "wait until Wed, 21 Oct 2037 07"),
            (["GET", "/api/models/"], {"RateLimit": '"api";r=0;t=55', "RateLimit-Policy": POLICY}, "wait 55 seconds"),
            (["POST", "/commit/"], {}, "wait some minutes"),
        ],
    )
    def test_of_too_many_requests_is_how_long_to_wait(
        self, hub: LocalHub, push: Push, request_: list[str], headers: dict[str, str], wait: str
    ) -> None:
        hub.failures.append([*request_, (429, "Too many", None, headers), 1000])
        errors = push("alice/limited", status=1).errors
        hub.failures.clear()
        assert f"The Hub takes no more requests from you for now: {wait}" in errors
        assert errors.endswith(", then give the same command again, which sends nothing twice that arrived.")
        assert "HfHubHTTPError" not in errors
