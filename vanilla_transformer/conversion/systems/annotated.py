"""The Transformer of harvardnlp's "The Annotated Transformer", a model that many have typed or copied.

    src_embed.0.lut.weight, tgt_embed.0.lut.weight              (V, D)
    src_embed.1.pe, tgt_embed.1.pe                              (1, N, D), the paper's sinusoids
    encoder.layers.0.self_attn.linears.0 ... 3                  W^Q, W^K, W^V, W^O; the decoder's src_attn too
    encoder.layers.0.feed_forward.w_1, w_2
    encoder.layers.0.sublayer.0.norm.a_2, b_2                   gain and bias of the norm before each sub-layer
    encoder.norm.a_2, b_2                                       and of the one after each stack
    generator.proj.weight, generator.proj.bias                  (V, D), (V,)

Its norm is not torch's. It divides by the unbiased standard deviation s, and adds eps to that, a (x - mean) / (s + eps)
+ b; torch's is g (x - mean) / sqrt(v + eps) + b with the biased variance v = s^2 (D - 1) / D. The gain
g = a sqrt((D - 1) / D) makes up for the first. For the second nothing does exactly: with the same number for both
eps = 1e-6, the norms differ by less than 6e-7 of their values where s is 0.5 or more, by 2e-6 at 0.3, 4e-5 at 0.1.
"""

import copy
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from vanilla_transformer.conversion.comparing import Batch, compare_with
from vanilla_transformer.conversion.converted import ConvertedModel, build_model
from vanilla_transformer.conversion.errors import refuse
from vanilla_transformer.conversion.state_dicts import (
    StateDict,
    Tables,
    check_entries,
    count_layers,
    make_config,
    make_sinusoids_rule,
    read_state_dict,
)
from vanilla_transformer.conversion.weights import Rule
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig

_ANCHOR = "encoder.layers.0.self_attn.linears.0.weight"
_ATTENTIONS = {"self_attn": "self_attn", "src_attn": "encoder_attn"}
_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}


@dataclass(frozen=True, kw_only=True)
class AnnotatedSettings:
    """What weights alone do not tell; the defaults are the original's.

    Args:
        heads: Number of attention heads. `None`: what the module has; for a state dict, 8.
        layer_norm_eps: Added to the standard deviation in every norm.
        dropout: Probability of dropping, in training; attention weights and inner activations are dropped too.
        bos_token_id: The token that starts a sentence, and the decoder's input.
        pad_token_id: The token that fills batches.
        eos_token_id: The token that ends a sentence.
    """

    heads: int | None = None
    layer_norm_eps: float = 1e-6
    dropout: float = 0.1
    bos_token_id: int = 0
    pad_token_id: int = 2
    eos_token_id: int = 1


def convert_annotated(
    original: nn.Module | StateDict | str | os.PathLike[str], settings: AnnotatedSettings | None = None
) -> ConvertedModel:
    """Brings a model of the Annotated Transformer into this package's form.

    Args:
        original: The `EncoderDecoder` that `make_model` makes, whose logits can be compared; its state dict; or a file
            with that.
        settings: What the weights do not tell.

    Returns:
        The model, without a tokenizer.

    Raises:
        ConversionError: Lists what is missing, and which weights do not fit.
    """
    settings = settings or AnnotatedSettings()
    module = original if isinstance(original, nn.Module) else None
    source = "the Annotated Transformer" + (f" of {original}" if isinstance(original, (str, os.PathLike)) else "")
    weights = read_state_dict(cast(Any, original) if module is None else module.state_dict())
    anchors = [name for name in weights if name.endswith(_ANCHOR)]
    refuse(
        f"The names of {source} are not those of the Annotated Transformer",
        [] if len(anchors) == 1 else [f"{len(anchors)} names end in {_ANCHOR} (can be: one)"],
    )
    prefix = anchors[0].removesuffix(_ANCHOR)
    tables = Tables(
        source=f"{prefix}src_embed.0.lut.weight",
        target=f"{prefix}tgt_embed.0.lut.weight",
        output=f"{prefix}generator.proj.weight",
    )
    config = _make_config(source, weights, prefix, tables, settings, _read_heads(module, settings))
    model = build_model(config, weights, _make_rules(prefix, config, tables, weights), source=source)
    return ConvertedModel(
        source=source,
        model=model,
        compare=None if module is None else partial(compare_with, _make_original(module, settings), model),
        notes=_make_notes(settings, module),
    )


def _read_heads(module: nn.Module | None, settings: AnnotatedSettings) -> int:
    """Returns the number of heads, which only the module knows, or the user."""
    parts: list[Any] = [] if module is None else list(module.modules())
    told = {part.h for part in parts if isinstance(getattr(part, "h", None), int)}
    found: int | None = told.pop() if len(told) == 1 else None
    if found is not None and settings.heads not in (None, found):
        refuse("The settings do not fit", [f"heads is {settings.heads} (the module has {found})"])
    return settings.heads or found or 8


