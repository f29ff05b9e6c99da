"""Takes a model to CTranslate2, which computes it faster than torch does, above all on CPUs and in 8 bits.

Everything that this package's model can be has a place in CTranslate2's specification, a tree of weights and settings,
but for some activation functions. Three things are put differently there:

- The maps to queries, keys and values are one matrix with heads of one size: the smaller are filled up with zeros.
- Positions are always a table. That of sinusoids has as many rows as `max_positions` says; longer texts are refused.
- A vocabulary is a list of tokens, all different, as long as the embedding table; missing ones are made up.
"""

import copy
import os
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerBase

from vanilla_transformer.conversion.errors import find_excess_tokens, find_strange_weights, refuse
from vanilla_transformer.data.vocabularies import get_vocabularies, load_tokenizer
from vanilla_transformer.files import check_new_folder, digest_weights, explain_missing, new_folder
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.generation_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.positions_vanilla_transformer import LearnedPositions, SinusoidalPositions

_COMPUTED_IN = ("_float32", "_float16", "_bfloat16")
QUANTIZATIONS = ("float32", "float16", "bfloat16", "int16", *(f"int8{end}" for end in ("", *_COMPUTED_IN)))
# CTranslate2's own config.json is beside it: a folder cannot have both under that name.
CONFIG_FILE = "vanilla_transformer_config.json"
# In the folder of a model: its export, which `--engine auto` takes.
EXPORT_FOLDER = "ctranslate2"
# Rows of a table of sinusoids, unless the model's own has more: 8 MB at d_model 512.
MAX_POSITIONS = 4096
# On GPUs, CTranslate2 may pad sources to a multiple of this, and wants positions for the padding too.
_MULTIPLE = 8

# The library's names for the activation functions that CTranslate2 has, and its own.
ACTIVATIONS = {
    "relu": "RELU",
    **dict.fromkeys(("gelu", "gelu_python"), "GELU"),
    **dict.fromkeys(("gelu_accurate", "gelu_fast", "gelu_new", "gelu_python_tanh", "gelu_pytorch_tanh"), "GELUTanh"),
    "quick_gelu": "GELUSigmoid",
    **dict.fromkeys(("silu", "swish"), "SWISH"),
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
}


def import_ctranslate2() -> ModuleType:
    """The package ctranslate2, with its specifications."""
    with explain_missing("CTranslate2 is not installed", extra="export", packages="ctranslate2"):
        import ctranslate2
    return cast(ModuleType, ctranslate2)


def export_ctranslate2(
    model: VanillaTransformerForConditionalGeneration | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    quantization: str | None = None,
    max_positions: int | None = None,
    source: str | os.PathLike[str] | None = None,
) -> Path:
    """Writes a model for CTranslate2, with all that translating needs: the folder is complete or absent.

    It holds CTranslate2's files (model.bin, config.json, the vocabularies), the tokenizer's, and the model's own
    generation_config.json and configuration (vanilla_transformer_config.json).

    Args:
        model: The model, or the folder or Hub name of one.
        folder: Where to: a folder that is not there yet, or an empty one.
        tokenizer: The model's tokenizer. `None`: the one saved with the model, where that is a folder or name and
            there is one; otherwise tokens are called by their ids: "0", "1" and so on.
        quantization: How weights are written, one of `QUANTIZATIONS`; `None`: as they are. Loading may choose again.
        max_positions: The most tokens of a text, for which a table of sinusoids is computed. `None`: 4,096, or as many
            as the model's own table has. Learned positions end where they end.
        source: The folder that a loaded model comes from, unchanged. The digests of its weights are written down, by
            which `--engine auto` knows whether it still holds the same. `None`: `model`, if that is a folder.

    Raises:
        ConversionError: If CTranslate2 cannot compute the model; lists all reasons.
        FileExistsError: If there is something already.
    """
    import_ctranslate2()
    check_new_folder(folder)
    exported: Any = model
    if not isinstance(model, nn.Module):
        exported = AutoModelForSeq2SeqLM.from_pretrained(model, dtype="auto", trust_remote_code=False)
        tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
        source = model
    reasons = find_reasons(exported, tokenizer, max_positions)
    if quantization not in (None, *QUANTIZATIONS):
        reasons.append(f"quantization is {quantization!r} (can be: {', '.join(QUANTIZATIONS)})")
    refuse("The model cannot be exported to CTranslate2", reasons)
    if exported is model and quantization is not None and quantization.startswith("int"):
        exported = copy.deepcopy(model)  # CTranslate2 makes integers of weights where they are
    spec = make_spec(exported, tokenizer, max_positions)
    # What CTranslate2 has no use for, and `find_export` has.
    spec.config.add_attribute("weights_sha256", {} if source is None else digest_weights(source))
    spec.config.add_attribute("quantization", quantization)
    spec.validate()
    spec.optimize(quantization)
    with new_folder(folder) as partial:
        spec.save(str(partial))
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        exported.generation_config.save_pretrained(partial)
        exported.config.to_json_file(partial / CONFIG_FILE)
    return Path(folder)


