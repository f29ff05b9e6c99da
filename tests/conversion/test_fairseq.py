"""fairseq's `transformer`: its equations written naively, its checkpoints of several years, its dictionaries."""

import contextlib
import random
import re
import sys
import types
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from naive_fairseq import (
    EOS,
    NUM_SPECIAL,
    PAD,
    SETTINGS,
    TARGET_WORDS,
    UNK,
    WORDS,
    NaiveFairseq,
    make_weights,
    write_checkpoint,
    write_dictionaries,
)
from test_weights import Bomb
from tiny_codes import PIECES, write_codes
from tiny_vanilla import assert_close, logits_of, pad
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.conversion.systems.fairseq import UNLIKELY, convert_fairseq
from vanilla_transformer.conversion.systems.fairseq_checkpoint import read_fairseq

SOURCES = [[4, 5, 6, 7, EOS], [8, EOS], [13, UNK, 9, EOS]]
TARGETS = [[EOS, 4, 5, 6], [EOS, 7, 8, UNK], [EOS, 9, 10, 11]]
PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}

MODELS: dict[str, dict[str, Any]] = {
    "post-norm, three tables": {},
    "post-norm, one table": {"share_all_embeddings": True, "share_decoder_input_output_embed": True},
    "pre-norm, decoder tied": {**PRE_NORM, "share_decoder_input_output_embed": True},
    "learned, normalised, unscaled": {**LEARNED, "layernorm_embedding": True, "no_scale_embedding": True},
    "pre-norm, learned, one table": {**PRE_NORM, **LEARNED, "share_all_embeddings": True},
    "gelu": {"activation_fn": "gelu", "encoder_layers": 1, "decoder_layers": 3},
    "gelu_accurate": {**PRE_NORM, "activation_fn": "gelu_accurate", "layernorm_embedding": True},
    "tanh": {"activation_fn": "tanh", "encoder_attention_heads": 8, "decoder_attention_heads": 1},
    "linear": {"activation_fn": "linear"},
    "relu_squared": {"activation_fn": "relu_squared", "no_scale_embedding": True},
}


def edit(checkpoint: Path, **changes: Any) -> None:
    torch.save({**torch.load(checkpoint, weights_only=False), **changes}, checkpoint)


def check_logits(model: VanillaTransformerForConditionalGeneration, naive: NaiveFairseq) -> None:
    ids, mask = pad(SOURCES)
    actual = logits_of(model, input_ids=ids, attention_mask=mask, decoder_input_ids=torch.tensor(TARGETS))
    for row, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        assert_close(actual[row].double(), naive.logits(source, target))


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_computes_what_fairseq_does(name: str, tmp_path: Path) -> None:
    checkpoint, naive = write_checkpoint(tmp_path, MODELS[name])
    converted = convert_fairseq(checkpoint)
    check_logits(converted.model, naive)
    tokenizer: Any = converted.tokenizer
    assert tokenizer("ein  au@@ to\tfä@@ hrt zu sch@@ nell . ").input_ids == [4, 5, 6, 7, 8, UNK, 11, 12, 10, EOS]
    assert tokenizer.separate_vocabs is not ("share_all_embeddings" in MODELS[name])
    config = converted.model.config
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.1, 0.2, 0.3)
    assert config.langs == ["de", "en"]
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_id) == (0, PAD, EOS)
    assert config.decoder_start_token_id == EOS
    assert converted.compare is None
    assert not any("Not in the checkpoint" in note for note in converted.notes)


