"""Beam search against the library's own, against searches written naively, and against one sentence at a time."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tiny_vanilla import TWO_VOCABULARIES, make_cache, make_model, make_sentences, pad
from transformers import EncoderDecoderCache, LogitsProcessor, StoppingCriteria
from transformers.generation.utils import GenerationMixin

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.cache_vanilla_transformer import SharedHistoryLayer, SourceSharingCache
from vanilla_transformer.model.search_vanilla_transformer import find_largest

Model = VanillaTransformerForConditionalGeneration
BOS, PAD, EOS = 0, 1, 2
VOCAB_SIZE = 17
MODELS: dict[str, dict[str, Any]] = {
    "sdpa": {},
    "eager-pre-norm": {"attention": "eager", "normalize_before": True, "d_k": 6, "d_v": 3},
    "two-vocabularies": {**TWO_VOCABULARIES["two-vocabularies-untied"], "position_offset": 2},
    "learned": {"position_embedding_type": "learned", "max_position_embeddings": 40, "add_final_layer_norm": True},
    "every-option": {
        "normalize_before": True,
        "normalize_embedding": True,
        "d_k": 6,
        "d_v": 3,
        "attention_bias": True,
        "ffn_bias": False,
        "lm_head_bias": True,
        "activation_function": "gelu",
    },
}


@functools.cache
def shared_model(name: str, seed: int = 0) -> Model:
    """Models with weights large enough that beams differ; tests must not change them."""
    return make_model(seed=seed, scale=0.6, **MODELS[name])


@contextmanager
def library_search(model: Model) -> Iterator[Any]:
    """The model with the library's own search, which repeats the source for each beam."""

    class Plain(Model):
        _beam_search = GenerationMixin._beam_search
        # A static method in older versions, and to stay one.
        _expand_inputs_for_generation = inspect.getattr_static(GenerationMixin, "_expand_inputs_for_generation")
        _sample = GenerationMixin._sample

    kind = type(model)
    target_side = model._as_target_side()
    target_side.__class__ = Plain
    try:
        yield target_side
    finally:
        target_side.__class__ = kind


def search(model: Any, **arguments: Any) -> Any:
    return model.generate(**{"do_sample": False, "max_new_tokens": 10, **arguments})


def make_batch(lengths: list[int], seed: int = 0, side: str = "right") -> dict[str, torch.Tensor]:
    ids, mask = pad([[*sentence, EOS] for sentence in make_sentences(lengths, seed=seed)], side=side)
    return {"input_ids": ids, "attention_mask": mask}


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if type(ours) is torch.Tensor:
        assert ours.equal(theirs)
        return
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert_close(ours.sequences_scores, theirs.sequences_scores)
    if ours.beam_indices.tolist() != theirs.beam_indices.tolist():
        return  # beams with the same score may change places, and then their rows below do too
    for name in ("scores", "logits", "decoder_attentions", "cross_attentions", "decoder_hidden_states"):
        assert_close(getattr(ours, name), getattr(theirs, name))


def assert_close(ours: Any, theirs: Any) -> None:
    """Compares tensors, tuples of them, and nothing with nothing."""
    assert type(ours) is type(theirs)
    if isinstance(ours, tuple):
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other)
    elif ours is not None:
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


