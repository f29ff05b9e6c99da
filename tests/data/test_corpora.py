import csv
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from corpus_files import Pairs, write, write_aligned, write_json, write_lines, write_tsv
from datasets import Dataset, DatasetDict, Features, Value
from hypothesis import given, settings
from hypothesis import strategies as st

from vanilla_transformer.data.corpora import load_parallel_corpus
from vanilla_transformer.data.lines import open_text, read_lines
from vanilla_transformer.data.streams import stream_parallel_corpus

# Characters that str.splitlines, though no aligned corpus, takes for line ends; quotes, commas and spaces at the ends.
PAIRS: Pairs = [
    ("A line\u2028with a separator", "Eine Zeile\u2029mit einem Trenner"),
    ('He said "yes", twice.', '„Ja“, sagte er, "zweimal".'),
    ("next\x85line\x0bvertical\x0cfeed\x1cfile\x1egroup", "a\rb"),
    ("  spaces at the ends  ", "\u3000中文\u3000"),
    ("'", '"'),
    ("Grüße 👩‍👩‍👧", "#comment"),
]


def write_csv(path: Path, pairs: Sequence[Sequence[str]], **options: bool) -> Path:
    table = path.with_name("table")
    with open(table, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(pairs)
    return write(path, table.read_bytes().decode(), **options)


def to_pairs(dataset: Dataset) -> Pairs:
    assert dataset.features == Features({"source": Value("string"), "target": Value("string")})
    return list(zip(dataset["source"], dataset["target"], strict=True))


def load(path: Path, **options: Any) -> Pairs:
    return to_pairs(load_parallel_corpus(files=[path], **options))


TABLES: dict[str, Callable[..., Path]] = {".tsv": write_tsv, ".csv": write_csv}
TABLES |= dict.fromkeys((".json", ".jsonl"), write_json)


@pytest.mark.parametrize(
    ("compression", "crlf", "bom"),
    [("", False, True), (".gz", True, False), (".GZ", True, True), (".bz2", False, True), (".xz", True, False)],
)
def test_every_text_format_gives_the_same_pairs(tmp_path: Path, compression: str, crlf: bool, bom: bool) -> None:
    files = write_aligned(tmp_path, PAIRS, compression, compression, crlf=crlf, bom=bom)
    assert to_pairs(load_parallel_corpus(files=files)) == PAIRS
    for suffix, write_table in TABLES.items():
        assert load(write_table(tmp_path / f"corpus{suffix}{compression}", PAIRS, crlf=crlf, bom=bom)) == PAIRS, suffix


def test_parquet_gives_the_same_pairs(tmp_path: Path) -> None:
    features = Features({"id": Value("int64"), "target": Value("large_string"), "source": Value("large_string")})
    rows = [{"id": 1, "target": target, "source": source} for source, target in PAIRS]
    Dataset.from_list(rows, features=features).to_parquet(tmp_path / "corpus.parquet")
    assert load(tmp_path / "corpus.parquet") == PAIRS


def text(*, exclude: str = "") -> st.SearchStrategy[str]:
    characters = st.characters(exclude_categories=["Cs"], exclude_characters=exclude)
    return st.text(characters, min_size=1).filter(lambda text: text.strip())


def pairs_of(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Pairs]:
    return st.lists(st.tuples(texts, texts), min_size=1, max_size=5)


# A byte order mark is written, lest a text that begins with U+FEFF be taken for one.
@settings(max_examples=30)
@given(pairs=pairs_of(text(exclude="\t\n\r")))
def test_any_unicode_text_survives_tsv_and_text_files(tmp_path_factory: pytest.TempPathFactory, pairs: Pairs) -> None:
    folder = tmp_path_factory.getbasetemp()
    assert load(write_tsv(folder / "any.tsv", pairs, bom=True)) == pairs
    assert to_pairs(load_parallel_corpus(files=write_aligned(folder, pairs, bom=True))) == pairs


@settings(max_examples=20)
@given(pairs=pairs_of(text()))
def test_any_unicode_text_survives_csv_json_and_parquet(tmp_path_factory: pytest.TempPathFactory, pairs: Pairs) -> None:
    folder = tmp_path_factory.getbasetemp()
    assert load(write_csv(folder / "any.csv", pairs, bom=True)) == pairs
    assert load(write_json(folder / "any.jsonl", pairs)) == pairs
    sources, targets = zip(*pairs, strict=True)
    Dataset.from_dict({"source": sources, "target": targets}).to_parquet(folder / "any.parquet")
    assert load(folder / "any.parquet") == pairs


def test_half_a_character_is_replaced(tmp_path: Path) -> None:
    path = write(tmp_path / "corpus.jsonl", '{"source": "a \\ud83d", "target": "b"}\n')
    assert load(path) == [("a \ufffd", "b")]


def test_a_folder_without_tables_is_no_part_of_a_corpus(tmp_path: Path) -> None:
    write_tsv(tmp_path / "corpus.tsv", PAIRS)
    (tmp_path / "texts").mkdir()
    write(tmp_path / "texts" / "corpus.en", "a\n")
    with pytest.raises(FileNotFoundError, match="texts: a folder without tables"):
        load_parallel_corpus(files=[tmp_path / "corpus.tsv", tmp_path / "texts"])


def test_read_lines_splits_at_line_feeds_only(tmp_path: Path) -> None:
    path = write(tmp_path / "text", "a\u2028b\x85\x0b\n\r\nc\rd\r\r\n\nlast")
    assert read_lines(path) == ["a\u2028b\x85\x0b", "", "c\rd\r", "", "last"]
    assert read_lines(str(path)) == read_lines(path)
    for name in ("text", "text.gz"):
        with open_text(write(tmp_path / name, "é\u2028\r\nb\n", bom=True)) as file:
            assert list(file) == ["é\u2028\r\n", "b\n"]


@pytest.mark.parametrize(
    ("header", "options"),
    [
        (["target", "id", "source"], {}),
        (["de", "id", "en"], {"source_lang": "en", "target_lang": "de"}),
        (["German", "source", "English"], {"source_column": "English", "target_column": "German"}),
    ],
)
def test_header_says_which_columns(tmp_path: Path, header: list[str], options: dict[str, str]) -> None:
    rows = [header, ["Ja", "1", "yes"], ["Nein", "2", "no"]]
    tsv = write_lines(tmp_path / "corpus.tsv", ["\t".join(row) for row in rows])
    for path in (tsv, write_csv(tmp_path / "corpus.csv", rows)):
        assert load(path, **options) == [("yes", "Ja"), ("no", "Nein")]


def test_without_a_known_header_all_lines_are_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_lines(tmp_path / "corpus.tsv", ["well\tgut\tnote", "yes\tja\tCC-BY"])
    assert load(path) == [("well", "gut"), ("yes", "ja")]
    said = "of 3, the first two are read: 'well' for the source and 'gut' for the target"
    assert caplog.text.count(said) == 1, "they may be others"
    assert load(path, source_lang="en", target_lang="fr") == [("well", "gut"), ("yes", "ja")]
    assert load(path, source_lang="gut", target_lang="well") == [("ja", "yes")]


def test_quotes_are_those_of_csv_alone(tmp_path: Path) -> None:
    assert load(write_lines(tmp_path / "corpus.tsv", ['"a\tb"', '"\t""'])) == [('"a', 'b"'), ('"', '""')]
    path = write(tmp_path / "corpus.csv", 'source,target\r\n"a\nb","c\r\nd"\r\nx,y\r\n')
    assert load(path) == [("a\nb", "c\r\nd"), ("x", "y")]


def test_local_folder_is_loaded_by_split_and_stays_on_disk(tmp_path: Path) -> None:
    for split, pairs in (("train", PAIRS[:4]), ("validation", PAIRS[4:])):
        write_json(tmp_path / f"{split}.jsonl", pairs)
    train = load_parallel_corpus(dataset_name=str(tmp_path))
    assert to_pairs(train) == PAIRS[:4]
    assert train.cache_files
    assert to_pairs(load_parallel_corpus(dataset_name=str(tmp_path), split="validation")) == PAIRS[4:]
    assert to_pairs(load_parallel_corpus(dataset_name=str(tmp_path), split="train[:2]")) == PAIRS[:2]
    with pytest.raises(ValueError, match='Unknown split "test"'):
        load_parallel_corpus(dataset_name=str(tmp_path), split="test")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_parallel_corpus(dataset_name=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"train\.jsonl' is a file: pass it as files="):
        load_parallel_corpus(dataset_name=str(tmp_path / "train.jsonl"))


def test_a_stream_prepares_no_other_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "corpus").mkdir()
    for split, pairs in (("train", PAIRS[:4]), ("validation", PAIRS[4:])):
        write_json(tmp_path / "corpus" / f"{split}.jsonl", pairs)
    Dataset.from_dict({"source": ["a"] * 5000, "target": ["b"] * 5000}).save_to_disk(tmp_path / "saved")
    options: dict[str, Any] = {"streaming": True, "split": "validation"}
    assert to_pairs(load_parallel_corpus(dataset_name=str(tmp_path / "corpus"), **options)) == PAIRS[4:]
    assert not list(tmp_path.glob("cache/**/*.arrow"))
    saved = load_parallel_corpus(dataset_name=str(tmp_path / "saved"), streaming=True)
    assert to_pairs(saved) == [("a", "b")] * 5000


