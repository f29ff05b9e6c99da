"""Several corpora in one training: each has its share, in memory and as streams, and streams resume."""

import json
from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st

from vanilla_transformer.data.mixtures import StreamMixture, mix_corpora, repeat_rows, temper
from vanilla_transformer.data.stream_batches import StreamingTokenBatches
from vanilla_transformer.data.streams import sample_pairs

Sizes = st.lists(st.tuples(st.integers(1, 40), st.floats(0.1, 10)), min_size=1, max_size=4)


def make_corpus(name: str, size: int) -> Dataset:
    return Dataset.from_dict({"source": [f"{name}{row}" for row in range(size)], "target": ["x"] * size})


class TestRows:
    @given(corpora=Sizes, seed=st.integers(0, 9))
    def test_each_has_its_share_and_none_is_lost(self, corpora: list[tuple[int, float]], seed: int) -> None:
        sizes, weights = [size for size, _ in corpora], [weight for _, weight in corpora]
        rows = repeat_rows(sizes, weights, seed=seed)
        ends = np.cumsum(sizes)
        counts = [
            np.bincount(rows, minlength=ends[-1])[end - size : end] for end, size in zip(ends, sizes, strict=True)
        ]
        assert all(count.max() - count.min() <= 1 <= count.min() for count in counts)
        assert any(count.max() == 1 for count in counts), "no more than needed"
        scale = max(size / weight for size, weight in corpora)
        assert [count.sum() for count in counts] == pytest.approx([scale * weight for weight in weights], abs=0.5)

    def test_the_seed_draws_what_is_there_once_more(self) -> None:
        rows = [tuple(repeat_rows([9, 30], [1, 2], seed=seed)) for seed in (0, 0, 1)]
        assert rows[0] == rows[1] != rows[2]

    def test_temperature_evens_sizes_out(self) -> None:
        assert temper([100, 900], 1) == [100, 900]
        first, second = temper([100, 900], 2)
        assert second / first == pytest.approx(3)

    def test_corpora_are_put_together(self) -> None:
        corpora = [make_corpus("a", 4), make_corpus("b", 2)]
        assert mix_corpora(corpora)["source"] == ["a0", "a1", "a2", "a3", "b0", "b1"]
        counts = Counter(mix_corpora(corpora, [1, 2])["source"])
        assert counts == {f"a{row}": 1 for row in range(4)} | {f"b{row}": 4 for row in range(2)}
        for weights, message in (
            ([1], "1 number.s., and there are 2"),
            ([1, 0], "has 0; each must be"),
            ([1, np.nan], "nan"),
        ):
            with pytest.raises(ValueError, match=message):
                mix_corpora(corpora, weights)


def open_stream(name: int, sizes: Sequence[int]) -> IterableDataset:
    """A shard for each size; a source is the corpus's number, a target the example's own."""

    def examples(shards: list[list[int]]) -> Any:
        for number in chain.from_iterable(shards):
            yield {"input_ids": [name], "labels": [number]}

    ends = np.cumsum(sizes).tolist()
    shards = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    return IterableDataset.from_generator(examples, gen_kwargs={"shards": shards})


def make_batches(weights: list[float], *corpora: Sequence[int], **options: Any) -> StreamingTokenBatches:
    streams = [open_stream(number, sizes) for number, sizes in enumerate(corpora)]
    settings = {"max_source_tokens": 5, "max_target_tokens": 5, "window": 40, "seed": 3, **options}
    return StreamingTokenBatches(StreamMixture(streams, weights), **settings)


def read(batches: list[list[dict[str, Any]]]) -> list[tuple[int, int]]:
    return [(example["input_ids"][0], example["labels"][0]) for batch in batches for example in batch]


