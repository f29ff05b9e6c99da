"""Words that must appear, against a search through all translations of a tiny vocabulary."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import pytest
import torch
from forced_words import (
    EOS,
    PAD,
    SOURCES,
    VOCAB_SIZE,
    WORDS,
    Scores,
    Words,
    as_phrases,
    count_missing,
    cut,
    find_best,
    score_everything,
    write_out,
)
from hypothesis import strategies as st
from tiny_vanilla import logits_of, make_model, pad
from transformers import GenerationConfig, LogitsProcessor

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.inference.ensembles import Ensemble

Model = VanillaTransformerForConditionalGeneration


@functools.cache
def shared_model(seed: int, attention: str = "sdpa", vocab_size: int = VOCAB_SIZE) -> Model:
    return make_model(attention=attention, seed=seed, scale=0.6, vocab_size=vocab_size)


@functools.cache
def score_all(seed: int, row: int, longest: int) -> Scores:
    return score_everything(functools.partial(logits_of, shared_model(seed)), SOURCES[row], longest)


def search(model: Any, sources: list[list[int]], **settings: Any) -> Any:
    ids, mask = pad(sources)
    return model.generate(ids, attention_mask=mask, **{"do_sample": False, "max_new_tokens": 4, **settings})


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(
    st.integers(0, 3),
    st.lists(WORDS, min_size=3, max_size=3),
    st.integers(2, 5),
    st.sampled_from(["gnmt", "transformers"]),
    st.sampled_from([-0.5, 0.0, 0.6, 1.0]),
)
def test_the_best_of_all_translations_with_the_words(
    seed: int, words: list[Words], longest: int, kind: str, alpha: float
) -> None:
    settings: dict[str, Any] = {"max_new_tokens": longest, "length_penalty_type": kind, "length_penalty": alpha}
    settings |= {"num_beams": VOCAB_SIZE ** (longest - 1), "early_stopping": "never", "return_dict_in_generate": True}
    forced = list(map(as_phrases, words))
    found = search(shared_model(seed), SOURCES, force_words_ids_per_sentence=forced, **settings)
    for row, (sequence, score) in enumerate(zip(found.sequences.tolist(), found.sequences_scores, strict=True)):
        missing, best = find_best(score_all(seed, row, longest), words[row], kind, alpha)
        assert count_missing(cut(sequence), words[row]) == missing
        assert score.item() == pytest.approx(best, abs=1e-4)


def make_sources(lengths: list[int]) -> list[list[int]]:
    return [[3 + (7 * place + length) % 13 for place in range(length)] + [EOS] for length in lengths]


def allow_anywhere(word: list[Any]) -> list[Any]:
    """Narrow beams promise a word only if an alternative may stand behind whatever they have."""
    ids, before, after = write_out(word[0])
    return word if before is None else [*word, ((3, *ids), None, after)]


TOKENS = st.integers(3, 16)
ANYWHERE = frozenset(range(17))
# Few tokens may not stand beside it: else a beam must have several tokens that the model thinks little of.
MOST = st.none() | st.frozensets(TOKENS, max_size=4).map(lambda few: ANYWHERE - few)
MORE_PHRASES: st.SearchStrategy[Any] = st.lists(TOKENS, min_size=1, max_size=3)
MORE_PHRASES |= st.tuples(MORE_PHRASES.map(tuple), MOST, MOST)
MORE_WORDS = st.lists(st.lists(MORE_PHRASES, min_size=1, max_size=2).map(allow_anywhere), max_size=4)

# A sentence whose words have fewer alternatives than another's: all of them are tried.
UNEVEN: list[Any] = [
    [],
    [[[3]], allow_anywhere([((3,), ANYWHERE, None), [3]])],
    [[[13, 4, 10]], [[12]], allow_anywhere([((16,), ANYWHERE, None)]), [[3], [12]]],
    [],
]


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.example(words=UNEVEN, num_beams=2, seed=0, early=False)
@hypothesis.given(st.lists(MORE_WORDS, min_size=4, max_size=4), st.integers(2, 6), st.integers(0, 3), st.booleans())
def test_narrow_beams_find_all_words_of_each_sentence_alone_or_in_a_batch(
    words: list[Words], num_beams: int, seed: int, early: bool
) -> None:
    words[seed] = []
    model, sources = shared_model(seed, vocab_size=17), make_sources([5, 1, 9, 3])
    settings = {"num_beams": num_beams, "max_new_tokens": 16, "early_stopping": early}
    forced = [as_phrases(each, 17) for each in words]
    found = search(model, sources, force_words_ids_per_sentence=forced, **settings).tolist()
    for row, (source, each) in enumerate(zip(sources, words, strict=True)):
        assert count_missing(cut(found[row]), each) == 0
        alone = search(model, [source], force_words_ids=forced[row], **settings).tolist()[0]
        assert cut(found[row]) == cut(alone)
    plain = search(model, [sources[seed]], **settings).tolist()[0]
    assert cut(found[seed]) == cut(plain)


WAYS: dict[str, dict[str, Any]] = {
    "recorded": {"output_scores": True, "return_dict_in_generate": True},
    "no-cache": {"use_cache": False},
    "static": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("way", [*WAYS, "eager", "ensemble", "generation-config", "common-and-own"])
def test_every_way_through_the_search_finds_the_same(way: str) -> None:
    sources, words = make_sources([5, 1, 9, 3]), [[3, 4], [[5], [6, 7, 8]], [9], [9]]
    settings: dict[str, Any] = {"num_beams": 4, "max_new_tokens": None, "length_penalty_type": "gnmt"}
    model: Any = shared_model(1, vocab_size=17)
    expected = search(model, sources, force_words_ids=words, **settings).tolist()
    given: dict[str, Any] = {"force_words_ids": words, **WAYS.get(way, {})}
    if way == "eager":
        model = shared_model(1, "eager", vocab_size=17)
    elif way == "ensemble":
        model = Ensemble([model, model])
    elif way == "generation-config":
        given = {"generation_config": GenerationConfig(force_words_ids=words)}
        settings["num_beams"] = 4
    elif way == "common-and-own":
        given = {"force_words_ids": words[:1], "force_words_ids_per_sentence": [words[1:]] * 4}
    found = search(model, sources, **{**settings, **given})
    assert getattr(found, "sequences", found).tolist() == expected
    for row, (sequence, source) in enumerate(zip(expected, sources, strict=True)):
        assert [row, count_missing(cut(sequence), [[[3, 4]], [[5], [6, 7, 8]], [[9]], [[9]]])] == [row, 0]
        assert set(sequence[1 + len(source) + 50 :]) <= {PAD}


def test_a_sentence_s_own_limit_leaves_room_for_some_words_only() -> None:
    model, sources = shared_model(2, vocab_size=17), make_sources([1, 9])
    words = [[token, token + 1, token] for token in range(3, 16)] * 2  # 78 tokens, for 52 and 60
    found = search(model, sources, force_words_ids=words, num_beams=3, max_new_tokens=None).tolist()
    for sequence, limit in zip(found, (52, 60), strict=True):
        assert EOS not in sequence
        assert set(sequence[1 + limit :]) <= {PAD}
        assert count_missing(cut(sequence), [[word] for word in words]) <= 26 - limit // 3


def test_other_processors_come_first() -> None:
    model, sources = shared_model(0, vocab_size=17), make_sources([5, 2])
    settings: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 12, "bad_words_ids": [[7]]}
    found = search(model, sources, force_words_ids=[[7], [8, 9]], **settings).tolist()
    assert all(7 not in each and count_missing(cut(each), [[[8, 9]]]) == 0 for each in found)

    class Forbid(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            return torch.full_like(scores, -torch.inf) if input_ids.shape[1] > 3 else scores  # type: ignore[return-value]

    stuck = search(model, sources, force_words_ids=[[7]], num_beams=4, logits_processor=[Forbid()]).tolist()
    assert [len(each) for each in stuck] == [4, 4]
    assert all(7 in each for each in stuck)


def test_without_words_not_a_token_changes() -> None:
    model, sources = shared_model(0, vocab_size=17), make_sources([5, 2])
    plain = search(model, sources, num_beams=4).tolist()
    nothings: list[dict[str, Any]] = [{"force_words_ids": []}, {"force_words_ids_per_sentence": [[], []]}]
    for nothing in nothings:
        assert search(model, sources, num_beams=4, **nothing).tolist() == plain
    assert search(model, sources, force_words_ids=[]).tolist() == search(model, sources).tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"force_words_ids": [[3]], "num_beams": 1}, "need beam search: set num_beams to 2 or more .*num_beams=1"),
        ({"force_words_ids": [[3]], "do_sample": True}, "do_sample=True"),
        ({"force_words_ids_per_sentence": [[[3]], []], "num_beams": 1}, "need beam search"),
        ({"force_words_ids": 3}, r"force_words_ids must be a list of lists of token ids.*it is 3"),
        ({"force_words_ids": [3]}, r"force_words_ids\[0\] must be a list of token ids that is not empty; it is 3"),
        ({"force_words_ids": [[3], []]}, r"force_words_ids\[1\] must be a list .* not empty; it is \[\]"),
        ({"force_words_ids": [[[3], 4]]}, r"force_words_ids\[0\] must be a list .*; it is 4"),
        ({"force_words_ids": [[3, 17]]}, r"force_words_ids\[0\] has 17; .* from 0 to 16"),
        ({"force_words_ids": [[-1]]}, r"force_words_ids\[0\] has -1"),
        ({"force_words_ids": [["Haus"]]}, r"force_words_ids\[0\] has 'Haus'; .* integers"),
        ({"force_words_ids": [[3, EOS]]}, r"force_words_ids\[0\] has 2; .* not the end-of-sentence token 2"),
        ({"force_words_ids_per_sentence": [[], [[17]]]}, r"force_words_ids_per_sentence\[1\]\[0\] has 17"),
        ({"force_words_ids_per_sentence": [[[3]]]}, "has 1 lists for 2 source sentences"),
        ({"force_words_ids_per_sentence": 3}, "one list for each source sentence; it is 3"),
        ({"constraints": [object()]}, "give their token ids as force_words_ids"),
    ],
)
def test_what_cannot_be_forced_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search(shared_model(0, vocab_size=17), make_sources([5, 2]), **{"num_beams": 4, **settings})
