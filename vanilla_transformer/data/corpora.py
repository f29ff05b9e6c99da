"""Parallel corpora from text files, tables and the Hub, all as one dataset of "source" and "target" strings.

Reading is strict: a corpus that is misaligned by a single line trains a bad model without a word, so everything
doubtful raises an error that names the file and the line.
"""

import csv
import gzip
import io
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO, cast

import pyarrow.parquet  # type: ignore[import-untyped]
from datasets import Dataset, DatasetDict, Features, Value, load_dataset, load_from_disk

logger = logging.getLogger(__name__)

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SHOWN_EMPTY = 5
ARROW_BATCH = 10_000

# One record as read: its number (counted from 1) and both texts, not yet checked. None stands for a missing value.
Pair = tuple[int, object, object]

# Looked for before any others.
USUAL_COLUMNS = (("source", "target"),)

EmptyLines = Literal["error", "drop"]
MEND_OR_DROP = 'Mend the corpus, or drop such pairs with empty_lines="drop" (the scripts: --drop_empty_lines).'


@dataclass(frozen=True)
class Columns:
    """Which columns hold the two texts, as far as the caller said.

    Attributes:
        source_column: Name of the source's.
        target_column: Name of the target's.
        source_lang: Source language, after which its column may be named.
        target_lang: Target language, likewise.
        usual: Pairs of names to look for where none are given.
    """

    source_column: str | None
    target_column: str | None
    source_lang: str | None
    target_lang: str | None
    usual: tuple[tuple[str, str], ...] = USUAL_COLUMNS

    def __post_init__(self) -> None:
        for kind, source, target in (
            ("column", self.source_column, self.target_column),
            ("lang", self.source_lang, self.target_lang),
        ):
            if kind == "column" and (source is None) != (target is None):
                raise ValueError(
                    f"source_column={source!r} and target_column={target!r}: give both of them or neither."
                )
            if source is not None and source == target:
                raise ValueError(f"source_{kind} and target_{kind} are both {source!r}: they must differ.")

    def find(self, names: Sequence[str], where: str) -> tuple[str, str] | None:
        """The names of the source and the target column among `names`, or None where `names` has no such pair.

        Raises:
            ValueError: if `names` has several of the usual pairs, none of them "source" and "target".
        """
        candidates = [
            *USUAL_COLUMNS,
            (self.source_lang, self.target_lang),
            (f"translation.{self.source_lang}", f"translation.{self.target_lang}"),
            *self.usual,
        ]
        if self.source_column is not None:
            candidates = [(self.source_column, self.target_column)]
        found = [(one, other) for one, other in candidates if one in names and other in names and one and other]
        if len(found) > 1 and found[0] in self.usual and found[0] not in USUAL_COLUMNS:
            pairs = ", or ".join(f"{source!r} and {target!r}" for source, target in found)
            raise ValueError(
                f"{where}: the texts may be {pairs}: name the columns with source_column and target_column."
            )
        return found[0] if found else None

    def require(self, names: Sequence[str], where: str) -> tuple[str, str]:
        """As `find`, but says what is missing.

        Raises:
            ValueError: if `names` lacks a source or a target column.
        """
        found = self.find(names, where)
        if found is not None:
            return found
        columns = ", ".join(repr(name) for name in names)
        if self.source_column is not None:
            missing = [repr(name) for name in (self.source_column, self.target_column) if name not in names]
            raise ValueError(f"{where}: no column {' and no column '.join(missing)}; the columns are {columns}.")
        languages = [name.removeprefix("translation.") for name in names if name.startswith("translation.")]
        if languages and (self.source_lang is None or self.target_lang is None):
            raise ValueError(
                f"{where}: the translations' direction is open; give source_lang and target_lang, "
                f"two of {', '.join(repr(language) for language in languages)}."
            )
        usual = ", nor ".join(f"{source!r} and {target!r}" for source, target in self.usual)
        raise ValueError(
            f"{where}: no columns {usual}, nor any named after source_lang={self.source_lang!r} and "
            f"target_lang={self.target_lang!r}; the columns are {columns}. Name two of them with source_column and "
            "target_column."
        )


def is_gzip(path: str | Path) -> bool:
    """Whether the name says that the file is gzip-compressed."""
    return Path(path).suffix.lower() == ".gz"


def _open_bytes(path: str | Path) -> BinaryIO:
    if is_gzip(path):
        return cast(BinaryIO, gzip.open(path, mode="rb"))
    return open(path, mode="rb")


