"""Token batches from corpora that do not fit in memory, with a position that a killed run resumes at exactly."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, fields
from itertools import chain, islice
from typing import Any

import datasets
import numpy as np
from packaging.version import Version
from torch.utils.data import IterableDataset, get_worker_info
from transformers.utils import logging

from .batching import SHOWN_LEFT_OUT, check_at_least, check_rank, plan_batches
from .mixtures import StreamMixture

logger = logging.get_logger(__name__)

Example = dict[str, Any]

# Older ones let streams of parquet files go on at a wrong example: with those a shard is read again up to the position.
_EXACT_STATES = Version(datasets.__version__) >= Version("5.1.0")


@dataclass
class _Position:
    """Where a window begins."""

    number: int = 0  # of the pass over the corpus, from 0
    window: int = 0  # within the pass
    turn: int = 0  # which shard of this rank's order is being read
    shard_state: dict[str, Any] | None = None  # the `datasets` state of that shard; None for its beginning
    shard_examples: int = 0  # read from that shard
    pass_examples: int = 0  # read in this pass, those of other ranks included where every n-th is taken
    left_out: int = 0  # in this pass
    batches: int = 0  # yielded before this window, over all passes


@dataclass
class _Window:
    """Examples read ahead, with their lengths, and where they were read."""

    start: list[_Position]  # of each corpus
    examples: list[Example] = field(default_factory=list)
    source_lengths: list[int] = field(default_factory=list)
    target_lengths: list[int] = field(default_factory=list)


class _Corpus:
    """A stream, and how many of its examples are in a window."""

    def __init__(self, stream: datasets.IterableDataset, window: int) -> None:
        _check_dataset(stream)
        self.stream, self.window = stream, window
        self.num_shards: int = stream.num_shards


class StreamingTokenBatches(IterableDataset[list[Example]]):
    """An endless stream of batches, each filled to a budget of padded source and target tokens.

    Reads `window` examples ahead, puts those of similar lengths together and yields the batches in random order.

        stream = StreamingTokenBatches(dataset, max_source_tokens=25000, max_target_tokens=25000,
                                       num_replicas=world_size, rank=rank)
        loader = DataLoader(stream, batch_size=None, collate_fn=DataCollatorForSeq2Seq(tokenizer))

    Of a mixture, each window has the corpora's shares, and a corpus that has ended begins anew within it.

    The loader has no workers, which would keep the position to themselves, and does not go through
    `accelerator.prepare`: the stream already divides the corpus among the ranks. If there are at least as many shards
    as ranks, each pass deals the shards out to them; otherwise each rank reads everything and keeps every n-th example.
    A stream of the same arguments continues from `state_dict()` with exactly the batches that would have followed.

    Args:
        dataset: Yields examples with at least "input_ids" and "labels", lists of token ids. Must not have been shuffled
            (a shuffle buffer cannot be resumed) or split by node. Or a mixture of such.
        max_source_tokens: Most source tokens of one batch, padding included; `max_target_tokens` likewise.
        window: Examples read ahead, on which memory depends; a hundred times the pairs of a batch is plenty.
        seed, num_replicas, rank: Seed of the shuffling, number of processes, and which of them this is, from 0.

    Raises:
        ValueError: While iterating, if the corpus has no pair within the budget for this rank.
    """

    def __init__(
        self,
        dataset: datasets.IterableDataset | StreamMixture,
        *,
        max_source_tokens: int,
        max_target_tokens: int,
        window: int = 20_000,
        seed: int = 0,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__()
        check_at_least(max_source_tokens=(max_source_tokens, 1), max_target_tokens=(max_target_tokens, 1))
        check_at_least(seed=(seed, 0), window=(window, 1))
        check_rank(num_replicas=num_replicas, rank=rank)
        self._mixture = dataset if isinstance(dataset, StreamMixture) else StreamMixture([dataset], [1.0])
        self._corpora = list(map(_Corpus, self._mixture.streams, self._mixture.divide(window, "streaming_window")))
        self.max_source_tokens = max_source_tokens
        self.max_target_tokens = max_target_tokens
        self.window = window
        self.seed = seed
        self.num_replicas = num_replicas
        self.rank = rank
        self._start = [_Position() for _ in self._corpora]
        self._window_start = self._start
        self._skip = self._batches = self._real_tokens = self._padded_tokens = 0

    @property
    def num_shards(self) -> int:
        """Number of parts that the corpora are read in."""
        return sum(corpus.num_shards for corpus in self._corpora)

    @property
    def batches(self) -> int:
        """Number of batches yielded up to the current position, over all passes and resumptions."""
        return self._batches

    @property
    def padding_share(self) -> float:
        """Share of padding among all tokens of the batches that this object yielded, both sides together."""
        return 1.0 - self._real_tokens / max(1, self._padded_tokens)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch yielded, as plain numbers, strings, lists and dicts."""
        position, *others = map(asdict, self._window_start)
        state = {"arguments": self._arguments(), "position": position, "skip": self._batches - position["batches"]}
        return state | ({"others": others} if others else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the next `iter()` begin where `state_dict` was taken; a `ValueError` with other arguments."""
        saved, own = state_dict["arguments"], self._arguments()
        names = [name for name in {**saved, **own} if saved.get(name) != own.get(name)]
        differences = [f"{name}={saved.get(name)!r} (now {own.get(name)!r})" for name in names]
        if differences:
            raise ValueError(f"The state is of a stream with {', '.join(differences)}: resume with the same arguments.")
        positions = [state_dict["position"], *state_dict.get("others", [])]
        self._start = [_Position(**deepcopy(dict(position))) for position in positions]
        self._skip = state_dict["skip"]
        self._rewind()

    def _arguments(self) -> dict[str, Any]:
        names = ("max_source_tokens", "max_target_tokens", "window", "seed", "num_replicas", "rank")
        shards = [corpus.num_shards for corpus in self._corpora]
        own: dict[str, Any] = {"num_shards": shards[0]}
        if len(shards) > 1:
            own = {"num_shards": shards, "weights": list(self._mixture.weights)}
        return {name: getattr(self, name) for name in names} | own

    def _rewind(self) -> None:
        self._batches = self._start[0].batches + self._skip
        self._window_start = self._start

    def __iter__(self) -> Iterator[list[Example]]:
        """Begins at the position that was loaded last, or else at the beginning of the corpus."""
        if get_worker_info() is not None:
            raise ValueError("A worker of a DataLoader keeps the position to itself: give it num_workers=0.")
        self._rewind()
        skip = self._skip
        positions = deepcopy(self._start)
        windows = map(self._windows, range(len(positions)), positions)
        for window in map(_join, zip(*windows, strict=True)):
            batches = self._window_batches(window)
            positions[0].batches += len(batches)  # where the next window begins
            self._window_start = window.start
            for members in batches[skip:]:
                self._batches += 1
                self._count(window, members)
                yield [window.examples[index] for index in members]
            skip = max(0, skip - len(batches))

    def _windows(self, number: int, position: _Position) -> Iterator[_Window]:
        """Reads a corpus, pass after pass from `position` on, which it moves.

        A window ends with its pass at the latest, but where other corpora go on.
        """
        corpus, is_alone = self._corpora[number], len(self._corpora) == 1
        barren: set[int] = set()  # shards read without finding a pair, since the last pair
        window = _Window(start=[deepcopy(position)])
        while True:
            order = self._shard_order(number, position.number)
            while position.turn < len(order):
                shard = order[position.turn]
                reader = corpus.stream.shard(num_shards=corpus.num_shards, index=shard)
                if not position.shard_examples:
                    barren.add(shard)
                for example in _rest(reader, position):
                    if self._add(window, example, corpus, shard, position):
                        barren.clear()
                    if len(window.examples) == corpus.window:
                        position.window += 1
                        position.shard_state = reader.state_dict()
                        yield window
                        window = _Window(start=[deepcopy(position)])
                position.turn += 1
                position.shard_state, position.shard_examples = None, 0
            if is_alone and window.examples:
                yield window
            self._end_pass(corpus, position, barren)
            if is_alone:
                window = _Window(start=[deepcopy(position)])

    def _deals_shards(self, corpus: "_Corpus") -> bool:
        return corpus.num_shards >= self.num_replicas

    def _shard_order(self, number: int, number_of_pass: int) -> list[int]:
        """The shards of a corpus that this rank reads in a pass."""
        corpus = self._corpora[number]
        generator = np.random.default_rng((2 * number, self.seed, number_of_pass))
        order: list[int] = generator.permutation(corpus.num_shards).tolist()
        return order[self.rank :: self.num_replicas] if self._deals_shards(corpus) else order

    def _add(self, window: _Window, example: Example, corpus: "_Corpus", shard: int, position: _Position) -> bool:
        """Counts the example and adds it to the window, unless it belongs to another rank or exceeds a budget."""
        mine = self._deals_shards(corpus) or position.pass_examples % self.num_replicas == self.rank
        position.pass_examples += 1
        position.shard_examples += 1
        if not mine:
            return False
        source, target = len(example["input_ids"]), len(example["labels"])
        if source > self.max_source_tokens or target > self.max_target_tokens:
            position.left_out += 1
            if position.left_out <= SHOWN_LEFT_OUT:
                logger.warning(
                    "Example %d of shard %d (of %d) is left out of pass %d: %d source and %d target tokens are more "
                    "than a batch may have, max_source_tokens=%d and max_target_tokens=%d.",
                    *(position.shard_examples, shard + 1, corpus.num_shards, position.number + 1, source, target),
                    *(self.max_source_tokens, self.max_target_tokens),
                )
            return False
        window.examples.append(example)
        window.source_lengths.append(source)
        window.target_lengths.append(target)
        return True

    def _end_pass(self, corpus: "_Corpus", position: _Position, barren: set[int]) -> None:
        if position.left_out > SHOWN_LEFT_OUT:
            logger.warning("Pass %d left out %d examples in all.", position.number + 1, position.left_out)
        if len(barren) == corpus.num_shards:
            raise ValueError(
                f"The corpus has no pair for rank {self.rank} of {self.num_replicas}: {position.pass_examples} "
                f"examples in the last pass, {position.left_out} of them over "
                f"max_source_tokens={self.max_source_tokens} or max_target_tokens={self.max_target_tokens}."
            )
        position.number += 1
        position.window = position.turn = position.pass_examples = position.left_out = 0

    def _window_batches(self, window: _Window) -> list[list[int]]:
        """Indices of the window's examples, batch by batch; they depend on place and lengths only."""
        start = window.start[0]
        rng = np.random.default_rng((1, self.seed, start.number, start.window, self.rank))
        batches = plan_batches(
            np.array(window.source_lengths, dtype=np.int64),
            np.array(window.target_lengths, dtype=np.int64),
            max_source_tokens=self.max_source_tokens,
            max_target_tokens=self.max_target_tokens,
            rng=rng,
        )
        return [batches[index].tolist() for index in rng.permutation(len(batches))]

    def _count(self, window: _Window, members: list[int]) -> None:
        for lengths in (window.source_lengths, window.target_lengths):
            own = [lengths[index] for index in members]
            self._real_tokens += sum(own)
            self._padded_tokens += len(own) * max(own)


def _join(windows: Sequence[_Window]) -> _Window:
    """The windows of all corpora as one."""
    return _Window(
        *(list(chain.from_iterable(getattr(each, item.name) for each in windows)) for item in fields(_Window))
    )


def _rest(reader: datasets.IterableDataset, position: _Position) -> Iterator[Example]:
    """The examples of a shard from the position on."""
    if position.shard_state is not None and _EXACT_STATES:
        reader.load_state_dict(position.shard_state)
        return iter(reader)
    return islice(reader, position.shard_examples, None)


def _check_dataset(dataset: datasets.IterableDataset) -> None:
    if not isinstance(dataset, datasets.IterableDataset):
        raise ValueError(f"dataset is a {type(dataset).__name__}: it must be a datasets.IterableDataset.")
    if dataset._distributed is not None:
        raise ValueError("dataset was split by node already: pass the whole one and give num_replicas and rank.")
    steps = [dataset._ex_iterable]
    while steps:
        step = steps.pop()
        if type(step).__name__ == "BufferShuffledExamplesIterable":
            raise ValueError("dataset was shuffled: leave that to the stream; a shuffle buffer cannot be resumed.")
        steps += getattr(step, "ex_iterables", [])
        steps += [step.ex_iterable] if hasattr(step, "ex_iterable") else []
