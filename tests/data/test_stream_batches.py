"""Token batches from streams: completeness over ranks and passes, budgets, and resuming to the very same batches."""

import functools
import json
import logging
import pickle
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from datasets import Dataset, load_dataset
from datasets.distributed import split_dataset_by_node
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.data.stream_batches import StreamingTokenBatches

TOKENIZER = VanillaTransformerTokenizer()
COUNT = 157

Batches = list[list[dict[str, Any]]]


def make_pairs(count: int = COUNT) -> list[dict[str, str]]:
    rng = np.random.default_rng(0)
    texts = [f"{index} " for index in range(count)]
    sizes = rng.integers(0, 20, (count, 2))
    return [
        {"source": text + "a" * source, "target": text + "b" * target}
        for text, (source, target) in zip(texts, sizes.tolist(), strict=True)
    ]


def tokenize(rows: dict[str, list[str]]) -> dict[str, Any]:
    return dict(TOKENIZER(rows["source"], text_target=rows["target"]))


def write_shards(folder: Path, kind: str, shards: int) -> list[str]:
    folder.mkdir()
    pairs = make_pairs()
    cuts = [0, *sorted(np.random.default_rng(1).choice(np.arange(1, COUNT), shards - 1, replace=False).tolist()), COUNT]
    paths = []
    for index in range(shards):
        part = pairs[cuts[index] : cuts[index + 1]]
        path = folder / f"{index}.{kind}"
        if kind == "parquet":
            Dataset.from_list(part).to_parquet(path, batch_size=7)
        else:
            path.write_text("".join(f"{pair['source']}\t{pair['target']}\n" for pair in part), encoding="utf-8")
        paths.append(str(path))
    return paths


def split_lines(row: dict[str, Any]) -> dict[str, str]:
    source, target = row["text"].split("\t")
    return {"source": source, "target": target}


@functools.cache
def pickle_stream(folder: Path, kind: str, shards: int, batch_size: int) -> bytes:
    files = write_shards(folder / f"{kind}-{shards}-{batch_size}", kind, shards)
    names = {"parquet": "parquet", "txt": "text"}
    dataset = load_dataset(names[kind], data_files=files, split="train", streaming=True, cache_dir=f"{folder}/cache")
    if kind == "txt":
        dataset = dataset.map(split_lines, remove_columns=["text"])
    return pickle.dumps(dataset.map(tokenize, batched=True, batch_size=batch_size, remove_columns=["source", "target"]))


def open_stream(folder: Path, kind: str, shards: int, batch_size: int = 10) -> datasets.IterableDataset:
    stream: datasets.IterableDataset = pickle.loads(pickle_stream(folder, kind, shards, batch_size))
    return stream


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpora")


def make_stream(dataset: datasets.IterableDataset, **options: Any) -> StreamingTokenBatches:
    arguments = {"max_source_tokens": 120, "max_target_tokens": 100, "window": 50, "seed": 3, **options}
    return StreamingTokenBatches(dataset, **arguments)


def number_of(example: dict[str, Any]) -> int:
    return int(str(TOKENIZER.decode(example["labels"], skip_special_tokens=True)).split()[0])


def first_passes(stream: StreamingTokenBatches, passes: int) -> list[Batches]:
    """The batches of each pass of this rank; the position in the state says where a pass begins."""
    result: list[Batches] = [[] for _ in range(passes)]
    for batch in stream:
        number = stream.state_dict()["position"]["number"]
        if number == passes:
            break
        result[number].append(batch)
    return result


def numbers(batches: Iterable[list[dict[str, Any]]]) -> list[int]:
    return [number_of(example) for example in chain.from_iterable(batches)]


LAYOUTS = [("parquet", 1), ("parquet", 4), ("txt", 1), ("txt", 3)]


