"""What is said of a model's name that is no folder."""

from pathlib import Path

import pytest

from vanilla_transformer.files import check_model_name, explain_missing_model
from vanilla_transformer.inference.loading import load_model_and_tokenizer


@pytest.mark.parametrize(
    "name", ["out/my/model", "./model", "../model", "~/model", "/model", "model/", "my model", "x" * 300, "a\0b"]
)
def test_what_the_hub_cannot_have_is_a_missing_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=rf"^There is no folder {name}\.$"):
        check_model_name(name)
    with pytest.raises(FileNotFoundError, match=rf"^There is no folder {name}\.$"):
        load_model_and_tokenizer(name)


def test_folders_and_names_on_the_hub_are_fine(tmp_path: Path) -> None:
    for name in (tmp_path, str(tmp_path), f"{tmp_path}/", "bert-base", "user/my.model_1"):
        check_model_name(name)


def test_a_file_is_none(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(NotADirectoryError, match=r"is a file\. Name the folder of a model, or a model on the Hub"):
        check_model_name(path)


def test_a_name_that_the_hub_does_not_give_may_be_a_folder_that_is_not_there() -> None:
    with pytest.raises(
        OSError, match=r"There is no folder out/typo, and no model of that name could be loaded .*Hub: "
    ):
        load_model_and_tokenizer("out/typo")


def test_what_is_wrong_within_a_folder_is_said_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"^the disk fails$"), explain_missing_model(tmp_path):
        raise OSError("the disk fails")
