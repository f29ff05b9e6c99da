"""JoeyNMT's folders, in the layout that its version 2 writes: what the model computes, and what is refused."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from sister_systems import RandomWeights, Stack, Weights, linear, sinusoids
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.conversion.systems import joeynmt
from vanilla_transformer.conversion.systems.joeynmt import convert_joeynmt

SPECIALS = ["<unk>", "<pad>", "<s>", "</s>"]
SOURCE = [*SPECIALS, "ein", "Hund", "läuft", "schnell", "▁"]
TARGET = [*SPECIALS, "a", "dog", "▁runs", "ru@@", "ns"]
D, FFN, EPS = 8, 12, 1e-6

STACK: dict[str, Any] = {"type": "transformer", "num_layers": 2, "num_heads": 2, "hidden_size": D, "ff_size": FFN}
STACK |= {"dropout": 0.2, "layer_norm": "post", "embeddings": {"embedding_dim": D, "scale": True, "dropout": 0.0}}
SETTINGS: dict[str, Any] = {
    "data": {"src": {"lang": "de", "level": "word"}, "trg": {"lang": "en", "level": "word"}},
    "model": {"tied_embeddings": False, "tied_softmax": False, "encoder": STACK, "decoder": copy.deepcopy(STACK)},
    "training": {"label_smoothing": 0.1},
    "testing": {"beam_size": 5, "beam_alpha": 0.7},
}


def change(settings: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Sets options such as "model.encoder.num_layers", "both" meaning encoder and decoder; "drop" takes one away."""
    changed = copy.deepcopy(settings)
    for name, value in options.items():
        for stack in ("encoder", "decoder") if "both" in name else ("",):
            *sections, last = name.replace("both", stack).split(".")
            section = changed
            for each in sections:
                section = section.setdefault(each, {})
            if value == "drop":
                del section[last]
            else:
                section[last] = value
    return changed


def make_stacks(model: dict[str, Any], weights: Any) -> dict[str, Stack]:
    """Encoder and decoder: norm(x + f(x)), or x + f(norm(x)) and one more norm at the end."""
    activations = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "swish": torch.nn.functional.silu}
    same: dict[str, Any] = {"projections": [f"{part}_layer" for part in ("q", "k", "v", "output")], "eps": EPS}
    same["feed_forward"] = ("feed_forward.pwff_layer.0", "feed_forward.pwff_layer.3")
    stacks = {}
    for side, attentions, norms in (
        ("encoder", ["src_src_att"], ["layer_norm"]),
        ("decoder", ["trg_trg_att", "src_trg_att"], ["x_layer_norm", "dec_layer_norm"]),
    ):
        settings, pre_norm = model[side], model[side].get("layer_norm") == "pre"
        names: dict[str, Any] = {"attentions": attentions, "norms": [*norms, "feed_forward.layer_norm"]}
        names |= {"last_norm": f"{side}.layer_norm" if pre_norm else None, "pre_norm": pre_norm}
        names["activation"] = activations.get(settings.get("activation", "relu"))
        names |= {"layers": settings["num_layers"], "heads": settings["num_heads"]}
        stacks[side] = Stack(weights, f"{side}.layers", **names, **same)
    return stacks


def make_weights(settings: dict[str, Any], source: list[str], target: list[str]) -> dict[str, torch.Tensor]:
    model, weights = settings["model"], RandomWeights(D)
    for side, stack in make_stacks(model, weights).items():
        weights[f"{side}.pe.pe"] = sinusoids("sinusoidal", 20, D).float()[None]
        stack.draw(FFN)
    weights["src_embed.lut.weight"] = weights.draw(len(source), D)
    weights["trg_embed.lut.weight"] = weights.draw(len(target), D)
    if model["tied_embeddings"]:
        weights["trg_embed.lut.weight"] = weights["src_embed.lut.weight"]
    weights["decoder.output_layer.weight"] = weights.draw(len(target), D)
    if model["tied_softmax"]:
        weights["decoder.output_layer.weight"] = weights["trg_embed.lut.weight"]
    return weights


def write(folder: Path, options: Any = None, *, source: Any = SOURCE, target: Any = TARGET) -> dict[str, torch.Tensor]:
    settings = change(SETTINGS, options or {})
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    for name, tokens in (("src_vocab.txt", source), ("trg_vocab.txt", target)):
        (folder / name).write_text("".join(f"{token}\n" for token in tokens), encoding="utf-8")
    weights = make_weights(settings, source, target)
    torch.save({"model_state": dict(weights), "optimizer_state": {}, "stats_state": {"steps": 3}}, folder / "3.ckpt")
    return weights


