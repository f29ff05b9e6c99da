"""Parallel corpora that do not fit in memory: read, checked and tokenised while they are used, part by part."""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TypeVar

import pyarrow  # type: ignore[import-untyped]
from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from .corpora import EmptyLines, Tally, good_pairs, open_corpus
from .mixtures import StreamMixture
from .readers import USUAL_COLUMNS, Columns, Part

_READ_ROWS = 1000
_TOKENIZED_TOGETHER = 1000
_SAMPLED_SHARDS = 16
_TOKEN_COLUMNS = ("input_ids", "attention_mask", "labels")

Stream = TypeVar("Stream", IterableDataset, StreamMixture)
Encode = Callable[[dict[str, list[str]]], Mapping[str, Sequence[list[int]]]]


def _generate_pairs(
    shards: Sequence[tuple[Part, ...]], *, max_samples: int | None, empty_lines: EmptyLines, dropped: Tally
) -> Iterator[dict[str, str]]:
    parts = (part for group in shards for part in group)
    for _, source, target in islice(good_pairs(parts, empty_lines=empty_lines, dropped=dropped), max_samples):
        yield {"source": source, "target": target}


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

    Takes the arguments of `load_parallel_corpus`, and is as strict; `split` must be a whole one here, and with
    `max_samples` the stream is one shard. What is not cheap to check is checked when it is reached. The stream has the
    string columns "source" and "target", and an exact `state_dict`; it can be pickled, sharded and split by node.
    """
    columns = Columns(source_column, target_column, source_lang, target_lang, usual_columns)
    parts = open_corpus(
        columns, files, dataset_name, dataset_config_name, split, max_samples, empty_lines, streaming=True
    )
    # datasets cuts a stream into shards by the lists among the arguments of its generator.
    groups = [(part,) for part in parts] if max_samples is None else [tuple(parts)]
    options = {"max_samples": max_samples, "empty_lines": empty_lines, "dropped": Tally()}
    # With features given, it would check and convert each example by them, which takes longer than all the rest.
    return IterableDataset.from_generator(_generate_pairs, gen_kwargs={"shards": groups, **options})


@dataclass
class _TokenizeBatch:
    tokenizer: PreTrainedTokenizerBase
    max_source_length: int
    max_target_length: int
    encode: Encode | None
    cut: Tally = field(default_factory=Tally)

    def __call__(self, batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = self._encode(batch)
        lengths = [list(map(len, encoded[name])) for name in ("input_ids", "labels")]
        limits = (self.max_source_length, self.max_target_length)
        rows = enumerate(zip(*lengths, strict=True))
        too_long = [row for row, (source, target) in rows if source > limits[0] or target > limits[1]]
        for row in too_long:
            self.cut.add(
                f"The pair that begins {batch['source'][row][:60]!r} has {lengths[0][row]} source and "
                f"{lengths[1][row]} target tokens: cut to max_source_length={limits[0]} and "
                f"max_target_length={limits[1]}."
            )
        if too_long:
            sources, targets = ([batch[side][row] for row in too_long] for side in ("source", "target"))
            cut = self.tokenizer(sources, max_length=limits[0], truncation=True, return_attention_mask=True)
            cut["labels"] = self.tokenizer(text_target=targets, max_length=limits[1], truncation=True)["input_ids"]
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
        return {name: list(encoded[name]) for name in _TOKEN_COLUMNS}


def tokenize_stream(
    dataset: Stream,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_source_length: int,
    max_target_length: int,
    encode: Encode | None = None,
) -> Stream:
    """Turns the texts of a stream into "input_ids", "attention_mask" and "labels" while it is iterated.

    Texts are cut to so many tokens, with a warning. `encode` does it instead of the tokenizer, for BPE-dropout, say; a
    pair that it makes longer than the limits is encoded anew by the tokenizer.
    """
    return dataset.map(
        _TokenizeBatch(tokenizer, max_source_length, max_target_length, encode),
        batched=True,
        batch_size=_TOKENIZED_TOGETHER,
        remove_columns=["source", "target"],
        features=Features({name: List(Value("int64")) for name in _TOKEN_COLUMNS}),
    )


def sample_pairs(dataset: IterableDataset | StreamMixture, count: int, *, seed: int = 0) -> Dataset:
    """Takes examples out of a stream, which stays as it is, from the beginnings of shards drawn at random by `seed`."""
    if isinstance(dataset, StreamMixture):
        counts = dataset.divide(count, "tokenizer_sample")
        drawn = [sample_pairs(each, own, seed=seed) for each, own in zip(dataset.streams, counts, strict=True)]
        return concatenate_datasets(drawn)
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
