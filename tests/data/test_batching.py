"""Token batches: budgets, completeness, ranks, epochs and padding, by themselves and in other libraries' loops."""

import logging
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.data_loader import DataLoaderShard, prepare_data_loader
from datasets import Dataset, concatenate_datasets
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.data.batching import TokenBatchSampler, pair_lengths

Pairs = list[tuple[int, int]]
Batches = list[list[int]]

pair_lists = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=120)
# Few shapes, so that whole batches of one shape occur.
shape_lists = st.lists(st.sampled_from([(3, 4), (3, 5), (10, 2), (30, 40)]), min_size=1, max_size=200)
budgets = st.tuples(st.integers(30, 200), st.integers(40, 200))


def make_sampler(pairs: Pairs, budget: tuple[int, int] = (60, 60), **options: Any) -> TokenBatchSampler:
    source, target = ([pair[side] for pair in pairs] for side in (0, 1))
    return TokenBatchSampler(source, target, max_source_tokens=budget[0], max_target_tokens=budget[1], **options)


def epoch_of(sampler: TokenBatchSampler, epoch: int) -> Batches:
    sampler.set_epoch(epoch)
    return list(sampler)


def padded_tokens(batches: Batches, pairs: Pairs) -> int:
    return sum(len(batch) * max(pairs[i][side] for i in batch) for batch in batches for side in (0, 1))


def corpus(count: int, *, seed: int = 0, longest: int = 60) -> Pairs:
    rng = np.random.default_rng(seed)
    size = np.exp(rng.normal(2.5, 0.5, count))
    sides = [np.clip(np.rint(size * np.exp(rng.normal(0, 0.15, count))), 2, longest).astype(int) for _ in range(2)]
    return list(zip(sides[0].tolist(), sides[1].tolist(), strict=True))


def make_dataset(pairs: Pairs) -> Dataset:
    sides = ([[4 + row] * pair[side] for row, pair in enumerate(pairs)] for side in (0, 1))
    return Dataset.from_dict(dict(zip(("input_ids", "labels"), sides, strict=True)))


@given(pairs=pair_lists | shape_lists, budget=budgets, epoch=st.integers(0, 3))
def test_each_pair_once_within_both_budgets(pairs: Pairs, budget: tuple[int, int], epoch: int) -> None:
    sampler = make_sampler(pairs, budget)
    batches = epoch_of(sampler, epoch)
    assert sorted(chain.from_iterable(batches)) == list(range(len(pairs)))
    assert len(batches) == len(sampler)
    for batch in batches:
        assert len(batch) * max(pairs[index][0] for index in batch) <= budget[0]
        assert len(batch) * max(pairs[index][1] for index in batch) <= budget[1]
    real = sum(map(sum, pairs))
    assert sampler.padding_share == pytest.approx(1 - real / padded_tokens(batches, pairs))


