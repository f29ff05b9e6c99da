"""torch.nn.Transformer with embeddings around it becomes this package's model; `to_torch_nn` is the way back.

torch.nn.Transformer is the two stacks alone. Embeddings, positions and output layer are in the user's own code, under
names of the user's choice: here they are looked for, and can be named. In a state dict, without the module, there is
also no trace of the number of heads, which must be said, or of the activation, the norms' order and the scale of the
embeddings, which are assumed, and told, where nobody says them.

After its last layer each stack has one more norm, in post-LN too: the field `add_final_layer_norm`.
"""

import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.conversion.comparing import Batch, compare_with
from vanilla_transformer.conversion.converted import ConvertedModel, build_model
from vanilla_transformer.conversion.errors import ConversionError, refuse
from vanilla_transformer.conversion.state_dicts import (
    StateDict,
    Tables,
    as_rows,
    check_entries,
    check_sinusoids,
    count_layers,
    make_config,
    make_sinusoids_rule,
    read_state_dict,
)
from vanilla_transformer.conversion.weights import Rule
from vanilla_transformer.data.vocabularies import load_tokenizer
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.positions_vanilla_transformer import SINUSOIDS

from .library import check_tokenizer
from .torch_module import (
    ACTIVATIONS,
    ATTENTIONS,
    LINEAR_MAPS,
    NORMS,
    SETTINGS_NAME,
    WEIGHTS_NAME,
    TorchTransformer,
)

