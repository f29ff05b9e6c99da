"""Encoder and decoder as models of their own: Auto classes, weights, what they take from an encoder-decoder, masks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_single_stacks import DECODERS, ENCODERS, SINGLE_STACKS, TRAINABLE, main_output, make_single_stack, run
from tiny_vanilla import ALL_SHARING, INPUTS, SHARING, assert_close, make_config, make_model, make_sentences, pad
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForTextEncoding,
    DynamicCache,
    GenerationConfig,
)

import vanilla_transformer as package
from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration


@pytest.mark.parametrize("name", SINGLE_STACKS)
def test_auto_classes(name: str, tmp_path: Path) -> None:
    model = make_single_stack(name)
    model.save_pretrained(tmp_path)
    loaded = SINGLE_STACKS[name].from_pretrained(tmp_path)
    assert type(loaded).__name__ == name
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base).__name__ == f"VanillaTransformer{'Decoder' if name in DECODERS else 'Encoder'}Model"
    ids = torch.tensor(make_sentences([5]))
    assert torch.equal(main_output(run(base, input_ids=ids)), main_output(run(model.base_model, input_ids=ids)))
    assert type(AutoModel.from_config(loaded.config)) is type(base)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "custom_pipelines" not in saved
    assert "AutoModelForSeq2SeqLM" not in saved["auto_map"]


def test_auto_model_of_a_new_configuration_is_the_encoder_decoder() -> None:
    assert type(AutoModel.from_config(make_config())) is package.VanillaTransformerModel
    for name, auto_class in SINGLE_STACKS.items():
        if auto_class is not AutoModel:
            assert type(auto_class.from_config(make_config())).__name__ == name


def tables_of(model: Any) -> dict[str, nn.Parameter]:
    base = model.base_model
    tables = {"tokens": getattr(base, base.side).embed_tokens.weight}
    if "shared" in base._modules:
        tables["shared"] = base.shared.weight
    if model.get_output_embeddings() is not None:
        tables["output"] = model.get_output_embeddings().weight
    return tables


def check_ties(model: Any) -> None:
    tables = tables_of(model)
    assert ("shared" in tables) == model.config.share_encoder_decoder_embeddings
    assert tables.get("shared", tables["tokens"]) is tables["tokens"]
    assert model.get_input_embeddings().weight is tables["tokens"]
    if "output" in tables:
        assert (tables["output"] is tables["tokens"]) == model.config.tie_word_embeddings


@pytest.fixture(scope="module")
def seq2seqs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved translation model of each way of sharing, with languages and a search of its own."""
    folders = {}
    for sharing, changes in ALL_SHARING.items():
        model = make_model(langs=["en", "de"], lm_head_bias=True, label_smoothing=0.1, **changes)
        model.generation_config.update(num_beams=4, length_penalty=0.6, length_penalty_type="gnmt")
        folders[sharing] = tmp_path_factory.mktemp("seq2seqs") / sharing
        model.save_pretrained(folders[sharing])
    return folders


@pytest.mark.parametrize("sharing", ALL_SHARING)
@pytest.mark.parametrize("name", SINGLE_STACKS)
def test_from_an_encoder_decoder(name: str, sharing: str, seq2seqs: dict[str, Path], caplog: Any) -> None:
    """Every parameter but a new head's is the encoder-decoder's; what the stack lacks is not complained of."""
    seq2seq = AutoModelForSeq2SeqLM.from_pretrained(seq2seqs[sharing])
    caplog.clear()
    single, info = getattr(package, name).from_pretrained(seq2seqs[sharing], output_loading_info=True)
    heads = {key for key in single.state_dict() if key.startswith(("score.", "qa_outputs."))}
    assert info["missing_keys"] == heads
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert bool(caplog.messages) == bool(heads)  # the library tells of the new head
    prefix = "" if single.base_model is not single else "model."
    taken = {key: tensor for key, tensor in single.state_dict().items() if key not in heads}
    assert all(torch.equal(tensor, seq2seq.state_dict()[prefix + key]) for key, tensor in taken.items())
    check_ties(single)
    config = seq2seq.config
    assert single.config.vocab_size == (config.target_vocab_size if name in DECODERS else config.vocab_size)
    assert seq2seq.config.is_encoder_decoder
    assert (single.config.is_encoder_decoder, single.config.is_decoder) == (False, name in DECODERS)
    depth = config.decoder_layers if name in DECODERS else config.encoder_layers
    assert single.config.num_hidden_layers == depth


