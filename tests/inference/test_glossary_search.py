"""Words that must appear in translations of the library's models: against a brute-force search, and the library's."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import pytest
from forced_words import (
    EOS,
    SOURCES,
    VOCAB_SIZE,
    WORDS,
    Scores,
    as_phrases,
    count_missing,
    cut,
    find_best,
    score_everything,
)
from hypothesis import strategies as st
from library_models import make_bart, make_fsmt, make_m2m100, make_marian, make_t5
from tiny_vanilla import logits_of, pad

from vanilla_transformer.inference.glossary import force_words
from vanilla_transformer.model.decoding_vanilla_transformer import Phrase

MODELS: dict[str, Any] = {
    "marian": make_marian,
    "bart": make_bart,
    "t5": make_t5,
    "m2m100": functools.partial(make_m2m100, 20),
    "fsmt": make_fsmt,
}


@functools.cache
def shared_marian() -> Any:
    model = make_marian(vocab_size=VOCAB_SIZE, decoder_start_token_id=0)
    model.generation_config.bad_words_ids = None
    return model


@functools.cache
def score_all(row: int, longest: int) -> Scores:
    return score_everything(functools.partial(logits_of, shared_marian()), SOURCES[row], longest)


def search(model: Any, sources: list[list[int]], **settings: Any) -> Any:
    ids, mask = pad(sources)
    return model.generate(ids, attention_mask=mask, **{"do_sample": False, "max_new_tokens": 8, **settings})


def as_phrase(phrase: Any) -> Phrase:
    return phrase if isinstance(phrase, Phrase) else Phrase(tuple(phrase))


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(st.lists(WORDS, min_size=3, max_size=3), st.integers(2, 4), st.sampled_from([-0.5, 0.0, 1.0]))
def test_the_best_of_all_of_marians_translations(words: list[Any], longest: int, alpha: float) -> None:
    forced = [[list(map(as_phrase, word)) for word in as_phrases(each)] for each in words]
    settings: dict[str, Any] = {"max_new_tokens": longest, "length_penalty": alpha, "early_stopping": "never"}
    settings |= {"num_beams": VOCAB_SIZE ** (longest - 1), "return_dict_in_generate": True, "output_scores": True}
    model = shared_marian()
    found = search(model, SOURCES, **settings, **force_words(model, forced))
    for row, (sequence, score) in enumerate(zip(found.sequences.tolist(), found.sequences_scores, strict=True)):
        missing, best = find_best(score_all(row, longest), words[row], "transformers", alpha)
        assert count_missing(cut(sequence), words[row]) == missing
        assert score.item() == pytest.approx(best, abs=1e-4)


SENTENCES = [[5, 9, 4, EOS], [7, EOS], [11, 6, 6, 8, 10, EOS], [4, 4, EOS]]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_the_words_and_is_the_librarys_where_there_are_none(name: str, early_stopping: Any) -> None:
    model = MODELS[name]()
    words: list[Any] = [[], [[[9], [10, 11]]], [], [[[5, 6]], [[5, 6]], [[12]]]]
    forced = [[list(map(as_phrase, word)) for word in each] for each in words]
    settings: dict[str, Any] = {"num_beams": 4, "early_stopping": early_stopping, "max_new_tokens": 12}
    plain = search(model, SENTENCES, **settings).tolist()
    assert search(model, SENTENCES, **settings, **force_words(model, [[]] * 4)).tolist() == plain
    found = search(model, SENTENCES, **settings, **force_words(model, forced)).tolist()
    for row, (sequence, each) in enumerate(zip(found, words, strict=True)):
        assert count_missing(cut(sequence), each) == 0
        if name == "fsmt":
            continue  # in some versions its cache mixes beams up, and batches differ from single sentences
        alone = search(model, [SENTENCES[row]], **settings, **force_words(model, [forced[row]])).tolist()[0]
        assert cut(sequence) == cut(alone)
        if not each:
            assert cut(sequence) == cut(plain[row])


@pytest.mark.parametrize("settings", [{"num_beams": 1}, {"num_beams": 3, "do_sample": True}])
def test_other_searches_are_refused(settings: dict[str, Any]) -> None:
    model = make_marian()
    with pytest.raises(ValueError, match="A glossary needs beam search"):
        search(model, SENTENCES[:1], **settings, **force_words(model, [[[as_phrase([9])]]]))
