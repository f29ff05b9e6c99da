"""Attention as a page that any browser shows, with nothing but itself: who looks at whom, a colour for each head."""

import colorsys
import html
import json
import os
import re
from importlib.resources import files
from typing import Any

import numpy as np

from .attention_maps import KINDS, AttentionMap
from .folders import new_file
from .pictures import COLORS

_SCALE = 1000  # weights are written in thousandths
_NAMES = {"encoder": "Encoder self-attention", "decoder": "Decoder self-attention", "cross": "Cross-attention"}


def attention_page(attention: AttentionMap, *, title: str = "Attention") -> str:
    """Writes a page on which tokens are two columns, with lines between them as strong as the weights.

    The page loads nothing, and forbids itself to. Its weights are rounded to thousandths.

    Args:
        attention: The weights.
        title: The page's heading.

    Returns:
        HTML. Its data is JSON in the element with the id "attention": "heads", the colours; and "kinds", for each kind
        "shape" (layers, heads, rows, columns), "weights", all of them in thousandths in this order, "rows" and
        "columns", the tokens.
    """
    kinds = []
    for kind in KINDS:
        weights, rows, columns = attention.select(kind)
        kinds.append(
            {
                "name": _NAMES[kind],
                "kind": kind,
                "shape": list(weights.shape),
                "weights": np.rint(weights * _SCALE).astype(int).ravel().tolist(),
                "rows": list(rows),
                "columns": list(columns),
            }
        )
    heads = max(kind["shape"][1] for kind in kinds)
    content: dict[str, Any] = {
        "source": attention.source_text,
        "target": attention.target_text,
        "scale": _SCALE,
        "heads": _choose_colors(heads),
        "kinds": kinds,
    }
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    # Nothing within a script element is text but its end, so that no "<" may be there; JSON has another way to say it.
    parts = {"TITLE": html.escape(title), "DATA": data.replace("<", "\\u003c")}
    template = files(__package__).joinpath("attention_page.html").read_text(encoding="utf-8")
    return re.sub("@(TITLE|DATA)@", lambda found: parts[found.group(1)], template)


def _choose_colors(count: int) -> list[str]:
    """Colours that are strong on white, also where there are many."""
    if count <= len(COLORS):
        return list(COLORS[:count])
    # Neighbours differ in lightness too.
    tones = [colorsys.hls_to_rgb(number / count, (0.35, 0.5)[number % 2], 0.8) for number in range(count)]
    return ["#" + "".join(f"{round(255 * part):02x}" for part in tone) for tone in tones]


def save_attention_page(
    attention: AttentionMap, path: str | os.PathLike[str], *, title: str = "Attention", overwrite: bool = False
) -> None:
    """Writes the page of [`attention_page`] to a file.

    Args:
        attention: The weights.
        path: The file to write.
        title: The page's heading.
        overwrite: Whether an existing file may be replaced.

    Raises:
        FileExistsError: If the file exists and must not be replaced.
        OSError: If the file cannot be written.
    """
    with new_file(path, overwrite=overwrite) as partial:
        partial.write_text(attention_page(attention, title=title), encoding="utf-8", newline="\n")


__all__ = ["attention_page", "save_attention_page"]
