"""Corpora that are cleaned from file to file: all forms, sudden ends, many processes, and what is refused."""

import csv
import gzip
import itertools
import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from datasets import Dataset
from many_processes import Launcher, launcher
from translating_programs import run_until

from vanilla_transformer.data import readers
from vanilla_transformer.data.cleaning import clean_pairs, make_rules
from vanilla_transformer.data.corpora import load_parallel_corpus
from vanilla_transformer.data.records import find_files
from vanilla_transformer.inference import files, parts
from vanilla_transformer.inference.cleaning import Corpus, clean_corpus

CONFIG: list[dict[str, Any]] = [
    {"WhitespaceNormalizer": {}},
    {"LengthFilter": {"max_length": 3}},
    {"RemoveDuplicates": {"lowercase": True}},
]
PAIRS = [
    ("a b", "x  y"),
    ("c", "1 2 3 4"),
    ("A b", "x y"),
    ("Ä", "ß"),
    *((f"a {number}", f"x {number}") for number in range(17)),
    ("", "y"),
    ("ä", "SS"),
    ("a 3", "x 3"),
]
# Written down by hand: which rule removes what.
KEPT = [("a b", "x y"), ("Ä", "ß"), *((f"a {number}", f"x {number}") for number in range(17)), ("ä", "SS")]
REMOVED = [
    ("c", "1 2 3 4", "LengthFilter"),
    ("A b", "x y", "RemoveDuplicates"),
    ("", "y", "LengthFilter"),
    ("a 3", "x 3", "RemoveDuplicates"),
]


def write_texts(folder: Path) -> list[Path]:
    for name, side in (("s.txt", 0), ("t.txt", 1)):
        (folder / name).write_text("".join(f"{pair[side]}\n" for pair in PAIRS), encoding="utf-8")
    return [folder / "s.txt", folder / "t.txt"]


def clean(inputs: list[Path], outputs: list[Path], **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"files": inputs, "window_size": 5, "progress": False}
    return clean_corpus(make_rules(CONFIG), outputs, **defaults | options)


def read(paths: list[Path]) -> list[tuple[str, str]]:
    corpus = load_parallel_corpus(files=paths)
    return list(zip(corpus["source"], corpus["target"], strict=True))


def check_output(folder: Path) -> None:
    assert read([folder / "s.txt", folder / "t.txt"]) == KEPT
    with open(folder / "removed.tsv", encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert rows == [["source", "target", "rule"], *map(list, REMOVED)]
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert [report[name] for name in ("pairs", "kept", "removed")] == [len(PAIRS), len(KEPT), len(REMOVED)]
    counts = [tuple(rule[name] for name in ("name", "seen", "removed", "changed")) for rule in report["rules"]]
    total = len(PAIRS)
    assert counts == [
        ("WhitespaceNormalizer", total, 0, 1),
        ("LengthFilter", total, 2, 0),
        ("RemoveDuplicates", total - 2, 2, 0),
    ]
    assert report["rules"][0]["examples"] == [{"source": "a b", "target": "x  y"}]
    assert report["rules"][1]["examples"] == [{"source": "c", "target": "1 2 3 4"}, {"source": "", "target": "y"}]
    assert report["rules"][1]["parameters"]["max_length"] == [3, 3]


def outputs_of(folder: Path) -> tuple[list[Path], dict[str, Any]]:
    names = {"removed_file": folder / "removed.tsv", "report_file": folder / "report.json"}
    return [folder / "s.txt", folder / "t.txt"], names


def test_what_stays_what_not_and_why(tmp_path: Path) -> None:
    outputs, options = outputs_of(tmp_path / "out")
    report = clean(write_texts(tmp_path), outputs, **options)
    check_output(tmp_path / "out")
    assert report == json.loads((tmp_path / "out" / "report.json").read_text(encoding="utf-8"))
    assert clean_pairs(make_rules(CONFIG), PAIRS)[0] == KEPT
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"s.txt", "t.txt", "removed.tsv", "report.json"}


def make_csv(path: Path) -> dict[str, Any]:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("id", "en", "de"), *((number, *pair) for number, pair in enumerate(PAIRS))])
    return {"files": [path], "source_lang": "en", "target_lang": "de"}


def make_gzip(path: Path) -> dict[str, Any]:
    found = [path.with_name(f"{path.name}.{side}.gz") for side in (0, 1)]
    for side, name in enumerate(found):
        name.write_bytes(gzip.compress("".join(f"{pair[side]}\n" for pair in PAIRS).encode()))
    return {"files": found}


def make_jsonl(path: Path) -> dict[str, Any]:
    records = [{"translation": {"en": source or None, "de": target}} for source, target in PAIRS]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return {"files": [path], "source_lang": "en", "target_lang": "de"}


