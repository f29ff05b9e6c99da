"""Parallel corpora that do not fit in memory: read, checked and tokenised while they are used.

`stream_parallel_corpus` and `tokenize_stream` give a `datasets.IterableDataset` whose `state_dict` is exact and whose
memory does not grow with the corpus. It is cut into shards, which can be shuffled, dealt to processes and workers, and
resumed without reading those before:

- two aligned text files, a `.tsv` or a `.jsonl` file: every 2,000 lines (more where there would be over 10,000 shards);
- parquet: every row group, or so many neighbouring ones that they have 2,000 rows;
- a folder written by `save_to_disk`: every 2,000 records;
- `.csv` (whose records may hold line ends) and anything in gzip (in which one cannot seek): one shard a file, so give
  such a corpus in many files, or unpack it;
- a dataset of the Hub: its own shards, as a rule one a file.
"""

import copy
import glob
import logging
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow  # type: ignore[import-untyped]
from datasets import Dataset, Features, IterableDataset, List, Value, load_dataset
from transformers import PreTrainedTokenizerBase

from .corpora import (
    MEND_OR_DROP,
    PAIR_READERS,
    USUAL_COLUMNS,
    WHOLE_FILE,
    Columns,
    EmptyLines,
    Layout,
    LineBlock,
    Pair,
    check_arguments,
    check_same_length,
    delimited_pairs,
    file_kind,
    is_blank,
    is_full,
    is_gzip,
    iterate_lines,
    json_names,
    json_pairs,
    load_saved_split,
    open_parquet,
    strip_line_end,
    tsv_rows,
)

logger = logging.getLogger(__name__)

# Few enough that a window of batches comes from many places of the corpus; more where the shards would be too many.
_SHARD_PAIRS = 2000
_MOST_SHARDS = 10_000
_BYTES_OF_A_LINE = 100
_READ_BYTES = 1 << 22
_READ_ROWS = 1000
_TOKENIZED_TOGETHER = 1000
_SAMPLED_SHARDS = 16
_SHOWN = 5

_TOKEN_COLUMNS = ("input_ids", "attention_mask", "labels")

Encode = Callable[[dict[str, list[str]]], Mapping[str, Sequence[list[int]]]]


@dataclass
class _Tally:
    """Warns of the first few of many like events, and then whenever their number has grown tenfold."""

    count: int = 0

    def add(self, message: str) -> None:
        self.count += 1
        if self.count <= _SHOWN or str(self.count).rstrip("0") == "1":
            logger.warning("%s (%s so far)", message, f"{self.count:,}")


class _Shard(Protocol):
    """A part of a corpus; can be read again and again, from its beginning."""

    @property
    def name(self) -> str:
        """What errors call it."""

    @property
    def unit(self) -> str:
        """What errors call one of its records."""

    def pairs(self) -> Iterator[Pair]:
        """Reads it."""


@dataclass(frozen=True)
class _AlignedBlock:
    source_file: str
    target_file: str
    source_block: LineBlock = WHOLE_FILE
    target_block: LineBlock = WHOLE_FILE
    unit: str = "line"

    @property
    def name(self) -> str:
        return f"{self.source_file} and {self.target_file}"

    def pairs(self) -> Iterator[Pair]:
        source_lines = iterate_lines(self.source_file, self.source_block)
        target_lines = iterate_lines(self.target_file, self.target_block)
        for number, (source, target) in enumerate(zip_longest(source_lines, target_lines), self.source_block.first):
            if source is None or target is None:
                files = (self.source_file, self.target_file)
                short, long = files if source is None else reversed(files)
                raise ValueError(
                    f"{short} ends after line {number - 1:,}, but {long} goes on. Line n of one must be the "
                    "translation of line n of the other: look for a sentence broken over two lines or a file cut short."
                )
            yield number, strip_line_end(source), strip_line_end(target)


@dataclass(frozen=True)
class _TableBlock:
    name: str
    columns: Columns
    block: LineBlock = WHOLE_FILE
    layout: Layout | None = None
    names: tuple[str, str] | None = None
    unit: str = "line"

    def pairs(self) -> Iterator[Pair]:
        if self.layout is not None:
            rows = tsv_rows(self.name, self.block)
            return delimited_pairs(self.name, rows=rows, columns=self.columns, separator="tab", layout=self.layout)
        if self.names is not None:
            return json_pairs(self.name, columns=self.columns, block=self.block, names=self.names)
        return PAIR_READERS[file_kind(self.name)](self.name, self.columns)


