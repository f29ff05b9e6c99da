"""Batches filled to a budget of tokens instead of a number of pairs, with little padding on both sides.

`TokenBatchSampler` serves datasets with a length; `stream_batches` does the same for streams. Both let `plan_batches`
decide which lengths go together.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from datasets import Dataset
from torch.utils.data import Sampler
from transformers.utils import logging

logger = logging.get_logger(__name__)

IntArray = npt.NDArray[np.int64]

# What one more batch costs, in padded tokens, as a share of both budgets together: a batch is closed early only where
# that saves more padding than this. The higher ones serve to keep to a number of batches.
_BATCH_COSTS = (0.1, 0.2, 0.5, 2.0)
# Pairs of one shape are handed out in lots of at most this share of a batch, so that batches can be filled up.
_LOT_SHARE = 1 / 16
# Numbers of groups that are tried, as multiples of the square root of the number of batches.
_GROUP_FACTORS = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6)
# How far chance may favour one side over the other, as a logarithm; more changes batches more, but pads more too.
_TILT = 0.05

SHOWN_LEFT_OUT = 5


@dataclass(frozen=True)
class BatchPlan:
    """Which lengths make up which batch; `deal` puts the pairs in.

    A *shape* is a pair of lengths (source, target) that occurs in the data.

    Attributes:
        shapes: The shape of each pair, as an index; shape (pairs,).
        slots: The shape that each place asks for, batch after batch; shape (pairs,).
        starts: Place where each batch begins; shape (batches,).
    """

    shapes: IntArray
    slots: IntArray
    starts: IntArray

    def deal(self, rng: np.random.Generator | None = None) -> list[IntArray]:
        """Puts pairs into the batches.

        Args:
            rng: Deals pairs of the same shape out at random; without it they keep their order.

        Returns:
            For each batch the indices of its pairs. Each pair is in exactly one batch.
        """
        pairs = np.arange(len(self.shapes)) if rng is None else rng.permutation(len(self.shapes))
        by_place = np.empty_like(pairs)
        by_place[_stable_order(self.slots)] = pairs[_stable_order(self.shapes[pairs])]
        return np.split(by_place, self.starts[1:])


def plan_batches(
    source_lengths: IntArray,
    target_lengths: IntArray,
    *,
    max_source_tokens: int,
    max_target_tokens: int,
    rng: np.random.Generator,
    most_batches: int | None = None,
) -> BatchPlan:
    """Puts lengths together so that both sides need little padding and batches are full.

    As many pairs of one shape as fill a batch make a batch of their own, without any padding. The others are laid
    out in a line along which both lengths change slowly: groups of similar size (the larger of the two shares that a
    pair takes of its budgets), and within each group by the difference of the shares, up in one group and down in the
    next. The line is then cut where that pads least, with a price on each batch so that they stay large. Chance moves
    the limits of the groups, so that from epoch to epoch different lengths meet.

    Args:
        source_lengths: Tokens of each source, shape (pairs,); none over `max_source_tokens`.
        target_lengths: Tokens of each target, shape (pairs,); none over `max_target_tokens`.
        max_source_tokens: Most padded source tokens of a batch: number of pairs times the longest.
        max_target_tokens: The same for the target.
        rng: Source of the chance.
        most_batches: Make fewer batches, with more padding, as far as these are needed to get down to this number;
            the plan may still have more.

    Returns:
        The plan; it depends on nothing but the arguments.
    """
    base = int(target_lengths.max()) + 1
    keys, shapes, counts = np.unique(source_lengths * base + target_lengths, return_inverse=True, return_counts=True)
    source, target = np.divmod(keys, base)
    capacity = np.minimum(max_source_tokens // np.maximum(source, 1), max_target_tokens // np.maximum(target, 1))
    whole, rest = np.divmod(counts, capacity)
    full = np.repeat(np.arange(len(keys)), whole)

    lots = _Lots.split(source, target, rest, capacity)
    budgets = (max_source_tokens, max_target_tokens)
    lots = lots.take(_line(lots, budgets, rng))
    for cost in _BATCH_COSTS:
        cuts = _cut(lots, cost=cost * sum(budgets))
        if most_batches is None or len(full) + len(cuts) <= most_batches:
            break
    line_batch = np.repeat(np.arange(len(cuts)), np.diff(np.append(cuts, len(lots.shape))))

    sizes = np.concatenate([capacity[full], np.bincount(line_batch, lots.count, len(cuts)).astype(np.int64)])
    return BatchPlan(
        shapes=shapes.reshape(-1),
        slots=np.concatenate([np.repeat(full, capacity[full]), np.repeat(lots.shape, lots.count)]),
        starts=np.cumsum(sizes) - sizes,
    )


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of indices, each filled to a budget of padded source and target tokens.

    Each pair is in exactly one batch of one rank in every epoch; only pairs that exceed a budget by themselves are left
    out, with a warning. Each epoch makes up other batches in another order, which depend on `seed` and the epoch only;
    rank r of n takes the batches r, r + n, r + 2n, ... All ranks have the same number of batches, in all epochs. Where
    the batches do not go up in n, those of the last round are split, so that n processes see in each step the pairs
    that one process sees in n steps of accumulation.

    As `batch_sampler` of a `DataLoader`, in one process or with a sampler for each rank:

        sampler = TokenBatchSampler(source_lengths, target_lengths, max_source_tokens=25000, max_target_tokens=25000,
                                    num_replicas=world_size, rank=rank)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=DataCollatorForSeq2Seq(tokenizer))
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for batch in loader: ...

    Such a loader must not go through `accelerator.prepare`, which would divide the batches among the ranks once more.
    To let accelerate divide them, give the number of processes but no rank, and tell the loader and the sampler which
    epoch it is:

        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
        sampler = TokenBatchSampler(..., num_replicas=accelerator.num_processes, rank=None)
        loader = accelerator.prepare(DataLoader(dataset, batch_sampler=sampler, collate_fn=collator))
        for epoch in range(epochs):
            loader.set_epoch(epoch)  # the prepared loader counts epochs itself, from 0
            sampler.set_epoch(epoch)  # which older versions of accelerate do not hand on with several processes
            for batch in loader: ...  # to resume within an epoch: accelerate.skip_first_batches(loader, batches_done)

    The number of batches then goes up in the number of processes, so that they are even without accelerate's
    `even_batches`, which some of its versions refuse for batches of varying size; `split_batches` and
    `dispatch_batches` stay False, as they are by default.

    Args:
        source_lengths: Tokens of each source, special tokens included; shape (pairs,).
        target_lengths: Tokens of each target, likewise.
        max_source_tokens: Most source tokens of one batch, padding included: number of pairs times the longest source.
            A collator's `pad_to_multiple_of` comes on top.
        max_target_tokens: The same for the target.
        seed: Seed of the shuffling.
        num_replicas: Number of processes.
        rank: Which process this is, from 0; None for the batches of all of them, one rank after the other.
        shuffle: Whether to shuffle; without it all epochs are the same.

    Raises:
        ValueError: If an argument is out of its range, the lengths differ in number, no pair keeps the budget, or there
            are too few pairs to give each rank as many batches.
    """

    def __init__(
        self,
        source_lengths: Sequence[int] | npt.NDArray[np.integer],
        target_lengths: Sequence[int] | npt.NDArray[np.integer],
        *,
        max_source_tokens: int,
        max_target_tokens: int,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int | None = 0,
        shuffle: bool = True,
    ) -> None:
        check_budget(max_source_tokens=max_source_tokens, max_target_tokens=max_target_tokens, seed=seed)
        check_rank(num_replicas=num_replicas, rank=rank)
        source = _length_array("source_lengths", source_lengths)
        target = _length_array("target_lengths", target_lengths)
        if len(source) != len(target):
            raise ValueError(f"source_lengths has {len(source)} entries, target_lengths has {len(target)}: must agree.")
        self.seed = seed
        self.num_replicas = num_replicas
        self.rank = rank
        self.shuffle = shuffle
        self.epoch = 0
        fits = (source <= max_source_tokens) & (target <= max_target_tokens)
        self._kept = np.flatnonzero(fits)
        self._left_out = np.flatnonzero(~fits)
        self._report_left_out(source, target, max_source_tokens=max_source_tokens, max_target_tokens=max_target_tokens)
        self._lengths = (source[fits], target[fits])
        self._plan_batches = partial(
            plan_batches, *self._lengths, max_source_tokens=max_source_tokens, max_target_tokens=max_target_tokens
        )
        # The number of batches is that of this plan in each epoch, and with each seed.
        self._base_plan = self._plan_batches(rng=np.random.default_rng(0))
        self._rounds = -(-len(self._base_plan.starts) // num_replicas)
        self._epoch_plan: tuple[int, BatchPlan] | None = None
        if self._rounds * num_replicas > len(self._kept):
            raise ValueError(
                f"num_replicas={num_replicas} needs at least {self._rounds * num_replicas} pairs to give each rank "
                f"{self._rounds} batch(es), but there are {len(self._kept)}."
            )

    def _report_left_out(
        self, source: IntArray, target: IntArray, *, max_source_tokens: int, max_target_tokens: int
    ) -> None:
        if not len(self._left_out):
            return
        lines = ", ".join(
            f"line {index + 1} ({source[index]} and {target[index]})" for index in self._left_out[:SHOWN_LEFT_OUT]
        )
        message = (
            f"{len(self._left_out):,} of {len(source):,} pairs have more tokens than a whole batch may have, "
            f"max_source_tokens={max_source_tokens} and max_target_tokens={max_target_tokens}: {lines}"
            + (", ..." if len(self._left_out) > SHOWN_LEFT_OUT else "")
        )
        if not len(self._kept):
            raise ValueError(f"{message}. None is left.")
        if not self.rank:
            logger.warning("%s. They are left out.", message)

    @property
    def left_out(self) -> list[int]:
        """Indices of the pairs that exceed a budget by themselves, counted from 0."""
        return self._left_out.tolist()

    @property
    def padding_share(self) -> float:
        """Share of padding among all tokens of this epoch's batches, of all ranks and both sides together."""
        batches = self._global_batches()
        order = np.concatenate(batches)
        sizes = np.array([len(batch) for batch in batches])
        starts = np.cumsum(sizes) - sizes
        padded = sum(int(sizes @ np.maximum.reduceat(lengths[order], starts)) for lengths in self._lengths)
        return 1.0 - sum(int(lengths.sum()) for lengths in self._lengths) / max(1, padded)

    @property
    def sampler(self) -> "TokenBatchSampler":
        """This sampler itself: where accelerate looks for `set_epoch` behind its own batch samplers."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch that the next iteration yields; iterating does not go on to the next epoch by itself.

        Raises:
            ValueError: If `epoch` is negative.
        """
        if epoch < 0:
            raise ValueError(f"epoch={epoch}: must be at least 0.")
        self.epoch = epoch

    def __len__(self) -> int:
        return self._rounds * (self.num_replicas if self.rank is None else 1)

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._global_batches()
        for batch in batches if self.rank is None else batches[self.rank :: self.num_replicas]:
            yield self._kept[batch].tolist()

    def _plan(self) -> BatchPlan:
        """The plan of the current epoch; it has no more batches than the base plan."""
        if not self.shuffle:
            return self._base_plan
        if self._epoch_plan is None or self._epoch_plan[0] != self.epoch:
            most = len(self._base_plan.starts)
            plan = self._plan_batches(rng=np.random.default_rng((0, self.seed, self.epoch)), most_batches=most)
            self._epoch_plan = (self.epoch, plan if len(plan.starts) <= most else self._base_plan)
        return self._epoch_plan[1]

    def _global_batches(self) -> list[IntArray]:
        """The batches of all ranks in the order of the epoch; their number goes up in `num_replicas`."""
        number = len(self._base_plan.starts)
        if self.shuffle:
            rng = np.random.default_rng((1, self.seed, self.epoch))
            batches = _split_largest(self._plan().deal(rng), number)
            batches = [batches[index] for index in rng.permutation(number)]
        else:
            batches = self._plan().deal()
        last_round = number % self.num_replicas
        if not last_round:
            return batches
        first = number - last_round
        if sum(map(len, batches[first:])) < self.num_replicas:
            first = 0  # too few pairs in the last round: split the largest batches, wherever they are
        return batches[:first] + _split_largest(batches[first:], self._rounds * self.num_replicas - first)


def check_budget(*, max_source_tokens: int, max_target_tokens: int, seed: int) -> None:
    """Refuses budgets below one token and negative seeds with a `ValueError`."""
    for name, value, minimum in (
        ("max_source_tokens", max_source_tokens, 1),
        ("max_target_tokens", max_target_tokens, 1),
        ("seed", seed, 0),
    ):
        if value < minimum:
            raise ValueError(f"{name}={value}: must be at least {minimum}.")


def check_rank(*, num_replicas: int, rank: int | None) -> None:
    """Refuses fewer than one process and a rank that is none of them with a `ValueError`."""
    if num_replicas < 1:
        raise ValueError(f"num_replicas={num_replicas}: must be at least 1.")
    if rank is not None and not 0 <= rank < num_replicas:
        raise ValueError(f"rank={rank}: must be at least 0 and less than num_replicas={num_replicas}.")


def pair_lengths(dataset: Dataset) -> tuple[IntArray, IntArray]:
    """Counts the tokens of each pair of a tokenised dataset without decoding its rows.

    Args:
        dataset: Has the list columns "input_ids" and "labels"; formats and transforms are passed over, selections and
            other mappings of indices are kept to.

    Returns:
        The lengths of "input_ids" and of "labels", each of the shape (pairs,).

    Raises:
        ValueError: If a column is missing, holds no lists, or has a null instead of a list.
    """
    for name in ("input_ids", "labels"):
        if name not in dataset.column_names:
            raise ValueError(f"The dataset has no column {name!r}; its columns are {dataset.column_names}.")
    return _list_lengths(dataset, "input_ids"), _list_lengths(dataset, "labels")


def _list_lengths(dataset: Dataset, name: str) -> IntArray:
    column = dataset.data.column(name)
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise ValueError(f"Column {name!r} holds {kind}: it must hold lists of token ids.")
    lengths = pc.list_value_length(column)
    # To take the lists themselves in the order of a shuffled dataset would be a thousand times slower.
    if dataset._indices is not None:
        lengths = lengths.take(dataset._indices.column(0))
    if lengths.null_count:
        row = pc.index(lengths.is_null(), True).as_py()
        raise ValueError(f"Column {name!r} is null in row {row + 1}: it must hold a list of token ids.")
    return lengths.to_numpy().astype(np.int64)


def _length_array(name: str, lengths: Sequence[int] | npt.NDArray[np.integer]) -> IntArray:
    array = np.asarray(lengths)
    if array.ndim != 1 or not len(array) or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name} has the shape {array.shape} and the type {array.dtype}: it must be whole numbers, one for each of "
            "at least one pair."
        )
    if array.min() < 0:
        index = int(array.argmin())
        raise ValueError(f"{name}[{index}]={array[index]}: must be at least 0.")
    return array.astype(np.int64)