def make_parquet(path: Path) -> dict[str, Any]:
    path.mkdir()
    for number, rows in enumerate((PAIRS[:9], PAIRS[9:])):
        table = pa.table({"source": [row[0] for row in rows], "target": [row[1] for row in rows]})
        pq.write_table(table, path / f"{number}.parquet", row_group_size=4)
    return {"files": [path]}


def make_dataset(path: Path) -> dict[str, Any]:
    Dataset.from_dict({"en": [row[0] for row in PAIRS], "de": [row[1] for row in PAIRS]}).save_to_disk(path)
    return {"files": None, "dataset_name": str(path), "source_column": "en", "target_column": "de"}


@pytest.mark.parametrize(
    ("make", "name", "output"),
    [
        (make_csv, "in.csv", "out.jsonl.gz"),
        (make_gzip, "in", "out.tsv"),
        (make_jsonl, "in.jsonl", "out.parquet"),
        (make_parquet, "in", "out.tsv.gz"),
        (make_dataset, "in", "out.jsonl"),
    ],
)
def test_forms_of_corpora(make: Callable[[Path], dict[str, Any]], name: str, output: str, tmp_path: Path) -> None:
    options = make(tmp_path / name)
    report = clean([], [tmp_path / output], **options, removed_file=tmp_path / "removed.parquet")
    assert read([tmp_path / output]) == KEPT
    rows = pq.read_table(tmp_path / "removed.parquet").to_pylist()
    assert [tuple(row.values()) for row in rows] == REMOVED
    assert json.loads((tmp_path / f"{output}.report.json").read_text(encoding="utf-8")) == report