@pytest.mark.parametrize(("begins", "starts"), [(None, 1), (0, 2), (5, None)])
def test_texts_begin_with_what_starts_the_decoder(begins: int | None, starts: int | None, tmp_path: Path) -> None:
    """Marian's starts with padding and has no `<s>`, fairseq's with `</s>`."""
    make_model(bos_token_id=begins, decoder_start_token_id=starts).save_pretrained(tmp_path / "seq2seq")
    expected = begins if starts is None else starts
    for folder in ("seq2seq", "single"):
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert model.config.bos_token_id == model.generation_config.bos_token_id == expected
        assert model.generation_config.decoder_start_token_id is None
        assert model.generate(max_new_tokens=2, do_sample=False)[0, 0] == expected
        model.save_pretrained(tmp_path / "single")
    if starts is not None:
        seq2seq = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "single", is_encoder_decoder=True)
        assert seq2seq.generate(torch.tensor([[4, 5]]), max_new_tokens=2)[0, 0] == starts


def test_a_language_model_has_a_search_of_its_own(seq2seqs: dict[str, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(seq2seqs["shared-tied"])
    settings = model.generation_config.to_diff_dict()
    assert not {"num_beams", "length_penalty", "length_penalty_type"} & settings.keys()
    assert settings["eos_token_id"] == 2
    wanted = GenerationConfig(num_beams=3, eos_token_id=2, pad_token_id=1)
    model = AutoModelForCausalLM.from_pretrained(seq2seqs["shared-tied"], generation_config=wanted)
    assert model.generation_config.num_beams == 3


def test_an_encoder_decoder_from_an_encoder(tmp_path: Path) -> None:
    encoder = make_single_stack("VanillaTransformerEncoderModel")
    encoder.save_pretrained(tmp_path)
    seq2seq, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, is_encoder_decoder=True, output_loading_info=True)
    assert all(name.startswith("model.decoder.layers.") for name in info["missing_keys"])
    ids = torch.tensor(make_sentences([5]))
    states = run(seq2seq.get_encoder(), input_ids=ids).last_hidden_state
    assert torch.equal(states, run(encoder, input_ids=ids).last_hidden_state)
    assert run(seq2seq, input_ids=ids, decoder_input_ids=ids).logits.isfinite().all()


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("name", DECODERS)
def test_an_encoder_decoder_from_a_decoder(name: str, sharing: str, tmp_path: Path) -> None:
    decoder = make_single_stack(name, **SHARING[sharing])
    decoder.save_pretrained(tmp_path)
    seq2seq, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, is_encoder_decoder=True, output_loading_info=True)
    new = ("model.encoder.", ".encoder_attn.", ".encoder_attn_layer_norm.")
    old = {key for key in seq2seq.state_dict() if not any(part in key for part in new)}
    if name == "VanillaTransformerDecoderModel" and not SHARING[sharing]["tie_word_embeddings"]:
        old.remove("lm_head.weight")
    assert not old & info["missing_keys"]
    prefix = "" if decoder.base_model is not decoder else "model."
    for key, tensor in decoder.state_dict().items():
        assert torch.equal(seq2seq.state_dict()[prefix + key], tensor)
    ids = torch.tensor(make_sentences([5]))
    assert run(seq2seq, input_ids=ids, decoder_input_ids=ids).logits.isfinite().all()
    seq2seq.save_pretrained(tmp_path / "seq2seq")
    texts = (tmp_path / "seq2seq" / "config.json").read_text(), make_model().config.to_json_string()
    saved, plain = map(json.loads, texts)
    for field in ("auto_map", "is_decoder", "is_encoder_decoder", "custom_pipelines"):
        assert saved.get(field) == plain.get(field), field
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "seq2seq")
    assert torch.equal(again.generate(ids, num_beams=2), seq2seq.generate(ids, num_beams=2))