def test_a_converted_model_is_saved_and_loaded_like_any_other(tmp_path: Path) -> None:
    checkpoint, naive = write_checkpoint(tmp_path / "original", PRE_NORM)
    for old, new in (("de", "deu"), ("en", "eng")):
        (tmp_path / "original" / f"dict.{old}.txt").rename(tmp_path / f"dict.{new}.txt")
    original = convert_fairseq(checkpoint, dictionaries=tmp_path, source_lang="deu", target_lang="eng")
    folder = original.save(tmp_path / "converted")
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    check_logits(model, naive)
    assert (model.generation_config.num_beams, tokenizer.model_max_length) == (5, 20)
    assert model.config.langs == ["deu", "eng"]
    batch = tokenizer(["ein au@@ to", "das"], text_target=["a car", "fast@@ er"], padding=True, return_tensors="pt")
    assert batch["input_ids"].tolist() == [[4, 5, 6, EOS], [9, EOS, PAD, PAD]]
    assert batch["labels"].tolist() == [[4, 5, EOS], [8, 9, EOS]]
    assert tokenizer.decode([10, 5, 6, 7, 8, 9, 11, EOS, PAD], skip_special_tokens=True) == "the car drives faster ."
    longest = model.generation_config.max_new_tokens - 1
    output = model.generate(**{name: batch[name] for name in ("input_ids", "attention_mask")})
    for row, source in zip(output.tolist(), ([4, 5, 6, EOS], [9, EOS]), strict=True):
        expected = naive.translate(source, beam=5, lenpen=1.0, longest=longest)
        assert row[1 : 1 + len(expected)] == expected


@pytest.mark.parametrize(("beam", "lenpen"), [(1, 1.0), (2, 0.6), (4, 1.0), (5, 2.0)])
def test_translations_are_those_of_fairseqs_beam_search(beam: int, lenpen: float, tmp_path: Path) -> None:
    compared = 0
    for seed in range(3):
        search = {"beam": beam, "lenpen": lenpen, "max_len_b": 12}
        checkpoint, naive = write_checkpoint(tmp_path / str(seed), PRE_NORM, seed=seed, generation=search)
        model: Any = convert_fairseq(checkpoint).model
        assert (model.generation_config.num_beams, model.generation_config.length_penalty) == (beam, lenpen)
        for source in SOURCES:
            expected = naive.translate(source, beam=beam, lenpen=lenpen, longest=12)
            if len(expected) <= 12:  # at the limit fairseq scores the end that it forces, and the library does not
                output = model.generate(input_ids=torch.tensor([source]))
                assert output[0, 1:].tolist() == expected
                compared += 1
    assert compared >= 3


def test_settings_of_generation_are_taken_over_or_named(tmp_path: Path) -> None:
    settings = {"beam": 3, "unnormalized": True, "lenpen": 0.7, "min_len": 2, "max_len_b": 9, "no_repeat_ngram_size": 3}
    converted = convert_fairseq(write_checkpoint(tmp_path / "a", generation=settings)[0])
    config = converted.model.generation_config
    assert (config.num_beams, config.length_penalty, config.early_stopping) == (3, 0.0, True)
    assert (config.min_new_tokens, config.max_new_tokens, config.no_repeat_ngram_size) == (2, 10, 3)
    assert config.suppress_tokens == [PAD]
    assert not any("no counterpart" in note for note in converted.notes)
    converted = convert_fairseq(write_checkpoint(tmp_path / "b", generation={"max_len_a": 1.2, "unkpen": 0.5})[0])
    config = converted.model.generation_config
    assert (config.num_beams, config.length_penalty, config.max_new_tokens) == (5, 1.0, None)
    assert any("no counterpart here: max_len_a=1.2, unkpen=0.5." in note for note in converted.notes)


