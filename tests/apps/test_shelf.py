"""The models of the page of scripts/app.py: which are loaded, how often, why not, and their example sentences."""

import json
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from letters import TOKENIZER, make_letters_model
from library_models import make_tokenizer
from transformers import LlamaConfig

from vanilla_transformer import VanillaTransformerEncoderModel
from vanilla_transformer.apps.answers import DemoError
from vanilla_transformer.apps.shelf import ModelShelf, make_examples, read_training_data
from vanilla_transformer.data.numbers_and_dates import numbers_and_dates


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Saved models, of which the last has a tokenizer.json."""
    root = tmp_path_factory.mktemp("models")
    names = ("untrained", "other", "third", "spelled")
    for name in names:
        make_letters_model().save_pretrained(root / name)
        (make_tokenizer() if name == "spelled" else TOKENIZER).save_pretrained(root / name)
    return {name: str(root / name) for name in names}


class TestShelf:
    def test_loads_a_model_once_and_gives_up_the_one_not_used_for_longest(self, folders: dict[str, str]) -> None:
        shelf = ModelShelf(folders["untrained"], others="any", size=2)
        with ThreadPoolExecutor(3) as pool:
            first, *same = pool.map(shelf.get, [folders["untrained"]] * 3)
        assert all(demo is first for demo in same)
        other = shelf.get(folders["other"])
        assert shelf.get(f" {folders['untrained']} ") is first
        third = shelf.get(folders["third"])
        assert shelf.get(folders["untrained"]) is first
        assert shelf.get(folders["third"]) is third
        assert shelf.get(folders["other"]) is not other

    def test_knows_a_folder_by_all_of_its_names(
        self, folders: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = Path(folders["untrained"])
        (tmp_path / "link").symlink_to(folder)
        monkeypatch.setenv("HOME", str(folder.parent))
        monkeypatch.chdir(folder.parent)
        shelf = ModelShelf("untrained", others="none")
        first = shelf.get("untrained")
        for name in (str(folder), f"{folder}/", "./untrained", "~/untrained", str(tmp_path / "link")):
            assert shelf.get(name) is first, name

    def test_looks_again_when_the_files_of_a_model_have_changed(self, folders: dict[str, str], tmp_path: Path) -> None:
        folder = tmp_path / "model"
        shutil.copytree(folders["untrained"], folder)
        shelf = ModelShelf(str(folder))
        first = shelf.get(str(folder))
        (folder / "notes.txt").write_text("not a part of the model")
        assert shelf.get(str(folder)) is first
        other = make_letters_model()
        with torch.no_grad():
            other.model.shared.weight.mul_(2)
        other.save_pretrained(folder)
        second = shelf.get(str(folder))
        assert torch.equal(second.model.model.shared.weight, other.model.shared.weight)
        assert shelf.get(str(folder)) is second
        # What is gone can be shown as long as it is held.
        shutil.rmtree(folder)
        assert shelf.get(str(folder)) is second

    def test_loads_for_people_only_what_they_may_have(self, folders: dict[str, str]) -> None:
        with pytest.raises(ValueError, match="no model to show"):
            ModelShelf(None, others="none")
        shelf = ModelShelf(folders["untrained"], others="none")
        assert shelf.get(folders["untrained"]).name == folders["untrained"]
        with pytest.raises(DemoError, match="loads no other"):
            shelf.get(folders["other"])
        shelf = ModelShelf(folders["untrained"], others="hub")
        for name in (folders["other"], os.path.relpath(folders["other"]), "../untrained", "tests", "~/model"):
            with pytest.raises(DemoError, match="by their names on the Hub"):
                shelf.get(name)
        with pytest.raises(DemoError, match=r"'nobody/nothing' could not be loaded\. \w"):
            shelf.get("nobody/nothing")

    def test_says_that_there_is_or_can_be_no_such_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "file").write_text("")
        for name, message in (
            ("", "There is no model yet"),
            ("two words", "There is no folder two words"),
            ("~/model", f"There is no folder {tmp_path}/model"),
            (str(tmp_path / "file"), "is a file"),
            ("out/no-model", "There is no folder out/no-model, and no model of that name could be loaded from the Hub"),
            (f"~/{'x' * 300}", "There is no folder"),
            ("a/" * 5000, "There is no folder a/a/"),
            ("a\0b", r"'a\x00b' is neither a folder that can be read nor a name on the Hub"),
            ("/tmp/\ud800", r"'/tmp/\ud800' is neither a folder"),
        ):
            with pytest.raises(DemoError, match=re.escape(message)) as caught:
                ModelShelf(None, others="any").get(name)
            assert len(str(caught.value)) < 400
            assert str(caught.value).encode()
            assert "Repo id" not in str(caught.value)
            if len(name) > 300:
                with pytest.raises(DemoError, match="by their names on the Hub"):
                    ModelShelf(None, others="hub").get(name)

    def test_runs_code_of_the_first_model_only(self, tmp_path: Path) -> None:
        folder = tmp_path / "strange"
        folder.mkdir()
        ran = tmp_path / "ran"
        config = {"model_type": "strange", "auto_map": {"AutoConfig": "strange_code.Strange"}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "strange_code.py").write_text(f"open({str(ran)!r}, 'w').close()\nStrange = None\n")
        with pytest.raises(DemoError, match="could not be loaded"):
            ModelShelf(None, others="any", trust_remote_code=True).get(str(folder))
        assert not ran.exists()
        with pytest.raises(DemoError, match="could not be loaded"):
            ModelShelf(str(folder), trust_remote_code=True).get(str(folder))
        assert ran.exists()


class TestReasons:
    """Why a model cannot be loaded, which is short on the page."""

    def find_reason(self, name: str) -> DemoError:
        with pytest.raises(DemoError) as caught:
            ModelShelf(None, others="any").get(name)
        return caught.value

    def test_name_the_class_of_a_single_stack_model(self, tmp_path: Path) -> None:
        LlamaConfig().save_pretrained(tmp_path / "llama")
        reason = str(self.find_reason(str(tmp_path / "llama")))
        assert "holds a llama model, which is not an encoder with a decoder" in reason
        VanillaTransformerEncoderModel(make_letters_model().config).save_pretrained(tmp_path / "encoder")
        assert "holds a VanillaTransformerEncoderModel" in str(self.find_reason(str(tmp_path / "encoder")))

    def test_of_broken_files_are_no_fault_of_the_program(self, folders: dict[str, str], tmp_path: Path) -> None:
        for name in ("tokenizer.json", "config.json", "model.safetensors"):
            folder = shutil.copytree(folders["spelled"], tmp_path / name)
            (folder / name).write_bytes(b'{"a": 1,,}')
            assert "could not be loaded. " in str(self.find_reason(str(folder)))

    def test_of_weights_of_other_shapes_are_listed_at_length_in_the_terminal(
        self, folders: dict[str, str], tmp_path: Path
    ) -> None:
        folder = shutil.copytree(folders["untrained"], tmp_path / "model")
        config = json.loads((folder / "config.json").read_text())
        config["encoder_ffn_dim"] *= 2
        config["decoder_layers"] += 1
        (folder / "config.json").write_text(json.dumps(config))
        reason = self.find_reason(str(folder))
        assert "encoder.layers" in reason.whole
        assert len(str(reason).splitlines()) <= 9 < len(reason.whole.splitlines())

    def test_of_the_pages_own_model_are_for_its_owner(self, folders: dict[str, str], tmp_path: Path) -> None:
        folder = shutil.copytree(folders["untrained"], tmp_path / "model")
        shelf = ModelShelf(str(folder))
        shelf.get(str(folder))
        (folder / "config.json").write_text("{nonsense")
        with pytest.raises(DemoError, match="could not be loaded") as caught:
            shelf.get(str(folder))
        assert str(tmp_path) not in str(caught.value)
        assert str(tmp_path) in caught.value.whole


class TestExamples:
    def test_are_those_of_the_built_in_corpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        corpus = numbers_and_dates(split="test", source_lang="fr", target_lang="en")["source"]
        data = {"builtin_corpus": True, "source_lang": "fr", "target_lang": "en"}
        found = make_examples(data)
        assert len(found) == 5
        assert set(found) <= set(corpus)
        assert make_examples({"source_lang": "fr"}) == make_examples({**data, "target_lang": "xx"}) == ()
        monkeypatch.setitem(sys.modules, "vanilla_transformer.data.numbers_and_dates", None)
        assert make_examples(data) == ()

    def test_come_from_the_record_of_the_training(self, folders: dict[str, str], tmp_path: Path) -> None:
        folder = shutil.copytree(folders["untrained"], tmp_path / "model")
        record = folder / "arguments.json"
        data = {"builtin_corpus": True, "source_lang": "de", "target_lang": "en", "max_source_length": 40}
        record.write_text(json.dumps({"data": data}))
        demo = ModelShelf(str(folder)).get(str(folder))
        assert demo.examples == make_examples(data)
        assert demo.count_most_tokens() == 40
        for damaged in ("{nonsense", "null", "[]", '{"data": "x"}', '{"data": null}'):
            record.write_text(damaged)
            assert read_training_data(str(folder)) == {}
        assert read_training_data("nobody/nothing") == {}

    def test_may_be_given(self, folders: dict[str, str]) -> None:
        shelf = ModelShelf(folders["untrained"], examples=["abc", "def"])
        assert shelf.get(folders["untrained"]).examples == ("abc", "def")
        assert ModelShelf(folders["untrained"]).get(folders["untrained"]).examples == ()