@given(pairs=pair_lists | shape_lists, budget=budgets, ranks=st.integers(1, 5), epoch=st.integers(0, 2))
def test_ranks_share_the_batches(pairs: Pairs, budget: tuple[int, int], ranks: int, epoch: int) -> None:
    single = epoch_of(make_sampler(pairs, budget), epoch)
    rounds = -(-len(single) // ranks)
    if rounds * ranks > len(pairs):
        with pytest.raises(ValueError, match=rf"num_replicas={ranks} needs at least {rounds * ranks} pairs"):
            make_sampler(pairs, budget, num_replicas=ranks)
        return
    samplers = [make_sampler(pairs, budget, num_replicas=ranks, rank=rank) for rank in range(ranks)]
    shares = [epoch_of(sampler, epoch) for sampler in samplers]
    assert {len(share) for share in shares} == {len(sampler) for sampler in samplers} == {rounds}
    assert all(batch for share in shares for batch in share)
    in_turn = [share[index] for index in range(rounds) for share in shares]
    assert sorted(chain.from_iterable(in_turn)) == list(range(len(pairs)))
    together = make_sampler(pairs, budget, num_replicas=ranks, rank=None)
    assert epoch_of(together, epoch) == in_turn
    assert len(together) == rounds * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_step_of_n_ranks_is_n_steps_of_one(ranks: int) -> None:
    pairs = corpus(1500)
    single = make_sampler(pairs, (400, 400), seed=3)
    assert any(len(single) % number for number in (2, 3, 4, 7))
    shares = [make_sampler(pairs, (400, 400), seed=3, num_replicas=ranks, rank=rank) for rank in range(ranks)]
    for epoch in (0, 5):
        alone = epoch_of(single, epoch)
        accumulated = [alone[start : start + ranks] for start in range(0, len(alone), ranks)]
        parallel = list(zip(*(epoch_of(share, epoch) for share in shares), strict=True))
        assert [list(batches) for batches in parallel[:-1]] == accumulated[:-1]
        last, expected = (sorted(chain.from_iterable(steps[-1])) for steps in (parallel, accumulated))
        assert last == expected


def test_largest_batches_are_split_where_the_last_round_has_too_few_pairs() -> None:
    """Four batches (two long pairs, twice ten short ones) for three ranks: whichever comes last, six batches result."""
    pairs = [(60, 60), (60, 60), *[(6, 6)] * 20]
    assert len(make_sampler(pairs)) == 4
    for epoch in range(6):
        batches = epoch_of(make_sampler(pairs, num_replicas=3, rank=None), epoch)
        assert sorted(map(len, batches)) in ([1, 1, 3, 5, 5, 7], [1, 1, 5, 5, 5, 5], [1, 1, 2, 3, 5, 10])
        assert sorted(chain.from_iterable(batches)) == list(range(22))


class TestEpochs:
    PAIRS = corpus(800)

    def test_same_seed_and_epoch_give_the_same_batches(self) -> None:
        first, second = (make_sampler(self.PAIRS, (300, 300), seed=5) for _ in range(2))
        epoch_of(first, 7)
        assert epoch_of(first, 2) == epoch_of(second, 2) == list(second)

    def test_epochs_and_seeds_differ_in_order_and_composition(self) -> None:
        places = [(0, 0), (0, 1), (1, 0)]
        epochs = [epoch_of(make_sampler(self.PAIRS, (300, 300), seed=seed), epoch) for seed, epoch in places]
        compositions = [Counter(tuple(sorted(batch)) for batch in batches) for batches in epochs]
        for one, other in [(0, 1), (0, 2), (1, 2)]:
            assert epochs[one] != epochs[other]
            assert (compositions[one] & compositions[other]).total() < 0.2 * len(epochs[one])

    @given(pairs=pair_lists | shape_lists, seed=st.integers(0, 9))
    def test_number_of_batches_is_constant(self, pairs: Pairs, seed: int) -> None:
        sampler = make_sampler(pairs, seed=seed)
        assert {len(epoch_of(sampler, epoch)) for epoch in range(4)} == {len(sampler)}

    def test_without_shuffling_pairs_of_a_shape_stay_in_order(self) -> None:
        sampler = make_sampler(self.PAIRS, (300, 300), shuffle=False)
        batches = list(sampler)
        assert epoch_of(sampler, 1) == batches
        by_shape: dict[tuple[int, int], list[int]] = {}
        for index in chain.from_iterable(batches):
            by_shape.setdefault(self.PAIRS[index], []).append(index)
        assert all(indices == sorted(indices) for indices in by_shape.values())


class TestPadding:
    @pytest.mark.parametrize(
        ("budget", "limit"),
        [((1000, 1000), 0.032), ((4000, 4000), 0.07), ((4000, 2000), 0.09), ((25000, 25000), 0.155)],
    )
    def test_little_on_both_sides(self, budget: tuple[int, int], limit: float) -> None:
        pairs = corpus(20_000)
        sampler = make_sampler(pairs, budget)
        assert 0 < sampler.padding_share < limit
        least = max(sum(pair[side] for pair in pairs) / budget[side] for side in (0, 1))
        assert len(sampler) < 1.25 * least + 2

    def test_one_shape_needs_none_nor_do_empty_sequences(self) -> None:
        assert make_sampler([(7, 9)] * 100).padding_share == 0.0
        assert sorted(map(len, make_sampler([(7, 9)] * 100))) == [4] + [6] * 16
        assert list(chain.from_iterable(make_sampler([(0, 0)] * 3, shuffle=False))) == [0, 1, 2]


class TestLeftOut:
    def test_one_warning_names_the_first_lines(self, caplog: pytest.LogCaptureFixture) -> None:
        pairs = [(5, 5), (61, 5), (5, 99), *[(70, 70)] * 4, (60, 60)]
        with caplog.at_level(logging.WARNING):
            samplers = [make_sampler(pairs, num_replicas=2, rank=rank) for rank in (0, 1)]
        (message,) = caplog.messages
        assert message == (
            "6 of 8 pairs have more tokens than a whole batch may have, max_source_tokens=60 and max_target_tokens=60: "
            "pair 2 (61 and 5), pair 3 (5 and 99), pair 4 (70 and 70), pair 5 (70 and 70), pair 6 (70 and 70), .... "
            "They are left out."
        )
        for sampler in samplers:
            assert sampler.left_out == [1, 2, 3, 4, 5, 6]
        assert sorted(chain.from_iterable(chain(*samplers))) == [0, 7]

    def test_all(self) -> None:
        message = r"2 of 2 pairs .*: pair 1 \(61 and 1\), pair 2 \(1 and 61\)\. None is left"
        with pytest.raises(ValueError, match=message):
            make_sampler([(61, 1), (1, 61)])


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        (([5], [5, 6]), {}, "source_lengths has 1 entries, target_lengths has 2"),
        (([], []), {}, r"source_lengths has the shape \(0,\)"),
        (([[5]], [5]), {}, r"source_lengths has the shape \(1, 1\)"),
        (([5], [5.0]), {}, "target_lengths has .* the type float64"),
        (([5, -1], [5, 5]), {}, r"source_lengths\[1\]=-1: must be at least 0"),
        (([5], [5]), {"max_source_tokens": 0}, "max_source_tokens=0: must be at least 1"),
        (([5], [5]), {"seed": -1}, "seed=-1: must be at least 0"),
        (([5, 5], [5, 5]), {"num_replicas": 2, "rank": 2}, "rank=2: must be at least 0 and less than num_replicas=2"),
        (([5], [5]), {}, "epoch=-1: must be at least 0"),
        (([5], [5]), {"num_replicas": 2}, r"num_replicas=2 needs at least 2 pairs .* 1 batch\(es\), but there are 1"),
    ],
)
def test_wrong_arguments(lengths: tuple[Any, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenBatchSampler(*lengths, **{"max_source_tokens": 60, "max_target_tokens": 60, **options}).set_epoch(-1)


class TestLoaders:
    PAIRS = corpus(300)

    @staticmethod
    def loader(sampler: TokenBatchSampler, pairs: Pairs) -> DataLoader[Any]:
        collator = DataCollatorForSeq2Seq(VanillaTransformerTokenizer(), return_tensors="pt")
        return DataLoader(make_dataset(pairs), batch_sampler=sampler, collate_fn=collator)

    @staticmethod
    def indices(batch: Any) -> list[int]:
        return (batch["input_ids"][:, 0] - 4).tolist()

    def test_a_loop_of_accelerate_that_is_resumed(self) -> None:
        sampler = make_sampler(self.PAIRS, (300, 300), seed=2)
        loader = Accelerator(cpu=True).prepare(self.loader(sampler, self.PAIRS))
        assert len(loader) == len(sampler)
        epochs = []
        for epoch in range(3):
            loader.set_epoch(epoch)
            epochs.append([self.indices(batch) for batch in loader])
        reference = make_sampler(self.PAIRS, (300, 300), seed=2)
        assert epochs == [epoch_of(reference, epoch) for epoch in range(3)]

        later = make_sampler(self.PAIRS, (300, 300), seed=2)
        resumed = Accelerator(cpu=True).prepare(self.loader(later, self.PAIRS))
        for epoch, skipped in ((1, 5), (2, 0)):
            resumed.set_epoch(epoch)
            later.set_epoch(epoch)
            rest = skip_first_batches(resumed, skipped) if skipped else resumed
            assert [self.indices(batch) for batch in rest] == epochs[epoch][skipped:]

    @pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (3, 2)])
    def test_a_rank_of_a_loop_of_accelerate_that_is_resumed(self, ranks: int, rank: int) -> None:
        sampler = make_sampler(self.PAIRS, (300, 300), num_replicas=ranks, rank=None)
        plain = self.loader(sampler, self.PAIRS)
        loader = prepare_data_loader(plain, num_processes=ranks, process_index=rank, even_batches=False)
        assert isinstance(loader, DataLoaderShard)
        own = make_sampler(self.PAIRS, (300, 300), num_replicas=ranks, rank=rank)
        for epoch in (0, 3):
            loader.set_epoch(epoch)
            sampler.set_epoch(epoch)
            expected = epoch_of(own, epoch)
            assert [self.indices(batch) for batch in loader] == expected
            loader.set_epoch(epoch)
            assert [self.indices(batch) for batch in skip_first_batches(loader, 4)] == expected[4:]