class TestPasses:
    @pytest.mark.parametrize("ranks", [1, 2, 3])
    @pytest.mark.parametrize(("kind", "shards"), LAYOUTS)
    def test_each_example_once_in_a_pass_over_all_ranks(self, folder: Path, kind: str, shards: int, ranks: int) -> None:
        streams = [
            make_stream(open_stream(folder, kind, shards), num_replicas=ranks, rank=rank) for rank in range(ranks)
        ]
        shares = [first_passes(stream, 2) for stream in streams]
        for batches in zip(*shares, strict=True):
            assert sorted(chain.from_iterable(map(numbers, batches))) == list(range(COUNT))
        assert numbers(shares[0][0]) != numbers(shares[0][1])

    def test_examples_arrive_whole_and_within_the_budgets(self, folder: Path) -> None:
        pairs = make_pairs()
        stream = make_stream(open_stream(folder, "parquet", 4))
        real = padded = 0
        for batch in islice(stream, 40):
            lengths = {key: [len(example[key]) for example in batch] for key in ("input_ids", "labels")}
            assert len(batch) * max(lengths["input_ids"]) <= 120
            assert len(batch) * max(lengths["labels"]) <= 100
            for example in batch:
                pair = pairs[number_of(example)]
                expected = TOKENIZER(pair["source"], text_target=pair["target"])
                assert example == {key: expected[key] for key in ("input_ids", "attention_mask", "labels")}
            real += sum(map(sum, lengths.values()))
            padded += sum(len(batch) * max(values) for values in lengths.values())
        assert stream.batches == 40
        assert stream.padding_share == pytest.approx(1 - real / padded)
        assert stream.padding_share < 0.25

    def test_lengths_meet_within_a_window_only(self, folder: Path) -> None:
        """A single shard in order: the first window holds the first 50 examples, and batches mix them."""
        batches = first_passes(make_stream(open_stream(folder, "txt", 1)), 1)[0]
        seen = numbers(batches)
        assert sorted(seen[:50]) == list(range(50))
        assert sorted(seen[150:]) == list(range(150, COUNT))
        assert seen[:50] != sorted(seen[:50])

    def test_seeds_and_passes_read_shards_in_other_orders(self, folder: Path) -> None:
        def shard_orders(seed: int) -> list[tuple[int, ...]]:
            stream = make_stream(open_stream(folder, "parquet", 4), seed=seed, window=1)
            return [tuple(numbers(batches)) for batches in first_passes(stream, 2)]

        orders = [*shard_orders(0), *shard_orders(1)]
        assert len(set(orders)) > 2
        assert shard_orders(0) == orders[:2]

    def test_workers_are_refused(self, folder: Path) -> None:
        workers = DataLoader(make_stream(open_stream(folder, "txt", 1)), batch_size=None, num_workers=1)
        with pytest.raises(ValueError, match="num_workers=0"):
            next(iter(workers))


class TestResuming:
    @settings(max_examples=12)
    @given(
        layout=st.sampled_from(LAYOUTS),
        ranks=st.integers(1, 3),
        data=st.data(),
        window=st.sampled_from([1, 7, 50, 1000]),
        batch_size=st.sampled_from([1, 10]),
    )
    def test_a_fresh_stream_goes_on_with_the_same_batches(
        self, folder: Path, layout: tuple[str, int], ranks: int, data: st.DataObject, window: int, batch_size: int
    ) -> None:
        rank = data.draw(st.integers(0, ranks - 1))
        stops = sorted(data.draw(st.tuples(st.integers(0, 40), st.integers(0, 40))))

        def stream() -> StreamingTokenBatches:
            dataset = open_stream(folder, *layout, batch_size)
            return make_stream(dataset, window=window, num_replicas=ranks, rank=rank)

        unbroken = list(islice(stream(), 50))
        state: str | None = None
        for start, stop in zip([0, *stops], [*stops, 50], strict=True):
            part = stream()
            if state is not None:
                part.load_state_dict(json.loads(state))
            assert part.batches == start
            assert list(islice(part, stop - start)) == unbroken[start:stop]
            assert part.batches == stop
            state = json.dumps(part.state_dict())

    def test_a_formatted_stream(self, folder: Path) -> None:

        def stream() -> StreamingTokenBatches:
            return make_stream(open_stream(folder, "parquet", 4).with_format("numpy"))

        unbroken = [[example["labels"].tolist() for example in batch] for batch in islice(stream(), 60)]
        first, second = stream(), stream()
        list(islice(first, 23))
        second.load_state_dict(first.state_dict())
        rest = [[example["labels"].tolist() for example in batch] for batch in islice(second, 37)]
        assert rest == unbroken[23:]

    def test_iterating_again_begins_at_the_loaded_position(self, folder: Path) -> None:
        stream = make_stream(open_stream(folder, "parquet", 4))
        assert stream.state_dict()["skip"] == 0
        iterator = iter(stream)
        first = list(islice(iterator, 5))
        state = stream.state_dict()
        text = json.dumps(state)
        list(islice(iterator, 50))
        assert json.dumps(state) == text, "the state does not change while iteration goes on"
        assert list(islice(stream, 5)) == first
        stream.load_state_dict(state)
        second = list(islice(stream, 5))
        assert second != first
        assert list(islice(stream, 5)) == second

    def test_other_arguments(self, folder: Path) -> None:
        state = make_stream(open_stream(folder, "txt", 3)).state_dict()
        other = make_stream(open_stream(folder, "txt", 1), window=40, seed=4)
        with pytest.raises(ValueError, match=r"window=50 \(now 40\), seed=3 \(now 4\), num_shards=3 \(now 1\)"):
            other.load_state_dict(state)


