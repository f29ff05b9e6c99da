"""A model as plain torch: torch.nn.Transformer between embeddings and output layer, without transformers.

The names of weights are those of PyTorch's tutorial on translation with nn.Transformer:

    src_tok_emb.embedding.weight, tgt_tok_emb.embedding.weight                (V, D)
    positional_encoding.pos_embedding           (N, 1, D), of which row i belongs to a sentence's token i
    tgt_positional_encoding.pos_embedding       (N, 1, D), only for learned positions, of which each side has its own
    transformer.encoder.*, transformer.decoder.*
    generator.weight, generator.bias            (V, D), (V,)
"""

import copy
import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.conversion.converted import Batch, as_float32, check_counterpart
from vanilla_transformer.conversion.errors import (
    find_differences,
    find_excess_tokens,
    find_strange_weights,
    list_head_sizes,
    refuse,
)
from vanilla_transformer.files import new_folder
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.generation_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.positions_vanilla_transformer import SINUSOIDS

logger = logging.getLogger(__name__)

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
SYNONYMS = {"swish": "silu"}  # the library's name for the same function
# The files that `save_as_torch_nn` writes.
WEIGHTS_NAME, SETTINGS_NAME = "model.pt", "settings.json"
DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")
# Of one layer: our names and torch's.
ATTENTIONS = {"self_attn": "self_attn", "encoder_attn": "multihead_attn"}
NORMS = {
    "encoder": {"self_attn_layer_norm": "norm1", "final_layer_norm": "norm2"},
    "decoder": {"self_attn_layer_norm": "norm1", "encoder_attn_layer_norm": "norm2", "final_layer_norm": "norm3"},
}
LINEAR_MAPS = {"fc1": "linear1", "fc2": "linear2"}


def _name_activation(config: VanillaTransformerConfig) -> str:
    return SYNONYMS.get(config.activation_function, config.activation_function)


class TokenEmbedding(nn.Module):
    """Embeddings, scaled as the configuration says."""

    def __init__(self, config: VanillaTransformerConfig, vocab_size: int) -> None:
        super().__init__()
        self.scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.embedding = nn.Embedding(vocab_size, config.d_model)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Maps ids (B, L) to (B, L, D)."""
        return self.embedding(tokens) * self.scale


class PositionalEncoding(nn.Module):
    """Adds row i of a table to a sentence's token i; the table is trained if the configuration says so."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__()
        self.dropout = nn.Dropout(config.dropout)
        self.pos_embedding: torch.Tensor
        if config.position_embedding_type == "learned":
            rows = config.max_position_embeddings - config.position_offset
            self.pos_embedding = nn.Parameter(torch.zeros(rows, 1, config.d_model))
        else:
            positions = torch.arange(config.max_position_embeddings, dtype=torch.float64) + config.position_offset
            table = SINUSOIDS[config.position_embedding_type](positions, config.d_model)
            self.register_buffer("pos_embedding", table[:, None].float())

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Maps (B, L, D) to (B, L, D), where L is at most the table's length."""
        length, rows = embeddings.shape[1], self.pos_embedding.shape[0]
        if length > rows:
            raise ValueError(f"A sequence of {length} tokens is too long for a table of {rows} positions.")
        return self.dropout(embeddings + self.pos_embedding[:length, 0])


