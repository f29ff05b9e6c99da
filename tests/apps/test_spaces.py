"""The folder of a Hugging Face Space: what its front matter says, and that it is whole; test_app.py runs one."""

import importlib
import shlex
import shutil
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import SpaceCard
from letters import TOKENIZER, make_letters_model
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from vanilla_transformer.apps import spaces
from vanilla_transformer.apps.spaces import save_space
from vanilla_transformer.commands import app
from vanilla_transformer.tasks import TASKS, record_task

pytest.importorskip("gradio", reason="a Space needs Gradio: the extra [demo]")

SECRET = "hf_" + "AbCdEfGhIj" * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for text2text, with what a training leaves beside it."""
    folder = tmp_path_factory.mktemp("models") / "letters"
    model = make_letters_model()
    record_task(model.config, TASKS["text2text"])
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    (folder / "training_args.bin").write_bytes(b"")
    (folder / "checkpoint-1").mkdir()
    (folder / "checkpoint-1" / "model.safetensors").write_bytes(b"")
    return folder


def find_files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_front_matter_says_how_the_hub_runs_it(repository_root: Path, tmp_path: Path) -> None:
    space = save_space(tmp_path / "my-space", model_name_or_path="someone/model", title='"Letters": a test')
    project = tomllib.loads((repository_root / "pyproject.toml").read_text())["project"]
    extras = [line for extra in ("demo", "convert") for line in project["optional-dependencies"][extra]]
    demanded = [Requirement(line) for line in (*project["dependencies"], *extras)]
    card = SpaceCard.load(space / "README.md", ignore_metadata_errors=False).data.to_dict()
    # As text: YAML takes 3.10 for a number, and leaves out its last digit.
    assert isinstance(card["python_version"], str)
    assert SpecifierSet(project["requires-python"]).contains(card["python_version"])
    assert (card["title"], card["sdk"], card["models"]) == ('"Letters": a test', "gradio", ["someone/model"])
    (gradio,) = [requirement for requirement in demanded if requirement.name == "gradio"]
    assert card["sdk_version"] == version("gradio")
    assert gradio.specifier.contains(card["sdk_version"])
    assert card["app_file"] == "app.py"
    required = [Requirement(line) for line in (space / "requirements.txt").read_text().splitlines()]
    assert sorted(map(str, required)) == sorted(map(str, demanded))
    # What tokenizers of MarianMT and T5 are read with.
    assert {"protobuf", "sacremoses", "sentencepiece"} <= {requirement.name for requirement in required}
    assert shlex.split((space / "app.args").read_text()) == ["--model_name_or_path=someone/model"]


def test_folder_is_complete_or_absent(model: Path, tmp_path: Path) -> None:
    space = save_space(tmp_path / "space", model_name_or_path=str(model), examples=["ab", "cd"])
    files = find_files(space)
    kept = {name for name in find_files(model) if name.endswith((".json", ".py", ".safetensors")) and "/" not in name}
    assert {name for name in files if name.startswith("model/")} == {f"model/{name}" for name in kept}
    package = Path(importlib.import_module("vanilla_transformer").__file__ or "").parent
    own = {f"vanilla_transformer/{name}" for name in find_files(package) if "__pycache__" not in name}
    assert {name for name in files if name.startswith("vanilla_transformer/")} == own
    own = {"LICENSE", "README.md", "app.args", "app.py", "examples.txt", "requirements.txt"}
    assert {name for name in files if "/" not in name} == own
    assert SpaceCard.load(space / "README.md").data.models is None
    assert (space / "app.args").read_text() == ""
    with pytest.raises(FileExistsError, match="not empty"):
        save_space(space, model_name_or_path=str(model))
    assert find_files(space) == files
    wrong = shutil.copytree(model, tmp_path / "no-weights", ignore=shutil.ignore_patterns("*.safetensors"))
    secret = shutil.copytree(model, tmp_path / "secret")
    (secret / ".env").write_text("")
    for folder, message in (
        (wrong, "has no weights in a .safetensors file"),
        (secret, "looks like a secret"),
        ("/no/such/model", "There is no folder /no/such/model"),
    ):
        with pytest.raises((OSError, ValueError), match=message):
            save_space(tmp_path / "none", model_name_or_path=str(folder))
        assert not (tmp_path / "none").exists()


def test_package_is_what_would_be_installed(repository_root: Path, tmp_path: Path, monkeypatch: Any) -> None:
    package = tmp_path / "vanilla_transformer"
    shutil.copytree(repository_root / package.name, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(spaces, "PACKAGE_FOLDER", package)
    own = find_files(package)
    assert {"__init__.py", "visualization/page.html", "hub/model_card.md", "py.typed", "export/__init__.py"} <= own
    for name in (".env", ".hidden.py", "x.pkl", "export/notes.txt", "scratch/a.py", ".venv/b/__init__.py", "c/d.html"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(f"HF_TOKEN={SECRET}")
    space = save_space(tmp_path / "space", model_name_or_path="a/b")
    assert find_files(space / package.name) == own
    # What belongs to the package is no safer for that.
    (package / "own.py").write_text(f"\nTOKEN = '{SECRET}'\n")
    with pytest.raises(ValueError, match=r"vanilla_transformer/own\.py, line 2, has what looks like a token"):
        save_space(tmp_path / "none", model_name_or_path="a/b")
    assert not (tmp_path / "none").exists()


def test_secrets_are_refused_wherever_they_are(tmp_path: Path) -> None:
    options, examples = ["--source_lang=en", f"--source_prefix={SECRET}"], ["ab", f"ab {SECRET}"]
    wrong: Any = (({"options": options}, r"app\.args, line 3"), ({"examples": examples}, r"examples\.txt, line 2"))
    for given, place in wrong:
        with pytest.raises(ValueError, match=rf"{place}, has what looks like a token of the Hub") as caught:
            save_space(tmp_path / "none", model_name_or_path="a/b", **given)
        assert SECRET not in str(caught.value)
        assert not list(tmp_path.iterdir())


def test_space_takes_over_the_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "lines.txt").write_text("ab\n\n cd \n", encoding="utf-8")
    options = ["--source_lang=en", "--source_prefix=translate English to German: ", "--other_models=hub"]
    other = ["--server_port=1234", "--device=cpu", f"--examples={tmp_path / 'lines.txt'}"]
    app.main(["--model_name_or_path=a/b", *options, *other, f"--save_space={tmp_path / 'space'}"])
    assert f"hf upload NAME/space {tmp_path / 'space'} --repo-type space" in capsys.readouterr().out
    saved = shlex.split((tmp_path / "space" / "app.args").read_text())
    assert sorted(saved) == sorted(["--model_name_or_path=a/b", *options])
    assert (tmp_path / "space" / "examples.txt").read_text() == "ab\ncd\n"
    # Shells leave the tilde after an equals sign to the program.
    monkeypatch.setenv("HOME", str(tmp_path))
    app.main(["--model_name_or_path=a/b", "--examples=~/lines.txt", "--save_space=~/home"])
    assert (tmp_path / "home" / "examples.txt").read_text() == "ab\ncd\n"
    # A Space is open to everybody, and so has a model of its own.
    with pytest.raises(SystemExit):
        app.main([f"--save_space={tmp_path / 'empty'}"])
    assert "There is no model to show" in capsys.readouterr().err
