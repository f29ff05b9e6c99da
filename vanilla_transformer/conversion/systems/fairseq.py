r"""fairseq's `transformer` models: the paper's architecture with learned or tensor2tensor positions.

Weights were renamed in 2019 and 2020. Encoder layers of 2022 and later hold a second copy of their weights,
`layers.0.in_proj_weight` and so on, for a faster kernel of torch's; what is saved of it is not needed.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig

from vanilla_transformer.conversion.converted import ConvertedModel, build_model
from vanilla_transformer.conversion.errors import ConversionError, find_differences, refuse
from vanilla_transformer.conversion.tokenizers.bpe_codes import (
    BOS,
    EOS,
    PAD,
    SPECIAL_TOKENS,
    UNK,
    find_joiner,
    make_bpe_tokenizer,
    read_dictionary,
)
from vanilla_transformer.conversion.tokenizers.sentencepiece import convert_sentencepiece
from vanilla_transformer.conversion.tokenizers.vocabularies import make_word_tokenizer
from vanilla_transformer.conversion.weights import Rule, check_entries, make_config, module_rules
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer

from .fairseq_checkpoint import ARCHITECTURES, FairseqCheckpoint, read_fairseq

_BOS_ID, _PAD_ID, _EOS_ID, _UNK_ID = range(len(SPECIAL_TOKENS))
_SPECIAL_IDS: dict[str, Any] = {"bos_token_id": _BOS_ID, "pad_token_id": _PAD_ID, "eos_token_id": _EOS_ID}
_SPECIAL_IDS |= {"decoder_start_token_id": _EOS_ID}

# The output bias of tokens that only the tokenizer needs: with it their probability is below any rounding error.
UNLIKELY = -30.0

_ACTIVATIONS = {name: name for name in ("relu", "gelu", "tanh", "linear")} | {"relu_squared": "relu2"}
_ACTIVATIONS |= dict.fromkeys(("gelu_accurate", "gelu_fast"), "gelu_pytorch_tanh")

# What a setting must be for the model to be one that the configuration can describe.
_OFF = (None, False, 0)
_SIDES = ("encoder", "decoder")
_WANTED: dict[str, tuple[object, ...]] = {
    "arch": tuple(ARCHITECTURES),
    "activation_fn": tuple(_ACTIVATIONS),
    **{f"adaptive_{name}": (None, False) for name in ("input", "softmax_cutoff")},
    **{f"{side}_{name}": (None, "") for side in _SIDES for name in ("layers_to_keep", "xformers_att_config")},
    **{f"no_{name}": _OFF for name in ("token_positional_embeddings", "cross_attention")},
    **{f"quant_noise_{name}": _OFF for name in ("pq", "scalar")},
    **{f"scale_{name}": _OFF for name in ("attn", "heads", "fc", "resids")},
    **dict.fromkeys(("base_layers", "char_inputs", "cross_self_attention"), _OFF),
}
# fairseq's defaults of generation: of what is taken over, and of what is not.
_GENERATION: dict[str, Any] = {"beam": 5, "lenpen": 1.0, "unnormalized": False, "min_len": 1, "max_len_b": 200}
_GENERATION |= {"no_repeat_ngram_size": 0}
_IGNORED_GENERATION = dict.fromkeys(("max_len_a", "unkpen", "sampling", "match_source_len", "prefix_size"), 0)
_IGNORED_GENERATION |= {"temperature": 1, "diverse_beam_groups": -1, "diversity_rate": -1}
_BOTH_SIDES = ("embed_dim", "normalize_before", "learned_pos")

_LAYER, _OURS = r"(encoder|decoder)\.(layers\.\d+)\.", r"model.\1.\2."
_RULES = (
    Rule(r"(encoder|decoder)\.(version|embed_positions\._float_tensor|embed_positions\.weights)", ()),
    Rule(r"encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)", ()),
    *module_rules(
        {r"(encoder|decoder)\.(embed_tokens|embed_positions|layernorm_embedding|layer_norm)": r"model.\1.\2"}
    ),
    Rule(
        _LAYER + r"(self_attn|encoder_attn)\.in_proj_(weight|bias)",
        [rf"{_OURS}\3.{part}_proj.\4" for part in ("q", "k", "v")],
    ),
    *module_rules(
        {
            r"(\w+_attn\.(?:q|k|v|out)_proj|fc1|fc2|\w+_layer_norm)": r"\3",
            r"layer_norms\.0": "self_attn_layer_norm",
            r"layer_norms\.2": "final_layer_norm",
        },
        theirs=_LAYER,
        ours=_OURS,
    ),
    *module_rules({r"encoder\.(layers\.\d+)\.layer_norms\.1": r"model.encoder.\1.final_layer_norm"}),
    *module_rules({r"decoder\.(layers\.\d+)\.layer_norms\.1": r"model.decoder.\1.encoder_attn_layer_norm"}),
    Rule(r"decoder\.(?:output_projection\.weight|embed_out)", "lm_head.weight"),
    Rule(r"lm_head\.bias", "lm_head.bias"),  # added by `_append_tokens`
)


@dataclass(frozen=True, kw_only=True)
class _Vocabularies:
    """The two dictionaries, and what is made of them."""

    languages: list[str]
    source: list[str]
    target: list[str]

    @property
    def separate_target(self) -> list[str] | None:
        """The target's dictionary if it is another than the source's."""
        return None if self.source == self.target else self.target

    def count_added(self, tokenizer: VanillaTransformerTokenizer) -> tuple[int, int]:
        """Counts the ids behind the dictionaries'."""
        return len(tokenizer) - len(self.source), tokenizer.target_vocab_size - len(self.target)


