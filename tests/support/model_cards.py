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
    cells = [line.strip("| ").split(" | ") for line in card.text.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in cells if len(row) == 2}


def part(card: ModelCard, heading: str) -> str:
    begin = card.text.index(f"\n## {heading}\n") + len(heading) + 5
    end = min(place for mark in ("\n## ", "\n<!-- end") if (place := card.text.find(mark, begin)) > 0)
    return card.text[begin:end].strip()


def summary_of(card: ModelCard) -> str:
    return " ".join(card.text[card.text.index("\n# ") : card.text.index("\n## ")].split())
