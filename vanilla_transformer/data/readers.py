"""How parallel corpora are read: two aligned text files, tables, and datasets of the Hub.

A corpus is read in parts, which a stream shuffles, deals to processes and resumes at: 2,000 lines or more of text
files, `.tsv` and `.jsonl`; 2,000 records of a saved folder; a row group of parquet; a shard of a dataset of the Hub; a
whole file of `.csv` or of a compression. The library's own reader of JSON takes "1984-03-21" for a point in time.
"""

import csv
import glob
import json
import logging
import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
from datasets import Dataset, Features, IterableDataset, load_dataset

from .lines import TABLE_SUFFIXES, Lines, OnDamage, find_suffix, is_compressed, is_report, is_table, strip_line_end
from .records import flatten_record, is_like_header

logger = logging.getLogger(__name__)

# A window of batches comes from many places of the corpus; there are more pairs where the parts would be too many.
_PART_PAIRS = 2000
_MOST_PARTS = 10_000
_BYTES_OF_A_LINE = 100
_READ_ROWS = 1000
_SEPARATORS = {".tsv": "tab", ".csv": "comma"}
# Python's own limit of 131,072 is too low for a document; without any, a quote left open takes in the whole file.
_LONGEST_CSV_FIELD = 10_000_000
_MOST_CSV_LINES = 1000  # of a record where damage is expected: what they hold is read again
_MISALIGNED = (
    "Line n of one must translate line n of the other: look for a sentence over two lines or a file cut short."
)

# One record as read: its number (counted from 1) and both texts, not yet checked. None stands for a missing value.
Pair = tuple[int, object, object]

# Looked for before any others.
USUAL_COLUMNS = (("source", "target"),)


@dataclass(frozen=True)
class Columns:
    """Which columns hold the two texts, as far as the caller said; `usual` are pairs to look for where nothing was."""

    source_column: str | None
    target_column: str | None
    source_lang: str | None
    target_lang: str | None
    usual: tuple[tuple[str, str], ...] = USUAL_COLUMNS

    def __post_init__(self) -> None:
        columns, langs = (self.source_column, self.target_column), (self.source_lang, self.target_lang)
        if (columns[0] is None) != (columns[1] is None):
            given = f"source_column={columns[0]!r} and target_column={columns[1]!r}"
            raise ValueError(f"{given}: give both or neither.")
        for kind, (source, target) in (("column", columns), ("lang", langs)):
            if source is not None and source == target:
                raise ValueError(f"source_{kind} and target_{kind} are both {source!r}: they must differ.")

    def find(self, names: Sequence[str], where: str) -> tuple[str, str] | None:
        """The source and the target column among `names`, or None; several pairs that are only usual are an error."""
        languages = (self.source_lang, self.target_lang)
        nested = (f"translation.{self.source_lang}", f"translation.{self.target_lang}")
        candidates = [*USUAL_COLUMNS, languages, nested, *self.usual]
        if self.source_column is not None:
            candidates = [(self.source_column, self.target_column)]
        found = [(one, other) for one, other in candidates if one in names and other in names and one and other]
        if len(found) > 1 and found[0] in self.usual and found[0] not in USUAL_COLUMNS:
            pairs = ", or ".join(f"{source!r} and {target!r}" for source, target in found)
            raise ValueError(f"{where}: the texts may be {pairs}: name them with source_column and target_column.")
        return found[0] if found else None

    def require(self, names: Sequence[str], where: str) -> tuple[str, str]:
        """As `find`, but says what is missing instead of returning None."""
        found = self.find(names, where)
        if found is not None:
            return found
        columns = f"the columns are {', '.join(map(repr, names))}."
        if self.source_column is not None:
            missing = [repr(name) for name in (self.source_column, self.target_column) if name not in names]
            raise ValueError(f"{where}: no column {' and no column '.join(missing)}; {columns}")
        usual = ", nor ".join(f"{source!r} and {target!r}" for source, target in self.usual)
        raise ValueError(
            f"{where}: no columns {usual}, nor any named after source_lang={self.source_lang!r} and "
            f"target_lang={self.target_lang!r}; {columns} Name two of them with source_column and target_column."
        )