def to_old_layout(weights: dict[str, torch.Tensor], version: float | None) -> "OrderedDict[str, torch.Tensor]":
    """The names of 2018: joined projections, numbered norms, a matrix for the output."""
    old: OrderedDict[str, torch.Tensor] = OrderedDict()
    encoder_norms = ["self_attn_layer_norm", "final_layer_norm"]
    norms = {"encoder": encoder_norms, "decoder": [encoder_norms[0], "encoder_attn_layer_norm", encoder_norms[1]]}
    for name, weight in weights.items():
        if (found := re.fullmatch(r"(.*_attn\.)q_proj\.(weight|bias)", name)) is not None:
            parts = [weights[f"{found[1]}{projection}_proj.{found[2]}"] for projection in "qkv"]
            old[f"{found[1]}in_proj_{found[2]}"] = torch.cat(parts)
        elif (found := re.fullmatch(r"(encoder|decoder)(\.layers\.\d+\.)(\w+_layer_norm)\.(\w+)", name)) is not None:
            old[f"{found[1]}{found[2]}layer_norms.{norms[found[1]].index(found[3])}.{found[4]}"] = weight
        elif name == "decoder.output_projection.weight":
            old["decoder.embed_out"] = weight
        elif not re.search(r"[kv]_proj|version$|layer_norm\.(weight|bias)$", name) or "embedding" in name:
            old[name] = weight
    if version is not None:
        old |= {f"{side}.version": torch.tensor([version]) for side in ("encoder", "decoder")}
        old |= {name: weight for name, weight in weights.items() if re.match(r"(encoder|decoder)\.layer_norm\.", name)}
    return old


def pretend_package(monkeypatch: pytest.MonkeyPatch, **classes: type) -> None:
    """Lets pickle write objects as if their classes were in a package that is not here."""
    for path, cls in classes.items():
        module, _, cls.__name__ = path.replace("__", ".").rpartition(".")
        cls.__module__, cls.__qualname__ = module, cls.__name__
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        setattr(sys.modules[module], cls.__name__, cls)


@pytest.mark.parametrize("version", [None, 2.0, 3.0])
def test_a_checkpoint_of_2018_is_read(version: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SETTINGS, **PRE_NORM, "relu_dropout": 0.25, "max_positions": 30}
    for name in ("activation_dropout", "activation_fn", "max_source_positions", "max_target_positions"):
        del settings[name]
    weights = make_weights({**SETTINGS, **PRE_NORM}, NUM_SPECIAL + len(WORDS), NUM_SPECIAL + len(TARGET_WORDS))
    old = to_old_layout(weights, version)
    write_dictionaries(tmp_path, target=TARGET_WORDS)

    class Meter:
        def __init__(self) -> None:
            self.sum, self.value = 3.0, np.float64(1.5)

    pretend_package(monkeypatch, fairseq__meters__AverageMeter=Meter)
    state: dict[str, Any] = {"args": Namespace(**settings), "model": old}
    state["optimizer_history"] = [{"best_loss": np.float32(2.5), "num_updates": np.int64(7)}]
    state["extra_state"] = {"train_meters": OrderedDict(loss=Meter())}
    checkpoint = tmp_path / "checkpoint.pt"
    torch.save(state, checkpoint, _use_new_zipfile_serialization=False)
    monkeypatch.undo()  # from here on there is no fairseq, as in the user's process
    converted = convert_fairseq(checkpoint)
    kept = {name: weight for name, weight in weights.items() if version is not None or ".layer_norm." not in name}
    check_logits(converted.model, NaiveFairseq({**SETTINGS, **PRE_NORM}, kept))
    assert converted.model.config.activation_dropout == 0.25
    assert converted.model.config.max_position_embeddings == 30 + PAD + 1
    (note,) = (note for note in converted.notes if "Not in the checkpoint" in note)
    assert "architecture transformer: activation_fn=relu, max_source_positions=30, max_target_positions=30." in note


def test_the_second_copy_in_encoder_layers_is_left_out(tmp_path: Path) -> None:
    checkpoint, naive = write_checkpoint(tmp_path)
    names = [f"{name}_{kind}" for name in ("in_proj", "out_proj", "fc1", "fc2") for kind in ("weight", "bias")]
    copies = {f"encoder.layers.{layer}.{name}": torch.zeros(8) for layer in range(2) for name in names}
    edit(checkpoint, model={**naive.weights, **copies})
    check_logits(convert_fairseq(checkpoint).model, naive)