def open_text(path: str | Path) -> TextIO:
    r"""Opens a UTF-8 text file for reading; a name that ends in `.gz` is decompressed on the way.

    A leading byte order mark is removed. Lines end at "\n" only and keep their line ends.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    return io.TextIOWrapper(_open_bytes(path), encoding="utf-8-sig", newline="\n")


@dataclass(frozen=True)
class LineBlock:
    """Lines of a file that follow each other.

    Attributes:
        offset: Bytes of the file before the first one.
        first: Number of the first one in the file, counted from 1.
        count: How many they are; None for all to the end.
    """

    offset: int = 0
    first: int = 1
    count: int | None = None


WHOLE_FILE = LineBlock()


def iterate_lines(path: str | Path, block: LineBlock = WHOLE_FILE) -> Iterator[str]:
    """Yields the lines with their line ends. Lines are split as bytes, so that an error knows the line it is in."""
    number = block.first - 1
    try:
        with _open_bytes(path) as file:
            file.seek(block.offset)
            for number, line in enumerate(islice(file, block.count), start=block.first):
                yield line.removeprefix(_BYTE_ORDER_MARK).decode() if number == 1 else line.decode()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(
            f"{path}, line {number}: byte 0x{byte:02x} at position {error.start} of the line is not UTF-8. "
            "Convert the file to UTF-8 first."
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}, after line {number}: truncated or damaged gzip file ({error}).") from error
    if number == 0:
        raise ValueError(f"{path}: the file is empty.")
    if block.count is not None and number != block.first + block.count - 1:
        raise ValueError(f"{path} ends after line {number}: it was longer before and has changed while it is in use.")


def strip_line_end(line: str) -> str:
    r"""Takes the "\n" or "\r\n" off."""
    return line.removesuffix("\n").removesuffix("\r") if line.endswith("\n") else line


def read_lines(path: str | Path) -> list[str]:
    r"""Reads the lines of a UTF-8 text file, decompressed if its name ends in `.gz`, without their line ends.

    Only "\n" and "\r\n" end a line: U+2028, U+0085, form feeds and the like are part of the text, as other tools that
    write aligned corpora see it. A leading byte order mark is removed.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is empty, is not UTF-8 (says the line), or is a damaged gzip file.
    """
    return [strip_line_end(line) for line in iterate_lines(path)]


def check_same_length(source: tuple[str | Path, int], target: tuple[str | Path, int]) -> None:
    """Compares the numbers of lines of two aligned files, each given as its path and that number.

    Raises:
        ValueError: if they differ.
    """
    if source[1] != target[1]:
        raise ValueError(
            f"{source[0]} has {source[1]:,} lines, but {target[0]} has {target[1]:,}. Line n of one must be "
            "the translation of line n of the other: look for a sentence broken over two lines or a file cut short."
        )


def _aligned_pairs(source_file: str | Path, target_file: str | Path) -> Iterator[Pair]:
    source, target = read_lines(source_file), read_lines(target_file)
    check_same_length((source_file, len(source)), (target_file, len(target)))
    return ((number, *pair) for number, pair in enumerate(zip(source, target, strict=True), start=1))


def tsv_rows(path: str | Path, block: LineBlock = WHOLE_FILE) -> Iterator[tuple[int, list[str]]]:
    """Yields the number and the fields of each line."""
    for number, line in enumerate(iterate_lines(path, block), start=block.first):
        yield number, strip_line_end(line).split("\t")


def _csv_rows(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(iterate_lines(path), strict=True)
    start = 1
    try:
        for row in reader:
            yield start, row
            start = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{path}: the record that begins at line {start} is not valid CSV: {error}.") from error


@dataclass(frozen=True)
class Layout:
    """How the rows of a delimited table are laid out.

    Attributes:
        source: Index of the source among the fields.
        target: Index of the target.
        width: How many fields a row has.
        header_line: Number of the line with the names of the columns; None where there is none.
    """

    source: int
    target: int
    width: int
    header_line: int | None

    @classmethod
    def of(cls, number: int, row: list[str], *, columns: Columns, path: str | Path, separator: str) -> "Layout":
        """Reads the layout off the first row that is not blank, which is in line `number` of the file.

        Raises:
            ValueError: if it has one field only, or lacks the columns that the caller named.
        """
        where = f"{path}, line {number}"
        if len(row) < 2:
            raise ValueError(f"{where}: one column only; source and target are separated by a {separator}.")
        header = columns.require(row, where) if columns.source_column else columns.find(row, where)
        source, target = (row.index(header[0]), row.index(header[1])) if header else (0, 1)
        return cls(source=source, target=target, width=len(row), header_line=number if header else None)


def is_blank(row: list[str]) -> bool:
    """Whether no field of the row holds anything but white space."""
    return not any(field.strip() for field in row)


def delimited_pairs(
    path: str | Path,
    *,
    rows: Iterable[tuple[int, list[str]]],
    columns: Columns,
    separator: str,
    layout: Layout | None = None,
) -> Iterator[Pair]:
    """Yields the pairs of a table. Rows from the middle of a file come with the `layout` that its first row gave."""
    for number, row in rows:
        if is_blank(row):
            yield number, None, None
            continue
        if layout is None:
            layout = Layout.of(number, row, columns=columns, path=path, separator=separator)
        if number == layout.header_line:
            continue
        if len(row) != layout.width:
            raise ValueError(
                f"{path}, line {number}: {len(row)} column{'' if len(row) == 1 else 's'} instead of {layout.width} as "
                f"in the lines before; columns are separated by a {separator}."
            )
        yield number, row[layout.source], row[layout.target]


def _json_value(record: dict[str, Any], column: str, where: str) -> object:
    value: object = record.get(column)
    if column not in record:
        outer, _, inner = column.partition(".")
        nested = record.get(outer)
        if not isinstance(nested, dict) or inner not in nested:
            raise ValueError(f"{where}: no {column!r}; the keys are {', '.join(map(repr, _json_columns(record)))}.")
        value = nested[inner]
    if isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise ValueError(f"{where}: {column!r} holds half of a surrogate pair, which is no character.")
    return value


def _json_columns(record: dict[str, Any]) -> list[str]:
    """The keys of a record; those of a nested {language: text} are written as `translation.en`."""
    names: list[str] = []
    for key, value in record.items():
        names.extend(f"{key}.{inner}" for inner in value) if isinstance(value, dict) else names.append(key)
    return names


def _json_record(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON lines, that is, one JSON object on each line: {error}.") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a {type(record).__name__}; JSON lines hold one JSON object on each line.")
    return record


def json_names(path: str | Path, columns: Columns) -> tuple[str, str] | None:
    """The source and the target column of a JSON lines file, by its first record; None if it has no record."""
    for number, line in enumerate(iterate_lines(path), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            return columns.require(_json_columns(_json_record(line, where)), where)
    return None


def json_pairs(
    path: str | Path, *, columns: Columns, block: LineBlock = WHOLE_FILE, names: tuple[str, str] | None = None
) -> Iterator[Pair]:
    """Yields the pairs of JSON lines. A block from the middle of a file comes with the column `names` of the file."""
    for number, line in enumerate(iterate_lines(path, block), start=block.first):
        if not line.strip():
            yield number, None, None
            continue
        where = f"{path}, line {number}"
        record = _json_record(line, where)
        if names is None:
            names = columns.require(_json_columns(record), where)
        yield number, _json_value(record, names[0], where), _json_value(record, names[1], where)


def is_full(pair: Pair, name: str, unit: str) -> bool:
    """Whether both sides of a pair hold text.

    Raises:
        ValueError: if a side is neither a string nor missing.
    """
    for side, value in zip(("source", "target"), pair[1:], strict=True):
        if value is not None and not isinstance(value, str):
            raise ValueError(
                f"{name}, {unit} {pair[0]}: the {side} is {value!r} ({type(value).__name__}), not a string."
            )
    return all(isinstance(value, str) and value.strip() for value in pair[1:])


def _valid_pairs(
    pairs: Iterable[Pair],
    *,
    name: str,
    unit: str,
    max_samples: int | None,
    empty_lines: EmptyLines,
) -> Iterator[tuple[int, str, str]]:
    """Yields the first `max_samples` good pairs, then raises or warns for the empty ones among them."""
    good = empty = 0
    first_empty: list[str] = []
    for pair in pairs:
        if is_full(pair, name, unit):
            yield cast(tuple[int, str, str], pair)
            good += 1
            if good == max_samples:
                break
            continue
        empty += 1
        if len(first_empty) < _SHOWN_EMPTY:
            first_empty.append(str(pair[0]))
    if not good and not empty:
        raise ValueError(f"{name}: no pair of source and target in it.")
    if not empty:
        return
    numbers = ", ".join(first_empty) + (", ..." if empty > len(first_empty) else "")
    message = f"{name}: {empty:,} {unit}(s) empty on one side or both: {unit} {numbers}"
    if empty_lines == "error":
        raise ValueError(f"{message}. {MEND_OR_DROP}")
    if not good:
        raise ValueError(f"{message}. None is left.")
    logger.warning("%s. They were dropped.", message)


def _dataset_from_pairs(
    pairs: Iterable[Pair], *, name: str, max_samples: int | None, empty_lines: EmptyLines
) -> Dataset:
    sources: list[str] = []
    targets: list[str] = []
    for _, source, target in _valid_pairs(
        pairs, name=name, unit="line", max_samples=max_samples, empty_lines=empty_lines
    ):
        sources.append(source)
        targets.append(target)
    features = Features({"source": Value("string"), "target": Value("string")})
    return Dataset.from_dict({"source": sources, "target": targets}, features=features)


def _arrow_pairs(dataset: Dataset) -> Iterator[Pair]:
    number = 0
    for table in dataset.with_format("arrow").iter(batch_size=ARROW_BATCH):
        for source, target in zip(table["source"].to_pylist(), table["target"].to_pylist(), strict=True):
            number += 1
            yield number, source, target


def _dataset_from_table(
    dataset: Dataset,
    *,
    name: str,
    columns: Columns,
    max_samples: int | None,
    empty_lines: EmptyLines,
) -> Dataset:
    """Picks and checks the two columns without taking a memory-mapped dataset into memory."""
    dataset = dataset.flatten()
    source, target = columns.require(dataset.column_names, name)
    dataset = dataset.select_columns([source, target]).rename_columns({source: "source", target: "target"})
    valid = _valid_pairs(
        _arrow_pairs(dataset), name=name, unit="record", max_samples=max_samples, empty_lines=empty_lines
    )
    kept = [number - 1 for number, _, _ in valid]
    if len(kept) < len(dataset):
        dataset = dataset.select(kept)
    features = Features({"source": Value("string"), "target": Value("string")})
    return dataset if dataset.features == features else dataset.cast(features)


@contextmanager
def open_parquet(path: str | Path) -> Iterator[pyarrow.parquet.ParquetFile]:
    """Opens a parquet file for reading.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not a parquet file, or damaged in what is read of it inside the context.
    """
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowInvalid, OSError) as error:
        # pyarrow calls damaged pages an OSError too, without an error number.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path}: not a parquet file, or a damaged one: {error}") from error


def load_saved_split(dataset_name: str, split: str) -> Dataset | None:
    """Loads a split of a folder written by `save_to_disk`, without taking it into memory; None for anything else.

    Raises:
        ValueError: if `dataset_name` is a file, or the folder has no such split.
    """
    folder = Path(dataset_name)
    if folder.is_file():
        raise ValueError(f"dataset_name={dataset_name!r} is a file: pass it as files=[{dataset_name!r}].")
    if not (folder / "dataset_dict.json").is_file() and not (folder / "state.json").is_file():
        return None
    dataset = load_from_disk(folder)
    # A lone saved split must not pass for another one: a validation score on training data would mislead.
    splits = dataset if isinstance(dataset, DatasetDict) else {str(dataset.split or "train"): dataset}
    if split not in splits:
        raise ValueError(f"{dataset_name}: no split {split!r}; the splits are {', '.join(map(repr, splits))}.")
    return splits[split]


PairReader = Callable[[str | Path, Columns], Iterator[Pair]]

PAIR_READERS: dict[str, PairReader] = {
    ".tsv": lambda path, columns: delimited_pairs(path, rows=tsv_rows(path), columns=columns, separator="tab"),
    ".csv": lambda path, columns: delimited_pairs(path, rows=_csv_rows(path), columns=columns, separator="comma"),
    ".json": lambda path, columns: json_pairs(path, columns=columns),
    ".jsonl": lambda path, columns: json_pairs(path, columns=columns),
}


def file_kind(path: str | Path) -> str:
    """The last suffix of the name, in lower case, before any `.gz`."""
    return Path(Path(path).stem if is_gzip(path) else path).suffix.lower()


def _load_files(files: Sequence[str | Path], *, columns: Columns, **options: Any) -> Dataset:
    kinds = [file_kind(file) for file in files]
    if len(files) == 1:
        path, kind = files[0], kinds[0]
        if kind == ".parquet" and not is_gzip(path):
            with open_parquet(path) as parquet:
                table = parquet.read()
            return _dataset_from_table(Dataset(table), name=str(path), columns=columns, **options)
        if kind in PAIR_READERS:
            return _dataset_from_pairs(PAIR_READERS[kind](path, columns), name=str(path), **options)
        legal = ", ".join(f"{suffix}[.gz]" for suffix in PAIR_READERS)
        raise ValueError(
            f"{path}: a corpus in one file must be one of {legal}, .parquet; plain text comes as two aligned files, "
            "the source file first."
        )
    if len(files) == 2:
        for path, kind in zip(files, kinds, strict=True):
            if kind == ".parquet" or kind in PAIR_READERS:
                raise ValueError(
                    f"{path}: two files are read as aligned lines of text, but a {kind} file holds both sides by "
                    "itself. Give it alone."
                )
        return _dataset_from_pairs(_aligned_pairs(files[0], files[1]), name=f"{files[0]} and {files[1]}", **options)
    raise ValueError(f"files has {len(files)} entries: give one table or two aligned text files (source, target).")


def check_arguments(
    *, files: Sequence[str | Path] | None, dataset_name: str | None, max_samples: int | None, empty_lines: str
) -> None:
    """Refuses what cannot be meant.

    Raises:
        ValueError: names the argument and its value.
    """
    if (files is None) == (dataset_name is None):
        raise ValueError(f"files={files!r} and dataset_name={dataset_name!r}: give exactly one of them.")
    if isinstance(files, str | Path):
        raise ValueError(f"files={files!r}: give a list of paths.")
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples={max_samples}: must be at least 1, or None for all.")
    if empty_lines not in ("error", "drop"):
        raise ValueError(f'empty_lines={empty_lines!r}: must be "error" or "drop".')


def load_parallel_corpus(
    *,
    files: Sequence[str | Path] | None = None,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    split: str = "train",
    source_column: str | None = None,
    target_column: str | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    usual_columns: tuple[tuple[str, str], ...] = USUAL_COLUMNS,
    max_samples: int | None = None,
    empty_lines: EmptyLines = "error",
) -> Dataset:
    r"""Loads sentence pairs from local files or from a dataset of the Hub.

    `files` is either two aligned text files (source first; line n translates line n) or one table, by its suffix:

    - `.tsv`: lines split at tabs, without any quoting; `.csv`: comma-separated with quotes. The first line is a header
      only if it has the columns looked for (below); otherwise it is data, and the first two columns are the source
      and the target. All lines have the same number of columns.
    - `.json`, `.jsonl`: one JSON object on each line.
    - `.parquet`.

    All but parquet may be gzip-compressed (`.gz`). Text is UTF-8; lines end with "\n" or "\r\n", nothing else.

    The columns are `source_column` and `target_column` if given; else `source` and `target`; else columns named
    `source_lang` and `target_lang`; else those keys of a `translation` feature ({language: text}); else the only pair
    of `usual_columns` that is there. A nested column may also be named outright: `source_column="translation.en"`.

    Args:
        files: One table or two aligned text files. Exactly one of `files` and `dataset_name` is given.
        dataset_name: A dataset on the Hub, a local folder of one, or a folder written by `save_to_disk`.
        dataset_config_name: The dataset's configuration, where it has several.
        split: The dataset's split, as `datasets.load_dataset` understands it; not used for files.
        source_column: Column of the source texts; needs `target_column`.
        target_column: Column of the target texts; needs `source_column`.
        source_lang: Source language, as columns or the keys of `translation` are named.
        target_lang: Target language, likewise.
        usual_columns: Pairs of names to look for, those of summaries, say.
        max_samples: Keep this many pairs from the beginning; later ones are not checked for empty sides.
        empty_lines: What to do with pairs that are empty (null, or white space only) on one side or both: "error"
            raises, "drop" leaves them out and logs how many.

    Returns:
        A dataset of exactly two string columns, "source" and "target".

    Raises:
        FileNotFoundError: if a file or the dataset does not exist.
        ConnectionError: if the Hub cannot be reached and the dataset is not in the local cache.
        ValueError: if the arguments contradict each other, the text files have different numbers of lines, a file is
            empty, damaged or not UTF-8, a column is missing, a value is not a string, or a side is empty.
    """
    check_arguments(files=files, dataset_name=dataset_name, max_samples=max_samples, empty_lines=empty_lines)
    columns = Columns(source_column, target_column, source_lang, target_lang, usual_columns)
    options: dict[str, Any] = {"max_samples": max_samples, "empty_lines": empty_lines}
    if files is not None:
        return _load_files(files, columns=columns, **options)
    dataset = load_saved_split(str(dataset_name), split)
    if dataset is None:
        dataset = load_dataset(dataset_name, name=dataset_config_name, split=split)
    return _dataset_from_table(dataset, name=f"{dataset_name} ({split})", columns=columns, **options)
