"""What must hold for every model: masks, lengths, caches, gradients, dtypes, compilation, inputs and outputs."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from tiny_single_stacks import make_single_stack, run
from tiny_vanilla import (
    ALL_SHARING,
    INPUTS,
    SHARING,
    assert_close,
    logits_of,
    make_cache,
    make_config,
    make_model,
    make_sentences,
    pad,
)
from torch import nn
from transformers import AttentionInterface, AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.attention_vanilla_transformer import scaled_dot_product_attention

Model = VanillaTransformerForConditionalGeneration

# The sinusoids' table is shorter than the sentences below; a learned one just holds them.
POSITIONS: dict[str, dict[str, Any]] = {
    "sinusoidal": {"position_offset": 0, "max_position_embeddings": 4},
    "sinusoidal_concatenated": {"position_offset": 1, "max_position_embeddings": 24},
    "sinusoidal_tensor2tensor": {"position_offset": 2, "max_position_embeddings": 6},
    "learned": {"position_offset": 2, "max_position_embeddings": 14},
}
WIDTHS: tuple[dict[str, Any], ...] = ({"d_k": None, "d_v": None}, {"d_k": 6, "d_v": 3})
MAX_LENGTH = 12


def make_matrix() -> dict[str, dict[str, Any]]:
    """Every norm with every kind of position and every width; the other two options so that every pair occurs."""
    rows: dict[str, dict[str, Any]] = {}
    for norm, position, width in itertools.product(range(2), range(len(POSITIONS)), range(2)):
        kind = list(POSITIONS)[position]
        sharing = list(SHARING)[(2 * norm + width + position) % len(SHARING)]
        attention = ("eager", "sdpa")[norm ^ width]
        name = f"{('post', 'pre')[norm]}-{kind}-{('equal', 'free')[width]}-{sharing}-{attention}"
        rows[name] = {"attention": attention, "normalize_before": bool(norm), "position_embedding_type": kind}
        rows[name] |= {**POSITIONS[kind], **WIDTHS[width], **SHARING[sharing]}
    return rows


MATRIX = make_matrix()


@functools.cache
def matrix_model(name: str) -> Model:
    return make_model(**MATRIX[name])


@pytest.fixture(params=MATRIX)
def model(request: pytest.FixtureRequest) -> Model:
    """A model of the matrix, which tests share and must not change."""
    return matrix_model(request.param)


def one_by_one(model: Model, sources: list[list[int]], targets: list[list[int]]) -> list[torch.Tensor]:
    return [
        logits_of(model, input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([target]), use_cache=False)[0]
        for source, target in zip(sources, targets, strict=True)
    ]


@pytest.mark.parametrize("target_side", ["left", "right"])
@pytest.mark.parametrize("source_side", ["left", "right"])
def test_padding_changes_nothing(model: Model, source_side: str, target_side: str) -> None:
    sources, targets = make_sentences([1, 4, 7]), make_sentences([3, 5, 1], seed=1)
    source_ids, source_mask = pad(sources, source_side, junk=5)
    target_ids, target_mask = pad(targets, target_side, junk=6)
    inputs = {"input_ids": source_ids, "attention_mask": source_mask, "decoder_input_ids": target_ids}
    batched = logits_of(model, **inputs, decoder_attention_mask=target_mask)
    # No token looks ahead, so padding at the end needs no mask.
    unmasked = logits_of(model, **inputs) if target_side == "right" else batched
    for row, expected in enumerate(one_by_one(model, sources, targets)):
        real = target_mask[row].bool()
        assert_close(batched[row, real], expected)
        assert_close(unmasked[row, real], expected)


def test_masked_token_is_as_if_absent(model: Model) -> None:
    [source], [target] = make_sentences([6]), make_sentences([5], seed=1)
    source_mask, target_mask = torch.tensor([[1, 1, 0, 0, 1, 1]]), torch.tensor([[1, 1, 0, 1, 1]])
    inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([target])}
    masked = logits_of(model, **inputs, attention_mask=source_mask, decoder_attention_mask=target_mask)
    [expected] = one_by_one(model, [source[:2] + source[4:]], [target[:2] + target[3:]])
    assert_close(masked[0, target_mask[0].bool()], expected)


def test_fully_padded_row_stays_finite(model: Model) -> None:
    sources, targets = make_sentences([5, 5]), make_sentences([4, 4], seed=1)
    source_mask, target_mask = torch.ones(2, 5, dtype=torch.long), torch.ones(2, 4, dtype=torch.long)
    source_mask[1] = target_mask[1] = 0
    expected = one_by_one(model, sources[:1], targets[:1])[0]
    all_masks = {"attention_mask": source_mask, "decoder_attention_mask": target_mask}
    for masks in (all_masks, *({name: mask} for name, mask in all_masks.items())):
        target_ids = torch.tensor(targets)
        outputs = model(input_ids=torch.tensor(sources), decoder_input_ids=target_ids, labels=target_ids, **masks)
        assert outputs.logits.isfinite().all()
        assert_close(outputs.logits[0].detach(), expected)
        gradients = torch.autograd.grad(outputs.loss, list(model.parameters()), allow_unused=True)
        assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)


def test_later_target_tokens_change_nothing_before_them(model: Model) -> None:
    source = torch.tensor(make_sentences([4]))
    target = torch.tensor(make_sentences([7], seed=1))
    full = logits_of(model, input_ids=source, decoder_input_ids=target)
    for position in range(1, 7):
        changed = target.clone()
        changed[:, position:] = (changed[:, position:] - 3 + 1 + position) % 10 + 3
        other = logits_of(model, input_ids=source, decoder_input_ids=changed)
        assert_close(other[:, :position], full[:, :position], tolerance=1e-6)
        assert (other[:, position:] - full[:, position:]).abs().amax(dim=-1).min() > 1e-3


def test_learned_positions_end_with_their_table() -> None:
    model = make_model(position_embedding_type="learned", max_position_embeddings=10, position_offset=2)
    source, target = torch.tensor(make_sentences([9])), torch.tensor(make_sentences([9], seed=1))
    logits_of(model, input_ids=source[:, :8], decoder_input_ids=target[:, :8])
    message = "A sequence of 9 tokens is too long.*max_position_embeddings=10 and position_offset=2 allow 8"
    with pytest.raises(ValueError, match=message):
        model(input_ids=source, decoder_input_ids=target[:, :8])
    with pytest.raises(ValueError, match=message):
        model(input_ids=source[:, :8], decoder_input_ids=target)
    cache = model(input_ids=source[:, :8], decoder_input_ids=target[:, :8]).past_key_values
    with pytest.raises(ValueError, match=message):
        model(input_ids=source[:, :8], decoder_input_ids=target[:, 8:], past_key_values=cache)


def test_padding_takes_no_learned_positions() -> None:
    model = make_model(position_embedding_type="learned", max_position_embeddings=5)
    source, target = torch.tensor(make_sentences([9])), torch.tensor(make_sentences([7], seed=1))
    source_mask, target_mask = torch.tensor([[0] * 4 + [1] * 5]), torch.tensor([[0] * 2 + [1] * 5])
    inputs = {"input_ids": source, "decoder_input_ids": target, "decoder_attention_mask": target_mask}
    logits = logits_of(model, **inputs, attention_mask=source_mask)
    [expected] = one_by_one(model, source[:, 4:].tolist(), target[:, 2:].tolist())
    assert_close(logits[0, 2:], expected)
    source_mask[0, 3] = 1
    with pytest.raises(ValueError, match="A sequence of 6 tokens is too long"):
        model(**inputs, attention_mask=source_mask)


def test_static_cache_longer_than_learned_positions() -> None:
    model = make_model(position_embedding_type="learned", max_position_embeddings=3)
    source, target = torch.tensor(make_sentences([3])), torch.tensor(make_sentences([4], seed=1))
    cache = make_cache(model, "static", source_length=3, max_cache_len=20)
    with torch.no_grad():
        logits = decode_in_steps(model, cache, [1, 1, 1], target, input_ids=source)
    assert_close(logits, logits_of(model, input_ids=source, decoder_input_ids=target[:, :3]))
    with pytest.raises(ValueError, match="A sequence of 4 tokens is too long"):
        model(input_ids=source, decoder_input_ids=target[:, 3:], past_key_values=cache)


def decode_in_steps(
    model: Model, cache: EncoderDecoderCache, steps: list[int], target: torch.Tensor, **inputs: Any
) -> torch.Tensor:
    """Logits (B, T, V) of a target fed in pieces; a mask of the target is cut to the tokens known so far."""
    target_mask, mask = inputs.pop("decoder_attention_mask", None), inputs.get("attention_mask")
    logits, done = [], 0
    encoded = model.get_encoder()(input_ids=inputs["input_ids"], attention_mask=mask)
    source = {"encoder_outputs": encoded, "attention_mask": mask, "past_key_values": cache, "use_cache": True}
    for step in steps:
        known = None if target_mask is None else target_mask[:, : done + step]
        outputs = model(**source, decoder_input_ids=target[:, done : done + step], decoder_attention_mask=known)
        assert outputs.past_key_values is cache
        logits.append(outputs.logits)
        done += step
        assert int(cache.get_seq_length()) == done
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("steps", [[1] * 8, [3, 1, 1, 2, 1]], ids=["one-by-one", "in-pieces"])
@pytest.mark.parametrize("padded", [False, True])
def test_cached_equals_uncached(model: Model, padded: bool, steps: list[int], kind: str) -> None:
    sources, targets = make_sentences([2, 6]), make_sentences([6 if padded else 8, 8], seed=1)
    source_ids, source_mask = pad(sources, "left")
    target_ids, target_mask = pad(targets, "left", junk=7)
    cache = make_cache(model, kind, source_length=6, max_cache_len=MAX_LENGTH)
    inputs = {"input_ids": source_ids, "attention_mask": source_mask}
    inputs |= {"decoder_attention_mask": target_mask} if padded else {}
    with torch.no_grad():
        logits = decode_in_steps(model, cache, steps, target_ids, **inputs)
    for row, expected in enumerate(one_by_one(model, sources, targets)):
        assert_close(logits[row, target_mask[row].bool()], expected)


def test_source_is_projected_once_per_cache() -> None:
    model = make_model()
    calls: list[int] = []
    for layer in model.get_decoder().layers:
        layer.encoder_attn.k_proj.register_forward_hook(lambda *_: calls.append(1))
    outputs = model(input_ids=torch.tensor([[4, 5, 2]]), decoder_input_ids=torch.tensor([[0]]))
    for token in (4, 5):
        model(
            encoder_outputs=(outputs.encoder_last_hidden_state,),
            decoder_input_ids=torch.tensor([[token]]),
            past_key_values=outputs.past_key_values,
        )
    assert len(calls) == model.config.decoder_layers


def test_attention_is_dispatched_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, bool, Any]] = []

    def counting(module: nn.Module, *tensors: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((type(module).__name__, bool(module.is_causal), kwargs.get("colour")))
        return scaled_dot_product_attention(module, *tensors, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "counting", counting)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "counting", eager_mask)
    model = make_model("eager")
    inputs = {"input_ids": torch.tensor([[4, 5, 2]]), "decoder_input_ids": torch.tensor([[0, 7]])}
    expected = logits_of(model, **inputs)
    model.set_attn_implementation("counting")
    torch.testing.assert_close(logits_of(model, **inputs, colour="red"), expected)
    decoder_layer = [("SelfAttention", True, "red"), ("CrossAttention", False, "red")]
    assert calls == [("SelfAttention", False, "red")] + 2 * decoder_layer


@pytest.mark.parametrize("normalize_before", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_training_in_bfloat16(attention: str, normalize_before: bool) -> None:
    model = AutoModelForSeq2SeqLM.from_config(
        make_config(normalize_before=normalize_before, label_smoothing=0.1),
        dtype=torch.bfloat16,
        attn_implementation=attention,
    ).train()
    ids, mask = pad(make_sentences([3, 6, 5]))
    mask[2] = 0
    labels = torch.tensor(make_sentences([4, 4, 4], seed=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        assert loss.dtype == torch.float32
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bfloat16_autocast(attention: str) -> None:
    model = make_model(attention, scale=0.2)
    ids, mask = pad(make_sentences([3, 6]))
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(make_sentences([4, 4], seed=1))}
    expected = model(**inputs).loss.detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(**inputs)
    assert outputs.logits.dtype == torch.bfloat16
    outputs.loss.backward()
    torch.testing.assert_close(outputs.loss.detach(), expected, atol=0.05, rtol=0.02)
    for parameter in model.parameters():
        assert cast(torch.Tensor, parameter.grad).dtype == torch.float32
        assert cast(torch.Tensor, parameter.grad).isfinite().all()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        generated = cast(Any, model).generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, num_beams=2)
    assert generated.shape[0] == 2


Compile = Callable[[Model], Any]


@pytest.fixture
def compile_once() -> Iterator[Compile]:
    """Compiles a model to a graph without breaks; when the test ends, there must have been one graph."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    yield lambda model: torch.compile(model, fullgraph=True, backend=backend)
    torch._dynamo.reset()
    assert len(graphs) == 1