def test_texts_that_no_line_can_hold(tmp_path: Path) -> None:
    records = [{"source": "a\tb\nc", "target": "half \ud83d"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    clean_corpus([], [tmp_path / "out.tsv"], files=[tmp_path / "in.jsonl"], progress=False)
    assert read([tmp_path / "out.tsv"]) == [("a b c", "half \ufffd")]


def read_json_lines(path: Path) -> list[tuple[str, str]]:
    return [(record["source"], record["target"]) for record in map(json.loads, path.read_text().splitlines())]


@pytest.mark.parametrize(
    ("name", "content", "line", "expected"),
    [
        ("in.tsv", b"a\tx\nthree\tcells\there\nb\ty\n", 2, ("three cells here", "")),
        ("in.tsv", b"a\tx\ncaf\xe9\tkaffee\nb\ty\n", 2, ("caf\ufffd", "kaffee")),
        ("in.tsv", b"caf\xe9\tkaffee\na\tx\nb\ty\n", 1, ("caf\ufffd", "kaffee")),
        ("in.jsonl", b'{"en": "a\n{"en": "a", "de": "x"}\n{"en": "b", "de": "y"}\n', 1, ('{"en": "a', "")),
        ("in.csv", b'a,x\none cell\nb,"y ""quote"\n', 2, ("one cell", "")),
        ("in.csv", b'a,x\n"b,y\nc,z\n', 2, ('"b,y', "")),
        ("in.csv", b'a,x\nb,"y\nc,"z"\n', 2, ("b", "y")),
        ("in.csv", b"a,x\nb\rc,y\nd,z\n", 2, ("b c,y", "")),
        ("in.jsonl", b'{"en": "a", "de": "x"}\n{"en": "b"}\n{"en": "b", "de": "y"}\n', 2, ("b", "")),
        ("in.jsonl", b'{"en": "a", "de": "x"}\n{"en": "b", "de": "y"}\n{"en": "a', 3, ('{"en": "a', "")),
        ("in.jsonl", b'{"en": "a", "de": "x"}\n{"en": 3, "de": "d"}\n{"en": "b", "de": "y"}\n', 2, ("3 d", "")),
    ],
)
def test_damaged_lines_are_left_to_the_rules(
    name: str, content: bytes, line: int, expected: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / name).write_bytes(content)
    options: dict[str, Any] = {"source_lang": "en", "target_lang": "de", "progress": False, "window_size": 1}
    clean_corpus([], [tmp_path / "out.jsonl"], files=[tmp_path / name], **options)
    found = read_json_lines(tmp_path / "out.jsonl")
    assert len(found) == 3
    assert tuple(" ".join(text.split()) for text in found[line - 1]) == expected
    assert len([record for record in caplog.records if f"{name}, line {line}" in record.message]) == 1
    with pytest.raises(ValueError, match=f"line {line}"):
        load_parallel_corpus(files=[tmp_path / name], source_lang="en", target_lang="de")


def test_a_quote_that_is_left_open_costs_no_other_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [f'sentence {number},"Satz, {number}"' for number in range(1000)]
    rows[3] = 'The screen has 12 inches,"Der Schirm'
    rows[500] = '"two\nlines",zwei'
    (tmp_path / "in.csv").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    report = clean_corpus([], [tmp_path / "out.jsonl"], files=[tmp_path / "in.csv"], progress=False)
    assert report["pairs"] == 1000
    found = read_json_lines(tmp_path / "out.jsonl")
    assert found[2:5] == [
        ("sentence 2", "Satz, 2"),
        ("The screen has 12 inches", "Der Schirm"),
        ("sentence 4", "Satz, 4"),
    ]
    assert found[500] == ("two\nlines", "zwei")
    assert [record.message for record in caplog.records if "in.csv, line 4" in record.message]


def test_cleaned_corpora_are_written_to_this_machine_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="local file system only"):
        clean_corpus([], ["memory://x/out.tsv"], files=write_texts(tmp_path), progress=False)


def test_bytes_that_are_not_utf8_in_aligned_files(tmp_path: Path) -> None:
    inputs = write_texts(tmp_path)
    inputs[1].write_bytes(b"".join(b"\xff" + line for line in inputs[1].read_bytes().splitlines(keepends=True)))
    clean_corpus([], [tmp_path / "out.jsonl"], files=inputs, progress=False)
    found = [target for _, target in read_json_lines(tmp_path / "out.jsonl")]
    assert found[:2] == ["\ufffd" + target for _, target in PAIRS[:2]]


def test_parts_that_follow_each_other_are_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    pairs = readers.AlignedLines.pairs

    def count(lines: readers.AlignedLines) -> Any:
        begun.append(lines.name)
        return pairs(lines)

    monkeypatch.setattr(readers.AlignedLines, "pairs", count)
    options = make_gzip(tmp_path / "in")
    corpus = Corpus(readers.divide_files(options["files"], readers.Columns(None, None, None, None)))
    contents = corpus.scan(progress=False)
    assert contents.total == len(PAIRS)
    begun.clear()
    parts = list(contents.divide(5))
    assert [pair for part in parts for pair in corpus.read(part)] == PAIRS
    assert len(begun) == 1
    assert corpus.read(parts[1]) == PAIRS[5:10]
    assert corpus.read(parts[3]) == PAIRS[15:20], "what others have taken is skipped"
    assert len(begun) == 2
    Path(options["files"][0]).write_bytes(gzip.compress(b"a\n"))
    Path(options["files"][1]).write_bytes(gzip.compress(b"x\n"))
    with pytest.raises(ValueError, match="has changed while it is in use"):
        corpus.read(parts[0])


# Sudden ends


def test_killed_at_any_change_of_the_files(tmp_path: Path) -> None:
    inputs = write_texts(tmp_path)
    for event in itertools.count(1):
        folder = tmp_path / f"out-{event}"
        outputs, options = outputs_of(folder)
        is_killed = run_until(event, folder, lambda: clean(inputs, outputs, **options))  # noqa: B023
        if is_killed:
            try:
                clean(inputs, outputs, **options)
            except FileExistsError:
                # The kill came at the very end, when nothing says any more whose output it is.
                assert all(path.exists() for path in outputs)
        check_output(folder)
        names = {"s.txt", "t.txt", "removed.tsv", "report.json"}
        assert {path.name for path in folder.iterdir()} - names <= {".s.txt.partial.lock"}
        if not is_killed:
            break
    assert event > 25


def test_finished_parts_are_not_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inputs, (outputs, options) = write_texts(tmp_path), outputs_of(tmp_path / "out")
    written: list[str] = []
    write_whole = parts.write_whole

    def write(path: Path, lines: Any, *, most: int = 99) -> None:
        if len(written) == most:
            raise KeyboardInterrupt
        written.append(path.name)
        write_whole(path, lines)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_whole", partial(write, most=2))
        with pytest.raises(KeyboardInterrupt):
            clean(inputs, outputs, **options)
    (folder,) = (path for path in (tmp_path / "out").iterdir() if ".parts-" in path.name)
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.jsonl")}
    for changed in ({"overwrite": False, "removed_file": None}, {"files": [inputs[1], inputs[0]]}):
        with pytest.raises(FileExistsError, match=r"was begun with other settings \((files|input)\)"):
            clean(inputs, outputs, **options | changed)
    rules = make_rules([*CONFIG, {"HtmlTagFilter": {}}])
    with pytest.raises(FileExistsError, match=r"other settings \(rules\)"):
        clean_corpus(rules, outputs, files=inputs, progress=False, **options)
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("*.jsonl")} == before
    written.clear()
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_whole", write)
        with caplog.at_level(logging.INFO, logger="vanilla_transformer"):
            clean(inputs, outputs, **options)
    assert any(f"10 of {len(PAIRS)} pairs are done, going on" in message for message in caplog.messages)
    assert not before.keys() & set(written)
    check_output(tmp_path / "out")


