r"""Take a trained model to another runtime.

    vanilla-transformer export --model_name_or_path out/my-model --format ctranslate2
    vanilla-transformer export --model_name_or_path out/my-model --format ctranslate2 --output_dir out/my-model-ct2
    vanilla-transformer export --model_name_or_path out/my-model --format ctranslate2 --quantization int8 \
        --output_dir out/my-model-int8
    vanilla-transformer export --model_name_or_path out/my-model --format onnx --output_dir out/my-model-onnx
    vanilla-transformer export --model_name_or_path out/my-model --format transformersjs --output_dir out/my-model-js
    vanilla-transformer export --model_name_or_path out/my-model --format web --output_dir out/my-page
    vanilla-transformer export --model_name_or_path out/my-model --format explainer --output_dir out/my-explainer
    vanilla-transformer export --model_name_or_path out/my-model --format argos --quantization int8 \
        --output_dir out/my-package

The output folder must be new or empty; it is complete when the command ends well, and not there otherwise. It holds
what translating needs besides: the tokenizer and the generation config. The first command writes to
out/my-model/ctranslate2, which `translate`, `serve` and `evaluate` then take by themselves for out/my-model. The last
one writes a package for Argos Translate and LibreTranslate, of a model with a sentencepiece vocabulary (train
--tokenizer_name spm.model).
"""

import importlib
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from vanilla_transformer.options import option

from .command_line import make_argument_parser, make_main

logger = logging.getLogger(__name__)
# Options that not all formats have.
OPTIONS = {
    "ctranslate2": ("quantization", "max_positions"),
    "onnx": ("opset",),
    "transformersjs": ("opset",),
    "web": ("quantization", "opset", "node_modules", "examples"),
    "explainer": ("opset", "node_modules", "examples"),
    "argos": ("quantization", "max_positions", "source_lang", "target_lang", "package_version", "sentence_splitter"),
}
# As export/ctranslate2.py has them.
Quantization = Literal[
    "float32", "float16", "bfloat16", "int16", "int8", "int8_float32", "int8_float16", "int8_bfloat16"
]


@dataclass
class ExportArguments:
    """Which model becomes what, and where."""

    model_name_or_path: str = option("Folder or Hub name of a model of this package.")
    format: Literal["ctranslate2", "onnx", "transformersjs", "web", "explainer", "argos"] = option(
        "ctranslate2: for CTranslate2; onnx: for ONNX Runtime and others; transformersjs: for JavaScript, in float32 "
        "and 8 bits; web: a page that translates in the browser; explainer: a page that shows every number on the way. "
        "argos: a package for Argos Translate and LibreTranslate. "
        "All but the first and the last are compared with the original in the end."
    )
    output_dir: str | None = option(
        "Folder for the exported model: a new one, or an empty one. Default, for --format ctranslate2: a folder of "
        "that name in the model's.",
        None,
    )
    revision: str = option("Branch, tag or commit on the Hub. Default: main.", "main")
    trust_remote_code: bool = option("Let code from the checkpoint run.", False)
    quantization: Quantization | None = option(
        "How weights are written. CTranslate2, argos: as saved by default. web: int8 (default) or float32.", None
    )
    max_positions: int | None = option(
        "CTranslate2, argos: the most tokens of a text with sinusoids. Default: 4096.", None
    )
    opset: int | None = option(
        "ONNX and what is made of it: version of ONNX's operators. Default: 18, the oldest that torch writes.", None
    )
    node_modules: str | None = option(
        "web, explainer: where npm installed onnxruntime-web and @huggingface/tokenizers. Default: node_modules here.",
        None,
    )
    examples: list[str] | None = option("web, explainer: texts to click on.", None)
    source_lang: str | None = option("argos: code of the source language, as en. Default: the model's.", None)
    target_lang: str | None = option("argos: code of the target language. Default: the model's.", None)
    package_version: str | None = option("argos: the package's version. Default: 1.0.", None)
    sentence_splitter: str | None = option(
        "argos: a model of MiniSBD (.onnx) to pack. Default: argostranslate fetches one at the first translation.", None
    )

    def __post_init__(self) -> None:
        owners: dict[str, list[str]] = {}
        for name, options in OPTIONS.items():
            for each in options:
                owners.setdefault(each, []).append(name)
        given = [
            f"--{name} {getattr(self, name)} is for --format {' or '.join(formats)}"
            for name, formats in owners.items()
            if self.format not in formats and getattr(self, name) is not None
        ]
        if given:
            raise ValueError(f"{', '.join(given)}; this is --format {self.format}.")
        if self.output_dir is None and self.format != "ctranslate2":
            raise ValueError(f"--format {self.format} needs --output_dir.")

    def find_output_dir(self) -> Path:
        """The output folder, which may be named or not."""
        from vanilla_transformer.export.ctranslate2 import EXPORT_FOLDER
        from vanilla_transformer.files import check_model_name

        if self.output_dir is not None:
            return Path(self.output_dir)
        check_model_name(self.model_name_or_path)
        folder = Path(self.model_name_or_path)
        if not folder.is_dir():
            raise ValueError(f"{folder} is on the Hub, and has no folder here to export into: give --output_dir.")
        return folder / EXPORT_FOLDER


def run(arguments: ExportArguments) -> None:
    """Loads the model and its tokenizer, if it has one, and exports them."""
    logging.getLogger("vanilla_transformer").setLevel(logging.INFO)
    from transformers import AutoModelForSeq2SeqLM

    from vanilla_transformer.data.vocabularies import load_tokenizer
    from vanilla_transformer.export.engines import check_not_exported
    from vanilla_transformer.files import check_new_folder, check_revision, explain_missing_model

    name = arguments.model_name_or_path
    check_not_exported(name)
    check_revision(name, arguments.revision)
    output_dir = check_new_folder(arguments.find_output_dir())
    place: dict[str, Any] = {"revision": arguments.revision, "trust_remote_code": arguments.trust_remote_code}
    with explain_missing_model(name):
        model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype="auto", **place).eval()
        tokenizer = load_tokenizer(name, **place)
    exports = importlib.import_module(f"vanilla_transformer.export.{arguments.format}")
    given = {name: getattr(arguments, name) for name in OPTIONS[arguments.format]}
    options = {name: value for name, value in given.items() if value is not None}
    write = getattr(exports, f"export_{arguments.format}")
    if arguments.format == "ctranslate2":
        options["source"] = name
    folder: Path = write(model, output_dir, tokenizer=tokenizer, **options)
    if arguments.format == "ctranslate2":
        warn_of_settings(folder, model)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 1e6:,.1f} MB")
    if tokenizer is None:
        print("The model has no tokenizer: what was exported takes and gives ids, and cannot translate text by itself.")


def warn_of_settings(folder: Path, model: Any) -> None:
    """Says which of the model's own settings keep CTranslate2 from searching as they are."""
    from vanilla_transformer.export.ctranslate2_model import find_refused_settings
    from vanilla_transformer.files import read_json

    max_positions = read_json(folder / "config.json")["max_positions"]
    if reasons := find_refused_settings(model.generation_config, max_positions):
        logger.warning("%s: CTranslate2 will refuse its search settings:\n  - %s", folder, "\n  - ".join(reasons))


make_parser = partial(make_argument_parser, ExportArguments, __doc__)
main = make_main(make_parser, run, "Interrupted: nothing was exported.")