def test_saved_datasets_are_loaded_by_split(tmp_path: Path) -> None:
    train = Dataset.from_dict({"source": ["a"], "target": ["b"]})
    DatasetDict({"train": train, "dev": train}).save_to_disk(tmp_path / "splits")
    train.save_to_disk(tmp_path / "lone")
    for name, split in (("splits", "train"), ("splits", "dev"), ("lone", "train")):
        assert to_pairs(load_parallel_corpus(dataset_name=str(tmp_path / name), split=split)) == [("a", "b")]
    train.add_column("id", [7]).with_format("numpy", columns=["id"]).save_to_disk(tmp_path / "formatted")
    assert to_pairs(load_parallel_corpus(dataset_name=str(tmp_path / "formatted"))) == [("a", "b")]
    with pytest.raises(ValueError, match=r"splits: no split 'test'; the splits are 'train', 'dev'\."):
        load_parallel_corpus(dataset_name=str(tmp_path / "splits"), split="test")
    with pytest.raises(ValueError, match=r"lone: no split 'validation'; the splits are 'train'\."):
        load_parallel_corpus(dataset_name=str(tmp_path / "lone"), split="validation")


def test_misaligned_files_are_noticed_behind_the_samples(tmp_path: Path) -> None:
    files = [write_lines(tmp_path / "a.en", ["x"] * 3), write_lines(tmp_path / "a.de.gz", ["x"] * 2)]
    with pytest.raises(ValueError, match=r"a\.de\.gz ends after line 2, but .*a\.en goes on"):
        load_parallel_corpus(files=files, max_samples=1)


