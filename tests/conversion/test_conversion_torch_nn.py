"""torch.nn.Transformer in and out: the oracle is torch's own module, in code such as users write around it."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_seq2seq import make_tokenizer
from tiny_vanilla import ALL_SHARING, assert_close, logits_of, make_model, make_sentences, pad, randomize
from torch import nn
from transformers import AutoTokenizer

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.conversion.systems.torch_module import TorchTransformer, save_as_torch_nn, to_torch_nn
from vanilla_transformer.conversion.systems.torch_nn import TorchSettings, convert_torch_nn

PAD = 1
EIGHT_HEADS = TorchSettings(nhead=8)


class Tokens(nn.Module):
    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)


class Positions(nn.Module):
    """The paper's sinusoids from angles in float32, as (N, 1, D)."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        angles = torch.arange(rows)[:, None] * torch.exp(-torch.arange(0, width, 2) * math.log(10000) / width)
        table = torch.zeros(rows, width)
        table[:, 0::2], table[:, 1::2] = torch.sin(angles), torch.cos(angles)
        self.register_buffer("pos_embedding", table[:, None])
        self.pos_embedding: torch.Tensor


class Tutorial(nn.Module):
    """What PyTorch's tutorial on translation builds, under its names; lengths come before the batch."""

    def __init__(self, vocabularies: tuple[int, int] = (23, 19), width: int = 16, **transformer: Any) -> None:
        super().__init__()
        sizes = {"nhead": 8, "num_encoder_layers": 2, "num_decoder_layers": 1, "dim_feedforward": 24, "dropout": 0.2}
        self.transformer = nn.Transformer(d_model=width, **{**sizes, **transformer})
        self.generator = nn.Linear(width, vocabularies[1])
        self.src_tok_emb = Tokens(vocabularies[0], width)
        self.tgt_tok_emb = Tokens(vocabularies[1], width)
        self.positional_encoding = Positions(width, rows=60)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        """Ids (B, S) and (B, T), padded at the end, to logits (B, T, V)."""
        table = self.positional_encoding.pos_embedding
        embedded = [self.src_tok_emb(src.T) + table[: src.shape[1]], self.tgt_tok_emb(tgt.T) + table[: tgt.shape[1]]]
        batch_first = self.transformer.batch_first
        states = self.transformer(
            *[states.transpose(0, 1) if batch_first else states for states in embedded],
            tgt_mask=torch.full((tgt.shape[1],) * 2, -math.inf).triu(diagonal=1),
            src_key_padding_mask=torch.zeros(src.shape).masked_fill(src == PAD, -math.inf),
            tgt_key_padding_mask=torch.zeros(tgt.shape).masked_fill(tgt == PAD, -math.inf),
            memory_key_padding_mask=torch.zeros(src.shape).masked_fill(src == PAD, -math.inf),
        )
        return self.generator(states if batch_first else states.transpose(0, 1))


def make_tutorial(seed: int = 0, **changes: Any) -> Tutorial:
    """A random one in evaluation mode."""
    with warnings.catch_warnings():
        # torch tells that it leaves out padding by other means than in the fastest case.
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        model = Tutorial(**changes)
    # With larger weights three layers without a last norm make more of a rounding error than is allowed.
    randomize(model, seed, scale=0.2)
    return model.eval()


