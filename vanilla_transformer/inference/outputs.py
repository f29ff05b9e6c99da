"""Files of translations, of the kinds of [`records`]: beside what they translate, by themselves, or as pairs."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import fsspec
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from fsspec.utils import infer_compression

from vanilla_transformer.data.records import EVERYTHING, Part, RecordFile, Scan, find_kind

from .translate import Translation, format_lines, one_line

Translations: TypeAlias = list[Translation]
Files: TypeAlias = list[RecordFile]
_ROWS = 10_000  # that are written together, a row group of parquet


class Piece(NamedTuple):
    """Some records of a file, and the translations of each, best first."""

    file: RecordFile
    part: Part
    translations: Iterable[Translations]


class MakePairs(Protocol):
    """Makes a parallel corpus of translations; what it prints as (`str`) says all that decides how."""

    @property
    def references(self) -> Sequence[RecordFile] | None:
        """Files that it reads besides those that are translated."""

    def check(self, files: Files, scans: list[Scan]) -> None:
        """Makes sure, before anything is translated, that pairs can be made of these files."""

    def __call__(self, pieces: Iterable[Piece]) -> Iterable[tuple[str, str]]:
        """Returns the source and the target of each pair of a file."""


def check_columns(files: Files, target_column: str) -> None:
    """Makes sure that translations are not written over a column that is there."""
    for file in files:
        if target_column in {name.partition(".")[0] for name in file.columns}:
            raise ValueError(
                f"{file.path} has a column {target_column!r} already: give another name for the translations "
                "(--target_column)."
            )


def check_records(files: Files, added_column: str | None) -> None:
    """Reads every source, so that what is damaged is found before anything is translated.

    With an `added_column` records are kept: then no object in lines of JSON, which need not have the same keys, may
    have it, and no line of a table more columns than the first.
    """
    for file in files:
        if added_column is None or file.kind not in ("jsonl", "tsv"):
            deque(file.texts(EVERYTHING), maxlen=0)
            continue
        for number, line in enumerate(file.lines(EVERYTHING), start=file.first_record + 1):
            file.text_of(line, number)
            where = f"{file.path}, line {number}"
            if file.kind == "tsv":
                if line and (count := line.count("\t") + 1) > file.width:
                    raise ValueError(f"{where}: {count} columns, but {file.width} in the first line.")
            elif added_column in line and added_column in file.read_object(line, number):
                raise ValueError(
                    f"{where}: there is a key {added_column!r} already: give another name for the translations "
                    "(--target_column)."
                )


def check_alike(files: Files, kind: str) -> None:
    """Makes sure that files, whose records are kept in one table of their kind, have the same columns."""
    if {file.kind for file in files} != {kind} or kind not in ("tsv", "parquet"):
        return
    filled = ((file, columns) for file in files if (columns := _describe_columns(file)) is not None)
    first, wanted = next(filled, (None, None))
    for file, columns in filled:
        if first is not None and columns != wanted:
            raise ValueError(f"{file.path}: the columns are {columns}, but {wanted} in {first.path}.")


def _describe_columns(file: RecordFile) -> list[str] | None:
    """None for a file without records, whose columns say nothing."""
    if file.kind == "tsv":
        return None if next(file.lines(EVERYTHING), None) is None else file.header or [f"{file.width} without names"]
    with fsspec.open(file.path) as opened:
        parquet = pq.ParquetFile(opened)
        fields = parquet.schema_arrow
        found = [f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in fields]
        return found if parquet.metadata.num_rows else None


def _read_schema(file: RecordFile) -> Any:
    with fsspec.open(file.path) as opened:
        return pq.read_schema(opened)


def write_translations(
    path: Path,
    pieces: Iterable[Piece],
    *,
    files: Files,
    target_column: str,
    n_best: int | None,
    make_pairs: MakePairs | None = None,
) -> None:
    """Writes a file, whose suffix says its kind and compression.

    Where all `files` of sources have the same kind, their records are written as they are, and the translation added as
    the last column; else a table has the columns "source" and `target_column`, and text has the
    translation alone. With `n_best` there are so many lines for each source: its number, the score and the translation.
    With `make_pairs` a table has what that makes, in the columns "source" and "target".
    """
    if make_pairs is not None:
        pairs = iter(make_pairs(pieces))
        with open_table([path], ("source", "target")) as write_rows:
            while rows := list(islice(pairs, _ROWS)):
                write_rows(rows)
        return
    kind = find_kind(str(path))
    write = {"text": _write_text, "tsv": _write_tsv, "jsonl": _write_jsonl, "parquet": _write_parquet}[kind]
    with fsspec.open(str(path), "wb", compression=infer_compression(str(path))) as output:
        kept = files if {file.kind for file in files} == {kind} else []
        write(output, pieces, kept, target_column, n_best)


def _write_text(output: Any, pieces: Iterable[Piece], kept: Files, target_column: str, n_best: int | None) -> None:
    found = chain.from_iterable(piece.translations for piece in pieces)
    for number, translations in enumerate(found, start=1):
        output.write("".join(f"{line}\n" for line in format_lines(number, translations, n_best)).encode())


def _cell(text: str) -> str:
    return one_line(text).replace("\t", " ")


def encode_json(record: dict[str, Any]) -> bytes:
    """A line of JSON in UTF-8; what UTF-8 cannot hold, half of a surrogate pair, keeps the line in ASCII."""
    try:
        return (json.dumps(record, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(record) + "\n").encode()


def _write_tsv(output: Any, pieces: Iterable[Piece], kept: Files, target_column: str, n_best: int | None) -> None:
    header = next((file.header for file in kept if file.header), None) if kept else ["source"]
    if header:
        output.write(("\t".join([*header, target_column]) + "\n").encode())
    for file, part, translations in pieces:
        records = file.lines(part) if kept else map(_cell, file.texts(part))
        for record, (best, *_) in zip(records, translations, strict=True):
            # A line that has too few columns must not have the translation in one of them.
            missing = "\t" * (file.width - 1 - record.count("\t")) if kept else ""
            line = f"{record}{missing}\t{_cell(best.text)}\n" if record or not kept else "\n"
            output.write(line.encode())


def _write_jsonl(output: Any, pieces: Iterable[Piece], kept: Files, target_column: str, n_best: int | None) -> None:
    for file, part, translations in pieces:
        number = part.first
        for record, (best, *_) in zip(file.lines(part) if kept else file.texts(part), translations, strict=True):
            number += 1
            if kept and not record.strip():
                output.write(b"\n")
                continue
            fields = file.read_object(record, number) if kept else {"source": record}
            output.write(encode_json(fields | {target_column: best.text}))


def _write_parquet(output: Any, pieces: Iterable[Piece], kept: Files, target_column: str, n_best: int | None) -> None:
    writer: Any = None
    for file, part, translations in pieces:
        texts = pa.array([best.text for best, *_ in translations], pa.string())
        if kept:
            table = pa.concat_tables(file.batches(part))
        else:
            table = pa.table({"source": pa.array(list(file.texts(part)), pa.string())})
        table = table.append_column(target_column, texts)
        writer = writer or pq.ParquetWriter(output, table.schema)
        writer.write_table(table)
    if writer is None:
        schema = _read_schema(kept[0]) if kept else pa.schema([("source", pa.string())])
        pq.write_table(schema.append(pa.field(target_column, pa.string())).empty_table(), output)
    else:
        writer.close()


@contextmanager
def open_table(paths: Sequence[Path], columns: Sequence[str]) -> Iterator[Callable[[Sequence[tuple[str, ...]]], None]]:
    """Opens a table of texts, or a text file for each column; yields a function that writes rows of them."""
    kind = find_kind(str(paths[0]))
    with ExitStack() as stack:
        files: Any = [
            stack.enter_context(fsspec.open(str(path), "wb", compression=infer_compression(str(path))))
            for path in paths
        ]
        if kind == "parquet":
            schema = pa.schema([(name, pa.string()) for name in columns])
            table = stack.enter_context(pq.ParquetWriter(files[0], schema))

        def write(rows: Sequence[tuple[str, ...]]) -> None:
            if kind == "parquet":
                texts = [[row[index] for row in rows] for index in range(len(columns))]
                table.write_table(pa.table(texts, schema=schema))
            elif kind == "jsonl":
                for row in rows:
                    files[0].write(encode_json(dict(zip(columns, row, strict=True))))
            elif kind == "tsv":
                lines = ("\t".join(map(_cell, row)) for row in rows)
                files[0].write("".join(f"{line}\n" for line in lines).encode())
            else:
                for index, file in enumerate(files):
                    file.write("".join(f"{one_line(row[index])}\n" for row in rows).encode())

        if kind == "tsv":
            write([tuple(columns)])
        yield write
