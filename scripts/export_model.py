r"""Take a trained model to another runtime.

    python scripts/export_model.py --model_name_or_path out/my-model --format ctranslate2 --output_dir out/my-model-ct2
    python scripts/export_model.py --model_name_or_path out/my-model --format ctranslate2 --quantization int8 \
        --output_dir out/my-model-int8
    python scripts/export_model.py --model_name_or_path out/my-model --format onnx --output_dir out/my-model-onnx

The output folder must be new or empty; it is complete when the command ends well, and not there otherwise. It holds
what translating needs besides: the tokenizer and the generation config.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoModelForSeq2SeqLM, HfArgumentParser

from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.data.vocabularies import load_tokenizer
from vanilla_transformer.export.ctranslate2 import QUANTIZATIONS, export_ctranslate2
from vanilla_transformer.export.onnx import OLDEST_OPSET, export_onnx
from vanilla_transformer.files import check_new_folder, explain_missing_model

INTERRUPTED = 130  # as shells say it
FORMATS = {
    "ctranslate2": "for CTranslate2 (see --quantization and --max_positions)",
    "onnx": "for ONNX Runtime and others (see --opset), compared with the original in the end",
}
# Those that not all formats have.
OPTIONS = {"ctranslate2": ("quantization", "max_positions"), "onnx": ("opset",)}


@dataclass
class ExportArguments:
    """Which model becomes what, and where."""

    model_name_or_path: str = field(metadata={"help": "Folder or Hub name of a model of this package."})
    output_dir: str = field(metadata={"help": "Folder for the exported model: a new one, or an empty one."})
    format: str = field(
        metadata={
            "help": "; ".join(f"{name}: {what}" for name, what in FORMATS.items()) + ".",
            "choices": list(FORMATS),
        }
    )
    revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the Hub. Default: main."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Let code from the checkpoint run."})
    quantization: str | None = field(
        default=None,
        metadata={
            "help": "CTranslate2: how weights are written. Default: as saved. Computation may still be asked for in "
            "another type.",
            "choices": list(QUANTIZATIONS),
        },
    )
    max_positions: int | None = field(
        default=None,
        metadata={"help": "CTranslate2: the most tokens of a text, where positions are sinusoids. Default: 4096."},
    )
    opset: int | None = field(
        default=None, metadata={"help": f"ONNX: version of its operators. Default: {OLDEST_OPSET}."}
    )

    def __post_init__(self) -> None:
        foreign = [
            f"--{name} {getattr(self, name)} is for --format {other}"
            for other, names in OPTIONS.items()
            for name in names
            if other != self.format and getattr(self, name) is not None
        ]
        if foreign:
            raise ValueError(f"{', '.join(foreign)}; this is --format {self.format}.")


def export_for_ctranslate2(model: Any, tokenizer: Any, arguments: ExportArguments) -> Path:
    """Writes the folder that CTranslate2 reads."""
    return export_ctranslate2(
        model,
        arguments.output_dir,
        tokenizer=tokenizer,
        quantization=arguments.quantization,
        max_positions=arguments.max_positions,
    )


def export_for_onnx(model: Any, tokenizer: Any, arguments: ExportArguments) -> Path:
    """Writes the folder with the encoder's and the decoder's graph."""
    opset = OLDEST_OPSET if arguments.opset is None else arguments.opset
    return export_onnx(model, arguments.output_dir, tokenizer=tokenizer, opset=opset)


# By the names of FORMATS.
EXPORTERS: dict[str, Callable[[Any, Any, ExportArguments], Path]] = {
    "ctranslate2": export_for_ctranslate2,
    "onnx": export_for_onnx,
}


def make_parser() -> HfArgumentParser:
    """The command line's parser."""
    return make_argument_parser(ExportArguments, __doc__)


def run(arguments: ExportArguments) -> None:
    """Load the model and its tokenizer, if it has one, and export them."""
    check_new_folder(arguments.output_dir)
    place: dict[str, Any] = {"revision": arguments.revision, "trust_remote_code": arguments.trust_remote_code}
    with explain_missing_model(arguments.model_name_or_path):
        model = AutoModelForSeq2SeqLM.from_pretrained(arguments.model_name_or_path, dtype="auto", **place).eval()
        tokenizer = load_tokenizer(arguments.model_name_or_path, **place)
    folder = EXPORTERS[arguments.format](model, tokenizer, arguments)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 1e6:,.1f} MB")
    if tokenizer is None:
        print("The model has no tokenizer: what was exported takes and gives ids, and cannot translate text by itself.")


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments (`argv`, else the command line's) and export."""
    parser = make_parser()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("vanilla_transformer").setLevel(logging.INFO)
    try:
        (arguments,) = parser.parse_args_into_dataclasses(args=argv)
        run(arguments)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(INTERRUPTED, "\nInterrupted: nothing was exported.\n")


if __name__ == "__main__":
    main()
