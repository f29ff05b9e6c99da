"""JoeyNMT 2: Transformers in the folder of a training, with its `config.yaml`, vocabularies and checkpoints.

Its Transformer is post- or pre-LN, has a bias in every linear map but the output layer, and an epsilon of 1e-6. Sources
end with `</s>`; translations start with `<s>` and end with `</s>`.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from transformers import GenerationConfig

from vanilla_transformer.conversion.converted import ConvertedModel, build_model
from vanilla_transformer.conversion.errors import ConversionError, find_differences, refuse
from vanilla_transformer.conversion.tokenizers.vocabularies import make_word_tokenizer
from vanilla_transformer.conversion.weights import (
    Rule,
    check_sinusoids,
    check_weights,
    make_config,
    module_rules,
    read_checkpoint,
)
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig

# What the configuration means where it says nothing, and what else it may say.
SYMBOLS = {"unk": "<unk>", "pad": "<pad>", "bos": "<s>", "eos": "</s>"}  # in the order of their ids
ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "swish": "silu"}
_STACKS = ("encoder", "decoder")
_DEFAULTS: dict[str, dict[str, Any]] = {
    "encoder": {"type": "recurrent", "num_layers": 8, "num_heads": 4},
    "decoder": {"type": "transformer", "num_layers": 4, "num_heads": 8, "layer_norm": "post"},
}
_COMMON_DEFAULTS = {"hidden_size": 512, "ff_size": 2048, "dropout": 0.1, "activation": "relu", "alpha": 1.0}
_SETTINGS: dict[str, tuple[object, ...]] = {
    "type": ("transformer",),
    "layer_norm": ("pre", "post"),
    "activation": tuple(ACTIVATIONS),
    "alpha": (1.0,),  # what the residual is multiplied by
}

_RULES = (
    Rule(r"(?:encoder|decoder)\.pe\.pe", (), check=partial(check_sinusoids, kind="sinusoidal")),
    *module_rules(
        {
            r"src_embed\.lut": "model.encoder.embed_tokens",
            r"trg_embed\.lut": "model.decoder.embed_tokens",
            r"(encoder|decoder)\.layer_norm": r"model.\1.layer_norm",
            r"decoder\.output_layer": "lm_head",
        }
    ),
    *module_rules(
        {
            r"(?:src_src|trg_trg)_att\.([kvq])_layer": r"self_attn.\3_proj",
            r"(?:src_src|trg_trg)_att\.output_layer": "self_attn.out_proj",
            r"src_trg_att\.([kvq])_layer": r"encoder_attn.\3_proj",
            r"src_trg_att\.output_layer": "encoder_attn.out_proj",
            r"(?:x_)?layer_norm": "self_attn_layer_norm",
            r"dec_layer_norm": "encoder_attn_layer_norm",
            r"feed_forward\.layer_norm": "final_layer_norm",
            **{rf"feed_forward\.pwff_layer\.{index}": name for index, name in ((0, "fc1"), (3, "fc2"))},
        },
        theirs=r"(encoder|decoder)\.layers\.(\d+)\.",
        ours=r"model.\1.layers.\2.",
    ),
)


def convert_joeynmt(path: str | os.PathLike[str]) -> ConvertedModel:
    """Converts a Transformer that JoeyNMT 2 trained.

    Args:
        path: The folder of the training, of which the best checkpoint is taken, or else the latest; or one of the
            checkpoints in it. `config.yaml`, `src_vocab.txt` and `trg_vocab.txt` lie beside the checkpoint.
    """
    checkpoint = _find_checkpoint(Path(path))
    source = f"the JoeyNMT model {checkpoint.parent.resolve().name}/{checkpoint.name}"
    settings = read_settings(checkpoint.parent / "config.yaml")
    encoder, decoder = _check_settings(settings, source)
    symbols = read_symbols(settings)
    tokens, target = (_read_vocabulary(checkpoint.parent / f"{side}_vocab.txt", symbols) for side in ("src", "trg"))
    target_tokens = None if target == tokens else target
    specials = {name: getattr(symbols, f"{name}_token") for name in SYMBOLS}
    tokenizer = make_word_tokenizer(tokens, target_tokens=target_tokens, **specials, joiner=_find_joiner(settings))
    content = read_checkpoint(checkpoint)
    if not isinstance(content, Mapping) or "model_state" not in content:
        raise ConversionError(f"{checkpoint} is no checkpoint of JoeyNMT: it has no entry 'model_state'.")
    weights = check_weights(content["model_state"], checkpoint, "its entry 'model_state'")
    config = make_config(
        source,
        vocab_size=len(tokens),
        decoder_vocab_size=target_tokens and len(target_tokens),
        langs=[settings["data"][side].get("lang") for side in ("src", "trg")],
        label_smoothing=settings["training"].get("label_smoothing", 0.0),
        decoder_start_token_id=tokens.index(symbols.bos_token),
        **{f"{name}_token_id": tokens.index(specials[name]) for name in ("bos", "pad", "eos")},
        **_translate_settings(settings["model"], encoder, decoder),
    )
    generation_config, notes = _translate_search(settings["testing"], config, tokens, symbols)
    model = build_model(config, weights, _RULES, source=source, generation_config=generation_config)
    notes = [_describe_tokens(settings["data"]), *notes]
    return ConvertedModel(source=source, model=model, tokenizer=tokenizer, notes=tuple(notes))


def _find_checkpoint(path: Path) -> Path:
    if not path.is_dir():
        return path
    numbered = sorted((file for file in path.glob("*.ckpt") if file.stem.isdecimal()), key=lambda file: int(file.stem))
    found = [file for file in (path / "best.ckpt", path / "latest.ckpt", *reversed(numbered)) if file.is_file()]
    if not found:
        raise ConversionError(f"{path} is no folder of a training with JoeyNMT: there is no checkpoint (*.ckpt) in it.")
    return found[0]


def read_settings(path: Path) -> dict[str, Any]:
    """Returns the four sections of a `config.yaml` that say what a model is."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConversionError(f"{path}, the model's configuration, cannot be read: {error}") from error
    sections: dict[str, Any] = {"data": None, "model": None, "training": {}, "testing": {}}
    found = sections | settings if isinstance(settings, dict) else {}
    places = [("data", "src"), ("data", "trg"), ("model", "encoder"), ("model", "decoder")]
    reasons = [f"there is no section {name}" for name in sections if not isinstance(found.get(name), dict)]
    reasons += [
        f"there is no section {name} in {section}"
        for section, name in places
        if isinstance(found.get(section), dict) and not isinstance(found[section].get(name), dict)
    ]
    reasons += [
        f"there is no section embeddings in model.{name}"
        for name in _STACKS
        if not reasons and not isinstance(found["model"][name].get("embeddings"), dict)
    ]
    reasons += _find_strange_values(found) if not reasons else []
    refuse(f"{path} is no configuration of JoeyNMT", reasons)
    return found


