"""The model against the paper's equations written naively; tests/conversion has torch.nn.Transformer and Marian."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from naive_transformer import NaiveTransformer, position_encoding
from tiny_vanilla import SHARING, pad, randomize
from torch import nn
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.positions_vanilla_transformer import SINUSOIDS

EMBEDDINGS: dict[str, dict[str, Any]] = {
    **{name: SHARING[name] for name in ("shared-tied", "shared-untied")},
    "separate-tied": {**SHARING["separate-tied"], "decoder_vocab_size": 13},
    "separate-untied": {**SHARING["separate-untied"], "decoder_vocab_size": 9},
}
# What each case is put together from.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "normalize_before": (False, True),
    "add_final_layer_norm": (None, True, False),
    "position_embedding_type": ("sinusoidal", "sinusoidal_concatenated", "sinusoidal_tensor2tensor", "learned"),
    "position_offset": (0, 1, 2),
    "max_position_embeddings": (40, 3),
    "d_model": (8, 12),
    "widths": ((None, None), (3, 5), (6, 2)),
    "heads": ((2, 2), (2, 4), (4, 1)),
    "layers": ((2, 2), (1, 3)),
    "embeddings": tuple(EMBEDDINGS),
    **dict.fromkeys(("attention_bias", "lm_head_bias", "normalize_embedding"), (False, True)),
    **dict.fromkeys(("ffn_bias", "scale_embedding"), (True, False)),
    "activation_function": ("relu", "gelu", "silu"),
    "layer_norm_eps": (1e-5, 1e-2),
    "attention": ("eager", "sdpa"),
    "padding": ("none", "right", "left"),
    "dtype": (torch.float32, torch.float64),
}
# Those that are fields of the configuration, which has names of its own for the others.
SAME_NAMES = OPTIONS.keys() - {"max_position_embeddings", "widths", "heads", "layers", "embeddings"}
SAME_NAMES -= {"attention", "padding", "dtype"}
# The case that takes the first value of every option: the paper's model.
FIRST = {name: values[0] for name, values in OPTIONS.items()}


def make_config(row: Mapping[str, Any]) -> VanillaTransformerConfig:
    learned = row["position_embedding_type"] == "learned"
    longest = 7 + row["position_offset"]
    sizes: dict[str, Any] = {"vocab_size": 11, "encoder_ffn_dim": 10, "decoder_ffn_dim": 7}
    # A learned table just holds the longest sentence; the sinusoids have to go on past a table of three rows.
    sizes["max_position_embeddings"] = longest if learned else row["max_position_embeddings"]
    for names, values in (
        (("d_k", "d_v"), row["widths"]),
        (("encoder_attention_heads", "decoder_attention_heads"), row["heads"]),
        (("encoder_layers", "decoder_layers"), row["layers"]),
    ):
        sizes |= dict(zip(names, values, strict=True))
    sizes |= EMBEDDINGS[row["embeddings"]]
    return VanillaTransformerConfig(**sizes, **{name: row[name] for name in SAME_NAMES})


def make_model(
    config: VanillaTransformerConfig, attention: str = "eager", dtype: torch.dtype = torch.float32, seed: int = 0
) -> VanillaTransformerForConditionalGeneration:
    """Build a model whose every parameter is random: initial zeros and ones would hide a bias or a norm left out."""
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=dtype, attn_implementation=attention)
    assert isinstance(model, VanillaTransformerForConditionalGeneration)
    randomize(model, seed)
    return model.eval()


@dataclass
class Batch:
    """Sentences without padding, and the same sentences as the model takes them."""

    sources: list[list[int]]
    targets: list[list[int]]
    inputs: dict[str, torch.Tensor]


def make_batch(config: VanillaTransformerConfig, padding: str, seed: int = 0, batch_size: int = 3) -> Batch:
    """Draw sentences of one to seven tokens; of equal lengths and without masks if `padding` is "none"."""
    chooser = random.Random(seed)
    target_vocab_size = config.decoder_vocab_size or config.vocab_size
    lengths = [(7, 6), (1, 4), (4, 1), (3, 5)][:batch_size] if padding != "none" else [(5, 6)] * batch_size
    first = 2 if padding == "none" else 0  # without a mask the pad token would be taken for a mistake
    sources = [[chooser.randrange(first, config.vocab_size) for _ in range(length)] for length, _ in lengths]
    targets = [[chooser.randrange(first, target_vocab_size) for _ in range(length)] for _, length in lengths]
    if padding == "none":
        inputs = {"input_ids": torch.tensor(sources), "decoder_input_ids": torch.tensor(targets)}
    else:
        input_ids, attention_mask = pad(sources, padding, chooser.randrange(config.vocab_size))
        decoder_input_ids, decoder_attention_mask = pad(targets, padding, chooser.randrange(target_vocab_size))
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        inputs |= {"decoder_input_ids": decoder_input_ids, "decoder_attention_mask": decoder_attention_mask}
    return Batch(sources, targets, inputs)


def real_rows(output: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
    if mask is None:
        return list(output)
    return [row[keep.bool()] for row, keep in zip(output, mask, strict=True)]


def assert_equal_to_scale(actual: torch.Tensor, expected: Any, atol: float = 1e-5) -> None:
    """Compare in float64, `atol` being relative to the largest expected value."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual.detach().to(torch.float64), expected, rtol=0.0, atol=atol * scale)


