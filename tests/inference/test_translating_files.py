"""Files of translations: their kinds, what is taken up after an interruption, and what is refused."""

import bz2
import copy
import csv
import gzip
import io
import itertools
import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import torch
from tiny_seq2seq import MAX_TOKENS, make_model
from tiny_translations import (
    MODEL,
    TOKENIZER,
    expected_translation,
    random_sentences,
    run_interrupted,
    translate_alone,
    write_sources,
)
from tokenizers.normalizers import Lowercase
from tqdm import tqdm  # type: ignore[import-untyped]
from translating_programs import run_until

from vanilla_transformer.data.records import Part
from vanilla_transformer.files import locked
from vanilla_transformer.inference import files
from vanilla_transformer.inference.files import translate_file
from vanilla_transformer.inference.parts import Work
from vanilla_transformer.inference.synthetic import Distillation, find_references
from vanilla_transformer.inference.translate import translate_lines

SETTINGS: dict[str, Any] = {"window_size": 5, "batch_size": 2, "progress": False}
SENTENCES = ["w1 w2", "", *random_sentences(9)]
TRANSLATIONS = [translate_alone(sentence) for sentence in SENTENCES]
IDS = range(100, 100 + len(SENTENCES))


@pytest.fixture
def source_file(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "source.txt")


def translate(source: Path | str, target: Path | str, **options: Any) -> int:
    return translate_file(MODEL, TOKENIZER, source, target, **SETTINGS | options)


def folders_of_parts(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if ".parts-" in path.name]


# Resuming