def test_model_is_one_graph(compile_once: Compile) -> None:
    model = make_model(decoder_layers=1)
    ids, mask = pad(make_sentences([3, 6]))
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(make_sentences([4, 4], seed=1))}
    with torch.no_grad():
        outputs, expected = compile_once(model)(**inputs), model(**inputs)
    torch.testing.assert_close(outputs.logits, expected.logits)
    torch.testing.assert_close(outputs.loss, expected.loss)


@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "decoder alone"])
def test_decoding_step_is_compiled_once(kind: str, compile_once: Compile) -> None:
    source, target = torch.tensor(make_sentences([5])), torch.tensor(make_sentences([8], seed=1))
    model: Any
    if kind == "decoder alone":
        model, name, inputs = make_single_stack("VanillaTransformerForCausalLM"), "input_ids", dict[str, Any]()
        cache: Any = StaticCache(model.config, max_cache_len=MAX_LENGTH)
    else:
        model, name = make_model(decoder_layers=1, position_embedding_type=kind), "decoder_input_ids"
        inputs = {"encoder_outputs": BaseModelOutput(run(model.get_encoder(), input_ids=source).last_hidden_state)}
        cache = make_cache(model, "static", source_length=5, max_cache_len=MAX_LENGTH)
    expected = run(model, **inputs, **{name: target}, use_cache=False).logits
    compiled = compile_once(model)
    run(model, **inputs, **{name: target[:, :2]}, past_key_values=cache)
    for position in range(2, 8):
        token = {name: target[:, position : position + 1]}
        step = run(compiled, **inputs, **token, past_key_values=cache, use_cache=True)
        assert_close(step.logits[:, 0], expected[:, position])