# What tells a stack among other weights: only the decoder's layers attend to something else.
_FIRST_WEIGHTS = {
    "encoder": "layers.0.self_attn.in_proj_weight",
    "decoder": "layers.0.multihead_attn.in_proj_weight",
}
# What names of weights outside the stacks say of them.
_POSITION_NAME = re.compile(r"pos|(^|\.)pe(\.|$)", re.IGNORECASE)
_EMBEDDING_NAME = re.compile(r"emb|lut|tok", re.IGNORECASE)
_SOURCE_NAME = re.compile(r"src|source|encoder|(^|[._])enc[._]", re.IGNORECASE)
_TARGET_NAME = re.compile(r"tgt|trg|target|decoder|(^|[._])dec[._]", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class TorchSettings:
    """What weights alone do not tell of a model around torch.nn.Transformer.

    Args:
        nhead: Number of attention heads. `None`: the module's; for a state dict it must be said, and divide d_model.
        activation: "relu", "gelu" or "silu". `None`: the module's; for a state dict "relu". Where torch was given a
            module such as `nn.GELU()`, its decoder took relu all the same, and such a model cannot be converted.
        norm_first: Whether norms come before sub-layers (pre-LN). `None`: as in the module; for a state dict, no.
        layer_norm_eps: Added to the variance in every norm. `None`: the module's; for a state dict 1e-5.
        dropout: Probability of dropping, in training; torch drops attention weights and inner activations too. `None`:
            the module's; for a state dict 0.1.
        scale_embedding: Whether embeddings are multiplied by sqrt(d_model).
        position_embedding_type: As in `VanillaTransformerConfig`. `None`: the sinusoids that the table holds, and
            "sinusoidal" if there is no table.
        position_offset: Position of a sentence's first token.
        source_embedding: Name of the source's embeddings. `None`: they are looked for.
        target_embedding: Name of the target's embeddings. `None`: they are looked for.
        output_layer: Name of the output layer's weight. `None`: it is looked for.
        source_positions: Name of the source's table of positions. `None`: it is looked for.
        target_positions: Name of the target's table of positions. `None`: it is looked for.
        bos_token_id: The token that starts a sentence; as the next two, by default that of PyTorch's tutorial.
        pad_token_id: The token that fills batches.
        eos_token_id: The token that ends a sentence.
        decoder_start_token_id: The token that starts the decoder's input; `None`: `bos_token_id`.
    """

    nhead: int | None = None
    activation: str | None = None
    norm_first: bool | None = None
    layer_norm_eps: float | None = None
    dropout: float | None = None
    scale_embedding: bool = True
    position_embedding_type: str | None = None
    position_offset: int = 0
    source_embedding: str | None = None
    target_embedding: str | None = None
    output_layer: str | None = None
    source_positions: str | None = None
    target_positions: str | None = None
    bos_token_id: int = 2
    pad_token_id: int = 1
    eos_token_id: int = 3
    decoder_start_token_id: int | None = None


def read_torch_settings(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Reads what `save_as_torch_nn` says of the weights beside them, in `settings.json`.

    Args:
        path: The folder, or the file of the weights in it.

    Returns:
        Fields of [`TorchSettings`]; `None` if there is no such file, or it is of some other program.

    Raises:
        ConversionError: If the file is damaged, or has fields that are not known.
    """
    path = Path(path)
    file = (path if path.is_dir() else path.parent) / SETTINGS_NAME
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConversionError(f"{file}, which is to tell what the weights do not, is no JSON: {error}") from error
    if not isinstance(content, dict) or not {"nhead", "norm_first"} <= set(content):
        return None
    known = [field.name for field in fields(TorchSettings)]
    reasons = [f"{name} (can be: {', '.join(known)})" for name in content if name not in known]
    refuse(f"{file} has settings that are not known", reasons)
    return content


# What is taken for a state dict where nobody says more. Heads are not among them: people choose them, any number that
# divides d_model fits the weights, and a check with the wrong one finds nothing.
TORCH_DEFAULTS: dict[str, Any] = {
    "activation": "relu",
    "norm_first": False,
    "layer_norm_eps": 1e-5,
    "dropout": 0.1,
}
_LAYER_SETTINGS = ("nhead", *TORCH_DEFAULTS)


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """What was found in a state dict: the stacks, tables and positions (source's and target's) by their names."""

    prefixes: dict[str, str]
    tables: Tables
    positions: tuple[str, str] | None
    position_embedding_type: str


def convert_torch_nn(
    original: nn.Module | StateDict | str | os.PathLike[str],
    settings: TorchSettings | None = None,
    *,
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> ConvertedModel:
    """Brings a model around torch.nn.Transformer into this package's form.

    Args:
        original: A module that holds an nn.Transformer (or an nn.TransformerEncoder and an nn.TransformerDecoder) with
            its embeddings; its state dict; a file with that; or a folder of `save_as_torch_nn`. Where they are in no
            common module, make one:
            `nn.ModuleDict({"transformer": ..., "src_tok_emb": ..., "tgt_tok_emb": ..., "generator": ...})`.
        settings: What the weights do not tell; `nhead` is needed where the original is no module. `None`: what
            `settings.json` beside the file does (see [`read_torch_settings`]), or else torch's defaults.
        forward: How the original computes logits (B, T, V) from source ids (B, S), padded at the end with
            `pad_token_id`, and target ids (B, T): in evaluation mode and float32, for the check. `None`: the check
            takes the settings' word for what is outside the stacks.

    Returns:
        The model, with a tokenizer only where `save_as_torch_nn` wrote one beside the weights.

    Raises:
        ConversionError: Lists what cannot be converted, what is ambiguous or not said, and which weights do not fit.
    """
    module = original if isinstance(original, nn.Module) else None
    place = Path(original) if isinstance(original, (str, os.PathLike)) else None
    saved = None if place is None else read_torch_settings(place)
    settings = settings or TorchSettings(**(saved or {}))
    source = "the torch.nn.Transformer" + (f" of {place}" if place else "")
    weights = read_state_dict(_find_weights(cast(Any, original)) if module is None else module.state_dict())
    prefixes = _find_stacks(source, weights)
    sizes = _read_sizes(source, weights, prefixes)
    if module is None:
        layers = _read_settings(source, settings, sizes["d_model"])
    else:
        layers = _read_module(source, module, settings)
    layout = _find_layout(source, weights, prefixes, sizes["d_model"], settings)
    config = _make_config(source, weights, layout, settings, sizes | layers)
    rules = _make_rules(layout, config, weights)
    model = build_model(config, _add_norm_biases(weights, prefixes), rules, source=source)
    make_original = partial(_make_original, config, weights, layout, module)
    tokenizer = None if place is None or saved is None else _load_tokenizer(place, config, source)
    notes = _make_notes(settings, is_module=module is not None, has_forward=forward is not None, layout=layout)
    if tokenizer is None:
        notes.append("There is no tokenizer: the original keeps none with its weights.")
    return ConvertedModel(
        source=source,
        model=model,
        tokenizer=tokenizer,
        compare=partial(_compare, make_original if forward is None else lambda: forward, model),
        notes=tuple(notes),
    )


def _find_weights(original: StateDict | str | os.PathLike[str]) -> StateDict | str | os.PathLike[str]:
    """Returns what is no folder as it is, and the file of the weights in one of `save_as_torch_nn`."""
    if isinstance(original, Mapping) or not (Path(original) / SETTINGS_NAME).is_file():
        return original
    return Path(original) / WEIGHTS_NAME


def _load_tokenizer(place: Path, config: VanillaTransformerConfig, source: str) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer that `save_as_torch_nn` wrote beside the weights, if it did."""
    folder = place if place.is_dir() else place.parent
    try:
        tokenizer = load_tokenizer(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConversionError(f"The tokenizer in {folder} cannot be read: {error}") from error
    if tokenizer is not None:
        check_tokenizer(tokenizer, config, source)
    return tokenizer


# The stacks


def _find_stacks(source: str, weights: Iterable[str]) -> dict[str, str]:
    """Returns what the names of each stack's weights begin with."""
    found = {
        stack: [name.removesuffix(first) for name in weights if name.endswith(first)]
        for stack, first in _FIRST_WEIGHTS.items()
    }
    found["encoder"] = [prefix for prefix in found["encoder"] if prefix not in found["decoder"]]
    reasons = [
        f"several {stack}s: {', '.join(map(repr, found[stack]))}"
        if found[stack]
        else f"no {stack}: no other name ends in {first}"
        for stack, first in _FIRST_WEIGHTS.items()
        if len(found[stack]) != 1
    ]
    refuse(f"{source[0].upper()}{source[1:]} must have one encoder and one decoder, and has", reasons)
    return {stack: prefix for stack, (prefix,) in found.items()}


def _read_sizes(source: str, weights: StateDict, prefixes: Mapping[str, str]) -> dict[str, Any]:
    """Returns the fields of the configuration that the stacks' weights tell."""
    first = {stack: f"{prefix}layers.0." for stack, prefix in prefixes.items()}
    check_entries(source, weights, {f"{first[stack]}linear1.weight": 2 for stack in first})
    check_entries(source, weights, {prefixes[stack] + name: 2 for stack, name in _FIRST_WEIGHTS.items()})
    last = {stack: f"{prefix}norm.weight" in weights for stack, prefix in prefixes.items()}
    having = [stack for stack in last if last[stack]]
    refuse(
        f"The last norms of {source} cannot be converted",
        [f"only the {having[0]} has one (can be: both stacks or none)"] if len(having) == 1 else [],
    )
    return {
        "d_model": weights[prefixes["encoder"] + _FIRST_WEIGHTS["encoder"]].shape[1],
        "encoder_layers": count_layers(weights, f"{prefixes['encoder']}layers."),
        "decoder_layers": count_layers(weights, f"{prefixes['decoder']}layers."),
        "encoder_ffn_dim": weights[f"{first['encoder']}linear1.weight"].shape[0],
        "decoder_ffn_dim": weights[f"{first['decoder']}linear1.weight"].shape[0],
        "attention_bias": f"{first['encoder']}self_attn.in_proj_bias" in weights,
        "ffn_bias": f"{first['encoder']}linear1.bias" in weights,
        "add_final_layer_norm": bool(having),
    }


def _read_settings(source: str, settings: TorchSettings, d_model: int) -> dict[str, Any]:
    """Returns the fields of the configuration that a state dict leaves to the user, or to torch's defaults."""
    chosen = _choose_settings(settings)
    reasons = [] if chosen["activation"] in ACTIVATIONS else [_explain_activation(chosen["activation"])]
    if settings.nhead is None:
        reasons.append(
            "The number of heads is not in the weights: say --nhead (nhead= in Python); it must divide "
            f"d_model={d_model}, and torch.nn.Transformer's own default is 8"
        )
    refuse(f"With these settings {source} cannot be converted", reasons)
    return _name_fields(chosen)


def _choose_settings(settings: TorchSettings) -> dict[str, Any]:
    """Returns what the layers of a state dict have: what the user says, and else torch's defaults."""
    given = {name: getattr(settings, name) for name in _LAYER_SETTINGS}
    return {name: TORCH_DEFAULTS.get(name) if value is None else value for name, value in given.items()}


def _read_module(source: str, module: nn.Module, settings: TorchSettings) -> dict[str, Any]:
    """Returns the same fields from the modules, which must agree with each other and with the settings."""
    stacks = _find_modules(source, module)
    layers = {stack: list(cast(Any, part).layers) for stack, part in stacks.items()}
    every = [*layers["encoder"], *layers["decoder"]]
    norms = [part for stack in stacks.values() for part in stack.modules() if isinstance(part, nn.LayerNorm)]
    found: dict[str, list[Any]] = {
        "nhead": [layer.self_attn.num_heads for layer in layers["encoder"]],
        "decoder_nhead": [layer.self_attn.num_heads for layer in layers["decoder"]],
        "activation": [_name_activation(layer.activation) for layer in every],
        "norm_first": [layer.norm_first for layer in every],
        "layer_norm_eps": [norm.eps for norm in norms],
    }
    differing = {name: sorted(map(str, set(values))) for name, values in found.items() if len(set(values)) > 1}
    reasons = [f"{name} is not the same in all layers: {', '.join(values)}" for name, values in differing.items()]
    reasons += [_explain_activation(name) for name in dict.fromkeys(found["activation"]) if name not in ACTIVATIONS]
    read = {name: values[0] for name, values in found.items()}
    read |= {"dropout": every[0].dropout1.p, "attention_dropout": every[0].self_attn.dropout}
    read |= {"activation_dropout": every[0].dropout.p}
    reasons += [
        f"{name} is {read[name]!r} in the module, and {getattr(settings, name)!r} in the settings"
        for name in _LAYER_SETTINGS
        if getattr(settings, name) not in (None, read[name])
    ]
    refuse(f"The layers of {source} cannot be converted", reasons)
    return _name_fields(read)


def _find_modules(source: str, module: nn.Module) -> dict[str, nn.Module]:
    """Returns torch's stacks in a module, whose layers must be torch's too."""
    kinds: dict[str, tuple[type[nn.Module], type[nn.Module]]] = {
        "encoder": (nn.TransformerEncoder, nn.TransformerEncoderLayer),
        "decoder": (nn.TransformerDecoder, nn.TransformerDecoderLayer),
    }
    found = {stack: [part for part in module.modules() if isinstance(part, kinds[stack][0])] for stack in kinds}
    reasons = [
        f"{len(found[stack])} modules are an nn.{kinds[stack][0].__name__} (can be: one)"
        for stack in kinds
        if len(found[stack]) != 1
    ]
    foreign = {
        type(layer).__name__
        for stack, parts in found.items()
        for part in parts
        for layer in cast(Any, part).layers
        if not isinstance(layer, kinds[stack][1])
    }
    reasons += [f"a layer is of the class {name}, which is not torch's" for name in sorted(foreign)]
    refuse(f"The modules of {source} cannot be converted", reasons)
    return {stack: part for stack, (part,) in found.items()}


def _name_activation(activation: Any) -> str:
    modules = {nn.ReLU: "relu", nn.SiLU: "silu"} | ({nn.GELU: "gelu"} if "tanh" not in str(activation) else {})
    named = [name for name, function in ACTIVATIONS.items() if activation is function]
    named += [name for kind, name in modules.items() if isinstance(activation, kind)]
    return named[0] if named else str(activation)


def _explain_activation(activation: str) -> str:
    return f"activation is {activation!r} (can be: {', '.join(map(repr, ACTIVATIONS))})"


def _name_fields(read: Mapping[str, Any]) -> dict[str, Any]:
    """Gives torch's settings the configuration's names."""
    return {
        "encoder_attention_heads": read["nhead"],
        "decoder_attention_heads": read.get("decoder_nhead", read["nhead"]),
        "activation_function": read["activation"],
        "normalize_before": read["norm_first"],
        "layer_norm_eps": read["layer_norm_eps"],
        "dropout": read["dropout"],
        "attention_dropout": read.get("attention_dropout", read["dropout"]),
        "activation_dropout": read.get("activation_dropout", read["dropout"]),
    }


# What is around the stacks


def _find_layout(
    source: str, weights: StateDict, prefixes: dict[str, str], d_model: int, settings: TorchSettings
) -> _Layout:
    """Finds embeddings, output layer and positions.

    Raises:
        ConversionError: Lists all that is missing or ambiguous.
    """
    inside = tuple(f"{prefix}{part}." for prefix in prefixes.values() for part in ("layers", "norm"))
    outside = [name for name in weights if not name.startswith(inside)]
    named = [name for name in outside if _POSITION_NAME.search(name)]
    tables = [name for name in outside if name not in named and weights[name].shape[1:] == (d_model,)]
    tables = [name for name in tables if weights[name].ndim == 2]
    embeddings = [name for name in tables if _EMBEDDING_NAME.search(name)]
    outputs = [name for name in tables if name not in embeddings]
    reasons: list[str] = []
    sides = _find_sides(weights, embeddings, settings, "embedding", reasons)
    positions = _find_sides(weights, named, settings, "positions", reasons)
    outputs = _look_up(weights, settings.output_layer, "output_layer", reasons) or outputs
    if len(outputs) > 1:
        reasons.append(f"output_layer could be each of: {', '.join(outputs)}")
    if not embeddings and not settings.source_embedding and not settings.target_embedding:
        reasons.append(f"no embeddings (V, {d_model}) were found: name them as source_embedding and target_embedding")
    kind, problem = _find_position_type(weights, positions, settings)
    refuse(f"What is around the stacks of {source} is not clear", [*reasons, *([problem] if problem else [])])
    found, target = cast(tuple[str, str], sides)
    return _Layout(
        prefixes=prefixes,
        tables=Tables(source=found, target=target, output=outputs[0] if outputs else None),
        positions=positions,
        position_embedding_type=kind,
    )


def _look_up(weights: StateDict, name: str | None, setting: str, reasons: list[str]) -> list[str]:
    """Returns the weight that the user named, in full or without a beginning such as "module." or the end "weight"."""
    if name is None:
        return []
    for wanted in (name, f"{name}.weight"):
        found = [wanted] if wanted in weights else [other for other in weights if other.endswith(f".{wanted}")]
        if len(found) == 1:
            return found
    reasons.append(f"{setting} is {name!r}, which names no weight or several")
    return []


def _find_sides(
    weights: StateDict, candidates: list[str], settings: TorchSettings, what: str, reasons: list[str]
) -> tuple[str, str] | None:
    """Returns the source's and the target's table: those that the user named, others by what they are called."""
    sources = _look_up(weights, getattr(settings, f"source_{what}"), f"source_{what}", reasons)
    targets = _look_up(weights, getattr(settings, f"target_{what}"), f"target_{what}", reasons)
    if not sources and not targets:
        divided = _divide(candidates)
        if divided is None and candidates:
            reasons.append(f"source_{what} and target_{what} could be each of: {', '.join(candidates)}")
        return divided
    if not sources or not targets:
        named = sources or targets
        others = [name for name in candidates if name not in named] or named
        if len(others) > 1:
            reasons.append(f"{'target' if sources else 'source'}_{what} could be each of: {', '.join(others)}")
        sources, targets = sources or others, targets or others
    return sources[0], targets[0]


def _divide(names: list[str]) -> tuple[str, str] | None:
    """Returns the source's and the target's of one or two names."""
    if len(names) == 1:
        return names[0], names[0]
    for source, target in (names, reversed(names)) if len(names) == 2 else ():
        for pattern, of_side, of_other in ((_SOURCE_NAME, source, target), (_TARGET_NAME, target, source)):
            if pattern.search(of_side) and not pattern.search(of_other):
                return source, target
    return None


def _find_position_type(
    weights: StateDict, positions: tuple[str, str] | None, settings: TorchSettings
) -> tuple[str, str | None]:
    """Returns the kind of the positions, and what is wrong with them."""
    given = settings.position_embedding_type
    if positions is None:
        missing = "learned positions were not found: name them as source_positions and target_positions"
        return given or "sinusoidal", missing if given == "learned" else None
    if given is not None:
        return given, None
    for kind in SINUSOIDS:
        if check_sinusoids(weights[positions[0]], kind=kind, offset=settings.position_offset) is None:
            return kind, None
    return "learned", (
        f"{positions[0]} {tuple(weights[positions[0]].shape)} is no table of sinusoids ({', '.join(SINUSOIDS)}): "
        "if it was learned, say so by position_embedding_type='learned'"
    )


def _make_config(
    source: str, weights: StateDict, layout: _Layout, settings: TorchSettings, found: Mapping[str, Any]
) -> VanillaTransformerConfig:
    rows = None if layout.positions is None else as_rows(weights[layout.positions[0]])
    start = settings.decoder_start_token_id
    return make_config(
        source,
        **found,
        **layout.tables.describe(weights),
        **({} if rows is None else {"max_position_embeddings": rows.shape[0]}),
        position_embedding_type=layout.position_embedding_type,
        position_offset=settings.position_offset,
        scale_embedding=settings.scale_embedding,
        bos_token_id=settings.bos_token_id,
        pad_token_id=settings.pad_token_id,
        eos_token_id=settings.eos_token_id,
        decoder_start_token_id=settings.bos_token_id if start is None else start,
    )


def _make_rules(layout: _Layout, config: VanillaTransformerConfig, weights: StateDict) -> list[Rule]:
    """Returns what becomes of each name."""
    rules = layout.tables.make_rules(weights)
    for stack, prefix in layout.prefixes.items():
        ours, theirs = rf"model.{stack}.layers.\1", re.escape(prefix)
        rules.append(Rule(rf"{theirs}norm\.(weight|bias)", rf"model.{stack}.layer_norm.\1"))
        for our_name, their_name in ATTENTIONS.items():
            attention = rf"{theirs}layers\.(\d+)\.{their_name}"
            parts = [rf"{ours}.{our_name}.{part}_proj.\2" for part in ("q", "k", "v")]
            rules.append(Rule(rf"{attention}\.in_proj_(weight|bias)", parts))
            rules.append(Rule(rf"{attention}\.out_proj\.(weight|bias)", rf"{ours}.{our_name}.out_proj.\2"))
        for our_name, their_name in (NORMS[stack] | LINEAR_MAPS).items():
            module = rf"{theirs}layers\.(\d+)\.{their_name}"
            rules.append(Rule(rf"{module}\.(weight|bias)", rf"{ours}.{our_name}.\2"))
    if layout.positions is None:
        return rules
    source, target = layout.positions
    if config.position_embedding_type != "learned":
        return [
            make_sinusoids_rule(name, config.position_embedding_type, config.position_offset)
            for name in dict.fromkeys(layout.positions)
        ] + rules
    names = [f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")]
    if source != target:
        return [*rules, Rule(re.escape(source), names[0], _flatten), Rule(re.escape(target), names[1], _flatten)]
    # The model has a table per side, so one for both is doubled to be divided between them.
    return [*rules, Rule(re.escape(source), names, lambda table: torch.cat([_flatten(table)] * 2))]


def _flatten(table: torch.Tensor) -> torch.Tensor:
    rows = as_rows(table)
    return table if rows is None else rows


def _add_norm_biases(weights: StateDict, prefixes: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Adds zeros where torch's `bias=False` left even the norms without biases, which they have here."""
    stacks = "|".join(map(re.escape, prefixes.values()))
    norms = re.compile(rf"({stacks})(layers\.\d+\.norm\d|norm)\.(weight|bias)")
    found = [match for name in weights if (match := norms.fullmatch(name))]
    if any(match[3] == "bias" for match in found):
        return dict(weights)
    return {**weights, **{f"{match[1]}{match[2]}.bias": torch.zeros_like(weights[match[0]]) for match in found}}


# The check


def _make_original(
    config: VanillaTransformerConfig, weights: StateDict, layout: _Layout, module: nn.Module | None
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Puts the original's own weights, or stacks, between embeddings that are what the settings say."""
    # What is computed, the sinusoids, is rounded to the weights' type, as it is in the model.
    dtype = weights[layout.tables.source].dtype
    torch_model = TorchTransformer(config, bias=config.attention_bias).to(dtype).float()
    names = {"src_tok_emb.embedding.weight": layout.tables.source, "tgt_tok_emb.embedding.weight": layout.tables.target}
    names["generator.weight"] = layout.tables.output or layout.tables.target
    names["generator.bias"] = layout.tables.output_bias
    state = torch_model.state_dict()
    state |= {ours: weights[name] for ours, name in names.items() if ours in state}
    if config.position_embedding_type == "learned" and layout.positions is not None:
        for prefix, name in zip(("", "tgt_"), layout.positions, strict=True):
            state[f"{prefix}positional_encoding.pos_embedding"] = _flatten(weights[name])[
                config.position_offset :, None
            ]
    for stack, prefix in layout.prefixes.items():
        own = (name.removeprefix(prefix) for name in weights if name.startswith((f"{prefix}layers.", f"{prefix}norm.")))
        state |= {f"transformer.{stack}.{name}": weights[prefix + name] for name in own}
    torch_model.load_state_dict(state)
    if module is not None:
        for stack, part in _find_modules("the module", module).items():
            setattr(torch_model.transformer, stack, _as_batch_first(part))
    torch_model.eval()
    return lambda source, target: torch_model(source, target, source == config.pad_token_id)


def _as_batch_first(stack: nn.Module) -> nn.Module:
    """Returns a copy that takes (B, L, D), whatever the original takes, in float32."""
    stack = copy.deepcopy(stack).to(device="cpu", dtype=torch.float32)
    if isinstance(stack, nn.TransformerEncoder):
        stack.use_nested_tensor = False  # which shortens what is padded, and warns that it may change
    for part in stack.modules():
        if isinstance(part, nn.MultiheadAttention):
            part.batch_first = True
    return stack


def _compare(
    make_forward: Callable[[], Callable[[torch.Tensor, torch.Tensor], torch.Tensor]],
    model: VanillaTransformerForConditionalGeneration,
) -> tuple[torch.Tensor, torch.Tensor]:
    forward = make_forward()

    def compute(batch: Batch) -> torch.Tensor:
        return forward(batch["input_ids"], batch["decoder_input_ids"]).detach().float().cpu()

    return compare_with(compute, model)


def _make_notes(settings: TorchSettings, *, is_module: bool, has_forward: bool, layout: _Layout) -> list[str]:
    notes: list[str] = []
    # What the original is put together from too, where it has no forward pass of its own.
    unseen: dict[str, Any] = {"scale_embedding": settings.scale_embedding, "position_offset": settings.position_offset}
    if layout.positions is None:
        unseen["position_embedding_type"] = layout.position_embedding_type
    if not is_module:
        assumed = {name: value for name, value in TORCH_DEFAULTS.items() if getattr(settings, name) is None}
        if assumed:
            notes.append(f"Assumed, torch's defaults, since a state dict does not tell: {_list_values(assumed)}.")
        chosen = _choose_settings(settings)
        chosen.pop("dropout")  # which is off where logits are compared
        unseen = chosen | unseen
    if not has_forward:
        place = "in the code around torch.nn.Transformer" if is_module else "not in the weights"
        notes.append(f"A comparison of logits cannot find a mistake in what is {place}: {_list_values(unseen)}.")
    notes.append(
        f"Special tokens are what the settings say: bos {settings.bos_token_id}, pad {settings.pad_token_id}, eos "
        f"{settings.eos_token_id}."
    )
    return notes


def _list_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
