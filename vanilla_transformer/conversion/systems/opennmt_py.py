"""OpenNMT-py 3: Transformers that `onmt_train` saved.

Its Transformer is pre-LN, scales embeddings by sqrt(d_model), and has a bias in the output layer. A source is its
tokens alone. Translations start with `<s>` and end with `</s>`.
"""

import argparse
import ast
import os
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig

from vanilla_transformer.conversion.converted import ConvertedModel, build_model
from vanilla_transformer.conversion.errors import ConversionError, find_differences, refuse
from vanilla_transformer.conversion.tokenizers.vocabularies import align_special_tokens, make_word_tokenizer
from vanilla_transformer.conversion.weights import (
    Rule,
    StateDict,
    check_sinusoids,
    check_weights,
    make_config,
    module_rules,
    read_checkpoint,
)
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig

SPECIAL_TOKENS = {"bos": "<s>", "pad": "<blank>", "eos": "</s>", "unk": "<unk>"}
_POSITIONS = {"SinusoidalInterleaved": "sinusoidal", "SinusoidalConcat": "sinusoidal_tensor2tensor"}

# For each setting of the training, what can be converted; the first is meant where the checkpoint says nothing.
_NUMBERS = ("n_src_feats", "max_relative_positions", "relative_positions_buckets", "sliding_window", "num_kv")
_FLAGS = ("multiquery", "parallel_residual", "copy_attn", "lora_embedding")
SETTINGS: dict[str, tuple[object, ...]] = {
    "model_task": ("seq2seq",),
    "model_type": ("text",),
    **dict.fromkeys(("encoder_type", "decoder_type"), ("transformer",)),
    "position_encoding": (True,),
    "position_encoding_type": tuple(_POSITIONS),
    **dict.fromkeys((*_NUMBERS, "num_experts"), (0,)),
    "self_attn_type": ("scaled-dot", "scaled-dot-flash"),
    "pos_ffn_activation_fn": ("relu", "gelu"),  # silu is gated there
    "layer_norm": ("standard",),
    "generator_function": ("softmax",),
    **dict.fromkeys(_FLAGS, (False,)),
    **dict.fromkeys(("lora_layers", "quant_layers"), ([],)),
}
_SIZES = ("enc_layers", "dec_layers", "enc_hid_size", "heads", "transformer_ff")
_DEFAULTS: dict[str, object] = {
    **dict.fromkeys(("dropout", "attention_dropout", "label_smoothing"), 0.0),
    "norm_eps": 1e-6,
    **dict.fromkeys(("share_embeddings", "share_decoder_embeddings"), False),
    **dict.fromkeys(("src_lang", "tgt_lang"), ""),
    **{name: [] for name in ("transforms", "_all_transform")},
    **dict.fromkeys(("src_onmttok_kwargs", "tgt_onmttok_kwargs"), "{}"),
    **dict.fromkeys(("src_subword_type", "tgt_subword_type"), "none"),
    **dict.fromkeys(("src_subword_vocab", "tgt_subword_vocab"), ""),
    **dict.fromkeys(("src_vocab_threshold", "tgt_vocab_threshold"), 0),
    **dict.fromkeys(("share_vocab", "gpt2_pretok"), False),
}

_EMBEDDING = "embeddings.make_embedding.emb_luts.0.weight"
_RULES = (
    Rule(r"(encoder|decoder)\." + _EMBEDDING.replace(".", r"\."), r"model.\1.embed_tokens.weight"),
    *module_rules({r"(encoder|decoder)\.layer_norm": r"model.\1.layer_norm", "generator": "lm_head"}),
    *module_rules(
        {
            r"self_attn\.linear_([qkv])\w+": r"self_attn.\3_proj",
            r"self_attn\.final_linear": "self_attn.out_proj",
            r"context_attn\.linear_([qkv])\w+": r"encoder_attn.\3_proj",
            r"context_attn\.final_linear": "encoder_attn.out_proj",
            r"layer_norm(?:_1)?": "self_attn_layer_norm",
            r"layer_norm_2": "encoder_attn_layer_norm",
            r"feed_forward\.w_([12])": r"fc\3",
            r"feed_forward\.layer_norm": "final_layer_norm",
        },
        theirs=r"(encoder|decoder)\.transformer(?:_layers)?\.(\d+)\.",
        ours=r"model.\1.layers.\2.",
    ),
)


