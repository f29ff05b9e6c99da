"""Ensembles, against the mean of probabilities computed naively and the library's own searches over it."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vanilla import make_model, make_sentences, pad
from transformers import GenerationMixin

from vanilla_transformer.inference.ensembles import Ensemble

BOS, EOS = 0, 2
SIZES: list[dict[str, Any]] = [
    {},
    {"d_model": 16, "encoder_layers": 1, "position_offset": 2},
    {"normalize_before": True, "position_embedding_type": "learned", "max_position_embeddings": 60},
]
MEMBERS = [make_model(seed=seed, scale=0.6, **sizes) for seed, sizes in enumerate(SIZES)]
VOCAB_SIZE = MEMBERS[0].config.vocab_size


def mean_log_probs(source: list[int], target: list[int]) -> torch.Tensor:
    """Of each next token of one sentence, (T, V), with a pass of every member over all of it."""
    inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([target])}
    with torch.no_grad():
        probabilities = [member(**inputs).logits[0].double().softmax(dim=-1) for member in MEMBERS]
    return (sum(probabilities) / len(MEMBERS)).log()


class Naive(Ensemble):
    """The library's own searches over a forward pass that repeats the source and averages naively."""

    _beam_search = GenerationMixin._beam_search
    _sample = GenerationMixin._sample
    _expand_inputs_for_generation = GenerationMixin._expand_inputs_for_generation


class Quick(Ensemble):
    """One whose members must have caches of their own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a whole prefix is read again")


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 99), beams=st.integers(1, 4))
@settings(max_examples=15)
def test_searches_find_what_the_library_finds_without_caches(lengths: list[int], seed: int, beams: int) -> None:
    input_ids, attention_mask = pad(make_sentences(lengths, VOCAB_SIZE, seed))
    options: Any = {"input_ids": input_ids, "attention_mask": attention_mask, "num_beams": beams, "max_new_tokens": 9}
    options |= {"length_penalty_type": "transformers", "num_return_sequences": beams}
    found, expected = Quick(MEMBERS).generate(**options), Naive(MEMBERS).generate(**options)
    assert found.tolist() == expected.tolist()


def test_greedy_search_takes_the_token_of_the_largest_mean() -> None:
    for source in make_sentences([3, 7, 5], VOCAB_SIZE):
        tokens = [BOS]
        while len(tokens) < 12 and tokens[-1] != EOS:
            tokens.append(int(mean_log_probs(source, tokens)[-1].argmax()))
        found = Ensemble(MEMBERS).generate(torch.tensor([source]), num_beams=1, max_new_tokens=11)
        assert found[0].tolist() == tokens


def test_the_forward_pass_gives_the_mean() -> None:
    sources, targets = make_sentences([4, 6], VOCAB_SIZE), [[BOS, 5, 6, 7], [BOS, 9, 4, 8]]
    input_ids, attention_mask = pad(sources)
    logits = Ensemble(MEMBERS)(input_ids, attention_mask, torch.tensor(targets)).logits
    for row, source, target in zip(logits, sources, targets, strict=True):
        torch.testing.assert_close(row.double(), mean_log_probs(source, target), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", [{"do_sample": True}, {"return_dict_in_generate": True, "output_scores": True}])
@pytest.mark.parametrize("beams", [1, 3])
def test_what_needs_every_row_works_without_caches(settings: dict[str, Any], beams: int) -> None:
    input_ids, attention_mask = pad(make_sentences([4, 6], VOCAB_SIZE))
    options: Any = {"attention_mask": attention_mask, "num_beams": beams, "max_new_tokens": 6, **settings}
    results = []
    for kind in (Ensemble, Naive):
        torch.manual_seed(3)
        found = kind(MEMBERS).generate(input_ids, **options, length_penalty_type="transformers")
        results.append(found if isinstance(found, torch.Tensor) else found.sequences)
    assert results[0].tolist() == results[1].tolist()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "at least one model"),
        ([MEMBERS[0], torch.nn.Linear(2, 2)], "Member 2 of the ensemble is a Linear"),
        ([MEMBERS[0], make_model(vocab_size=29)], "vocab_size is 17 in the first and 29 in number 2"),
    ],
)
def test_what_cannot_vote_together_is_refused(members: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ensemble(members)


def test_it_is_not_saved_and_takes_no_cache() -> None:
    with pytest.raises(NotImplementedError, match="save its members"):
        Ensemble(MEMBERS).save_pretrained("folder")
    cache = MEMBERS[0](torch.tensor([[4]]), decoder_input_ids=torch.tensor([[0]]), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="takes no past_key_values"):
        Ensemble(MEMBERS).generate(torch.tensor([[4, 5]]), past_key_values=cache)