# Many processes


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with launcher(tmp_path_factory.mktemp("logs"), module="translating_programs") as instance:
        yield instance


@pytest.mark.parametrize("kill", [None, (1, 2), (0, 9)])
def test_many_processes_clean_as_one(group: Launcher, tmp_path: Path, kill: tuple[int, int] | None) -> None:
    inputs, folder = write_texts(tmp_path), tmp_path / "out"
    (tmp_path / "rules.yaml").write_text(json.dumps(CONFIG), encoding="utf-8")
    words = [
        "--config",
        tmp_path / "rules.yaml",
        "--files",
        *inputs,
        "--output_files",
        folder / "s.txt",
        folder / "t.txt",
    ]
    words += ["--removed_file", folder / "removed.tsv", "--report_file", folder / "report.json", "--window_size", "3"]
    program: dict[str, Any] = {"command": "clean", "arguments": [*map(str, words), "--disable_tqdm"]}
    if kill is not None:
        group.run("run", program | {"kill": (*kill, str(folder))}, ends=(0, 1))
    if kill is None or not (folder / "report.json").exists():
        said = group.run("run", program)
        assert said.count(f"{len(KEPT)} of {len(PAIRS)} pairs stay") == 1
    check_output(folder)


# What is refused


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    inputs, (outputs, options) = write_texts(tmp_path), outputs_of(tmp_path / "out")
    (tmp_path / "out").mkdir()
    for path in (*outputs, *options.values()):
        path.write_text("precious", encoding="utf-8")
        with pytest.raises(FileExistsError, match=f"{path.name} exists"):
            clean(inputs, outputs, **options)
        assert path.read_text(encoding="utf-8") == "precious"
        if path != options["report_file"]:
            path.unlink()
    clean(inputs, outputs, **options, overwrite=True)
    check_output(tmp_path / "out")


@pytest.mark.parametrize(
    ("outputs", "options", "message"),
    [
        (["out.txt"], {}, "give two text files"),
        (["a.tsv", "b.tsv"], {}, "give two text files"),
        (["a", "b", "c"], {}, "give two text files"),
        (["a.tsv"], {"removed_file": "removed.txt"}, r"removed pairs are written to a \.tsv"),
        (["a", "a"], {}, "need names of their own"),
        (["s.txt", "b.txt"], {}, r"s\.txt: the output file is the input file"),
        (["a.tsv"], {"window_size": 0}, "window_size is 0"),
    ],
)
def test_outputs_that_cannot_be_written_are_refused(
    outputs: list[str], options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = write_texts(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        clean(inputs, [Path(name) for name in outputs], **options)
    assert {path.name for path in tmp_path.iterdir()} == {"s.txt", "t.txt"}


def test_what_is_compared_is_read_like_the_corpus_and_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "in.tsv").write_text("en\tde\na\tb\nc\td\n")
    (tmp_path / "test.tsv").write_text("en\tde\nc\td\n")
    options: dict[str, Any] = {"files": [tmp_path / "in.tsv"], "progress": False}
    rules = [{"RemoveDuplicates": {"overlap": [str(tmp_path / "test.tsv")]}}]
    for kind in ("lang", "column"):
        options |= {f"source_{kind}": "en", f"target_{kind}": "de", "overwrite": True}
        clean_corpus(make_rules(rules), [tmp_path / "out.tsv"], **options)
        assert read([tmp_path / "out.tsv"]) == [("a", "b")]
    with pytest.raises(ValueError, match=r"test.tsv: the output file is read by RemoveDuplicates"):
        clean_corpus(make_rules(rules), [tmp_path / "test.tsv"], **options)


def test_a_folder_of_cleaned_corpora_is_read_without_the_reports(tmp_path: Path) -> None:
    inputs = write_texts(tmp_path)
    for number in (1, 2):
        clean(inputs, [tmp_path / "out" / f"{number}.tsv"])
    (tmp_path / "out" / "1.tsv.report.json").rename(tmp_path / "out" / "other.report.json")
    expected = [*read([tmp_path / "out" / "1.tsv"])] * 2
    assert len({path.suffix for path in (tmp_path / "out").iterdir()}) == 2
    for entry in (tmp_path / "out", tmp_path / "out" / "*"):
        assert read([entry]) == expected
        assert [Path(name).name for name in find_files(str(entry))] == ["1.tsv", "2.tsv"]


def test_a_misaligned_corpus_is_refused(tmp_path: Path) -> None:
    inputs = write_texts(tmp_path)
    inputs[1].write_text("x\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has 24 lines, but"):
        clean(inputs, [tmp_path / "out.tsv"])
