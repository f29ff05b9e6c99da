"""Words that must appear: a search through all translations of a tiny vocabulary, and words for it."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from vanilla_transformer.model.decoding_vanilla_transformer import Phrase, TokenSet

BOS, PAD, EOS, VOCAB_SIZE = 0, 1, 2, 5
SOURCES = [[3, 4, 3, EOS], [4, EOS], [3, 3, EOS]]
Words = list[list[Any]]
Scores = dict[tuple[int, ...], float]

PHRASES = st.lists(st.sampled_from([0, 1, 3, 4]), min_size=1, max_size=3)
NEIGHBOURS = st.none() | st.frozensets(st.integers(0, VOCAB_SIZE - 1), min_size=1)
BOUND_PHRASES = st.tuples(PHRASES.map(tuple), NEIGHBOURS, NEIGHBOURS)
WORDS = st.lists(st.lists(PHRASES | BOUND_PHRASES, min_size=1, max_size=2), max_size=3)


def count(tokens: tuple[int, ...], phrases: list[Any]) -> int:
    """How often one of the phrases appears without overlap, from the left, between tokens that may be beside it."""

    def is_there(phrase: Any, start: int, end: int) -> bool:
        ids, before, _ = phrase
        return start <= end - len(ids) and tokens[end - len(ids) : end] == ids and may_follow(before, end - len(ids))

    def may_follow(before: frozenset[int] | None, place: int) -> bool:
        return before is None or place == 0 or tokens[place - 1] in before

    number = start = 0
    for end in range(1, len(tokens) + 1):
        if any(after is None and is_there((ids, before, after), start, end) for ids, before, after in phrases):
            number, start = number + 1, end
        elif any(
            after and tokens[end - 1] in after and is_there((ids, before, after), start, end - 1)
            for ids, before, after in phrases
        ):
            number, start = number + 1, end - 1
    return number


def write_out(phrase: Any) -> tuple[tuple[int, ...], frozenset[int] | None, frozenset[int] | None]:
    return phrase if isinstance(phrase, tuple) else (tuple(phrase), None, None)


def count_missing(tokens: tuple[int, ...], words: list[Any]) -> int:
    kinds = [frozenset(map(write_out, word)) for word in words]
    return sum(max(0, kinds.count(kind) - count(tokens, list(kind))) for kind in set(kinds))


def as_phrases(words: list[Any], vocab_size: int = VOCAB_SIZE) -> list[Any]:
    """What `generate` takes: sets of tokens in its own way, the same object where they are the same."""
    sets: dict[frozenset[int], TokenSet] = {}

    def make_set(ids: frozenset[int] | None) -> TokenSet | None:
        if ids is None:
            return None
        return sets.setdefault(ids, TokenSet(torch.tensor([token in ids for token in range(vocab_size)])))

    def make_phrase(phrase: Any) -> Any:
        ids, before, after = write_out(phrase)
        return Phrase(ids, make_set(before), make_set(after)) if isinstance(phrase, tuple) else phrase

    return [[make_phrase(phrase) for phrase in word] for word in words]


def score_everything(compute_logits: Callable[..., torch.Tensor], source: list[int], longest: int) -> Scores:
    """The log-probability of every translation that ends, by itself or at the limit."""
    others = [token for token in range(VOCAB_SIZE) if token != EOS]
    prefixes = list(itertools.product(others, repeat=longest - 1))
    ids = torch.tensor([[BOS, *prefix] for prefix in prefixes])
    values = compute_logits(input_ids=torch.tensor([source]).expand(len(ids), -1), decoder_input_ids=ids)
    found = {}
    for prefix, each in zip(prefixes, values.log_softmax(dim=-1).tolist(), strict=True):
        total = 0.0
        for place in range(longest):
            found[(*prefix[:place], EOS)] = total + each[place][EOS]
            if place < longest - 1:
                total += each[place][prefix[place]]
        found |= {(*prefix, token): total + each[-1][token] for token in others}
    return found


def find_best(scores: Scores, words: Words, kind: str, alpha: float) -> tuple[int, float]:
    """Returns how many words the best translation lacks, and its score."""

    def rate(tokens: tuple[int, ...], total: float) -> tuple[int, float]:
        length = len(tokens)
        penalty = ((5 + length) / 6) ** alpha if kind == "gnmt" else length**alpha
        return count_missing(tokens, words), -total / penalty

    missing, score = min(rate(*each) for each in scores.items())
    return missing, -score


def cut(sequence: list[int]) -> tuple[int, ...]:
    """The new tokens, to the end of the sentence."""
    tokens = sequence[1:]
    return tuple(tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens)
