"""The folder of a Hugging Face Space: the page of `vanilla-transformer app`, with this package as it is here."""

import glob
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any

from huggingface_hub import SpaceCardData
from packaging.requirements import Requirement

from vanilla_transformer.files import check_model_name, check_new_folder, explain_missing, new_folder
from vanilla_transformer.hub.files import Selection, find_refused_files, select_files

ARGUMENTS_FILE = "app.args"
EXAMPLES_FILE = "examples.txt"
MODEL_FOLDER = "model"
PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
_APP_FILE = "app.py"
# Whichever model is shown in the end, its tokenizer may be of sentencepiece, as MarianMT's and T5's are. It is little.
_EXTRAS = ("demo", "convert")
_PACKAGE_FILES = ("*.py", "py.typed", "*.css", "*.html", "*.js", "*.json", "*.md", "*.svg")

_APP = '''"""The page of this Space."""

from pathlib import Path

from vanilla_transformer.commands.app import main

if __name__ == "__main__":
    main(space=Path(__file__).resolve().parent)
'''
_README = """---
{card}
---

# {title}

{model}, on a page of [vanilla_transformer](./vanilla_transformer): text in, and out come what the model makes of it,
the other candidates of beam search with their scores, and a map of where the model looks.

`app.py` is the page, `app.args` its options, as on a command line (`python app.py --help`), `requirements.txt` what
must be installed, and `vanilla_transformer/` the package, which need not be installed.

On your own machine, with Python {python_version} or newer:

    pip install -r requirements.txt
    python app.py
"""


def save_space(
    folder: str | os.PathLike[str],
    *,
    model_name_or_path: str | None,
    examples: Sequence[str] | None = None,
    options: Sequence[str] = (),
    title: str | None = None,
) -> Path:
    """Writes the folder of a Space, complete or not at all, and returns its path.

    A model in a folder is copied, one of the Hub is loaded by its name; without one, people name it on the page.
    Nothing is written with a pickle or what looks like a secret in the model, options, examples or package.
    """
    path = check_new_folder(os.path.expanduser(folder))
    name = None if model_name_or_path is None else os.path.expanduser(model_name_or_path)
    if name is not None:
        check_model_name(name)
    is_on_hub = name is not None and not os.path.isdir(name)
    arguments = [f"--model_name_or_path={name}", *options] if is_on_hub else list(options)
    title = title or path.resolve().name
    python_version = f"{sys.version_info.major}.{sys.version_info.minor}"  # known to do, unlike that of Spaces
    with explain_missing("A Space has the version of Gradio that is installed here", extra="demo", packages="gradio"):
        sdk_version = version("gradio")
    versions: Any = {"sdk_version": sdk_version, "python_version": python_version}
    models = [str(name)] if is_on_hub else None
    card = SpaceCardData(title=title, sdk="gradio", app_file=_APP_FILE, models=models, **versions).to_yaml()
    model = f"The model `{name}`" if is_on_hub else "A model" if name is None else f"The model in `{MODEL_FOLDER}/`"
    own = distribution("vanilla-transformer")
    with new_folder(path) as partial:
        texts = {
            "README.md": _README.format(card=card, title=title, model=model, python_version=python_version),
            "requirements.txt": "\n".join(_find_requirements(own.requires or [])) + "\n",
            "LICENSE": own.read_text("licenses/LICENSE") or "",
            _APP_FILE: _APP,
            ARGUMENTS_FILE: "".join(f"{shlex.quote(argument)}\n" for argument in arguments),
        }
        if examples is not None:
            texts[EXAMPLES_FILE] = "".join(f"{example}\n" for example in examples)
        for file, text in texts.items():
            (partial / file).write_text(text, encoding="utf-8", newline="\n")
        _copy_files(_find_package_files(), partial / PACKAGE_FOLDER.name)
        if name is not None and not is_on_hub:
            _copy_files(_find_model_files(Path(name)), partial / MODEL_FOLDER)
        _check_files(partial)
    return path


def _find_requirements(lines: Sequence[str]) -> list[str]:
    """What must be installed for the page: of the package's requirements those without an extra, and two extras."""
    found = set()
    for requirement in map(Requirement, lines):
        marker, requirement.marker = requirement.marker, None
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in _EXTRAS):
            found.add(str(requirement))
    return sorted(found, key=str.lower)


def _find_package_files() -> dict[str, Path]:
    """What installing this package brings, by the paths in its folder, whatever else lies there."""
    return {
        (folder / name).relative_to(PACKAGE_FOLDER).as_posix(): folder / name
        for folder in _find_packages(PACKAGE_FOLDER)
        for pattern in _PACKAGE_FILES
        for name in glob.iglob(pattern, root_dir=folder)
    }


def _find_packages(folder: Path) -> Iterator[Path]:
    yield folder
    for name in glob.iglob("*/__init__.py", root_dir=folder):
        yield from _find_packages((folder / name).parent)


def _find_model_files(folder: Path) -> dict[str, Path]:
    """What of a model's folder belongs on the Hub."""
    selection = select_files(folder)
    if not any(name.endswith(".safetensors") for name in selection.files):
        raise ValueError(f"{folder} has no weights in a .safetensors file, and so is no model that can be uploaded.")
    if problems := list(find_refused_files(folder, selection)):
        raise ValueError(f"{folder} cannot be uploaded:\n  " + "\n  ".join(map(str, problems)))
    return selection.files


def _copy_files(files: Mapping[str, Path], target: Path) -> None:
    for name, path in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target / name)


def _check_files(space: Path) -> None:
    """Refuses a Space with something that must not be uploaded, wherever it came from."""
    files = {path.relative_to(space).as_posix(): path for path in space.rglob("*") if path.is_file()}
    if problems := list(find_refused_files(space, Selection(files))):
        what = f"{ARGUMENTS_FILE} would hold the options, and {EXAMPLES_FILE} the examples"
        raise ValueError(f"The Space is not made; {what}:\n  " + "\n  ".join(map(str, problems)))
