"""torch.nn.Transformer with embeddings around it becomes this package's model; `to_torch_nn` is the way back.

torch.nn.Transformer is the two stacks alone. What is around them has the names of PyTorch's tutorial (see
`torch_module`), or must be named. After its last layer each stack has one more norm, in post-LN too.
"""

import copy
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.conversion.converted import Batch, ConvertedModel, build_model, compare_with
from vanilla_transformer.conversion.errors import ConversionError, refuse
from vanilla_transformer.conversion.weights import (
    Rule,
    StateDict,
    as_rows,
    check_entries,
    check_sinusoids,
    count_layers,
    describe_tables,
    make_config,
    module_rules,
    read_state_dict,
)
from vanilla_transformer.data.vocabularies import load_tokenizer
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.positions_vanilla_transformer import SINUSOIDS

from .library import check_tokenizer
from .torch_module import (
    ACTIVATIONS,
    ATTENTIONS,
    DROPOUTS,
    LINEAR_MAPS,
    NORMS,
    SETTINGS_NAME,
    WEIGHTS_NAME,
    TorchTransformer,
)

# What tells a stack among other weights: only the decoder's layers attend to something else.
_FIRST_WEIGHTS = {"encoder": "layers.0.self_attn.in_proj_weight", "decoder": "layers.0.multihead_attn.in_proj_weight"}
_SIDES = {"src": "encoder", "tgt": "decoder"}
_POSITIONS = "positional_encoding.pos_embedding"
# The tutorial's names of what is around the stacks, by the settings that say other names.
_AROUND = {
    "source_embedding": "src_tok_emb.embedding.weight",
    "target_embedding": "tgt_tok_emb.embedding.weight",
    "output_layer": "generator.weight",
    "source_positions": _POSITIONS,
    "target_positions": f"tgt_{_POSITIONS}",
}
# What is taken for a state dict where nobody says more. Heads are not among them: a check with a wrong number of them,
# that divides d_model too, finds nothing.
TORCH_DEFAULTS: dict[str, Any] = {"activation": "relu", "norm_first": False, "layer_norm_eps": 1e-5, "dropout": 0.1}
_LAYER_SETTINGS = ("nhead", *TORCH_DEFAULTS, *DROPOUTS[1:])


def _make_rules() -> list[Rule]:
    names = {r"transformer\.(encoder|decoder)\.norm": r"model.\1.layer_norm", "generator": "lm_head"}
    names |= {rf"{side}_tok_emb\.embedding": f"model.{stack}.embed_tokens" for side, stack in _SIDES.items()}
    rules = module_rules(names)
    for stack, norms in NORMS.items():
        theirs, ours = rf"transformer\.{stack}\.layers\.(\d+)\.", rf"model.{stack}.layers.\1."
        parts = {their_name: our_name for our_name, their_name in (norms | LINEAR_MAPS).items()}
        parts |= {rf"{their_name}\.out_proj": f"{our_name}.out_proj" for our_name, their_name in ATTENTIONS.items()}
        rules += module_rules(parts, theirs=theirs, ours=ours)
        for our_name, their_name in ATTENTIONS.items():
            targets = [rf"{ours}{our_name}.{part}_proj.\2" for part in ("q", "k", "v")]
            rules.append(Rule(rf"{theirs}{their_name}\.in_proj_(weight|bias)", targets))
    return rules


_RULES = _make_rules()