def test_settings_of_omegaconf_are_read_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, naive = write_checkpoint(tmp_path, {"share_all_embeddings": True}, generation={"beam": 7})

    class Container:
        def __init__(self, content: Any, parent: Any = None) -> None:
            self._metadata: Any = Namespace(ref_type=dict, element_type=int)
            self._parent = parent
            if isinstance(content, dict):
                self._content = {name: wrap(value, self) for name, value in content.items()}

    class Node:
        def __init__(self, value: Any, parent: Any) -> None:
            self._metadata: Any = Namespace(ref_type=float)
            self._parent, self._val = parent, value

    def wrap(value: Any, parent: Any) -> Any:
        return Container(value, parent) if isinstance(value, dict) else Node(value, parent)

    pretend_package(monkeypatch, omegaconf__dictconfig__DictConfig=Container, omegaconf__nodes__AnyNode=Node)
    state = torch.load(checkpoint, weights_only=False)
    settings = vars(state["cfg"]["model"])
    model: dict[str, Any] = {"encoder": {}, "decoder": {}}
    for name, value in settings.items():
        side, _, rest = name.partition("_")
        model.get(side, model)[rest if side in model else name] = value
    state["cfg"] = Container({**state["cfg"], "model": model})
    torch.save(state, checkpoint)
    monkeypatch.undo()
    converted = convert_fairseq(checkpoint)
    check_logits(converted.model, naive)
    assert converted.model.generation_config.num_beams == 7


def test_absent_settings_are_those_of_the_architecture(tmp_path: Path) -> None:
    big = (1024, 4096, 6, 16, 1024, 4096)
    expected = {
        "transformer": (512, 2048, 6, 8, 512, 2048, 0.1, 0.0, False),
        "transformer_tiny": (64, 64, 2, 2, 64, 64, 0.1, 0.0, False),
        "transformer_iwslt_de_en": (512, 1024, 6, 4, 512, 1024, 0.1, 0.0, False),
        "transformer_vaswani_wmt_en_de_big": (*big, 0.3, 0.0, False),
        "transformer_vaswani_wmt_en_fr_big": (*big, 0.1, 0.0, False),
        "transformer_wmt_en_de_big": (*big, 0.3, 0.1, False),
        "transformer_wmt_en_de_big_t2t": (*big, 0.3, 0.1, True),
    }
    for arch, values in expected.items():
        state = {"args": Namespace(arch=arch, dropout=None), "model": {"encoder.version": torch.ones(1)}}
        torch.save(state, tmp_path / "checkpoint.pt")
        read = read_fairseq(tmp_path / "checkpoint.pt")
        names = [f"encoder_{name}" for name in ("embed_dim", "ffn_embed_dim", "layers", "attention_heads")]
        names += ["decoder_embed_dim", "decoder_ffn_embed_dim", "dropout", "attention_dropout"]
        names.append("decoder_normalize_before")
        assert tuple(read.model[name] for name in names) == values
        assert set(names) <= set(read.absent)