def convert_fairseq(
    checkpoint: str | os.PathLike[str],
    *,
    dictionaries: str | os.PathLike[str] | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    codes: str | os.PathLike[str] | None = None,
    target_codes: str | os.PathLike[str] | None = None,
    sentencepiece_model: str | os.PathLike[str] | None = None,
    target_sentencepiece_model: str | os.PathLike[str] | None = None,
) -> ConvertedModel:
    """Converts a `transformer` that fairseq trained to translate.

    Without `codes` and `sentencepiece_model` the tokenizer reads text that is cut already, as fairseq itself does, and
    joins the pieces again when it decodes.

    Args:
        checkpoint: The `.pt` file.
        dictionaries: The folder with `dict.<language>.txt` of both languages; `None`: the checkpoint's.
        source_lang: The source language; `None`: as the checkpoint says.
        target_lang: The target language; `None`: as the checkpoint says.
        codes: The codes of byte-pair encoding (subword-nmt's or fastBPE's) by which the texts were cut.
        target_codes: The target's, if it has its own.
        sentencepiece_model: The sentencepiece model by which the texts were cut.
        target_sentencepiece_model: The target's, if it has its own.
    """
    read = read_fairseq(checkpoint)
    source = f"the fairseq checkpoint {read.path}"
    refuse(f"This package cannot hold {source}", _find_unsupported(read))
    check_entries(source, read.weights, {f"{side}.embed_tokens.weight": 2 for side in _SIDES})
    vocabularies = _read_dictionaries(read, dictionaries, source_lang, target_lang)
    files = {"codes": (codes, target_codes), "sentencepiece_model": (sentencepiece_model, target_sentencepiece_model)}
    tokenizer, tokenizer_notes = _make_tokenizer(vocabularies, files)
    tokenizer.model_max_length = read.model["max_source_positions"]
    added = vocabularies.count_added(tokenizer)
    read = _append_tokens(read, vocabularies, added)
    config = _make_config(read, vocabularies, source, has_bias=any(added))
    generation_config, notes = _make_generation_config(read)
    if read.absent:
        listed = ", ".join(f"{name}={value}" for name, value in read.absent.items())
        notes.insert(0, f"Not in the checkpoint, so as in fairseq's architecture {read.model['arch']}: {listed}.")
    notes += [*_describe_added(vocabularies, added), *tokenizer_notes]
    model = build_model(config, read.weights, _RULES, source=source, generation_config=generation_config)
    return ConvertedModel(source=source, model=model, tokenizer=tokenizer, notes=tuple(notes))


def _make_tokenizer(
    vocabularies: _Vocabularies, files: dict[str, tuple[Any, Any]]
) -> tuple[VanillaTransformerTokenizer, list[str]]:
    """Returns the tokenizer of codes or sentencepiece models (the source's, the target's), or of words; and notes."""
    (codes, target_codes), (sentencepiece_model, target_sentencepiece_model) = files.values()
    if vocabularies.separate_target is None and target_sentencepiece_model is not None:
        raise ConversionError("Source and target have one dictionary, and so one sentencepiece model, not two.")
    if codes is not None and sentencepiece_model is not None:
        raise ConversionError("Texts are cut by codes or by a sentencepiece model, not by both: give one of them.")
    for name, (file, target_file) in files.items():
        if file is None and target_file is not None:
            raise ConversionError(f"target_{name} is given without {name}, the source's.")
    source, target = vocabularies.source, vocabularies.separate_target
    specials: dict[str, Any] = {"bos": BOS, "pad": PAD, "eos": EOS, "unk": UNK}
    if sentencepiece_model is not None:
        tokenizer = convert_sentencepiece(
            sentencepiece_model,
            target_model_file=target_sentencepiece_model,
            vocabulary=source,
            target_vocabulary=target,
            append_absent=True,
            **{f"{name}_token": token for name, token in specials.items()},
        )
        return tokenizer, []
    unknown = "What was done to the training texts before they were cut, such as Moses' tokenizer, is in no file of"
    notes = [f"{unknown} fairseq's and must be done to each text first, and undone afterwards."]
    if codes is not None:
        return make_bpe_tokenizer(codes, source, target_codes=target_codes, target_tokens=target), notes
    joiner = find_joiner([*source, *vocabularies.target])
    how = {"@@": "words cut into pieces (apple@@ s), spaces between them", "▁": "sentencepiece's pieces"}
    cut = how.get(str(joiner), "words, with spaces between them")
    notes.insert(0, f"The tokenizer reads text as the dictionary has it ({cut}), and writes words joined again.")
    return make_word_tokenizer(source, target_tokens=target, **specials, joiner=joiner), notes


