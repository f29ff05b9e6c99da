"""The Transformer of harvardnlp's "The Annotated Transformer", a model that many have typed or copied.

    src_embed.0.lut.weight, tgt_embed.0.lut.weight              (V, D)
    src_embed.1.pe, tgt_embed.1.pe                              (1, N, D), the paper's sinusoids
    encoder.layers.0.self_attn.linears.0 ... 3                  W^Q, W^K, W^V, W^O; the decoder's src_attn too
    encoder.layers.0.feed_forward.w_1, w_2
    encoder.layers.0.sublayer.0.norm.a_2, b_2                   gain and bias of the norm before each sub-layer
    encoder.norm.a_2, b_2                                       and of the one after each stack
    generator.proj.weight, generator.proj.bias                  (V, D), (V,)

Its norm, a (x - mean) / (s + eps) + b, divides by the unbiased standard deviation s; torch's is
g (x - mean) / sqrt(v + eps) + b with v = s^2 (D - 1) / D. The gain g = a sqrt((D - 1) / D) makes up for the first. With
the same eps = 1e-6 the norms differ by less than 6e-7 of their values where s is 0.5 or more, by 4e-5 at 0.1.
"""

import math
import os
from dataclasses import dataclass
from functools import partial

import torch

from vanilla_transformer.conversion.converted import ConvertedModel, build_model
from vanilla_transformer.conversion.errors import refuse
from vanilla_transformer.conversion.weights import (
    Rule,
    StateDict,
    check_entries,
    check_sinusoids,
    count_layers,
    describe_tables,
    make_config,
    module_rules,
    read_state_dict,
)

_ANCHOR = "encoder.layers.0.self_attn.linears.0.weight"
_TABLES = ("src_embed.0.lut.weight", "tgt_embed.0.lut.weight", "generator.proj.weight")


@dataclass(frozen=True, kw_only=True)
class AnnotatedSettings:
    """What weights alone do not tell; the defaults are the original's.

    Args:
        heads: Number of attention heads.
        layer_norm_eps: Added to the standard deviation in every norm.
        dropout: Probability of dropping, in training; attention weights and inner activations are dropped too.
        bos_token_id: The token that starts a sentence, and the decoder's input.
        pad_token_id: The token that fills batches.
        eos_token_id: The token that ends a sentence.
    """

    heads: int = 8
    layer_norm_eps: float = 1e-6
    dropout: float = 0.1
    bos_token_id: int = 0
    pad_token_id: int = 2
    eos_token_id: int = 1


def adapt_gain(gain: torch.Tensor) -> torch.Tensor:
    """Makes up for the standard deviation, which is unbiased in the original and biased in torch."""
    return gain * math.sqrt((len(gain) - 1) / len(gain))


_LAYER, _OURS = r"(encoder|decoder)\.layers\.(\d+)\.", r"model.\1.layers.\2."
_SIDES = {"src": "encoder", "tgt": "decoder"}
_LAYER_NAMES = {r"feed_forward\.w_([12])": r"fc\3"}
for _index, _part in enumerate(("q_proj", "k_proj", "v_proj", "out_proj")):
    _LAYER_NAMES |= {rf"self_attn\.linears\.{_index}": f"self_attn.{_part}"}
    _LAYER_NAMES |= {rf"src_attn\.linears\.{_index}": f"encoder_attn.{_part}"}
_NORMS = {
    r"(encoder|decoder)\.layers\.(\d+)\.sublayer\.0": r"model.\1.layers.\2.self_attn_layer_norm",
    r"(encoder)\.layers\.(\d+)\.sublayer\.1": r"model.\1.layers.\2.final_layer_norm",
    r"(decoder)\.layers\.(\d+)\.sublayer\.1": r"model.\1.layers.\2.encoder_attn_layer_norm",
    r"(decoder)\.layers\.(\d+)\.sublayer\.2": r"model.\1.layers.\2.final_layer_norm",
    r"(encoder|decoder)": r"model.\1.layer_norm",
}
_RULES = (
    Rule(r"(?:src|tgt)_embed\.1\.pe", (), check=partial(check_sinusoids, kind="sinusoidal")),
    *module_rules({rf"{s}_embed\.0\.lut": f"model.{ours}.embed_tokens" for s, ours in _SIDES.items()}),
    *module_rules({r"generator\.proj": "lm_head"}),
    *module_rules(_LAYER_NAMES, theirs=_LAYER, ours=_OURS),
    *(Rule(rf"{theirs}\.norm\.a_2", f"{ours}.weight", adapt_gain) for theirs, ours in _NORMS.items()),
    *(Rule(rf"{theirs}\.norm\.b_2", f"{ours}.bias") for theirs, ours in _NORMS.items()),
)


def convert_annotated(
    original: StateDict | str | os.PathLike[str], settings: AnnotatedSettings | None = None
) -> ConvertedModel:
    """Brings a model of the Annotated Transformer into this package's form, without a tokenizer.

    Args:
        original: The state dict of the `EncoderDecoder` that `make_model` makes, or a file with that.
        settings: What the weights do not tell.
    """
    settings = settings or AnnotatedSettings()
    source = "the Annotated Transformer" + (f" of {original}" if isinstance(original, (str, os.PathLike)) else "")
    weights = read_state_dict(original)
    anchors = [name for name in weights if name.endswith(_ANCHOR)]
    reasons = [] if len(anchors) == 1 else [f"{len(anchors)} names end in {_ANCHOR} (can be: one)"]
    refuse(f"The names of {source} are not those of the Annotated Transformer", reasons)
    prefix = anchors[0].removesuffix(_ANCHOR)
    weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    inner = {stack: f"{stack}.layers.0.feed_forward.w_1.weight" for stack in ("encoder", "decoder")}
    check_entries(source, weights, {**dict.fromkeys((*_TABLES, *inner.values()), 2), "src_embed.1.pe": 3})
    config = make_config(
        source,
        d_model=weights[_TABLES[0]].shape[1],
        max_position_embeddings=weights["src_embed.1.pe"].shape[1],
        **{f"{stack}_layers": count_layers(weights, f"{stack}.layers.") for stack in inner},
        **{f"{stack}_ffn_dim": weights[name].shape[0] for stack, name in inner.items()},
        **{f"{stack}_attention_heads": settings.heads for stack in inner},
        **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), settings.dropout),
        **describe_tables(weights, *_TABLES),
        attention_bias=True,
        normalize_before=True,
        **{
            name: getattr(settings, name) for name in ("layer_norm_eps", "bos_token_id", "pad_token_id", "eos_token_id")
        },
        decoder_start_token_id=settings.bos_token_id,
    )
    model = build_model(config, weights, _RULES, source=source)
    notes = (
        "The original's norms add eps to the standard deviation, and ours add it to the variance: logits differ by "
        "about 1e-6 of the largest, and by more where a norm's input varies by much less than 0.5.",
        f"Special tokens are what the settings say: bos {settings.bos_token_id}, pad {settings.pad_token_id}, eos "
        f"{settings.eos_token_id}. There is no tokenizer: the original keeps none with its weights. Its sources begin "
        "with bos and end with eos.",
        f"A state dict does not tell the number of heads: heads={settings.heads}, as the settings say (the original's "
        "default is 8). Nothing was compared with the original, whose code is not in the weights.",
    )
    return ConvertedModel(source=source, model=model, notes=notes)
