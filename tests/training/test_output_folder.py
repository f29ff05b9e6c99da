"""A training's output folder: whose it is, and what a run that is resumed may change."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import Seq2SeqTrainingArguments

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.training.arguments import DataArguments, ModelArguments, TranslationTrainingArguments
from vanilla_transformer.training.examples import describe_files
from vanilla_transformer.training.output_folder import ARGUMENTS_FILE, check_output_dir, claim_output_dir
from vanilla_transformer.training.setup import load_or_train_tokenizer

TOKENIZER = VanillaTransformerTokenizer()
TINY = ModelArguments(preset="tiny")


def make_arguments(output_dir: Path, **changes: Any) -> TranslationTrainingArguments:
    return TranslationTrainingArguments(str(output_dir), use_cpu=True, report_to=[], **changes)


class TestOutputDir:
    DATA = DataArguments(train_file=["train.en", "train.de"])

    def claim(self, folder: Path, model: ModelArguments = TINY, data: DataArguments = DATA, **changes: Any) -> None:
        claim_output_dir(folder, model, data, make_arguments(folder, **changes), TOKENIZER)

    def test_a_new_folder_is_marked_with_the_arguments(self, tmp_path: Path) -> None:
        folder = tmp_path / "a" / "b"
        check_output_dir(folder, TINY, self.DATA)
        assert not list(tmp_path.iterdir()), "checking writes nothing"
        for epochs in (3, 5):  # the same run may go on with other training arguments
            self.claim(folder, num_train_epochs=epochs)
            recorded = json.loads((folder / ARGUMENTS_FILE).read_text())
            assert recorded["model"]["preset"] == "tiny"
            assert recorded["data"]["train_file"] == ["train.en", "train.de"]
            assert recorded["training"]["num_train_epochs"] == epochs
            assert (folder / "tokenizer.json").is_file()
            assert not list(tmp_path.rglob("*partial"))
            (folder / f"checkpoint-{epochs}").mkdir()

    def test_names_that_are_folders_here_are_recorded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "out" / "base").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        data = DataArguments(dataset_name="some/corpus")
        self.claim(tmp_path / "new", model=ModelArguments(model_name_or_path="out/base"), data=data)
        assert json.loads((tmp_path / "new" / ARGUMENTS_FILE).read_text())["local"] == ["out/base"]

    def test_only_the_process_that_saves_writes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Seq2SeqTrainingArguments, "should_save", False)
        self.claim(tmp_path / "new")
        assert not (tmp_path / "new").exists()

    def test_another_run_is_refused_with_what_differs(self, tmp_path: Path) -> None:
        self.claim(tmp_path)
        before = (tmp_path / ARGUMENTS_FILE).read_bytes()
        data = DataArguments(train_file=["train.en", "train.de"], max_train_samples=9)
        differences = "preset: 'tiny' there, 'small' now; max_train_samples: None there, 9 now"
        with pytest.raises(ValueError, match=rf"{tmp_path} holds a run with other arguments \({differences}\)"):
            self.claim(tmp_path, model=ModelArguments(preset="small"), data=data)
        assert (tmp_path / ARGUMENTS_FILE).read_bytes() == before

    def test_another_tokenizer_is_refused(self, tmp_path: Path) -> None:
        """It may be at the same place, made anew."""
        self.claim(tmp_path)
        other = VanillaTransformerTokenizer()
        other.add_tokens(["<x>"])
        with pytest.raises(ValueError, match=f"{tmp_path} holds a run with another tokenizer"):
            claim_output_dir(tmp_path, TINY, self.DATA, make_arguments(tmp_path), other)

    def test_a_folder_that_holds_something_else_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("precious")
        with pytest.raises(ValueError, match=r"is not empty and has no arguments\.json .*it holds thesis\.tex"):
            self.claim(tmp_path)
        with pytest.raises(ValueError, match="is a file"):
            self.claim(tmp_path / "thesis.tex")
        assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_arguments_that_change_what_a_run_comes_to_are_reported(tmp_path: Path, caplog: Any) -> None:
    changes: dict[str, Any]
    for changes in ({}, {"num_train_epochs": 20}, {"learning_rate": 0.5, "seed": 7}):
        assert not caplog.text
        arguments = make_arguments(tmp_path, **changes)
        claim_output_dir(tmp_path, TINY, DataArguments(train_file=["in memory"]), arguments, TOKENIZER)
    assert "learning_rate from None to 0.5, seed from 42 to 7" in caplog.text


@pytest.mark.parametrize("name", [ARGUMENTS_FILE, "tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_of_the_run_is_named(tmp_path: Path, name: str) -> None:
    data = DataArguments(train_file=["in memory"])
    claim_output_dir(tmp_path, TINY, data, make_arguments(tmp_path), TOKENIZER)
    path = tmp_path / name
    path.write_bytes(bytes(path.stat().st_size))
    pairs = Dataset.from_dict({"source": ["a"], "target": ["b"]})
    tokenizer = partial(load_or_train_tokenizer, TINY, pairs, tmp_path)
    read: Any = partial(check_output_dir, tmp_path, TINY, data) if name == ARGUMENTS_FILE else tokenizer
    with pytest.raises(ValueError, match=f"{name} is missing or damaged: put it back"):
        read()


def test_dropping_empty_lines_goes_on_with_the_same_run(tmp_path: Path) -> None:
    data: dict[str, Any] = {"train_file": ["in memory"], "streaming": True}
    claim_output_dir(tmp_path, TINY, DataArguments(**data), make_arguments(tmp_path), TOKENIZER)
    check_output_dir(tmp_path, TINY, DataArguments(**data, drop_empty_lines=True))


@pytest.mark.parametrize("streaming", [False, True])
def test_the_files_of_a_local_dataset_tell_it_from_another(tmp_path: Path, streaming: bool) -> None:
    Dataset.from_dict({"source": ["a"], "target": ["b"]}).save_to_disk(tmp_path / "corpus")
    arguments = DataArguments(dataset_name=str(tmp_path / "corpus"), streaming=streaming)
    described = describe_files(arguments)
    names = {"data-00000-of-00001.arrow", "dataset_info.json", "state.json"}
    assert described.keys() == {str(tmp_path / "corpus" / name) for name in names}
    output_dir = tmp_path / "corpus" / "model"
    for own in ("cache-1.arrow", "tmpxxr5ufqq", ".git/HEAD", "model/README.md"):  # what others keep there
        path = tmp_path / "corpus" / own
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert describe_files(arguments, str(output_dir)) == described
    shutil.rmtree(output_dir)
    assert describe_files(arguments, str(tmp_path)) == described, "a dataset in the output folder"
    (tmp_path / "corpus" / "state.json").write_text("{}")
    assert describe_files(arguments) != described
    assert describe_files(DataArguments(dataset_name="name/of-the-hub")) == {}