def find_reasons(
    model: Any, tokenizer: PreTrainedTokenizerBase | None = None, max_positions: int | None = None
) -> list[str]:
    """Returns all reasons why a model cannot be exported to CTranslate2."""
    config = model.config
    if not isinstance(config, VanillaTransformerConfig):
        advice = "import vanilla_transformer before it is loaded"
        if config.model_type != VanillaTransformerConfig.model_type:
            advice = "`vanilla-transformer convert` makes one of MarianMT and FSMT"
        return [f"it is {type(model).__name__}, not a model of this package ({advice})"]
    reasons = find_strange_weights(model)
    if config.activation_function not in ACTIVATIONS:
        names = ", ".join(map(repr, ACTIVATIONS))
        reasons.append(f"activation_function is {config.activation_function!r} (can be: {names})")
    if max_positions is not None and max_positions < 1:
        reasons.append(f"max_positions is {max_positions}; it must be at least 1")
    elif max_positions is not None and config.position_embedding_type == "learned":
        reasons.append(f"max_positions is {max_positions}, but learned positions end where their table ends")
    special = _find_special_ids(model)
    reasons += [f"{name} is None: CTranslate2 needs one" for name, value in special.items() if value is None]
    return reasons + find_excess_tokens(tokenizer, config)


def _find_special_ids(model: Any) -> dict[str, int | None]:
    """The ids that CTranslate2 must know, by the library's names for them."""
    ids: dict[str, int | None] = {}
    for name in ("decoder_start_token_id", "eos_token_id"):
        found = getattr(model.generation_config, name, None)
        found = getattr(model.config, name) if found is None else found
        ids[name] = found[0] if isinstance(found, list) else found
    return ids


def list_tokens(vocabulary: dict[str, int] | None, size: int) -> list[str]:
    """Lists `size` tokens, all different, by their ids; without a token, or a vocabulary, they are named by these."""
    if vocabulary is None:
        return [str(token_id) for token_id in range(size)]
    names = {token_id: token for token, token_id in vocabulary.items()}
    for token_id in set(range(size)) - names.keys():
        name = f"<no token {token_id}>"
        while name in vocabulary:
            name = f"<{name}>"
        names[token_id] = name
    return [names[token_id] for token_id in range(size)]


def make_spec(model: Any, tokenizer: PreTrainedTokenizerBase | None = None, max_positions: int | None = None) -> Any:
    """Describes a model by a `TransformerSpec`, not yet validated; its weights are the model's own, if on the CPU."""
    specs = import_ctranslate2().specs
    config: VanillaTransformerConfig = model.config
    settings: dict[str, Any] = {
        "pre_norm": config.has_final_layer_norm,  # decides here whether there is a place for that norm
        "activation": getattr(specs.Activation, ACTIVATIONS[config.activation_function]),
        "layernorm_embedding": config.normalize_embedding,
    }
    # Asked for where a decoder has a single head; otherwise the matrices tell.
    head_dim = _find_head_size(model.model.decoder.layers[0].encoder_attn)
    encoder = specs.TransformerEncoderSpec(config.encoder_layers, config.encoder_attention_heads, **settings)
    decoder = specs.TransformerDecoderSpec(
        config.decoder_layers, config.decoder_attention_heads, head_dim=head_dim, **settings
    )
    for part, stack in ((encoder, model.model.encoder), (decoder, model.model.decoder)):
        part.pre_norm = config.normalize_before
        _fill_stack(part, stack, _make_positions(stack.embed_positions, max_positions))
    _fill_linear(decoder.projection, model.lm_head.weight, model.lm_head.bias)
    spec = specs.TransformerSpec(encoder, decoder)
    _fill_vocabularies(spec, model, tokenizer)
    spec.config.layer_norm_epsilon = float(config.layer_norm_eps)
    # CTranslate2 has no use for these; `CTranslate2Model` does.
    spec.config.add_attribute("max_positions", _count_positions(model.model.encoder.embed_positions, max_positions))
    spec.config.add_attribute("num_parameters", model.num_parameters())
    return spec