class TestPairLengths:
    PAIRS = corpus(50)

    def check(self, dataset: Dataset, pairs: Pairs) -> None:
        source, target = pair_lengths(dataset)
        assert source.dtype == target.dtype == np.int64
        assert list(zip(source.tolist(), target.tolist(), strict=True)) == pairs

    def test_selections_slices_and_chunks(self, tmp_path: Path) -> None:
        dataset = make_dataset(self.PAIRS)
        self.check(dataset, self.PAIRS)
        self.check(dataset.select(range(10, 30)), self.PAIRS[10:30])
        self.check(dataset.select([5, 3, 40, 3]), [self.PAIRS[index] for index in (5, 3, 40, 3)])
        order = np.random.default_rng(0).permutation(50).tolist()
        shuffled = dataset.select(order)
        self.check(shuffled.select(range(7, 20)), [self.PAIRS[index] for index in order[7:20]])
        both = concatenate_datasets([shuffled, dataset.select(range(3, 9))])
        self.check(both, [self.PAIRS[index] for index in order] + self.PAIRS[3:9])
        both.save_to_disk(tmp_path / "saved", num_shards=3)
        self.check(Dataset.load_from_disk(tmp_path / "saved"), [self.PAIRS[i] for i in order] + self.PAIRS[3:9])
        self.check(dataset.select([]), [])

    def test_formats_do_not_matter(self) -> None:
        dataset = make_dataset(self.PAIRS)
        for kind in ("torch", "numpy", "arrow"):
            self.check(dataset.with_format(kind), self.PAIRS)
        self.check(dataset.with_format("torch", columns=["labels"]), self.PAIRS)
        transformed = dataset.with_transform(lambda rows: {"input_ids": [torch.zeros(1)] * len(rows["labels"])})
        self.check(transformed, self.PAIRS)

    def test_what_is_not_token_ids(self) -> None:
        dataset = make_dataset(self.PAIRS[:3])
        with pytest.raises(ValueError, match=r"no column 'labels'; its columns are \['input_ids'\]"):
            pair_lengths(dataset.remove_columns("labels"))
        with pytest.raises(ValueError, match="Column 'labels' holds string: it must hold lists"):
            pair_lengths(dataset.remove_columns("labels").add_column("labels", ["a", "b", "c"]))
        nulls = Dataset.from_dict({"input_ids": [[1], [2], [3]], "labels": [[1], [2], None]})
        with pytest.raises(ValueError, match="Column 'labels' is null in row 2"):
            pair_lengths(nulls.select([0, 2]))
        self.check(nulls.select([1, 0]), [(1, 1), (1, 1)])
