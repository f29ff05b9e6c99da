"""Texts to translate, in files of any size on any file system that fsspec knows, and files of their translations.

A file's kind is its suffix, before that of a compression (`.gz`, `.bz2`, `.xz`): `.tsv`, `.jsonl` or `.json` (an object
on each line), `.parquet`; any other is text, one source per line. Parts of a file are read by themselves: text that is
not compressed from where they begin, parquet from its row groups; what is compressed is decompressed up to there.
"""

import glob
import hashlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, cast

import fsspec
import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import infer_compression

from .lines import decode_lines, is_damage, is_report, refuse_compression, without_surrogates

SOURCE_COLUMNS = ("source", "text")  # what is looked for where no column was named
_NAMES = (*SOURCE_COLUMNS, "target")  # one of them makes the first line of a table its header
# With the names and codes of languages, the words of which names of columns are made.
_NAMING_WORDS = {
    *("id", "index", "nr", "number", "line", "source", "src", "target", "tgt", "trg", "text", "texts", "sentence"),
    *("sentences", "segment", "input", "inputs", "output", "outputs", "translation", "original", "reference"),
    *("question", "answer", "document", "article", "summary", "abstract", "title", "score", "label", "lang"),
}
_KINDS = {".tsv": "tsv", ".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_READ_BYTES = 1 << 22
_READ_ROWS = 1000
_MOST_STARTS = 20_000


def open_path(path: str) -> tuple[Any, str]:
    """The file system of a path or URL, and the path in it."""
    return cast(tuple[Any, str], fsspec.core.url_to_fs(path))


def is_local(path: str) -> bool:
    """Whether a path or URL is one of this machine's own file system."""
    return isinstance(open_path(path)[0], LocalFileSystem)


def find_kind(path: str) -> str:
    """How the file is written: text, tsv, jsonl or parquet."""
    name = PurePosixPath(path)
    suffix = (name if infer_compression(path) is None else name.with_suffix("")).suffix.lower()
    if suffix == ".parquet" and infer_compression(path) is not None:
        raise ValueError(f"{path}: parquet is compressed within; decompress the file.")
    if suffix == ".csv":
        raise ValueError(f"{path}: .csv is neither read nor written here; use .tsv, .jsonl or .parquet.")
    refuse_compression(name if infer_compression(path) is None else name.with_suffix(""))
    return _KINDS.get(suffix, "text")


def find_files(path: str) -> list[str]:
    """The file, the files of a folder but for hidden ones, or those that match a pattern, in the order of their names.

    Reports of what was cleaned are left out of folders and patterns.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: For a pipe.
    """
    system, inner = open_path(path)
    if system.isfile(inner):
        return [path]
    if system.isdir(inner):
        found = [name for name in system.ls(inner, detail=False) if PurePosixPath(name).name[0] not in "._"]
    elif glob.has_magic(inner):
        hidden = PurePosixPath(inner).name.startswith(".")
        found = [name for name in system.glob(inner) if hidden or not PurePosixPath(name).name.startswith(".")]
    elif system.exists(inner):
        raise ValueError(f"{path} is neither a file nor a folder; a pipe can be read as standard input only.")
    else:
        raise FileNotFoundError(f"There is no file {path}.")
    files = sorted(name for name in found if system.isfile(name) and not is_report(name))
    if not files:
        raise FileNotFoundError(f"{path}: there is no file in it, or none that matches.")
    return files if isinstance(system, LocalFileSystem) else [system.unstrip_protocol(name) for name in files]


@contextmanager
def open_bytes(path: str, mode: str = "rb") -> Iterator[Any]:
    """The file's bytes, decompressed or to be compressed as its suffix says."""
    with fsspec.open(path, mode, compression="infer") as file:
        # The lines of remote files are found in Python otherwise.
        yield file if mode != "rb" or isinstance(file, io.BufferedIOBase) else io.BufferedReader(file, _READ_BYTES)


def flatten_record(record: dict[str, Any]) -> dict[str, Any]:
    """The values of an object, those of a nested {language: text} as `translation.en`."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        flat |= {f"{key}.{inner}": text for inner, text in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def is_like_header(fields: Sequence[str]) -> bool:
    """Whether the first line of a table has words as names of columns have them: languages, source, text, id."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    known = {*_NAMING_WORDS, *LANGUAGES, *" ".join(LANGUAGES.values()).split()}
    words = [re.findall(r"[^\W\d_]+", field.lower()) for field in fields]
    is_named = [known.issuperset(found) if found else not field for field, found in zip(fields, words, strict=True)]
    return any(fields) and all(is_named) and len(set(fields)) == len(fields)


@dataclass(frozen=True)
class Scan:
    """What one reading of a file finds: where every `step`-th line begins, none of them in what cannot be entered."""

    sha256: str
    count: int
    starts: list[int]
    step: int


@dataclass(frozen=True)
class Part:
    """Records of a file that follow each other: from which, counted from 0, and how many; `line` begins at `offset`."""

    file: int
    first: int
    count: int
    line: int = 0
    offset: int = 0


EVERYTHING = Part(0, 0, 1 << 62)


@dataclass(frozen=True)
class RecordFile:
    """A file of records with a source each: a line of text, or a `column` of a table (`translation.en` is nested).

    Without `column`, it is one called "source" or "text", or the only one; that of a table without names (`.tsv`) is
    the first, or the one at another `place`, counted from 0.
    """

    path: str
    column: str | None = None
    place: int = 0

    @cached_property
    def kind(self) -> str:
        """text, tsv, jsonl or parquet."""
        return find_kind(self.path)

    @cached_property
    def header(self) -> list[str] | None:
        """The names of the columns in the first line of a table, if it has them."""
        if self.kind != "tsv":
            return None
        with open_bytes(self.path) as file:
            line = next(decode_lines(islice(file, 1), self.path), None)
        if line is None:
            return None
        fields = line.rstrip("\r\n").split("\t")
        found = ", ".join(map(repr, fields))
        if self.column is not None and self.column not in fields:
            raise ValueError(f"{self.path}, line 1: no column {self.column!r}; the columns are {found}.")
        if any(name in fields for name in (self.column, *_NAMES)):
            return fields
        if is_like_header(fields):
            raise ValueError(
                f"{self.path}, line 1: {found} look like names of columns: name the one to read. If they are texts, "
                "put another line first."
            )
        return None

    @cached_property
    def width(self) -> int:
        """How many columns a `.tsv` has: those of its header, or of its first record."""
        if self.header is not None:
            return len(self.header)
        return next((line.count("\t") + 1 for line in self.lines(EVERYTHING) if line), 0)

    @cached_property
    def columns(self) -> list[str]:
        """Their names, nested ones as `translation.en`; those of the first object in lines of JSON, none in text."""
        if self.kind == "parquet":
            with fsspec.open(self.path) as file:
                return [column.path for column in pq.ParquetFile(file).schema]
        if self.kind == "jsonl":
            with open_bytes(self.path) as file:
                numbered = enumerate(decode_lines(file, self.path), start=1)
                number, line = next(((number, line) for number, line in numbered if line.strip()), (1, "{}"))
            return list(flatten_record(self.read_object(line, number)))
        return self.header or []

    @cached_property
    def source_column(self) -> str | None:
        """Which of the columns has the sources; none where columns have no names, or in a file without records."""
        if not self.columns:
            return None
        wanted = SOURCE_COLUMNS if self.column is None else (self.column,)
        found = [name for name in wanted if name in self.columns] or (self.columns if len(self.columns) == 1 else [])
        if found and self.columns.count(found[0]) > 1:
            raise ValueError(f"{self.path}: several columns are called {found[0]!r}, and only one can be read.")
        if found and (self.column is None or found[0] == self.column):
            return found[0]
        told = ", ".join(map(repr, self.columns))
        raise ValueError(
            f"{self.path}: no column {' or '.join(map(repr, wanted))}; the columns are {told}. Name the one to read."
        )

    @property
    def first_record(self) -> int:
        """The lines before the first record."""
        return int(self.header is not None)

    def scan(self) -> Scan:
        """Reads the file once, for its digest, its number of records and where its lines are."""
        _ = self.source_column  # there is one, or an error
        digest = hashlib.sha256()
        lines = position = 0
        starts, step, last = [0], 1, b"\n"
        with fsspec.open(self.path) if self.kind == "parquet" else open_bytes(self.path) as file:
            while chunk := self._read(file):
                digest.update(chunk)
                if self.kind != "parquet":
                    ends = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n"))
                    starts.extend((position + ends[-(lines + 1) % step :: step] + 1).tolist())
                    lines += len(ends)
                    while len(starts) > _MOST_STARTS:
                        starts, step = starts[::2], 2 * step
                position += len(chunk)
                last = chunk
            if self.kind == "parquet":
                return Scan(digest.hexdigest(), pq.ParquetFile(file).metadata.num_rows, [], 1)
        count = lines + (not last.endswith(b"\n")) - self.first_record
        return Scan(digest.hexdigest(), max(count, 0), [] if infer_compression(self.path) else starts, step)

    def _read(self, file: Any) -> bytes:
        try:
            return bytes(file.read(_READ_BYTES))
        except Exception as error:
            if not is_damage(error):
                raise
            raise ValueError(f"{self.path}: truncated or damaged file ({error}).") from error

    def divide(self, scan: Scan, size: int, *, file: int = 0) -> list[Part]:
        """Parts of `size` records or a few more; `file` is their number of the file."""
        size = -(-size // scan.step) * scan.step if scan.starts else size
        parts = []
        for line in range(0, scan.count + self.first_record, size):
            first = max(line - self.first_record, 0)
            count = min(line + size - self.first_record, scan.count) - first
            place = (line, scan.starts[line // scan.step]) if scan.starts else (0, 0)
            if count:
                parts.append(Part(file, first, count, *place))
        return parts

    def lines(self, part: Part) -> Iterator[str]:
        """The records of a file of lines as they are, without line ends."""
        number = part.first + self.first_record
        with open_bytes(self.path) as file:
            file.seek(part.offset)
            own = islice(file, number - part.line, number - part.line + part.count)
            yield from (line.rstrip("\r\n") for line in decode_lines(own, self.path, number + 1))

    def batches(self, part: Part, columns: list[str] | None = None) -> Iterator[Any]:
        """The records of a parquet file as Arrow's tables."""
        with fsspec.open(self.path) as file:
            parquet = pq.ParquetFile(file)
            groups, skip, seen = [], part.first, 0
            for group in range(parquet.num_row_groups):
                rows = parquet.metadata.row_group(group).num_rows
                if seen + rows <= part.first:
                    skip -= rows
                elif seen < part.first + part.count:
                    groups.append(group)
                seen += rows
            left = part.count
            for batch in parquet.iter_batches(_READ_ROWS, row_groups=groups, columns=columns):
                own = pa.Table.from_batches([batch.slice(skip, left)])
                skip, left = max(skip - len(batch), 0), left - len(own)
                if len(own):
                    yield own

    def texts(self, part: Part) -> Iterator[str]:
        """The sources of some records; none is an empty text."""
        if self.kind == "parquet":
            number = part.first
            for table in self.batches(part, [str(self.source_column)]):
                while any(pa.types.is_struct(column.type) for column in table.schema):
                    table = table.flatten()
                for value in table[self.source_column].to_pylist():
                    number += 1
                    yield self._check_text(value, f"{self.path}, record {number}")
            return
        for number, line in enumerate(self.lines(part), part.first + self.first_record + 1):
            yield self.text_of(line, number)

    def text_of(self, line: str, number: int) -> str:
        """The source in a line of the file; an empty one has none."""
        if self.kind == "text" or not line.strip():
            return line
        if self.kind == "tsv":
            fields = line.split("\t")
            place = self.header.index(str(self.source_column)) if self.header else self.place
            if place >= len(fields):
                where = f"{self.path}, line {number}"
                raise ValueError(f"{where}: {len(fields)} column(s), and the sources are in column {place + 1}.")
            return fields[place]
        values = flatten_record(self.read_object(line, number))
        if self.source_column not in values:
            found = ", ".join(map(repr, values))
            raise ValueError(f"{self.path}, line {number}: no {self.source_column!r}; the keys are {found}.")
        return self._check_text(values[self.source_column], f"{self.path}, line {number}")

    def read_object(self, line: str, number: int) -> dict[str, Any]:
        """The object in a line of JSON."""
        try:
            record = json.loads(line)
        except (RecursionError, ValueError) as error:
            raise ValueError(f"{self.path}, line {number}: not one JSON object on each line: {error}.") from error
        if not isinstance(record, dict):
            raise ValueError(f"{self.path}, line {number}: a {type(record).__name__} and not a JSON object.")
        return record

    def _check_text(self, value: Any, where: str) -> str:
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{where}: the source is {value!r} ({type(value).__name__}), not a string.")
        return without_surrogates(value or "")


def find_records(path: str, column: str | None = None) -> list[RecordFile]:
    """The files that `find_files` finds; a `column` is an error where none of them has columns."""
    files = [RecordFile(each, column) for each in find_files(path)]
    if column is not None and all(file.kind == "text" for file in files):
        raise ValueError(f"{path} is text, which has no column {column!r}: name none, or give a table.")
    return files
