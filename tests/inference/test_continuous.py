"""Continuous batching: whoever joins whenever gets the translation that they would get alone."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import TOKENIZER, make_letters_model
from library_models import make_marian

from vanilla_transformer.inference.continuous import ContinuousBatch
from vanilla_transformer.inference.translate import Translation, Translator
from vanilla_transformer.model import generation_vanilla_transformer

LENGTHS = st.integers(1, 9)
# When how many sentences of which lengths join: a list for each step.
ARRIVALS = st.lists(st.lists(LENGTHS, max_size=3), min_size=1, max_size=8)
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"num_beams": 1},
    "gnmt": {"num_beams": 4, "length_penalty_type": "gnmt", "length_penalty": 0.6},
    "library": {"num_beams": 3, "length_penalty": 1.0},
    "early": {"num_beams": 2, "early_stopping": True, "length_penalty": 2.0},
    "n best": {"num_beams": 4, "n_best": 3},
    "limit": {"num_beams": 2, "max_new_tokens": 3},
}
MODELS: dict[str, dict[str, Any]] = {
    "paper": {"normalize_before": False},
    "pre-LN": {},
    "learned positions": {"position_embedding_type": "learned", "max_position_embeddings": 12},
}


def make_model(**changes: Any) -> Any:
    """A model with random weights, large enough that it does not always say the same; float64 has no near ties."""
    model = make_letters_model(**changes).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
        model.lm_head.weight.mul_(4.0)
    model.generation_config.max_new_tokens = None  # the source's length + 50
    return model


def translate_as_they_come(translator: Translator, arrivals: list[list[list[int]]]) -> dict[int, list[Translation]]:
    batch: ContinuousBatch[int] = ContinuousBatch(translator)
    found: dict[int, list[Translation]] = {}
    number = 0
    for sources in arrivals:
        if sources:
            batch.add({number + place: source for place, source in enumerate(sources)})
            number += len(sources)
        if batch:
            found |= batch.step()
    while batch:
        found |= batch.step()
    assert batch.keys == []
    return found


@pytest.mark.parametrize(
    ("model", "search"),
    [
        *(("paper", search) for search in SEARCHES),
        *((model, name) for model in [*MODELS][1:] for name in ("greedy", "n best")),
    ],
)
def test_everybody_gets_what_they_would_get_alone(model: str, search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_vanilla_transformer, "MAX_EXTRA_TOKENS", 10)  # instead of 50, to be quick
    translator = Translator(make_model(**MODELS[model]), TOKENIZER, **SEARCHES[search])
    letters = [token_id for token_id in range(len(TOKENIZER)) if token_id not in TOKENIZER.all_special_ids]

    @settings(max_examples=8, deadline=None)
    @given(ARRIVALS, st.randoms(use_true_random=False))
    def check(lengths: list[list[int]], chance: Any) -> None:
        end = [TOKENIZER.eos_token_id]
        arrivals = [[chance.choices(letters, k=length) + end for length in step] for step in lengths]
        sources = [source for step in arrivals for source in step]
        found = translate_as_they_come(translator, arrivals)
        assert sorted(found) == list(range(len(sources)))
        for number, source in enumerate(sources):
            (alone,) = translator.run([source])
            assert [each.text for each in found[number]] == [each.text for each in alone]
            if translator.has_scores:
                assert [each.score for each in found[number]] == pytest.approx([each.score for each in alone], abs=1e-5)

    check()


def test_the_translations_differ() -> None:
    """Otherwise the test above could not fail."""
    translator = Translator(make_model(), TOKENIZER, num_beams=4)
    sources = [TOKENIZER(text)["input_ids"] for text in ("a", "bc", "abc", "hgfe", "dddd", "abab")]
    texts = [translator.run([source])[0][0].text for source in sources]
    assert len(set(texts)) > 3
    assert len(set(map(len, texts))) > 2


def test_memory_does_not_grow() -> None:
    model = make_model()
    translator = Translator(model, TOKENIZER, num_beams=2, max_new_tokens=8)
    batch: ContinuousBatch[int] = ContinuousBatch(translator)
    batch.add({-1: TOKENIZER("h" * 100)["input_ids"]})
    sizes = []
    for number in range(100):
        batch.add({number: TOKENIZER("abcd"[: 1 + number % 4])["input_ids"]})
        batch.step()
        search = batch._search
        tokens, entries, source = search.open.tokens, search.decoder.visible, search.decoder.source_mask
        sizes.append((len(batch._places), tokens.shape[2], entries.shape[2], source.shape[3]))
    assert sizes[0][3] >= 100
    most = [max(size) for size in zip(*sizes[20:], strict=True)]
    # Tokens: of the longest with its prompt, twice where one joins as another ends; entries: two beams.
    assert most[0] <= 16
    assert most[1] <= 2 * 9
    assert most[2] <= 2 * 9
    assert most[3] <= 6


@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram_size": 2, "num_beams": 2},
        {"do_sample": True},
        {"use_cache": False, "num_beams": 2},
        {"glossary": {"a": "b"}, "num_beams": 4},
    ],
)
def test_settings_that_count_columns_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Continuous batching is"):
        ContinuousBatch(Translator(make_model(), TOKENIZER, **options))


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="models of this package"):
        ContinuousBatch(Translator(make_marian(), TOKENIZER))


def test_a_failure_leaves_a_batch_that_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    translator = Translator(make_model(), TOKENIZER, num_beams=2)
    batch: ContinuousBatch[str] = ContinuousBatch(translator)
    source = TOKENIZER("abc")["input_ids"]
    batch.add({"first": source, "second": source})
    batch.step()
    monkeypatch.setattr(batch._search.decoder.histories[1], "append", None)  # the first layer's has grown by then
    with pytest.raises(TypeError):
        batch.step()
    batch.clear()
    assert batch.keys == []
    batch.add({"third": source})
    found: dict[str, list[Translation]] = {}
    while batch:
        found |= batch.step()
    assert found == {"third": translator.run([source])[0]}
