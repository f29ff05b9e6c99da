"""Attention as a page that any browser shows, with nothing but itself: who looks at whom, a colour for each head."""

import base64
import colorsys
import html
import json
import os
import re
import zlib
from importlib.resources import files
from typing import Any

import numpy as np

from vanilla_transformer.files import new_file

from .attention import KINDS, AttentionMap, Weights

# Colours with a contrast of at least 3 to a light and to a dark background. For up to eight heads colour-blind people
# tell them apart too: Okabe and Ito's hues, and violet. Of more heads, neighbours differ in their luminance.
_ON_LIGHT = ("#00568C", "#A03C00", "#00856C", "#D070B8", "#1090FF", "#999000", "#000000", "#7A60C0")
_ON_DARK = ("#5F86B2", "#F5780F", "#2BBA85", "#CF9AF0", "#7FDCFA", "#FAD02C", "#FFFFFF", "#9440D8")
_LUMINANCES: dict[tuple[str, ...], tuple[float, ...]] = {
    _ON_LIGHT: (0.28, 0.08, 0.16, 0.035),
    _ON_DARK: (0.13, 0.4, 0.23, 0.62),
}
_SCALE = 1000  # weights are written in thousandths
_NAMES = {"encoder": "Encoder self-attention", "decoder": "Decoder self-attention", "cross": "Cross-attention"}


def attention_page(attention: AttentionMap, *, title: str = "Attention") -> str:
    """The page on which tokens are two columns, with lines between them as strong as the weights, as HTML.

    The page loads nothing, and forbids itself to. A page that has it in a frame can set its theme with the message
    `{theme: "dark"}`, and is sent messages `{height: 812}` in pixels. Its data is JSON in the element "attention":
    weights are thousandths in the order of the "shape", numbers of two bytes: all low bytes, then all high bytes,
    compressed by zlib, in base64.
    """
    kinds: list[dict[str, Any]] = []
    for kind in KINDS:
        weights, rows, columns = attention.select(kind)
        shown = {"name": _NAMES[kind], "kind": kind, "shape": weights.shape, "weights": _pack(weights)}
        kinds.append({**shown, "rows": rows, "columns": columns})
    heads = max(kind["shape"][1] for kind in kinds)
    content: dict[str, Any] = {
        "source": attention.source_text,
        "target": attention.target_text,
        "scale": _SCALE,
        "heads": _choose_colors(heads, _ON_LIGHT),
        "heads_on_dark": _choose_colors(heads, _ON_DARK),
        "kinds": kinds,
    }
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    # Nothing within a script element is text but its end, so that no "<" may be there; JSON has another way to say it.
    parts = {"TITLE": html.escape(title), "DATA": data.replace("<", "\\u003c")}
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return re.sub("@(TITLE|DATA)@", lambda found: parts[found.group(1)], template)


def _pack(weights: Weights) -> str:
    numbers = np.rint(weights * _SCALE).astype(np.uint16).ravel()
    # Most weights are small: apart from the others, the high bytes take no space.
    data = np.concatenate([numbers & 255, numbers >> 8]).astype(np.uint8).tobytes()
    return base64.b64encode(zlib.compress(data)).decode("ascii")


def _choose_colors(count: int, palette: tuple[str, ...]) -> list[str]:
    if count <= len(palette):
        return list(palette[:count])
    luminances = _LUMINANCES[palette]
    tones = [_find_tone(number / count, luminances[number % len(luminances)]) for number in range(count)]
    return ["#" + "".join(f"{round(255 * part):02x}" for part in tone) for tone in tones]


def _find_tone(hue: float, luminance: float) -> tuple[float, float, float]:
    """Finds the red, green and blue of a hue, from 0 to 1, that is as light to the eye as asked for."""
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        tone = colorsys.hls_to_rgb(hue, middle, 0.8)
        low, high = (middle, high) if _luminance(tone) < luminance else (low, middle)
    return tone


def _luminance(tone: tuple[float, float, float]) -> float:
    """The relative luminance of WCAG 2, from 0, black, to 1, white."""
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in tone)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def save_attention_page(
    attention: AttentionMap, path: str | os.PathLike[str], *, title: str = "Attention", overwrite: bool = False
) -> None:
    """Writes the page of [`attention_page`] to a file; one that exists is replaced only if `overwrite` says so."""
    with new_file(path, overwrite=overwrite) as partial:
        partial.write_text(attention_page(attention, title=title), encoding="utf-8", newline="\n")