def compute(model: dict[str, Any], weights: Weights, source: list[int], target: list[int]) -> torch.Tensor:
    def embed(side: str, stack: str, ids: list[int]) -> torch.Tensor:
        scale = D**0.5 if model[stack]["embeddings"]["scale"] else 1.0
        return weights[f"{side}_embed.lut.weight"].double()[ids] * scale + sinusoids("sinusoidal", len(ids), D)

    stacks = make_stacks(model, weights)
    memory = stacks["encoder"].run(embed("src", "encoder", source))
    x = stacks["decoder"].run(embed("trg", "encoder" if model["tied_embeddings"] else "decoder", target), memory)
    return linear(weights, "decoder.output_layer", x)


SENTENCES = [(["ein", "Hund", "läuft"], ["a", "dog"]), (["schnell"], ["ru@@", "ns"])]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model.both.layer_norm": "pre", "model.tied_softmax": True, "model.both.embeddings.scale": False},
        {"model.both.activation": "gelu", "model.encoder.num_layers": 1, "model.decoder.num_layers": 3},
        {"model.both.activation": "swish", "model.encoder.num_heads": 4},
        {"shared": True, "model.tied_embeddings": True, "model.tied_softmax": True},
        # Of tied embeddings the encoder's scale counts.
        {"shared": True, "model.tied_embeddings": True, "model.decoder.embeddings.scale": False},
        {"shared": True, "model.both.layer_norm": "pre"},
    ],
)
def test_it_computes_what_the_original_does(options: dict[str, Any], tmp_path: Path) -> None:
    options = dict(options)
    target_tokens = [*SOURCE, *TARGET[4:]] if options.pop("shared", False) else TARGET
    source_tokens = target_tokens if len(target_tokens) > len(TARGET) else SOURCE
    weights = write(tmp_path, options, source=source_tokens, target=target_tokens)
    model = change(SETTINGS, options)["model"]
    converted = convert_joeynmt(tmp_path)
    tokenizer = converted.tokenizer
    assert tokenizer is not None
    assert tokenizer.separate_vocabs == (source_tokens is not target_tokens)
    batch = tokenizer([" ".join(words) for words, _ in SENTENCES], padding=True, return_tensors="pt")
    for row, (words, translation) in enumerate(SENTENCES):
        source = [source_tokens.index(word) for word in [*words, "</s>"]]
        target = [target_tokens.index(word) for word in ["<s>", *translation]]
        expected = compute(model, weights, source, target)
        with torch.no_grad():
            ids = torch.tensor([target] * len(SENTENCES))
            logits = converted.model(**batch, decoder_input_ids=ids).logits[row]
        torch.testing.assert_close(logits, expected.float(), rtol=1e-5, atol=1e-5)


def test_all_of_it_is_saved_and_found_again(tmp_path: Path) -> None:
    options = {"data.trg.level": "bpe", "data.trg.tokenizer_type": "subword-nmt", "data.src.lowercase": True}
    write(tmp_path / "model", {**options, "testing.repetition_penalty": 1.5, "testing.no_repeat_ngram_size": 3})
    converted = convert_joeynmt(tmp_path / "model" / "3.ckpt")
    for part in (
        "level: word, lowercase",
        "the target (level: bpe, tokenizer_type: subword-nmt)",
        "testing.repetition_penalty",
        "testing.no_repeat_ngram_size",
    ):
        assert part in " ".join(converted.notes)
    config = converted.model.config
    assert (config.dropout, config.activation_dropout, config.attention_dropout) == (0.2, 0.2, 0.2)
    assert (config.label_smoothing, config.langs, config.layer_norm_eps) == (0.1, ["de", "en"], 1e-6)
    folder = converted.save(tmp_path / "saved")
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["ein Hund", "Katze"], text_target=["a dog", "ru@@ ns"], padding=True)
    assert (batch["input_ids"], batch["labels"]) == ([[4, 5, 3], [0, 3, 1]], [[4, 5, 3], [7, 8, 3]])
    assert tokenizer.decode([5, 7, 8, 3], skip_special_tokens=True) == "dog runs"
    inputs = tokenizer(["ein Hund"], return_tensors="pt")
    original: Any = converted.model
    assert torch.equal(model.generate(**inputs), original.generate(**inputs))


