"""Generation with parts that somebody has replaced: it must use them, where its own fast step would pass them by."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from test_search import EOS, make_batch, search
from tiny_vanilla import logits_of, make_model
from torch import nn
from transformers.generation.utils import GenerationMixin

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.decoding_vanilla_transformer import can_step_fast

Model = VanillaTransformerForConditionalGeneration


def become(module: Any, **methods: Callable[..., Any]) -> None:
    """Makes a module one of a subclass that has these methods."""
    module.__class__ = type("Replaced", (type(module),), methods)


def negated_logits(self: Any, *args: Any, **kwargs: Any) -> Any:
    outputs = Model.forward(self, *args, **kwargs)
    outputs.logits = -outputs.logits
    return outputs


def reversed_states(self: Any, *args: Any, **kwargs: Any) -> Any:
    """For a decoder, a layer or an attention: the features the other way round."""
    outputs = super(type(self), self).forward(*args, **kwargs)
    if isinstance(outputs, torch.Tensor):
        return outputs.flip(-1)
    if isinstance(outputs, tuple):
        return (outputs[0].flip(-1), *outputs[1:])
    outputs.last_hidden_state = outputs.last_hidden_state.flip(-1)
    return outputs


def replace_norms(model: Any, make: Callable[[int], nn.Module]) -> None:
    for layer in model.model.decoder.layers:
        layer.encoder_attn_layer_norm = make(model.config.d_model)


class LoudNorm(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(input).flip(-1)


def drop_everything(model: Any) -> None:
    """Dropout of a trained model left on, as for Monte Carlo estimates; all is dropped, so that nothing is random."""
    model.model.decoder.layers[1].activation_dropout.p = 1.0
    model.model.decoder.layers[1].activation_dropout.train()


class Negation(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return -inputs


def patch_class(model: Any) -> None:
    """What libraries do that bring kernels of their own."""
    kind = type(model.model.decoder.layers[0])
    patched: Any = type(kind.__name__, (kind,), {})
    for layer in model.model.decoder.layers:
        layer.__class__ = patched
    patched.forward = reversed_states


def first_layer(model: Any) -> Any:
    return model.model.decoder.layers[0]


REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "the model's forward": lambda model: become(model, forward=negated_logits),
    "the decoder's": lambda model: become(model.model.decoder, forward=reversed_states),
    "a layer's": lambda model: become(first_layer(model), forward=reversed_states),
    "a layer's feed_forward": lambda model: become(
        first_layer(model), feed_forward=lambda self, states: states.flip(-1)
    ),
    "self-attention's": lambda model: become(first_layer(model).self_attn, forward=reversed_states),
    "cross-attention's": lambda model: become(first_layer(model).encoder_attn, forward=reversed_states),
    "a class's": patch_class,
    "a subclass of LayerNorm": lambda model: replace_norms(model, LoudNorm),
    "RMSNorm": lambda model: replace_norms(model, nn.RMSNorm),
    "no norm": lambda model: replace_norms(model, lambda _: nn.Identity()),
    "dropout": drop_everything,
    "another dropout": lambda model: setattr(first_layer(model), "dropout", Negation().eval()),
    "another inner dropout": lambda model: setattr(first_layer(model), "activation_dropout", Negation().eval()),
    "fewer layers": lambda model: setattr(model.model.decoder, "layers", model.model.decoder.layers[:1]),
}


@pytest.fixture
def model() -> Model:
    """One whose translations are lively enough that any change tells."""
    return make_model(
        seed=10, tie_word_embeddings=False, normalize_before=True, encoder_attention_heads=2, encoder_layers=2
    )


def search_as_library(model: Any, target: Any = None, **arguments: Any) -> torch.Tensor:
    """The library's own beam search, which repeats the source, over the model as it stands."""
    kind, names = type(model), ("_beam_search", "_sample", "_expand_inputs_for_generation")
    model.__class__ = type("Plain", (kind,), {name: inspect.getattr_static(GenerationMixin, name) for name in names})
    tokens: torch.Tensor = search(model if target is None else target, **arguments)
    model.__class__ = kind
    return tokens


def assert_greedy(model: Any, tokens: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
    """Each token is the one that the model's own forward finds likeliest after those before it."""
    best = logits_of(model, **batch, decoder_input_ids=tokens[:, :-1]).argmax(dim=-1)
    is_over = (tokens[:, :-1] == EOS).cumsum(dim=1) > 0
    assert best.masked_fill(is_over, 0).equal(tokens[:, 1:].masked_fill(is_over, 0))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("replaced", REPLACEMENTS)
def test_what_replaces_a_part_generates(model: Model, replaced: str, cache: str) -> None:
    batch = make_batch([3, 5, 2])
    before = search(model, **batch)
    REPLACEMENTS[replaced](model)
    settings = {"cache_implementation": cache, "min_new_tokens": 8}
    tokens = search(model, **batch, cache_implementation=cache)
    assert_greedy(model, tokens, batch)
    assert not tokens.equal(before), "the replacement must tell"
    beams = search(model, **batch, num_beams=3, num_return_sequences=2, **settings)
    assert beams.equal(search_as_library(model, **batch, num_beams=3, num_return_sequences=2, **settings))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("way", ["subclass", "assignment"])
def test_hooks_of_generation_are_called_at_each_step(attention: str, num_beams: int, way: str) -> None:
    model = make_model(attention)
    calls: list[str] = []
    for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"):
        original = getattr(model, name)

        def called(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        if way == "assignment":
            setattr(model, name, called)
        else:
            become(model, **{name: lambda self, *args, called=called, **kwargs: called(*args, **kwargs)})
    search(model, **make_batch([3, 2]), num_beams=num_beams, min_new_tokens=6, max_new_tokens=6)
    assert calls.count("prepare_inputs_for_generation") == calls.count("_update_model_kwargs_for_generation") == 6


def test_a_subclass_reorders_its_cache_itself(model: Model) -> None:
    rows: list[int] = []

    def reorder(self: Any, cache: Any, beam_idx: torch.Tensor) -> Any:
        rows.append(len(beam_idx))
        cache.reorder_cache(beam_idx)
        return cache

    batch = {**make_batch([3, 5]), "num_beams": 3, "max_new_tokens": 5, "min_new_tokens": 5}
    expected = search(model, **batch)
    become(model, _reorder_cache=reorder)
    assert search(model, **batch).equal(expected)
    assert set(rows) == {6}


@pytest.mark.parametrize("num_beams", [1, 3])
def test_prefix_tuning_counts(model: Model, num_beams: int) -> None:
    config = peft.PrefixTuningConfig(task_type=peft.TaskType.SEQ_2_SEQ_LM, num_virtual_tokens=4)
    batch = make_batch([3, 5, 2])
    before = search(model, **batch, num_beams=num_beams)
    tuned: Any = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for parameter in tuned.prompt_encoder.parameters():
            parameter.copy_(2 * torch.randn_like(parameter))
    tokens = search(tuned, **batch, num_beams=num_beams)
    assert not tokens.equal(before)
    if num_beams == 1:
        assert_greedy(tuned, tokens, batch)
    assert tokens.equal(search_as_library(model, tuned, **batch, num_beams=num_beams))


def test_the_librarys_own_hooks_do_not_count(model: Model) -> None:
    """After one call that records hidden states, the fast step is taken again."""
    logits_of(
        model, **make_batch([3]), decoder_input_ids=torch.zeros(1, 1, dtype=torch.long), output_hidden_states=True
    )
    assert can_step_fast(model)
