"""The Annotated Transformer: the oracle is its equations written naively, under its names of weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_annotated import NaiveAnnotated, Norm
from tiny_vanilla import assert_close, logits_of, make_sentences, pad
from torch import nn

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.conversion.systems.annotated import AnnotatedSettings, adapt_gain, convert_annotated

PAD = 2


@torch.no_grad()
def make_original(seed: int = 0, **sizes: Any) -> NaiveAnnotated:
    """Xavier matrices as in the original, and noise where it begins with zeros and ones."""
    model = NaiveAnnotated(**{"vocabularies": (23, 19), **sizes})
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter, generator=generator)
        else:
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + float(name.endswith("a_2")))
    return model.eval()


@torch.no_grad()
def assert_same(original: NaiveAnnotated, model: Any, tolerance: float = 1e-5) -> None:
    source, source_mask = pad(make_sentences([6, 1, 4], model.config.vocab_size), junk=PAD)
    target, target_mask = pad(make_sentences([3, 5, 1], model.config.target_vocab_size), junk=PAD)
    length = target.shape[1]
    causal = torch.ones(1, length, length, dtype=torch.bool).tril() & target_mask.bool()[:, None]
    states = original(source, target, source_mask.bool()[:, None], causal)
    actual = logits_of(model, input_ids=source, attention_mask=source_mask, decoder_input_ids=target, use_cache=False)
    assert_close(actual[target_mask.bool()], original.generator.proj(states)[target_mask.bool()], tolerance)


@settings(max_examples=12, deadline=None)
@given(
    layers=st.integers(1, 3),
    width=st.sampled_from([8, 16, 32]),
    inner=st.integers(4, 40),
    heads=st.sampled_from([1, 2, 4]),
    sharing=st.sampled_from(["none", "embeddings", "all"]),
    seed=st.integers(0, 1000),
)
def test_logits_are_the_original_s(sharing: str, **sizes: Any) -> None:
    original = make_original(vocabularies=(23, 23 if sharing != "none" else 19), **sizes)
    if sharing != "none":
        original.tgt_embed[0] = original.src_embed[0]
    if sharing == "all":
        original.generator.proj.weight = next(original.src_embed[0].parameters())
    model = convert_annotated(original.state_dict(), AnnotatedSettings(heads=sizes["heads"])).model
    assert_same(original, model)
    config = model.config
    assert config.share_encoder_decoder_embeddings == (sharing != "none")
    assert config.tie_word_embeddings == (sharing == "all")


@pytest.mark.parametrize(("deviation", "most"), [(10.0, 6e-7), (1.0, 6e-7), (0.5, 6e-7), (0.3, 2.5e-6), (0.1, 5e-5)])
def test_norms_differ_by_no_more_than_is_said(deviation: float, most: float) -> None:
    """With the gain changed and the same number for eps; in float64, which hides no difference in rounding."""
    norm = Norm(512).double()
    x = deviation * torch.randn(50, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = norm(x)
    gain = adapt_gain(norm.a_2)
    difference = (nn.functional.layer_norm(x, (512,), gain, norm.b_2, eps=1e-6) - expected).abs().max()
    assert difference < most * expected.abs().max()
    assert (nn.functional.layer_norm(x, (512,), norm.a_2, norm.b_2, eps=1e-6) - expected).abs().max() > 10 * difference


def test_logits_of_the_paper_s_width_are_the_original_s() -> None:
    original = make_original(layers=6, width=512, inner=512, heads=8)
    assert_same(original, convert_annotated(original.state_dict()).model, tolerance=3e-6)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
def test_a_checkpoint_is_converted_with_no_settings(tmp_path: Path, prefix: str) -> None:
    original = make_original(heads=8)
    weights = {prefix + name: tensor for name, tensor in original.state_dict().items()}
    torch.save({"epoch": 7, "model_state_dict": weights}, tmp_path / "final.pt")
    converted = convert_annotated(tmp_path / "final.pt")
    assert converted.check() is None
    assert converted.tokenizer is None
    assert "heads=8" in converted.notes[2]
    config = converted.model.config
    assert (config.vocab_size, config.target_vocab_size, config.max_position_embeddings) == (23, 19, 50)
    special = (config.bos_token_id, config.eos_token_id, config.pad_token_id, config.decoder_start_token_id)
    assert special == (0, 1, 2, 0)
    assert config.dropout == config.attention_dropout == config.activation_dropout == 0.1
    saved = converted.save(tmp_path / "ours")
    assert_same(original, VanillaTransformerForConditionalGeneration.from_pretrained(saved).eval())


def test_settings_say_what_weights_do_not() -> None:
    original = make_original(heads=2)
    told = AnnotatedSettings(heads=2, dropout=0.3, bos_token_id=3, pad_token_id=2, eos_token_id=4)
    model = convert_annotated(original.state_dict(), told).model
    assert_same(original, model)
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.dropout) == (3, 4, 0.3)
    with pytest.raises(ConversionError, match="encoder_attention_heads=3 must divide d_model=16"):
        convert_annotated(original.state_dict(), AnnotatedSettings(heads=3))


def test_what_does_not_fit_is_named() -> None:
    good = make_original().state_dict()
    with pytest.raises(ConversionError, match=r"0 names end in encoder.layers.0.self_attn.linears.0.weight"):
        convert_annotated({"weight": torch.zeros(3)})
    missing = {name: tensor for name, tensor in good.items() if not re.match(r"tgt_embed|generator", name)}
    with pytest.raises(
        ConversionError, match=r"tgt_embed.0.lut.weight is missing\n  - generator.proj.weight is missing"
    ):
        convert_annotated(missing)
    changed = {**good, "encoder.layers.0.gate": torch.zeros(2), "src_embed.1.pe": good["src_embed.1.pe"].roll(1, 1)}
    del changed["decoder.layers.1.sublayer.2.norm.a_2"]
    strange, lacking = r"encoder.layers.0.gate \(2,\)", r"model.decoder.layers.1.final_layer_norm.weight \(16,\)"
    table = "src_embed.1.pe is not the table of 'sinusoidal' positions: position 0 differs by"
    with pytest.raises(ConversionError, match=f"(?s){strange}.*{lacking}.*{table}"):
        convert_annotated(changed)