class TorchTransformer(nn.Module):
    """torch.nn.Transformer with what it lacks; its stacks have all biases, those of the norms too, or none."""

    def __init__(self, config: VanillaTransformerConfig, *, bias: bool = True) -> None:
        super().__init__()
        one_table, learned = config.share_encoder_decoder_embeddings, config.position_embedding_type == "learned"
        self.src_tok_emb = TokenEmbedding(config, config.vocab_size)
        self.tgt_tok_emb = self.src_tok_emb if one_table else TokenEmbedding(config, config.target_vocab_size)
        self.positional_encoding = PositionalEncoding(config)
        self.tgt_positional_encoding = PositionalEncoding(config) if learned else None
        self.transformer = _make_transformer(config, bias)
        self.generator = nn.Linear(config.d_model, config.target_vocab_size, bias=config.lm_head_bias)
        if config.tie_word_embeddings:
            self.generator.weight = self.tgt_tok_emb.embedding.weight

    def forward(
        self,
        src: torch.Tensor,
        tgt: torch.Tensor,
        src_padding_mask: torch.Tensor | None = None,
        tgt_padding_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Maps source ids (B, S) and target ids (B, T), padded at the end if at all, to logits (B, T, V).

        The masks (B, S) and (B, T) are true at padding; the opposite of this package's.
        """
        length = tgt.shape[1]
        states = self.transformer(
            src=self.positional_encoding(self.src_tok_emb(src)),
            tgt=(self.tgt_positional_encoding or self.positional_encoding)(self.tgt_tok_emb(tgt)),
            tgt_mask=torch.ones(length, length, dtype=torch.bool, device=tgt.device).triu(diagonal=1),
            src_key_padding_mask=src_padding_mask,
            tgt_key_padding_mask=tgt_padding_mask,
            memory_key_padding_mask=src_padding_mask,
        )
        return self.generator(states)


def _make_transformer(config: VanillaTransformerConfig, bias: bool) -> nn.Transformer:
    """Makes torch's stacks one by one: in one call both have the same heads and inner width, and a last norm."""
    settings: dict[str, Any] = {name: getattr(config, name) for name in ("dropout", "layer_norm_eps")}
    settings |= {"activation": ACTIVATIONS[_name_activation(config)], "norm_first": config.normalize_before}
    settings |= {"batch_first": True, "bias": bias}
    encoder_sizes = (config.encoder_attention_heads, config.encoder_ffn_dim)
    decoder_sizes = (config.decoder_attention_heads, config.decoder_ffn_dim)
    encoder_layer = nn.TransformerEncoderLayer(config.d_model, *encoder_sizes, **settings)
    decoder_layer = nn.TransformerDecoderLayer(config.d_model, *decoder_sizes, **settings)
    norm = nn.LayerNorm(config.d_model, config.layer_norm_eps, bias=bias) if config.has_final_layer_norm else None
    # Nested tensors leave out padding, and warn wherever they cannot.
    encoder = nn.TransformerEncoder(encoder_layer, config.encoder_layers, norm, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(decoder_layer, config.decoder_layers, copy.deepcopy(norm))
    for one in [*encoder.layers, *decoder.layers]:
        one.dropout.p = config.activation_dropout
        for attention in (one.self_attn, getattr(one, "multihead_attn", one.self_attn)):
            attention.dropout = config.attention_dropout
    return nn.Transformer(config.d_model, batch_first=True, custom_encoder=encoder, custom_decoder=decoder)


def to_torch_nn(model: VanillaTransformerForConditionalGeneration) -> TorchTransformer:
    """Takes a model to plain torch, in evaluation mode and with memory of its own.

    The module's state dict loads where the tutorial's does. Where the model's projections have no bias and torch's
    must, that is zero. Padding has to be at the end of sentences, since torch's positions count it. A `ConversionError`
    lists all features of the model that torch.nn.Transformer does not have.
    """
    config = model.config
    legal: dict[str, tuple[object, ...]] = {
        **dict.fromkeys(("d_k", "d_v"), list_head_sizes(config)),
        "activation_function": (*ACTIVATIONS, *SYNONYMS),
        "normalize_embedding": (False,),
    }
    reasons = find_differences(config, legal)
    state = model.state_dict()
    dtypes = sorted({str(tensor.dtype) for tensor in state.values()})
    if len(dtypes) > 1 or not model.dtype.is_floating_point:
        reasons.append(f"the weights are of the types {', '.join(dtypes)} (can be: one floating-point type)")
    refuse("torch.nn.Transformer cannot hold this model", [*reasons, *find_strange_weights(model)])
    norm_biases = [tensor for name, tensor in state.items() if name.endswith("layer_norm.bias")]
    bias = config.attention_bias or config.ffn_bias or any(map(torch.any, norm_biases))
    module = TorchTransformer(config, bias=bias).to(model.dtype)
    weights = _rename(model)
    module.load_state_dict({name: weights[name] for name in module.state_dict()})
    return module.eval()


def save_as_torch_nn(
    model: VanillaTransformerForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | os.PathLike[str],
    *,
    check: bool = True,
) -> Path:
    """Saves a model for code around torch.nn.Transformer, such as that of PyTorch's tutorial.

    The state dict of `to_torch_nn` becomes `model.pt`; what it does not tell, by `TorchSettings`, `settings.json`. The
    tokenizer is saved as it is. The folder is complete or absent; where there is something already, it is a
    `FileExistsError`. With `check`, logits of a random batch are compared before anything is saved. A `ConversionError`
    if torch.nn.Transformer cannot hold the model, such as stacks with unequal numbers of heads. What the model wants
    before its sources is in neither file; a warning tells it.
    """
    config = model.config
    heads = (config.encoder_attention_heads, config.decoder_attention_heads)
    unequal = [f"encoder_attention_heads and decoder_attention_heads are {heads} (can be: equal)"]
    refuse("nn.Transformer has one number of heads", unequal if len(set(heads)) > 1 else [])
    refuse("The tokenizer does not belong to the model", find_excess_tokens(tokenizer, config))
    ends = [f"eos_token_id is {config.eos_token_id} (can be: one number)"]
    refuse(f"{SETTINGS_NAME} names one end of sentences", ends if isinstance(config.eos_token_id, list) else [])
    same = ["layer_norm_eps", "scale_embedding", "position_embedding_type", *DROPOUTS]
    same += [f"{name}_token_id" for name in ("bos", "pad", "eos", "decoder_start")]
    settings = {
        "nhead": heads[0],
        "activation": _name_activation(config),
        "norm_first": config.normalize_before,
        **{name: getattr(config, name) for name in same},
        # A learned table is saved from the row of the first token on.
        "position_offset": 0 if config.position_embedding_type == "learned" else config.position_offset,
    }
    entries = getattr(config, "task_specific_params", None) or {}
    if prefixes := {entry["prefix"]: None for entry in entries.values() if entry and entry.get("prefix")}:
        message = "%s, which the model wants before its sources, is not in %s: your code must put it there."
        logger.warning(message, ", ".join(map(repr, prefixes)), SETTINGS_NAME)
    with new_folder(folder) as partial:
        module = to_torch_nn(model)

        def compute(batch: Batch) -> torch.Tensor:
            source, target, mask = (batch[name] for name in ("input_ids", "decoder_input_ids", "attention_mask"))
            return cast(torch.Tensor, as_float32(module)(source, target, mask == 0))

        if check:
            check_counterpart(compute, model, "torch.nn.Transformer")
        torch.save(module.state_dict(), partial / WEIGHTS_NAME)
        (partial / SETTINGS_NAME).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
    return Path(folder)


def _rename(model: VanillaTransformerForConditionalGeneration) -> dict[str, torch.Tensor]:
    """Returns all that a `TorchTransformer` may need, by its names; biases that the model lacks are zero."""
    state = model.state_dict()

    def pick(name: str) -> dict[str, torch.Tensor]:
        weight = state[f"{name}.weight"]
        return {"weight": weight, "bias": state.get(f"{name}.bias", weight.new_zeros(weight.shape[0]))}

    renamed = {
        "src_tok_emb.embedding.weight": state["model.encoder.embed_tokens.weight"],
        "tgt_tok_emb.embedding.weight": state["model.decoder.embed_tokens.weight"],
        "positional_encoding.pos_embedding": _list_positions(model, "encoder"),
        "tgt_positional_encoding.pos_embedding": _list_positions(model, "decoder"),
        **{f"generator.{kind}": tensor for kind, tensor in pick("lm_head").items()},
    }
    for stack in ("encoder", "decoder"):
        modules = {"layer_norm": "norm"} if model.config.has_final_layer_norm else {}
        for layer in (f"layers.{index}" for index in range(getattr(model.config, f"{stack}_layers"))):
            modules |= {f"{layer}.{ours}": f"{layer}.{theirs}" for ours, theirs in (NORMS[stack] | LINEAR_MAPS).items()}
            for our_name in list(ATTENTIONS)[: 1 if stack == "encoder" else 2]:
                ours, theirs = f"{layer}.{our_name}", f"{layer}.{ATTENTIONS[our_name]}"
                modules[f"{ours}.out_proj"] = f"{theirs}.out_proj"
                joined = [pick(f"model.{stack}.{ours}.{part}_proj") for part in ("q", "k", "v")]
                for kind in ("weight", "bias"):
                    parts = [part[kind] for part in joined]
                    renamed[f"transformer.{stack}.{theirs}.in_proj_{kind}"] = torch.cat(parts)
        for ours, theirs in modules.items():
            both = pick(f"model.{stack}.{ours}").items()
            renamed |= {f"transformer.{stack}.{theirs}.{kind}": tensor for kind, tensor in both}
    return renamed


def _list_positions(model: VanillaTransformerForConditionalGeneration, stack: str) -> torch.Tensor:
    """Returns what a sentence's tokens get, from the first on, (N, 1, D)."""
    config = model.config
    length = config.max_position_embeddings
    length -= config.position_offset if config.position_embedding_type == "learned" else 0
    positions = cast(Any, getattr(model.model, stack)).embed_positions
    return positions(torch.arange(length, device=model.device)[None], length).detach()[0][:, None]