def from_lengths(*shards: list[tuple[int, int]]) -> datasets.IterableDataset:
    """A stream with one shard for each list of lengths; token ids tell the shard and the place in it."""

    def examples(shards: list[tuple[int, list[tuple[int, int]]]]) -> Iterator[dict[str, list[int]]]:
        for shard, lengths in shards:
            for index, (source, target) in enumerate(lengths):
                yield {"input_ids": [shard] * source, "labels": [index] * target}

    return datasets.IterableDataset.from_generator(examples, gen_kwargs={"shards": list(enumerate(shards))})


class TestLeftOut:
    def test_each_is_named_until_they_are_many(self, caplog: pytest.LogCaptureFixture) -> None:
        dataset = from_lengths([(3, 3), (121, 3), *[(3, 101)] * 6, (120, 100)])
        stream = make_stream(dataset)
        with caplog.at_level(logging.WARNING):
            first = first_passes(stream, 1)[0]
        lengths = [(len(example["input_ids"]), len(example["labels"])) for batch in first for example in batch]
        assert sorted(lengths) == [(3, 3), (120, 100)]
        messages = [message for message in caplog.messages if "pass 1:" in message or "Pass 1 " in message]
        assert messages[0] == (
            "Example 2 of shard 1 (of 1) is left out of pass 1: 121 source and 3 target tokens are more than a batch "
            "may have, max_source_tokens=120 and max_target_tokens=100."
        )
        assert [message.split(":")[0] for message in messages[1:5]] == [
            f"Example {number} of shard 1 (of 1) is left out of pass 1" for number in (3, 4, 5, 6)
        ]
        assert messages[5:] == ["Pass 1 left out 7 examples in all."]

    def test_resuming_goes_on_counting(self, caplog: pytest.LogCaptureFixture) -> None:
        dataset = from_lengths([(200, 3), (3, 3)] * 6)
        stream = make_stream(dataset, window=3)
        list(islice(stream, 2))
        later = make_stream(dataset, window=3)
        later.load_state_dict(stream.state_dict())
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            first_passes(later, 1)
        assert "Example 7 of shard 1 (of 1) is left out of pass 1" in caplog.text
        assert "Pass 1 left out 6 examples in all." in caplog.messages

    def test_where_nothing_is_left_for_a_rank(self) -> None:
        stream = make_stream(from_lengths([(200, 3)] * 3, [(3, 200)]))
        with pytest.raises(ValueError, match=r"rank 0 of 1: 4 examples in the last pass, 4 of them over"):
            next(iter(stream))
        with pytest.raises(ValueError, match=r"no pair for rank 0 of 1: 0 examples"):
            next(iter(make_stream(from_lengths([]))))
        dataset = from_lengths([(3, 3)] * 2)
        assert len(next(iter(make_stream(dataset, num_replicas=3, rank=1)))) == 1
        with pytest.raises(ValueError, match=r"no pair for rank 2 of 3: 2 examples"):
            next(iter(make_stream(dataset, num_replicas=3, rank=2)))

    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_some_empty_shards_are_no_error(self, rank: int) -> None:
        stream = make_stream(from_lengths([(3, 3)] * 4, [], []), num_replicas=3, rank=rank)
        assert [len(batch) for batch in islice(stream, 6)] == [4] * 6
        assert stream.state_dict()["position"]["number"] > 5

    def test_resuming_at_the_end_of_the_only_shard(self) -> None:
        dataset = from_lengths([(3, 3)] * 4)
        stream, later = (make_stream(dataset, window=4) for _ in range(2))
        expected = list(islice(stream, 3))
        list(islice(stream, 1))
        later.load_state_dict(stream.state_dict())
        assert list(islice(later, 2)) == expected[1:]


class TestWrongDatasets:
    def test_arguments_kinds_shuffled_and_split_ones(self) -> None:
        for options, message in (
            ({"window": 0}, "window=0: must be at least 1"),
            ({"max_source_tokens": 0}, "max_source_tokens=0: must be at least 1"),
            ({"rank": 1}, "rank=1: must be at least 0 and less than num_replicas=1"),
        ):
            with pytest.raises(ValueError, match=message):
                make_stream(from_lengths([(3, 3)]), **options)
        with pytest.raises(ValueError, match=r"dataset is a Dataset: it must be a datasets\.IterableDataset"):
            make_stream(Dataset.from_dict({"input_ids": [[1]], "labels": [[1]]}))
        dataset = from_lengths([(3, 3)] * 4, [(3, 3)])
        shuffled = dataset.shuffle(seed=0, buffer_size=2)
        for stream in (shuffled, shuffled.map(lambda row: row), datasets.concatenate_datasets([dataset, shuffled])):
            with pytest.raises(ValueError, match="dataset was shuffled"):
                make_stream(stream)
        with pytest.raises(ValueError, match="dataset was split by node already"):
            make_stream(split_dataset_by_node(dataset, rank=0, world_size=2))