@pytest.mark.parametrize("num_beams", [1, 2])
def test_an_encoder_decoder_from_a_language_model_starts_with_its_own_token(num_beams: int, tmp_path: Path) -> None:
    """The language model's settings of `generate`, which are taken over, know no token that starts a decoder."""
    make_single_stack("VanillaTransformerForCausalLM").save_pretrained(tmp_path)
    config = make_config(decoder_start_token_id=3)
    seq2seq: Any = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path, config=config)
    assert seq2seq.generate(torch.tensor(make_sentences([5])), max_new_tokens=2, num_beams=num_beams)[0, 0] == 3


def test_the_attention_over_the_source_is_new_as_a_whole_only(tmp_path: Path) -> None:
    make_single_stack("VanillaTransformerForCausalLM").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.decoder.layers.0.encoder_attn.q_proj.weight"
    save_file({**tensors, name: torch.zeros(16, 16)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"disagree[\s\S]*encoder_attn\.q_proj\.weight *\| MISSING"):
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path, is_encoder_decoder=True)


class TestWhatDoesNotFit:
    @pytest.mark.parametrize(
        ("name", "advice"),
        [
            ("VanillaTransformerForTokenClassification", "of one encoder alone .*AutoModelForTokenClassification"),
            ("VanillaTransformerForCausalLM", "of one decoder alone .*AutoModelForCausalLM"),
        ],
    )
    def test_a_single_stack_is_not_the_encoder_decoder(self, name: str, advice: str, tmp_path: Path) -> None:
        make_single_stack(name).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=advice):
            AutoModelForSeq2SeqLM.from_pretrained(tmp_path)

    @pytest.mark.parametrize("sharing", ["shared-tied", "separate-tied"])
    @pytest.mark.parametrize("saved", ["VanillaTransformerEncoderModel", "VanillaTransformerForCausalLM"])
    def test_nor_the_other_stack(self, saved: str, sharing: str, tmp_path: Path) -> None:
        """They have at most the embeddings in common; a configuration alone would build one silently."""
        model = make_single_stack(saved, **SHARING[sharing])
        model.save_pretrained(tmp_path)
        is_decoder = saved.endswith("CausalLM")
        other, auto_class = "encoder" if is_decoder else "decoder", SINGLE_STACKS[saved].__name__
        message = rf"is one {other}, but .* saved by {saved}\): load it with .*{auto_class}"
        for name in ENCODERS if is_decoder else DECODERS:
            with pytest.raises(ValueError, match=message):
                getattr(package, name).from_pretrained(tmp_path)
            with pytest.raises(ValueError, match=r"configuration is of one .* alone"):
                getattr(package, name)._from_config(model.config)

    @pytest.mark.parametrize("name", ["VanillaTransformerForQuestionAnswering", "VanillaTransformerForCausalLM"])
    def test_other_sizes_are_refused(self, name: str, seq2seqs: dict[str, Path]) -> None:
        side = "decoder" if name in DECODERS else "encoder"
        for field, value in (("d_model", 8), (f"{side}_layers", 5)):
            with pytest.raises(RuntimeError, match="disagree with VanillaTransformerConfig") as error:
                SINGLE_STACKS[name].from_pretrained(seq2seqs["separate-tied"], **{field: value})
            assert isinstance(error.value, ValueError)  # which commands explain

    def test_a_file_of_this_class_must_be_whole(self, tmp_path: Path) -> None:
        make_single_stack("VanillaTransformerForSequenceClassification").save_pretrained(tmp_path)
        with pytest.raises(RuntimeError, match=r"score\.bias"):
            transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)

    def test_inputs(self) -> None:
        ids = torch.tensor([[4, 5]])
        states = torch.zeros(1, 2, 16)
        encoder = make_single_stack("VanillaTransformerEncoderModel")
        decoder = make_single_stack("VanillaTransformerForCausalLM")
        source = {"encoder_hidden_states": states, "encoder_attention_mask": ids}
        wrong: list[tuple[Any, dict[str, Any], str]] = [
            (encoder, {"past_key_values": DynamicCache(), "use_cache": True}, "no use for past_key_values, use_cache"),
            (encoder, {"position_ids": ids}, "no use for position_ids"),
            (decoder, {"skip_logits": True}, "skip_logits=True needs labels"),
            (decoder, source, "no use for encoder_hidden_states, encoder_attention_mask"),
            (make_model(), {}, r"exactly one of decoder_input_ids .*AutoModelForTextEncoding"),
        ]
        for model in (encoder, decoder):
            wrong.append((model, {"inputs_embeds": states}, "exactly one of input_ids and inputs_embeds"))
            wrong.append((model, {"input_ids": None}, "exactly one of input_ids and inputs_embeds"))
        for model, inputs, message in wrong:
            with pytest.raises(ValueError, match=message):
                model(**{"input_ids": ids, **inputs})

    @pytest.mark.parametrize("name", SINGLE_STACKS)
    def test_attention_over_a_source_is_not_left_out_silently(self, name: str) -> None:
        config = make_single_stack(name).config
        config.add_cross_attention = True
        with pytest.raises(ValueError, match="add_cross_attention must not be True"):
            getattr(package, name)(config)


