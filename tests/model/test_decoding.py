"""The caches of a search, in which the beams of a sentence share what they have in common."""

from __future__ import annotations

from typing import Any, cast

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from test_search import BOS, Model, make_batch, search, shared_model
from tiny_vanilla import make_cache
from transformers import EncoderDecoderCache

from vanilla_transformer.model.decoding_vanilla_transformer import SharedHistoryLayer, SourceSharingCache


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
    assert (given.get_seq_length(), given.is_updated) == (2, {0: True, 1: True})


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
