"""Several corpora in one training, each with a share of the pairs: by weights, or by temperature."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset, IterableDataset, concatenate_datasets


def check_weights(weights: Sequence[float], count: int) -> None:
    """Refuses anything but a positive number for each of so many corpora with a `ValueError`."""
    if len(weights) != count:
        raise ValueError(f"dataset_weights has {len(weights)} number(s), and there are {count} corpora: give one each.")
    if wrong := [weight for weight in weights if not 0 < weight < math.inf]:
        raise ValueError(f"dataset_weights has {wrong[0]}; each must be a number above 0.")


def temper(sizes: Sequence[int], temperature: float) -> list[float]:
    """Weights proportional to size^(1/temperature): 1 leaves corpora as large as they are, more evens them out."""
    return [size ** (1 / temperature) for size in sizes]


def repeat_rows(sizes: Sequence[int], weights: Sequence[float], *, seed: int = 0) -> npt.NDArray[np.int64]:
    """The rows of corpora that stand one after another, repeated so that each has its share; (rows,).

    All of the corpus that has most pairs for its weight are there once, those of others several times: so many times
    all of them, and one time more some of them, drawn by `seed`.
    """
    passes = max(size / weight for size, weight in zip(sizes, weights, strict=True))
    generator = np.random.default_rng(seed)
    rows, first = [], 0
    for size, weight in zip(sizes, weights, strict=True):
        times, rest = divmod(round(passes * weight), size)
        rows += [np.tile(np.arange(size), times), generator.permutation(size)[:rest]]
        rows[-2:] = [part + first for part in rows[-2:]]
        first += size
    return np.concatenate(rows).astype(np.int64)


def mix_corpora(corpora: Sequence[Dataset], weights: Sequence[float] | None = None, *, seed: int = 0) -> Dataset:
    """Puts corpora together, as they are or, with `weights`, with rows repeated as [`repeat_rows`] says."""
    together = concatenate_datasets(list(corpora))
    if weights is None:
        return together
    check_weights(weights, len(corpora))
    return together.select(repeat_rows(list(map(len, corpora)), weights, seed=seed))


@dataclass(frozen=True)
class StreamMixture:
    """Streams that are read together, in proportion to their weights; each begins anew when it has ended."""

    streams: Sequence[IterableDataset]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        check_weights(self.weights, len(self.streams))

    def map(self, *args: Any, **kwargs: Any) -> "StreamMixture":
        """Does to each what `IterableDataset.map` does."""
        return replace(self, streams=[stream.map(*args, **kwargs) for stream in self.streams])

    def divide(self, count: int, option: str) -> list[int]:
        """How many of so many examples are each stream's, rounded so that they are `count`, an option's, together.

        Raises:
            ValueError: If a stream had none.
        """
        exact = np.array(self.weights) / sum(self.weights) * count
        counts = np.floor(exact).astype(int)
        counts[np.argsort(counts - exact, kind="stable")[: count - counts.sum()]] += 1
        if not counts.all():
            raise ValueError(
                f"dataset_weights {', '.join(map(str, self.weights))}: of the {count} pairs of {option}, one corpus "
                f"would have none. Give a larger {option}, or weights that differ less."
            )
        return counts.tolist()
