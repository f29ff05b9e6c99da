"""Searches over static memory against the same searches without, and what is recorded for them.

The model is on the CPU, where nothing is recorded: most tests run the very step that a GPU records.
"""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_search import BOS, EOS, make_batch, search, shared_model
from tiny_vanilla import logits_of, make_cache, make_config, make_model
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CompileConfig, GenerationConfig

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model import static_decoding_vanilla_transformer as static_decoding
from vanilla_transformer.model.decoding_vanilla_transformer import SourceSharingCache
from vanilla_transformer.model.static_decoding_vanilla_transformer import (
    Bucket,
    IdleWorkspaces,
    StaticDecoder,
    StepState,
    decode_step,
    make_sharing_decoder,
)

Recorded = list[tuple[Bucket, int]]

# Older versions of the library have no such setting.
KNOWN_LENGTHS: list[dict[str, int]] = [
    {},
    *([{"max_cache_len": 100}] if hasattr(GenerationConfig(), "max_cache_len") else []),
]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """The bucket of each step that is not recorded, read off its tensors, and where the first keys lie."""
    recorded: Recorded = []

    def record(model: Any, state: StepState) -> torch.Tensor:
        sentences, beams, entries = state.visible.shape
        bucket = Bucket(sentences, beams, entries // beams, state.source_mask.shape[2])
        for held in state.histories:
            assert held.keys.shape[::2] == held.values.shape[::2] == (sentences, entries)
        for held in state.sources:
            assert held.keys.shape[::2] == held.values.shape[::2] == (sentences, bucket.source_length)
        assert not state.start.is_inference(), "nobody else could change it"
        recorded.append((bucket, state.histories[0].keys.data_ptr()))
        return decode_step(model, state)

    monkeypatch.setattr(static_decoding, "decode_step", record)
    return recorded


def search_static(model: Any, **arguments: Any) -> Any:
    return search(model, cache_implementation="static", **arguments)


def assert_same(model: Any, **arguments: Any) -> None:
    ours, expected = search_static(model, **arguments), search(model, **arguments)
    if isinstance(expected, torch.Tensor):
        assert ours.equal(expected)
        return
    assert ours.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(ours.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_sentences_leave_and_histories_grow_in_few_steps(num_beams: int, steps: Recorded) -> None:
    arguments = {**make_batch([0, 1, 2, 3, 4, 20]), "num_beams": num_beams}
    arguments |= {"suppress_tokens": [EOS], "max_new_tokens": None}
    assert_same(shared_model("sdpa", seed=1), **arguments)
    buckets = [bucket for bucket, _ in steps]
    assert len(buckets) == 71
    assert buckets[:54] == [Bucket(8, num_beams, 64, 64)] * 54
    assert buckets[54:64] == [Bucket(2, num_beams, 64, 64)] * 10
    assert buckets[64:] == [Bucket(2, num_beams, 128, 64)] * 7


@pytest.mark.parametrize("known", KNOWN_LENGTHS)
def test_longer_sources_and_known_lengths(known: dict[str, int], steps: Recorded) -> None:
    assert_same(shared_model("sdpa"), **make_batch([65, 3, 80]), num_beams=2, max_new_tokens=4, **known)
    assert {bucket for bucket, _ in steps} == {Bucket(4, 2, 128 if known else 64, 128)}


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_source_of_nothing_but_padding(num_beams: int) -> None:
    batch = make_batch([4, 2, 5])
    batch["attention_mask"][1] = 0
    assert_same(shared_model("sdpa"), **batch, num_beams=num_beams)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_prompts_of_padding_and_learned_positions_to_the_last(num_beams: int) -> None:
    """40 positions were learned; padding takes none."""
    model = shared_model("learned")
    prompt = torch.tensor([[BOS, BOS, BOS, 5], [BOS, BOS, BOS, 6], [BOS, BOS, BOS, 7]])
    mask = torch.tensor([[0, 0, 0, 1]] * 3)
    arguments = {**make_batch([4, 2, 1]), "num_beams": num_beams, "suppress_tokens": [EOS]}
    prompts = {"decoder_input_ids": prompt, "decoder_attention_mask": mask}
    assert_same(model, **arguments, **prompts, max_new_tokens=40)
    for limit, more in ((41, prompts), (42, {})):
        with pytest.raises(ValueError, match="A sequence of 41 tokens is too long for learned positions"):
            search_static(model, **arguments, **more, max_new_tokens=limit)


def start_decoding(model: Any, batch: dict[str, torch.Tensor], prompt_mask: torch.Tensor) -> StaticDecoder:
    inputs = {"encoder_outputs": model.get_encoder()(**batch), "attention_mask": batch["attention_mask"]}
    config = GenerationConfig(num_beams=1, cache_implementation="static")
    return StaticDecoder(model, {**inputs, "decoder_attention_mask": prompt_mask}, config)


@torch.no_grad()
def test_places_that_were_left_take_no_positions() -> None:
    """Or the tokens of a longer prompt would be beyond the last position before the others' are."""
    model, batch = shared_model("learned"), make_batch([4, 2, 1])
    prompts = torch.tensor([[5, 6], [1, 6], [1, 7]])
    mask = torch.tensor([[1, 1], [0, 1], [0, 1]])
    decoder = start_decoding(model, batch, mask)
    decoder.step(prompts[:, None])
    decoder.keep_sentences(torch.tensor([1, 2]))
    tokens = torch.cat([prompts[1:], torch.randint(3, 13, (2, 39))], dim=1)
    logits = [decoder.step(tokens[:, None, :length]) for length in range(3, 42)]
    inputs = {name: tensor[1:] for name, tensor in batch.items()}
    mask = torch.cat([mask[1:], torch.ones(2, 39)], dim=1)
    expected = logits_of(model, **inputs, decoder_input_ids=tokens, decoder_attention_mask=mask)
    torch.testing.assert_close(torch.stack(logits, dim=1), expected[:, 2:], atol=1e-4, rtol=1e-4)


def test_half_precision_in_several_ways() -> None:
    arguments = {**make_batch([5, 2, 6]), "num_beams": 3, "max_new_tokens": 5}
    assert_same(make_model(scale=0.6).bfloat16(), **arguments)
    padded = {"decoder_input_ids": torch.tensor([[BOS, 5]] * 3)}
    padded["decoder_attention_mask"] = torch.tensor([[0, 1], [1, 1], [1, 1]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(shared_model("sdpa"), **arguments, **padded)


def test_every_row_sees_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places without a sentence too, and padding: some kernels return no numbers for a row that sees nothing."""
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    num_masks = 0

    def check(*inputs: torch.Tensor, attn_mask: Any, **settings: Any) -> torch.Tensor:
        nonlocal num_masks
        num_masks += 1
        assert (attn_mask if attn_mask.dtype == torch.bool else attn_mask == 0).any(dim=-1).all()
        return attend(*inputs, attn_mask=attn_mask, **settings)

    model, batch = shared_model("sdpa"), make_batch([5, 2, 6])
    with torch.no_grad():
        decoder = start_decoding(model, batch, torch.tensor([[0, 0, 1], [1, 1, 1], [0, 1, 1]]))
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", check)
        decoder.step(torch.full((3, 1, 4), 5))
        decoder.keep_sentences(torch.tensor([0, 2]))
        decoder.step(torch.full((2, 1, 6), 5))
    assert num_masks == 6 * 2 * model.config.decoder_layers


def test_memory_stays_where_it_is(steps: Recorded) -> None:
    model = make_model(scale=0.6)
    for lengths in ([4, 2, 6, 1, 3], [3], [1] * 8, [5, 3]):
        assert_same(model, **make_batch(lengths), num_beams=4, max_new_tokens=5)
    assert {bucket.sentences for bucket, _ in steps} >= {1, 2, 8}
    assert len({address for _, address in steps}) == 1


def test_memory_of_a_call_in_inference_mode_serves_others(steps: Recorded) -> None:
    model = make_model(scale=0.6)
    arguments = {**make_batch([4, 2, 6]), "num_beams": 2}
    expected = search(model, **arguments)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            assert search_static(model, **arguments).equal(expected)
    assert len({address for _, address in steps}) == 1


def test_what_an_earlier_call_left_does_no_harm() -> None:
    """Not even what is no number: nothing times that is not nothing."""
    model = make_model(scale=0.6)
    arguments = {**make_batch([4, 2, 6]), "num_beams": 2, "max_new_tokens": 5}
    weight = model.model.decoder.embed_tokens.weight.data
    original = weight.clone()
    weight[:] = float("nan")
    search_static(model, **arguments, remove_invalid_values=True)
    weight.copy_(original)
    assert_same(model, **arguments)


@pytest.mark.parametrize("is_recorded", [False, True])
def test_threads_do_not_share_memory(is_recorded: bool, request: pytest.FixtureRequest) -> None:
    recorded = request.getfixturevalue("recorded") if is_recorded else []
    model = make_model(scale=0.6)
    batches = [make_batch(lengths) for lengths in ([4, 2, 6], [1, 7], [3, 3, 3, 3, 3])] * 4
    expected = [search(model, **batch, num_beams=3) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda batch: search_static(model, **batch, num_beams=3), batches))
    assert all(map(torch.equal, found, expected))
    assert bool(recorded) == is_recorded


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("eager-pre-norm", {}),
        ("sdpa", {"do_sample": True}),
        ("sdpa", {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True}),
        ("sdpa", {"past_key_values": "given"}),
        ("sdpa", {"hook": True}),
    ],
)
def test_where_static_memory_does_not_suit(name: str, arguments: dict[str, Any], steps: Recorded) -> None:
    model, batch = shared_model(name), {name: tensor[:1] for name, tensor in make_batch([4]).items()}
    arguments = {"cache_implementation": "static", **arguments}
    handle = None
    if arguments.pop("hook", False):
        handle = model.model.decoder.register_forward_hook(lambda *_: None)
    if "past_key_values" in arguments:
        arguments |= {"past_key_values": make_cache(model, "static", 5, 11), "cache_implementation": None}
    search(model, **batch, **arguments)
    if handle is not None:
        handle.remove()
    assert steps == []
    search_static(shared_model("sdpa"), **batch)
    assert len(steps) > 0


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_cache_of_the_caller_is_filled(kind: str, num_beams: int) -> None:
    model, batch = shared_model("sdpa"), make_batch([4])
    cache = make_cache(model, kind, batch["input_ids"].shape[1], 6)
    arguments = {**batch, "num_beams": num_beams, "max_new_tokens": 6, "suppress_tokens": [EOS]}
    assert search(model, **arguments, past_key_values=cache).equal(search(model, **arguments))
    assert cache.get_seq_length() == 6


def test_it_is_a_setting_like_others(steps: Recorded) -> None:
    model: Any = make_model(scale=0.6)
    model.generation_config.cache_implementation = "static"
    found = search(model, **make_batch([4, 2]), num_beams=3)
    assert len(steps) > 0
    del steps[:]
    assert search(model, **make_batch([4, 2]), num_beams=3, cache_implementation="dynamic").equal(found)
    assert steps == []


class Replayed:
    """Stands for a CUDA graph where there is none: the step on the very tensors that were recorded."""

    def __init__(self, model: Any, state: StepState, pool: Any) -> None:
        self.model, self.state = weakref.proxy(model), copy.copy(state)
        self.addresses = [parameter.data_ptr() for parameter in model.parameters()]
        start, visible = state.start.clone(), state.visible.clone()
        self.logits = decode_step(model, state)
        state.start.copy_(start)
        state.visible.copy_(visible)

    def __call__(self) -> torch.Tensor:
        assert [parameter.data_ptr() for parameter in self.model.parameters()] == self.addresses
        return self.logits.copy_(decode_step(self.model, self.state))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Bucket]:
    """The buckets that steps are recorded for; a search on the CPU records as one on a GPU does."""
    buckets: list[Bucket] = []

    def record(model: Any, state: StepState, pool: Any) -> Replayed:
        sentences, beams, entries = state.visible.shape
        buckets.append(Bucket(sentences, beams, entries // beams, state.source_mask.shape[2]))
        return Replayed(model, state, pool)

    monkeypatch.setattr(static_decoding, "RecordedStep", record)
    monkeypatch.setattr(static_decoding, "can_record", lambda device, config: not config.disable_compile)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return buckets


@pytest.mark.parametrize("num_beams", [1, 4])
def test_a_recorded_step_serves_many_batches(num_beams: int, recorded: list[Bucket], steps: Recorded) -> None:
    model = make_model(scale=0.6, decoder_layers=1)
    for seed in range(3):
        for lengths in ([3], [1, 5, 6], [7, 1, 0, 2]):
            assert_same(model, **make_batch(lengths, seed), num_beams=num_beams)
    # Of 4 sentences first, in memory that those of 1 did not need.
    expected = [Bucket(sentences, num_beams, 64, 64) for sentences in (1, 4, 1)]
    assert recorded == expected
    del steps[:]
    search_static(model, **make_batch([3]), num_beams=num_beams, disable_compile=True)
    assert len(recorded) == 3
    assert len(steps) > 0


def test_longer_batches_and_moved_weights_are_recorded_anew(recorded: list[Bucket]) -> None:
    model: Any = make_model(scale=0.6)
    batches = [make_batch(lengths) for lengths in ([4, 2], [70, 3], [4, 2], [1] * 9, [4, 2])]
    for batch in batches:
        assert_same(model, **batch, num_beams=3, max_new_tokens=70, suppress_tokens=[EOS])
    num_recorded = len(recorded)
    assert_same(model, **batches[0], num_beams=3)
    assert len(recorded) == num_recorded
    # In the old places, and in new ones.
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    assert_same(model, **batches[0], num_beams=3)
    assert len(recorded) == num_recorded
    model.model.decoder.layers[1].fc2.weight = torch.nn.Parameter(model.model.decoder.layers[1].fc2.weight * 2)
    assert_same(model, **batches[0], num_beams=3)
    assert len(recorded) > num_recorded


@pytest.mark.parametrize("num_beams", [1, 3])
def test_who_asks_for_compiling_gets_what_the_library_compiles(num_beams: int, recorded: list[Bucket]) -> None:
    model, config = make_model(scale=0.6), CompileConfig(backend="eager", mode="default")
    config._compile_all_devices = True  # type: ignore[assignment]
    arguments = {**make_batch([4, 2]), "num_beams": num_beams, "max_new_tokens": 4}
    assert search_static(model, **arguments, compile_config=config).equal(search(model, **arguments))
    assert recorded == []
    torch.compiler.reset()


def test_a_step_can_be_recorded() -> None:
    """What CUDA graphs demand: no operator needs the CPU."""
    graphs: list[torch.fx.GraphModule] = []

    def inspect(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        assert get_first_incompatible_cudagraph_node(graph) is None
        graphs.append(graph)
        return graph.forward

    model, batch = make_model(scale=0.6), make_batch([4, 2, 1])
    torch.compiler.reset()
    with torch.no_grad():
        state = start_decoding(model, batch, torch.ones(3, 1)).state
        compiled = torch.compile(decode_step, fullgraph=True, backend=aot_autograd(fw_compiler=inspect))
        state.bound = 64
        torch.testing.assert_close(compiled(model, copy.deepcopy(state)), decode_step(model, state))
    assert len(graphs) == 1
    torch.compiler.reset()


def test_memory_goes_with_its_model(recorded: list[Bucket]) -> None:
    model = make_model(scale=0.6, decoder_layers=1)
    search_static(model, **make_batch([3]))
    kept, alive = weakref.ref(IdleWorkspaces.of(model)), weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert kept() is None


class OnOneDevice(TorchDispatchMode):
    """Refuses operators of which any input or output is not on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, outputs)):
            assert not isinstance(leaf, torch.Tensor) or leaf.device.type == "meta", func
        return outputs


@pytest.mark.parametrize("kind", ["sinusoidal", "learned"])
def test_everything_is_on_the_model_s_device(kind: str) -> None:
    with torch.no_grad(), torch.device("meta"):
        model = VanillaTransformerForConditionalGeneration(make_config(position_embedding_type=kind)).eval()
        cache = SourceSharingCache.adopt(make_cache(model, "static", 7, 20))
        inputs: dict[str, Any] = {"encoder_outputs": (torch.empty(5, 7, 16),), "past_key_values": cache}
        inputs |= {"attention_mask": torch.ones(5, 7), "decoder_attention_mask": torch.ones(20, 2)}
        prompts, longer = (torch.zeros(rows, 4, length).long() for rows, length in ((5, 2), (1, 3)))
        beams, staying = torch.zeros(5, 4).long(), torch.zeros(1).long()
    config = GenerationConfig(num_beams=4, cache_implementation="static")
    with torch.no_grad(), OnOneDevice():
        decoder = make_sharing_decoder(model, inputs, config)
        assert isinstance(decoder, StaticDecoder)
        assert decoder.step(prompts).shape == (20, 17)
        decoder.follow(beams)
        decoder.keep_sentences(staying)
        assert decoder.bucket == Bucket(1, 4, 64, 64)
        assert decoder.step(longer).shape == (4, 17)
