"""Searches over static memory against the same searches without, and what is compiled for them.

The model is on the CPU, where the library compiles nothing by itself: most tests run the very step that is compiled
elsewhere as it stands.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from test_search import BOS, EOS, make_batch, search, shared_model
from tiny_vanilla import logits_of, make_cache, make_config, make_model
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CompileConfig, GenerationConfig

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.decoding_vanilla_transformer import SourceSharingCache
from vanilla_transformer.model.static_decoding_vanilla_transformer import (
    Bucket,
    KeptSteps,
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
    """The bucket of each step that is not compiled, read off its tensors, and where the first keys lie."""
    recorded: Recorded = []

    def record(model: Any, state: StepState) -> torch.Tensor:
        sentences, beams, entries = state.visible.shape
        bucket = Bucket(sentences, beams, entries // beams, state.is_padding.shape[2])
        for held in state.histories:
            assert held.keys.shape[::2] == held.values.shape[::2] == (sentences, entries)
        for held in state.sources:
            assert held.keys.shape[::2] == held.values.shape[::2] == (sentences, bucket.source_length)
        assert not state.start.is_inference(), "nobody else could change it"
        recorded.append((bucket, state.histories[0].keys.data_ptr()))
        return decode_step(model, state)

    monkeypatch.setattr(StaticDecoder, "run", staticmethod(record))
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


def test_threads_do_not_share_memory() -> None:
    model = shared_model("sdpa")
    batches = [make_batch(lengths) for lengths in ([4, 2, 6], [1, 7], [3, 3, 3, 3, 3])] * 4
    expected = [search(model, **batch, num_beams=3) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda batch: search_static(model, **batch, num_beams=3), batches))
    assert all(map(torch.equal, found, expected))


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


def on_all_devices(**settings: Any) -> CompileConfig:
    """Has the library's criteria let a model on the CPU be compiled."""
    config = CompileConfig(**{"fullgraph": True, "mode": None, **settings})
    config._compile_all_devices = True  # type: ignore[assignment]
    return config


@pytest.fixture
def graphs() -> Iterator[list[Any]]:
    """The shapes of the inputs of each graph that the compiler gets; it must forget them between tests."""
    torch.compiler.reset()
    yield []
    torch.compiler.reset()


def count_in(graphs: list[Any]) -> Any:
    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append({tuple(getattr(item, "shape", ())) for item in inputs})
        return graph.forward

    return count


@torch._dynamo.config.patch(recompile_limit=1)
def test_a_graph_serves_many_batches(graphs: list[Any], steps: Recorded) -> None:
    model = make_model(scale=0.6, decoder_layers=1)
    config = on_all_devices(backend=count_in(graphs))
    for seed in range(3):
        for lengths in ([3], [1, 5, 6], [7, 1, 0, 2]):
            batch = make_batch(lengths, seed)
            found = search_static(model, **batch, num_beams=4, compile_config=config)
            assert found.equal(search(model, **batch, num_beams=4))
    # 1 and 4 sentences; all are short.
    assert len(graphs) == 2
    heads, size = 2, 8
    for sentences, shapes in zip((1, 4), graphs, strict=True):
        expected = {(sentences, heads, length, size) for length in (64, 256)}
        assert {shape for shape in shapes if len(shape) == 4} == expected
    assert steps == [], "all steps were compiled"
    search_static(model, **make_batch([3]), num_beams=4, compile_config=config, disable_compile=True)
    search_static(model, **make_batch([3]), num_beams=4, compile_config=CompileConfig())
    assert len(graphs) == 2
    assert len(steps) > 0


def test_graphs_of_any_size_are_fewer_than_buckets(graphs: list[Any]) -> None:
    model = make_model(scale=0.6, decoder_layers=1)
    config = on_all_devices(backend=count_in(graphs), dynamic=True)
    for lengths in ([4, 2], [1, 5, 6], [70, 3]):
        for known in KNOWN_LENGTHS:
            arguments = {**make_batch(lengths), "num_beams": 4, "max_new_tokens": 4}
            found = search_static(model, **arguments, compile_config=config, **known)
            assert found.equal(search(model, **arguments))
    assert 1 <= len(graphs) <= 2, "of 3 buckets, or 6 where their lengths can be known"


def test_graphs_can_be_recorded(graphs: list[Any]) -> None:
    """What CUDA graphs demand: every input stays in its place, and no operator needs the CPU."""

    def inspect(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        context = TracingContext.get()
        assert context is not None
        assert context.fw_metadata is not None
        assert context.fw_metadata.static_input_indices == list(range(len(inputs)))
        assert get_first_incompatible_cudagraph_node(graph) is None
        assert len(context.fw_metadata.mutated_inp_runtime_indices) == 2 + 2 * model.config.decoder_layers
        graphs.append(graph)
        return graph.forward

    model = make_model(scale=0.6)
    config = on_all_devices(backend=aot_autograd(fw_compiler=inspect))
    arguments = {**make_batch([4, 2, 1]), "num_beams": 4}
    found = search_static(model, **arguments, compile_config=config)
    assert found.equal(search(model, **arguments))
    assert len(graphs) > 0


def test_compiled_steps_go_with_their_model(graphs: list[Any]) -> None:
    model = make_model(scale=0.6, decoder_layers=1)
    search_static(model, **make_batch([3]), compile_config=on_all_devices(backend="aot_eager"))
    kept, alive = weakref.ref(KeptSteps.of(model)), weakref.ref(model)
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
