"""Writes the folder of the page: graphs that give all values, one file of weights, notes on both, the page's files."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.conversion.errors import ConversionError, refuse
from vanilla_transformer.export.javascript_tokenizer import rewrite_for_javascript
from vanilla_transformer.export.onnx import (
    BATCH,
    OLDEST_OPSET,
    SOURCE,
    TARGET,
    TOLERANCE,
    export_graph,
    prepare_export,
)
from vanilla_transformer.export.transformersjs import find_reasons
from vanilla_transformer.export.web.folder import (
    KNOWN,
    MODEL,
    PAGE_FOLDER,
    find_runtime,
    finish_folder,
    make_readme,
    make_settings,
)
from vanilla_transformer.files import new_folder
from vanilla_transformer.model.generation_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.positions_vanilla_transformer import count_learned_positions

from .recording import RecordingDecoder, RecordingEncoder

WEIGHTS_FILE = "weights.bin"
LANGUAGES = ("en", "zh")
OWN_FILES = (
    *("index.html", "explainer.css", "explainer.js", "explainer-worker.js", "explain.js", "tracer.js", "matrix.js"),
    *("panel.js", "tree.js", "texts.js", *(f"texts.{language}.json" for language in LANGUAGES)),
)
WEB_FILES = ("search.js", "translator.js", "loading.js", "icon.svg", "service-worker.js")
_SMALLEST = 64  # bytes of a weight that is not left in its graph


def export_explainer(
    model: VanillaTransformerForConditionalGeneration | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    opset: int = OLDEST_OPSET,
    node_modules: str | os.PathLike[str] = "node_modules",
    examples: Sequence[str] = (),
) -> Path:
    """Writes a page that shows how the model translates, number by number: a static folder, complete or absent.

    All is in float32. The values are compared with PyTorch's, and the logits with those of the model itself.

    Args:
        model: The model, or the folder or Hub name of one.
        folder: Where to: a folder that is not there yet, or an empty one.
        tokenizer: The model's tokenizer: byte-level BPE of this package, with one vocabulary for both sides. `None`:
            the one saved with the model, where that is a folder or name.
        opset: Version of ONNX's set of operators.
        node_modules: Where npm has installed the packages that `export_web` needs.
        examples: Texts that visitors can click on. The first one is shown at the start.

    Raises:
        ConversionError: If JavaScript could not translate as Python does; the message says why.
        FileExistsError: If there is something already.
        FileNotFoundError: If a file of the npm packages is missing; the message says how to get it.
    """
    runtime = find_runtime(node_modules)
    copied, tokenizer = prepare_export(model, folder, tokenizer=tokenizer, opset=opset)
    refuse("A page cannot run this model", find_reasons(copied, KNOWN))
    contents = rewrite_for_javascript(tokenizer)
    settings = make_settings(copied, tokenizer) | {"examples": list(examples)}
    languages = settings["languages"]
    title = f"How a Transformer translates {languages[0]} to {languages[1]}" if languages else "How a Transformer works"
    with new_folder(folder) as partial:
        graphs = partial / MODEL
        graphs.mkdir()
        notes = write_recording(copied, graphs, opset=opset)
        for name, content in contents.items():
            (graphs / name).write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
        (graphs / "notes.json").write_text(json.dumps(notes), encoding="utf-8")
        purpose = "A page that shows every number between a sentence and its translation, in your browser"
        readme = make_readme(title, purpose, Path(folder), Path(node_modules))
        pages = [Path(__file__).parent / name for name in OWN_FILES] + [PAGE_FOLDER / name for name in WEB_FILES]
        finish_folder(partial, {"title": title, **settings}, readme, pages, runtime)
    return Path(folder)


def write_recording(
    copied: VanillaTransformerForConditionalGeneration, folder: Path, *, opset: int = OLDEST_OPSET
) -> dict[str, Any]:
    """Writes `encoder.onnx`, `decoder.onnx` and their weights, given a copy of the model from `prepare_export`.

    Returns `steps`, how each value is computed (`recording.py`), `weights`, where each one is, and `output`, the name
    of what the decoder reads of the encoder.
    """
    import onnx_ir

    encoder, decoder, expected = _compute(copied)
    states = (1, SOURCE, copied.config.d_model)
    sizes: dict[str, dict[str, Any]] = {
        "encoder": {"input_ids": (1, SOURCE), "attention_mask": (1, SOURCE)},
        "decoder": {
            "input_ids": (BATCH, TARGET),
            "encoder_attention_mask": (1, SOURCE),
            "encoder_hidden_states": states,
        },
    }
    graphs = {
        name: export_graph(each, sizes[name], opset) for name, each in (("encoder", encoder), ("decoder", decoder))
    }
    index = _share_weights(graphs, copied.state_dict(), folder / WEIGHTS_FILE)
    for name, graph in graphs.items():
        onnx_ir.save(graph, folder / f"{name}.onnx")
    _compare(folder, encoder.output, expected)
    return {"steps": encoder.steps | decoder.steps, "weights": index, "output": encoder.output}


def _compute(
    model: VanillaTransformerForConditionalGeneration,
) -> tuple[RecordingEncoder, RecordingDecoder, dict[str, Any]]:
    """Inputs and all values of a sentence with a masked token and of two prefixes, after a look at the logits."""
    longest = count_learned_positions(model.config) or 7
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, min(longest, 7)), generator=generator)
    targets = torch.randint(model.config.target_vocab_size, (2, min(longest, 5)), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 1:2] = 0
    with torch.no_grad():
        encoder = RecordingEncoder(model)
        read = encoder(ids, mask)
        decoder = RecordingDecoder(model, encoder.output)
        written = decoder(targets, mask, read[encoder.output])
        rows = {"input_ids": ids.expand(2, -1), "attention_mask": mask.expand(2, -1)}
        logits = model(**rows, decoder_input_ids=targets, use_cache=False).logits
    _check("logits", written["logits"].numpy(), logits.numpy())
    return encoder, decoder, {"ids": ids, "mask": mask, "targets": targets, "read": read, "written": written}


def _share_weights(graphs: Mapping[str, Any], weights: Mapping[str, torch.Tensor], path: Path) -> dict[str, Any]:
    """Writes each weight once, and lets the graphs refer to that file; returns where the weights of each name are.

    Exporters give weights other names and turn some matrices, so what is in them tells which they are.
    """
    import onnx_ir

    places: dict[str, int] = {}
    with path.open("wb") as file:

        def place(array: NDArray[Any]) -> int:
            digest = _digest(array)
            if digest not in places:
                places[digest] = file.tell()
                file.write(np.ascontiguousarray(array).tobytes())
            return places[digest]

        for graph in graphs.values():
            for value in graph.graph.initializers.values():
                if value.const_value.dtype != onnx_ir.DataType.FLOAT or value.const_value.nbytes < _SMALLEST:
                    continue
                offset, length = place(value.const_value.numpy()), value.const_value.nbytes
                value.const_value = onnx_ir.ExternalTensor(
                    location=path.name,
                    offset=offset,
                    length=length,
                    dtype=value.const_value.dtype,
                    shape=value.const_value.shape,
                    name=value.name,
                    base_dir=path.parent,
                )
        index = {}
        for name, weight in weights.items():
            array = weight.numpy()
            turned = array.ndim == 2 and _digest(array) not in places and _digest(array.T) in places
            offset = place(array.T if turned else array)
            index[name] = {"offset": offset, "shape": list(array.shape), "turned": turned}
    return index


def _digest(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _compare(folder: Path, output: str, expected: Mapping[str, Any]) -> None:
    """Runs the graphs, and holds every value against PyTorch's."""
    import onnxruntime

    sessions = {name: onnxruntime.InferenceSession(folder / f"{name}.onnx") for name in ("encoder", "decoder")}
    mask = expected["mask"].numpy()
    inputs = {"encoder": {"input_ids": expected["ids"].numpy(), "attention_mask": mask}}
    states = expected["read"][output].numpy()
    rest = {"encoder_attention_mask": mask, "encoder_hidden_states": states}
    inputs["decoder"] = {"input_ids": expected["targets"].numpy(), **rest}
    for name, known in (("encoder", expected["read"]), ("decoder", expected["written"])):
        names = [each.name for each in sessions[name].get_outputs()]
        if set(names) != set(known):
            raise ConversionError(f"The exporter gave the {name}'s values other names: {set(names) ^ set(known)}.")
        for each, found in zip(names, sessions[name].run(names, inputs[name]), strict=True):
            _check(each, found, known[each].numpy())


def _check(name: str, found: NDArray[Any], expected: NDArray[Any]) -> None:
    difference = float(abs(found - expected).max() / max(abs(expected).max(), 1.0))
    if found.shape != expected.shape or not difference <= TOLERANCE:
        raise ConversionError(
            f"What was exported computes other {name} than the model: shape {found.shape} for {expected.shape}, or "
            f"{difference:.1e} more or less, where {TOLERANCE:.0e} may be."
        )