@dataclass(frozen=True)
class AlignedLines:
    """The same lines of two text files."""

    source: Lines
    target: Lines
    unit: str = "line"

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"{self.source.path} and {self.target.path}"

    def tolerating(self, on_damage: OnDamage) -> "AlignedLines":
        """The same, where bytes that are not UTF-8 are U+FFFD."""
        source, target = (replace(lines, on_damage=on_damage) for lines in (self.source, self.target))
        return replace(self, source=source, target=target)

    def pairs(self) -> Iterator[Pair]:
        """Line n of the one with line n of the other."""
        for number, (source, target) in enumerate(zip_longest(self.source, self.target), self.source.first):
            if source is None or target is None:
                files = (self.source.path, self.target.path)
                short, long = files if source is None else files[::-1]
                raise ValueError(f"{short} ends after line {number - 1:,}, but {long} goes on. {_MISALIGNED}")
            yield number, strip_line_end(source), strip_line_end(target)


def _records(lines: Lines) -> Iterator[tuple[int, Any]]:
    """Yields each record of a table, fields or a JSON object, with its line; None where there is nothing in it.

    A line that is no JSON object, or no CSV, is itself a record, where that is no error.
    """
    kind = find_suffix(lines.path)
    if kind == ".csv":
        yield from _csv_records(lines)
        return
    for number, line in enumerate(lines, start=lines.first):
        if not line.strip():
            yield number, None
        elif kind == ".tsv":
            yield number, strip_line_end(line).split("\t")
        else:
            try:
                record: Any = _json_record(line, f"{lines.path}, line {number}")
            except ValueError as error:
                if lines.on_damage is None:
                    raise
                lines.on_damage(str(error))
                record = line
            yield number, record


def _csv_records(lines: Lines) -> Iterator[tuple[int, list[str] | str | None]]:
    csv.field_size_limit(max(csv.field_size_limit(), _LONGEST_CSV_FIELD))
    source = iter(lines)
    waiting: deque[str] = deque()  # lines that are to be read again
    taken: list[str] = []  # those of the record that is being read

    def read() -> Iterator[str]:
        while (line := waiting.popleft() if waiting else next(source, None)) is not None:
            if lines.on_damage is not None and len(taken) == _MOST_CSV_LINES:
                waiting.appendleft(line)
                raise csv.Error(f"no quote ends within {_MOST_CSV_LINES} lines")
            taken.append(line)
            yield line

    start, reader = 1, csv.reader(read(), strict=True)
    while True:
        taken.clear()
        record: Any
        try:
            record = next(reader, None)
        except csv.Error as error:
            message = f"{lines.path}, line {start}: the record that begins here is not valid CSV: {error}."
            if lines.on_damage is None:
                raise ValueError(message) from error
            lines.on_damage(message)
            # A quote that is left open takes in the lines behind it: they are records of their own.
            waiting.extendleft(reversed(taken[1:]))
            del taken[1:]
            record = _csv_row(taken[0])
            reader = csv.reader(read(), strict=True)
        if record is None:
            return
        yield start, record if any(field.strip() for field in record) else None
        start += len(taken)


def _csv_row(line: str) -> list[str] | str:
    """The fields of a line that is not valid CSV; the line itself if it has no two."""
    try:
        fields = next(csv.reader([strip_line_end(line)]), [])
    except csv.Error:
        return line
    return fields if len(fields) > 1 else line


def _json_record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{where}: not JSON lines, that is, one JSON object on each line: {error}.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a {type(record).__name__}; JSON lines hold one JSON object on each line.")
    return flatten_record(record)


@dataclass(frozen=True)
class TableLines:
    """Lines of a table of which `columns` hold the texts: keys of JSON, or places in rows of `width` fields."""

    lines: Lines
    columns: tuple[Any, Any]
    width: int | None = None
    header_line: int | None = None
    unit: str = "line"

    @property
    def name(self) -> str:
        """The file."""
        return str(self.lines.path)

    def tolerating(self, on_damage: OnDamage) -> "TableLines":
        """The same, where bytes that are not UTF-8 are U+FFFD, and a row that is no pair is a source alone."""
        return replace(self, lines=replace(self.lines, on_damage=on_damage))

    def pairs(self) -> Iterator[Pair]:
        """Its rows but for the header; lines with nothing in them are pairs of nothing."""
        source, target = self.columns
        for number, record in _records(self.lines):
            if number == self.header_line:
                continue
            if record is None:
                yield number, None, None
                continue
            if isinstance(record, str):
                yield number, record, None
            elif problem := self._find_problem(record):
                message = f"{self.name}, line {number}: {problem}"
                if self.lines.on_damage is None:
                    raise ValueError(message)
                self.lines.on_damage(message)
                yield number, "\t".join(map(str, record.values() if isinstance(record, dict) else record)), None
            else:
                yield number, record[source], record[target]

    def _find_problem(self, record: dict[str, Any] | list[str]) -> str | None:
        """What keeps a record from being a pair."""
        if isinstance(record, dict):
            missing = [name for name in self.columns if name not in record]
            return f"no {missing[0]!r}; the keys are {', '.join(map(repr, record))}." if missing else None
        if len(record) == self.width:
            return None
        separator = _SEPARATORS[find_suffix(self.name)]
        count = f"{len(record)} column(s) instead of {self.width} as in the lines before"
        return f"{count}; columns are separated by a {separator}."