def make_batch(vocabularies: tuple[int, int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Sentences of unequal lengths, padded at the end, in which no token is padding."""
    source = pad([[t + 1 for t in s] for s in make_sentences([6, 1, 4], vocabularies[0] - 1, seed)], junk=PAD)[0]
    target = pad([[t + 1 for t in s] for s in make_sentences([3, 5, 1], vocabularies[1] - 1, seed + 1)], junk=PAD)[0]
    return source, target


@torch.no_grad()
def assert_same(
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], model: VanillaTransformerForConditionalGeneration
) -> None:
    """Compares logits of a padded batch at its real positions."""
    source, target = make_batch((model.config.vocab_size, model.config.target_vocab_size))
    expected = forward(source, target)
    actual = logits_of(
        model, input_ids=source, attention_mask=(source != PAD).long(), decoder_input_ids=target, use_cache=False
    )
    assert_close(actual[target != PAD], expected[target != PAD])


# In


def test_the_tutorial_s_checkpoint_needs_the_number_of_heads_alone(tmp_path: Path) -> None:
    tutorial = make_tutorial()
    torch.save(tutorial.state_dict(), tmp_path / "model.pt")
    converted = convert_torch_nn(tmp_path / "model.pt", EIGHT_HEADS)
    difference = converted.check()
    assert difference is not None
    assert difference < 1e-5
    assert converted.tokenizer is None
    assumed = "activation='relu', norm_first=False, layer_norm_eps=1e-05"
    assert f"Assumed, torch's defaults, since a state dict does not tell: {assumed}, dropout=0.1." == converted.notes[0]
    # The comparison has them from the settings on both sides.
    assert f"cannot find a mistake in what is not in the weights: nhead=8, {assumed}, scale_" in converted.notes[1]
    config = converted.model.config
    assert (config.vocab_size, config.target_vocab_size, config.max_position_embeddings) == (23, 19, 60)
    assert (config.normalize_before, config.has_final_layer_norm) == (False, True)
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_id, config.decoder_start_token_id) == (
        2,
        1,
        3,
        2,
    )
    assert_same(tutorial, converted.model)
    saved = converted.save(tmp_path / "ours")
    assert_same(tutorial, VanillaTransformerForConditionalGeneration.from_pretrained(saved).eval())


# What torch does with padding where it can, and says that it may change.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@settings(max_examples=15, deadline=None)
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
def test_a_module_is_read_and_computes_the_same(
    layers: tuple[int, int], last_norms: bool, sharing: str, seed: int, **transformer: Any
) -> None:
    """All that the module tells is taken from it, and the user's own forward pass agrees."""
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
    told = TorchSettings(nhead=8, target_embedding="tgt_tok_emb.embedding")
    assert_same(original, convert_torch_nn(weights, told).model)


def test_a_compiled_or_parallel_module_is_its_own_self() -> None:
    original = make_tutorial(nhead=4)
    compiled: Any = torch.compile(original)
    for wrapped in (compiled, nn.DataParallel(original)):
        converted = convert_torch_nn(wrapped)
        converted.check()
        assert_same(original, converted.model)


def test_modules_of_no_common_module_are_put_into_one() -> None:
    original = make_tutorial()
    names = ("transformer", "src_tok_emb", "tgt_tok_emb", "generator")
    assert_same(original, convert_torch_nn(nn.ModuleDict({name: getattr(original, name) for name in names})).model)


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
        self.pos_tgt = nn.Embedding(30, 16) if tables == 2 else self.pos_src
        self.fc_out = nn.Linear(16, 23, bias=False)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        source = self.embed(src) + self.pos_src(torch.arange(src.shape[1]) + self.offset)
        target = self.embed(tgt) + self.pos_tgt(torch.arange(tgt.shape[1]) + self.offset)
        causal = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(diagonal=1)
        memory = self.encoder(source, src_key_padding_mask=src == PAD)
        return self.fc_out(self.decoder(target, memory, causal, memory_key_padding_mask=src == PAD))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("tables", [1, 2])
def test_learned_positions_other_names_and_unequal_heads(tables: int, offset: int) -> None:
    original = OtherNames(tables, offset)
    randomize(original)
    original.eval()
    told = TorchSettings(position_embedding_type="learned", position_offset=offset, scale_embedding=False)
    converted = convert_torch_nn(original, told, forward=original)
    converted.check()
    convert_torch_nn(original, told).check()
    assert_same(original, converted.model)
    config = converted.model.config
    assert (config.encoder_attention_heads, config.decoder_attention_heads) == (2, 4)
    assert config.share_encoder_decoder_embeddings
    assert not config.tie_word_embeddings
    assert not config.has_final_layer_norm
    with pytest.raises(ConversionError, match=r"pos_src.weight \(30, 16\) is no table of sinusoids .*='learned'"):
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
    with pytest.raises(ConversionError, match="learned positions were not found"):
        convert_torch_nn(weights, TorchSettings(nhead=8, position_embedding_type="learned"))


def test_half_precision_stays_and_is_compared_in_float32() -> None:
    original = make_tutorial().bfloat16()
    converted = convert_torch_nn(original)
    assert converted.model.dtype == torch.bfloat16
    converted.check()


# Refusals


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: weights.__delitem__(name)


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: weights.update({new: weights.pop(old)})


def add(name: str, *shape: int) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: weights.update({name: torch.zeros(shape)})


SOURCE, TARGET = "src_tok_emb.embedding.weight", "tgt_tok_emb.embedding.weight"


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (drop("transformer.decoder.layers.0.multihead_attn.in_proj_weight"), ["several encoders", "no decoder"]),
        (add("other.layers.0.self_attn.in_proj_weight", 3, 3), ["several encoders: 'transformer.encoder.', 'other.'"]),
        (drop("transformer.encoder.layers.0.linear1.weight"), ["encoder.layers.0.linear1.weight is missing"]),
        (drop("transformer.encoder.norm.weight"), ["only the decoder has one (can be: both stacks or none)"]),
        (drop(TARGET), ["lm_head.weight has the shape (19, 16) instead of (23, 16)"]),
        (add("embed_more.weight", 9, 16), ["source_embedding and target_embedding could be", "embed_more.weight"]),
        (add("second_output.weight", 9, 16), ["output_layer could be each of", "generator.weight, second_output"]),
        (
            add("transformer.decoder.layers.0.adapter.weight", 4, 16),
            ["no place for", "layers.0.adapter.weight (4, 16)"],
        ),
        (add("dense.bias", 5), ["no place for", "dense.bias (5,)"]),
        (drop("transformer.encoder.layers.1.norm2.bias"), ["missing", "encoder.layers.1.final_layer_norm.bias"]),
        (add("generator.bias", 18), ["lm_head.bias has the shape (18,) instead of (19,)"]),
    ],
)
def test_what_does_not_fit_is_named(change: Callable[[dict[str, torch.Tensor]], None], messages: list[str]) -> None:
    weights = dict(make_tutorial().state_dict())
    change(weights)
    with pytest.raises(ConversionError) as caught:
        convert_torch_nn(weights, EIGHT_HEADS)
    for message in messages:
        assert message in str(caught.value)