@dataclass(frozen=True, kw_only=True)
class TorchSettings:
    """What weights alone do not tell of a model around torch.nn.Transformer.

    Args:
        nhead: Number of attention heads. `None`: the module's; for a state dict it must be said, and divide d_model.
        activation: "relu", "gelu" or "silu". `None`: the module's; for a state dict "relu". Where torch was given a
            module such as `nn.GELU()`, its decoder took relu all the same, and such a model cannot be converted.
        norm_first: Whether norms come before sub-layers (pre-LN). `None`: as in the module; for a state dict, no.
        layer_norm_eps: Added to the variance in every norm. `None`: the module's; for a state dict 1e-5.
        dropout: Probability of dropping, in training. `None`: the module's; for a state dict 0.1.
        attention_dropout: The same of attention weights. `None`: the module's; for a state dict `dropout`, as in torch.
        activation_dropout: The same of inner activations, likewise.
        scale_embedding: Whether embeddings are multiplied by sqrt(d_model).
        position_embedding_type: As in `VanillaTransformerConfig`. `None`: the sinusoids that the table holds, and
            "sinusoidal" if there is no table.
        position_offset: Position of a sentence's first token.
        source_embedding: Name of the source's embeddings. `None`: the tutorial's.
        target_embedding: Name of the target's embeddings. `None`: the tutorial's (or the source's, if it has none).
        output_layer: Name of the output layer's weight. `None`: the tutorial's, or else the target's embeddings.
        source_positions: Name of the source's table of positions. `None`: the tutorial's, if there is one.
        target_positions: Name of the target's table of positions. `None`: the source's.
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
    attention_dropout: float | None = None
    activation_dropout: float | None = None
    scale_embedding: bool = True
    position_embedding_type: str | None = None
    position_offset: int = 0
    source_embedding: str | None = None
    target_embedding: str | None = None
    output_layer: str | None = None
    source_positions: str | None = None
    target_positions: str | None = None
    bos_token_id: int | None = 2
    pad_token_id: int | None = 1
    eos_token_id: int | None = 3
    decoder_start_token_id: int | None = None


def read_torch_settings(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Returns what the `settings.json` of `save_as_torch_nn` says, in its folder or beside the weights, if any."""
    path = Path(path)
    file = (path if path.is_dir() else path.parent) / SETTINGS_NAME
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{file}, which is to tell what the weights do not, is no JSON: {error}") from error
    if not isinstance(content, dict) or not {"nhead", "norm_first"} <= set(content):
        return None
    known: dict[str, Any] = {field.name: field.type for field in fields(TorchSettings)}
    reasons = [f"{name} (can be: {', '.join(known)})" for name in content if name not in known]
    reasons += [
        f"{name} is {value!r} (can be: {getattr(known[name], '__name__', known[name])})"
        for name, value in content.items()
        # JSON's numbers have one kind: a float may have been written as 0.
        if name in known and not isinstance(value, known[name] | (int if isinstance(0.0, known[name]) else known[name]))
    ]
    refuse(f"{file} has settings that are not known", reasons)
    return content


