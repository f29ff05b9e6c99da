"""Takes a model to transformers.js, where `pipeline("translation", folder)` translates with it, in Node or a browser.

The folder has what that library looks for: `config.json`, `generation_config.json`, `tokenizer.json`,
`tokenizer_config.json` and, under `onnx/`, the graphs of [`export_onnx`] in float32 (`dtype: "fp32"`) and with weights
of 8 bits (`dtype: "q8"`, names in `_quantized`). Tried with version 4.3.1.

transformers.js has no beam search, so the generation config is one of greedy search. It goes on with sentences that
have ended while others of their batch have not. There the graph gives the end symbol again, which is not printed.
With learned positions it gives the end symbol at the last one.
"""

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.conversion.errors import refuse
from vanilla_transformer.files import new_folder
from vanilla_transformer.hub.javascript import DIGEST_FIELD, digest_tensors
from vanilla_transformer.model.generation_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.pipeline_vanilla_transformer import find_directions
from vanilla_transformer.model.positions_vanilla_transformer import count_learned_positions
from vanilla_transformer.tasks import TRANSLATION, find_prefix

from .eight_bits import quantize_graph
from .graphs import DecoderGraph, Past
from .javascript_tokenizer import rewrite_for_javascript
from .onnx import LARGEST_FILE, OLDEST_OPSET, prepare_export, write_graphs
from .onnx_model import DECODER_FILE, ENCODER_FILE

GRAPHS_FOLDER = "onnx"
_UNLIKELY = -1e9  # a logit that no other one is below
# transformers.js takes the model for one of Marian's, whose inputs and outputs have the same names.
_MARIAN = {"model_type": "marian", "architectures": ["MarianMTModel"], "is_encoder_decoder": True}
_CONFIG = (
    *("vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads"),
    *("decoder_attention_heads", "encoder_ffn_dim", "decoder_ffn_dim", "max_position_embeddings", "scale_embedding"),
    *("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id", "prefix", "task_specific_params"),
)
# Settings of a greedy search that both sides know, and that change nothing once a sentence has ended.
_GENERATION = {
    *("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id", "max_length", "max_new_tokens"),
    *("min_new_tokens", "repetition_penalty", "suppress_tokens"),
}
# These are for beam search or sampling, or choose no other tokens.
_NOT_GREEDY = {
    *("num_beams", "num_return_sequences", "length_penalty", "length_penalty_type", "early_stopping", "do_sample"),
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "renormalize_logits"),
    *("remove_invalid_values", "use_cache", "cache_implementation", "cache_config", "transformers_version"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    "_from_model_config",
}


class EndingDecoderGraph(DecoderGraph):
    """The decoder, whose logits demand the end symbol behind another one, and where learned positions end."""

    again: torch.Tensor

    def __init__(self, model: VanillaTransformerForConditionalGeneration) -> None:
        super().__init__(model)
        config: Any = model.config
        self.eos_token_id: int = config.eos_token_id
        self.longest = count_learned_positions(model.config)
        again = torch.full((config.target_vocab_size,), _UNLIKELY)
        again[self.eos_token_id] = 0.0
        self.register_buffer("again", again)

    def forward(
        self,
        input_ids: torch.Tensor,
        encoder_attention_mask: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        past_key_values: Past,
    ) -> dict[str, torch.Tensor]:
        """As in [`DecoderGraph`]. An end symbol in the first place starts the target, as in models of fairseq."""
        outputs = super().forward(input_ids, encoder_attention_mask, encoder_hidden_states, past_key_values)
        places = torch.arange(input_ids.shape[1]) + past_key_values["0"]["decoder"]["key"].shape[2]
        has_ended = (input_ids == self.eos_token_id) & (places > 0)
        if self.longest is not None:
            has_ended = has_ended | (places >= self.longest - 1)
        return outputs | {"logits": torch.where(has_ended[:, :, None], self.again, outputs["logits"])}