@dataclass(frozen=True)
class _RowGroups:
    name: str
    row_groups: tuple[int, ...]
    first: int
    names: tuple[str, str]
    unit: str = "record"

    def pairs(self) -> Iterator[Pair]:
        with open_parquet(self.name) as file:
            batches = file.iter_batches(_READ_ROWS, row_groups=list(self.row_groups), columns=list(self.names))
            tables = (pyarrow.Table.from_batches([batch]) for batch in batches)
            yield from _table_pairs(tables, self.names, self.first)


@dataclass(frozen=True)
class _DatasetShard:
    dataset: Dataset | IterableDataset
    dataset_name: str
    index: int
    num_shards: int
    names: tuple[str, str]
    unit: str = "record"

    @property
    def name(self) -> str:
        return f"{self.dataset_name}, shard {self.index} of {self.num_shards}"

    def pairs(self) -> Iterator[Pair]:
        shard = self.dataset.shard(num_shards=self.num_shards, index=self.index, contiguous=True)
        yield from _table_pairs(shard.with_format("arrow").iter(batch_size=_READ_ROWS), self.names, 1)


def _flatten(table: pyarrow.Table) -> pyarrow.Table:
    while any(pyarrow.types.is_struct(column.type) for column in table.schema):
        table = table.flatten()
    return table


def _table_pairs(tables: Iterator[pyarrow.Table], names: tuple[str, str], first: int) -> Iterator[Pair]:
    for table in map(_flatten, tables):
        source, target = (table[name].to_pylist() for name in names)
        yield from zip(range(first, first + len(source)), source, target, strict=True)
        first += len(source)


