"""Models as plain torch, and back: what torch.nn.Transformer computes, holds and lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_seq2seq import make_tokenizer
from tiny_vanilla import ALL_SHARING, make_model
from torch import nn
from torch_tutorial import PAD, assert_same, make_tutorial

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.conversion.systems.marian import save_as_marian, to_marian
from vanilla_transformer.conversion.systems.torch_module import TorchTransformer, save_as_torch_nn, to_torch_nn
from vanilla_transformer.conversion.systems.torch_nn import TorchSettings, convert_torch_nn

EQUAL_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}


def random_model(seed: int = 0, **changes: Any) -> VanillaTransformerForConditionalGeneration:
    return make_model(seed=seed, scale=0.2, **{"vocab_size": 19, "dropout": 0.1, "activation_dropout": 0.3, **changes})


@settings(max_examples=10)
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
    attention=st.sampled_from(["eager", "sdpa"]),
    seed=st.integers(0, 1000),
)
def test_out_and_in_again(sharing: str, positions: str, position_offset: int, seed: int, **changes: Any) -> None:
    changes |= {"position_embedding_type": positions, "position_offset": position_offset, **ALL_SHARING[sharing]}
    model = random_model(seed, **changes)
    module = to_torch_nn(model)
    assert isinstance(module.transformer, nn.Transformer)
    assert not module.training

    assert_same(module, model)
    learned = positions == "learned"
    told = TorchSettings(
        scale_embedding=model.config.scale_embedding,
        position_embedding_type=positions,
        # Rows are counted from a sentence's first token.
        position_offset=0 if learned else position_offset,
    )
    back = convert_torch_nn(module, told, forward=lambda source, target: module(source, target, source == PAD))
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
    """What is told by no weight is other than torch's defaults here."""
    changes: dict[str, Any] = {"attention_bias": True, "normalize_before": True, "activation_function": "gelu"}
    changes |= {"layer_norm_eps": 1e-3, "scale_embedding": False, "position_embedding_type": positions}
    changes |= {"dropout": 0.2, "attention_dropout": 0.0, "activation_dropout": 0.3}
    changes |= {"position_offset": 2, "bos_token_id": 5, "eos_token_id": 4, "decoder_start_token_id": 6}
    vocab_size = len(make_tokenizer())
    model = random_model(**ALL_SHARING["separate-untied"], **EQUAL_HEADS, vocab_size=vocab_size, **changes)
    folder = save_as_torch_nn(model, make_tokenizer(), tmp_path / "torch")
    back = convert_torch_nn(folder / "model.pt")
    back.check()
    assert_same(to_torch_nn(model), back.model)
    for name, tensor in model.state_dict().items():
        expected = tensor[2:] if "embed_positions" in name else tensor
        torch.testing.assert_close(back.model.state_dict()[name], expected, rtol=0.0, atol=0.0)
    for name in ("bos", "pad", "eos", "decoder_start"):
        assert getattr(back.model.config, f"{name}_token_id") == getattr(model.config, f"{name}_token_id")
    for name in ("dropout", "attention_dropout", "activation_dropout", "layer_norm_eps"):
        assert getattr(back.model.config, name) == changes[name]
    assert back.tokenizer is not None
    assert back.tokenizer("Hallo").input_ids == make_tokenizer()("Hallo").input_ids
    assert not any("Assumed" in note or "no tokenizer" in note for note in back.notes)
    # JSON's 0 is a float too, and a model may lack a start of sentences.
    plain = random_model(**EQUAL_HEADS, vocab_size=vocab_size, dropout=0, bos_token_id=None, decoder_start_token_id=6)
    config = convert_torch_nn(save_as_torch_nn(plain, None, tmp_path / "plain")).model.config
    assert (config.dropout, config.bos_token_id, config.decoder_start_token_id) == (0, None, 6)
    # The folder is as good as the file in it, and what the user says counts.
    told = TorchSettings(nhead=2, position_embedding_type=positions, position_offset=0 if positions == "learned" else 2)
    again = convert_torch_nn(folder, told).model.config
    assert (again.encoder_attention_heads, again.bos_token_id) == (2, 2)