def test_configurations_of_single_stacks() -> None:
    """One is made from the encoder-decoder's, which is left as it was; what is one already is taken as it is."""
    seq2seq = make_config(decoder_vocab_size=13, **SHARING["separate-tied"])
    before = copy.deepcopy(seq2seq.to_dict())
    for name in SINGLE_STACKS:
        model = make_single_stack(name, decoder_vocab_size=13, **SHARING["separate-tied"])
        assert all(
            module.config is model.config
            for module in model.modules()
            if isinstance(module, transformers.PreTrainedModel)
        )
        assert VanillaTransformerConfig(**model.config.to_dict()).to_dict() == model.config.to_dict()
        assert type(model)(model.config).config is model.config
    assert seq2seq.to_dict() == before


def labels_for(name: str, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    tokens = ids.masked_fill(mask == 0, -100)
    return {
        "VanillaTransformerForSequenceClassification": {"labels": ids[:, 0] % 2},
        "VanillaTransformerForTokenClassification": {"labels": tokens.where(tokens == -100, tokens % 2)},
        "VanillaTransformerForQuestionAnswering": {"start_positions": ids[:, 0] % 2, "end_positions": ids[:, 1] % 3},
        "VanillaTransformerForCausalLM": {"labels": tokens},
    }[name]


@pytest.mark.parametrize("name", TRAINABLE)
def test_bfloat16_and_one_graph(name: str) -> None:
    """A compiled step gives the same loss without a break; in half precision it is finite and near."""
    model = make_single_stack(name, decoder_layers=1)
    ids, mask = pad(make_sentences([3, 6]))
    inputs = {"input_ids": ids, "attention_mask": mask, **labels_for(name, ids, mask)}
    expected = run(model, **inputs)
    torch._dynamo.reset()
    compiled = run(torch.compile(model, fullgraph=True, backend="eager"), **inputs)
    torch.testing.assert_close(compiled.loss, expected.loss)
    single = copy.deepcopy(model).bfloat16().train()
    loss = single(**inputs).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.loss.item(), rel=0.1)
    assert all(cast(torch.Tensor, parameter.grad).isfinite().all() for parameter in single.parameters())


def test_the_advice_for_states_of_the_source_can_be_followed(tmp_path: Path) -> None:
    """Where a tool loads a folder by AutoModel, as sentence-transformers does, no model can be given to it."""
    model = make_model()
    model.save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match="save it with the tokenizer in a folder of its own"):
        AutoModel.from_pretrained(tmp_path / "whole")(INPUTS["input_ids"])
    AutoModelForTextEncoding.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "encoder")
    found = run(AutoModel.from_pretrained(tmp_path / "encoder"), input_ids=INPUTS["input_ids"])
    expected = run(model.get_encoder(), input_ids=INPUTS["input_ids"])
    assert_close(found.last_hidden_state, expected.last_hidden_state)
