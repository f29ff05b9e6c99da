"""OpenNMT-py's checkpoints, in the layout that its version 3 writes: what the model computes, and what is refused."""

import argparse
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from sister_systems import RandomWeights, Stack, linear, sinusoids
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.conversion.systems.opennmt_py import SETTINGS, convert_opennmt_py

SPECIALS = ["<unk>", "<blank>", "<s>", "</s>"]
SOURCE = [*SPECIALS, "ein", "Hund", "la@@", "uft", "schnell"]
TARGET = [*SPECIALS, "a", "dog", "ru@@", "ns"]
D, FFN, HEADS, ROWS = 8, 12, 2, 30

# What `onmt_train` writes of a Transformer as its documentation builds it.
OPT: dict[str, Any] = {
    **{name: values[0] for name, values in SETTINGS.items()},
    **dict.fromkeys(("share_embeddings", "share_decoder_embeddings", "add_qkvbias"), False),
    **dict.fromkeys(("src_lang", "tgt_lang"), ""),
}
OPT |= {"enc_layers": 2, "dec_layers": 1, "enc_hid_size": D, "dec_hid_size": D, "heads": HEADS, "transformer_ff": FFN}
OPT |= {"dropout": [0.3, 0.1], "attention_dropout": [0.2], "label_smoothing": 0.1, "norm_eps": 1e-6}
OPT |= {"self_attn_type": "scaled-dot-flash", "transforms": [], "_all_transform": set()}


def make_stacks(opt: argparse.Namespace, weights: Any) -> dict[str, Stack]:
    """Encoder and decoder: x + f(norm(x)), and one more norm at the end."""
    parts = ("linear_query", "linear_keys", "linear_values", "final_linear")
    same: dict[str, Any] = {"projections": parts, "feed_forward": ("feed_forward.w_1", "feed_forward.w_2")}
    same |= {"pre_norm": True, "eps": opt.norm_eps, "heads": opt.heads}
    same["activation"] = torch.nn.functional.gelu if opt.pos_ffn_activation_fn == "gelu" else torch.relu
    encoder: dict[str, Any] = {"attentions": ["self_attn"], "norms": ["layer_norm", "feed_forward.layer_norm"]}
    decoder: dict[str, Any] = {"attentions": ["self_attn", "context_attn"]}
    decoder["norms"] = ["layer_norm_1", "layer_norm_2", "feed_forward.layer_norm"]
    encoder |= {"name": "encoder.transformer", "layers": opt.enc_layers}
    decoder |= {"name": "decoder.transformer_layers", "layers": opt.dec_layers}
    return {
        side: Stack(weights, last_norm=f"{side}.layer_norm", **names, **same)
        for side, names in (("encoder", encoder), ("decoder", decoder))
    }


def make_checkpoint(*, source: Any = SOURCE, target: Any = TARGET, biases: bool = False, **options: Any) -> Any:
    opt = argparse.Namespace(**{**OPT, **options})
    weights = RandomWeights(D)
    kind = "sinusoidal_tensor2tensor" if opt.position_encoding_type == "SinusoidalConcat" else "sinusoidal"
    tables = [f"{side}.embeddings.make_embedding.emb_luts.0.weight" for side in ("encoder", "decoder")]
    for table, vocab, (side, stack) in zip(tables, (source, target), make_stacks(opt, weights).items(), strict=True):
        weights[table] = weights.draw(len(vocab), D)
        weights[f"{side}.embeddings.make_embedding.pe.pe"] = sinusoids(kind, ROWS, D).float()[:, None]
        stack.draw(FFN, bias=biases)
    if opt.share_embeddings:
        weights[tables[1]] = weights[tables[0]]
    output = {"weight": weights.draw(len(target), D), "bias": weights.draw(len(target))}
    if opt.share_decoder_embeddings:
        output["weight"] = weights[tables[1]]
    vocabs = {"src": source, "tgt": target, "data_task": "seq2seq", "decoder_start_token": "<s>"}
    rest = {"opt": opt, "optim": {"training_step": 3, "optimizer": {"state": {}}}}
    return {"model": dict(weights), "generator": output, "vocab": vocabs, **rest}


