"""Batches filled to a budget of tokens instead of a number of pairs, with little padding on both sides."""

import heapq
from collections.abc import Iterator, Sequence
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

_GROUP_WIDTH = 0.06  # by how much the sizes of one group differ, as a logarithm
# How far chance may favour one side over the other, as a logarithm; more changes batches more, but pads more too.
_TILT = 0.05
_TRIES = 8  # how often an epoch is planned anew if it has too many batches
SHOWN_LEFT_OUT = 5


def plan_batches(
    source_lengths: IntArray,
    target_lengths: IntArray,
    *,
    max_source_tokens: int,
    max_target_tokens: int,
    rng: np.random.Generator | None = None,
) -> list[IntArray]:
    """Sorts pairs by length and cuts them greedily into full batches; returns the indices of each batch's pairs.

    The size of a pair is the larger of the two shares that it takes of its budgets. Pairs of similar size form a group.
    Within a group they are sorted by the difference of the shares: up in one group, down in the next, so that both
    lengths change slowly. Chance (`rng`) moves the limits of the groups and shuffles pairs of equal lengths, which keep
    their order without it. Both lengths have the shape (pairs,), and none is over its budget.
    """
    base = int(target_lengths.max()) + 1
    # Sorting lengths instead of pairs takes little time for millions of pairs: few of their lengths differ.
    keys, kinds, counts = np.unique(source_lengths * base + target_lengths, return_inverse=True, return_counts=True)
    source, target = np.divmod(keys, base)
    shift, tilt = (0.0, 0.0) if rng is None else (rng.random(), rng.uniform(-_TILT, _TILT))
    source_share, target_share = source / max_source_tokens * np.exp(tilt), target / max_target_tokens
    size, difference = np.maximum(source_share, target_share), source_share - target_share
    group = np.floor(np.log(np.maximum(size, 1e-9)) / _GROUP_WIDTH + shift).astype(np.int64)
    order = np.lexsort((np.where(group % 2 == 0, difference, -difference), group))
    sizes = _fill(source[order], target[order], counts[order], (max_source_tokens, max_target_tokens))

    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    pairs = np.arange(len(source_lengths)) if rng is None else rng.permutation(len(source_lengths))
    pairs = pairs[np.argsort(rank[kinds.reshape(-1)[pairs]], kind="stable")]
    return np.split(pairs, np.cumsum(sizes)[:-1])