def _find_unsupported(read: FairseqCheckpoint) -> list[str]:
    settings = read.model
    reasons = find_differences(SimpleNamespace(**settings), _WANTED)
    task = read.task.get("task") or read.task.get("_name") or "translation"
    if task != "translation":
        reasons.append(f"the task is {task!r} (can be: 'translation')")
    for name in _BOTH_SIDES:
        encoder, decoder = settings[f"encoder_{name}"], settings[f"decoder_{name}"]
        if encoder != decoder:
            reasons.append(f"encoder_{name} is {encoder} and decoder_{name} {decoder} (must be the same)")
    width = settings["decoder_embed_dim"]
    for name in ("decoder_input_dim", "decoder_output_dim"):
        value = settings.get(name, width)
        if value != width and not isinstance(value, str):  # a string refers to decoder_embed_dim
            reasons.append(f"{name} is {value} (must be decoder_embed_dim, {width})")
    if settings["encoder_learned_pos"] and len(set(rows := _count_positions(read))) > 1:
        reasons.append(f"encoder and decoder have learned {' and '.join(map(str, rows))} positions (must be the same)")
    if settings["encoder_normalize_before"] and len(set(_find_last_norms(read))) > 1:
        reasons.append("only one of encoder and decoder ends with a norm (no_decoder_final_norm, or versions of 2018)")
    return reasons


def _find_last_norms(read: FairseqCheckpoint) -> list[bool]:
    """Says which stacks end with one more norm, as all with pre-LN do since August 2018, unless told not to."""
    return [f"{side}.layer_norm.weight" in read.weights for side in _SIDES]


def _count_positions(read: FairseqCheckpoint) -> list[int]:
    """Counts the rows of the tables of positions; those of learned ones are not as many in all versions of fairseq."""
    counts = [_PAD_ID + 1 + read.model[f"max_{side}_positions"] for side in ("source", "target")]
    tables = [read.weights.get(f"{side}.embed_positions.weight") for side in _SIDES]
    return [count if table is None else table.shape[0] for count, table in zip(counts, tables, strict=True)]


def _read_dictionaries(
    read: FairseqCheckpoint, folder: str | os.PathLike[str] | None, source_lang: str | None, target_lang: str | None
) -> _Vocabularies:
    folder = read.path.parent if folder is None else Path(folder)
    given = {"source_lang": source_lang, "target_lang": target_lang}
    languages = {name: value or read.task.get(name) for name, value in given.items()}
    if missing := [name for name, value in languages.items() if not value]:
        raise ConversionError(f"{read.path} does not say its languages: give {' and '.join(missing)}.")
    paths = [folder / f"dict.{language}.txt" for language in languages.values()]
    if missing := [path.name for path in paths if not path.is_file()]:
        found = sorted(path.name for path in folder.glob("dict.*.txt"))
        raise ConversionError(
            f"{folder} lacks {' and '.join(dict.fromkeys(missing))} (there: {', '.join(found) or 'no dictionary'})."
            " Name the folder of the dictionaries, and the languages if they have other names."
        )
    source, target = (read_dictionary(path) for path in paths)
    reasons = []
    for side, path, tokens in zip(_SIDES, paths, (source, target), strict=True):
        table = f"{side}.embed_tokens.weight"
        if (rows := len(read.weights[table])) != len(tokens):
            reasons.append(f"{path} makes {len(tokens)} tokens, the four special ones included, and {table} has {rows}")
    if read.model["share_all_embeddings"] and source != target:
        reasons.append(f"the model has one vocabulary (share_all_embeddings), and {paths[0]} and {paths[1]} differ")
    refuse(f"The dictionaries are not those of {read.path}", reasons)
    return _Vocabularies(languages=[str(value) for value in languages.values()], source=source, target=target)