def test_a_refusal_names_every_obstacle(tmp_path: Path) -> None:
    flags = ("adaptive_input", "no_cross_attention", "cross_self_attention", "no_token_positional_embeddings")
    changes: dict[str, Any] = dict.fromkeys((*flags, "decoder_learned_pos", "decoder_normalize_before"), True)
    changes |= {"adaptive_softmax_cutoff": "100,200", "quant_noise_pq": 0.1, "encoder_layers_to_keep": "0,2"}
    changes |= {"decoder_output_dim": 6, "activation_fn": "swish"}
    for_training = {"encoder_layerdrop": 0.2}
    with pytest.raises(ConversionError) as error:
        convert_fairseq(write_checkpoint(tmp_path, changes | for_training)[0])
    assert all(name in str(error.value) for name in changes)
    assert str(error.value).count("\n  - ") == len(changes) == 11


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "transformer_align"}, r"arch is 'transformer_align' \(can be: 'transformer', "),
        ({"decoder_embed_dim": 16}, r"encoder_embed_dim is 8 and decoder_embed_dim 16 \(must be the same\)"),
        ({**LEARNED, "max_target_positions": 9}, "do not fit the model"),
        ({"encoder_attention_heads": 3}, r"(?s)no counterpart .*encoder_attention_heads=3 must divide d_model=8"),
        ({"encoder_layers": 3}, "missing:\n    model.encoder.layers.2"),
        ({"encoder_layers": 1}, "no place for:\n    model.encoder.layers.1"),
        ({"encoder_ffn_embed_dim": 7}, r"encoder.layers.0.fc1.weight has the shape \(12, 8\) instead of \(7, 8\)"),
        ({"layernorm_embedding": True}, r"missing:\n    model.encoder.layernorm_embedding.weight \(8,\)"),
        ({"share_decoder_input_output_embed": True}, "lm_head.weight differs from"),
        (PRE_NORM, None),
    ],
)
def test_settings_that_weights_contradict_are_refused(
    changes: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    checkpoint, _ = write_checkpoint(tmp_path, LEARNED if "encoder_learned_pos" in changes else {})
    state = torch.load(checkpoint, weights_only=False)
    vars(state["cfg"]["model"]).update(changes)
    if "max_target_positions" in changes:
        state["model"]["decoder.embed_positions.weight"] = state["model"]["decoder.embed_positions.weight"][:11]
        message = "encoder and decoder have learned 22 and 11 positions"
    torch.save(state, checkpoint)
    if message is None:  # pre-norm without last norms, as until August 2018
        assert convert_fairseq(checkpoint).model.config.add_final_layer_norm is False
        return
    with pytest.raises(ConversionError, match=message):
        convert_fairseq(checkpoint)


def test_a_norm_at_the_end_of_one_side_only_and_other_tasks_are_refused(tmp_path: Path) -> None:
    checkpoint, naive = write_checkpoint(tmp_path, {**PRE_NORM, "no_decoder_final_norm": True})
    edit(checkpoint, model={name: w for name, w in naive.weights.items() if "decoder.layer_norm" not in name})
    cfg = torch.load(checkpoint, weights_only=False)["cfg"]
    edit(checkpoint, cfg={**cfg, "task": {"_name": "translation_multi_simple_epoch"}})
    with pytest.raises(
        ConversionError, match=r"(?s)task is 'translation_multi_.* only one of encoder and decoder ends"
    ):
        convert_fairseq(checkpoint)


def test_files_that_are_no_checkpoints_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint, _ = write_checkpoint(tmp_path)
    state = torch.load(checkpoint, weights_only=False)
    cases: list[tuple[Any, str]] = [
        ({**state, "cfg": {**state["cfg"], "model": Bomb()}}, r"holds more than weights: it needs .*mkdir"),
        (state["model"], "is no checkpoint of fairseq's, which is a dictionary with the entry 'model'"),
        ({"model": state["model"]}, r"holds weights and no settings .* it has 'model' only"),
        ({**state, "model": []}, "its entry 'model', is no state dict"),
        ({**state, "model": {"weight": torch.ones(2)}}, "cannot be read (?s:.*)encoder.embed_tokens.weight is missing"),
        ([state], "is no checkpoint of fairseq's"),
        ({**state, "extra_state": Bomb()}, r"holds more than weights: it needs .*mkdir"),
    ]
    for written, message in cases:
        torch.save(written, checkpoint)
        with pytest.raises(ConversionError, match=message):
            convert_fairseq(checkpoint)
    torch.save(cases[-1][0], checkpoint, _use_new_zipfile_serialization=False)
    with pytest.raises(ConversionError, match=r"holds more than weights: it needs .*mkdir"):
        convert_fairseq(checkpoint)
    assert not Path("exploded").exists()


@pytest.mark.parametrize("is_archive", [True, False])
def test_damaged_files_are_refused_wherever_the_damage_is(is_archive: bool, tmp_path: Path) -> None:
    checkpoint, _ = write_checkpoint(tmp_path)
    torch.save(torch.load(checkpoint, weights_only=False), checkpoint, _use_new_zipfile_serialization=is_archive)
    content, chooser = checkpoint.read_bytes(), random.Random(0)
    for _ in range(25):
        checkpoint.write_bytes(content[: chooser.randrange(len(content))])
        with pytest.raises(ConversionError):
            convert_fairseq(checkpoint)
    for _ in range(25):  # a changed byte may also be one of a number, which no reader can know
        changed = bytearray(content)
        changed[chooser.randrange(min(len(content), 4000))] = chooser.randrange(256)
        checkpoint.write_bytes(changed)
        with contextlib.suppress(ConversionError):
            convert_fairseq(checkpoint)


def test_dictionaries_that_are_missing_or_of_another_model_are_refused(tmp_path: Path) -> None:
    checkpoint, _ = write_checkpoint(tmp_path)
    with pytest.raises(ConversionError, match=r"lacks dict.fr.txt \(there: dict.de.txt, dict.en.txt\)"):
        convert_fairseq(checkpoint, target_lang="fr")
    with pytest.raises(ConversionError, match=r"lacks dict.de.txt and dict.en.txt \(there: no dictionary\)"):
        convert_fairseq(checkpoint, dictionaries=tmp_path / "elsewhere")
    edit(checkpoint, cfg={**torch.load(checkpoint, weights_only=False)["cfg"], "task": {}})
    with pytest.raises(ConversionError, match="does not say its languages: give source_lang and target_lang"):
        convert_fairseq(checkpoint)
    write_dictionaries(tmp_path / "other", ["one"])
    with pytest.raises(ConversionError) as error:
        convert_fairseq(checkpoint, dictionaries=tmp_path / "other", source_lang="de", target_lang="en")
    assert "dict.de.txt makes 5 tokens, the four special ones included, and encoder.embed_" in str(error.value)
    assert "decoder.embed_tokens.weight has 13" in str(error.value)
    checkpoint, _ = write_checkpoint(tmp_path / "shared", {"share_all_embeddings": True})
    write_dictionaries(tmp_path / "shared", target=WORDS[::-1])
    with pytest.raises(ConversionError, match="the model has one vocabulary"):
        convert_fairseq(checkpoint)


@pytest.mark.parametrize("sharing", ["share_all_embeddings", "share_decoder_input_output_embed", None])
def test_tokens_beyond_the_dictionary_are_unknown_to_the_model(sharing: str | None, tmp_path: Path) -> None:
    settings = {**SETTINGS, **({sharing: True} if sharing else {})}
    shared = sharing == "share_all_embeddings"
    target = PIECES if shared else [*PIECES, "aba@@"]
    checkpoint, _ = write_checkpoint(tmp_path, settings)
    sizes = [NUM_SPECIAL + len(PIECES), NUM_SPECIAL + len(target)]
    weights = make_weights(settings, *sizes)
    edit(checkpoint, model=weights)
    write_dictionaries(tmp_path, PIECES, target)
    converted = convert_fairseq(checkpoint, codes=write_codes(tmp_path / "codes"))
    tokenizer: Any = converted.tokenizer
    missing = [len(tokenizer) - sizes[0], tokenizer.target_vocab_size - sizes[1]]
    assert missing == ([2, 2] if shared else [2, 1])
    assert converted.model.config.target_vocab_size == tokenizer.target_vocab_size
    numbers = "2" if shared else "2 of the source, 1 of the target"
    assert any(f"which only the tokenizer needs: {numbers}." in note for note in converted.notes)
    naive = NaiveFairseq(settings, weights)
    source = tokenizer("abab ccb ababc").input_ids
    loaded = AutoTokenizer.from_pretrained(converted.save(tmp_path / "converted"))
    assert loaded("abab ccb ababc").input_ids == source
    assert len(loaded) == converted.model.config.vocab_size
    assert max(source) >= sizes[0]
    ids = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([[EOS, 5, UNK]])}
    logits = logits_of(converted.model, **ids)
    seen = [UNK if index >= sizes[0] else index for index in source]
    expected = naive.logits(seen, [EOS, 5, UNK])
    assert_close(logits[0, :, : sizes[1]].double(), expected)
    assert_close(logits[0].double().log_softmax(dim=-1)[:, : sizes[1]], expected.log_softmax(dim=-1))
    assert_close(logits[0, :, sizes[1] :], (logits[0, :, UNK] + UNLIKELY)[:, None].expand(-1, missing[1]))