def _fill(source: IntArray, target: IntArray, counts: IntArray, budgets: tuple[int, int]) -> list[int]:
    """Sizes of the batches if each takes as many of the next pairs as fit; `counts` pairs have the same lengths."""
    sizes: list[int] = []
    pairs = longest_source = longest_target = 0
    for source_length, target_length, count in zip(source.tolist(), target.tolist(), counts.tolist(), strict=True):
        left = count
        while left:
            longest_source, longest_target = max(source_length, longest_source), max(target_length, longest_target)
            capacity = min(budgets[0] // max(longest_source, 1), budgets[1] // max(longest_target, 1))
            fitting = min(left, max(0, capacity - pairs))
            pairs += fitting
            left -= fitting
            if left:
                sizes.append(pairs)
                pairs = longest_source = longest_target = 0
    return [*sizes, pairs]


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of indices, each filled to a budget of padded source and target tokens.

    Each pair is in exactly one batch of one rank in every epoch; only pairs that exceed a budget by themselves are left
    out, with a warning. Each epoch makes up other batches in another order, which depend on `seed` and the epoch only;
    rank r of n takes the batches r, r + n, r + 2n, ... All ranks have the same number of batches, in all epochs: those
    of a last round that is not full are split, so that n processes see in each step the pairs that one process sees in
    n steps of accumulation. It is the `batch_sampler` of a `DataLoader`, in one process or one for each rank:

        sampler = TokenBatchSampler(source_lengths, target_lengths, max_source_tokens=25000, max_target_tokens=25000,
                                    num_replicas=world_size, rank=rank)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=DataCollatorForSeq2Seq(tokenizer))

    Before each epoch call `sampler.set_epoch(epoch)`. Such a loader must not go through `accelerator.prepare`, which
    would divide the batches among the ranks once more. To let accelerate divide them, give the number of processes but
    `rank=None`, make the accelerator with `DataLoaderConfiguration(even_batches=False)`, and call `set_epoch` of the
    prepared loader too. To resume within an epoch: `accelerate.skip_first_batches(loader, batches_done)`.

    Args:
        source_lengths: Tokens of each source, special tokens included, (pairs,); `target_lengths` likewise.
        max_source_tokens: Most source tokens of one batch, padding included: number of pairs times the longest source.
            A collator's `pad_to_multiple_of` comes on top. `max_target_tokens` is the same for the target.
        num_replicas: Number of processes.
        rank: Which process this is, from 0; None for the batches of all of them, one rank after the other.
        seed, shuffle: Seed of the shuffling, and whether to shuffle; without it all epochs are the same.

    Raises:
        ValueError: If no pair keeps the budget, or there are too few to give each rank as many batches.
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
        budgets = (max_source_tokens, max_target_tokens)
        check_at_least(max_source_tokens=(budgets[0], 1), max_target_tokens=(budgets[1], 1), seed=(seed, 0))
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
        self._report_left_out(source, target, budgets)
        self._lengths = (source[fits], target[fits])
        self._plan = partial(
            plan_batches, *self._lengths, max_source_tokens=max_source_tokens, max_target_tokens=max_target_tokens
        )
        # The number of batches is that of this plan in each epoch, and with each seed.
        plans = [self._plan(rng=np.random.default_rng(number)) for number in range(3)] if shuffle else [self._plan()]
        self._base_plan = max(plans, key=len)
        self._rounds = -(-len(self._base_plan) // num_replicas)
        self._epoch_plan: tuple[int, list[IntArray]] | None = None
        if self._rounds * num_replicas > len(self._kept):
            raise ValueError(
                f"num_replicas={num_replicas} needs at least {self._rounds * num_replicas} pairs to give each rank "
                f"{self._rounds} batch(es), but there are {len(self._kept)}."
            )

    def _report_left_out(self, source: IntArray, target: IntArray, budgets: tuple[int, int]) -> None:
        if not len(self._left_out):
            return
        shown = [f"pair {row + 1} ({source[row]} and {target[row]})" for row in self._left_out[:SHOWN_LEFT_OUT]]
        shown += ["..."] * (len(self._left_out) > SHOWN_LEFT_OUT)
        message = (
            f"{len(self._left_out):,} of {len(source):,} pairs have more tokens than a whole batch may have, "
            f"max_source_tokens={budgets[0]} and max_target_tokens={budgets[1]}: {', '.join(shown)}"
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
        """Chooses the epoch that the next iteration yields; iterating does not go on to the next epoch by itself."""
        check_at_least(epoch=(epoch, 0))
        self.epoch = epoch

    def __len__(self) -> int:
        return self._rounds * (self.num_replicas if self.rank is None else 1)

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._global_batches()
        for batch in batches if self.rank is None else batches[self.rank :: self.num_replicas]:
            yield self._kept[batch].tolist()

    def _global_batches(self) -> list[IntArray]:
        """The batches of all ranks in the order of the epoch; their number goes up in `num_replicas`."""
        if self._epoch_plan is None or self._epoch_plan[0] != self.epoch:
            self._epoch_plan = (self.epoch, self._plan_epoch())
        batches = self._epoch_plan[1]
        number = len(batches)
        first = number - number % self.num_replicas
        if first == number:
            return batches
        if sum(map(len, batches[first:])) < self.num_replicas:
            first = 0  # too few pairs in the last round: split the largest batches, wherever they are
        return batches[:first] + _split_largest(batches[first:], self._rounds * self.num_replicas - first)

    def _plan_epoch(self) -> list[IntArray]:
        """As many batches as the base plan has."""
        if not self.shuffle:
            return self._base_plan
        rng = np.random.default_rng((self.seed, self.epoch))
        number = len(self._base_plan)
        plans = (self._plan(rng=rng) for _ in range(_TRIES))
        plan = next((plan for plan in plans if len(plan) <= number), self._base_plan)
        batches = _split_largest(plan, number)
        return [batches[index] for index in rng.permutation(number)]


def check_at_least(**values_and_minima: tuple[int, int]) -> None:
    """Refuses values below their minima with a `ValueError`."""
    for name, (value, minimum) in values_and_minima.items():
        if value < minimum:
            raise ValueError(f"{name}={value}: must be at least {minimum}.")


def check_rank(*, num_replicas: int, rank: int | None) -> None:
    """Refuses fewer than one process and a rank that is none of them with a `ValueError`."""
    check_at_least(num_replicas=(num_replicas, 1))
    if rank is not None and not 0 <= rank < num_replicas:
        raise ValueError(f"rank={rank}: must be at least 0 and less than num_replicas={num_replicas}.")


def pair_lengths(dataset: Dataset) -> tuple[IntArray, IntArray]:
    """Counts the tokens of each pair's "input_ids" and "labels" without decoding rows; two arrays of shape (pairs,)."""
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
        found = f"the shape {array.shape} and the type {array.dtype}"
        raise ValueError(f"{name} has {found}: must be a whole number a pair.")
    if array.min() < 0:
        raise ValueError(f"{name}[{array.argmin()}]={array.min()}: must be at least 0.")
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
