"""Beam and greedy search against the library's own, a search written naively, and one sentence at a time."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tiny_vanilla import TWO_VOCABULARIES, logits_of, make_model, make_sentences, pad
from transformers import LogitsProcessor, StoppingCriteria, TextStreamer
from transformers.generation.utils import GenerationMixin

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model import search_vanilla_transformer as search_module
from vanilla_transformer.model.search_vanilla_transformer import GreedySearch, find_largest

Model = VanillaTransformerForConditionalGeneration
BOS, PAD, EOS = 0, 1, 2
VOCAB_SIZE = 17
MODELS: dict[str, dict[str, Any]] = {
    "sdpa": {},
    "eager-pre-norm": {"attention": "eager", "normalize_before": True, "d_k": 6, "d_v": 3},
    "two-vocabularies": {**TWO_VOCABULARIES["two-vocabularies-untied"], "position_offset": 2},
    "learned": {"position_embedding_type": "learned", "max_position_embeddings": 40, "add_final_layer_norm": True},
}
OPTIONAL = ("normalize_before", "normalize_embedding", "attention_bias", "lm_head_bias")
MODELS["every-option"] = {**dict.fromkeys(OPTIONAL, True), "d_k": 6, "d_v": 3, "ffn_bias": False}
MODELS["every-option"]["activation_function"] = "gelu"


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
    yield target_side
    target_side.__class__ = kind


def search(model: Any, **arguments: Any) -> Any:
    return model.generate(**{"do_sample": False, "max_new_tokens": 10, **arguments})


def make_batch(lengths: list[int], seed: int = 0, side: str = "right") -> dict[str, torch.Tensor]:
    ids, mask = pad([[*sentence, EOS] for sentence in make_sentences(lengths, seed=seed)], side=side)
    return {"input_ids": ids, "attention_mask": mask}


def fill_up(sequences: torch.Tensor) -> torch.Tensor:
    """Where there is no end symbol, the library fills up with -1, which no tokenizer decodes; ours with padding."""
    return sequences.masked_fill(sequences == -1, PAD)


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if type(ours) is torch.Tensor:
        assert ours.equal(fill_up(theirs))
        return
    assert ours.sequences.equal(fill_up(theirs.sequences))
    assert_close(ours.sequences_scores, theirs.sequences_scores)
    if ours.beam_indices.tolist() != theirs.beam_indices.tolist():
        return  # beams with the same score may change places, and then their rows below do too
    for name in ("scores", "logits", "decoder_attentions", "cross_attentions", "decoder_hidden_states"):
        assert_close(getattr(ours, name), getattr(theirs, name))


def assert_close(ours: Any, theirs: Any) -> None:
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


OPTIONS = ["shorter", "repeat", "two ends", "no end", "prompt", "padded prompt", "custom"]


def change_search(options: set[str], num_sentences: int, num_beams: int, padding: int = 0) -> dict[str, Any]:
    """What of `OPTIONS` is asked for; `padding` is where the first of the padded prompts has padding."""
    prompt = torch.tensor([[BOS, 5, 6]]).repeat(num_sentences, 1)
    mask = torch.ones_like(prompt)
    mask[0, padding] = 0
    changes: dict[str, dict[str, Any]] = {
        "shorter": {"no_repeat_ngram_size": 2},
        "repeat": {"repetition_penalty": 1.4},
        "two ends": {"eos_token_id": [EOS, 5]},
        "no end": {"eos_token_id": None},
        "prompt": {"decoder_input_ids": prompt},
        "padded prompt": {"decoder_input_ids": prompt, "decoder_attention_mask": mask},
        "custom": {
            "logits_processor": [ForbidRepeating(num_sentences * num_beams)],
            "stopping_criteria": [StopAfter(7)],
        },
    }
    return {name: value for option in sorted(options) for name, value in changes[option].items()}


@hypothesis.given(
    name=st.sampled_from(sorted(MODELS)),
    seed=st.integers(0, 5),
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=9),
    side=st.sampled_from(["left", "right"]),
    num_beams=st.sampled_from([1, 1, 2, 3, 4, 5]),
    options=st.sets(st.sampled_from(OPTIONS)),
    kind=st.sampled_from(["plain", "plain", "gnmt", "uncached", "recorded"]),
    data=st.data(),
)
@hypothesis.settings(max_examples=80)
def test_the_library_and_static_memory_find_the_same(
    name: str, seed: int, lengths: list[int], side: str, num_beams: int, options: set[str], kind: str, data: Any
) -> None:
    """The library knows no `gnmt` and no limit of each sentence's own, and static memory no scores of every step."""
    arguments = {**make_batch(lengths, seed, side), "num_beams": num_beams}
    arguments |= change_search(options, len(lengths), num_beams, data.draw(st.integers(0, 2), "padding"))
    arguments["max_new_tokens"] = data.draw(st.integers(1, 12), "max_new_tokens")
    if num_beams > 1:
        arguments |= {
            "num_return_sequences": data.draw(st.integers(1, num_beams), "num_return_sequences"),
            "length_penalty": data.draw(st.sampled_from([0.0, 0.6, 1.0, 2.0, -1.0]), "length_penalty"),
            "early_stopping": data.draw(st.sampled_from([False, True, "never"]), "early_stopping"),
            "use_cache": kind != "uncached",
            "return_dict_in_generate": kind in ("gnmt", "recorded"),
        }
        if kind == "recorded":
            arguments |= {"output_scores": True, "output_logits": True}
            arguments |= {"output_hidden_states": True, "output_attentions": name == "eager-pre-norm"}
    if kind == "gnmt":
        arguments["length_penalty_type"] = "gnmt"
        arguments["max_new_tokens"] = data.draw(st.sampled_from([None, 9]), "limit")
    model = shared_model(name, seed)
    ours = search(model, **arguments)
    if kind != "gnmt":
        with library_search(model) as plain:
            assert_same(ours, search(plain, **arguments))
    if kind in ("plain", "gnmt") or num_beams == 1:
        assert_same(search(model, **arguments, cache_implementation="static"), ours)


