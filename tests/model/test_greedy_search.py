"""Greedy search against the library's own, and what it saves."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from test_beam_search import (
    BOS,
    EOS,
    MODELS,
    PAD,
    ForbidRepeating,
    RowCounter,
    StopAfter,
    library_search,
    make_batch,
    search,
    shared_model,
)
from transformers import TextStreamer

from vanilla_transformer.model import greedy_search_vanilla_transformer


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the searches that are not left to the library."""
    counted: list[int] = []
    run = greedy_search_vanilla_transformer.GreedySearch.run

    def count(self: Any) -> torch.Tensor:
        counted.append(1)
        return run(self)

    monkeypatch.setattr(greedy_search_vanilla_transformer.GreedySearch, "run", count)
    return counted


@hypothesis.given(
    name=st.sampled_from(sorted(MODELS)),
    seed=st.integers(0, 5),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    side=st.sampled_from(["left", "right"]),
    options=st.sets(st.sampled_from(["shorter", "repeat", "two ends", "no end", "prompt", "padded prompt", "custom"])),
    max_new_tokens=st.integers(1, 12),
)
@hypothesis.settings(max_examples=80)
@hypothesis.example(
    name="sdpa",
    seed=1,
    lengths=[0, 2, 4],
    side="left",
    options={"padded prompt", "repeat", "two ends"},
    max_new_tokens=12,
)
def test_the_library_finds_the_same(
    name: str, seed: int, lengths: list[int], side: str, options: set[str], max_new_tokens: int
) -> None:
    arguments: dict[str, Any] = {**make_batch(lengths, seed, side), "max_new_tokens": max_new_tokens}
    prompt = torch.tensor([[BOS, 5, 6]]).repeat(len(lengths), 1)
    mask = torch.ones_like(prompt)
    mask[0, 0] = 0
    changes: dict[str, dict[str, Any]] = {
        "shorter": {"no_repeat_ngram_size": 2},
        "repeat": {"repetition_penalty": 1.4},
        "two ends": {"eos_token_id": [EOS, 5]},
        "no end": {"eos_token_id": None},
        "prompt": {"decoder_input_ids": prompt},
        "padded prompt": {"decoder_input_ids": prompt, "decoder_attention_mask": mask},
        "custom": {"logits_processor": [ForbidRepeating(len(lengths))], "stopping_criteria": [StopAfter(7)]},
    }
    for option in sorted(options):
        arguments |= changes[option]
    model = shared_model(name, seed)
    with library_search(model) as plain:
        theirs = search(plain, **arguments)
    assert search(model, **arguments).equal(theirs)


def test_finished_sentences_leave_the_batch(runs: list[int]) -> None:
    model = shared_model("sdpa", seed=1)
    counter = RowCounter(model)
    try:
        found = search(model, **make_batch([0, 3, 5, 7]), suppress_tokens=[EOS], max_new_tokens=None)
    finally:
        counter.handle.remove()
    assert runs == [1]
    assert counter.rows == [4] * 51 + [3] * 3 + [2] * 2 + [1] * 2
    assert [(row != PAD).sum().item() for row in found] == [52, 55, 57, 59]


@pytest.mark.parametrize(
    "arguments",
    [
        {"do_sample": True},
        {"return_dict_in_generate": True},
        {"use_cache": False},
        {"streamer": True},
    ],
)
def test_the_library_is_left_what_is_its_own(runs: list[int], arguments: dict[str, Any]) -> None:
    model: Any = shared_model("sdpa")
    if "streamer" in arguments:
        arguments = {"streamer": TextStreamer(_Tokens())}  # type: ignore[arg-type]
    inputs = {name: tensor[:1] for name, tensor in make_batch([4]).items()}
    search(model, **inputs, **arguments)
    assert runs == []
    search(model, **inputs)
    assert runs == [1]


class _Tokens:
    """All that a streamer wants of a tokenizer."""

    def decode(self, ids: Any, **kwargs: Any) -> str:
        return " ".join(map(str, ids))