@dataclass(frozen=True)
class DatasetPart:
    """One of `num_parts` parts of a dataset; `columns` hold the texts, nested ones as `translation.en`."""

    dataset: Dataset | IterableDataset
    dataset_name: str
    columns: tuple[str, str]
    index: int
    num_parts: int
    unit: str = "record"

    @property
    def name(self) -> str:
        """The dataset, and which part of it."""
        return self.dataset_name + (f", part {self.index + 1} of {self.num_parts}" if self.num_parts > 1 else "")

    def tolerating(self, on_damage: OnDamage) -> "DatasetPart":
        """Itself: its reader has made texts of the bytes."""
        return self

    def pairs(self) -> Iterator[Pair]:
        """Its records, numbered within the part."""
        part = self.dataset.shard(num_shards=self.num_parts, index=self.index, contiguous=True)
        done = 0
        for table in part.with_format("arrow").iter(batch_size=_READ_ROWS):
            while any(pyarrow.types.is_struct(column.type) for column in table.schema):
                table = table.flatten()
            source, target = (self._to_texts(table[name], done) for name in self.columns)
            yield from zip(range(done + 1, done + 1 + len(source)), source, target, strict=True)
            done += len(source)

    def _to_texts(self, column: Any, done: int) -> list[Any]:
        """The values of a column, of which so many have been read before."""
        try:
            return list(column.to_pylist())
        except UnicodeDecodeError:
            for number, value in enumerate(column, start=done + 1):
                try:
                    value.as_py()
                except UnicodeDecodeError as error:
                    raise ValueError(f"{self.name}, {self.unit} {number}: a text is not UTF-8 ({error}).") from error
            raise


Part = AlignedLines | TableLines | DatasetPart


def divide_dataset(dataset: Dataset | IterableDataset, name: str, columns: Columns, *, streaming: bool) -> list[Part]:
    """The parts of a dataset; a dataset that is not streamed is one part."""
    features = dataset.features
    if features is None:
        features = Dataset.from_list(list(dataset.take(1))).features
    names = columns.require(list(Features.flatten(features)), name)
    if dataset.column_names is not None:
        outer = {column if column in dataset.column_names else column.partition(".")[0] for column in names}
        dataset = dataset.select_columns(sorted(outer))
    number = dataset.num_shards if isinstance(dataset, IterableDataset) else len(dataset) // _PART_PAIRS
    number = min(max(1, number), _MOST_PARTS) if streaming else 1
    return [DatasetPart(dataset, name, names, index, number) for index in range(number)]


def _divide_aligned(source_file: str, target_file: str) -> list[Part]:
    if is_compressed(source_file) or is_compressed(target_file):
        return [AlignedLines(Lines(source_file), Lines(target_file))]
    size = _lines_of_a_part(source_file)
    source, target = (Lines(path).divide(size) for path in (source_file, target_file))
    lengths = [lines[-1].first + (lines[-1].count or 0) - 1 for lines in (source, target)]
    if lengths[0] != lengths[1]:
        raise ValueError(f"{source_file} has {lengths[0]:,} lines, but {target_file} has {lengths[1]:,}. {_MISALIGNED}")
    return [AlignedLines(*lines) for lines in zip(source, target, strict=True)]