def test_a_tuple_of_the_encoder_is_taken_again() -> None:
    model, labels, ids = make_model(), torch.tensor([[7, 8, 2]]), INPUTS["input_ids"]
    encoded = model.get_encoder()(input_ids=ids, return_dict=False)
    assert isinstance(encoded, tuple)
    expected = model(input_ids=ids, labels=labels).logits
    torch.testing.assert_close(model(encoder_outputs=encoded, labels=labels).logits, expected)
    of_another_kind = BaseModelOutputWithPooling(last_hidden_state=encoded[0], pooler_output=encoded[0][:, 0])
    torch.testing.assert_close(model(encoder_outputs=of_another_kind, labels=labels).logits, expected)


@pytest.mark.parametrize("sharing", ALL_SHARING)
def test_hooks_on_the_input_embeddings_run(sharing: str) -> None:
    """The noise of `neftune_noise_alpha` is one; also after resizing, and of the same table in all layouts."""
    model = make_model(**ALL_SHARING[sharing])
    shapes: list[torch.Size] = []
    for _ in range(2):
        hook = model.get_input_embeddings().register_forward_hook(lambda _, __, output: shapes.append(output.shape))
        run(model, **INPUTS)
        hook.remove()
        assert shapes[0] == (*INPUTS["input_ids"].shape, model.config.d_model)
        shapes.clear()
        model.resize_token_embeddings(model.config.vocab_size + 2)