def convert_opennmt_py(checkpoint: str | os.PathLike[str]) -> ConvertedModel:
    """Converts a Transformer that OpenNMT-py 3 saved.

    Args:
        checkpoint: The `.pt` file. Weights that were saved as safetensors lie beside it, and begin with its name.
    """
    path = Path(checkpoint)
    source = f"the OpenNMT-py model {path.name}"
    content = read_opennmt_py(path)
    settings = _read_settings(content, source)
    tokens, target_tokens = content["vocab"]["src"], content["vocab"]["tgt"]
    order = align_special_tokens(tokens, target_tokens, tuple(SPECIAL_TOKENS.values()))
    target_tokens = [target_tokens[index] for index in order]
    marks: dict[str, Any] = {**SPECIAL_TOKENS, "joiner": _find_joiner(settings), "end_source": False}
    tokenizer = make_word_tokenizer(tokens, target_tokens=target_tokens, **marks)
    config = _make_config(settings, content["weights"], tokens, target_tokens, source)
    weights = dict(content["weights"])
    for name in (f"decoder.{_EMBEDDING}", "generator.weight", "generator.bias"):
        if name in weights and len(weights[name]) == len(order):  # another length is for the renamer to report
            weights[name] = weights[name][order]
    generation_config = GenerationConfig.from_model_config(config)
    generation_config.update(num_beams=5, length_penalty=1.0)  # onmt_translate's own: checkpoints do not speak of it
    check = partial(check_sinusoids, kind=config.position_embedding_type)
    rules = [*_RULES, Rule(r".*\.make_embedding\.pe\.pe", (), check=check)]
    model = build_model(config, weights, rules, source=source, generation_config=generation_config)
    cut = f", by its transforms {', '.join(settings.transforms)}" if settings.transforms else ""
    notes = (
        f"The tokenizer takes texts that are cut into tokens as the training's were{cut}, with spaces between them.",
        "Beam search is onmt_translate's default of 5 beams, with scores divided by the length. OpenNMT-py counts the"
        " start symbol as well, and stops when the best beam has ended, so that translations may differ. onmt_translate"
        " ends a translation at 1.25 times the source's length + 5, and at 250 tokens; here it is the length + 50.",
        *_find_unjoined(settings),
    )
    return ConvertedModel(source=source, model=model, tokenizer=tokenizer, notes=notes)


def read_opennmt_py(path: Path) -> dict[str, Any]:
    """Returns the checkpoint, with all of its weights in one dictionary, "weights"."""
    content = read_checkpoint(path, allowed=[argparse.Namespace])
    if not isinstance(content, Mapping) or not isinstance(content.get("opt"), argparse.Namespace):
        raise ConversionError(f"{path} is no checkpoint of OpenNMT-py: it has no settings (opt) in it.")
    vocab = content.get("vocab")
    if not isinstance(vocab, Mapping) or not all(isinstance(vocab.get(side), list) for side in ("src", "tgt")):
        raise ConversionError(f"{path} has no vocabularies as OpenNMT-py 3 writes them: two lists of tokens.")
    if "model" not in content:
        return {**content, "weights": _read_beside(path)}
    weights = check_weights(content["model"], path, "its entry 'model'")
    generator = check_weights(content.get("generator"), path, "its entry 'generator'")
    return {**content, "weights": {**weights, **{f"generator.{name}": tensor for name, tensor in generator.items()}}}


def _read_beside(path: Path) -> dict[str, torch.Tensor]:
    """Reads the weights that lie beside a checkpoint: model.safetensors, or model.00.safetensors and so on."""
    name = re.compile(rf"{re.escape(path.stem)}(\.\d+)?\.safetensors")
    files = sorted(file for file in path.parent.iterdir() if name.fullmatch(file.name))
    if not files:
        raise ConversionError(f"{path} holds no weights, and there is no {path.stem}.safetensors beside it.")
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        found = check_weights(read_checkpoint(file), file)
        if twice := sorted(weights.keys() & found.keys()):
            raise ConversionError(
                f"{file} has weights that another file beside {path} has too: {', '.join(twice[:3])}."
            )
        weights |= found
    return weights


