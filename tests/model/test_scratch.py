from __future__ import annotations

from typing import Any

import pytest
import torch
from test_search import BOS, EOS, make_batch, search
from tiny_vanilla import ALL_SHARING, INPUTS, assert_close, logits_of, make_config, make_model
from transformers import LogitsProcessor, StoppingCriteria
from transformers.initialization import no_init_weights

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.decoding_vanilla_transformer import SharedHistoryLayer
from vanilla_transformer.model.linear_vanilla_transformer import linear

# --- test_search.py


class _StopsAll(StoppingCriteria):
    """As people write them: one bool for all rows."""

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> bool:  # type: ignore[override]
        return input_ids.shape[1] >= 5


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_criterion_may_answer_with_one_bool(num_beams: int) -> None:
    batch = {**make_batch([3, 5]), "num_beams": num_beams, "suppress_tokens": [EOS]}
    tokens = search(make_model(), **batch, stopping_criteria=[_StopsAll()])
    assert tokens.equal(search(make_model(), **batch, max_new_tokens=4))


class _NothingAfterThree(LogitsProcessor):
    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores if input_ids.shape[1] < 4 else torch.full_like(scores, -torch.inf)  # type: ignore[return-value]


def test_beams_that_a_constraint_leaves_no_token_are_returned_as_they_are() -> None:
    batch = {**make_batch([3, 5]), "num_beams": 3, "num_return_sequences": 3, "suppress_tokens": [EOS]}
    tokens = search(make_model(), **batch, logits_processor=[_NothingAfterThree()])
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
        make_model().generate(INPUTS["input_ids"], decoder_inputs_embeds=torch.zeros(1, 2, 16))


# --- test_decoding.py


def test_a_shared_history_shows_what_it_holds_and_no_more() -> None:
    layer = SharedHistoryLayer()
    for length in range(1, 6):
        keys = torch.full((2, 4, 1, 8), float(length))
        layer.update(keys, -keys)
        assert layer.keys.shape == layer.values.shape == (2, 4, layer.get_seq_length(), 8)
        assert layer.keys[0, 0, :, 0].tolist() == list(range(1, length + 1))
        assert layer.values.equal(-layer.keys)
    layer.keep_sentences(torch.tensor([1]))
    assert layer.keys.shape == (1, 4, 5, 8)


# --- test_modeling.py


def test_vmap_needs_no_mask() -> None:
    model = make_model("eager")
    sources, targets = torch.tensor([[4, 5, 2], [6, 7, 2]]), torch.tensor([[0, 5], [0, 6]])

    def one(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return model(input_ids=source[None], decoder_input_ids=target[None], use_cache=False).logits[0]

    with torch.no_grad():
        assert_close(torch.vmap(one)(sources, targets), logits_of(model, input_ids=sources, decoder_input_ids=targets))


# --- test_positions / weights


@pytest.mark.parametrize("way", ["no_init_weights", "meta"])
@pytest.mark.parametrize("kind", ["sinusoidal", "sinusoidal_concatenated", "sinusoidal_tensor2tensor"])
def test_sinusoids_are_there_without_initialisation(kind: str, way: str) -> None:
    """No file has them, so that neither a skipped initialisation nor `to_empty` may leave them unset."""
    trained = make_model(position_embedding_type=kind)
    if way == "meta":
        with torch.device("meta"):
            model = VanillaTransformerForConditionalGeneration(make_config(position_embedding_type=kind))
        model.to_empty(device="cpu")
        for name, buffer in model.named_buffers():
            assert buffer.isfinite().all(), name
    else:
        with no_init_weights():
            model = VanillaTransformerForConditionalGeneration(make_config(position_embedding_type=kind))
    model.load_state_dict(trained.state_dict())
    assert logits_of(model.eval(), **INPUTS).equal(logits_of(trained, **INPUTS))


@pytest.mark.parametrize("sharing", ALL_SHARING)
def test_only_tied_weights_are_listed_as_tied(sharing: str) -> None:
    model = make_model(**ALL_SHARING[sharing])
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert model._tied_weights_keys is not None
    for target, source in model._tied_weights_keys.items():
        assert parameters[target] is parameters[source]
    assert ("lm_head.weight" in model._tied_weights_keys) == model.config.tie_word_embeddings


# --- test_linear.py


@pytest.mark.parametrize("bias", [torch.randn(128)[::2], torch.randn(1).expand(64), torch.randn(64, 2)[:, 1]])
def test_a_bias_may_have_gaps(bias: torch.Tensor) -> None:
    """oneDNN itself reads the values that follow the first one in memory."""
    inputs, weight = torch.randn(512, 64), torch.randn(64, 64)
    torch.testing.assert_close(linear(inputs, weight, bias), inputs @ weight.t() + bias, atol=1e-4, rtol=1e-4)


# --- test_loss.py


def test_second_derivatives_are_refused_and_right_with_logits() -> None:
    model = make_model("eager", activation_function="gelu").double().train()
    batch = {"input_ids": INPUTS["input_ids"], "labels": torch.tensor([[5, 6, 2]])}
    weight = model.model.decoder.layers[0].fc1.weight

    def gradient(**settings: Any) -> torch.Tensor:
        return torch.autograd.grad(model(**batch, **settings).loss, weight, create_graph=True)[0]

    with pytest.raises(RuntimeError, match="skip_logits=False to differentiate its loss twice"):
        gradient()
    (second,) = torch.autograd.grad(gradient(skip_logits=False).square().sum(), weight)
    direction, step = torch.randn_like(weight), 1e-5
    sides = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(direction, alpha=sign * step)
        sides.append(gradient(skip_logits=False).detach().square().sum())
        with torch.no_grad():
            weight.add_(direction, alpha=-sign * step)
    torch.testing.assert_close((second * direction).sum(), (sides[0] - sides[1]) / (2 * step), atol=1e-6, rtol=1e-4)