def _make_config(
    source: str, weights: StateDict, prefix: str, tables: Tables, settings: AnnotatedSettings, heads: int
) -> VanillaTransformerConfig:
    stacks = ("encoder", "decoder")
    inner = {stack: f"{prefix}{stack}.layers.0.feed_forward.w_1.weight" for stack in stacks}
    positions = f"{prefix}src_embed.1.pe"
    needed = (tables.source, tables.target, f"{tables.output}", *inner.values())
    check_entries(source, weights, {**dict.fromkeys(needed, 2), positions: 3})
    return make_config(
        source,
        d_model=weights[tables.source].shape[1],
        max_position_embeddings=weights[positions].shape[1],
        **{f"{stack}_layers": count_layers(weights, f"{prefix}{stack}.layers.") for stack in stacks},
        **{f"{stack}_ffn_dim": weights[inner[stack]].shape[0] for stack in stacks},
        **{f"{stack}_attention_heads": heads for stack in stacks},
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), settings.dropout),
        **tables.describe(weights),
        attention_bias=True,
        normalize_before=True,
        layer_norm_eps=settings.layer_norm_eps,
        bos_token_id=settings.bos_token_id,
        pad_token_id=settings.pad_token_id,
        eos_token_id=settings.eos_token_id,
        decoder_start_token_id=settings.bos_token_id,
    )


def _make_rules(prefix: str, config: VanillaTransformerConfig, tables: Tables, weights: StateDict) -> list[Rule]:
    """Returns what becomes of each name."""
    start = re.escape(prefix)
    rules = tables.make_rules(weights)
    rules += [make_sinusoids_rule(f"{prefix}{side}_embed.1.pe", "sinusoidal", 0) for side in ("src", "tgt")]
    for stack, norms in _NORMS.items():
        theirs, ours = rf"{start}{stack}\.layers\.(\d+)", rf"model.{stack}.layers.\1"
        for their_name, our_name in _ATTENTIONS.items():
            for index, part in enumerate(("q_proj", "k_proj", "v_proj", "out_proj")):
                pattern = rf"{theirs}\.{their_name}\.linears\.{index}\.(weight|bias)"
                rules.append(Rule(pattern, rf"{ours}.{our_name}.{part}.\2"))
        for number in (1, 2):
            rules.append(Rule(rf"{theirs}\.feed_forward\.w_{number}\.(weight|bias)", rf"{ours}.fc{number}.\2"))
        for index, norm in enumerate(norms):
            rules += _make_norm_rules(rf"{theirs}\.sublayer\.{index}\.norm", f"{ours}.{norm}")
        rules += _make_norm_rules(rf"{start}{stack}\.norm", f"model.{stack}.layer_norm")
    return rules


def _make_norm_rules(theirs: str, ours: str) -> list[Rule]:
    return [Rule(rf"{theirs}\.a_2", f"{ours}.weight", _adapt_gain), Rule(rf"{theirs}\.b_2", f"{ours}.bias")]


def _adapt_gain(gain: torch.Tensor) -> torch.Tensor:
    """Makes up for the standard deviation, which is unbiased in the original and biased in torch."""
    return gain * math.sqrt((len(gain) - 1) / len(gain))


def _make_original(module: nn.Module, settings: AnnotatedSettings) -> Callable[[Batch], torch.Tensor]:
    """Returns how a copy of the original computes logits, with masks that are true where attention is allowed."""
    original: Any = copy.deepcopy(module).to(device="cpu", dtype=torch.float32).eval()

    def compute(batch: Batch) -> torch.Tensor:
        source, target = batch["input_ids"], batch["decoder_input_ids"]
        length = target.shape[1]
        source_mask = (source != settings.pad_token_id)[:, None]
        target_mask = torch.ones(1, length, length, dtype=torch.bool).tril()
        return original.generator.proj(original(source, target, source_mask, target_mask))

    return compute


def _make_notes(settings: AnnotatedSettings, module: nn.Module | None) -> tuple[str, ...]:
    notes = [
        "The original's norms add eps to the standard deviation, and ours add it to the variance: logits differ by "
        "about 1e-6 of the largest, and by more where a norm's input varies by much less than 0.5.",
        f"Special tokens are what the settings say: bos {settings.bos_token_id}, pad {settings.pad_token_id}, eos "
        f"{settings.eos_token_id}. There is no tokenizer: the original keeps none with its weights. Its sources begin "
        "with bos and end with eos.",
    ]
    if module is None and settings.heads is None:
        notes.append("A state dict does not tell the number of heads, so the original's was taken: heads=8.")
    if module is None:
        notes.append("Not checked against the original, whose code is not in the weights: give its module for that.")
    return tuple(notes)