def convert_torch_nn(
    original: nn.Module | StateDict | str | os.PathLike[str],
    settings: TorchSettings | None = None,
    *,
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> ConvertedModel:
    """Brings a model around torch.nn.Transformer into this package's form.

    Args:
        original: A module that holds an nn.Transformer (or its two stacks) and embeddings, if need be an
            `nn.ModuleDict` of them; its state dict; a file with that; or a folder of `save_as_torch_nn`.
        settings: What the weights do not tell (see [`read_torch_settings`]). `None`: `settings.json` beside the file.
        forward: How the original computes logits (B, T, V) from ids (B, S) and (B, T), for the check. `None`: none.
    """
    module = original if isinstance(original, nn.Module) else None
    place = Path(original) if isinstance(original, (str, os.PathLike)) else None
    saved = None if place is None else read_torch_settings(place)
    settings = settings or TorchSettings(**(saved or {}))
    source = "the torch.nn.Transformer" + (f" of {place}" if place else "")
    if place is not None and saved is not None and place.is_dir():
        original = place / WEIGHTS_NAME
    weights = read_state_dict(cast(Any, original) if module is None else module.state_dict())
    weights = _name_as_tutorial(source, weights, settings)
    sizes = _read_sizes(source, weights)
    told = (
        _read_settings(source, settings, sizes["d_model"]) if module is None else _read_module(source, module, settings)
    )
    config = _make_config(source, weights, settings, sizes | told)
    rules = [*_RULES, *_make_position_rules(config)]
    model = build_model(config, _add_norm_biases(weights), rules, source=source)
    tokenizer = None if place is None or saved is None else _load_tokenizer(place, config, source)
    notes = _make_notes(settings, weights, is_module=module is not None, has_forward=forward is not None)
    if tokenizer is None:
        notes.append("There is no tokenizer: the original keeps none with its weights.")

    def compare() -> tuple[torch.Tensor, torch.Tensor]:
        run = forward or _make_original(config, weights, module)

        def compute(batch: Batch) -> torch.Tensor:
            return run(batch["input_ids"], batch["decoder_input_ids"]).detach().float().cpu()

        return compare_with(compute, model)

    return ConvertedModel(source=source, model=model, tokenizer=tokenizer, compare=compare, notes=tuple(notes))


def _load_tokenizer(place: Path, config: VanillaTransformerConfig, source: str) -> PreTrainedTokenizerBase | None:
    folder = place if place.is_dir() else place.parent
    try:
        tokenizer = load_tokenizer(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConversionError(f"The tokenizer in {folder} cannot be read: {error}") from error
    if tokenizer is not None:
        check_tokenizer(tokenizer, config, source)
    return tokenizer


def _name_as_tutorial(source: str, weights: StateDict, settings: TorchSettings) -> dict[str, torch.Tensor]:
    """Returns the weights by the tutorial's names; what is found under no name keeps its own."""
    named = dict(weights)
    for stack, prefix in _find_stacks(source, weights).items():
        for name in [name for name in weights if name.startswith((f"{prefix}layers.", f"{prefix}norm."))]:
            named[f"transformer.{stack}.{name.removeprefix(prefix)}"] = named.pop(name)
    reasons: list[str] = []
    found: dict[str, str] = {}
    for setting, ours in _AROUND.items():
        given = getattr(settings, setting)
        # An embedding may be torch's module itself.
        names = [ours, ours.replace(".embedding.", ".")] if given is None else [given, f"{given}.weight"]
        place = _look_up(named, names)
        if place is not None:
            found[ours] = place
        elif given is not None:
            reasons.append(f"{setting} is {given!r}, which names no weight or several")
        elif setting == "source_embedding":
            outside = ", ".join(name for name in named if not name.startswith("transformer.")) or "no weights"
            advice = f"name them as source_embedding and target_embedding (outside the stacks are {outside})"
            reasons.append(f"no embeddings are called as in PyTorch's tutorial: {advice}")
    refuse(f"What is around the stacks of {source} is not clear", reasons)
    found.setdefault(_AROUND["target_embedding"], found[_AROUND["source_embedding"]])
    output = found.get("generator.weight", "")
    if (bias := output.removesuffix("weight") + "bias") in named:
        found["generator.bias"] = bias
    if _POSITIONS in found:
        found.setdefault(f"tgt_{_POSITIONS}", found[_POSITIONS])
    rest = {name: weight for name, weight in named.items() if name not in found.values()}
    return rest | {ours: named[name] for ours, name in found.items()}


def _find_stacks(source: str, weights: StateDict) -> dict[str, str]:
    """Returns what the names of each stack's weights begin with."""
    found = {
        stack: [name.removesuffix(first) for name in weights if name.endswith(first)]
        for stack, first in _FIRST_WEIGHTS.items()
    }
    found["encoder"] = [prefix for prefix in found["encoder"] if prefix not in found["decoder"]]
    reasons = [f"several {stack}s: {', '.join(map(repr, each))}" for stack, each in found.items() if len(each) > 1]
    missing = [stack for stack, each in found.items() if not each]
    reasons += [f"no {stack}: no other name ends in {_FIRST_WEIGHTS[stack]}" for stack in missing]
    refuse(f"{source[0].upper()}{source[1:]} must have one encoder and one decoder, and has", reasons)
    return {stack: prefix for stack, (prefix,) in found.items()}


def _look_up(weights: StateDict, names: Sequence[str]) -> str | None:
    """Returns the one weight that has one of these names, in full or behind something such as "module."."""
    for wanted in names:
        found = [wanted] if wanted in weights else [other for other in weights if other.endswith(f".{wanted}")]
        if len(found) == 1:
            return found[0]
    return None


def _read_sizes(source: str, weights: StateDict) -> dict[str, Any]:
    """Returns the fields of the configuration that the stacks' weights tell."""
    first = {stack: f"transformer.{stack}.{name}" for stack, name in _FIRST_WEIGHTS.items()}
    inner = {stack: f"transformer.{stack}.layers.0.linear1.weight" for stack in first}
    check_entries(source, weights, dict.fromkeys((*first.values(), *inner.values()), 2))
    having = [stack for stack in first if f"transformer.{stack}.norm.weight" in weights]
    reasons = [f"only the {having[0]} has one (can be: both stacks or none)"] if len(having) == 1 else []
    refuse(f"The last norms of {source} cannot be converted", reasons)
    return {
        "d_model": weights[first["encoder"]].shape[1],
        **{f"{stack}_layers": count_layers(weights, f"transformer.{stack}.layers.") for stack in first},
        **{f"{stack}_ffn_dim": weights[name].shape[0] for stack, name in inner.items()},
        "attention_bias": "transformer.encoder.layers.0.self_attn.in_proj_bias" in weights,
        "ffn_bias": "transformer.encoder.layers.0.linear1.bias" in weights,
        "add_final_layer_norm": bool(having),
    }


def _read_settings(source: str, settings: TorchSettings, d_model: int) -> dict[str, Any]:
    """Returns the fields of the configuration that a state dict leaves to the user, or to torch's defaults."""
    chosen = _choose_settings(settings)
    reasons = [] if chosen["activation"] in ACTIVATIONS else [_explain_activation(chosen["activation"])]
    if settings.nhead is None:
        advice = f"say --nhead (nhead= in Python); it must divide d_model={d_model}, and torch's own default is 8"
        reasons.append(f"The number of heads is not in the weights: {advice}")
    refuse(f"With these settings {source} cannot be converted", reasons)
    return _name_fields(chosen)


def _choose_settings(settings: TorchSettings) -> dict[str, Any]:
    given = {name: getattr(settings, name) for name in _LAYER_SETTINGS if getattr(settings, name) is not None}
    return {"nhead": None, **TORCH_DEFAULTS, **given}


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
    reasons = []
    for stack, parts in found.items():
        if len(parts) != 1:
            reasons.append(f"{len(parts)} modules are an nn.{kinds[stack][0].__name__} (can be: one)")
        layers = [layer for part in parts for layer in cast(Any, part).layers]
        foreign = {type(layer).__name__ for layer in layers if not isinstance(layer, kinds[stack][1])}
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


def _make_config(
    source: str, weights: StateDict, settings: TorchSettings, found: Mapping[str, Any]
) -> VanillaTransformerConfig:
    table = weights.get(_POSITIONS)
    rows = None if table is None else as_rows(table)
    start = settings.decoder_start_token_id
    same = ("position_offset", "scale_embedding", "bos_token_id", "pad_token_id", "eos_token_id")
    return make_config(
        source,
        **found,
        **describe_tables(weights, *list(_AROUND.values())[:3]),
        **({} if rows is None else {"max_position_embeddings": rows.shape[0]}),
        position_embedding_type=_find_position_type(table, settings),
        **{name: getattr(settings, name) for name in same},
        decoder_start_token_id=settings.bos_token_id if start is None else start,
    )


def _find_position_type(table: torch.Tensor | None, settings: TorchSettings) -> str:
    given = settings.position_embedding_type
    if table is None and given == "learned":
        raise ConversionError("Learned positions were not found: name them as source_positions and target_positions.")
    if given is not None or table is None:
        return given or "sinusoidal"
    for kind in SINUSOIDS:
        if check_sinusoids(table, kind=kind, starts=(0, settings.position_offset)) is None:
            return kind
    raise ConversionError(
        f"{settings.source_positions or _POSITIONS} {tuple(table.shape)} is no table of sinusoids"
        f" ({', '.join(SINUSOIDS)}): if it was learned, say so by position_embedding_type='learned'."
    )


def _make_position_rules(config: VanillaTransformerConfig) -> list[Rule]:
    name, kind = re.escape(_POSITIONS), config.position_embedding_type
    if kind == "learned":
        names = {name: "encoder", f"tgt_{name}": "decoder"}
        return [Rule(theirs, f"model.{stack}.embed_positions.weight", _flatten) for theirs, stack in names.items()]
    check = partial(check_sinusoids, kind=kind, starts=(0, config.position_offset))
    return [Rule(f"(?:tgt_)?{name}", (), check=check)]


def _flatten(table: torch.Tensor) -> torch.Tensor:
    rows = as_rows(table)
    return table if rows is None else rows


def _add_norm_biases(weights: StateDict) -> dict[str, torch.Tensor]:
    """Adds zeros where torch's `bias=False` left even the norms without biases, which they have here."""
    norms = [name for name in weights if re.fullmatch(r"transformer\..*\bnorm\d?\.(weight|bias)", name)]
    if any(name.endswith("bias") for name in norms):
        return dict(weights)
    return {**weights, **{f"{name.removesuffix('weight')}bias": torch.zeros_like(weights[name]) for name in norms}}


def _make_original(
    config: VanillaTransformerConfig, weights: StateDict, module: nn.Module | None
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Puts the original's own weights, or stacks, between embeddings that are what the settings say."""
    # What is computed, the sinusoids, is rounded to the weights' type, as it is in the model.
    dtype = weights[_AROUND["source_embedding"]].dtype
    torch_model = TorchTransformer(config, bias=config.attention_bias).to(dtype).float()
    state = torch_model.state_dict()
    given = {"generator.weight": weights[_AROUND["target_embedding"]], **weights}
    if config.position_embedding_type == "learned":
        tables = {name: _flatten(given[name]) for name in (_POSITIONS, f"tgt_{_POSITIONS}")}
        given |= {name: table[config.position_offset :, None] for name, table in tables.items()}
    else:
        given.pop(_POSITIONS, None)
    torch_model.load_state_dict({name: given.get(name, tensor) for name, tensor in state.items()})
    if module is not None:
        for stack, part in _find_modules("the module", module).items():
            setattr(torch_model.transformer, stack, _as_batch_first(part))
    torch_model.eval()
    pad = config.pad_token_id
    return lambda source, target: torch_model(source, target, None if pad is None else source == pad)


def _as_batch_first(stack: nn.Module) -> nn.Module:
    """Returns a copy that takes (B, L, D), whatever the original takes, in float32."""
    stack = copy.deepcopy(stack).to(device="cpu", dtype=torch.float32)
    if isinstance(stack, nn.TransformerEncoder):
        stack.use_nested_tensor = False  # which shortens what is padded, and warns that it may change
    for part in stack.modules():
        if isinstance(part, nn.MultiheadAttention):
            part.batch_first = True
    return stack


def _make_notes(settings: TorchSettings, weights: StateDict, *, is_module: bool, has_forward: bool) -> list[str]:
    notes: list[str] = []
    # What the original is put together from too, where it has no forward pass of its own.
    unseen: dict[str, Any] = {"scale_embedding": settings.scale_embedding, "position_offset": settings.position_offset}
    if _POSITIONS not in weights:
        unseen["position_embedding_type"] = settings.position_embedding_type or "sinusoidal"
    if not is_module:
        if assumed := {name: value for name, value in TORCH_DEFAULTS.items() if getattr(settings, name) is None}:
            notes.append(f"Assumed, torch's defaults, since a state dict does not tell: {_list_values(assumed)}.")
        chosen = _choose_settings(settings)
        for name in DROPOUTS:  # which are off where logits are compared
            chosen.pop(name, None)
        unseen = chosen | unseen
    if not has_forward:
        place = "in the code around torch.nn.Transformer" if is_module else "not in the weights"
        notes.append(f"A comparison of logits cannot find a mistake in what is {place}: {_list_values(unseen)}.")
    special = ", ".join(f"{name} {getattr(settings, f'{name}_token_id')}" for name in ("bos", "pad", "eos"))
    return [*notes, f"Special tokens are what the settings say: {special}."]


def _list_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
