"""Reading model cards and the records that they are made of: what their tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard


def data_of(card: ModelCard) -> Any:
    """The metadata; huggingface_hub declares those of any card."""
    return card.data


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**read(path), **changes}), encoding="utf-8")


def rows_of(card: ModelCard) -> dict[str, str]:
    """The cards' tables of two columns."""
    cells = [line.strip("| ").split(" | ") for line in card.text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in cells if len(row) == 2}


def part(card: ModelCard, name: str) -> str:
    """A section's text."""
    begin = card.text.index("\n", card.text.index(f"<!-- generated: {name} "))
    return card.text[begin + 1 : card.text.index(f"\n<!-- end: {name} -->")]


def names_of(card: ModelCard) -> list[str]:
    return [line.split()[2] for line in card.text.splitlines() if line.startswith("<!-- generated: ")]