def _lines_of_a_shard(path: str) -> int:
    return max(_SHARD_PAIRS, os.path.getsize(path) // (_MOST_SHARDS * _BYTES_OF_A_LINE))


def _line_blocks(path: str, size: int) -> list[LineBlock]:
    """Looks for every `size`-th line of a file that is not compressed, without decoding it."""
    lines = position = 0
    ended = True
    starts = [0]
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            line_ends = np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n"))
            before_next = len(starts) * size - lines - 1
            starts.extend((position + line_ends[before_next::size] + 1).tolist())
            lines += len(line_ends)
            position += len(chunk)
            ended = chunk.endswith(b"\n")
    if position == 0:
        raise ValueError(f"{path}: the file is empty.")
    lines += not ended
    return [
        LineBlock(offset=offset, first=done + 1, count=min(size, lines - done))
        for done, offset in zip(range(0, lines, size), starts, strict=False)  # the last start may be the file's end
    ]


def _aligned_shards(source_file: str, target_file: str) -> list[_Shard]:
    if is_gzip(source_file) or is_gzip(target_file):
        return [_AlignedBlock(source_file, target_file)]
    size = _lines_of_a_shard(source_file)
    source_blocks, target_blocks = _line_blocks(source_file, size), _line_blocks(target_file, size)
    lengths = [blocks[-1].first + (blocks[-1].count or 0) - 1 for blocks in (source_blocks, target_blocks)]
    check_same_length((source_file, lengths[0]), (target_file, lengths[1]))
    return [
        _AlignedBlock(source_file, target_file, source_block, target_block)
        for source_block, target_block in zip(source_blocks, target_blocks, strict=True)
    ]


def _parquet_shards(path: str, columns: Columns) -> list[_Shard]:
    with open_parquet(path) as file:
        names = columns.require(_flatten(file.schema_arrow.empty_table()).column_names, path)
        rows = [file.metadata.row_group(index).num_rows for index in range(file.metadata.num_row_groups)]
    least = max(_SHARD_PAIRS, sum(rows) // _MOST_SHARDS)
    shards: list[_Shard] = []
    groups: list[int] = []
    first, last = 1, 0
    for index, size in enumerate(rows):
        groups.append(index)
        last += size
        if last - first + 1 >= least or (last >= first and index == len(rows) - 1):
            shards.append(_RowGroups(path, tuple(groups), first=first, names=names))
            first, groups = last + 1, []
    return shards


def _table_shards(path: str, columns: Columns) -> list[_Shard]:
    kind = file_kind(path)
    if kind == ".parquet":
        return _parquet_shards(path, columns)
    if kind == ".csv" or is_gzip(path):
        return [_TableBlock(path, columns)]
    blocks = _line_blocks(path, _lines_of_a_shard(path))
    if kind == ".tsv":
        head = next(((number, row) for number, row in tsv_rows(path) if not is_blank(row)), None)
        layout = head and Layout.of(*head, columns=columns, path=path, separator="tab")
        return [_TableBlock(path, columns, block, layout=layout) for block in blocks if layout]
    names = json_names(path, columns)
    return [_TableBlock(path, columns, block, names=names) for block in blocks if names]


def _is_table(path: str | Path) -> bool:
    kind = file_kind(path)
    return kind in PAIR_READERS or (kind == ".parquet" and not is_gzip(path))


def _tables_in(folder: Path) -> list[str]:
    tables = sorted(str(path) for path in folder.iterdir() if _is_table(path) and not path.name.startswith((".", "_")))
    kinds = sorted({file_kind(path) for path in tables})
    if len(kinds) != 1:
        found = f"tables of several kinds ({', '.join(kinds)})" if kinds else "no table"
        raise ValueError(
            f"{folder}: {found} in the folder; it must have tables of one kind ({', '.join(PAIR_READERS)}, .parquet)."
        )
    return tables


def _expand(files: Sequence[str | Path]) -> list[str]:
    """The files behind paths, folders and patterns such as `train-*.parquet`, in the order given."""
    expanded: list[str] = []
    for entry in files:
        if Path(entry).is_dir():
            expanded.extend(_tables_in(Path(entry)))
        elif Path(entry).exists():
            expanded.append(str(entry))
        elif matches := sorted(glob.glob(str(entry), recursive=True)):
            expanded.extend(matches)
        else:
            raise FileNotFoundError(f"{entry}: no such file, and no file matches it as a pattern.")
    twice = sorted({path for path in expanded if expanded.count(path) > 1})
    if twice:
        raise ValueError(f"files name {twice[0]} more than once.")
    return expanded


def _file_shards(files: Sequence[str | Path], columns: Columns) -> list[_Shard]:
    paths = _expand(files)
    texts = [path for path in paths if not _is_table(path)]
    if len(paths) == len(texts) == 2:
        return _aligned_shards(*paths)
    if texts or not paths:
        legal = ", ".join(f"{suffix}[.gz]" for suffix in PAIR_READERS)
        raise ValueError(
            f"files={[str(file) for file in files]}: give two aligned text files, the source file first, or any number "
            f"of tables ({legal}, .parquet){'; ' + texts[0] + ' is no table' if texts else ''}."
        )
    return [shard for path in paths for shard in _table_shards(path, columns)]


def _column_names(dataset: Dataset | IterableDataset) -> list[str]:
    """The columns, nested ones as `translation.en`."""
    if dataset.features is not None:
        return list(dataset.features.flatten())
    return list(Features.flatten(Dataset.from_list(list(dataset.take(1))).features))


def _dataset_shards(dataset_name: str, config_name: str | None, split: str, columns: Columns) -> list[_Shard]:
    name = f"{dataset_name} ({split})"
    dataset = load_saved_split(dataset_name, split)
    if dataset is None:
        dataset = load_dataset(dataset_name, name=config_name, split=split, streaming=True)
        num_shards = dataset.num_shards
    else:
        num_shards = min(max(1, len(dataset) // _SHARD_PAIRS), _MOST_SHARDS)
    names = columns.require(_column_names(dataset), name)
    if dataset.column_names is not None:
        outer = {column if column in dataset.column_names else column.partition(".")[0] for column in names}
        dataset = dataset.select_columns(sorted(outer))
    return [_DatasetShard(dataset, name, index, num_shards, names) for index in range(num_shards)]


def _generate_pairs(
    shards: Sequence[tuple[_Shard, ...]], *, max_samples: int | None, empty_lines: EmptyLines, dropped: _Tally
) -> Iterator[dict[str, object]]:
    number = 0
    for shard in (shard for group in shards for shard in group):
        for pair in shard.pairs():
            if is_full(pair, shard.name, shard.unit):
                yield {"source": pair[1], "target": pair[2]}
                number += 1
                if number == max_samples:
                    return
                continue
            message = f"{shard.name}, {shard.unit} {pair[0]}: empty on one side or both."
            if empty_lines == "error":
                raise ValueError(f"{message} {MEND_OR_DROP}")
            dropped.add(f"{message} It was dropped.")


def stream_parallel_corpus(
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
) -> IterableDataset:
    """Streams sentence pairs from local files or from a dataset of the Hub, in constant memory.

    Takes the kinds of files that `load_parallel_corpus` takes, finds the columns as it does, and is as strict. What is
    cheap to check is checked at once: that files are there, the columns of plain text and parquet, the number of lines
    of aligned files that are not compressed. Everything else is checked when it is reached, by errors that name the
    file and the line.

    Args:
        files: Two aligned text files (source first), or any number of tables: their paths, folders of them, patterns
            such as `corpus/train-*.parquet`. Exactly one of `files` and `dataset_name` is given.
        dataset_name: A dataset on the Hub, a local folder of one, or a folder written by `save_to_disk`.
        dataset_config_name: The dataset's configuration, where it has several.
        split: The dataset's split, a whole one; not used for files.
        source_column: Column of the source texts; needs `target_column`.
        target_column: Column of the target texts; needs `source_column`.
        source_lang: Source language, as columns or the keys of `translation` are named.
        target_lang: Target language, likewise.
        usual_columns: Pairs of names to look for, those of summaries, say.
        max_samples: Keep this many pairs from the beginning. The stream is then a single shard.
        empty_lines: What to do with pairs that are empty (null, or white space only) on one side or both: "error"
            raises, "drop" leaves them out and logs the first few and how many they have become.

    Returns:
        A stream of exactly two columns of strings, "source" and "target", in the order of the corpus. It can be
        iterated again and pickled; `num_shards`, `shard`, `state_dict` and `load_state_dict` are those of `datasets`,
        and `split_dataset_by_node` takes it. Its `features` are not declared.

    Raises:
        FileNotFoundError: if a file or the dataset does not exist, or a pattern matches nothing.
        ConnectionError: if the Hub cannot be reached.
        ValueError: if the arguments contradict each other, and, now or while iterating, if aligned files have
            different numbers of lines, a file is empty, damaged or not UTF-8, a column is missing, a value is not a
            string, or a side is empty.
    """
    check_arguments(files=files, dataset_name=dataset_name, max_samples=max_samples, empty_lines=empty_lines)
    columns = Columns(source_column, target_column, source_lang, target_lang, usual_columns)
    if files is not None:
        shards = _file_shards(files, columns)
    else:
        shards = _dataset_shards(str(dataset_name), dataset_config_name, split, columns)
    if all(next(shard.pairs(), None) is None for shard in shards):
        raise ValueError(f"{dataset_name or ', '.join(map(str, files or ()))}: no pair of source and target in it.")
    # datasets cuts a stream into shards by the lists among the arguments of its generator.
    groups = [(shard,) for shard in shards] if max_samples is None else [tuple(shards)]
    options = {"max_samples": max_samples, "empty_lines": empty_lines, "dropped": _Tally()}
    # With features given, it would check and convert each example by them, which takes longer than all the rest.
    return IterableDataset.from_generator(_generate_pairs, gen_kwargs={"shards": groups, **options})


@dataclass
class _TokenizeBatch:
    tokenizer: PreTrainedTokenizerBase
    max_source_length: int
    max_target_length: int
    encode: Encode | None
    cut: _Tally = field(default_factory=_Tally)

    def __call__(self, batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = self._encode(batch)
        too_long = [
            row
            for row, (source, target) in enumerate(zip(encoded["input_ids"], encoded["labels"], strict=True))
            if len(source) > self.max_source_length or len(target) > self.max_target_length
        ]
        for row in too_long:
            self.cut.add(
                f"The pair that begins {batch['source'][row][:60]!r} has {len(encoded['input_ids'][row])} source and "
                f"{len(encoded['labels'][row])} target tokens: cut to max_source_length={self.max_source_length} and "
                f"max_target_length={self.max_target_length}."
            )
        if too_long:
            sources = [batch["source"][row] for row in too_long]
            targets = [batch["target"][row] for row in too_long]
            cut = self.tokenizer(
                sources, max_length=self.max_source_length, truncation=True, return_attention_mask=True
            )
            labels = self.tokenizer(text_target=targets, max_length=self.max_target_length, truncation=True)
            cut["labels"] = labels["input_ids"]
            for name in _TOKEN_COLUMNS:
                for row, ids in zip(too_long, cut[name], strict=True):
                    encoded[name][row] = ids
        return encoded

    def _encode(self, batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        if self.encode is None:
            # The tokenizer's own limit is not ours: verbose=False spares its warning.
            encoded: Mapping[str, Sequence[list[int]]] = self.tokenizer(
                batch["source"], text_target=batch["target"], return_attention_mask=True, verbose=False
            )
        else:
            encoded = self.encode(batch)
        missing = [name for name in _TOKEN_COLUMNS if name not in encoded]
        if missing:
            raise ValueError(
                f"encode gave the columns {', '.join(encoded)}; it must give {', '.join(_TOKEN_COLUMNS)}, each with "
                "one list of numbers for each pair."
            )
        return {name: list(encoded[name]) for name in _TOKEN_COLUMNS}


def tokenize_stream(
    dataset: IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_source_length: int,
    max_target_length: int,
    encode: Encode | None = None,
) -> IterableDataset:
    """Turns the texts of a stream into ids while it is iterated, and reports pairs that are cut.

    Of these the log has the first few and, after that, their number whenever it has grown tenfold; it starts anew in
    each process.

    Args:
        dataset: String columns "source" and "target", as from `stream_parallel_corpus`.
        tokenizer: Takes them apart, and cuts the texts that are too long.
        max_source_length: Tokens a source is cut to.
        max_target_length: Tokens a target is cut to.
        encode: Does it instead of `tokenizer(source, text_target=target)`, for BPE-dropout, say. Gets a batch
            `{"source": [...], "target": [...]}` and returns "input_ids", "attention_mask" and "labels", each a list of
            lists of numbers. A pair that it makes longer than the limits is encoded anew by the tokenizer. To resume
            exactly, it must give the same ids for the same texts, which BPE-dropout does not.

    Returns:
        A stream of the columns "input_ids", "attention_mask" and "labels", with the shards of `dataset` and an exact
        `state_dict`, which tokenises at most 1,000 pairs again.

    Raises:
        ValueError: if a limit is not positive, or, while iterating, `encode` leaves a column out.
    """
    for name, limit in (("max_source_length", max_source_length), ("max_target_length", max_target_length)):
        if limit < 1:
            raise ValueError(f"{name}={limit}: must be at least 1.")
    features = Features({name: List(Value("int64")) for name in _TOKEN_COLUMNS})
    return dataset.map(
        _TokenizeBatch(tokenizer, max_source_length, max_target_length, encode),
        batched=True,
        batch_size=_TOKENIZED_TOGETHER,
        remove_columns=["source", "target"],
        features=features,
    )


def sample_pairs(dataset: IterableDataset, count: int, *, seed: int = 0) -> Dataset:
    """Takes some examples out of a stream into memory, to train a tokenizer on, say.

    They come from the beginnings of shards drawn at random, 16 of which are read in turn, since the first examples of
    the first shard may all be of one kind. The stream, its state and an iteration that is under way are left alone.

    Args:
        dataset: The stream.
        count: How many; a smaller stream is taken as a whole.
        seed: Of the order of the shards.

    Returns:
        A dataset of the stream's columns.

    Raises:
        ValueError: if `count` is not positive, or the stream is empty.
    """
    if count < 1:
        raise ValueError(f"count={count}: must be at least 1.")
    # Streams made from each other share their position.
    dataset = copy.deepcopy(dataset)
    order = random.Random(seed).sample(range(dataset.num_shards), k=dataset.num_shards)
    unread = (iter(dataset.shard(num_shards=len(order), index=index)) for index in order)
    reading = deque(islice(unread, _SAMPLED_SHARDS))
    tables: list[pyarrow.Table] = []
    while reading and count > 0:
        shard = reading.popleft()
        taken = list(islice(shard, min(_READ_ROWS, count)))
        if taken:
            tables.append(pyarrow.Table.from_pylist(taken))
        count -= len(taken)
        reading.extend([shard] if taken else islice(unread, 1))
    if not tables:
        raise ValueError("The stream has no example to take.")
    return Dataset(pyarrow.concat_tables(tables))