@pytest.mark.parametrize("sharing", ALL_SHARING)
def test_embeddings_instead_of_ids(sharing: str) -> None:
    model = make_model(**ALL_SHARING[sharing])
    embeddings = {
        "inputs_embeds": model.get_input_embeddings()(INPUTS["input_ids"]),
        "decoder_inputs_embeds": model.get_decoder().get_input_embeddings()(INPUTS["decoder_input_ids"]),
    }
    torch.testing.assert_close(logits_of(model, **embeddings), logits_of(model, **INPUTS), atol=0.0, rtol=0.0)
    labels = torch.tensor([[7, 8, 2]])
    loss = model(**embeddings, labels=labels).loss
    torch.testing.assert_close(loss, model(**INPUTS, labels=labels).loss)


def test_cache_is_returned_unless_there_are_labels() -> None:
    model = make_model()
    assert isinstance(model(**INPUTS).past_key_values, EncoderDecoderCache)
    assert model(**INPUTS, use_cache=False).past_key_values is None
    labels = torch.tensor([[7, 8, 2]])
    assert model(input_ids=INPUTS["input_ids"], labels=labels, use_cache=True).past_key_values is None
    model.config.use_cache = False
    assert model(**INPUTS).past_key_values is None


def test_padding_without_mask_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """Once, and neither when there is a mask nor when the padding is the target's."""
    model = make_model()
    caplog.clear()
    cast(Any, logging.Logger).warning_once.cache_clear()
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        padded = torch.tensor([[4, 5, 1]])
        model(input_ids=padded, attention_mask=torch.tensor([[1, 1, 0]]), decoder_input_ids=torch.tensor([[0, 1]]))
        model(input_ids=torch.tensor([[4, 5, 2]]), decoder_input_ids=torch.tensor([[0, 1]]))
        assert caplog.messages == []
        model(input_ids=padded, decoder_input_ids=torch.tensor([[0]]))
        model(input_ids=padded, decoder_input_ids=torch.tensor([[0]]))
    finally:
        library.removeHandler(caplog.handler)
    [message] = set(caplog.messages)
    assert "attention_mask" in message


