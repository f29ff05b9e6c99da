"""Takes a model to ONNX, a format that many runtimes read: ONNX Runtime, also in browsers and phones, and compilers.

What is written goes by the names of Hugging Face's Optimum, which runners of its models look for:

- `encoder_model.onnx` takes `input_ids` and `attention_mask`, and gives `last_hidden_state`.
- `decoder_model_merged.onnx` takes `input_ids`, `encoder_attention_mask`, `encoder_hidden_states` and, for each layer,
  `past_key_values.{layer}.{decoder or encoder}.{key or value}`; it gives `logits`, and the same for `present`.

For the first tokens of a target each `past_key_values` has length 0; afterwards it is the `present` of the call before,
and `input_ids` are the new tokens only. Batch and lengths are free. See [`DecoderGraph`] for the shapes.
"""

import contextlib
import io
import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from packaging.version import Version
from torch import nn
from torch.export import Dim
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerBase
from transformers import __version__ as transformers_version

from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.data.vocabularies import load_tokenizer
from vanilla_transformer.files import check_new_folder, explain_missing, new_folder
from vanilla_transformer.model.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

from .graphs import (
    BATCH_SIZE,
    CACHED_SOURCE_LENGTH,
    PAST_LENGTH,
    SOURCE_LENGTH,
    TARGET_LENGTH,
    DecoderGraph,
    EncoderGraph,
    copy_for_tracing,
    longest_sequence,
)
from .onnx_model import DECODER_FILE, ENCODER_FILE, OnnxModel, import_onnxruntime

logger = logging.getLogger(__name__)

TOLERANCE = 1e-4  # of logits, relative to the largest
OLDEST_TRANSFORMERS = "5.15"  # has exporters that export these graphs; those of 5.13 do not, and 5.12 has none
OLDEST_OPSET = 18  # the oldest that torch's exporter writes
# A file of more bytes than protobuf can read has its weights beside it.
_LARGEST_FILE = 3 * 2**29

_BATCH, _SOURCE, _TARGET = Dim("batch_size"), Dim("encoder_sequence_length"), Dim("decoder_sequence_length")
_PAST, _CACHED_SOURCE = Dim("past_decoder_sequence_length"), Dim("past_encoder_sequence_length")


def export_onnx(
    model: VanillaTransformerForConditionalGeneration | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    opset: int = OLDEST_OPSET,
    check: bool = True,
) -> Path:
    """Writes a model as ONNX, in float32, with all that translating needs: the folder is complete or absent.

    Sinusoids are computed in the graph, so that they end nowhere; learned positions end where they end, where the
    runtime refuses to go on.

    Args:
        model: The model, or the folder or Hub name of one.
        folder: Where to: a folder that is not there yet, or an empty one.
        tokenizer: The model's tokenizer. `None`: the one saved with the model, where that is a folder or name and
            there is one.
        opset: Version of ONNX's set of operators. 18 is what the most runtimes know.
        check: Whether to run what was written with ONNX Runtime, and to compare the logits with PyTorch's.

    Returns:
        The folder. It holds the two graphs, the configuration, the generation config, and the tokenizer's files.

    Raises:
        ConversionError: If this is no model that can be exported, or what was written computes something else.
        FileExistsError: If there is something already.
        ImportError: If a package is missing, or transformers is older than its exporters.
        ValueError: If the exporter does not know that opset.
    """
    _import_exporters()
    if check:
        import_onnxruntime()
    if opset < OLDEST_OPSET:
        raise ValueError(f"opset is {opset}; it must be at least {OLDEST_OPSET}.")
    check_new_folder(folder)
    if not isinstance(model, nn.Module):
        if tokenizer is None:
            tokenizer = load_tokenizer(model)
        model = AutoModelForSeq2SeqLM.from_pretrained(model, dtype="auto", trust_remote_code=False)
    copied = copy_for_tracing(cast(Any, model))
    copied.config.dtype = torch.float32
    with new_folder(folder) as partial:
        _save(_export_encoder(copied, opset), partial / ENCODER_FILE)
        _save(_export_decoder(copied, opset), partial / DECODER_FILE)
        copied.config.save_pretrained(partial)
        copied.generation_config.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        if check:
            _refuse_difference(compare_onnx(copied, partial))
    return Path(folder)