def test_one_name_that_tells_its_side_is_enough() -> None:
    original = make_tutorial()
    for change in (rename(SOURCE, "emb_a.weight"), rename(TARGET, "emb_b.weight")):
        weights = dict(original.state_dict())
        change(weights)
        assert_same(original, convert_torch_nn(weights, EIGHT_HEADS).model)


def test_everything_that_is_not_clear_is_told_at_once() -> None:
    weights = dict(make_tutorial().state_dict())
    weights |= {"emb1.weight": torch.zeros(9, 16), "out2.weight": torch.zeros(9, 16), "pos1": torch.zeros(60, 16)}
    with pytest.raises(ConversionError) as caught:
        convert_torch_nn(weights, EIGHT_HEADS)
    for setting in ("source_embedding and target_embedding", "source_positions and target_positions", "output_layer"):
        assert f"- {setting} could be each of" in str(caught.value)
    with pytest.raises(ConversionError, match="source_embedding is 'nowhere', which names no weight"):
        convert_torch_nn(weights, TorchSettings(nhead=8, source_embedding="nowhere"))


def test_names_that_tell_nothing_can_be_given() -> None:
    original = make_tutorial()
    weights = dict(original.state_dict())
    rename(SOURCE, "table1")(weights)
    rename(TARGET, "table2")(weights)
    with pytest.raises(ConversionError, match="no embeddings"):
        convert_torch_nn(weights, EIGHT_HEADS)
    told = TorchSettings(nhead=8, source_embedding="table1", target_embedding="table2", output_layer="generator")
    assert_same(original, convert_torch_nn(weights, told).model)


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
    with pytest.raises(ConversionError) as caught:
        convert_torch_nn(original)
    for message in ("layer_norm_eps is not the same", "activation is not the same", "(can be: 'relu', 'gelu', 'silu')"):
        assert message in str(caught.value)
    layers[1] = Layer()
    with pytest.raises(ConversionError, match="a layer is of the class Layer, which is not torch's"):
        convert_torch_nn(original)
    with pytest.raises(ConversionError, match=r"does not fit together: (?s:.*)encoder_attention_heads=3 must divide"):
        convert_torch_nn(make_tutorial().state_dict(), TorchSettings(nhead=3))


# Out


def random_model(seed: int = 0, **changes: Any) -> VanillaTransformerForConditionalGeneration:
    return make_model(seed=seed, scale=0.2, **{"vocab_size": 19, "dropout": 0.1, "activation_dropout": 0.3, **changes})