def compute(checkpoint: dict[str, Any], source: list[int], target: list[int]) -> torch.Tensor:
    """OpenNMT-py's logits; its embeddings are times sqrt(d), plus positions."""
    weights = checkpoint["model"]
    stacks = make_stacks(checkpoint["opt"], weights)

    def embed(side: str, ids: list[int]) -> torch.Tensor:
        prefix = f"{side}.embeddings.make_embedding"
        table, positions = weights[f"{prefix}.emb_luts.0.weight"].double(), weights[f"{prefix}.pe.pe"][:, 0].double()
        return table[ids] * D**0.5 + positions[: len(ids)]

    x = stacks["decoder"].run(embed("decoder", target), stacks["encoder"].run(embed("encoder", source)))
    return linear({f"generator.{name}": tensor for name, tensor in checkpoint["generator"].items()}, "generator", x)


def save(checkpoint: dict[str, Any], folder: Path) -> Path:
    torch.save(checkpoint, folder / "model_step_3.pt")
    return folder / "model_step_3.pt"


SENTENCES = [(["ein", "Hund", "la@@", "uft"], ["a", "dog", "ru@@", "ns"]), (["schnell"], ["a"])]
ONE_TABLE = {"share_embeddings": True, "share_decoder_embeddings": True}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"biases": True, "pos_ffn_activation_fn": "gelu", "norm_eps": 1e-3, "heads": 4, "self_attn_type": "scaled-dot"},
        {"share_decoder_embeddings": True, "enc_layers": 1, "dec_layers": 3},
        {"target": SOURCE, **ONE_TABLE, "position_encoding_type": "SinusoidalConcat"},
        {"target": SOURCE, "biases": True},
        # Special tokens anywhere, which the model must have in the same places on both sides.
        {"target": ["a", "<s>", "dog", "</s>", "ru@@", "ns", "<blank>", "<unk>", "cat"], "biases": True},
        {"source": [*SOURCE[4:], *reversed(SPECIALS)], "target": [*TARGET, "cat", "dogs"]},
    ],
)
def test_it_computes_what_the_original_does(options: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = make_checkpoint(**options)
    converted = convert_opennmt_py(save(checkpoint, tmp_path))
    model, tokenizer = converted.model, converted.tokenizer
    assert tokenizer is not None
    vocab = checkpoint["vocab"]
    batch = tokenizer([" ".join(words) for words, _ in SENTENCES], padding=True, return_tensors="pt")
    for row, (words, translation) in enumerate(SENTENCES):
        target = [word if word in vocab["tgt"] else "<unk>" for word in ["<s>", *translation]]
        both = zip(("src", "tgt"), (words, target), strict=True)
        expected = compute(checkpoint, *([vocab[side].index(word) for word in text] for side, text in both))
        ids = tokenizer.target_tokenizer.convert_tokens_to_ids(target)
        with torch.no_grad():
            logits = model(**batch, decoder_input_ids=torch.tensor([ids] * len(SENTENCES))).logits[row]
        order = tokenizer.target_tokenizer.convert_tokens_to_ids(vocab["tgt"])
        torch.testing.assert_close(logits[:, order], expected.float(), rtol=1e-5, atol=1e-5)
    assert model.config.decoder_start_token_id == tokenizer.target_tokenizer.convert_tokens_to_ids("<s>")


def test_all_of_it_is_saved_and_found_again(tmp_path: Path) -> None:
    options: dict[str, Any] = {"transforms": ["filtertoolong"], "_all_transform": {"bpe"}}
    converted = convert_opennmt_py(save(make_checkpoint(src_lang="de", tgt_lang="en", **options), tmp_path))
    assert "by its transforms bpe, filtertoolong" in converted.notes[0]
    config = converted.model.config
    assert (config.dropout, config.activation_dropout, config.attention_dropout) == (0.1, 0.1, 0.2)
    assert (config.label_smoothing, config.langs, config.tie_word_embeddings) == (0.1, ["de", "en"], False)
    folder = converted.save(tmp_path / "saved")
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["ein Hund la@@ uft", "Katze"], text_target=["a dog", "ru@@ ns"], padding=True)
    assert batch["input_ids"] == [[4, 5, 6, 7], [0, 1, 1, 1]]  # as in the training: nothing behind the source
    assert batch["labels"] == [[4, 5, 3], [6, 7, 3]]
    assert tokenizer.decode([5, 6, 7, 3], skip_special_tokens=True) == "dog runs"
    assert (model.generation_config.num_beams, model.generation_config.length_penalty) == (5, 1.0)
    inputs = tokenizer(["ein Hund"], return_tensors="pt")
    original: Any = converted.model
    assert torch.equal(model.generate(**inputs), original.generate(**inputs))


