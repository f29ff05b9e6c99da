"""Codes of byte-pair encoding, and the pieces that a dictionary has of what they make."""

from pathlib import Path

MERGES = [("a", "b"), ("b", "c</w>"), ("ab", "a"), ("c", "c"), ("aba", "bc</w>"), ("cc", "ab"), ("ü", "a</w>")]
PIECES = ["a@@", "b@@", "c@@", "a", "b", "c", "ab@@", "bc", "ababc", "ccab@@", "üa", "ü@@"]  # aba@@ and cc@@ are absent


def write_codes(path: Path, merges: list[tuple[str, str]] = MERGES, style: str = "subword-nmt") -> Path:
    header = ["#version: 0.2"] if style == "subword-nmt" else []
    end = "" if style == "subword-nmt" else " 17"
    path.write_text("\n".join([*header, *(f"{a} {b}{end}" for a, b in merges)]) + "\n", encoding="utf-8")
    return path