@settings(max_examples=15, deadline=None)
@given(
    normalize_before=st.booleans(),
    add_final_layer_norm=st.none() | st.booleans(),
    attention_bias=st.booleans(),
    ffn_bias=st.booleans(),
    lm_head_bias=st.booleans(),
    scale_embedding=st.booleans(),
    activation_function=st.sampled_from(["relu", "gelu", "silu"]),
    positions=st.sampled_from(["sinusoidal", "sinusoidal_concatenated", "sinusoidal_tensor2tensor", "learned"]),
    position_offset=st.integers(0, 2),
    sharing=st.sampled_from([name for name in ALL_SHARING if name.count("-") == 1]),
    layer_norm_eps=st.sampled_from([1e-5, 1e-2]),
    seed=st.integers(0, 1000),
)
def test_out_and_in_again(sharing: str, positions: str, position_offset: int, seed: int, **changes: Any) -> None:
    """The module computes the same, padding included; back again every weight is what it was."""
    changes |= {"position_embedding_type": positions, "position_offset": position_offset, **ALL_SHARING[sharing]}
    model = random_model(seed, **changes)
    module = to_torch_nn(model)
    assert isinstance(module.transformer, nn.Transformer)
    assert not module.training

    def forward(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return module(source, target, source == PAD, target == PAD)

    assert_same(forward, model)
    learned = positions == "learned"
    told = TorchSettings(
        scale_embedding=model.config.scale_embedding,
        position_embedding_type=positions,
        # Rows are counted from a sentence's first token.
        position_offset=0 if learned else position_offset,
    )
    back = convert_torch_nn(module, told, forward=forward)
    back.check()
    assert back.model.config.dropout == 0.1
    assert (back.model.config.attention_dropout, back.model.config.activation_dropout) == (0.0, 0.3)
    state = back.model.state_dict()
    for name, tensor in model.state_dict().items():
        start = position_offset if "embed_positions" in name else 0
        torch.testing.assert_close(state.pop(name), tensor[start:], rtol=0.0, atol=0.0)
    # The rest are biases that torch has along with others.
    assert all(name.endswith("bias") and not tensor.any() for name, tensor in state.items())


@pytest.mark.parametrize("bias", [False, True])
def test_in_and_out_again(bias: bool) -> None:
    """The tutorial's state dict comes back as it was, under the same names, and loads in the tutorial's own module."""
    original = make_tutorial(nhead=4, bias=bias)
    module = to_torch_nn(convert_torch_nn(original).model)
    theirs, ours = original.state_dict(), module.state_dict()
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        # The tutorial's angles are in float32.
        atol = 6e-5 if name.endswith("pos_embedding") else 0.0
        torch.testing.assert_close(ours[name], tensor, rtol=0.0, atol=atol)
    original.load_state_dict(ours)


@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_a_saved_folder_has_all_that_the_way_back_needs(tmp_path: Path, positions: str) -> None:
    model = random_model(
        **ALL_SHARING["separate-untied"],
        vocab_size=len(make_tokenizer()),
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        attention_bias=True,
        normalize_before=True,
        activation_function="gelu",
        position_embedding_type=positions,
        position_offset=2,
        eos_token_id=4,
    )
    folder = save_as_torch_nn(model, make_tokenizer(), tmp_path / "torch")
    assert len(AutoTokenizer.from_pretrained(folder)) == len(make_tokenizer())
    told = TorchSettings(**json.loads((folder / "settings.json").read_text(encoding="utf-8")))
    back = convert_torch_nn(folder / "model.pt", told)
    back.check()
    assert_same(lambda source, target: to_torch_nn(model)(source, target, source == PAD, target == PAD), back.model)
    for name, tensor in model.state_dict().items():
        expected = tensor[2:] if "embed_positions" in name else tensor
        torch.testing.assert_close(back.model.state_dict()[name], expected, rtol=0.0, atol=0.0)
    for name in ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id", "dropout"):
        assert getattr(back.model.config, name) == getattr(model.config, name)
    unequal = random_model(encoder_attention_heads=4, decoder_attention_heads=2)
    with pytest.raises(ConversionError, match=r"one number of heads.*\n.*are \(4, 2\)"):
        save_as_torch_nn(unequal, None, tmp_path / "unequal")
    assert [path.name for path in tmp_path.iterdir()] == ["torch"]


def test_all_that_torch_lacks_is_refused_at_once() -> None:
    model = random_model(d_k=3, d_v=8, normalize_embedding=True, activation_function="gelu_new")
    with pytest.raises(ConversionError) as caught:
        to_torch_nn(model)
    for name in ("d_k is 3", "d_v is 8", "normalize_embedding is True", "activation_function is 'gelu_new'"):
        assert name in str(caught.value)
    with pytest.raises(ConversionError, match=r"d_k is 5 \(can be: None\)"):
        to_torch_nn(random_model(d_k=5, d_v=5, encoder_attention_heads=3, decoder_attention_heads=3))
    # Given sizes that are the usual ones are no reason.
    usual = random_model(d_k=4, d_v=4, encoder_attention_heads=4, decoder_attention_heads=4)
    assert_same(lambda source, target: to_torch_nn(usual)(source, target, source == PAD, target == PAD), usual)


def test_torch_s_module_has_memory_of_its_own_and_ties() -> None:
    model = random_model()
    module = to_torch_nn(model)
    assert module.generator.weight is module.src_tok_emb.embedding.weight is module.tgt_tok_emb.embedding.weight
    assert module.generator.weight.data_ptr() != model.lm_head.weight.data_ptr()
    with pytest.raises(ValueError, match="A sequence of 25 tokens is too long for a table of 24 positions"):
        module(torch.zeros(1, 25, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long))


def test_torch_s_module_drops_what_the_configuration_says() -> None:
    config = random_model(attention_dropout=0.4).config
    for stack in (TorchTransformer(config).transformer.encoder, TorchTransformer(config).transformer.decoder):
        for layer in stack.layers:
            found = (layer.dropout1.p, layer.self_attn.dropout, layer.dropout.p)
            assert found == (0.1, 0.4, 0.3)


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is told by no weight, all of it other than torch's defaults."""
    model = random_model(
        **ALL_SHARING["separate-untied"],
        vocab_size=len(make_tokenizer()),
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        activation_function="gelu",
        layer_norm_eps=1e-3,
        scale_embedding=False,
        bos_token_id=5,
        eos_token_id=4,
        decoder_start_token_id=6,
    )
    return save_as_torch_nn(model, make_tokenizer(), tmp_path_factory.mktemp("saved") / "torch")


@pytest.mark.parametrize("name", ["", "model.pt"])
def test_what_stands_beside_the_weights_is_read(saved_folder: Path, name: str) -> None:
    back = convert_torch_nn(saved_folder / name)
    config = back.model.config
    assert (config.encoder_attention_heads, config.decoder_attention_heads, config.activation_function) == (
        4,
        4,
        "gelu",
    )
    assert (config.scale_embedding, config.layer_norm_eps) == (False, 1e-3)
    assert (config.bos_token_id, config.eos_token_id, config.decoder_start_token_id) == (5, 4, 6)
    assert back.tokenizer is not None
    assert back.tokenizer("Hallo").input_ids == make_tokenizer()("Hallo").input_ids
    assert not any("Assumed" in note or "no tokenizer" in note for note in back.notes)
    # What the user says counts.
    assert convert_torch_nn(saved_folder / name, TorchSettings(nhead=2)).model.config.encoder_attention_heads == 2


def test_settings_of_other_programs_are_left_alone_and_damaged_ones_refused(tmp_path: Path) -> None:
    torch.save(make_tutorial(nhead=4).state_dict(), tmp_path / "model.pt")
    settings_file = tmp_path / "settings.json"
    settings_file.write_text('{"epochs": 3, "bos_token_id": 9}')
    with pytest.raises(ConversionError, match="The number of heads is not in the weights"):
        convert_torch_nn(tmp_path / "model.pt")
    assert convert_torch_nn(tmp_path / "model.pt", TorchSettings(nhead=4)).model.config.bos_token_id == 2
    for content, message in (
        ("{", r"settings\.json, which is to tell what the weights do not, is no JSON"),
        ('{"nhead": 4, "norm_first": false, "heads": 3}', r"not known:\n  - heads \(can be: nhead, "),
    ):
        settings_file.write_text(content)
        with pytest.raises(ConversionError, match=message):
            convert_torch_nn(tmp_path / "model.pt")
    settings_file.write_text('{"nhead": 4, "norm_first": false}')
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConversionError, match=r"source vocabulary has the id \d+, and the model 23 tokens"):
        convert_torch_nn(tmp_path / "model.pt")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConversionError, match=r"The tokenizer in .* cannot be read"):
        convert_torch_nn(tmp_path / "model.pt")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_that_computes_something_else_is_not_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    model: Any = random_model(max_position_embeddings=7, encoder_attention_heads=2, decoder_attention_heads=2)
    model.to(dtype).train()
    assert save_as_torch_nn(model, None, tmp_path / "good").is_dir()
    assert model.training
    # A change of the model that the conversion knows nothing of.
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * 1.01)
    with pytest.raises(ConversionError, match=r"torch\.nn\.Transformer computes something else than this model"):
        save_as_torch_nn(model, None, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
    assert save_as_torch_nn(model, None, tmp_path / "bad", check=False).is_dir()


def test_swish_goes_out_as_the_silu_that_it_is() -> None:
    model = random_model(activation_function="swish")
    module = to_torch_nn(model)
    assert_same(lambda source, target: module(source, target, source == PAD, target == PAD), model)