def _split_largest(batches: list[IntArray], number: int) -> list[IntArray]:
    """Halves the largest batch until there are `number` of them."""
    batches = list(batches)
    heap = [(-len(batch), index) for index, batch in enumerate(batches)]
    heapq.heapify(heap)
    while len(batches) < number:
        _, index = heapq.heappop(heap)
        whole = batches[index]
        batches[index] = whole[: len(whole) // 2]
        batches.append(whole[len(whole) // 2 :])
        for half in (index, len(batches) - 1):
            heapq.heappush(heap, (-len(batches[half]), half))
    return batches


@dataclass(frozen=True)
class _Lots:
    """Parcels of pairs of one shape, which go into a batch together; all arrays have the shape (lots,)."""

    shape: IntArray
    source: IntArray
    target: IntArray
    count: IntArray
    capacity: IntArray  # pairs of this shape that make a full batch

    @classmethod
    def split(cls, source: IntArray, target: IntArray, counts: IntArray, capacity: IntArray) -> "_Lots":
        most = np.maximum(1, (capacity * _LOT_SHARE).astype(np.int64))
        parts = -(-counts // most)
        shape = np.repeat(np.arange(len(counts)), parts)
        part = np.arange(len(shape)) - np.repeat(np.cumsum(parts) - parts, parts)
        # The remainder is spread: lots of one shape differ by one pair at most.
        count = counts[shape] // parts[shape] + (part < counts[shape] % parts[shape])
        return cls(shape, source[shape], target[shape], count, capacity[shape])

    def take(self, order: IntArray) -> "_Lots":
        return _Lots(*(values[order] for values in (self.shape, self.source, self.target, self.count, self.capacity)))


def _line(lots: _Lots, budgets: tuple[int, int], rng: np.random.Generator) -> IntArray:
    """The order of the lots that pads least when it is simply filled up, among several numbers of groups."""
    source_share = lots.source / budgets[0] * np.exp(rng.uniform(-_TILT, _TILT))
    target_share = lots.target / budgets[1]
    size, difference = np.maximum(source_share, target_share), source_share - target_share
    _, value = np.unique(size, return_inverse=True)
    weights = np.bincount(value, lots.count * size)
    # Where each size lies among all tokens, from 0 to 1; a size is never divided among groups.
    middle = (np.cumsum(weights) - weights / 2) / max(weights.sum(), 1e-12)
    batches = np.sqrt(max(1.0, float((lots.count / lots.capacity).sum())))
    orders = []
    for groups in sorted({max(1, round(batches * factor)) for factor in _GROUP_FACTORS}):
        group = np.floor(middle * groups + rng.random()).astype(np.int64)[value]
        orders.append(np.lexsort((np.where(group % 2 == 0, difference, -difference), group)))
    return min(orders, key=lambda order: _greedy_padded_tokens(lots.take(order), budgets))


def _greedy_padded_tokens(lots: _Lots, budgets: tuple[int, int]) -> int:
    """Padded tokens of both sides if each batch takes whole lots as long as they fit."""
    total = pairs = longest_source = longest_target = 0
    for source, target, count in zip(lots.source.tolist(), lots.target.tolist(), lots.count.tolist(), strict=True):
        new_source, new_target = max(source, longest_source), max(target, longest_target)
        if (pairs + count) * new_source > budgets[0] or (pairs + count) * new_target > budgets[1]:
            total += pairs * (longest_source + longest_target)
            pairs, new_source, new_target = 0, source, target
        pairs += count
        longest_source, longest_target = new_source, new_target
    return total + pairs * (longest_source + longest_target)


def _cut(lots: _Lots, *, cost: float) -> IntArray:
    """First lots of the batches that divide the line at the least padded tokens plus `cost` for each batch."""
    number = len(lots.count)
    before = np.concatenate([[0], np.cumsum(lots.count)])
    # A batch from lot i holds capacity[i] pairs at most.
    reach = np.searchsorted(before, before[:-1] + lots.capacity, side="right") - 1
    best = np.full(number + 1, np.inf)
    best[0] = 0.0
    previous = np.zeros(number + 1, dtype=np.int64)
    for first in range(number):
        last = reach[first]
        pairs = before[first + 1 : last + 1] - before[first]
        fits = pairs <= np.minimum.accumulate(lots.capacity[first:last])
        longest = np.maximum.accumulate(lots.source[first:last]) + np.maximum.accumulate(lots.target[first:last])
        price = np.where(fits, best[first] + pairs * longest + cost, np.inf)
        better = np.flatnonzero(price < best[first + 1 : last + 1])
        best[first + 1 + better] = price[better]
        previous[first + 1 + better] = first
    cuts = []
    end = number
    while end:
        end = int(previous[end])
        cuts.append(end)
    return np.array(cuts[::-1], dtype=np.int64)


def _stable_order(values: IntArray) -> IntArray:
    """A stable argsort of small non-negative numbers; numpy sorts 16-bit ones several times faster."""
    return np.argsort(values.astype(np.uint16) if values.max(initial=0) < 2**16 else values, kind="stable")