def _lines_of_a_part(path: str) -> int:
    return max(_PART_PAIRS, os.path.getsize(path) // (_MOST_PARTS * _BYTES_OF_A_LINE))


def _divide_table(path: str, columns: Columns) -> list[Part]:
    """Finds the columns by the first line with something in it, which is a header only if it has their names."""
    if find_suffix(path) == ".parquet":
        if is_compressed(path):
            raise ValueError(f"{path}: parquet is compressed within; decompress the file.")
        _check_parquet_columns(path)
        data: dict[str, Any] = {"data_files": [glob.escape(path)], "batch_size": _READ_ROWS}
        dataset = load_dataset("parquet", split="train", streaming=True, **data)
        # Older versions of datasets cannot divide a file.
        dataset = dataset.reshard() if hasattr(dataset, "reshard") else dataset
        return divide_dataset(dataset, path, columns, streaming=True)
    whole = Lines(path)
    found = _find_record(replace(whole, on_damage=lambda _: None)) or _find_record(whole)
    if found is None:
        return []
    number, first = found
    where = f"{path}, line {number}"
    blocks = [whole] if find_suffix(path) == ".csv" else whole.divide(_lines_of_a_part(path))
    if isinstance(first, dict):
        names = columns.require(list(first), where)
        return [TableLines(block, names) for block in blocks]
    if len(first) < 2:
        raise ValueError(
            f"{where}: one column only; source and target are separated by a {_SEPARATORS[find_suffix(path)]}."
        )
    header = columns.require(first, where) if columns.source_column else columns.find(first, where)
    if header is None and is_like_header(first):
        raise ValueError(
            f"{where}: {', '.join(map(repr, first))} look like names of columns, none of which was asked for: give two "
            "of them as source_column and target_column. If they are texts, put another line first."
        )
    if header is None and len(first) > 2:
        told = f"{first[0][:40]!r} for the source and {first[1][:40]!r} for the target"
        logger.warning(f"{where}: no names of columns; of {len(first)}, the first two are read: {told}.")
    places = (first.index(header[0]), first.index(header[1])) if header else (0, 1)
    return [TableLines(block, places, len(first), number if header else None) for block in blocks]


def _find_record(lines: Lines) -> tuple[int, Any] | None:
    """The first record with something in it, and its line; of lines of JSON, the first that is an object."""
    return next(
        ((number, record) for number, record in _records(lines) if record and not isinstance(record, str)), None
    )


def _check_parquet_columns(path: str) -> None:
    """Refuses two columns of one name, and those of types that datasets does not know, maps above all."""
    schema = pyarrow.parquet.read_schema(path)
    if twice := [name for name, count in Counter(schema.names).items() if count > 1]:
        raise ValueError(f"{path}: several columns are called {', '.join(map(repr, twice))}; rename all but one.")
    for column in schema:
        try:
            Features.from_arrow_schema(pyarrow.schema([column]))
        except ValueError as error:
            message = f"{path}: the column {column.name!r} is a {column.type}, which cannot be read."
            raise ValueError(f"{message} Leave it out, or make it a struct or a string.") from error


def expand_files(files: Sequence[str | Path]) -> Iterator[str]:
    """The files behind paths, folders and patterns such as `train-*.parquet`, in the order given.

    Reports of what was cleaned are left out of folders and patterns.
    """
    for entry in map(Path, files):
        if entry.is_dir():
            tables = sorted(str(path) for path in entry.glob("[!._]*") if is_table(path) and not is_report(path))
            if not tables:
                raise FileNotFoundError(
                    f"{entry}: a folder without tables ({', '.join(TABLE_SUFFIXES)}); name text files."
                )
            yield from tables
        elif entry.exists():
            yield str(entry)
        elif matches := sorted(path for path in glob.glob(str(entry), recursive=True) if not is_report(path)):
            yield from matches
        else:
            raise FileNotFoundError(f"{entry}: no such file, and no file matches it as a pattern.")


def divide_files(files: Sequence[str | Path], columns: Columns) -> list[Part]:
    """The parts of two aligned text files, or of any number of tables."""
    paths = list(expand_files(files))
    texts = [path for path in paths if not is_table(path)]
    if len(files) == len(paths) == len(texts) == 2:  # of a pattern that finds both, which one is the source?
        return _divide_aligned(*paths)
    if texts or not paths:
        given = ", ".join(map(str, files)) or "no files"
        no_table = f"; {texts[0]} is no table" if texts else ""
        raise ValueError(
            f"{given}: give two aligned text files, the source file first, or any number "
            f"of tables ({', '.join(TABLE_SUFFIXES)}, all but the last also as .gz, .bz2 or .xz){no_table}."
        )
    return [part for path in paths for part in _divide_table(path, columns)]