def test_which_of_two_texts_is_the_source_is_not_guessed(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.en", ["x"])
    write_lines(tmp_path / "a.de", ["y"])
    with pytest.raises(ValueError, match="two aligned text files, the source file first"):
        load(tmp_path / "a.*", source_lang="en", target_lang="de")
    files = [tmp_path / "*.en", tmp_path / "*.de"]
    assert to_pairs(load_parallel_corpus(files=files)) == [("x", "y")]


def test_other_encodings_are_refused_with_the_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.tsv"
    path.write_bytes("a\tb\nGr\xfc\xdfe\tx\n".encode("latin-1"))
    with open_text(path) as lines:
        assert next(lines) == "a\tb\n"
        with pytest.raises(ValueError, match=r"latin\.tsv, line 2: byte 0xfc at position 2 of the line is not UTF-8"):
            next(lines)


@pytest.mark.parametrize("name", ["text.gz", "text.bz2", "text.xz"])
def test_a_damaged_compressed_file_is_refused(tmp_path: Path, name: str) -> None:
    damaged = rf"{name}, after line \d+: truncated or damaged compressed file"
    lines = [f"{number * 7919:x} {number**3:o}" for number in range(12_000)]
    path = write_lines(tmp_path / name, lines)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=damaged) as error:
        read_lines(path)
    assert "after line 0:" not in str(error.value)
    path.write_bytes(whole[:500] + bytes([whole[500] ^ 0xFF]) + whole[501:])
    with pytest.raises(ValueError, match=rf"{name}, (after )?line \d+"):
        read_lines(path)
    path.write_text("plain text")
    with pytest.raises(ValueError, match=damaged.replace(r"\d+", "0")):
        read_lines(path)