def _append_tokens(read: FairseqCheckpoint, vocabularies: _Vocabularies, added: tuple[int, int]) -> FairseqCheckpoint:
    """Gives the tokens that only the tokenizer needs `<unk>`'s embedding and next to no probability."""
    if not any(added):
        return read
    rows = dict(zip(_SIDES, added, strict=True))
    weights = dict(read.weights)
    for name in weights:
        if name.endswith((".embed_tokens.weight", ".output_projection.weight", ".embed_out")):
            unknown = weights[name][_UNK_ID : _UNK_ID + 1]
            weights[name] = torch.cat([weights[name], unknown.expand(rows[name.split(".")[0]], -1)])
    zeros = weights["decoder.embed_tokens.weight"].new_zeros(len(vocabularies.target))
    bias = torch.nn.functional.pad(zeros, (0, added[1]), value=UNLIKELY)
    return replace(read, weights={**weights, "lm_head.bias": bias})


def _describe_added(vocabularies: _Vocabularies, added: tuple[int, int]) -> list[str]:
    if not any(added):
        return []
    numbers = f"{added[0]} of the source, {added[1]} of the target" if vocabularies.separate_target else added[0]
    treatment = f"They have the embedding of {UNK}, which fairseq takes these tokens for, and are never predicted."
    return [f"There are ids behind the dictionary's, which only the tokenizer needs: {numbers}. {treatment}"]


def _make_config(
    read: FairseqCheckpoint, vocabularies: _Vocabularies, source: str, *, has_bias: bool
) -> VanillaTransformerConfig:
    settings = read.model
    one_table = bool(settings["share_all_embeddings"])
    sizes = {"layers": "layers", "attention_heads": "attention_heads", "ffn_dim": "ffn_embed_dim"}
    return make_config(
        source,
        vocab_size=len(read.weights["encoder.embed_tokens.weight"]),
        decoder_vocab_size=len(read.weights["decoder.embed_tokens.weight"]) if vocabularies.separate_target else None,
        d_model=settings["encoder_embed_dim"],
        **{f"{side}_{ours}": settings[f"{side}_{theirs}"] for ours, theirs in sizes.items() for side in _SIDES},
        **{name: settings[name] for name in ("dropout", "attention_dropout", "activation_dropout")},
        activation_function=_ACTIVATIONS[settings["activation_fn"]],
        attention_bias=True,
        lm_head_bias=has_bias,
        normalize_before=settings["encoder_normalize_before"],
        add_final_layer_norm=None if _find_last_norms(read)[0] == settings["encoder_normalize_before"] else False,
        normalize_embedding=settings["layernorm_embedding"],
        scale_embedding=not settings["no_scale_embedding"],
        position_embedding_type="learned" if settings["encoder_learned_pos"] else "sinusoidal_tensor2tensor",
        position_offset=_PAD_ID + 1,
        max_position_embeddings=max(_count_positions(read)),
        share_encoder_decoder_embeddings=one_table,
        tie_word_embeddings=one_table or bool(settings["share_decoder_input_output_embed"]),
        langs=vocabularies.languages,
        label_smoothing=read.label_smoothing,
        **_SPECIAL_IDS,
    )


def _make_generation_config(read: FairseqCheckpoint) -> tuple[GenerationConfig, list[str]]:
    """Returns what fairseq's `generate` does with the checkpoint's settings, and notes on what it does not do here."""
    given = {name: value for name, value in read.generation.items() if value is not None}
    settings = {**_GENERATION, **{name: value for name, value in given.items() if name in _GENERATION}}
    ignored = [name for name, legal in _IGNORED_GENERATION.items() if given.get(name, legal) != legal]
    # An output as long as the source asks for has no counterpart but the package's own limit.
    by_source = "max_len_a" in ignored
    positions = min(read.model["max_target_positions"], _count_positions(read)[1] - _PAD_ID - 1)
    longest = min(int(settings["max_len_b"]), positions - 1) + 1  # one more for the end
    config = GenerationConfig(
        num_beams=int(settings["beam"]),
        length_penalty=0.0 if settings["unnormalized"] else float(settings["lenpen"]),
        early_stopping=True,
        max_new_tokens=None if by_source else longest,
        min_new_tokens=int(settings["min_len"]) or None,
        no_repeat_ngram_size=int(settings["no_repeat_ngram_size"]) or None,
        suppress_tokens=[_PAD_ID],
        **_SPECIAL_IDS,
    )
    listed = ", ".join(f"{name}={given[name]}" for name in ignored)
    return config, [f"These settings of generation have no counterpart here: {listed}."] if ignored else []