@pytest.mark.parametrize(
    ("options", "joined"),
    [
        ({}, "ru@@ ns ￭. ▁a"),
        ({"transforms": ["bpe"]}, "runs ￭. ▁a"),
        ({"transforms": ["sentencepiece"]}, "ru@@ns￭. a"),
        ({"transforms": ["onmt_tokenize"], "tgt_onmttok_kwargs": "{'mode': 'none'}"}, "ru@@ ns ￭. ▁a"),
        ({"transforms": ["onmt_tokenize"], "tgt_onmttok_kwargs": "{'joiner_annotate': True}"}, "ru@@ ns. ▁a"),
        ({"transforms": ["onmt_tokenize"], "tgt_onmttok_kwargs": "{'spacer_annotate': True}"}, "ru@@ns￭. a"),
        # What a training writes is read already.
        ({"transforms": ["onmt_tokenize"], "tgt_onmttok_kwargs": {"spacer_annotate": True}}, "ru@@ns￭. a"),
        ({"transforms": ["onmt_tokenize"], "tgt_subword_type": "sentencepiece"}, "ru@@ns￭. a"),
        (
            {"transforms": ["onmt_tokenize"], "share_vocab": True, "src_onmttok_kwargs": {"joiner_annotate": True}},
            "ru@@ ns. ▁a",
        ),
        (
            {"transforms": ["onmt_tokenize"], "src_onmttok_kwargs": {"joiner_annotate": True}, "share_vocab": True}
            | {"src_subword_vocab": "own.txt"},
            "ru@@ ns ￭. ▁a",
        ),
    ],
)
def test_words_are_put_together_as_they_were_split(options: dict[str, Any], joined: str, tmp_path: Path) -> None:
    target = [*TARGET, "￭.", "▁a"]
    tokenizer = convert_opennmt_py(save(make_checkpoint(target=target, **options), tmp_path)).tokenizer
    assert tokenizer is not None
    assert tokenizer.decode([6, 7, 8, 9, 3], skip_special_tokens=True) == joined


def test_marks_that_stay_in_translations_are_said(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "transforms": ["onmt_tokenize"],
        "tgt_onmttok_kwargs": {"case_markup": True},
        "gpt2_pretok": True,
    }
    for given, is_said in (({}, False), (options, True)):
        notes = convert_opennmt_py(save(make_checkpoint(**given), tmp_path)).notes
        assert ("What case_markup and gpt2_pretok did" in " ".join(notes)) == is_said


