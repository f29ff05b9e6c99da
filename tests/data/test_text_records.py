"""Files of records: every part by itself has what the whole file has there."""

import gzip
import lzma
import os
from itertools import chain
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vanilla_transformer.data import records
from vanilla_transformer.data.lines import read_lines
from vanilla_transformer.data.records import EVERYTHING, RecordFile, find_files, find_kind

characters = st.characters(codec="utf-8", exclude_characters="\n\r\ufeff")
lines_of_text = st.lists(st.text(characters, max_size=5), max_size=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records")


def check_parts(file: RecordFile, expected: list[str], size: int) -> None:
    scan = file.scan()
    parts = file.divide(scan, size, file=7)
    assert scan.count == len(expected) == sum(part.count for part in parts)
    assert [list(file.texts(part)) for part in parts] == [
        expected[part.first : part.first + part.count] for part in parts
    ]
    assert list(chain.from_iterable(map(file.texts, parts))) == expected == list(file.texts(EVERYTHING))
    assert {part.file for part in parts} <= {7}


@settings(max_examples=60)
@given(
    lines=lines_of_text,
    size=st.integers(1, 9),
    most_starts=st.integers(2, 40),
    read_bytes=st.integers(1, 30),
    ends=st.booleans(),
    end=st.sampled_from(["\n", "\r\n"]),
    kind=st.sampled_from([".txt", ".txt.gz", ".tsv"]),
)
def test_parts_of_lines(
    folder: Path, lines: list[str], size: int, most_starts: int, read_bytes: int, ends: bool, end: str, kind: str
) -> None:
    lines = [line.replace("\t", " ") for line in lines]
    if lines and not ends:
        lines[-1] += "x"  # an empty line without an end is none
    written = ["no\tsource", *(f"1\t{line}" for line in lines)] if kind == ".tsv" else lines
    content = (end.join(written) + (end if ends and written else "")).encode()
    path = folder / f"file{kind}"
    path.write_bytes(gzip.compress(content) if kind.endswith(".gz") else content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_MOST_STARTS", most_starts)
        patch.setattr(records, "_READ_BYTES", read_bytes)
        check_parts(RecordFile(str(path)), lines, size)


@settings(max_examples=30)
@given(lines=lines_of_text, size=st.integers(1, 9), group=st.integers(1, 9), read_rows=st.integers(1, 9))
def test_parts_of_parquet(folder: Path, lines: list[str], size: int, group: int, read_rows: int) -> None:
    path = folder / "file.parquet"
    pq.write_table(pa.table({"source": pa.array(lines, pa.string())}), path, row_group_size=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_READ_ROWS", read_rows)
        check_parts(RecordFile(str(path)), lines, size)


def test_the_kind_is_the_suffix() -> None:
    assert find_kind("s3://bucket/a.b.TSV.gz") == "tsv"
    assert find_kind("a.en") == find_kind("a.csv.en.gz") == "text"
    with pytest.raises(
        ValueError, match=r"a.CSV.gz: .csv is neither read nor written here; use .tsv, .jsonl or .parquet"
    ):
        find_kind("a.CSV.gz")


@pytest.mark.parametrize("name", ["a.zst", "a.jsonl.LZ4"])
def test_what_cannot_be_decompressed_is_no_text(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"a\n")
    message = rf"{name}: {Path(name).suffix.lower()} is neither read nor written here; compress it as .gz, .bz2 or .xz"
    with pytest.raises(ValueError, match=message):
        find_kind(str(tmp_path / name))
    with pytest.raises(ValueError, match=message):
        list(read_lines(tmp_path / name))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is neither a file nor a folder; a pipe can be read as standard input"):
        find_files(str(tmp_path / "pipe"))


def test_a_file_of_many_lines(folder: Path) -> None:
    path = folder / "many.txt"
    path.write_text("".join(f"{number}\n" for number in range(100_000)))
    scan = RecordFile(str(path)).scan()
    assert scan.count == 100_000
    assert 10_000 <= len(scan.starts) <= 20_000
    content = path.read_bytes()
    assert [int(content[start:].split(b"\n", 1)[0]) for start in scan.starts[:-1:500]] == list(
        range(0, 100_000, 500 * scan.step)
    )


def test_damaged_xz_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tsv.xz").write_bytes(lzma.compress(b"source\tb\n")[:20] + bytes(20))
    with pytest.raises(ValueError, match=r"a\.tsv\.xz, after line 0: truncated or damaged compressed file"):
        _ = RecordFile(str(tmp_path / "a.tsv.xz")).columns


def test_two_columns_of_one_name(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["source", "source"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="several columns are called 'source', and only one can be read"):
        RecordFile(str(tmp_path / "a.parquet")).scan()


def test_an_empty_table_has_no_head(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").touch()
    file = RecordFile(str(tmp_path / "a.tsv"), "en")
    assert (file.header, file.scan().count, list(file.texts(EVERYTHING))) == (None, 0, [])