def test_sentencepiece_cuts_texts_and_the_dictionary_numbers_them(tmp_path: Path) -> None:
    text = ["ein mann fährt rad", "eine frau fährt auto", "zwei männer fahren mit dem rad", "das auto fährt schnell"]
    options: dict[str, Any] = {"vocab_size": 32, "minloglevel": 2}
    train: Any = sentencepiece.SentencePieceTrainer.train
    train(sentence_iterator=iter(text * 20), model_prefix=str(tmp_path / "cut"), **options)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "cut.model"))
    pieces = [processor.id_to_piece(index) for index in range(3, 32)]
    absent = next(piece for piece in pieces if piece in processor.encode(text[0], out_type=str) and len(piece) > 1)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *sorted(set(pieces) - {absent}), "madeupword0000"]
    checkpoint, _ = write_checkpoint(tmp_path, {"share_all_embeddings": True})
    edit(checkpoint, model=make_weights({**SETTINGS, "share_all_embeddings": True}, len(tokens), len(tokens)))
    write_dictionaries(tmp_path, tokens[NUM_SPECIAL:])
    converted = convert_fairseq(checkpoint, sentencepiece_model=tmp_path / "cut.model")
    tokenizer: Any = converted.tokenizer
    assert len(tokenizer) == converted.model.config.vocab_size == len(tokens) + 1
    for sentence in [*text, "Ein Männerauto, 日本"]:
        cut = processor.encode(sentence, out_type=str)
        expected = [tokens.index(piece) if piece in tokens else UNK for piece in cut] + [EOS]
        assert [UNK if index >= len(tokens) else index for index in tokenizer(sentence).input_ids] == expected
    assert max(tokenizer(text[0]).input_ids) == len(tokens)
    assert any("which only the tokenizer needs: 1." in note for note in converted.notes)