def compare_onnx(model: VanillaTransformerForConditionalGeneration, folder: str | os.PathLike[str]) -> float:
    """Runs a model and what was exported of it on random batches, with padding, with and without a cache.

    Args:
        model: The model, in float32 and evaluation mode on the CPU.
        folder: What [`export_onnx`] wrote.

    Returns:
        The largest difference of logits as a fraction of the largest logit.
    """
    exported = OnnxModel(folder)
    longest = longest_sequence(model) or 40
    generator = torch.Generator().manual_seed(0)
    differences = []
    for rows, source_length, target_length in ((1, 1, 1), (3, min(longest, 19), min(longest, 13))):
        input_ids = torch.randint(model.config.vocab_size, (rows, source_length), generator=generator)
        targets = torch.randint(model.config.target_vocab_size, (rows, target_length), generator=generator)
        mask = torch.ones_like(input_ids)
        mask[1:2, source_length // 2 :] = 0
        mask[2:3, : source_length // 3] = 0
        with torch.no_grad():
            expected = model(input_ids=input_ids, attention_mask=mask, decoder_input_ids=targets).logits
        first = exported(input_ids=input_ids, attention_mask=mask, decoder_input_ids=targets[:, :1])
        logits = [first.logits]
        if target_length > 1:
            rest = exported(
                attention_mask=mask,
                decoder_input_ids=targets[:, 1:],
                encoder_outputs=(first.encoder_last_hidden_state,),
                past_key_values=first.past_key_values,
            )
            logits.append(rest.logits)
        differences.append((torch.cat(logits, dim=1) - expected).abs().max() / expected.abs().max())
    # NaN if any of them is.
    return float(torch.stack(differences).max())


def _refuse_difference(difference: float) -> None:
    logger.info("The logits of ONNX and PyTorch differ by %.1e of the largest at most.", difference)
    if not difference <= TOLERANCE:
        raise ConversionError(
            f"The exported model computes something else than the original: logits differ by {difference:.1e} of the "
            f"largest, and may by {TOLERANCE:.0e}. This is an error of the exporter or of ONNX Runtime."
        )


def _import_exporters() -> None:
    """Makes sure that all is there before long work is done.

    Raises:
        ImportError: If something is not; says what to install.
    """
    packages = "onnx onnxscript onnxruntime"
    with explain_missing("The ONNX exporter is not installed", extra="export", packages=packages):
        import onnx_ir  # noqa: F401
        import onnxscript  # noqa: F401
    if Version(transformers_version) < Version(OLDEST_TRANSFORMERS):
        raise ImportError(
            f"ONNX is written by the exporters of transformers, from version {OLDEST_TRANSFORMERS} on; this is "
            f"{transformers_version}."
        )


def _export_encoder(model: VanillaTransformerForConditionalGeneration, opset: int) -> Any:
    inputs = {
        "input_ids": torch.zeros(BATCH_SIZE, SOURCE_LENGTH, dtype=torch.long),
        "attention_mask": torch.ones(BATCH_SIZE, SOURCE_LENGTH, dtype=torch.long),
    }
    source = {0: _BATCH, 1: _SOURCE}
    return _export(EncoderGraph(model), inputs, {"input_ids": source, "attention_mask": source}, opset)


def _export_decoder(model: VanillaTransformerForConditionalGeneration, opset: int) -> Any:
    layers: Any = model.model.decoder.layers
    past = {
        str(number): {
            "decoder": _make_states(layer.self_attn, PAST_LENGTH),
            "encoder": _make_states(layer.encoder_attn, CACHED_SOURCE_LENGTH),
        }
        for number, layer in enumerate(layers)
    }
    lengths = {"decoder": _PAST, "encoder": _CACHED_SOURCE}
    past_shapes = {
        number: {side: {name: {0: _BATCH, 2: lengths[side]} for name in states} for side, states in sides.items()}
        for number, sides in past.items()
    }
    inputs = {
        "input_ids": torch.zeros(BATCH_SIZE, TARGET_LENGTH, dtype=torch.long),
        "encoder_attention_mask": torch.ones(BATCH_SIZE, SOURCE_LENGTH, dtype=torch.long),
        "encoder_hidden_states": torch.zeros(BATCH_SIZE, SOURCE_LENGTH, model.config.d_model),
        "past_key_values": past,
    }
    shapes = {
        "input_ids": {0: _BATCH, 1: _TARGET},
        "encoder_attention_mask": {0: _BATCH, 1: _SOURCE},
        "encoder_hidden_states": {0: _BATCH, 1: _SOURCE},
        "past_key_values": past_shapes,
    }
    return _export(DecoderGraph(model), inputs, shapes, opset)


def _make_states(attention: Any, length: int) -> dict[str, torch.Tensor]:
    """Keys and values (B, H, length, d_k or d_v) as a cache holds them."""
    heads = attention.num_heads
    return {
        name: torch.zeros(BATCH_SIZE, heads, length, projection.out_features // heads)
        for name, projection in (("key", attention.k_proj), ("value", attention.v_proj))
    }


def _export(graph: nn.Module, inputs: dict[str, Any], shapes: Mapping[str, Any], opset: int) -> Any:
    """Exports one graph, with names of its free sizes, as an `onnx_ir.Model`.

    Args:
        graph: What to export; it returns tensors by name.
        inputs: Tensors to trace it with by name, in mappings or not.
        shapes: For each tensor, the names of those of its sizes that are free.
        opset: Version of the set of operators.
    """
    from transformers.exporters.configs import OnnxConfig
    from transformers.exporters.exporter_onnx import OnnxExporter

    with _silence():
        config = OnnxConfig(dynamic_shapes=dict(shapes), opset_version=opset)
        exported: Any = OnnxExporter().export(cast(Any, graph.eval()), inputs, config)
    # Older versions of transformers return torch's own ONNXProgram.
    model = exported.program if hasattr(exported, "program") else exported.model
    if model.opset_imports[""] != opset:
        raise ValueError(f"opset is {opset}, of which the exporter knows nothing: it took {model.opset_imports['']}.")
    _name_sizes(model.graph, shapes)
    _forget_sources(model)
    return model


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps from the user what the exporters say about themselves: progress, and versions they were not tested with."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "transformers.exporters", "onnx_ir", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


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
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        for value in node.outputs:
            value.metadata_props.clear()
    for value in [*model.graph.inputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()


def _save(model: Any, path: Path) -> None:
    import onnx_ir

    size = sum(value.const_value.nbytes for value in model.graph.initializers.values())
    onnx_ir.save(model, path, external_data=f"{path.name}_data" if size > _LARGEST_FILE else None)