def _find_strange_values(settings: Mapping[str, Any]) -> list[str]:
    """Names what is of another type than the search and the special tokens need."""
    testing, symbols = settings["testing"], settings["data"].get("special_symbols") or {}
    numbers = ["beam_size", "alpha", "beam_alpha", "min_output_length", "max_output_length"]
    numbers += ["repetition_penalty", "no_repeat_ngram_size"]
    reasons = [
        f"testing.{name} is {testing[name]!r} (can be: a number)"
        for name in numbers
        if name in testing and not isinstance(testing[name], int | float)
    ]
    if not isinstance(symbols, dict):
        reasons.append(f"data.special_symbols is {symbols!r} (can be: names and tokens)")
    elif not isinstance(symbols.get("lang_tags", []), list):
        reasons.append(f"data.special_symbols.lang_tags is {symbols['lang_tags']!r} (can be: a list)")
    return reasons


def _check_settings(settings: Mapping[str, Any], source: str) -> list[SimpleNamespace]:
    """Returns the encoder's and the decoder's settings, completed, if they can be converted."""
    given = [{**_COMMON_DEFAULTS, **_DEFAULTS[name], **settings["model"][name]} for name in _STACKS]
    stacks = [SimpleNamespace(**options) for options in given]
    reasons = []
    for name, stack in zip(_STACKS, stacks, strict=True):
        wanted = {option: values for option, values in _SETTINGS.items() if hasattr(stack, option)}
        reasons += [f"{name}: {difference}" for difference in find_differences(stack, wanted)]
    if not hasattr(stacks[0], "layer_norm"):
        reasons.append("encoder: without layer_norm JoeyNMT puts norms first, and none at the end")
    for name in ("hidden_size", "layer_norm", "activation"):
        values = [getattr(stack, name, None) for stack in stacks]
        if values[0] not in (None, values[1]):
            reasons.append(f"{name} is {values[0]!r} in the encoder and {values[1]!r} in the decoder")
    scales = [stack.embeddings.get("scale", False) for stack in stacks]
    if scales[0] != scales[1] and not settings["model"].get("tied_embeddings"):
        reasons.append(f"embeddings.scale is {scales[0]!r} in the encoder and {scales[1]!r} in the decoder")
    if (settings["data"].get("special_symbols") or {}).get("sep_token"):
        reasons.append("data.special_symbols.sep_token is given: prompts have embeddings of their own")
    refuse(f"The settings of {source} are not those of the paper's Transformer", reasons)
    return stacks


