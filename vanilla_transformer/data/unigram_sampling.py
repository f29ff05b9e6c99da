"""Sampling from a unigram vocabulary: a text cut into other pieces each time (subword regularisation, Kudo, 2018).

Of all ways to cut a text one is drawn, with a probability in proportion to P(pieces) ** alpha: exactly, by summing
over all ways from the left and drawing pieces from the right. The sampling of the tokenizers library
(`Unigram.alpha`, 0.23) draws from another distribution, since its sums are raised to alpha again at each piece.
"""

import json
import math
import random
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from tokenizers import Tokenizer

_KNOWN_CHARACTERS = 200_000  # of words whose sums are remembered: up to 300 MB


class _Ends(NamedTuple):
    """The pieces that may end at a place of a text."""

    pieces: list[tuple[int, int]]  # where it begins, and its id
    weights: list[float]  # of each piece and those before it


class UnigramSampler:
    """Draws pieces for texts that a tokenizer has cut, with Python's `random`, which `set_seed` seeds.

    Args:
        backend: A tokenizer with a unigram model.
        alpha: The exponent, greater than 0: the smaller, the more even; the larger, the more often the best way.
    """

    def __init__(self, backend: Tokenizer, alpha: float) -> None:
        vocab: list[tuple[str, float]] = json.loads(backend.to_str())["model"]["vocab"]
        special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        # What text is never cut into has the score of the special tokens; what it always is has a positive one.
        never = {score for piece, score in vocab if piece in special}
        usual = [(index, piece, score) for index, (piece, score) in enumerate(vocab) if piece and score <= 0]
        self._scores = {piece: (index, alpha * score) for index, piece, score in usual if score not in never}
        self._pieces = {index: piece for piece, (index, _) in self._scores.items()}
        self._longest = max(map(len, self._scores), default=0)
        self._known: dict[str, list[_Ends]] = {}
        self._known_characters = 0

    def draw(self, ids: Sequence[int], words: Sequence[int | None]) -> list[int]:
        """Cuts the text of `ids` anew, within words (their numbers); what is no usual piece, as an unknown, stays."""
        drawn: list[int] = []
        for (_, is_usual), run in groupby(
            zip(words, ids, strict=True), key=lambda each: (each[0], each[1] in self._pieces)
        ):
            own = [index for _, index in run]
            drawn += self._cut("".join(self._pieces[index] for index in own)) if is_usual else own
        return drawn

    def _cut(self, text: str) -> list[int]:
        ends, place, ids = self._find_ends(text), len(text), []
        while place:
            pieces, weights = ends[place]
            last = len(pieces) - 1  # as in `random.choices`, which takes thrice the time
            place, index = pieces[bisect(weights, random.random() * weights[-1], 0, last) if last else 0]
            ids.append(index)
        return ids[::-1]

    def _find_ends(self, text: str) -> list[_Ends]:
        """For each place of a text the pieces that may end there, weighed by all ways to cut what is before them."""
        if text in self._known:
            return self._known[text]
        sums, ends = [0.0], [_Ends([], [])]  # of the probabilities of all ways to cut the text before, as a logarithm
        for place in range(1, len(text) + 1):
            starts = range(max(place - self._longest, 0), place)
            found = ((start, self._scores.get(text[start:place])) for start in starts)
            possible = [(start, *piece) for start, piece in found if piece is not None]
            logarithms = [sums[start] + score for start, _, score in possible]
            largest = max(logarithms, default=-math.inf)
            weights = [math.exp(each - largest) for each in logarithms] if largest > -math.inf else []
            sums.append(largest + math.log(sum(weights)) if weights else -math.inf)
            ends.append(_Ends([(start, index) for start, index, _ in possible], list(accumulate(weights))))
        self._known_characters += len(text)
        if self._known_characters > _KNOWN_CHARACTERS:
            self._known.clear()
            self._known_characters = len(text)
        self._known[text] = ends
        return ends