def assert_equals_naive(
    model: VanillaTransformerForConditionalGeneration, batch: Batch, atol: float | None = None
) -> None:
    """Compare encoder outputs and logits at every real position with the naive evaluation of each sentence alone."""
    if atol is None:
        atol = 1e-5 if model.dtype == torch.float32 else 1e-10
    naive = NaiveTransformer(config=model.config, state=model.state_dict())
    with torch.no_grad():
        output = model(**batch.inputs)
    encoded = real_rows(output.encoder_last_hidden_state, batch.inputs.get("attention_mask"))
    logits = real_rows(output.logits, batch.inputs.get("decoder_attention_mask"))
    for index, (source, target) in enumerate(zip(batch.sources, batch.targets, strict=True)):
        memory = naive.encode(source)
        assert_equal_to_scale(encoded[index], memory, atol)
        assert_equal_to_scale(logits[index], naive.project(naive.decode(target, memory)), atol)


@example(row=FIRST, seed=0, batch_size=3)
@given(
    row=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()}),
    seed=st.integers(min_value=0, max_value=2**32 - 1),
    batch_size=st.integers(min_value=1, max_value=4),
)
def test_logits_equal_the_paper_s_equations(row: dict[str, Any], seed: int, batch_size: int) -> None:
    config = make_config(row)
    model = make_model(config=config, attention=row["attention"], dtype=row["dtype"], seed=seed)
    assert_equals_naive(model, make_batch(config=config, padding=row["padding"], seed=seed, batch_size=batch_size))


def test_attention_weights_equal_the_paper_s_equations() -> None:
    config = make_config(FIRST)
    model = make_model(config=config)
    batch = make_batch(config=config, padding="left")
    naive = NaiveTransformer(config=config, state=model.state_dict())
    with torch.no_grad():
        attentions = model(**batch.inputs, output_attentions=True).cross_attentions
    for index, (source, target) in enumerate(zip(batch.sources, batch.targets, strict=True)):
        naive.logits(source, target)
        seen = batch.inputs["attention_mask"][index].bool()
        asked = batch.inputs["decoder_attention_mask"][index].bool()
        for (layer, head), weights in naive.cross_attention.items():
            of_head = attentions[layer][index, head][asked]
            assert_equal_to_scale(of_head[:, seen], weights)
            assert not of_head[:, ~seen].any()


def test_labels_alone_shift_into_decoder_inputs() -> None:
    """Logits for labels equal the naive ones for start token + labels without the last; ignored labels are padding."""
    config = make_config(FIRST)
    model = make_model(config=config)
    labels = [[4, 5, 6, 2], [7, 8, 2, -100]]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[4, 5, 2], [6, 7, 2]]), labels=torch.tensor(labels)).logits
    naive = NaiveTransformer(config=config, state=model.state_dict())
    start = 0  # the default start token
    assert_equal_to_scale(logits[0], naive.logits([4, 5, 2], [start, 4, 5, 6]))
    assert_equal_to_scale(logits[1, :3], naive.logits([6, 7, 2], [start, 7, 8]))


def make_positions(kind: str, d_model: int, **fields: Any) -> nn.Module:
    config = VanillaTransformerConfig.from_preset(
        "tiny", d_model=d_model, position_embedding_type=kind, encoder_layers=1, decoder_layers=1, **fields
    )
    positions = VanillaTransformerForConditionalGeneration(config).get_encoder().embed_positions
    assert isinstance(positions, nn.Module)
    return positions


@pytest.mark.parametrize("rows", [100, 6000])
@pytest.mark.parametrize("d_model", [4, 64, 512])
@pytest.mark.parametrize("kind", SINUSOIDS)
def test_sinusoids_equal_the_math_module(kind: str, d_model: int, rows: int) -> None:
    indices = [0, 1, 2, 17, 99, 100, 255, 256, 1023, 1024, 4095, 4999, 5000]
    positions = make_positions(kind=kind, d_model=d_model, max_position_embeddings=rows)
    actual = positions(torch.tensor([indices]), 5001)[0]
    assert actual.dtype == torch.float32
    expected = np.stack([position_encoding(kind, index, d_model) for index in indices])
    torch.testing.assert_close(actual.double(), torch.tensor(expected), rtol=0.0, atol=1e-6)


def split_pairs(kind: str, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split (..., d_model) into the sines and the cosines, (..., d_model / 2) each."""
    if kind == "sinusoidal":
        return table[..., 0::2], table[..., 1::2]
    sines, cosines = table.chunk(2, dim=-1)
    return sines, cosines


@given(
    kind=st.sampled_from(sorted(SINUSOIDS)),
    half=st.integers(min_value=2, max_value=64),
    position=st.integers(min_value=0, max_value=5000),
    k=st.integers(min_value=0, max_value=500),
)
def test_shift_is_linear(kind: str, half: int, position: int, k: int) -> None:
    """PE(pos + k) is one matrix times PE(pos) for all pos: a rotation of each pair by the angles that row k holds."""
    table = SINUSOIDS[kind](torch.tensor([position, position + k, k], dtype=torch.float64), 2 * half)
    here, there, shift = zip(*split_pairs(kind, table), strict=True)
    rotations = torch.stack(
        [torch.stack([shift[1], shift[0]], dim=-1), torch.stack([-shift[0], shift[1]], dim=-1)], dim=-2
    )
    moved = torch.einsum("fij,fj->fi", rotations, torch.stack(here, dim=-1))
    torch.testing.assert_close(moved, torch.stack(there, dim=-1), rtol=0.0, atol=1e-11)