def test_wrong_inputs_are_refused() -> None:
    model = make_model()
    ids, target = INPUTS["input_ids"], INPUTS["decoder_input_ids"]
    embeddings = torch.zeros(1, 4, 16)
    cache = DynamicCache(config=model.config)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({**INPUTS, "inputs_embeds": embeddings}, "exactly one of input_ids and inputs_embeds"),
        ({"decoder_input_ids": target}, "exactly one of input_ids and inputs_embeds"),
        ({**INPUTS, "decoder_inputs_embeds": embeddings}, "exactly one of decoder_input_ids and decoder_inputs_embeds"),
        ({"input_ids": ids}, "exactly one of decoder_input_ids and decoder_inputs_embeds"),
        ({**INPUTS, "past_key_values": cache}, "must be an EncoderDecoderCache, not DynamicCache"),
    ]
    for inputs, message in wrong:
        with pytest.raises(ValueError, match=message):
            model(**inputs)
    for side, name in (("", "input_ids"), ("decoder_", "decoder_input_ids")):
        length = INPUTS[name].shape[1]
        mask = torch.ones(1, length - 1)
        with pytest.raises(ValueError, match=f"mask has {length - 1} positions; it must have {length}: 0 of the cache"):
            model(**INPUTS, **{f"{side}attention_mask": mask})
    with pytest.raises(ValueError, match="encoder_hidden_states must be given"):
        model.get_decoder()(input_ids=target)


def test_labels_become_decoder_inputs() -> None:
    model = make_model(pad_token_id=2, eos_token_id=1, decoder_start_token_id=3, bos_token_id=None)
    labels = torch.tensor([[7, 8, 1], [9, 1, -100], [1, -100, -100]])
    expected = torch.tensor([[3, 7, 8], [3, 9, 1], [3, 1, 2]])
    assert model.prepare_decoder_input_ids_from_labels(labels).equal(expected)
    assert labels[1, 2] == -100
    for name in ("decoder_start_token_id", "pad_token_id"):
        missing: dict[str, Any] = {name: None}
        incomplete = make_model(**missing)
        with pytest.raises(ValueError, match="pad_token_id and decoder_start_token_id, but these are"):
            incomplete.prepare_decoder_input_ids_from_labels(labels)


def test_vmap_needs_no_mask() -> None:
    model = make_model("eager")
    sources, targets = torch.tensor([[4, 5, 2], [6, 7, 2]]), torch.tensor([[0, 5], [0, 6]])

    def one(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return model(input_ids=source[None], decoder_input_ids=target[None], use_cache=False).logits[0]

    with torch.no_grad():
        assert_close(torch.vmap(one)(sources, targets), logits_of(model, input_ids=sources, decoder_input_ids=targets))