def test_numbers_of_a_dataset_are_no_texts(tmp_path: Path) -> None:
    Dataset.from_dict({"source": ["a"], "target": [7]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet, record 1: the target is 7 \(int\), not a string"):
        load(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", "a\tb\na\tb\tc\n", r"a\.tsv, line 2: 3 column\(s\) instead of 2"),
        ("a.csv", 'a,"b\n"\nc,d\ne;f\n', r"a\.csv, line 4: 1 column\(s\) instead of 2"),
        ("a.tsv", "a b\n", r"a\.tsv, line 1: one column only.* separated by a tab"),
        *((name, "", f"{name}: the file is empty") for name in ("a.tsv", "a.csv", "a.jsonl.gz")),
        ("a.csv", 'a,b\n"c,d\ne,f\n', r"a\.csv, line 2: the record that begins here is not valid CSV"),
    ],
)
def test_malformed_rows_name_the_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path / name, text))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[", "not JSON lines"),
        ('{"source": ' + "[" * 200_000, "not JSON lines"),
        ('["a", "b"]', "a list; JSON lines"),
        ('{"source": "a"}', "no 'target'; the keys are 'source'"),
        ('{"source": "a", "target": 5}', r"the target is 5 \(int\), not a string"),
        ('{"source": ["a"], "target": "b"}', r"the source is \['a'\] \(list\), not a string"),
    ],
)
def test_bad_json_records_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    path = write_lines(tmp_path / "a.jsonl", ['{"source": "a", "target": "b"}', line])
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2: {message}"):
        load(path)


HOLES: Pairs = [("a", "b"), ("", "x"), ("y", " \u3000"), ("", ""), ("c", "d"), *[("", "z")] * 4, ("e", "f")]


def write_holes(folder: Path, kind: str) -> dict[str, Any]:
    if kind == "text":
        return {"files": write_aligned(folder, HOLES)}
    if kind in TABLES:
        return {"files": [TABLES[kind](folder / f"corpus{kind}", HOLES)]}
    records = [{"source": source or None, "target": target} for source, target in HOLES]
    if kind == ".parquet":
        Dataset.from_list(records).to_parquet(folder / "corpus.parquet")
        return {"files": [folder / "corpus.parquet"]}
    Dataset.from_list(records).save_to_disk(folder / "corpus")
    return {"dataset_name": str(folder / "corpus")}


@pytest.mark.parametrize("kind", ["text", *TABLES, ".parquet", "saved"])
def test_empty_sides_are_an_error_or_dropped(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    arguments = write_holes(tmp_path, kind)
    unit = "record" if kind in (".parquet", "saved") else "line"
    message = rf"corpus.*, {unit} 2: empty on one side or both\. .*empty_lines=\"drop\""
    with pytest.raises(ValueError, match=message):
        load_parallel_corpus(**arguments)
    with caplog.at_level(logging.WARNING, logger="vanilla_transformer.data.corpora"):
        dataset = load_parallel_corpus(**arguments, empty_lines="drop")
    assert to_pairs(dataset) == [("a", "b"), ("c", "d"), ("e", "f")]
    assert [message.partition(f", {unit} ")[2].partition(":")[0] for message in caplog.messages[:-1]] == list("23467")
    assert "7 pairs were dropped" in caplog.messages[-1]


@pytest.mark.parametrize("kind", ["text", "saved"])
def test_empty_sides_among_the_first_samples(tmp_path: Path, kind: str) -> None:
    arguments = write_holes(tmp_path, kind)
    assert to_pairs(load_parallel_corpus(**arguments, max_samples=1)) == [("a", "b")]
    with pytest.raises(ValueError, match=r" (line|record) 2: empty"):
        load_parallel_corpus(**arguments, max_samples=2)
    assert to_pairs(load_parallel_corpus(**arguments, max_samples=2, empty_lines="drop")) == [("a", "b"), ("c", "d")]


def test_blank_lines_of_a_table_are_empty_pairs(tmp_path: Path) -> None:
    for name, text in (("a.tsv", "a\tb\n \n"), ("a.csv", "a,b\n\n"), ("a.json", '{"source": "a", "target": "b"}\n\n')):
        path = write(tmp_path / name, text)
        with pytest.raises(ValueError, match=rf"{name}, line 2: empty on one side or both\."):
            load(path)
        assert load(path, empty_lines="drop") == [("a", "b")]
    with pytest.raises(ValueError, match=r"a\.tsv: all 2 pairs are empty on one side or both\. None is left"):
        load(write(tmp_path / "a.tsv", "a\t\n\n"), empty_lines="drop")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give exactly one of them"),
        ({"files": "a.tsv"}, "give a list of paths"),
        ({"files": ["a.tsv"], "max_samples": 0}, "max_samples=0: must be at least 1"),
        ({"files": ["a.tsv"], "empty_lines": "keep"}, "empty_lines='keep': must be"),
        ({"files": ["a.tsv"], "source_column": "x"}, "source_column='x' and target_column=None: give both"),
        ({"files": ["a.tsv"], "source_lang": "en", "target_lang": "en"}, "source_lang and target_lang are both 'en'"),
    ],
)
def test_contradicting_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_parallel_corpus(**arguments)


