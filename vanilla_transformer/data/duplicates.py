"""Pairs that a corpus has already, found by digests of 64 bits.

Two different pairs of N have the same digest with a probability of about N^2 / 2^65: 0.03 where N is a thousand
million. Digests take 8 bytes a pair, and up to 20 while they are merged: 0.8 to 2 GB for a hundred million pairs.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import regex

from .corpora import read_pairs
from .filters import Change, Rule
from .readers import Columns, divide_files

Flags = npt.NDArray[np.bool_]
_NOT_LETTERS = regex.compile(r"[^\p{L}]+")
_NOT_ALPHANUMERIC = regex.compile(r"[^\p{L}\p{M}\p{N}]+")


class CorpusRule(Rule):
    """A rule that gives each pair a value, and decides by those of all pairs that the rules before it have left."""

    value_type: Any = np.float32

    def find_values(self, pairs: list[tuple[str, str]]) -> list[Any]:
        """A number for each pair."""
        raise NotImplementedError

    def decide(self, values: Iterable[npt.NDArray[Any]]) -> Iterator[Flags]:
        """Which pairs stay, for arrays of their values in the order of the corpus."""
        raise NotImplementedError


class DigestSet:
    """Digests in sorted arrays, each more than twice as long as the next one."""

    def __init__(self) -> None:
        self._runs: list[npt.NDArray[np.uint64]] = []

    def find_new(self, digests: npt.NDArray[np.uint64]) -> Flags:
        """Which of them (count,) are neither in the set nor before themselves."""
        is_new = np.zeros(len(digests), dtype=bool)
        is_new[np.unique(digests, return_index=True)[1]] = True
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, digests), len(run) - 1)
            is_new &= run[places] != digests
        return is_new

    def add(self, digests: npt.NDArray[np.uint64]) -> None:
        """Adds those that are not in it, each once."""
        if not len(digests):
            return
        self._runs.append(np.sort(digests))
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            merged = np.concatenate([self._runs.pop(), self._runs.pop()])
            merged.sort(kind="stable")
            self._runs.append(merged)


@dataclass(kw_only=True)
class RemoveDuplicates(CorpusRule):
    """Of equal pairs the first one stays; with `overlap`, those stay that are not in these files, a test set's say.

    `compare` are the sides that are looked at: all (the default), [0] for the source or [1] for the target. Near
    duplicates are equal but for what `lowercase`, `letters_only` or `alphanumeric_only` (letters, digits) leaves out.
    What the rules before it change in the corpus, they change in the files of `overlap` too; columns of these are
    called as those of the corpus.
    """

    compare: Any = None
    overlap: Any = None
    lowercase: bool = False
    letters_only: bool = False
    alphanumeric_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.changes: list[Change] = []  # of the rules before it
        self.columns = Columns(None, None, None, None)  # as those of the corpus are called
        self.value_type = np.uint64
        self.compare = "all" if self.compare is None else self.compare
        if self.compare not in ("all", [0], [1], [0, 1]):
            raise ValueError(f"{self}: compare is {self.compare!r}; it must be all, [0], [1] or [0, 1].")
        if self.overlap is not None and not isinstance(self.overlap, list):
            raise ValueError(f"{self}: overlap is {self.overlap!r}; it must be a list of files: two texts, or tables.")

    def identify(self) -> dict[str, Any]:
        """The parameters, and what is in the files."""
        digest = hashlib.sha256(np.sort(self._others).tobytes()).hexdigest() if self.overlap else None
        return self.parameters | {"overlap": digest}

    @cached_property
    def _others(self) -> npt.NDArray[np.uint64]:
        parts = divide_files(self.overlap, self.columns)
        pairs = (pair for part in parts for pair in read_pairs(part))
        return np.array([self.digest(*map(self._change, pair)) for pair in pairs], dtype=np.uint64)

    def _change(self, text: str) -> str:
        for rule in self.changes:
            text = rule.change(text)
        return text

    def digest(self, source: str, target: str) -> int:
        """That of the pair, as far as it is looked at."""
        texts = [source, target] if self.compare == "all" else [(source, target)[side] for side in self.compare]
        pattern = _NOT_LETTERS if self.letters_only else _NOT_ALPHANUMERIC if self.alphanumeric_only else None
        if self.lowercase:
            texts = [text.lower() for text in texts]
        if pattern is not None:
            # A text of signs alone is compared as it is.
            texts = [pattern.sub("", text) or text for text in texts]
        return int.from_bytes(hashlib.blake2b("\0".join(texts).encode(), digest_size=8).digest())

    def find_values(self, pairs: list[tuple[str, str]]) -> list[Any]:
        """Their digests."""
        return [self.digest(*pair) for pair in pairs]

    def decide(self, values: Iterable[npt.NDArray[Any]]) -> Iterator[Flags]:
        """Which pairs are the first of their kind."""
        if self.overlap is not None:
            for digests in values:
                yield ~np.isin(digests, self._others)
            return
        seen = DigestSet()
        for digests in values:
            is_new = seen.find_new(digests)
            seen.add(digests[is_new])
            yield is_new