def test_an_interrupted_file_is_resumed(source_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    output = source_file.with_name("output.txt")
    run_interrupted(2, monkeypatch, translate, source_file, output)
    assert not output.exists(), "an unfinished translation must not look finished"
    (folder,) = folders_of_parts(source_file.parent)
    # What is kept must not be made again: mark it. Of the next part a half was written.
    first = folder / "000000.jsonl"
    kept = first.read_text(encoding="utf-8").splitlines()
    assert len(kept) == 5
    first.write_text("\n".join(['[["kept"]]', *kept[1:]]) + "\n", encoding="utf-8")
    (folder / ".000002.jsonl-host-1").write_text('[["half a li', encoding="utf-8")
    with caplog.at_level(logging.INFO, logger="vanilla_transformer"):
        # Parts are those of the plan; batches may be others.
        assert translate(source_file, output, window_size=3, batch_size=4) == 23
    assert f"{output}: 10 of 23 lines are done, going on" in caplog.messages
    assert f"source line 23 of {source_file}: truncated to {MAX_TOKENS} of its 31 tokens" in caplog.messages
    expected = expected_translation(source_file).splitlines()
    assert output.read_text(encoding="utf-8").splitlines() == ["kept", *expected[1:]]
    assert sorted(path.name for path in source_file.parent.iterdir()) == ["output.txt", "source.txt"]


def test_a_run_that_replaces_a_file_is_resumed_too(source_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = source_file.with_name("output.txt")
    output.write_text("precious\n", encoding="utf-8")
    run_interrupted(2, monkeypatch, translate, source_file, output, overwrite=True)
    (folder,) = folders_of_parts(source_file.parent)
    kept = {path: path.stat().st_mtime_ns for path in folder.glob("*.jsonl")}
    run_interrupted(1, monkeypatch, translate, source_file, output, overwrite=True)
    assert len(kept) == 2
    assert kept.items() < {path: path.stat().st_mtime_ns for path in folder.glob("*.jsonl")}.items()
    assert output.read_text(encoding="utf-8") == "precious\n"
    translate(source_file, output, overwrite=True)
    assert output.read_text(encoding="utf-8") == expected_translation(source_file)


def test_an_interrupted_n_best_file_is_resumed(source_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = source_file.with_name("output.txt")
    options: dict[str, Any] = {"n_best": 3, "num_beams": 3, "max_new_tokens": 4}
    run_interrupted(1, monkeypatch, translate, source_file, output, **options)
    assert translate(source_file, output, **options) == 23
    with open(source_file, encoding="utf-8") as file:
        expected = list(translate_lines(MODEL, TOKENIZER, file, progress=False, **options))
    found = [line.split("\t") for line in output.read_text(encoding="utf-8").splitlines()]
    assert [number for number, _, _ in found] == [str(number) for number in range(1, 24) for _ in range(3)]
    for (_, score, text), line in zip(found, expected, strict=True):
        assert text == line.split("\t")[2]
        assert float(score) == pytest.approx(float(line.split("\t")[1]), abs=2e-4)


def test_parts_of_other_settings_are_not_taken_up(source_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = source_file.with_name("output.txt")
    run_interrupted(1, monkeypatch, translate, source_file, output)
    (folder,) = folders_of_parts(source_file.parent)
    content = {path: path.read_bytes() for path in folder.iterdir()}

    def refused(changed: str, model: Any = MODEL, **options: Any) -> None:
        with pytest.raises(FileExistsError, match=rf"other settings \({changed}\)"):
            translate_file(model, TOKENIZER, source_file, output, **SETTINGS | options)
        assert content == {path: path.read_bytes() for path in folder.iterdir()}, "nothing may be lost"

    refused("options", num_beams=2)
    refused("model", model=make_model(seed=1))
    text = source_file.read_text(encoding="utf-8")
    source_file.write_text("w9" + text[2:], encoding="utf-8")
    refused("input")
    translate(source_file, output, overwrite=True)
    assert output.read_text(encoding="utf-8") == expected_translation(source_file)
    assert not folders_of_parts(source_file.parent)


def test_a_run_that_has_no_translation_yet_holds_back_none_with_other_settings(source_file: Path) -> None:
    output = source_file.with_name("output.txt")
    with pytest.raises(ValueError, match="temperature"):  # found by generate(), when the parts are planned
        translate(source_file, output, do_sample=True, temperature=-1.0)
    assert folders_of_parts(source_file.parent)
    translate(source_file, output)
    assert output.read_text(encoding="utf-8") == expected_translation(source_file)
    assert not folders_of_parts(source_file.parent)


def test_what_a_model_or_tokenizer_does_with_the_same_weights_is_another_setting(
    source_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = source_file.with_name("output.txt")
    run_interrupted(1, monkeypatch, translate, source_file, output)
    model, shorter, spelling = copy.deepcopy(MODEL), copy.deepcopy(TOKENIZER), copy.deepcopy(TOKENIZER)
    model.config.activation_function = "relu"
    shorter.model_max_length = 6
    spelling.backend_tokenizer.normalizer = Lowercase()
    others: dict[str, Any] = {"architecture": (model, TOKENIZER), "limit": (MODEL, shorter)}
    others["vocabulary"] = (MODEL, spelling)
    for changed, (own, tokenizer) in others.items():
        with pytest.raises(FileExistsError, match=rf"other settings \({changed}\)"):
            translate_file(own, tokenizer, source_file, output, **SETTINGS)
    translate(source_file, output)
    assert output.read_text(encoding="utf-8") == expected_translation(source_file)


def test_a_run_goes_on_with_the_input_that_is_named_now(
    tmp_path: Path, source_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same text may have another name, and the name another text, as that of a file has in another folder."""
    output = tmp_path / "output.txt"
    monkeypatch.chdir(tmp_path)
    run_interrupted(1, monkeypatch, translate, source_file.name, output)
    moved = source_file.rename("moved.txt")
    source_file.write_text("w7\n" * 23, encoding="utf-8")
    translate(moved, output)
    assert output.read_text(encoding="utf-8") == expected_translation(moved)


def test_other_precision_is_another_setting(source_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, half = source_file.with_name("output.txt"), copy.deepcopy(MODEL).to(torch.bfloat16)
    options = {**SETTINGS, "window_size": 5}
    run_interrupted(1, monkeypatch, lambda: translate_file(half, TOKENIZER, source_file, output, **options))
    with pytest.raises(FileExistsError, match=r"other settings \(dtype\)"):
        translate_file(copy.deepcopy(half).float(), TOKENIZER, source_file, output, **options)


def test_the_input_is_never_the_output_however_it_is_spelled(source_file: Path) -> None:
    folder, before = source_file.parent, source_file.read_bytes()
    (folder / "link").symlink_to(folder)
    (folder / "x").mkdir()
    for name in (folder / "link" / source_file.name, folder / "x" / ".." / source_file.name):
        for pair in ((name, source_file), (source_file, name)):
            with pytest.raises(ValueError, match="the output file is the input file"):
                translate(*pair, overwrite=True)
    assert source_file.read_bytes() == before


def test_folders_of_others_stay(source_file: Path) -> None:
    mine = source_file.with_name("output.txt.parts-mine")
    mine.mkdir()
    (mine / "thesis.txt").write_text("important")
    translate(source_file, source_file.with_name("output.txt"))
    assert (mine / "thesis.txt").read_text() == "important"


def test_outputs_of_one_name_share_a_folder_for_parts(source_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = source_file.parent
    outputs = [folder / name / "output.txt" for name in ("one", "two")]
    options: dict[str, Any] = {"parts_dir": folder / "parts"}
    run_interrupted(2, monkeypatch, translate, source_file, outputs[0], **options)
    translate(source_file, outputs[1], num_beams=2, **options)
    (folder / "link").symlink_to(folder)
    outputs[0] = folder / "link" / "one" / "output.txt"  # another name of the same
    run_interrupted(2, monkeypatch, translate, source_file, outputs[0], **options)
    assert len(folders_of_parts(folder / "parts")) == 1
    assert translate(source_file, outputs[0], **options) == 23
    assert outputs[0].read_text(encoding="utf-8") == expected_translation(source_file)


def test_a_key_that_holds_something_is_not_replaced(tmp_path: Path) -> None:
    records = '{"source": "w1"}\n{"source": "w2", "translation": "by a person"}\n'
    (tmp_path / "in.jsonl").write_text(records, encoding="utf-8")
    with pytest.raises(ValueError, match=r"in.jsonl, line 2: there is a key 'translation' already: .*--target_column"):
        translate(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    translate(tmp_path / "in.jsonl", tmp_path / "out.jsonl", target_column="machine")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows[1] == {"source": "w2", "translation": "by a person", "machine": translate_alone("w2")}


def test_short_and_empty_lines_of_a_table_keep_their_columns(tmp_path: Path) -> None:
    (tmp_path / "in.tsv").write_text("source\tnote\nw1\nw2\tn\n\t\n\n", encoding="utf-8")
    translate(tmp_path / "in.tsv", tmp_path / "out.tsv")
    lines = (tmp_path / "out.tsv").read_text().split("\n")
    expected = ["source\tnote\ttranslation", f"w1\t\t{translate_alone('w1')}", f"w2\tn\t{translate_alone('w2')}"]
    assert lines == [*expected, "\t\t", "", ""]


def test_lines_of_a_table_without_names_keep_their_columns(tmp_path: Path) -> None:
    (tmp_path / "in.tsv").write_text("\nw1\tv1\nw2\nw3\tv3\n")
    translate(tmp_path / "in.tsv", tmp_path / "out.tsv")
    found = [translate_alone(word) for word in ("w1", "w2", "w3")]
    expected = f"\nw1\tv1\t{found[0]}\nw2\t\t{found[1]}\nw3\tv3\t{found[2]}\n"
    assert (tmp_path / "out.tsv").read_text() == expected
    (tmp_path / "long.tsv").write_text("w1\tv1\nw2\tv2\tnote\n")
    with pytest.raises(ValueError, match=r"long.tsv, line 2: 3 columns, but 2 in the first line"):
        translate(tmp_path / "long.tsv", tmp_path / "long-out.tsv")
    (tmp_path / "both").mkdir()
    for name, text in (("1.tsv", "w1\tv1\n"), ("2.tsv", "w1\n")):
        (tmp_path / "both" / name).write_text(text)
    with pytest.raises(ValueError, match=r"2.tsv: the columns are \['1 without names'\], but \['2 without names'\]"):
        translate(tmp_path / "both", tmp_path / "both.tsv")


def test_files_that_do_not_fit_together_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.setattr(MODEL, "generate", None)
    for number, header in enumerate(("source\tid", "id\tsource")):
        (tmp_path / "in" / f"{number}.tsv").write_text(f"{header}\nw1\tw2\n")
    with pytest.raises(ValueError, match=r"1.tsv: the columns are \['id', 'source'\], but \['source', 'id'\] in"):
        translate(tmp_path / "in", tmp_path / "out.tsv")
    (tmp_path / "tables").mkdir()
    for number, value in enumerate((1, 1.5)):
        pq.write_table(pa.table({"source": ["w1"], "id": [value]}), tmp_path / "tables" / f"{number}.parquet")
    with pytest.raises(ValueError, match=r"1.parquet: the columns are .*'id: double'"):
        translate(tmp_path / "tables", tmp_path / "out.parquet")
    schema = pa.schema([pa.field("source", pa.string()), pa.field("id", pa.int64(), nullable=False)])
    pq.write_table(pa.table({"source": ["w1"], "id": [1]}, schema=schema), tmp_path / "tables" / "1.parquet")
    with pytest.raises(ValueError, match=r"1.parquet: the columns are .*'id: int64 not null'"):
        translate(tmp_path / "tables", tmp_path / "out.parquet")
    (tmp_path / "long.tsv").write_text("id\tsource\n1\tw1\n2\tw2\tw3\n")
    with pytest.raises(ValueError, match=r"long.tsv, line 3: 3 columns, but 2 in the first line"):
        translate(tmp_path / "long.tsv", tmp_path / "out.tsv")


def test_empty_files_among_tables_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, text in enumerate(("", "source\tid\nw1\t7\n", "")):
        (tmp_path / "in" / f"{number}.tsv").write_text(text)
    translate(tmp_path / "in", tmp_path / "out.tsv")
    expected = f"source\tid\ttranslation\nw1\t7\t{translate_alone('w1')}\n"
    assert (tmp_path / "out.tsv").read_text() == expected
    (tmp_path / "tables").mkdir()
    for number, column in enumerate((pa.array([], pa.null()), pa.array(["w1"]))):
        pq.write_table(pa.table({"source": column}), tmp_path / "tables" / f"{number}.parquet")
    assert translate(tmp_path / "tables", tmp_path / "out.parquet") == 1


def test_tables_without_records_keep_their_columns(tmp_path: Path) -> None:
    (tmp_path / "in.tsv").write_text("source\tid\n")
    translate(tmp_path / "in.tsv", tmp_path / "out.tsv")
    assert (tmp_path / "out.tsv").read_text() == "source\tid\ttranslation\n"
    empty = pa.table({"id": pa.array([], pa.int64()), "source": pa.array([], pa.string())})
    pq.write_table(empty, tmp_path / "in.parquet")
    translate(tmp_path / "in.parquet", tmp_path / "out.parquet")
    assert pq.read_schema(tmp_path / "out.parquet").names == ["id", "source", "translation"]


@pytest.mark.parametrize("pattern", ["", "/*"])
def test_the_output_may_lie_beside_the_input(tmp_path: Path, pattern: str) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").write_text('{"source": "w1", "id": 7}\n')
    assert translate(f"{folder}{pattern}", folder / "all.jsonl") == 2
    rows = [json.loads(line) for line in (folder / "all.jsonl").read_text().splitlines()]
    assert rows == [{"source": "w1", "id": 7, "translation": translate_alone("w1")}] * 2


def test_half_of_a_surrogate_pair_is_no_end_of_the_work(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"source": "w1", "title": "abc \\ud83d"}\n{"source": "w1 \\ud83d"}\n')
    translate(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    first, second = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert first == {"source": "w1", "title": "abc \ud83d", "translation": translate_alone("w1")}
    assert second["translation"] == translate_alone("w1 \ufffd")


def test_existing_files_are_not_overwritten_unasked(source_file: Path) -> None:
    output = source_file.with_name("new") / "folder" / "output.txt"  # which are made
    with (
        locked(output.with_name(f".{output.name}.partial.lock"), "it"),
        pytest.raises(BlockingIOError, match=r"output\.txt is in use"),
    ):
        translate(source_file, output)
    assert not list(output.parent.iterdir())
    output.write_text("precious\n", encoding="utf-8")
    with pytest.raises(FileExistsError, match=r"output\.txt exists"):
        translate(source_file, output)
    assert output.read_text(encoding="utf-8") == "precious\n"
    with pytest.raises(ValueError, match=r"the input file"):
        translate(source_file, source_file, overwrite=True)
    with pytest.raises(FileExistsError, match=r"a folder that is not empty"):
        translate(source_file, f"{output.parent}/", overwrite=True)
    translate(source_file, output, overwrite=True)
    assert output.read_text(encoding="utf-8") == expected_translation(source_file)


def test_references_are_not_overwritten(source_file: Path) -> None:
    references = source_file.with_name("references.tsv")
    references.write_text("w1\n" * 23, encoding="utf-8")
    make_pairs = Distillation(find_references(str(source_file), str(references)))
    with pytest.raises(ValueError, match=r"references.tsv: the output file is the file of references"):
        translate(source_file, references, overwrite=True, n_best=2, num_beams=2, make_pairs=make_pairs)
    assert references.read_text(encoding="utf-8") == "w1\n" * 23


def test_an_output_that_was_taken_away_is_made_again(source_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, unlink = source_file.with_name("output.txt"), Path.unlink

    def end() -> None:
        raise KeyboardInterrupt

    def translate_without_end(**options: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", lambda path, **_: end() if path.suffix == ".jsonl" else unlink(path))
            with pytest.raises(KeyboardInterrupt):
                translate(source_file, output, **options)

    translate_without_end()
    assert output.exists()
    assert folders_of_parts(source_file.parent), "the end came before they were removed"
    assert translate(source_file, output) == 23, "it is this run's, and not one to be kept from it"
    assert not folders_of_parts(source_file.parent)
    translate_without_end(overwrite=True)
    output.unlink()
    translate(source_file, output)
    assert output.read_text(encoding="utf-8") == expected_translation(source_file)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_killed_at_any_change_of_the_files(tmp_path: Path, kind: str) -> None:
    source = write_sources(tmp_path / "source.txt")
    expected = expected_translation(source)
    options: dict[str, Any] = {"window_size": 12, "batch_size": 99}
    for event in itertools.count(1, 1 if kind == "file" else 3):
        folder = tmp_path / f"out-{event}"
        target = folder / ("output.txt" if kind == "file" else "new/")
        name = f"{target}/" if kind == "folder" else str(target)
        is_killed = run_until(event, folder, partial(translate, source, name, **options))
        output = target / source.name if kind == "folder" else target
        assert not output.exists() or output.read_text(encoding="utf-8") == expected
        if is_killed:
            try:
                translate(source, name, **options)
            except FileExistsError:
                # The kill came at the very end, when nothing says any more whose output it is.
                assert output.exists()
        assert output.read_text(encoding="utf-8") == expected
        assert {path.name for path in folder.iterdir()} - {target.name} <= {f".{target.name}.partial.lock"}
        if not is_killed:
            break
    assert event > 15


# Kinds of files


def write_table(path: Path) -> Path:
    """A file of SENTENCES and IDS of the kind that its name says."""
    rows = [{"id": number, "source": text} for number, text in zip(IDS, SENTENCES, strict=True)]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".tsv":
        path.write_text("id\tsource\n" + "".join(f"{row['id']}\t{row['source']}\n" for row in rows), encoding="utf-8")
    else:
        path.write_text("\n".join(SENTENCES), encoding="utf-8")  # the last line has no end
    return path


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a file as strings; text has one column without a name."""
    if path.suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
    elif path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    elif path.suffix == ".tsv":
        with path.open(encoding="utf-8", newline="") as file:
            table = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        names = table.pop(0) if "source" in table[0] else ["source", "translation"]
        rows = [dict(zip(names, fields, strict=True)) for fields in table]
    else:
        rows = [{"": line} for line in path.read_text(encoding="utf-8").splitlines()]
    return [{name: str(value) for name, value in row.items()} for row in rows]


@pytest.mark.parametrize(
    ("source_kind", "target_kind"), list(itertools.product([".txt", ".tsv", ".jsonl", ".parquet"], repeat=2))
)
def test_every_kind_of_file_becomes_every_kind(tmp_path: Path, source_kind: str, target_kind: str) -> None:
    source, target = write_table(tmp_path / f"source{source_kind}"), tmp_path / f"target{target_kind}"
    assert translate(source, target) == len(SENTENCES)
    if target_kind == ".txt":
        expected = [{"": text} for text in TRANSLATIONS]
    else:
        pairs = zip(SENTENCES, TRANSLATIONS, strict=True)
        expected = [{"source": source, "translation": translation} for source, translation in pairs]
        if source_kind == target_kind:
            expected = [{"id": str(number), **row} for number, row in zip(IDS, expected, strict=True)]
    assert read_table(target) == expected
    if target_kind == ".tsv" != source_kind:
        assert target.read_text(encoding="utf-8").startswith("source\ttranslation\n")


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("a.txt", ["w1", "caf\xe9"], "line 2: byte 0xe9 .* is not UTF-8"),
        ("a.jsonl", ['{"text": "w1"}', '{"text": 3}'], "line 2: the source is 3 .int., not a string"),
        ("a.jsonl", ['{"text": "w1"}', "[" * 100_000], "line 2: not one JSON object on each line"),
        ("a.tsv", ["id\tsource", "1\tw1", "2"], r"line 3: 1 column.s., and the sources are in column 2"),
    ],
    ids=str,
)
@pytest.mark.parametrize("target", ["out.txt", "out.jsonl"])
def test_a_damaged_record_is_found_before_anything_is_translated(
    tmp_path: Path, name: str, lines: list[str], message: str, target: str
) -> None:
    (tmp_path / name).write_text("\n".join(lines), encoding="latin-1")
    with pytest.raises(ValueError, match=message):
        translate(tmp_path / name, tmp_path / target, window_size=1)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == [name]


def test_the_types_of_parquet_and_the_values_of_json_stay(tmp_path: Path) -> None:
    source, target = tmp_path / "source.parquet", tmp_path / "target.parquet"
    columns = {
        "when": pa.array([0, None], pa.timestamp("ms")),
        "translation": pa.array([{"en": "w1", "de": "x"}, {"en": None, "de": "y"}]),
        "words": pa.array([["a"], []]),
    }
    table = pa.table(columns)
    pq.write_table(table, source)
    with pytest.raises(ValueError, match=r"has a column 'translation' already: give another name .*--target_column"):
        translate(source, target, source_column="translation.en")
    translate(source, tmp_path / "target.txt", source_column="translation.en")  # where it is not in the way
    translate(source, target, source_column="translation.en", target_column="new")
    found = pq.read_table(target)
    assert found.drop_columns("new").equals(table)
    assert found["new"].to_pylist() == [translate_alone("w1"), ""]
    lines = ['{"text": "w1", "n": 1e3, "deep": {"ü": [1, null]}}', "", '{"n": 2, "text": null}']
    (tmp_path / "source.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    translate(tmp_path / "source.jsonl", tmp_path / "target.jsonl")
    first, empty, last = (tmp_path / "target.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(first) == json.loads(lines[0]) | {"translation": translate_alone("w1")}
    assert (empty, json.loads(last)) == ("", {"n": 2, "text": None, "translation": ""})


@pytest.mark.parametrize("pack", [gzip, bz2], ids=lambda module: module.__name__)
def test_compressed_text(tmp_path: Path, pack: Any) -> None:
    suffix = {gzip: ".gz", bz2: ".bz2"}[pack]
    source, target = tmp_path / f"source.tsv{suffix}", tmp_path / f"target.jsonl{suffix}"
    source.write_bytes(pack.compress("".join(f"{text}\tmore\n" for text in SENTENCES).encode()))  # without names
    translate(source, target)
    rows = [json.loads(line) for line in pack.decompress(target.read_bytes()).decode().splitlines()]
    assert [row["source"] for row in rows] == SENTENCES
    assert [row["translation"] for row in rows] == TRANSLATIONS


def test_a_folder_of_files_becomes_a_folder_or_a_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, lines in (("b.txt", SENTENCES[:4]), ("a.txt", SENTENCES[4:]), ("_SUCCESS", ["x"]), (".hidden", ["x"])):
        (source / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert translate(source, f"{tmp_path}/target/", window_size=3) == len(SENTENCES)
    for name, expected in (("b.txt", TRANSLATIONS[:4]), ("a.txt", TRANSLATIONS[4:])):
        assert (tmp_path / "target" / name).read_text(encoding="utf-8").splitlines() == expected
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == ["a.txt", "b.txt"]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert translate(source, f"{tmp_path}/link/") == len(SENTENCES)
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["a.txt", "b.txt"]
    translate(f"{source}/*.txt", tmp_path / "one.txt", window_size=3)
    found = (tmp_path / "one.txt").read_text(encoding="utf-8").splitlines()
    assert found == TRANSLATIONS[4:] + TRANSLATIONS[:4], "in the order of the names"


@pytest.fixture
def memory() -> Iterator[Any]:
    """A file system that is not this machine's."""
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/", recursive=True)


def test_any_file_system(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, name in enumerate(("a.txt", "b.txt")):
        memory.pipe_file(f"/corpus/{name}", "".join(f"{line}\n" for line in SENTENCES[number::2]).encode())
    with pytest.raises(ValueError, match=r"give a folder for unfinished parts"):
        translate("memory://corpus/*.txt", "memory://out/one.txt")
    options = {"parts_dir": tmp_path / "parts"}
    run_interrupted(2, monkeypatch, translate, "memory://corpus/*.txt", "memory://out/one.txt", **options)
    assert not memory.exists("/out/one.txt")
    translate("memory://corpus/*.txt", "memory://out/one.txt", **options)
    assert memory.cat_file("/out/one.txt").decode().splitlines() == TRANSLATIONS[::2] + TRANSLATIONS[1::2]
    with pytest.raises(FileExistsError, match=r"one.txt exists"):
        translate("memory://corpus/*.txt", "memory://out/one.txt", **options)
    translate("memory://corpus", "memory://all/", **options)
    assert memory.cat_file("/all/b.txt").decode().splitlines() == TRANSLATIONS[1::2]
    with pytest.raises(FileExistsError, match=r"Name a new folder"):
        translate("memory://corpus", "memory://all/", **options)
    assert not list((tmp_path / "parts").iterdir())


def test_an_output_on_another_disk(source_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, to: (refuse if path.name == "joined" else replace)(path, to))
    target = source_file.parent / "target"
    for name, output in ((f"{target}/", target / "source.txt"), (f"{target}.txt", Path(f"{target}.txt"))):
        translate(source_file, name, parts_dir=source_file.parent / "parts")
        assert output.read_text(encoding="utf-8") == expected_translation(source_file)
    assert not list((source_file.parent / "parts").iterdir())


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.tsv", "x\ty\nw1\n", {"source_column": "y"}, "a.tsv, line 2: 1 column.s., and the sources are in column 2"),
        ("a.tsv", "x\ty\n", {"source_column": "z"}, "a.tsv, line 1: no column 'z'; the columns are 'x', 'y'"),
        ("a.tsv", "id\ten\tde\n1\tw1\tw2\n", {}, "a.tsv, line 1: 'id', 'en', 'de' look like names of columns"),
        ("a.jsonl", '{"a": "w1", "b": 1}\n', {}, "no column 'source' or 'text'; the columns are 'a', 'b'"),
        ("a.jsonl", '{"text": "w1"}\n{"x": "w1"}\n', {}, "a.jsonl, line 2: no 'text'; the keys are 'x'"),
        ("a.jsonl", '{"text": "w1"}\n{"text": 3}\n', {}, r"a.jsonl, line 2: the source is 3 \(int\), not a string"),
        ("a.jsonl", '{"text": "w1"}\nw1\n', {}, "a.jsonl, line 2: not one JSON object on each line"),
        ("a.jsonl", "[1]\n", {}, "a.jsonl, line 1: a list and not a JSON object"),
        ("a.txt", b"w1\nf\xfcr\n", {}, "a.txt, line 2: byte 0xfc"),
        ("a.txt.gz", gzip.compress(b"w1\n" * 99, mtime=0)[:-9], {}, "a.txt.gz: truncated or damaged file"),
        ("a.parquet.gz", b"", {}, "parquet is compressed within"),
        ("a.txt", "w1\n", {"source_column": "x"}, "a.txt is text, which has no column 'x'"),
        ("a.txt", "w1\n", {"window_size": 0}, "window_size is 0"),
        ("a.txt", "w1\n", {"n_best": 2}, "n_best is 2 and num_beams is 1"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: Any, options: Any, message: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        translate(tmp_path / name, tmp_path / "out.txt", **options)
    assert not (tmp_path / "out.txt").exists()


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source.txt"
    source.write_text("w1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"n_best is 2, and .*out.jsonl is jsonl; it must be text"):
        translate(source, tmp_path / "out.jsonl", n_best=2, num_beams=2)
    with pytest.raises(FileNotFoundError, match=r"There is no file .*nowhere"):
        translate(tmp_path / "nowhere", tmp_path / "out.txt")
    with pytest.raises(FileNotFoundError, match=r"there is no file in it, or none that matches"):
        translate(tmp_path / "*.nothing", tmp_path / "out.txt")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "source.txt").write_text("w1\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"same name"):
        translate(f"{tmp_path}/**/*.txt", f"{tmp_path}/new/")
    source.write_text("", encoding="utf-8")
    assert translate(source, tmp_path / "empty.txt") == 0
    assert (tmp_path / "empty.txt").read_text(encoding="utf-8") == ""


def test_the_bar_counts_what_other_processes_have_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LOOKING_SECONDS", -1.0)
    work = Work(tmp_path, parts=[Part(0, 0, 5), Part(0, 5, 5), Part(0, 10, 2)])
    with tqdm(total=work.total, file=io.StringIO()) as bar:
        progress = files.Progress(work, bar)
        shown = []
        for act in (
            lambda: progress.update(3),
            lambda: work.path(2).touch(),  # another process's
            lambda: progress.update(1),
            lambda: work.path(0).touch(),  # this one's
            progress.end_part,
            lambda: progress.update(5),
        ):
            act()
            shown.append(bar.n)
    assert shown == [3, 3, 6, 6, 7, 12]
