"""torch.nn.Transformer into this package's form: the oracle is torch's own module, in code of users around it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vanilla import randomize
from torch import nn
from torch_tutorial import PAD, assert_same, make_tutorial

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.conversion.systems.torch_nn import TorchSettings, convert_torch_nn

EIGHT_HEADS = TorchSettings(nhead=8)


def test_the_tutorial_s_checkpoint_needs_the_number_of_heads_alone(tmp_path: Path) -> None:
    tutorial = make_tutorial()
    torch.save(tutorial.state_dict(), tmp_path / "model.pt")
    converted = convert_torch_nn(tmp_path / "model.pt", EIGHT_HEADS)
    assert converted.check() is not None  # within 1e-5
    assert converted.tokenizer is None
    assumed = "activation='relu', norm_first=False, layer_norm_eps=1e-05"
    assert f"Assumed, torch's defaults, since a state dict does not tell: {assumed}, dropout=0.1." == converted.notes[0]
    # The comparison has them from the settings on both sides.
    assert f"cannot find a mistake in what is not in the weights: nhead=8, {assumed}, scale_" in converted.notes[1]
    config = converted.model.config
    assert (config.vocab_size, config.target_vocab_size, config.max_position_embeddings) == (23, 19, 60)
    assert (config.normalize_before, config.has_final_layer_norm) == (False, True)
    special = (config.bos_token_id, config.pad_token_id, config.eos_token_id, config.decoder_start_token_id)
    assert special == (2, 1, 3, 2)
    assert_same(tutorial, converted.model)
    saved = converted.save(tmp_path / "ours")
    assert_same(tutorial, VanillaTransformerForConditionalGeneration.from_pretrained(saved).eval())


# What torch does with padding where it can, and says that it may change.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@settings(max_examples=10)
@given(
    norm_first=st.booleans(),
    bias=st.booleans(),
    batch_first=st.booleans(),
    activation=st.sampled_from(["relu", "gelu", F.silu, nn.ReLU()]),
    layer_norm_eps=st.sampled_from([1e-5, 1e-2]),
    nhead=st.sampled_from([1, 2, 4]),
    layers=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    last_norms=st.booleans(),
    sharing=st.sampled_from(["none", "embeddings", "output", "all"]),
    seed=st.integers(0, 1000),
)
def test_a_module_computes_the_same(layers: Any, last_norms: bool, sharing: str, seed: int, **transformer: Any) -> None:
    both = {"num_encoder_layers": layers[0], "num_decoder_layers": layers[1]}
    original = make_tutorial(seed, vocabularies=(23, 23), **both, **transformer)
    if not last_norms:
        original.transformer.encoder.norm = original.transformer.decoder.norm = None
    if sharing in ("embeddings", "all"):
        original.src_tok_emb = original.tgt_tok_emb
    if sharing in ("output", "all"):
        original.generator.weight = original.tgt_tok_emb.embedding.weight
    converted = convert_torch_nn(original, forward=original)
    converted.check()
    assert_same(original, converted.model)
    config = converted.model.config
    assert config.dropout == config.attention_dropout == config.activation_dropout == 0.2
    assert config.share_encoder_decoder_embeddings == (sharing in ("embeddings", "all"))
    assert config.tie_word_embeddings == (sharing in ("output", "all"))
    # Without the user's forward pass the stacks are compared all the same.
    convert_torch_nn(original).check()


def test_a_model_may_know_no_padding() -> None:
    settings = TorchSettings(nhead=8, pad_token_id=None)
    converted = convert_torch_nn(make_tutorial().state_dict(), settings)
    assert converted.check() is not None
    assert converted.model.config.pad_token_id is None


def test_settings_stand_in_for_the_module() -> None:
    original = make_tutorial(nhead=2, activation="gelu", norm_first=True, layer_norm_eps=1e-2, bias=False)
    told = TorchSettings(nhead=2, activation="gelu", norm_first=True, layer_norm_eps=1e-2, dropout=0.2)
    converted = convert_torch_nn(original.state_dict(), told, forward=original)
    converted.check()
    assert converted.model.config.to_dict() == convert_torch_nn(original).model.config.to_dict()
    wrong = convert_torch_nn(original.state_dict(), TorchSettings(nhead=4), forward=original)
    with pytest.raises(ConversionError, match=r"computes something else than the torch.nn.Transformer"):
        wrong.check()


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.net.", "module._orig_mod."])
def test_names_may_begin_with_anything(prefix: str) -> None:
    original = make_tutorial()
    weights = {prefix + name: tensor for name, tensor in original.state_dict().items()}
    weights["table"] = weights.pop(f"{prefix}src_tok_emb.embedding.weight")
    told = TorchSettings(nhead=8, source_embedding="table", target_embedding="tgt_tok_emb.embedding")
    assert_same(original, convert_torch_nn(weights, told).model)
    with pytest.raises(ConversionError, match="source_embedding is 'nowhere', which names no weight"):
        convert_torch_nn(weights, TorchSettings(nhead=8, source_embedding="nowhere"))


def test_a_module_may_be_compiled_parallel_put_together_or_in_half_precision() -> None:
    original = make_tutorial(nhead=4)
    compiled: Any = torch.compile(original)
    names = ("transformer", "src_tok_emb", "tgt_tok_emb", "generator")
    for wrapped in (compiled, nn.DataParallel(original), nn.ModuleDict({n: getattr(original, n) for n in names})):
        converted = convert_torch_nn(wrapped)
        converted.check()
        assert_same(original, converted.model)
    half = convert_torch_nn(original.bfloat16())
    assert half.model.dtype == torch.bfloat16
    half.check()  # in float32


def test_the_state_dict_is_found_among_other_entries(tmp_path: Path) -> None:
    original = make_tutorial()
    optimizer = torch.optim.Adam(original.parameters())
    content = {"epoch": 3, "net": original.state_dict(), "optimizer": optimizer.state_dict(), "loss": 1.5}
    torch.save(content, tmp_path / "checkpoint.tar")
    assert_same(original, convert_torch_nn(tmp_path / "checkpoint.tar", EIGHT_HEADS).model)
    torch.save({**content, "ema": original.state_dict()}, tmp_path / "checkpoint.tar")
    with pytest.raises(ConversionError, match=r"several state dicts, 'net', 'ema'"):
        convert_torch_nn(tmp_path / "checkpoint.tar")
    torch.save(original, tmp_path / "module.pt")
    with pytest.raises(ConversionError, match=r"holds more than weights: it needs .*Tutorial"):
        convert_torch_nn(tmp_path / "module.pt")


class OtherNames(nn.Module):
    """Learned positions, one table of embeddings, no scale, and names of another user."""

    def __init__(self, tables: int, offset: int) -> None:
        super().__init__()
        self.offset = offset
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 2, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 20, batch_first=True), 2)
        self.embed = nn.Embedding(23, 16)
        self.pos_src = nn.Embedding(30, 16)
        self.pos_tgt = nn.Embedding(30, 16) if tables == 2 else None
        self.fc_out = nn.Linear(16, 23, bias=False)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        source = self.embed(src) + self.pos_src(torch.arange(src.shape[1]) + self.offset)
        target = self.embed(tgt) + (self.pos_tgt or self.pos_src)(torch.arange(tgt.shape[1]) + self.offset)
        causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(diagonal=1)
        memory = self.encoder(source, src_key_padding_mask=src == PAD)
        return self.fc_out(self.decoder(target, memory, causal, memory_key_padding_mask=src == PAD))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("tables", [1, 2])
def test_learned_positions_other_names_and_unequal_heads(tables: int, offset: int) -> None:
    original = OtherNames(tables, offset)
    randomize(original)
    original.eval()
    names: dict[str, Any] = {"source_embedding": "embed", "output_layer": "fc_out", "source_positions": "pos_src"}
    names |= {"target_positions": "pos_tgt"} if tables == 2 else {}
    told = TorchSettings(position_embedding_type="learned", position_offset=offset, scale_embedding=False, **names)
    converted = convert_torch_nn(original, told, forward=original)
    converted.check()
    convert_torch_nn(original, told).check()
    assert_same(original, converted.model)
    config = converted.model.config
    assert (config.encoder_attention_heads, config.decoder_attention_heads) == (2, 4)
    assert config.share_encoder_decoder_embeddings
    assert not config.tie_word_embeddings
    assert not config.has_final_layer_norm
    with pytest.raises(ConversionError, match=r"pos_src \(30, 16\) is no table of sinusoids .*='learned'"):
        convert_torch_nn(original, TorchSettings(**names))
    with pytest.raises(ConversionError, match=r"no embeddings are called .*outside the stacks are embed.weight, pos"):
        convert_torch_nn(original)


@pytest.mark.parametrize("kind", ["sinusoidal_concatenated", "sinusoidal_tensor2tensor"])
def test_other_sinusoids_are_recognised_by_their_table(kind: str) -> None:
    original = make_tutorial()
    frequencies = 10000 ** -(torch.arange(8, dtype=torch.float64) / (8 if kind.endswith("concatenated") else 7))
    angles = (torch.arange(60) + 1)[:, None] * frequencies
    table = torch.cat([angles.sin(), angles.cos()], dim=1).float()
    original.positional_encoding.pos_embedding = table[:, None]
    converted = convert_torch_nn(original, TorchSettings(position_offset=1), forward=original)
    converted.check()
    assert converted.model.config.position_embedding_type == kind
    assert_same(original, converted.model)


@pytest.mark.parametrize("shape", [(60, 1, 16), (1, 60, 16), (60, 16)])
def test_tables_are_checked_row_by_row_in_any_shape(shape: tuple[int, ...]) -> None:
    weights = make_tutorial().state_dict()
    name = "positional_encoding.pos_embedding"
    weights[name] = weights[name].reshape(shape).clone()
    assert convert_torch_nn(weights, EIGHT_HEADS).model.config.max_position_embeddings == 60
    weights[name].view(60, 16)[41, 5] += 1e-3
    with pytest.raises(ConversionError, match=re.escape(f"{name} {shape} is no table of sinusoids")):
        convert_torch_nn(weights, EIGHT_HEADS)
    with pytest.raises(ConversionError, match=r"is not the table of 'sinusoidal' positions: position 41 differs by 1"):
        convert_torch_nn(weights, TorchSettings(nhead=8, position_embedding_type="sinusoidal"))


def test_without_a_table_the_paper_s_is_taken_and_told() -> None:
    weights = make_tutorial().state_dict()
    del weights["positional_encoding.pos_embedding"]
    converted = convert_torch_nn(weights, EIGHT_HEADS)
    assert converted.model.config.position_embedding_type == "sinusoidal"
    assert "position_embedding_type='sinusoidal'" in converted.notes[1]
    with pytest.raises(ConversionError, match="Learned positions were not found"):
        convert_torch_nn(weights, TorchSettings(nhead=8, position_embedding_type="learned"))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("transformer.decoder.layers.0.multihead_attn.in_proj_weight", None, "several encoders.*no decoder"),
        ("other.layers.0.self_attn.in_proj_weight", (3, 3), r"several encoders: 'transformer\.encoder\.', 'other\.'"),
        ("transformer.encoder.layers.0.linear1.weight", None, r"encoder\.layers\.0\.linear1\.weight is missing"),
        ("transformer.encoder.norm.weight", None, r"only the decoder has one \(can be: both stacks or none\)"),
        ("tgt_tok_emb.embedding.weight", None, r"lm_head\.weight has the shape \(19, 16\) instead of \(23, 16\)"),
        ("embed_more.weight", (9, 16), r"no place for.*embed_more\.weight \(9, 16\)"),
        ("transformer.decoder.layers.0.adapter.weight", (4, 16), r"no place for.*0\.adapter\.weight \(4, 16\)"),
        ("transformer.encoder.layers.1.norm2.bias", None, r"missing.*encoder\.layers\.1\.final_layer_norm\.bias"),
        ("generator.bias", (18,), r"lm_head\.bias has the shape \(18,\) instead of \(19,\)"),
    ],
)
def test_what_does_not_fit_is_named(name: str, shape: tuple[int, ...] | None, message: str) -> None:
    weights = {**make_tutorial().state_dict(), name: torch.zeros(shape or 1)}
    if shape is None:
        del weights[name]
    with pytest.raises(ConversionError, match=f"(?s){message}"):
        convert_torch_nn(weights, EIGHT_HEADS)


def test_weights_without_a_number_of_heads_are_refused() -> None:
    """Eight would fit, and a comparison with eight would agree: only the user's own forward pass tells them apart."""
    original = make_tutorial(nhead=4)
    assert convert_torch_nn(original.state_dict(), EIGHT_HEADS).check() is not None
    message = r"heads is not in the weights: say --nhead \(nhead= in Python\); it must divide d_model=16, .* is 8"
    for told, forward in ((None, None), (TorchSettings(norm_first=True), None), (None, original)):
        with pytest.raises(ConversionError, match=message):
            convert_torch_nn(original.state_dict(), told, forward=forward)
    with pytest.raises(ConversionError, match=message) as caught:
        convert_torch_nn(original.state_dict(), TorchSettings(activation="tanh"))
    assert "activation is 'tanh' (can be: 'relu', 'gelu', 'silu')" in str(caught.value)