@pytest.mark.parametrize("shards", [[""], [".00", ".01"]])
def test_weights_may_lie_beside_the_checkpoint(shards: list[str], tmp_path: Path) -> None:
    checkpoint = make_checkpoint()
    whole = convert_opennmt_py(save(checkpoint, tmp_path)).model.state_dict()
    weights = {**checkpoint.pop("model"), **{f"generator.{k}": v for k, v in checkpoint.pop("generator").items()}}
    path = save(checkpoint, tmp_path)
    with pytest.raises(ConversionError, match=r"there is no model_step_3\.safetensors beside it"):
        convert_opennmt_py(path)
    for index, shard in enumerate(shards):
        part = dict(list(weights.items())[index :: len(shards)])
        save_file(part, tmp_path / f"model_step_3{shard}.safetensors")
    for other in ("model_step_30", "model_step_3.v2"):
        save_file(
            {name: torch.zeros_like(tensor) for name, tensor in weights.items()}, tmp_path / f"{other}.safetensors"
        )
    found = convert_opennmt_py(path).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    save_file(weights, tmp_path / "model_step_3.07.safetensors")  # left by an older run
    with pytest.raises(ConversionError, match=r"has weights that another file beside .* has too: "):
        convert_opennmt_py(path)


def test_older_checkpoints_have_fewer_settings(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(biases=True)
    expected = convert_opennmt_py(save(checkpoint, tmp_path)).model
    for name in ("norm_eps", "num_kv", "num_experts", "add_qkvbias", "lora_layers", "sliding_window"):
        delattr(checkpoint["opt"], name)
    del checkpoint["vocab"]["decoder_start_token"]
    model = convert_opennmt_py(save(checkpoint, tmp_path)).model
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.config.attention_bias
    # The start symbol may be another.
    checkpoint["vocab"]["decoder_start_token"] = "</s>"
    assert convert_opennmt_py(save(checkpoint, tmp_path)).model.config.decoder_start_token_id == 3
    checkpoint["vocab"]["decoder_start_token"] = "<2en>"
    with pytest.raises(ConversionError, match=r"decoder_start_token is '<2en>', which the target vocabulary lacks"):
        convert_opennmt_py(save(checkpoint, tmp_path))


def test_every_unsupported_setting_is_named_at_once(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(**dict.fromkeys(SETTINGS, cast(Any, "other")))
    del checkpoint["opt"].heads
    with pytest.raises(ConversionError) as error:
        convert_opennmt_py(save(checkpoint, tmp_path))
    message = str(error.value)
    assert "heads is missing" in message
    for name in SETTINGS:
        assert f"\n  - {name} is 'other' (can be: " in message
    checkpoint = make_checkpoint(max_relative_positions=-1, pos_ffn_activation_fn="silu", layer_norm="rms")
    with pytest.raises(ConversionError, match=r"max_relative_positions is -1.*\n.*'silu'.*\n.*'rms'"):
        convert_opennmt_py(save(checkpoint, tmp_path))


class Fields:
    """What a checkpoint of version 2 holds: an object of the code that wrote it."""


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    path = save({"model": {}}, tmp_path)
    with pytest.raises(ConversionError, match="has no settings"):
        convert_opennmt_py(path)
    other_positions = make_checkpoint()
    other_positions["model"]["encoder.embeddings.make_embedding.pe.pe"] += 1
    cases: list[tuple[Any, str]] = [
        (make_checkpoint() | {"vocab": {"src": SOURCE}}, "no vocabularies as OpenNMT-py 3 writes"),
        (make_checkpoint() | {"vocab": Fields()}, "needs .*Fields"),
        (other_positions, r"make_embedding\.pe\.pe is not the table"),
    ]
    for kwargs in ("{'joiner'", "__import__('os')", "3"):
        checkpoint = make_checkpoint(transforms=["onmt_tokenize"], tgt_onmttok_kwargs=kwargs)
        cases.append((checkpoint, "tgt_onmttok_kwargs is no dictionary"))
    for checkpoint, message in cases:
        with pytest.raises(ConversionError, match=message):
            convert_opennmt_py(save(checkpoint, tmp_path))