def test_sampled_beams_are_the_library_s() -> None:
    arguments = {**make_batch([5, 2, 6]), "num_beams": 3, "do_sample": True, "num_return_sequences": 2}
    model = shared_model("sdpa")
    for seed in range(5):
        torch.manual_seed(seed)
        with library_search(model) as plain:
            theirs = search(plain, **arguments)
        torch.manual_seed(seed)
        assert search(model, **arguments).equal(theirs)


def log_probabilities(model: Model, source: list[int], prefix: list[int]) -> list[float]:
    logits = logits_of(model, input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([prefix]))
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
    model = shared_model("sdpa", seed)
    batch = make_batch([3, 6, 1], seed)
    settings = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": alpha, "max_new_tokens": 7}
    found = search(model, **batch, **settings, length_penalty_type="gnmt", return_dict_in_generate=True)
    for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True)):
        expected = naive_beam_search(model, ids[mask.bool()].tolist(), 3, 7, alpha)[:3]
        rows = slice(3 * row, 3 * row + 3)
        results = zip(expected, found.sequences[rows], found.sequences_scores[rows], strict=True)
        for (score, tokens), sequence, value in results:
            assert sequence.tolist()[: len(tokens)] == tokens
            assert set(sequence.tolist()[len(tokens) :]) <= {PAD}
            assert value.item() == pytest.approx(score, abs=1e-4)


def test_length_penalty_type_is_a_setting_like_others(tmp_path: Path) -> None:
    model: Any = make_model(scale=0.6)
    arguments = {**make_batch([5, 2]), "num_beams": 3, "length_penalty": 1.7, "max_new_tokens": 6}
    arguments |= {"return_dict_in_generate": True}
    kinds = ("transformers", "gnmt")
    scores = [search(model, **arguments, length_penalty_type=kind).sequences_scores for kind in kinds]
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


@contextmanager
def count_rows(model: Model) -> Iterator[list[int]]:
    rows: list[int] = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[0]))
    yield rows
    handle.remove()


def test_finished_sentences_leave_the_beam_search() -> None:
    model, lengths = shared_model("sdpa", seed=1), list(range(8))
    arguments = {**make_batch(lengths), "num_beams": 3, "suppress_tokens": [EOS], "max_new_tokens": None}
    with count_rows(model) as rows:
        found = search(model, **arguments)
    assert rows[0] == 8, "at first one beam stands for all"
    assert rows[1] == 24
    assert rows[-1] == 3, "the longest sentence ends alone"
    assert sorted(rows[1:], reverse=True) == rows[1:]
    for row, sentence in enumerate(make_sentences(lengths)):
        alone = search(model, **{**arguments, "input_ids": torch.tensor([[*sentence, EOS]]), "attention_mask": None})
        assert found[row, : alone.shape[1]].equal(alone[0])