@pytest.mark.parametrize(
    ("testing", "search"),
    [
        (SETTINGS["testing"], [5, 0.7, "gnmt", 1, None, [1, 2]]),
        ({"alpha": 1, "beam_size": 2, "max_output_length": 9, "min_output_length": 3}, [2, 1.0, "gnmt", 3, 9, [1, 2]]),
        ({"beam_size": 2, "generate_unk": False}, [2, 0.0, "gnmt", 1, None, [0, 1, 2]]),
        ({"beam_size": 5, "beam_alpha": 1.5}, [5, 1.5, "gnmt", 1, None, [1, 2]]),
        ({"beam_size": 5, "alpha": 2}, [5, 2.0, "gnmt", 1, None, [1, 2]]),
        ("drop", [None, None, None, 1, None, [1, 2]]),
    ],
)
def test_the_search_is_that_of_the_section_testing(testing: Any, search: list[Any], tmp_path: Path) -> None:
    write(tmp_path, {"testing": testing})
    converted = convert_joeynmt(tmp_path)
    names = ("num_beams", "length_penalty", "length_penalty_type", "min_new_tokens", "max_new_tokens")
    found = converted.model.generation_config
    assert [getattr(found, name, None) for name in (*names, "suppress_tokens")] == search
    noted = any("JoeyNMT ends when each place in the beam has held" in note for note in converted.notes)
    assert noted == ((search[1] or 0) > 1), "longer translations win"
    assert any("no testing.max_output_length" in note for note in converted.notes) == (search[4] is None)
    converted.save(tmp_path / "saved")  # the library refuses settings that contradict each other


@pytest.mark.parametrize(
    ("options", "joined"),
    [
        ({}, "dog ▁runs ru@@ ns"),
        ({"level": "bpe"}, "dog runsru@@ns"),
        ({"level": "char"}, "dog runsru@@ns"),
        ({"level": "bpe", "tokenizer_type": "subword-nmt"}, "dog ▁runs runs"),
        ({"level": "bpe", "bpe_type": "x", "tokenizer_cfg.separator": "g"}, "do▁runs ru@@ ns"),
    ],
)
def test_words_are_put_together_as_they_were_cut(options: dict[str, Any], joined: str, tmp_path: Path) -> None:
    write(tmp_path, {f"data.trg.{name}": value for name, value in options.items()})
    tokenizer = convert_joeynmt(tmp_path).tokenizer
    assert tokenizer is not None
    assert tokenizer.decode([5, 6, 7, 8, 3], skip_special_tokens=True) == joined


def test_special_tokens_have_the_names_of_the_configuration(tmp_path: Path) -> None:
    symbols = {"unk_token": "UNK", "pad_token": "PAD", "bos_token": "BOS", "eos_token": "EOS", "lang_tags": ["<de>"]}
    names = ["UNK", "PAD", "BOS", "EOS", "<de>"]
    options = {"data.special_symbols": symbols}
    write(tmp_path, options, source=[*names, *SOURCE[4:]], target=[*names, *TARGET[4:]])
    # JoeyNMT adds special tokens that a file lacks, and leaves out what it has read already.
    (tmp_path / "trg_vocab.txt").write_text("\n".join([*TARGET[4:], *TARGET[4:]]), encoding="utf-8")
    converted = convert_joeynmt(tmp_path)
    assert converted.model.config.decoder_vocab_size == len(names) + len(TARGET[4:])
    assert converted.tokenizer is not None
    assert converted.tokenizer(["<de> ein"], text_target=["a"])["labels"] == [[5, 3]]
    assert converted.model.generation_config.suppress_tokens == [1, 2, 4]


def test_the_best_checkpoint_is_taken_or_else_the_latest(tmp_path: Path) -> None:
    write(tmp_path)
    content = torch.load(tmp_path / "3.ckpt")
    for name, value in (("20.ckpt", 20.0), ("latest.ckpt", 21.0), ("best.ckpt", 22.0)):
        content["model_state"]["encoder.layers.0.layer_norm.bias"].fill_(value)
        torch.save(content, tmp_path / name)
        converted = convert_joeynmt(tmp_path)
        assert name in converted.source
        assert converted.model.model.encoder.layers[0].self_attn_layer_norm.bias[0] == value
    assert "20.ckpt" in convert_joeynmt(tmp_path / "20.ckpt").source


