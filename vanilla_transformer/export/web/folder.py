"""Writes the folder of the page: model, settings, the page's own files, and those of two npm packages."""

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import SpaceCardData
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.conversion.errors import refuse
from vanilla_transformer.export.eight_bits import quantize_graph
from vanilla_transformer.export.graphs import MOST_CANDIDATES, CandidatesGraph
from vanilla_transformer.export.javascript_tokenizer import rewrite_for_javascript
from vanilla_transformer.export.onnx import OLDEST_OPSET, prepare_export, write_graphs
from vanilla_transformer.export.onnx_model import DECODER_FILE, ENCODER_FILE
from vanilla_transformer.export.transformersjs import find_reasons
from vanilla_transformer.files import new_folder, read_json
from vanilla_transformer.inference.translate import length_limit
from vanilla_transformer.model.generation_vanilla_transformer import (
    MAX_EXTRA_TOKENS,
    VanillaTransformerForConditionalGeneration,
)
from vanilla_transformer.model.positions_vanilla_transformer import count_learned_positions
from vanilla_transformer.tasks import find_prefix, find_task

PAGE_FOLDER = Path(__file__).resolve().parent
PAGE_FILES = (
    *("index.html", "page.css", "page.js", "worker.js", "engine.js", "search.js", "translator.js", "loading.js"),
    *("icon.svg", "service-worker.js"),
)
# By package: the version that was tried, and the files, each with the folder that it is copied to.
PACKAGES = {
    "onnxruntime-web": (
        "1.31.0-dev.20260914-8d85527a0",
        ("dist/ort.wasm.min.mjs", "dist/ort-wasm-simd-threaded.mjs", "dist/ort-wasm-simd-threaded.wasm"),
    ),
    "@huggingface/tokenizers": ("0.2.0", ("dist/tokenizers.min.mjs",)),
}
MODEL, RUNTIME = "model", "runtime"
# What the search of the page knows, besides those of beams.
KNOWN = ("bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id", "max_length", "max_new_tokens")
_README = """---
{card}
---

# {title}

{purpose}: no server, no telemetry, and nothing is fetched from elsewhere. After the first
visit it works without a network. Put this folder on any web server, on GitHub Pages, or on a static Space:

    hf upload me/{name} {name} --repo-type space

To try it here: `python -m http.server --bind 127.0.0.1 --directory {name}`, and open http://127.0.0.1:8000. Browsers do
not let a page that is opened as a file do this.

`model/` holds the model in ONNX's format, `settings.json` what else is known of it, and `runtime/` files of two npm
packages: {packages}.
"""


def export_web(
    model: VanillaTransformerForConditionalGeneration | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    opset: int = OLDEST_OPSET,
    quantization: Literal["int8", "float32"] = "int8",
    node_modules: str | os.PathLike[str] = "node_modules",
    examples: Sequence[str] = (),
) -> Path:
    """Writes a page that translates in the visitor's browser: a static folder, complete or absent.

    The graphs are compared with PyTorch, and the tokenizer for JavaScript with the one given, as it is read in Python.

    Args:
        model: The model, or the folder or Hub name of one.
        folder: Where to: a folder that is not there yet, or an empty one.
        tokenizer: The model's tokenizer: byte-level BPE of this package, with one vocabulary for both sides. `None`:
            the one saved with the model, where that is a folder or name.
        opset: Version of ONNX's set of operators.
        quantization: How weights are written.
        node_modules: Where npm has installed the packages of `PACKAGES`.
        examples: Texts that visitors can click on.

    Raises:
        ConversionError: If JavaScript could not translate as Python does; the message says why.
        FileExistsError: If there is something already.
        FileNotFoundError: If a file of the npm packages is missing; the message says how to get it.
        ValueError: If there is no such quantization.
    """
    if quantization not in ("int8", "float32"):
        raise ValueError(f"quantization is {quantization!r}; for a page it must be one of ['int8', 'float32'].")
    runtime = find_runtime(node_modules)
    copied, tokenizer = prepare_export(model, folder, tokenizer=tokenizer, opset=opset)
    reasons = find_reasons(copied, KNOWN)
    if find_task(copied.config).name == "summarization":
        reasons.append("it is for summarization, and the page takes each line by itself")
    refuse("A page cannot run this model", reasons)
    contents = rewrite_for_javascript(tokenizer)
    settings = make_settings(copied, tokenizer) | {"examples": list(examples)}
    with new_folder(folder) as partial:
        _write_model(copied, partial / MODEL, contents, opset=opset, quantization=quantization)
        title = _make_title(settings)
        readme = make_readme(title, "A page that translates in your browser", Path(folder), Path(node_modules))
        finish_folder(
            partial, {"title": title, **settings}, readme, [PAGE_FOLDER / name for name in PAGE_FILES], runtime
        )
    return Path(folder)


def finish_folder(
    folder: Path, settings: dict[str, Any], readme: str, pages: Sequence[Path], runtime: Sequence[Path]
) -> None:
    """Copies a page's files and npm's to where the model is already, and writes what tells of them all."""
    (folder / RUNTIME).mkdir()
    for path in runtime:
        shutil.copyfile(path, folder / RUNTIME / path.name)
    for path in pages:
        shutil.copyfile(path, folder / path.name)
    (folder / "README.md").write_text(readme, encoding="utf-8")
    _write_index(folder, settings, [path.name for path in pages])


