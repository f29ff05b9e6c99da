"""Streamed corpora against the same corpora in memory, and the position in them against an unbroken iteration."""

import importlib
import itertools
import json
import logging
import pickle
import tracemalloc
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest
from corpus_files import Pairs, write, write_aligned, write_json, write_tsv
from datasets import Dataset, Features, IterableDataset, Translation, Value
from datasets.distributed import split_dataset_by_node
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.data import lines, readers
from vanilla_transformer.data import streams as streaming_data
from vanilla_transformer.data.corpora import load_parallel_corpus
from vanilla_transformer.data.streams import sample_pairs, stream_parallel_corpus, tokenize_stream
from vanilla_transformer.training.examples import tokenize_pairs

LOGGER = "vanilla_transformer.data.corpora"
PAIRS: Pairs = [(f"source {number}" + " and more" * (number % 3), f"Ziel {number}") for number in range(23)]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of three pairs, and files read so few bytes at a time that lines lie across the reads."""
    monkeypatch.setattr(readers, "_PART_PAIRS", 3)
    monkeypatch.setattr(lines, "_READ_BYTES", 11)
    monkeypatch.setattr(readers, "_READ_ROWS", 2)
    monkeypatch.setattr(streaming_data, "_READ_ROWS", 2)


def write_parquet(path: Path, pairs: Pairs, row_group_size: int = 4) -> Path:
    table = pyarrow.table({"target": [pair[1] for pair in pairs], "source": [pair[0] for pair in pairs]})
    pyarrow.parquet.write_table(table, path, row_group_size=row_group_size)
    return path


def save(path: Path, pairs: Pairs) -> Path:
    Dataset.from_list([{"source": source, "target": target} for source, target in pairs]).save_to_disk(path)
    return path


def write_shards(folder: Path, pairs: Pairs) -> Path:
    folder.mkdir()
    for index in range(4):
        write_parquet(folder / f"train-{index}.parquet", pairs[index * 6 : (index + 1) * 6])
    return folder


def write_tables(folder: Path, first: Pairs, second: Pairs) -> list[Path]:
    return [write_tsv(folder / "b.tsv", first), write_json(folder / "a.jsonl.gz", second)]


def to_pairs(examples: Iterable[dict[str, str]]) -> Pairs:
    examples = list(examples)
    assert all(list(example) == ["source", "target"] for example in examples)
    return [(example["source"], example["target"]) for example in examples]


# How to write a corpus, and how many shards of three pairs 23 of them come to.
CORPORA: dict[str, tuple[Callable[[Path], dict[str, Any]], int]] = {
    "aligned": (lambda folder: {"files": write_aligned(folder, PAIRS)}, 8),
    "aligned.gz": (lambda folder: {"files": write_aligned(folder, PAIRS, ".gz", ".gz")}, 1),
    "aligned.xz": (lambda folder: {"files": write_aligned(folder, PAIRS, ".xz", ".xz")}, 1),
    "one side gz": (lambda folder: {"files": write_aligned(folder, PAIRS, "", ".gz")}, 1),
    "tsv": (lambda folder: {"files": [write_tsv(folder / "a.tsv", PAIRS)]}, 8),
    "tsv with header": (lambda folder: {"files": [write_tsv(folder / "a.tsv", [("source", "target"), *PAIRS])]}, 8),
    "tsv.bz2": (lambda folder: {"files": [write_tsv(folder / "a.tsv.bz2", PAIRS)]}, 1),
    "tsv.gz": (lambda folder: {"files": [write_tsv(folder / "a.tsv.gz", PAIRS)]}, 1),
    "csv": (lambda folder: {"files": [write(folder / "a.csv", "".join(f'{a},"{b}"\n' for a, b in PAIRS))]}, 1),
    "jsonl": (lambda folder: {"files": [write_json(folder / "a.jsonl", PAIRS)]}, 8),
    "json.gz": (lambda folder: {"files": [write_json(folder / "a.json.gz", PAIRS)]}, 1),
    "row groups": (lambda folder: {"files": [write_parquet(folder / "a.parquet", PAIRS)]}, 6),
    "folder": (lambda folder: {"files": [write_shards(folder / "shards", PAIRS)]}, 8),
    "pattern": (lambda folder: {"files": [write_shards(folder / "shards", PAIRS) / "*-*.parquet"]}, 8),
    "two tables": (lambda folder: {"files": write_tables(folder, PAIRS[:9], PAIRS[9:])}, 4),
    "saved": (lambda folder: {"dataset_name": str(save(folder / "saved", PAIRS))}, 7),
    "local dataset": (lambda folder: {"dataset_name": str(write_shards(folder / "shards", PAIRS))}, 4),
}


@pytest.mark.parametrize("kind", CORPORA)
def test_every_kind_of_corpus_streams_its_pairs_in_order(tmp_path: Path, kind: str) -> None:
    write_corpus, num_shards = CORPORA[kind]
    stream = stream_parallel_corpus(**write_corpus(tmp_path))
    assert stream.num_shards == num_shards
    for _ in range(2):
        assert to_pairs(stream) == PAIRS, "a second iteration begins anew"
    parts = [to_pairs(stream.shard(num_shards=num_shards, index=index)) for index in range(num_shards)]
    assert all(parts)
    assert list(itertools.chain.from_iterable(parts)) == PAIRS
    assert to_pairs(pickle.loads(pickle.dumps(stream))) == PAIRS


def outcome(load: Callable[[], Iterable[dict[str, str]]]) -> Pairs | None:
    try:
        return to_pairs(load())
    except ValueError:
        return None


def agree(folder: Path, texts: dict[str, str], *, drop: bool) -> None:
    """Files are read in many parts, compressed ones in a single one: the pairs must be the same, and also in memory."""
    empty_lines: Any = "drop" if drop else "error"
    outcomes = []
    for suffix in ("", ".gz"):
        files = [write(folder / f"{name}{suffix}", text) for name, text in texts.items()]
        outcomes.append(outcome(partial(stream_parallel_corpus, files=files, empty_lines=empty_lines)))
        outcomes.append(outcome(partial(load_parallel_corpus, files=files, empty_lines=empty_lines)))
    assert outcomes[:2] == outcomes[2:]
    # A corpus of nothing but empty pairs is noticed by whoever waits for a pair.
    assert outcomes[0] == outcomes[1] or (outcomes[1] is None and drop and outcomes[0] == [])


LINES = st.text(st.sampled_from("ab é\r\x85\u2028\ufeff"), max_size=4)


@settings(max_examples=30)
@given(
    pairs=st.lists(st.tuples(LINES, LINES), max_size=9),
    more=st.sampled_from(["", "", "", "x", "\n"]),
    ended=st.booleans(),
    drop=st.booleans(),
)
def test_any_lines_are_read_alike(tmp_path_factory: Any, pairs: Pairs, more: str, ended: bool, drop: bool) -> None:
    source, target = ("\n".join(pair[index] for pair in pairs) + "\n" * ended for index in (0, 1))
    agree(tmp_path_factory.getbasetemp(), {"any.en": source + more, "any.de": target}, drop=drop)


FIELDS = st.sampled_from(["a", "b c", "é\u2028", "", " ", "source", "target"])
VALUES = st.sampled_from(["a", "b\nc", "", None, 7])
RECORDS = st.fixed_dictionaries({"source": VALUES, "target": VALUES}) | st.none() | st.just({"source": "a"})


@settings(max_examples=30)
@given(
    rows=st.lists(st.lists(FIELDS, min_size=1, max_size=3) | st.just(["s", "t"]), max_size=9),
    records=st.lists(RECORDS, max_size=9),
    drop=st.booleans(),
)
def test_any_tables_are_read_alike(tmp_path_factory: Any, rows: list[list[str]], records: list[Any], drop: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    agree(folder, {"any.tsv": "".join("\t".join(row) + "\n" for row in rows)}, drop=drop)
    lines = "".join((json.dumps(record) if record else "") + "\n" for record in records)
    agree(folder, {"any.jsonl": lines}, drop=drop)


def test_nested_and_named_columns_are_found(tmp_path: Path) -> None:
    records = [{"id": 1, "translation": {"de": target, "en": source}} for source, target in PAIRS]
    features = Features({"id": Value("int64"), "translation": Translation(["de", "en"])})
    dataset = Dataset.from_list(records, features=features)
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    dataset.to_json(tmp_path / "folder" / "train.jsonl")
    direction: Any = {"source_lang": "de", "target_lang": "en"}
    outright: Any = {"source_column": "translation.de", "target_column": "translation.en"}
    corpora: list[Any] = [{"files": [tmp_path / name]} for name in ("a.parquet", "folder/train.jsonl")]
    corpora += [{"dataset_name": str(tmp_path / name)} for name in ("saved", "folder")]
    load: Any
    for where, columns in itertools.product(corpora, (direction, outright)):
        for load in (stream_parallel_corpus, load_parallel_corpus):
            assert to_pairs(load(**where, **columns)) == [(target, source) for source, target in PAIRS]
    wrong: list[Any] = [{}, {"source_lang": "en", "target_lang": "fr"}]
    for where, columns in itertools.product(corpora, wrong):
        with pytest.raises(ValueError, match=r"columns are .*'translation\.de', 'translation\.en'"):
            stream_parallel_corpus(**where, **columns)


def tokenize(stream: IterableDataset, **options: Any) -> IterableDataset:
    limits = {"max_source_length": 16, "max_target_length": 9, **options}
    return tokenize_stream(stream, VanillaTransformerTokenizer(), **limits)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return {kind: CORPORA[kind][0](tmp_path_factory.mktemp("corpus")) for kind in CORPORA}


@pytest.mark.parametrize(
    ("kind", "tokenized"), [("aligned", True), ("aligned.gz", False), ("row groups", True), ("two tables", False)]
)
def test_a_stream_goes_on_where_its_state_was_taken(corpora: Any, kind: str, tokenized: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(streaming_data, "_TOKENIZED_TOGETHER", 5)
    stream = stream_parallel_corpus(**corpora[kind])
    pickled = pickle.dumps(tokenize(stream) if tokenized else stream)

    def fresh(epoch: int) -> IterableDataset:
        stream = pickle.loads(pickled)
        stream.set_epoch(epoch)
        return stream

    for epoch, step in ((0, 2), (1, 3)):
        whole = list(fresh(epoch))
        assert len(whole) == len(PAIRS)
        for position in range(0, len(PAIRS) + 1, step):
            stream = fresh(epoch)
            assert list(itertools.islice(stream, position)) == whole[:position]
            state = json.loads(json.dumps(stream.state_dict()))
            resumed = fresh(epoch)
            resumed.load_state_dict(state)
            iterator = iter(resumed)
            assert list(itertools.islice(iterator, 4)) == whole[position : position + 4]
            again = fresh(epoch)
            again.load_state_dict(pickle.loads(pickle.dumps(resumed.state_dict())))
            assert list(again) == whole[position + 4 :]
            assert list(iterator) == whole[position + 4 :]


@given(
    sizes=st.lists(st.integers(min_value=0, max_value=7), min_size=1, max_size=5),
    position=st.integers(min_value=0, max_value=30),
    together=st.integers(min_value=1, max_value=8),
)
@settings(max_examples=12)
def test_shards_of_any_size_are_resumed(tmp_path_factory: Any, sizes: list[int], position: int, together: int) -> None:
    folder = tmp_path_factory.mktemp("shards")
    pairs: Pairs = [(f"s{number}", f"t{number}") for number in range(sum(sizes))]
    remaining = iter(pairs)
    shards = [list(itertools.islice(remaining, size)) for size in sizes]
    files = [write_parquet(folder / f"{index}.parquet", shard) for index, shard in enumerate(shards)]
    if not pairs:
        with pytest.raises(ValueError, match="no pair of source and target in it"):
            stream_parallel_corpus(files=files)
        return
    position = min(position, len(pairs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming_data, "_TOKENIZED_TOGETHER", together)
        stream = tokenize(stream_parallel_corpus(files=files))
    resumed = pickle.loads(pickle.dumps(stream))
    whole = list(pickle.loads(pickle.dumps(stream)))
    encode = VanillaTransformerTokenizer()
    assert [example["labels"] for example in whole] == [encode(target).input_ids for _, target in pairs]
    assert list(itertools.islice(stream, position)) == whole[:position]
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert list(resumed) == whole[position:]


def test_resuming_does_not_read_the_shards_before(tmp_path: Path) -> None:
    files = write_aligned(tmp_path, PAIRS)
    stream = stream_parallel_corpus(files=files)
    resumed = stream_parallel_corpus(files=files)
    list(itertools.islice(stream, 7))
    state = stream.state_dict()
    for path in files:
        path.write_bytes(path.read_bytes().replace(b"0\n", b"\xff\n", 1))
    with pytest.raises(ValueError, match=r"line 1: byte 0xff"):
        next(iter(resumed))
    resumed.load_state_dict(state)
    assert to_pairs(resumed) == PAIRS[7:]


@pytest.mark.parametrize("kind", CORPORA)
def test_ranks_share_the_pairs_among_them(corpora: dict[str, dict[str, Any]], kind: str) -> None:
    stream = stream_parallel_corpus(**corpora[kind])
    for world_size in (2, 7):
        parts = [split_dataset_by_node(stream, rank=rank, world_size=world_size) for rank in range(world_size)]
        ranks = list(map(to_pairs, parts))
        assert all(ranks)
        assert sorted(itertools.chain.from_iterable(ranks)) == sorted(PAIRS)


def test_workers_share_the_pairs_and_shuffling_reorders_the_shards(tmp_path: Path) -> None:
    stream = stream_parallel_corpus(files=write_aligned(tmp_path, PAIRS))
    loader: DataLoader[Any] = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert sorted(to_pairs(loader)) == sorted(PAIRS)
    passes = [to_pairs(stream.shuffle(seed=seed, buffer_size=1)) for seed in range(4)]
    assert all(sorted(pairs) == sorted(PAIRS) for pairs in passes)
    assert len({tuple(pairs) for pairs in [PAIRS, *passes]}) == 5


@pytest.mark.parametrize("kind", ["aligned", "tsv.gz", "folder", "saved"])
def test_max_samples_keeps_the_first_pairs_whole(corpora: dict[str, dict[str, Any]], kind: str) -> None:
    for limit in (4, 22, 50):
        stream = stream_parallel_corpus(**corpora[kind], max_samples=limit)
        assert stream.num_shards == 1
        stream.set_epoch(3)
        assert to_pairs(stream) == to_pairs(load_parallel_corpus(**corpora[kind], max_samples=limit)) == PAIRS[:limit]
        parts = [to_pairs(split_dataset_by_node(stream, rank=rank, world_size=2)) for rank in range(2)]
        assert sorted(itertools.chain.from_iterable(parts)) == sorted(PAIRS[:limit])


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    peaks = []
    for size in (4_000, 16_000):
        pairs = [(f"source sentence number {number}", f"Zielsatz Nummer {number}") for number in range(size)]
        files = write_aligned(tmp_path, pairs), [write_parquet(tmp_path / "a.parquet", pairs, row_group_size=2000)]
        del pairs
        for paths in files:
            tracemalloc.start()
            assert sum(1 for _ in stream_parallel_corpus(files=paths)) == size
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[2] < 1.5 * peaks[0]
    assert peaks[3] < 1.5 * peaks[1]


def test_misaligned_files_are_noticed_at_once_or_when_reached(tmp_path: Path) -> None:
    long, other = write_aligned(tmp_path, [("a", "b")] * 7)
    write(other, "b\n" * 5)
    with pytest.raises(ValueError, match=r"corpus\.en has 7 lines, but .*corpus\.de has 5\. Line n of one must tr"):
        stream_parallel_corpus(files=[long, other])
    short = write(tmp_path / "short.de.gz", "b\n" * 5)
    for order in ([long, short], [short, long]):
        iterator = iter(stream_parallel_corpus(files=order))
        assert len(list(itertools.islice(iterator, 5))) == 5
        with pytest.raises(ValueError, match=r"short\.de\.gz ends after line 5, but .*corpus\.en goes on"):
            next(iterator)


def test_a_file_cut_short_while_in_use_is_noticed(tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "a.tsv", PAIRS)
    stream = stream_parallel_corpus(files=[path])
    write_tsv(path, PAIRS[:10])
    with pytest.raises(ValueError, match=r"a\.tsv ends after line 10: .*has changed while it is in use"):
        list(stream)


def test_columns_of_every_file_are_checked_at_once(tmp_path: Path) -> None:
    good = write_tsv(tmp_path / "a.tsv", [("en", "de"), ("x", "y")])
    names: Any = {"source_column": "en", "target_column": "de"}
    for bad, where in (
        (write(tmp_path / "b.tsv", "en\tfr\nx\ty\n"), ", line 1"),
        (write(tmp_path / "b.csv", "en,fr\nx,y\n"), ", line 1"),
        (write(tmp_path / "b.jsonl", '\n{"en": "x"}\n'), ", line 2"),
        (write_parquet(tmp_path / "b.parquet", PAIRS), ""),
    ):
        with pytest.raises(ValueError, match=rf"{bad.name}{where}: no column .*'de'; the columns are"):
            stream_parallel_corpus(files=[good, bad], **names)


def test_many_empty_sides_are_counted_in_few_messages(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_tsv(tmp_path / "a.tsv", [("a", "b"), *[("a", "")] * 1234])
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        list(stream_parallel_corpus(files=[path], empty_lines="drop"))
    counts = [message.rsplit("(", 1)[1] for message in caplog.messages]
    assert counts == [f"{count} so far)" for count in ("1", "2", "3", "4", "5", "10", "100", "1,000")]


def test_what_is_no_corpus_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "a\n")
    write(tmp_path / "empty.tsv", "")
    write(tmp_path / "blank.jsonl", "\n\n")
    write(tmp_path / "header.csv", "source,target\n")
    write(tmp_path / "rows.parquet.gz", "")
    write_parquet(tmp_path / "rows.parquet", [])
    (tmp_path / "nothing").mkdir()
    without_pairs = ("blank.jsonl", "header.csv", "rows.parquet")
    for files, message in (
        (["a.txt"], r"give two aligned text files, .*a\.txt is no table"),
        (["empty.tsv"], r"empty\.tsv: the file is empty"),
        (["rows.parquet.gz"], r"rows\.parquet\.gz: parquet is compressed within"),
        *(([name], f"{name}: no pair of source and target in it") for name in without_pairs),
    ):
        with pytest.raises(ValueError, match=message):
            stream_parallel_corpus(files=[tmp_path / file for file in files])
    with pytest.raises(FileNotFoundError, match="nothing: a folder without tables"):
        stream_parallel_corpus(files=[tmp_path / "nothing"])
    for names in (["missing.tsv"], ["missing-*.parquet"], ["a.txt", "missing.de"]):
        with pytest.raises(FileNotFoundError, match=r"missing.*: no such file, and no file matches"):
            stream_parallel_corpus(files=[tmp_path / name for name in names])


def test_tokens_are_those_of_a_corpus_in_memory(tmp_path: Path) -> None:
    files = [write_tsv(tmp_path / "a.tsv", PAIRS)]
    for limits in ((16, 8), (100, 100), (1, 1)):
        options = {"max_source_length": limits[0], "max_target_length": limits[1]}
        expected = tokenize_pairs(load_parallel_corpus(files=files), VanillaTransformerTokenizer(), name="a", **options)
        stream = tokenize(stream_parallel_corpus(files=files), **options)
        assert stream.column_names == ["input_ids", "attention_mask", "labels"]
        assert list(stream) == [{name: example[name] for name in stream.column_names} for example in expected]


def test_cut_pairs_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = [write_tsv(tmp_path / "a.tsv", [("short", "kurz"), ("quite long", "lang"), ("short", "recht lang")])]
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        list(tokenize(stream_parallel_corpus(files=files), max_source_length=7, max_target_length=7))
    limits = "cut to max_source_length=7 and max_target_length=7."
    assert caplog.messages == [
        f"The pair that begins 'quite long' has 12 source and 6 target tokens: {limits} (1 so far)",
        f"The pair that begins 'short' has 7 source and 12 target tokens: {limits} (2 so far)",
    ]


def test_a_callable_may_encode_instead(tmp_path: Path) -> None:
    tokenizer = VanillaTransformerTokenizer()
    files = [write_tsv(tmp_path / "a.tsv", [("ab", "c"), ("long source", "c"), ("ab", "c")])]

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        ids = [[100 + len(text)] * len(text) for text in batch["source"]]
        return {"input_ids": ids, "attention_mask": ids, "labels": [[7]] * len(ids), "extra": ids}

    examples = list(tokenize(stream_parallel_corpus(files=files), max_source_length=5, encode=encode))
    assert examples[0] == examples[2] == {"input_ids": [102] * 2, "attention_mask": [102] * 2, "labels": [7]}
    cut = tokenizer(["long source"], text_target=["c"], max_length=5, truncation=True)
    assert examples[1] == {name: ids[0] for name, ids in cut.items()}


@pytest.mark.parametrize("kind", ["aligned.gz", "local dataset"])
def test_a_sample_leaves_the_stream_alone(corpora: dict[str, dict[str, Any]], kind: str) -> None:
    stream = stream_parallel_corpus(**corpora[kind])
    iterator = iter(stream)
    read = to_pairs(itertools.islice(iterator, 8))
    for count in (1, 5, 23, 100):
        sample = to_pairs(sample_pairs(stream, count))
        assert len(sample) == min(count, 23)
        assert len(set(sample)) == len(sample)
        assert set(sample) <= set(PAIRS)
    resumed = stream_parallel_corpus(**corpora[kind])
    resumed.load_state_dict(stream.state_dict())
    assert read + to_pairs(iterator) == read + to_pairs(resumed) == PAIRS


def test_a_sample_comes_from_many_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = stream_parallel_corpus(files=write_aligned(tmp_path, PAIRS))
    sample = to_pairs(sample_pairs(stream, 16))
    assert {PAIRS.index(pair) // 3 for pair in sample} == set(range(8))
    assert sample == to_pairs(sample_pairs(stream, 16))
    assert sample != to_pairs(sample_pairs(stream, 16, seed=1))
    monkeypatch.setattr(streaming_data, "_SAMPLED_SHARDS", 2)
    assert {PAIRS.index(pair) // 3 for pair in to_pairs(sample_pairs(stream, 5))} < set(range(8))
    assert sorted(to_pairs(sample_pairs(stream, 23))) == sorted(PAIRS)
    empty = stream_parallel_corpus(files=[write_tsv(tmp_path / "a.tsv", [("a", "")])], empty_lines="drop")
    with pytest.raises(ValueError, match="The stream has no example to take"):
        sample_pairs(empty, 1)


def test_the_benchmark_reads_a_corpus_and_resumes_in_it(monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    benchmark: Any = importlib.import_module("benchmark_streaming")
    monkeypatch.setattr(benchmark, "in_own_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(benchmark, "WORDS", 1000)
    sizes = {"pairs": 400, "window": 50, "vocab_size": 300, "max_source_tokens": 1500, "max_target_tokens": 1500}
    options = [f"--{name}={value}" for name, value in sizes.items()] + ["--disable_tqdm"]
    folder, output_file = tmp_path / "corpus", tmp_path / "figures" / "a.json"
    benchmark.main([*options, f"--data_dir={folder}", f"--output_file={output_file}"])
    assert "resumed at 95%" in capsys.readouterr().out
    results = json.loads(output_file.read_text())
    assert results["corpus"]["files_written"] == 1
    assert results["reading"]["pairs"] == 400
    assert [mark["at"] for mark in results["reading"]["memory"]] == [0.1, 0.5, 1.0]
    assert [mark["same_batch"] for mark in results["resuming"]] == [True] * 3
    files, written = benchmark.write_corpus(benchmark.BenchmarkArguments(data_dir=str(folder), pairs=400))
    assert written == 0, "the files are used again"
    assert len(set(to_pairs(stream_parallel_corpus(files=files)))) == 400
