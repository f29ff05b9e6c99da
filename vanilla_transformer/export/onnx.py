"""Takes a model to ONNX, a format that many runtimes read: ONNX Runtime, also in browsers and phones, and compilers.

What is written goes by the names of Hugging Face's Optimum, which runners of its models look for:

- `encoder_model.onnx` takes `input_ids` and `attention_mask`, and gives `last_hidden_state`.
- `decoder_model_merged.onnx` takes `input_ids`, `encoder_attention_mask`, `encoder_hidden_states` and, for each layer,
  `past_key_values.{layer}.{decoder or encoder}.{key or value}`; it gives `logits`, and the same for `present`.

At first each `past_key_values` has length 0; afterwards it is the `present` of the call before, and `input_ids` are the
new tokens only. Batch and lengths are free. See [`DecoderGraph`] for the shapes.
"""

import contextlib
import io
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from packaging.version import Version
from torch import nn
from torch.export import Dim
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerBase
from transformers import __version__ as transformers_version

from vanilla_transformer.conversion.errors import ConversionError, find_excess_tokens, refuse
from vanilla_transformer.data.vocabularies import load_tokenizer
from vanilla_transformer.files import check_new_folder, explain_missing, new_folder
from vanilla_transformer.model.generation_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    remove_trainers_defaults,
)
from vanilla_transformer.model.positions_vanilla_transformer import count_learned_positions

from .graphs import DecoderGraph, copy_for_tracing
from .onnx_model import DECODER_FILE, ENCODER_FILE, OnnxModel, import_onnxruntime

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4  # of logits, relative to the largest
OLDEST_TRANSFORMERS = "5.15"  # has exporters that export these graphs; those of 5.13 do not, and 5.12 has none
OLDEST_OPSET = 18  # the oldest that torch's exporter writes
# A file of more bytes than protobuf can read has its weights beside it.
LARGEST_FILE = 3 * 2**29

BATCH, SOURCE, TARGET = Dim("batch_size"), Dim("encoder_sequence_length"), Dim("decoder_sequence_length")
_PAST, _CACHED_SOURCE = Dim("past_decoder_sequence_length"), Dim("past_encoder_sequence_length")
# What these free sizes are while tracing: any will do but 0 and 1, which tracing takes for constants.
_FREE = {BATCH: 2, SOURCE: 4, TARGET: 2, _PAST: 3, _CACHED_SOURCE: 2}


def export_onnx(
    model: VanillaTransformerForConditionalGeneration | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    opset: int = OLDEST_OPSET,
) -> Path:
    """Writes a model as ONNX, in float32, with all that translating needs: the folder is complete or absent.

    What was written is run with ONNX Runtime, and its logits are compared with PyTorch's. Sinusoids are computed in the
    graph and have no end; beyond learned positions the runtime refuses to go on.

    Args:
        model: The model, or the folder or Hub name of one.
        folder: Where to: a folder that is not there yet, or an empty one.
        tokenizer: The model's tokenizer. `None`: the one saved with the model, where that is a folder or name and
            there is one.
        opset: Version of ONNX's set of operators. 18 is what the most runtimes know.

    Raises:
        ConversionError: If this is no model that can be exported, or what was written computes something else.
        FileExistsError: If there is something already.
    """
    copied, tokenizer = prepare_export(model, folder, tokenizer=tokenizer, opset=opset)
    with new_folder(folder) as partial:
        write_graphs(copied, partial, opset=opset)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
    return Path(folder)


