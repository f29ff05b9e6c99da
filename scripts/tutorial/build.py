"""Makes the tutorial's notebooks, pages of text and figures from english.txt, chinese.txt, cells.py and solutions.py.

    python scripts/tutorial/build.py

In the texts, `[[name]]` stands for a cell of cells.py, and `[[exercise name]]` for a function of solutions.py without
its body. The notebooks (tutorial.en.ipynb, tutorial.zh.ipynb) come without outputs: they are sheets to be filled in,
and outputs would change with every version. The pages (tutorial.en.md, tutorial.zh.md) show what the notebooks print,
for readers who run nothing: the notebooks are run for that, as they are, with no exercise solved.

Needs the extras train, export and test, and npm's packages for the page in the browser.
"""

import ast
import base64
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tutorial import solutions
from tutorial.checks import LANGUAGES, read_source
from tutorial.figures import draw_figures

FOLDER = Path(__file__).resolve().parent
MARK = re.compile(r"^\[\[(exercise )?(\w+)\]\]\n", flags=re.MULTILINE)
OUTPUT = re.compile(r"```text\n.*?\n```\n\n|!\[\w+\]\(\w+\.png\)\n\n", flags=re.DOTALL)


def read_cells() -> dict[str, str]:
    """The code of each cell, by name."""
    parts = re.split(r"^# %% (\w+)\n", (FOLDER / "cells.py").read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: code.strip() for name, code in zip(parts[1::2], parts[2::2], strict=True)}


def read_solutions() -> dict[str, str]:
    """The code of each solution, by name."""
    text = Path(solutions.__file__).read_text(encoding="utf-8")
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return {node.name: ast.get_source_segment(text, node) or "" for node in functions}


def make_exercise(solution: str) -> str:
    """A solution without its body, to be filled in and checked."""
    (node,) = ast.parse(solution).body
    if not isinstance(node, ast.FunctionDef):
        raise ValueError(f"A solution is a function; this is not: {solution}")
    head = solution.splitlines()[: node.body[0].end_lineno]
    return "\n".join(["@check", *head, "    raise NotImplementedError"])


def make_notebook(language: str) -> Any:
    """The notebook of a language, without outputs."""
    cells, exercises = read_cells(), read_solutions()
    text, _ = read_source(language)
    pieces = MARK.split(text + "\n")
    found = [nbformat.v4.new_markdown_cell(pieces[0].strip(), id="introduction")]
    for is_exercise, name, after in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        code = make_exercise(exercises.pop(name)) if is_exercise else cells.pop(name)
        code = code.replace('Checker("en"', f'Checker("{language}"')
        tags = ["exercise"] if is_exercise else []
        found.append(nbformat.v4.new_code_cell(code, id=name, metadata={"tags": tags}))
        if after.strip():
            found.append(nbformat.v4.new_markdown_cell(after.strip(), id=f"after_{name}"))
    if cells or exercises:
        raise ValueError(f"{LANGUAGES[language]}.txt leaves out {', '.join([*cells, *exercises])}.")
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return nbformat.v4.new_notebook(cells=found, metadata={"kernelspec": kernel, "language_info": {"name": "python"}})


def run_notebook(notebook: Any, folder: Path, packages: Path | None = None, timeout: int = 600) -> Any:
    """Runs a notebook in `folder`/tutorial, in a copy of what it needs, and returns it with outputs.

    `packages` is the folder where npm has installed what the page in the browser needs; without it there is no page.
    """
    for name in ("tutorial", "walkthrough_steps"):
        ignored = shutil.ignore_patterns("out", "node_modules", "__pycache__")
        shutil.copytree(FOLDER.parent / name, folder / name, ignore=ignored)
    if packages is not None:
        (folder / "tutorial" / "node_modules").symlink_to(packages.resolve())
    # Progress bars and warnings about this machine are no part of a page.
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    resources = {"metadata": {"path": str(folder / "tutorial")}}
    client = NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=resources)
    return client.execute(env={**os.environ, **quiet})


def find_picture(cell: Any) -> str | None:
    """What a cell has drawn: a PNG in base 64."""
    shown = [output.data for output in cell.get("outputs", []) if "data" in output]
    return next((data["image/png"] for data in shown if "image/png" in data), None)


def make_page(notebook: Any) -> str:
    """A notebook as Markdown, with what its cells print and draw; exercises print only that they are not solved."""
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        printed = [output.text for output in cell.get("outputs", []) if output.get("name") == "stdout"]
        if printed and "exercise" not in cell.metadata.tags:
            parts.append(f"```text\n{''.join(printed).rstrip()}\n```")
        if find_picture(cell):
            parts.append(f"![{cell.id}]({cell.id}.png)")
    return "\n\n".join(parts) + "\n"


def strip_outputs(page: str) -> str:
    """A page without what was printed."""
    return OUTPUT.sub("", page)


def main() -> None:
    """Writes all files."""
    draw_figures(FOLDER)
    packages = Path(os.environ.get("VANILLA_TRANSFORMER_NODE_MODULES", FOLDER.parents[1] / ".venv" / "node_modules"))
    for language in LANGUAGES:
        notebook = make_notebook(language)
        nbformat.write(notebook, FOLDER / f"tutorial.{language}.ipynb")
        with tempfile.TemporaryDirectory() as folder:
            run_notebook(notebook, Path(folder), packages)
        (FOLDER / f"tutorial.{language}.md").write_text(make_page(notebook), encoding="utf-8")
        for cell in notebook.cells:
            if picture := find_picture(cell):
                (FOLDER / f"{cell.id}.png").write_bytes(base64.b64decode(picture))


if __name__ == "__main__":
    main()