class ForbidRepeating(LogitsProcessor):
    """Looks at rows as wholes, and at which row they are, as code of other people's may."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        assert input_ids.shape[0] == scores.shape[0] == self.num_rows
        return scores.scatter(1, input_ids[:, -1:], -1e4)


class StopAfter(StoppingCriteria):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return (input_ids[:, -2:] == self.token).any(dim=1)


@hypothesis.given(
    name=st.sampled_from(sorted(MODELS)),
    seed=st.integers(0, 5),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    side=st.sampled_from(["left", "right"]),
    num_beams=st.integers(2, 5),
    data=st.data(),
)
@hypothesis.settings(max_examples=80)
def test_the_library_finds_the_same(
    name: str, seed: int, lengths: list[int], side: str, num_beams: int, data: st.DataObject
) -> None:
    arguments: dict[str, Any] = {
        **make_batch(lengths, seed, side),
        "num_beams": num_beams,
        "num_return_sequences": data.draw(st.integers(1, num_beams), "num_return_sequences"),
        "length_penalty": data.draw(st.sampled_from([0.0, 0.6, 1.0, 2.0, -1.0]), "length_penalty"),
        "early_stopping": data.draw(st.sampled_from([False, True, "never"]), "early_stopping"),
        "max_new_tokens": data.draw(st.integers(1, 12), "max_new_tokens"),
        "use_cache": data.draw(st.booleans(), "use_cache"),
    }
    for option in data.draw(st.sets(st.sampled_from(["shorter", "repeat", "two ends", "prompt", "custom"])), "options"):
        changes: dict[str, dict[str, Any]] = {
            "shorter": {"no_repeat_ngram_size": 2},
            "repeat": {"repetition_penalty": 1.4},
            "two ends": {"eos_token_id": [EOS, 5]},
            "prompt": {"decoder_input_ids": torch.tensor([[BOS, 5, 6]]).repeat(len(lengths), 1)},
            "custom": {
                "logits_processor": [ForbidRepeating(len(lengths) * num_beams)],
                "stopping_criteria": [StopAfter(7)],
            },
        }
        arguments |= changes[option]
    if data.draw(st.booleans(), "recorded"):
        arguments |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        arguments |= {"output_hidden_states": True, "output_attentions": name == "eager-pre-norm"}
    model = shared_model(name, seed)
    with library_search(model) as plain:
        theirs = search(plain, **arguments)
    assert_same(search(model, **arguments), theirs)


def test_sampled_beams_are_the_library_s() -> None:
    arguments = {**make_batch([5, 2, 6]), "num_beams": 3, "do_sample": True, "num_return_sequences": 2}
    model = shared_model("sdpa")
    for seed in range(5):
        torch.manual_seed(seed)
        with library_search(model) as plain:
            theirs = search(plain, **arguments)
        torch.manual_seed(seed)
        assert search(model, **arguments).equal(theirs)


# The paper's scores


def log_probabilities(model: Model, source: list[int], prefix: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([prefix])).logits
    values: list[float] = logits[0, -1].log_softmax(dim=-1).tolist()
    return values


def naive_beam_search(
    model: Model, source: list[int], num_beams: int, max_new_tokens: int, alpha: float
) -> list[tuple[float, list[int]]]:
    """Beam search to the very end, with the GNMT score of what ends among the best candidates."""
    open_beams, ended = [(0.0, [BOS])], []
    for _ in range(max_new_tokens):
        candidates = [
            (total + value, [*prefix, token])
            for total, prefix in open_beams
            for token, value in enumerate(log_probabilities(model, source, prefix))
        ]
        best = sorted(candidates, reverse=True)[: 2 * num_beams]
        is_last = len(best[0][1]) == max_new_tokens + 1
        for total, tokens in best[:num_beams]:
            if tokens[-1] == EOS or is_last:
                ended.append((total / ((5 + len(tokens) - 1) / 6) ** alpha, tokens))
        open_beams = [(total, tokens) for total, tokens in best if tokens[-1] != EOS][:num_beams]
    return sorted(ended, reverse=True)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, -0.5])
@pytest.mark.parametrize("seed", range(3))
def test_gnmt_scores_and_exact_stopping(alpha: float, seed: int) -> None:
    """Searching until no open beam can win finds what searching to the very end finds."""
    model = shared_model("sdpa", seed)
    batch = make_batch([3, 6, 1], seed)
    settings = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": alpha, "max_new_tokens": 7}
    found = search(model, **batch, **settings, length_penalty_type="gnmt", return_dict_in_generate=True)
    for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True)):
        expected = naive_beam_search(model, ids[mask.bool()].tolist(), 3, 7, alpha)[:3]
        for (score, tokens), sequence, value in zip(
            expected, found.sequences[3 * row :], found.sequences_scores[3 * row :], strict=False
        ):
            assert sequence.tolist()[: len(tokens)] == tokens
            assert set(sequence.tolist()[len(tokens) :]) <= {PAD}
            assert value.item() == pytest.approx(score, abs=1e-4)


def test_length_penalty_type_is_a_setting_like_others(tmp_path: Path) -> None:
    """Of a call, of a given config, and of the model's own, with which it is saved."""
    model: Any = make_model(scale=0.6)
    arguments = {**make_batch([5, 2]), "num_beams": 3, "length_penalty": 1.7, "max_new_tokens": 6}
    arguments |= {"return_dict_in_generate": True}
    scores = [
        search(model, **arguments, length_penalty_type=kind).sequences_scores for kind in ("transformers", "gnmt")
    ]
    assert not scores[0].allclose(scores[1])
    assert search(model, **arguments).sequences_scores.equal(scores[0])
    config: Any = copy.deepcopy(model.generation_config)
    config.update(**{name: value for name, value in arguments.items() if not isinstance(value, torch.Tensor)})
    config.length_penalty_type = "gnmt"
    batch = make_batch([5, 2])
    assert model.generate(**batch, generation_config=config).sequences_scores.equal(scores[1])
    model.generation_config.length_penalty_type = "gnmt"
    model.save_pretrained(tmp_path)
    again = Model.from_pretrained(tmp_path)
    assert search(again, **arguments).sequences_scores.equal(scores[1])
    assert search(again, **arguments, length_penalty_type="transformers").sequences_scores.equal(scores[0])
    with pytest.raises(ValueError, match="length_penalty_type must be one of gnmt, transformers, not 'wu'"):
        search(model, **arguments, length_penalty_type="wu")