def prepare_export(
    model: VanillaTransformerForConditionalGeneration | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    opset: int,
) -> tuple[VanillaTransformerForConditionalGeneration, PreTrainedTokenizerBase | None]:
    """Checks what `export_onnx` is given, and returns a copy of the model to trace, and its tokenizer."""
    _import_exporters()
    if opset < OLDEST_OPSET:
        raise ValueError(f"opset is {opset}; it must be at least {OLDEST_OPSET}.")
    check_new_folder(folder)
    if not isinstance(model, nn.Module):
        tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
        model = AutoModelForSeq2SeqLM.from_pretrained(model, dtype="auto", trust_remote_code=False)
    copied = copy_for_tracing(cast(Any, model))
    remove_trainers_defaults(copied.generation_config)
    refuse("The tokenizer does not belong to the model", find_excess_tokens(tokenizer, copied.config))
    copied.config.dtype = torch.float32
    return copied, tokenizer


def write_graphs(
    copied: VanillaTransformerForConditionalGeneration,
    folder: Path,
    *,
    opset: int,
    decoder: type[DecoderGraph] = DecoderGraph,
) -> None:
    """Writes both graphs, the configuration and the generation config; a `ConversionError` if the logits are others."""
    _save(_export_encoder(copied, opset), folder / ENCODER_FILE)
    _save(_export_decoder(copied, opset, decoder), folder / DECODER_FILE)
    copied.config.save_pretrained(folder)
    copied.generation_config.save_pretrained(folder)
    difference = compare_onnx(copied, folder)
    logger.info("The logits of ONNX and PyTorch differ by %.1e of the largest at most.", difference)
    if not difference <= TOLERANCE:
        raise ConversionError(
            f"The exported model computes something else than the original: logits differ by {difference:.1e} of "
            f"the largest, and may by {TOLERANCE:.0e}. This is an error of the exporter or of ONNX Runtime."
        )