def _read_settings(content: Mapping[str, Any], source: str) -> SimpleNamespace:
    """Returns the training's settings, completed, if the model can be converted."""
    given = vars(content["opt"])
    settings = SimpleNamespace(**{**{name: values[0] for name, values in SETTINGS.items()}, **_DEFAULTS, **given})
    reasons = [f"{name} is missing" for name in _SIZES if name not in given]
    reasons += find_differences(settings, SETTINGS)
    start = content["vocab"].get("decoder_start_token", SPECIAL_TOKENS["bos"])
    if start not in content["vocab"]["tgt"]:
        reasons.append(f"decoder_start_token is {start!r}, which the target vocabulary lacks")
    refuse(f"The settings of {source} are not those of the paper's Transformer", reasons)
    settings.decoder_start_token = start
    settings.transforms = sorted({*settings.transforms, *settings._all_transform})  # each corpus may have its own
    return settings


def _make_config(
    settings: SimpleNamespace, weights: StateDict, tokens: list[str], target_tokens: list[str], source: str
) -> VanillaTransformerConfig:
    languages = [settings.src_lang, settings.tgt_lang]
    # A dropout is one number, or those of successive phases of the training.
    rates = [settings.dropout, settings.attention_dropout]
    dropout, attention_dropout = [rate[-1] if isinstance(rate, list) else rate for rate in rates]
    return make_config(
        source,
        vocab_size=len(tokens),
        decoder_vocab_size=None if tokens == target_tokens else len(target_tokens),
        d_model=settings.enc_hid_size,
        encoder_layers=settings.enc_layers,
        decoder_layers=settings.dec_layers,
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), settings.heads),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), settings.transformer_ff),
        **dict.fromkeys(("dropout", "activation_dropout"), dropout),
        attention_dropout=attention_dropout,
        activation_function=settings.pos_ffn_activation_fn,
        # Read from the weights because the settings of older checkpoints do not tell.
        attention_bias=any(name.endswith("linear_query.bias") for name in weights),
        ffn_bias=any(name.endswith("w_1.bias") for name in weights),
        lm_head_bias=True,
        normalize_before=True,
        layer_norm_eps=settings.norm_eps,
        position_embedding_type=_POSITIONS[settings.position_encoding_type],
        share_encoder_decoder_embeddings=settings.share_embeddings,
        tie_word_embeddings=settings.share_decoder_embeddings,
        label_smoothing=settings.label_smoothing,
        langs=languages if all(languages) else None,
        decoder_start_token_id=target_tokens.index(settings.decoder_start_token),
        **{f"{name}_token_id": tokens.index(SPECIAL_TOKENS[name]) for name in ("bos", "pad", "eos")},
    )


def _find_joiner(settings: SimpleNamespace) -> str | None:
    """How OpenNMT-py puts together what its own transforms cut; what others cut it leaves alone."""
    if "sentencepiece" in settings.transforms:
        return "▁"
    if "bpe" in settings.transforms:
        return "@@"
    if "onmt_tokenize" not in settings.transforms:
        return None
    kind, options = _read_tokenization(settings)
    if options.get("joiner_annotate"):
        return str(options.get("joiner", "￭"))
    # Its tokenizer marks spaces for sentencepiece by itself, where nothing else cuts the text.
    marks = kind == "sentencepiece" and options.get("mode", "none") == "none"
    return "▁" if options.get("spacer_annotate") or marks else None


def _read_tokenization(settings: SimpleNamespace) -> tuple[str, dict[str, Any]]:
    """The kind of subwords and the options by which `onmt_tokenize` cuts the target."""
    alike = all(
        getattr(settings, f"src_{name}") == getattr(settings, f"tgt_{name}")
        for name in ("subword_vocab", "vocab_threshold")
    )
    side = "src" if settings.share_vocab and alike else "tgt"  # one vocabulary: the source's tokenizer cuts both
    name = f"{side}_onmttok_kwargs"
    given = getattr(settings, name)  # written as Python spells it, or read already
    try:
        options = dict(given if isinstance(given, Mapping) else ast.literal_eval(given))
    except (SyntaxError, TypeError, ValueError) as error:
        raise ConversionError(f"The setting {name} is no dictionary: {given!r}.") from error
    return getattr(settings, f"{side}_subword_type"), options


def _find_unjoined(settings: SimpleNamespace) -> list[str]:
    """Says what `onmt_tokenize` has done to the target that the tokenizer does not undo."""
    if "onmt_tokenize" not in settings.transforms:
        return []
    given = {"case_markup": _read_tokenization(settings)[1].get("case_markup"), "gpt2_pretok": settings.gpt2_pretok}
    names = [name for name, value in given.items() if value]
    return [f"What {' and '.join(names)} did to the training's texts is not undone in translations."] if names else []