def find_runtime(node_modules: str | os.PathLike[str]) -> list[Path]:
    """The files of the npm packages to copy; a FileNotFoundError that says how to get them if one is missing."""
    root = Path(node_modules)
    paths = [root / package / file for package, (_, files) in PACKAGES.items() for file in files]
    manifests = [root / package / "package.json" for package in PACKAGES]
    missing = [str(path) for path in (*manifests, *paths) if not path.is_file()]
    if missing:
        wanted = " ".join(f"{package}@{version}" for package, (version, _) in PACKAGES.items())
        if root.name == "node_modules":
            command = f"npm install --prefix {shlex.quote(str(root.parent))} --no-save --ignore-scripts {wanted}"
        else:
            command = f"npm install --prefix . --no-save --ignore-scripts {wanted}, and name node_modules"
        raise FileNotFoundError(
            f"The page needs files of two npm packages, and there is no {missing[0]}. npm (Debian: nodejs, npm) "
            f"installs them: {command}"
        )
    return paths


def make_settings(
    model: VanillaTransformerForConditionalGeneration, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    """What JavaScript must know of a model, as `translator.js` describes it, and of its languages."""
    config: Any = model.config
    search: Any = model.generation_config
    longest = count_learned_positions(model.config)
    limits = [limit for limit in (longest, tokenizer and length_limit(tokenizer, None)) if limit is not None]
    most = search.max_new_tokens
    if most is None and search.max_length is not None and "max_length" in search.to_diff_dict():
        most = search.max_length - 1  # of which the start symbol is one
    return {
        "languages": config.langs,
        "parameters": model.num_parameters(),
        "ids": {"eos": config.eos_token_id, "pad": config.pad_token_id, "start": search.decoder_start_token_id},
        "most_beams": MOST_CANDIDATES // 2,
        "prefix": find_prefix(config, find_task(config), langs=config.langs),
        "max_source_tokens": min(limits, default=None),
        "max_target_tokens": min((each for each in (most, longest) if each is not None), default=None),
        "extra_target_tokens": MAX_EXTRA_TOKENS if most is None else None,
        "search": {
            "num_beams": search.num_beams or 1,
            "length_penalty": 1.0 if search.length_penalty is None else search.length_penalty,
            "length_penalty_type": getattr(search, "length_penalty_type", None) or "transformers",
            "early_stopping": search.early_stopping or False,
        },
    }


def _write_model(
    model: VanillaTransformerForConditionalGeneration,
    folder: Path,
    tokenizer: dict[str, Any],
    *,
    opset: int,
    quantization: str,
) -> None:
    """Writes the graphs as `encoder.onnx` and `decoder.onnx`, and the tokenizer's files."""
    graphs = folder / "float32"
    graphs.mkdir(parents=True)
    write_graphs(model, graphs, opset=opset, decoder=CandidatesGraph)
    for file, name in ((ENCODER_FILE, "encoder.onnx"), (DECODER_FILE, "decoder.onnx")):
        if quantization == "int8":
            quantize_graph(graphs / file, folder / name)
        else:
            (graphs / file).replace(folder / name)
    shutil.rmtree(graphs)
    for name, content in tokenizer.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def _make_title(settings: dict[str, Any]) -> str:
    languages = settings["languages"]
    return f"Translate {languages[0]} to {languages[1]}" if languages else "Translate"


def make_readme(title: str, purpose: str, folder: Path, node_modules: Path) -> str:
    """The text beside a page: a Space's settings, what it is, how to show it to others."""
    headers = {"cross-origin-embedder-policy": "require-corp", "cross-origin-opener-policy": "same-origin"}
    fields: Any = {"app_file": "index.html", "custom_headers": headers}  # with them, browsers allow threads
    card = SpaceCardData(title=title, sdk="static", **fields).to_yaml()
    found = {package: read_json(node_modules / package / "package.json") for package in PACKAGES}
    packages = " and ".join(f"{name} {each['version']} ({each['license']})" for name, each in found.items())
    return _README.format(card=card, title=title, purpose=purpose, name=folder.resolve().name, packages=packages)


def _write_index(folder: Path, settings: dict[str, Any], pages: Sequence[str]) -> None:
    """Writes settings.json with the size of each file to be loaded, and tells the service worker their names."""
    loaded = [path for name in (MODEL, RUNTIME) for path in sorted((folder / name).iterdir())]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in loaded}
    settings = {**settings, "files": sizes}
    (folder / "settings.json").write_text(json.dumps(settings, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    worker = folder / "service-worker.js"
    text = worker.read_text(encoding="utf-8").replace("@VERSION@", digest.hexdigest()[:16])
    names = [name for name in (*pages, "settings.json") if name != worker.name]
    worker.write_text(text.replace('"@FILES@"', ", ".join(json.dumps(name) for name in names)), encoding="utf-8")