def test_scores_come_with_the_translations_and_in_order() -> None:
    found = search(
        shared_model("sdpa"),
        **make_batch([4, 7]),
        num_beams=4,
        num_return_sequences=4,
        return_dict_in_generate=True,
    )
    scores = found.sequences_scores.view(2, 4)
    assert scores.equal(scores.sort(dim=1, descending=True).values)
    for translations in found.sequences.view(2, 4, -1).tolist():
        assert len({tuple(tokens) for tokens in translations}) == 4


# The limit of each sentence


@pytest.mark.parametrize("name", ["sdpa", "learned"])
@pytest.mark.parametrize("settings", [{"num_beams": 1}, {"num_beams": 3}, {"num_beams": 3, "length_penalty": -0.5}])
def test_each_sentence_has_its_own_limit(name: str, settings: dict[str, Any]) -> None:
    """Input length + 50 tokens (6.1), in a batch as alone; positions that are learned may end before."""
    model = shared_model(name, seed=2)
    lengths = [6, 0, 3]
    arguments = {**settings, "suppress_tokens": [EOS], "max_new_tokens": None}
    together = search(model, **make_batch(lengths), **arguments)
    for row, sentence in enumerate(make_sentences(lengths)):
        alone = search(model, input_ids=torch.tensor([[*sentence, EOS]]), **arguments)
        limit = len(sentence) + 1 + 50
        assert alone.shape[1] - 1 == (limit if name == "sdpa" else min(limit, 40))
        assert together[row, : alone.shape[1]].equal(alone[0])
        assert set(together[row, alone.shape[1] :].tolist()) <= {PAD}


def test_samples_have_the_limit_of_their_sentence() -> None:
    arguments = {"do_sample": True, "num_return_sequences": 2, "suppress_tokens": [EOS], "max_new_tokens": None}
    found = search(shared_model("sdpa"), **make_batch([6, 1]), **arguments)
    assert [(row != PAD).sum().item() <= 1 + limit for row, limit in zip(found, [57, 57, 52, 52], strict=True)]
    assert (found[2:, 53:] == PAD).all()
    assert (found[:2, 53:] != PAD).any()


# Less work


class RowCounter:
    """Counts the rows that reach the output layer at each step."""

    def __init__(self, model: Model) -> None:
        self.rows: list[int] = []
        self.handle = model.lm_head.register_forward_pre_hook(lambda _, inputs: self.rows.append(inputs[0].shape[0]))


def test_finished_sentences_leave_the_batch() -> None:
    model = shared_model("sdpa", seed=1)
    arguments = {
        **make_batch([0, 1, 2, 3, 4, 5, 6, 7]),
        "num_beams": 3,
        "suppress_tokens": [EOS],
        "max_new_tokens": None,
    }
    counter = RowCounter(model)
    try:
        found = search(model, **arguments)
    finally:
        counter.handle.remove()
    assert counter.rows[0] == 8, "at first one beam stands for all"
    assert counter.rows[1] == 24
    assert counter.rows[-1] == 3, "the longest sentence ends alone"
    assert sorted(counter.rows[1:], reverse=True) == counter.rows[1:]
    for row, sentence in enumerate(make_sentences([0, 1, 2, 3, 4, 5, 6, 7])):
        alone = search(model, **{**arguments, "input_ids": torch.tensor([[*sentence, EOS]]), "attention_mask": None})
        assert found[row, : alone.shape[1]].equal(alone[0])


def test_hooks_on_the_model_are_called_at_every_step() -> None:
    """Otherwise the search calls the layers itself."""
    model = shared_model("sdpa")
    arguments = {**make_batch([4, 2]), "num_beams": 3}
    expected = search(model, **arguments)
    lengths: list[int] = []
    handle = model.model.decoder.register_forward_hook(lambda module, inputs, outputs: lengths.append(1))
    try:
        found = search(model, **arguments)
    finally:
        handle.remove()
    assert found.equal(expected)
    assert len(lengths) == expected.shape[1] - 1 == 10