def test_all_that_torch_lacks_is_refused_at_once(tmp_path: Path) -> None:
    unequal = random_model(encoder_attention_heads=4, decoder_attention_heads=2)
    with pytest.raises(ConversionError, match=r"one number of heads.*\n.*are \(4, 2\)"):
        save_as_torch_nn(unequal, None, tmp_path / "unequal")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConversionError, match=r"eos_token_id is \[2, 5\] \(can be: one number\)"):
        save_as_torch_nn(random_model(eos_token_id=[2, 5], **EQUAL_HEADS), None, tmp_path / "ends")
    model = random_model(d_k=3, d_v=8, normalize_embedding=True, activation_function="gelu_new")
    with pytest.raises(ConversionError) as caught:
        to_torch_nn(model)
    for name in ("d_k is 3", "d_v is 8", "normalize_embedding is True", "activation_function is 'gelu_new'"):
        assert name in str(caught.value)
    with pytest.raises(ConversionError, match=r"d_k is 5 \(can be: None\)"):
        to_torch_nn(random_model(d_k=5, d_v=5, encoder_attention_heads=3, decoder_attention_heads=3))
    # Given sizes that are the usual ones are no reason; swish is torch's silu.
    usual = random_model(d_k=4, d_v=4, activation_function="swish", **EQUAL_HEADS)
    assert_same(to_torch_nn(usual), usual)


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
        ("[" * 200_000, r"settings\.json.*is no JSON: maximum recursion"),
        ('{"nhead": [4], "norm_first": 1}', r"settings\.json.*(?s:.*)nhead is \[4\] .*\n.* is 1 "),
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
@pytest.mark.parametrize(
    ("save", "kind"), [(save_as_torch_nn, r"torch\.nn\.Transformer"), (save_as_marian, "MarianMT")]
)
def test_what_computes_something_else_is_not_saved(tmp_path: Path, save: Any, kind: str, dtype: torch.dtype) -> None:
    model: Any = random_model(max_position_embeddings=7, **EQUAL_HEADS)
    model.to(dtype).train()
    assert save(model, None, tmp_path / "good").is_dir()
    assert model.training
    # A change of the model that the conversion knows nothing of.
    model.lm_head.register_forward_hook(lambda module, inputs, logits: logits * 1.01)
    with pytest.raises(ConversionError, match=f"{kind} computes something else than this model: logits differ"):
        save(model, None, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()
    assert save(model, None, tmp_path / "bad", check=False).is_dir()


@pytest.mark.parametrize("save", [save_as_torch_nn, save_as_marian])
def test_adapters_are_to_be_merged_first(tmp_path: Path, save: Any) -> None:
    peft = pytest.importorskip("peft")
    wanted = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(random_model(**EQUAL_HEADS), wanted)
    with pytest.raises(ConversionError, match=r"encoder\.layers\.0\.self_attn\.q_proj is peft\..* merge adapters"):
        save(adapted.get_base_model(), None, tmp_path / "out")
    merged = adapted.merge_and_unload()
    ids = {"input_ids": torch.tensor([[4, 5, 6]]), "decoder_input_ids": torch.tensor([[2, 7]])}
    with torch.no_grad():
        torch.testing.assert_close(to_marian(merged)(**ids).logits, merged(**ids).logits)
    assert not list(tmp_path.iterdir())


def test_a_prefix_that_the_files_do_not_tell_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = random_model(**EQUAL_HEADS)
    save_as_torch_nn(model, None, tmp_path / "without")
    assert not caplog.records
    model.config.task_specific_params = {"translation_en_to_de": {"prefix": "<2de> "}, "translation": {"prefix": ""}}
    save_as_torch_nn(model, None, tmp_path / "with")
    assert "'<2de> ', which the model wants before its sources, is not in settings.json" in caplog.text


@pytest.mark.parametrize("save", [save_as_torch_nn, save_as_marian])
def test_weights_that_are_not_finite_and_tokenizers_with_more_ids_are_not_saved(tmp_path: Path, save: Any) -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(ConversionError, match=rf"target vocabulary has the id {len(tokenizer) - 1}, and the model"):
        save(random_model(vocab_size=len(tokenizer) - 1, **EQUAL_HEADS), tokenizer, tmp_path / "out")
    model: Any = random_model(**EQUAL_HEADS)
    with torch.no_grad():
        model.model.encoder.layers[0].fc1.weight[2, 3] = torch.nan
    with pytest.raises(ConversionError, match=r"model\.encoder\.layers\.0\.fc1\.weight holds NaN or infinity \(1 of"):
        save(model, None, tmp_path / "out", check=False)
    assert not (tmp_path / "out").exists()