def test_modules_that_are_not_torch_s_or_differ_are_refused() -> None:
    class Layer(nn.Module):
        self_attn = None

    original = make_tutorial()
    with pytest.raises(ConversionError, match=r"nhead is 8 in the module, and 4 in the settings") as caught:
        convert_torch_nn(original, TorchSettings(nhead=4, activation="gelu"))
    assert "activation is 'relu' in the module, and 'gelu' in the settings" in str(caught.value)
    # torch replaces a module by relu in the decoder's copies of the layer, and in those alone.
    with pytest.raises(ConversionError, match="activation is not the same in all layers: gelu, relu"):
        convert_torch_nn(make_tutorial(activation=nn.GELU()))
    layers: Any = original.transformer.encoder.layers
    layers[1].norm1.eps, layers[1].activation = 0.5, torch.tanh
    message = r"(?s)activation is not the same.*layer_norm_eps is not the same.*\(can be: 'relu', 'gelu', 'silu'\)"
    with pytest.raises(ConversionError, match=message):
        convert_torch_nn(original)
    layers[1] = Layer()
    with pytest.raises(ConversionError, match="a layer is of the class Layer, which is not torch's"):
        convert_torch_nn(original)
    with pytest.raises(ConversionError, match=r"no counterpart (?s:.*)encoder_attention_heads=3 must divide"):
        convert_torch_nn(make_tutorial().state_dict(), TorchSettings(nhead=3))
