"""What the README says of the code is so."""

import ast
import importlib
import re
import textwrap
from pathlib import Path

import pytest


def rows_of_the_paper(repository_root: Path) -> list[tuple[str, str]]:
    """(module, symbol) of each mention in the section that maps the paper to the code."""
    readme = (repository_root / "README.md").read_text(encoding="utf-8")
    section = readme.split("## The paper in this code")[1].split("\n## ")[0]
    return [
        (module, symbol)
        for cell in re.findall(r"\|([^|]*)\|\n", section)
        for module, symbols in re.findall(r"`(\w+)\.py`: ((?:`[\w.]+`(?:, )?)+)", cell)
        for symbol in re.findall(r"`([\w.]+)`", symbols)
    ]


def test_every_symbol_beside_the_paper_exists(repository_root: Path) -> None:
    rows = rows_of_the_paper(repository_root)
    assert len(rows) >= 25
    for module, symbol in rows:
        found: object = importlib.import_module(f"vanilla_transformer.{module}")
        for part in symbol.split("."):
            assert hasattr(found, part), f"{module}.py has no {symbol}"
            found = getattr(found, part)


def test_every_link_within_the_readme_leads_somewhere(repository_root: Path) -> None:
    readme = (repository_root / "README.md").read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", readme, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = re.findall(r"\]\(#([^)]+)\)", readme)
    assert links
    assert set(links) <= anchors


def test_every_script_that_the_readme_names_exists(repository_root: Path) -> None:
    readme = (repository_root / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"scripts/[\w/]+(?:\.\w+)?", readme))
    assert len(named) > 10
    for name in named:
        assert (repository_root / name).exists(), name


def test_python_in_the_readme_can_be_parsed(repository_root: Path) -> None:
    readme = (repository_root / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^ *```python\n(.*?)```", readme, flags=re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        try:
            ast.parse(textwrap.dedent(block))
        except SyntaxError as error:
            pytest.fail(f"{error}\n{block}")