@hypothesis.given(
    rows=st.integers(1, 30),
    size=st.sampled_from([5, 64, 4095, 4096, 4100, 5000]),
    k=st.integers(1, 5),
    distinct=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_largest_values_of_a_vocabulary(rows: int, size: int, k: int, distinct: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([torch.randperm(size, generator=generator) for _ in range(rows)]).float()
    if not distinct:
        logits = logits // 7  # equal values, among which any will do
    values, indices = find_largest(logits, k)
    expected = logits.topk(k)
    assert values.equal(expected.values)
    assert logits.gather(1, indices).equal(values)
    assert all(len(set(row)) == k for row in indices.tolist())
    if distinct:
        assert indices.equal(expected.indices)


# Caches


@torch.no_grad()
def next_logits(model: Model, cache: EncoderDecoderCache, tokens: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
    logits: torch.Tensor = model(decoder_input_ids=tokens, past_key_values=cache, use_cache=True, **inputs).logits
    return logits


@hypothesis.given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("repeat"), st.integers(1, 3)),
            st.tuples(st.sampled_from(["select", "reorder"]), st.lists(st.integers(0, 100), min_size=1, max_size=6)),
        ),
        max_size=5,
    ),
    data=st.data(),
)
def test_foreign_searches_may_do_anything_with_the_cache(actions: list[tuple[str, Any]], data: st.DataObject) -> None:
    """Whatever rows are repeated, dropped or exchanged, it answers like a cache that has the source for each row."""
    model, lengths = shared_model("sdpa"), [4, 2, 5]
    batch = make_batch(lengths)
    with torch.no_grad():
        states = model.get_encoder()(**batch).last_hidden_state
    ours = SourceSharingCache.adopt(make_cache(model, "dynamic", 0, 0))
    plain = make_cache(model, "dynamic", 0, 0)
    sentences = torch.arange(len(lengths))
    tokens = torch.tensor([[BOS, 7]]).repeat(len(sentences), 1)
    for action in [*actions, ("reorder", None)]:
        # Ours is told of the source as the batch has it, the other as its rows need it.
        shared = {"encoder_outputs": (states,), "attention_mask": batch["attention_mask"]}
        expanded = {"encoder_outputs": (states[sentences],), "attention_mask": batch["attention_mask"][sentences]}
        each = len(sentences) // len(lengths)
        is_whole = sentences.equal(torch.arange(len(lengths)).repeat_interleave(each))
        given = shared if is_whole and data.draw(st.booleans(), "shared") else expanded
        torch.testing.assert_close(
            next_logits(model, ours, tokens, given), next_logits(model, plain, tokens, expanded), atol=1e-5, rtol=1e-5
        )
        kind, argument = action
        rows = len(sentences)
        if kind == "repeat":
            for cache in (ours, plain):
                cache.batch_repeat_interleave(argument)
            kept = torch.arange(rows).repeat_interleave(argument)
        else:
            indices = [*range(rows)] if argument is None else argument
            kept = torch.tensor(indices) % rows
            for cache in (ours, plain):
                cast(Any, cache.batch_select_indices if kind == "select" else cache.reorder_cache)(kept)
        sentences = sentences[kept]
        tokens = torch.arange(len(kept))[:, None] % 9 + 3


def test_an_adopted_cache_is_the_given_one() -> None:
    given = make_cache(shared_model("sdpa"), "dynamic", 0, 0)
    adopted = SourceSharingCache.adopt(given)
    assert SourceSharingCache.adopt(adopted) is adopted
    batch = make_batch([3])
    next_logits(shared_model("sdpa"), adopted, torch.tensor([[BOS, 5]]), batch)
    assert given.get_seq_length() == 2
    assert given.is_updated == {0: True, 1: True}


def test_source_stays_at_the_number_of_sentences() -> None:
    model = shared_model("eager-pre-norm")
    batch = make_batch([4, 2])
    found = search(model, **batch, num_beams=3, return_dict_in_generate=True, output_attentions=True)
    cache = found.past_key_values
    assert {layer.keys.shape[0] for layer in cache.cross_attention_cache.layers} == {2}
    assert {layer.keys.shape[0] for layer in cache.self_attention_cache.layers} == {6}
    heads = model.config.decoder_attention_heads
    assert {tuple(weights.shape) for step in found.cross_attentions for weights in step} == {(6, heads, 1, 5)}


def test_rows_that_cannot_be_divided() -> None:
    model = shared_model("sdpa")
    with pytest.raises(ValueError, match="3 target rows cannot be divided among 2 sources"):
        model(**make_batch([3, 2]), decoder_input_ids=torch.full((3, 1), BOS))


def test_shared_history_layer_keeps_entries_in_order() -> None:
    layer = SharedHistoryLayer()
    first = torch.arange(2 * 3).view(2, 1, 3, 1).float()
    layer.update(first, first)
    then = 10 + torch.arange(4).view(4, 1, 1, 1).float()
    keys, values = layer.update(then, -then)
    assert keys[:, 0, :, 0].tolist() == [[0, 1, 2, 10, 11], [3, 4, 5, 12, 13]]
    assert values[:, 0, 3:, 0].tolist() == [[-10, -11], [-12, -13]]
    assert layer.get_seq_length() == 4
    layer.keep_sentences(torch.tensor([1]))
    keys, _ = layer.update(then[:2], then[:2])
    assert keys[:, 0, :, 0].tolist() == [[3, 4, 5, 12, 13, 10, 11]]