def test_every_unsupported_setting_is_named_at_once(tmp_path: Path) -> None:
    options: dict[str, Any] = {"encoder.type": "recurrent", "encoder.layer_norm": "drop"}
    options |= {"decoder.layer_norm": "middle"}
    options |= {"both.activation": "tanh", "both.alpha": 1.5, "encoder.hidden_size": 4, "encoder.embeddings": {}}
    options = {f"model.{name}": value for name, value in options.items()}
    options["data.special_symbols"] = {"sep_token": "<sep>", "sep_id": 4}
    write(tmp_path, options)
    with pytest.raises(ConversionError) as error:
        convert_joeynmt(tmp_path)
    message = str(error.value)
    parts = ["encoder: type is 'recurrent'", "encoder: without layer_norm", "encoder: activation is 'tanh'"]
    parts += ["decoder: layer_norm is 'middle' (can be: 'pre', 'post')", "decoder: alpha is 1.5"]
    parts += ["hidden_size is 4 in the encoder and 8 in the decoder", "data.special_symbols.sep_token is given"]
    parts += ["embeddings.scale is False in the encoder and True in the decoder"]
    assert [part for part in parts if part not in message] == []
    assert len(message.splitlines()) == 11  # each once, and the first line
    write(tmp_path, {"model.encoder.layer_norm": "pre"})
    with pytest.raises(ConversionError, match="layer_norm is 'pre' in the encoder and 'post' in the decoder"):
        convert_joeynmt(tmp_path)


def test_folders_that_are_no_trainings(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"no checkpoint \(\*\.ckpt\) in it"):
        convert_joeynmt(tmp_path)
    for name in ("config.yaml", "src_vocab.txt", "trg_vocab.txt"):
        write(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(ConversionError, match=f"{name}, .* model.*, cannot be read"):
            convert_joeynmt(tmp_path)
    absent = "no section trg in data\n.*no section decoder in model"
    texts = {"": "there is no section data\n.*there is no section model", "data: [": "cannot be read"}
    texts |= {"data: {src: {}}\nmodel: {encoder: {}}": absent, "- data": "no section data"}
    without_embeddings = yaml.safe_dump(change(SETTINGS, {"model.decoder.embeddings": 3}))
    texts |= {without_embeddings: r"config\.yaml is no .*\n  - there is no section embeddings in model\.decoder"}
    numbers = {"testing.beam_size": "5", "testing.beam_alpha": None, "data.special_symbols": ["<s>"]}
    strange = r"beam_size is '5'.*\n.*beam_alpha is None.*\n.*special_symbols is \['<s>'\] \(can be: names"
    texts |= {yaml.safe_dump(change(SETTINGS, numbers)): strange}
    tags = yaml.safe_dump(change(SETTINGS, {"data.special_symbols": {"lang_tags": None}}))
    texts |= {tags: r"lang_tags is None \(can be: a list\)"}
    texts |= {"[" * 600: r"config\.yaml, the model's configuration, cannot be read"}
    write(tmp_path)
    for text, message in texts.items():
        (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(ConversionError, match=message):
            convert_joeynmt(tmp_path)
    weights = write(tmp_path)
    weights["decoder.pe.pe"] = weights["decoder.pe.pe"].flip(1)
    other_positions = {"model_state": dict(weights)}
    for content, message in (
        (other_positions, r"r\.pe\.pe is not the table"),
        ({"state": {}}, "no entry 'model_state'"),
    ):
        torch.save(content, tmp_path / "3.ckpt")
        with pytest.raises(ConversionError, match=message):
            convert_joeynmt(tmp_path)


def test_line_breaks_of_unicode_are_tokens(tmp_path: Path) -> None:
    path = tmp_path / "vocabulary.txt"
    path.write_bytes("a\n\u2028\n\x85\nb\r\n".encode())
    symbols = SimpleNamespace(**{f"{name}_token": f"<{name}>" for name in joeynmt.SYMBOLS}, lang_tags=[])
    assert joeynmt._read_vocabulary(path, symbols)[len(joeynmt.SYMBOLS) :] == ["a", "\u2028", "\x85", "b"]