def read_symbols(settings: Mapping[str, Any]) -> SimpleNamespace:
    """Returns the special tokens by the names that JoeyNMT has for them."""
    given = settings["data"].get("special_symbols") or {}
    tokens = {f"{name}_token": token for name, token in SYMBOLS.items()}
    return SimpleNamespace(**{**tokens, "lang_tags": [], **given})


def _read_vocabulary(path: Path, symbols: SimpleNamespace) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")  # other line breaks may be tokens
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"{path}, a vocabulary of the model, cannot be read: {error}") from error
    specials = [getattr(symbols, f"{name}_token") for name in SYMBOLS]
    return list(dict.fromkeys([*specials, *symbols.lang_tags, *lines]))


def _translate_settings(model: Mapping[str, Any], encoder: SimpleNamespace, decoder: SimpleNamespace) -> dict[str, Any]:
    sizes = {"layers": "num_layers", "attention_heads": "num_heads", "ffn_dim": "ff_size"}
    stacks = {"encoder": encoder, "decoder": decoder}
    return {
        **{f"{name}_{ours}": getattr(stack, sizes[ours]) for name, stack in stacks.items() for ours in sizes},
        "d_model": encoder.hidden_size,
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), encoder.dropout),
        "activation_function": ACTIVATIONS[encoder.activation],
        "attention_bias": True,
        "normalize_before": encoder.layer_norm == "pre",
        "layer_norm_eps": 1e-6,
        "scale_embedding": encoder.embeddings.get("scale", False),
        "share_encoder_decoder_embeddings": model.get("tied_embeddings", False),
        "tie_word_embeddings": model.get("tied_softmax", False),
    }


def _translate_search(
    testing: Mapping[str, Any], config: VanillaTransformerConfig, tokens: list[str], symbols: SimpleNamespace
) -> tuple[GenerationConfig, list[str]]:
    """Returns the search that JoeyNMT's section `testing` describes, and notes on what has no counterpart."""
    unwanted = [symbols.bos_token, symbols.pad_token, *symbols.lang_tags]
    unwanted += [] if testing.get("generate_unk", True) else [symbols.unk_token]
    search: dict[str, Any] = {
        "suppress_tokens": sorted(map(tokens.index, unwanted)),
        "min_new_tokens": testing.get("min_output_length", 1),
    }
    if testing.get("max_output_length", -1) > 0:
        search["max_new_tokens"] = testing["max_output_length"]
    if testing.get("beam_size", 1) > 1:
        alpha = max(testing.get("alpha", testing.get("beam_alpha", -1)), 0)
        search |= {"num_beams": testing["beam_size"], "length_penalty": float(alpha), "length_penalty_type": "gnmt"}
    generation_config = GenerationConfig.from_model_config(config)
    generation_config.update(**search, allow_custom_entries=True)
    left_out = [name for name in ("repetition_penalty", "no_repeat_ngram_size") if testing.get(name, -1) > 1]
    notes = [f"testing.{name} is left out: JoeyNMT applies it to the source's tokens as well." for name in left_out]
    if "max_new_tokens" not in search:
        notes.append(
            "There is no testing.max_output_length: translations end at the source's length + 50; JoeyNMT's at 1.5 "
            "times the length of their batch's longest source."
        )
    if search.get("length_penalty", 0) > 1:
        notes.append(
            f"testing.beam_alpha is {search['length_penalty']}: above 1 longer translations win, and beams can differ. "
            "JoeyNMT ends when each place in the beam has held an ended translation; ours, when no open one can win."
        )
    return generation_config, notes


def _find_joiner(settings: Mapping[str, Any]) -> str | None:
    """How JoeyNMT puts together the pieces of words."""
    target = settings["data"]["trg"]
    if target.get("level") == "char":
        return "▁"  # JoeyNMT's own sign for the space
    if target.get("level") != "bpe":
        return None
    kind = target.get("tokenizer_type", target.get("bpe_type", "sentencepiece"))
    return "▁" if kind == "sentencepiece" else (target.get("tokenizer_cfg") or {}).get("separator", "@@")


def _describe_tokens(data: Mapping[str, Any]) -> str:
    described = []
    for side in ("src", "trg"):
        steps = [f"level: {data[side].get('level', 'word')}"]
        steps += [name for name in ("lowercase", "normalize") if data[side].get(name)]
        options = {"tokenizer_type": data[side].get("tokenizer_type"), **(data[side].get("tokenizer_cfg") or {})}
        steps += [f"{name}: {value}" for name, value in options.items() if value is not None]
        described.append(", ".join(steps))
    source, target = described
    return (
        f"The tokenizer takes texts that JoeyNMT's own has cut ({source}), with spaces between tokens, and joins pieces"
        f" of words again; what else was done to the target ({target}) is not undone in translations."
    )