@pytest.fixture
def greedy_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the greedy searches that are not left to the library."""
    counted: list[int] = []
    run = GreedySearch.run

    def count(self: Any) -> torch.Tensor:
        counted.append(1)
        return run(self)

    monkeypatch.setattr(GreedySearch, "run", count)
    return counted


def test_finished_sentences_leave_greedy_search(greedy_runs: list[int]) -> None:
    model = shared_model("sdpa", seed=1)
    with count_rows(model) as rows:
        found = search(model, **make_batch([0, 3, 5, 7]), suppress_tokens=[EOS], max_new_tokens=None)
    assert greedy_runs == [1]
    assert rows == [4] * 51 + [3] * 3 + [2] * 2 + [1] * 2
    assert [(row != PAD).sum().item() for row in found] == [52, 55, 57, 59]


def test_the_library_is_left_what_is_its_own(greedy_runs: list[int]) -> None:
    model, batch = shared_model("sdpa"), make_batch([4])
    streamer = TextStreamer(SimpleNamespace(decode=lambda ids, **_: str(ids)))  # type: ignore[arg-type]
    for arguments in ({"do_sample": True}, {"return_dict_in_generate": True}, {"use_cache": False}):
        search(model, **batch, **arguments)
    search(model, **batch, streamer=streamer)
    assert greedy_runs == []
    search(model, **batch)
    assert greedy_runs == [1]


def test_hooks_on_the_model_are_called_at_every_step() -> None:
    model = shared_model("sdpa")
    arguments = {**make_batch([4, 2]), "num_beams": 3}
    expected = search(model, **arguments)
    calls: list[int] = []
    handle = model.model.decoder.register_forward_hook(lambda module, inputs, outputs: calls.append(1))
    found = search(model, **arguments)
    handle.remove()
    assert found.equal(expected)
    assert len(calls) == expected.shape[1] - 1 == 10


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


def test_largest_values_are_found_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "_SLOW_AT_TOPK", ("meta",))
    for found in find_largest(torch.empty(9, 37_000, device="meta"), 8):
        assert (found.shape, found.device.type) == ((9, 8), "meta")


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_criterion_may_answer_with_one_bool(num_beams: int) -> None:
    """As people write them: for all rows."""
    batch = {**make_batch([3, 5]), "num_beams": num_beams, "suppress_tokens": [EOS]}
    tokens = search(make_model(), **batch, stopping_criteria=[lambda ids, scores, **_: ids.shape[1] >= 5])
    assert tokens.equal(search(make_model(), **batch, max_new_tokens=4))


def test_beams_that_a_constraint_leaves_no_token_are_returned_as_they_are() -> None:
    def forbid_all_after_three(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if ids.shape[1] < 4 else scores.new_full(scores.shape, -torch.inf)

    batch = {**make_batch([3, 5]), "num_beams": 3, "num_return_sequences": 3, "suppress_tokens": [EOS]}
    tokens = search(make_model(), **batch, logits_processor=[forbid_all_after_three])
    assert tokens.equal(search(make_model(), **batch, max_new_tokens=3))


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_forced_end_comes_at_each_sentences_own_limit(num_beams: int) -> None:
    model = make_model()
    batch = make_batch([3, 9])
    settings: dict[str, Any] = {"num_beams": num_beams, "forced_eos_token_id": EOS, "max_new_tokens": None}
    settings["sequence_bias"] = {(EOS,): -50.0}
    tokens = search(model, **batch, **settings)
    for row, length in enumerate([4, 10]):
        alone = {name: values[row : row + 1, :length] for name, values in batch.items()}
        expected = search(model, **alone, **settings)[0]
        assert expected.shape == (1 + length + 50,)
        assert expected[-1] == EOS
        assert tokens[row, : len(expected)].equal(expected)


def test_embeddings_of_a_target_are_refused() -> None:
    with pytest.raises(ValueError, match="give decoder_input_ids instead of decoder_inputs_embeds"):
        search(make_model(), **make_batch([3]), decoder_inputs_embeds=torch.zeros(1, 2, 16))