def export_transformersjs(
    model: VanillaTransformerForConditionalGeneration | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    opset: int = OLDEST_OPSET,
) -> Path:
    """Writes a model for transformers.js, in float32 and in 8 bits: the folder is complete or absent.

    The float32 graphs are compared with PyTorch, and the tokenizer for JavaScript with the one given, as it is read in
    Python. Weights of 8 bits are those of `quantize_graph`.

    Args:
        model: The model, or the folder or Hub name of one.
        folder: Where to: a folder that is not there yet, or an empty one.
        tokenizer: The model's tokenizer: byte-level BPE of this package, with one vocabulary for both sides. `None`:
            the one saved with the model, where that is a folder or name.
        opset: Version of ONNX's set of operators.

    Raises:
        ConversionError: If JavaScript could not translate as Python does; the message says why.
        FileExistsError: If there is something already.
    """
    copied, tokenizer = prepare_export(model, folder, tokenizer=tokenizer, opset=opset)
    refuse("transformers.js cannot run this model", find_reasons(copied))
    contents = rewrite_for_javascript(tokenizer)
    config = _make_config(copied) | {DIGEST_FIELD: digest_tensors(copied.state_dict().values())}
    contents |= {"config.json": config, "generation_config.json": _make_generation_config(copied)}
    with new_folder(folder) as partial:
        graphs = partial / GRAPHS_FOLDER
        graphs.mkdir()
        write_graphs(copied, graphs, opset=opset, decoder=EndingDecoderGraph)
        for name in (ENCODER_FILE, DECODER_FILE):
            path = graphs / name
            quantize_graph(path, path.with_stem(f"{path.stem}_quantized"))  # the name that transformers.js asks for
        for path in graphs.iterdir():
            if path.suffix != ".onnx":  # the original's configuration, which the comparison needed
                path.unlink()
        for name, content in contents.items():
            (partial / name).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return Path(folder)


def find_reasons(
    model: VanillaTransformerForConditionalGeneration, known: Collection[str] = frozenset(_GENERATION)
) -> list[str]:
    """Says why JavaScript cannot translate as Python does, where its search knows these settings and those of beams."""
    config: Any = model.config
    reasons = []
    ids = {
        name: getattr(each, name)
        for each in (config, model.generation_config)
        for name in ("eos_token_id", "decoder_start_token_id")
    }
    reasons += [f"{name} is {value!r} (can be: one id)" for name, value in ids.items() if not isinstance(value, int)]
    if model.generation_config.eos_token_id != config.eos_token_id:
        reasons.append("the generation config has another eos_token_id than the configuration")
    if config.target_vocab_size != config.vocab_size:
        reasons.append("source and target have a vocabulary each")
    if len(find_directions(config)) > 1:
        reasons.append("it translates several pairs of languages, of which JavaScript can choose none")
    settings = model.generation_config.to_diff_dict()
    foreign = sorted(settings.keys() - set(known) - _NOT_GREEDY)
    reasons += [f"the generation config sets {name} (can be: {', '.join(sorted(known))})" for name in foreign]
    sizes = {
        "encoder": sum(each.nbytes for each in model.model.encoder.parameters()),
        "decoder": sum(each.nbytes for each in model.model.decoder.parameters()),
    }
    reasons += [
        f"its {name} has {size / 1e6:,.0f} MB in float32 (can be: up to {LARGEST_FILE / 1e6:,.0f}, one file)"
        for name, size in sizes.items()
        if size > LARGEST_FILE
    ]
    return reasons


def _make_config(model: VanillaTransformerForConditionalGeneration) -> dict[str, Any]:
    found = {name: getattr(model.config, name, None) for name in _CONFIG}
    if prefix := find_prefix(model.config, TRANSLATION):
        found["task_specific_params"] = {"translation": {"prefix": prefix}}  # where transformers.js looks
    return _MARIAN | {name: value for name, value in found.items() if value is not None}


def _make_generation_config(model: VanillaTransformerForConditionalGeneration) -> dict[str, Any]:
    settings = model.generation_config.to_diff_dict()
    ids = {name: getattr(model.generation_config, name) for name in ("eos_token_id", "decoder_start_token_id")}
    return {"num_beams": 1, **{name: value for name, value in settings.items() if name in _GENERATION}, **ids}