def _fill_vocabularies(spec: Any, model: Any, tokenizer: PreTrainedTokenizerBase | None) -> None:
    config = model.config
    source, target = (None, None) if tokenizer is None else get_vocabularies(tokenizer)
    source_tokens = list_tokens(source, config.vocab_size)
    target_tokens = list_tokens(target, config.target_vocab_size)
    spec.register_source_vocabulary(source_tokens)
    spec.register_target_vocabulary(target_tokens)
    ids = _find_special_ids(model)
    end = target_tokens[cast(int, ids["eos_token_id"])]
    begin = config.bos_token_id
    unknown = None if tokenizer is None else tokenizer.unk_token
    spec.config.eos_token = end
    spec.config.bos_token = end if begin is None else target_tokens[begin]
    # Whatever this names must be in both vocabularies, or CTranslate2 makes them longer than the tables.
    spec.config.unk_token = unknown if unknown in source_tokens and unknown in target_tokens else end
    spec.config.decoder_start_token = target_tokens[cast(int, ids["decoder_start_token_id"])]


def _count_positions(module: SinusoidalPositions | LearnedPositions, max_positions: int | None) -> int:
    """How many tokens a text may have."""
    own = module.weight.shape[0] - module.offset
    if isinstance(module, LearnedPositions):
        return own
    return max(own, MAX_POSITIONS) if max_positions is None else max_positions


def _make_positions(module: SinusoidalPositions | LearnedPositions, max_positions: int | None) -> torch.Tensor:
    """The table of what is added to the embeddings of the first, second, ... token, (rows, D)."""
    rows = _count_positions(module, max_positions)
    with_padding = -(-rows // _MULTIPLE) * _MULTIPLE
    if isinstance(module, LearnedPositions):
        table = module.weight.detach()[module.offset :]
        return nn.functional.pad(table, (0, 0, 0, with_padding - rows))
    table = module.encode(torch.arange(with_padding, device=module.weight.device) + module.offset)
    return table.to(module.weight.dtype)


def _fill_stack(spec: Any, stack: Any, positions: torch.Tensor) -> None:
    """Fills the specification of an encoder or a decoder."""
    spec.scale_embeddings = stack.config.scale_embedding
    spec.position_encodings.encodings = _put(positions)
    embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
    embeddings.weight = _put(stack.embed_tokens.weight)
    if stack.config.normalize_embedding:
        _fill_norm(spec.layernorm_embedding, stack.layernorm_embedding)
    if stack.config.has_final_layer_norm:
        _fill_norm(spec.layer_norm, stack.layer_norm)
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        _fill_attention(layer_spec.self_attention, layer.self_attn, layer.self_attn_layer_norm, [3])
        if hasattr(layer, "encoder_attn"):
            _fill_attention(layer_spec.attention, layer.encoder_attn, layer.encoder_attn_layer_norm, [1, 2])
        _fill_linear(layer_spec.ffn.linear_0, layer.fc1.weight, layer.fc1.bias)
        _fill_linear(layer_spec.ffn.linear_1, layer.fc2.weight, layer.fc2.bias)
        _fill_norm(layer_spec.ffn.layer_norm, layer.final_layer_norm)


def _put(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor for CTranslate2, which has no float64: the model's own, where it can be."""
    dtype = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
    return tensor.detach().to(device="cpu", dtype=dtype).contiguous()


def _fill_norm(spec: Any, norm: nn.LayerNorm) -> None:
    spec.gamma, spec.beta = _put(norm.weight), _put(norm.bias)


def _fill_linear(spec: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    spec.weight = _put(weight)
    if bias is not None:
        spec.bias = _put(bias)


def _find_head_size(attention: Any) -> int:
    """The larger of d_k and d_v."""
    return int(max(attention.q_proj.out_features, attention.v_proj.out_features) // attention.num_heads)


def _fill_attention(spec: Any, attention: Any, norm: nn.LayerNorm, groups: list[int]) -> None:
    """Fills attention, in which so many maps at a time, of what is computed of the same states, are one matrix."""
    size = _find_head_size(attention)
    maps = [attention.q_proj, attention.k_proj, attention.v_proj]
    weights = [_widen_heads(each.weight, attention.num_heads, size) for each in maps]
    biases = [_widen_heads(each.bias, attention.num_heads, size) for each in maps if each.bias is not None]
    for linear, count in zip(spec.linear, groups, strict=False):
        _fill_linear(linear, torch.cat(weights[:count]), torch.cat(biases[:count]) if biases else None)
        weights, biases = weights[count:], biases[count:]
    # The columns of the last matrix are what the heads found.
    out = _widen_heads(attention.out_proj.weight.T, attention.num_heads, size).T
    _fill_linear(spec.linear[-1], out, attention.out_proj.bias)
    spec.queries_scale = attention.scaling
    _fill_norm(spec.layer_norm, norm)


def _widen_heads(rows: torch.Tensor, num_heads: int, size: int) -> torch.Tensor:
    """Appends zeros to the rows of each head: (heads * d, ...) to (heads * size, ...)."""
    heads = rows.unflatten(0, (num_heads, -1))
    missing = heads.new_zeros((num_heads, size - heads.shape[1], *heads.shape[2:]))
    return torch.cat([heads, missing], dim=1).flatten(0, 1)