def compare_onnx(model: VanillaTransformerForConditionalGeneration, folder: str | os.PathLike[str]) -> float:
    """Returns the largest difference of logits, as a fraction of the largest, on a batch with padding and a cache."""
    exported = OnnxModel(folder)
    longest = count_learned_positions(model.config) or 40
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(model.config.vocab_size, (3, min(longest, 19)), generator=generator)
    targets = torch.randint(model.config.target_vocab_size, (3, min(max(longest - 1, 1), 13)), generator=generator)
    # What follows the end of a text, or the last position, is never asked for.
    ends = model.config.eos_token_id if isinstance(model.config.eos_token_id, list) else [model.config.eos_token_id]
    other = next(token for token in reversed(range(model.config.target_vocab_size)) if token not in ends)
    targets.apply_(lambda token: other if token in ends else token)
    mask = torch.ones_like(input_ids)
    mask[1, input_ids.shape[1] // 2 :] = 0
    mask[2, : input_ids.shape[1] // 3] = 0
    with torch.no_grad():
        expected = model(input_ids=input_ids, attention_mask=mask, decoder_input_ids=targets).logits
    first = exported(input_ids=input_ids, attention_mask=mask, decoder_input_ids=targets[:, :1])
    known = {"encoder_outputs": (first.encoder_last_hidden_state,), "past_key_values": first.past_key_values}
    rest = exported(attention_mask=mask, decoder_input_ids=targets[:, 1:], **known)
    logits = torch.cat([first.logits, rest.logits], dim=1)
    return float((logits - expected).abs().max() / expected.abs().max())


def _import_exporters() -> None:
    """Makes sure that all is there before long work is done."""
    with explain_missing("The exporter is not installed", extra="export", packages="onnx onnxscript onnxruntime"):
        import onnx_ir  # noqa: F401
        import onnxscript  # noqa: F401
    import_onnxruntime()
    if Version(transformers_version) < Version(OLDEST_TRANSFORMERS):
        needed = f"the exporters of transformers, from version {OLDEST_TRANSFORMERS} on"
        raise ImportError(f"ONNX is written by {needed}; this is {transformers_version}.")


def _export_encoder(model: VanillaTransformerForConditionalGeneration, opset: int) -> Any:
    source = (BATCH, SOURCE)
    return export_graph(model.model.encoder, {"input_ids": source, "attention_mask": source}, opset)


def _export_decoder(
    model: VanillaTransformerForConditionalGeneration, opset: int, decoder: type[DecoderGraph] = DecoderGraph
) -> Any:
    config: Any = model.config
    attention: Any = model.model.decoder.layers[0].self_attn
    heads = attention.num_heads
    widths = {"key": attention.k_proj.out_features // heads, "value": attention.v_proj.out_features // heads}
    states = {
        side: {kind: (BATCH, heads, length, width) for kind, width in widths.items()}
        for side, length in (("decoder", _PAST), ("encoder", _CACHED_SOURCE))
    }
    sizes: dict[str, Any] = {"input_ids": (BATCH, TARGET), "encoder_attention_mask": (BATCH, SOURCE)}
    sizes["encoder_hidden_states"] = (BATCH, SOURCE, config.d_model)
    sizes["past_key_values"] = {str(number): states for number in range(config.decoder_layers)}
    return export_graph(decoder(model), sizes, opset)


def _map(sizes: Mapping[str, Any], function: Callable[[tuple[Any, ...]], Any]) -> dict[str, Any]:
    """Applies a function to tuples within mappings of mappings."""
    return {name: function(each) if isinstance(each, tuple) else _map(each, function) for name, each in sizes.items()}


def _make_input(sizes: tuple[Any, ...]) -> torch.Tensor:
    """A tensor to trace with: tokens and masks have two sizes, states more."""
    shape = [_FREE.get(size, size) for size in sizes]
    return torch.ones(shape, dtype=torch.long if len(shape) == 2 else torch.float32)


def export_graph(graph: nn.Module, sizes: Mapping[str, Any], opset: int) -> Any:
    """Exports one graph as an `onnx_ir.Model`, given the sizes of its inputs, some of which are free."""
    from transformers.exporters.configs import OnnxConfig
    from transformers.exporters.exporter_onnx import OnnxExporter

    shapes = _map(sizes, lambda each: {axis: size for axis, size in enumerate(each) if size in _FREE})
    with silence():
        config = OnnxConfig(dynamic_shapes=shapes, opset_version=opset)
        exported: Any = OnnxExporter().export(cast(Any, graph.eval()), _map(sizes, _make_input), config)
    # Older versions of transformers return torch's own ONNXProgram.
    model = exported.program if hasattr(exported, "program") else exported.model
    if model.opset_imports[""] != opset:
        raise ValueError(f"opset is {opset}, of which the exporter knows nothing: it took {model.opset_imports['']}.")
    _name_sizes(model.graph, shapes)
    _forget_sources(model)
    return model


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keeps from the user what exporters say about themselves: progress, advice, versions they were not tested with."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(level)


def _name_sizes(graph: Any, shapes: Mapping[str, Any]) -> None:
    """Gives free sizes their names, where the exporter calls them s43 and the like."""
    names: dict[str, str] = {}
    for value in graph.inputs:
        sizes: Any = shapes
        for part in value.name.split("."):
            sizes = sizes[part]
        names |= {str(value.shape[axis]): dim.__name__ for axis, dim in sizes.items()}
    values = [*graph.inputs, *(output for node in graph.all_nodes() for output in node.outputs)]
    for value in values:
        for axis, size in enumerate(value.shape or ()):
            if not isinstance(size, int) and size.value is not None:
                value.shape[axis] = re.sub(r"\bs\d+\b", lambda symbol: names.get(symbol[0], symbol[0]), size.value)


def _forget_sources(model: Any) -> None:
    """Removes which lines of code, under which paths of this machine, each operation comes from."""
    nodes = list(model.graph.all_nodes())
    values = [*model.graph.inputs, *model.graph.initializers.values(), *(one for node in nodes for one in node.outputs)]
    for each in [*nodes, *values]:
        each.metadata_props.clear()


def _save(model: Any, path: Path) -> None:
    import onnx_ir

    size = sum(value.const_value.nbytes for value in model.graph.initializers.values())
    onnx_ir.save(model, path, external_data=f"{path.name}_data" if size > LARGEST_FILE else None)