def load_in_both_ways(path: Path, **options: Any) -> Pairs:
    streamed = stream_parallel_corpus(files=[path], **options)
    pairs = [(pair["source"], pair["target"]) for pair in streamed]
    assert load(path, **options) == pairs
    return pairs


def refuse_in_both_ways(path: Path, **options: Any) -> str:
    said = []
    for read in (load_parallel_corpus, stream_parallel_corpus):
        with pytest.raises(ValueError, match=re.escape(str(path))) as error:
            list(read(files=[path], **options))
        said.append(str(error.value))
    assert said[0] == said[1]
    return said[0]


@pytest.mark.parametrize(
    "names", [["English", "German"], ["id", "english", "german"], ["", "en", "de"], ["source_text", "text.de", "Id"]]
)
def test_a_header_that_nobody_asked_for_is_no_pair(tmp_path: Path, names: list[str]) -> None:
    for path, separator in ((tmp_path / "a.tsv", "\t"), (tmp_path / "a.csv", ",")):
        write_lines(path, [separator.join(names), separator.join(map(str, range(len(names))))])
        said = refuse_in_both_ways(path, source_lang="en", target_lang="fr")
        assert said.startswith(f"{path}, line 1: {', '.join(map(repr, names))} look like names of columns")
        assert load_in_both_ways(path, source_column=names[-2], target_column=names[-1])


@pytest.mark.parametrize(
    "pair", [("English", "Englisch"), ("text", "text"), ("1998", "1998"), ("Text", "Der Text"), ("a" * 200_000, "b")]
)
def test_single_words_and_long_fields_are_data(tmp_path: Path, pair: tuple[str, str]) -> None:
    assert load_in_both_ways(write_csv(tmp_path / "a.csv", [pair])) == [pair]


def test_parquet_that_cannot_be_read_is_explained(tmp_path: Path) -> None:
    path, text = tmp_path / "a.parquet", pyarrow.array(["a", "b"])
    pq.write_table(pyarrow.Table.from_arrays([text] * 3, names=["source", "target", "target"]), path)
    assert "a.parquet: several columns are called 'target'" in refuse_in_both_ways(path)
    maps = pyarrow.array([[("en", "a")], [("en", "b")]], type=pyarrow.map_(pyarrow.string(), pyarrow.string()))
    pq.write_table(pyarrow.table({"source": text, "target": text, "meta": maps}), path)
    assert "a.parquet: the column 'meta' is a map<string, string" in refuse_in_both_ways(path)
    offsets, data = (pyarrow.py_buffer(data) for data in (bytes([0, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0]), b"af\xfc"))
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, data])
    pq.write_table(pyarrow.table({"source": text, "target": broken}), path)
    assert "a.parquet, record 2: a text is not UTF-8 ('utf-8' codec can't decode byte 0xfc" in refuse_in_both_ways(path)
