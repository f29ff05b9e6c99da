"""Small parallel corpora written as text files and tables, and the words of command lines."""

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

Pairs = list[tuple[str, str]]

# bzip2 in its smallest blocks, of 100 kB.
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": partial(bz2.compress, compresslevel=1),
    ".xz": lzma.compress,
}


def command_line(settings: dict[str, Any], **changes: Any) -> list[str]:
    """Names and values as a command takes them."""
    words = []
    for name, value in {**settings, **changes}.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def write(path: Path, text: str, *, bom: bool = False, crlf: bool = False) -> Path:
    data = text.replace("\n", "\r\n" if crlf else "\n").encode("utf-8-sig" if bom else "utf-8")
    path.write_bytes(COMPRESS.get(path.suffix.lower(), bytes)(data))
    return path


def write_lines(path: Path, lines: Sequence[str], **options: bool) -> Path:
    return write(path, "".join(f"{line}\n" for line in lines), **options)


def write_aligned(folder: Path, pairs: Pairs, *suffixes: str, **options: bool) -> list[Path]:
    """The files corpus.en and corpus.de, with a suffix for each."""
    names = [f"corpus.{side}{suffix}" for side, suffix in zip(("en", "de"), suffixes or ("", ""), strict=True)]
    return [write_lines(folder / name, [pair[side] for pair in pairs], **options) for side, name in enumerate(names)]


def write_tsv(path: Path, pairs: Pairs, **options: bool) -> Path:
    return write_lines(path, ["\t".join(pair) for pair in pairs], **options)


def write_json(path: Path, pairs: Pairs, **options: bool) -> Path:
    records = [{"id": index, "target": target, "source": source} for index, (source, target) in enumerate(pairs)]
    return write_lines(path, [json.dumps(record) for record in records], **options)