def test_files_that_cut_texts_must_belong_together(tmp_path: Path) -> None:
    checkpoint, _ = write_checkpoint(tmp_path)
    for files, message in (
        ({"target_codes": "it"}, "target_codes is given without codes"),
        ({"codes": "it", "target_sentencepiece_model": "it"}, "target_sentencepiece_model is given without sentence"),
        ({"codes": "it", "sentencepiece_model": "it"}, "not by both"),
    ):
        with pytest.raises(ConversionError, match=message):
            convert_fairseq(checkpoint, **files)
    one, _ = write_checkpoint(tmp_path / "one", {"share_all_embeddings": True})
    with pytest.raises(ConversionError, match="one dictionary, and so one sentencepiece model"):
        convert_fairseq(one, sentencepiece_model="it", target_sentencepiece_model="other")


def test_label_smoothing_is_that_of_the_criterion_or_among_the_arguments(tmp_path: Path) -> None:
    checkpoint, _ = write_checkpoint(tmp_path)
    state = torch.load(checkpoint, weights_only=False)
    for criterion, expected in ((None, 0.0), ({"_name": "label_smoothed_cross_entropy", "label_smoothing": 0.1}, 0.1)):
        edit(checkpoint, cfg={**state["cfg"], "criterion": criterion})
        assert convert_fairseq(checkpoint).model.config.label_smoothing == expected
    model = Namespace(**vars(state["cfg"]["model"]), label_smoothing=0.2)
    edit(checkpoint, cfg={**state["cfg"], "model": model})
    assert convert_fairseq(checkpoint).model.config.label_smoothing == 0.2