class TestStreams:
    def test_every_window_has_the_shares(self) -> None:
        """Of 40 examples 30 are the first corpus's, whatever the sizes; batches of 5 fill a window exactly."""
        stream = iter(make_batches([3, 1], [7, 50, 20], [6]))
        seen: Counter[tuple[int, int]] = Counter()
        for _ in range(12):
            window = read(list(islice(stream, 8)))
            assert Counter(corpus for corpus, _ in window) == {0: 30, 1: 10}
            seen.update(window)
        # 360 of the 77 examples, and 120 of the 6: pass after pass.
        for corpus, size, times in ((0, 77, 4), (1, 6, 20)):
            counts = [seen[corpus, number] for number in range(size)]
            assert min(counts) >= times
            assert max(counts) <= times + 1
        assert len(seen) == 83

    @pytest.mark.parametrize("ranks", [2, 3])
    def test_ranks_share_each_corpus(self, ranks: int) -> None:
        streams = [make_batches([1, 1], [9, 9, 9], [5], num_replicas=ranks, rank=rank) for rank in range(ranks)]
        own = [Counter(read(list(islice(stream, 4)))) for stream in streams]
        for first, second in pairwise(own):
            assert not {key for key in first if key[0] == 1} & {key for key in second if key[0] == 1}
        assert all(sum(count for (corpus, _), count in each.items() if corpus == 1) for each in own)

    @settings(max_examples=15)
    @given(
        weights=st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=2, max_size=3),
        window=st.sampled_from([10, 23, 40]),
        stops=st.lists(st.integers(0, 30), min_size=2, max_size=2).map(sorted),
        rank=st.integers(0, 1),
    )
    def test_a_fresh_stream_goes_on_with_the_same_batches(
        self, weights: list[float], window: int, stops: list[int], rank: int
    ) -> None:
        def stream() -> StreamingTokenBatches:
            corpora = [[7, 3, 12], [4], [11, 2]][: len(weights)]
            return make_batches(weights, *corpora, window=window, num_replicas=2, rank=rank)

        unbroken = list(islice(stream(), 40))
        state: str | None = None
        for start, stop in zip([0, *stops], [*stops, 40], strict=True):
            part = stream()
            if state is not None:
                part.load_state_dict(json.loads(state))
            assert list(islice(part, stop - start)) == unbroken[start:stop]
            assert part.batches == stop
            state = json.dumps(part.state_dict())

    def test_other_weights_are_another_stream(self) -> None:
        state = make_batches([1, 1], [9], [5]).state_dict()
        with pytest.raises(ValueError, match=r"weights=\[1, 1\] \(now \[1, 2\]\)"):
            make_batches([1, 2], [9], [5]).load_state_dict(state)
        with pytest.raises(ValueError, match="num_shards"):
            make_batches([1, 1], [9], [5, 1]).load_state_dict(state)

    def test_a_window_has_room_for_all(self) -> None:
        with pytest.raises(ValueError, match=r"of the 40 pairs of streaming_window, one corpus would have none"):
            make_batches([1000, 1], [9], [5])
        mixture = StreamMixture([open_stream(0, [9]), open_stream(1, [5])], [1000, 1])
        with pytest.raises(ValueError, match=r"of the 4 pairs of tokenizer_sample, one corpus would have none"):
            sample_pairs(mixture, 4)

    def test_a_corpus_without_a_pair_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="The corpus has no pair for rank 0"):
            next(iter(make_batches([1, 1], [9], [0])))

    def test_a_sample_has_the_shares(self) -> None:
        mixture = StreamMixture([open_stream(0, [50, 50]), open_stream(1, [40])], [1, 3])
        sample = sample_pairs(mixture, 40)
        assert Counter(ids[0] for ids in sample["input_ids"]) == {0: 10, 1: 30}

    def test_mapping_reaches_each(self) -> None:
        mixture = StreamMixture([open_stream(0, [2]), open_stream(1, [1])], [1, 1])
        mapped = mixture.map(lambda row: {"labels": [*row["labels"], 7]})
        assert [[row["labels"] for row in stream] for stream in mapped.streams] == [[[0, 7], [1, 7]], [[0, 7]]]


@given(weights=st.lists(st.floats(0.5, 4), min_size=1, max_size=5), count=st.integers(60, 200))
def test_parts_of_a_window_are_rounded_and_complete(weights: list[float], count: int) -> None:
    mixture = StreamMixture([open_stream(0, [1])] * len(weights), weights)
    counts = mixture.divide(count, "streaming_window")
    assert sum(counts) == count
    assert all(abs(own - weight / sum(weights) * count) < 1 for own, weight in zip(counts, weights, strict=True))
