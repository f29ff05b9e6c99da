r"""Bring a model of another system into this package's form, or take one of ours back.

    python scripts/convert_checkpoint.py --model_name_or_path Helsinki-NLP/opus-mt-en-de --output_dir out/opus-en-de
    python scripts/convert_checkpoint.py --model_name_or_path wmt16/checkpoint_best.pt --codes wmt16/bpecodes \
        --output_dir out/wmt16
    python scripts/convert_checkpoint.py --model_name_or_path model.pt --format torch_nn --nhead 4 --output_dir out/mine
    python scripts/convert_checkpoint.py --model_name_or_path out/my-model --to marian --output_dir out/my-marian

Which system a model is of is found out (or said with --format), and `--format fairseq --help` lists what else may be
said of models of that system. A model that has a feature which ours lacks is refused, with all reasons; weights that
have no place, or are missing or of another shape, are listed together. At the end the converted model's logits are
compared with the original's where that can run here. The output folder is complete or absent.
"""

import argparse
import dataclasses
import shlex
from dataclasses import dataclass, field
from typing import Any, cast

from transformers import AutoModelForSeq2SeqLM, HfArgumentParser

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.conversion.converted import TOLERANCE
from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.conversion.sources import SOURCES, TARGETS, convert, detect_format
from vanilla_transformer.data.vocabularies import load_tokenizer
from vanilla_transformer.files import check_new_folder

INTERRUPTED = 130  # the exit status of a process that Ctrl-C ended, as shells have it


@dataclass
class ConversionArguments:
    """What to convert, and where to."""

    model_name_or_path: str = field(metadata={"help": "A folder, a file or a name on the Hub, as --format has it."})
    output_dir: str = field(metadata={"help": "A folder that is not there yet, or an empty one."})
    format: str | None = field(
        default=None,
        metadata={
            "help": "What the model is; found out by default. "
            + "; ".join(f"{name}: {source.description}" for name, source in SOURCES.items())
            + ".",
            "choices": list(SOURCES),
        },
    )
    to: str | None = field(
        default=None,
        metadata={"help": "Convert a model of ours, in the other direction.", "choices": list(TARGETS)},
    )
    skip_check: bool = field(default=False, metadata={"help": "Do not compare logits with the original's."})

    def __post_init__(self) -> None:
        if self.format is not None and self.to is not None:
            raise ValueError(f"--format {self.format} brings a model in, and --to {self.to} takes one out: give one.")


def make_parser(source_format: str | None = None) -> HfArgumentParser:
    """The command line's parser, with the options of models of a format."""
    options = SOURCES[source_format].list_options() if source_format else []
    class_of_options = dataclasses.make_dataclass(
        "FormatOptions",
        # Without a default of its own an option that is not given is left to the converter.
        [(option.name, option.type | None, field(default=None, metadata={"help": option.help})) for option in options],
    )
    return make_argument_parser([ConversionArguments, class_of_options], __doc__)


def find_format(argv: list[str] | None) -> str | None:
    """The format that the arguments name, or that the model named in them is of; `None` without one."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--format", "--to"):
        finder.add_argument(name)
    finder.add_argument("--model_name_or_path", "--model-name-or-path")
    known, _ = finder.parse_known_args(argv)
    if known.to is not None or known.model_name_or_path is None or known.format is not None:
        return known.format if known.format in SOURCES else None
    return detect_format(known.model_name_or_path)


def bring_in(arguments: ConversionArguments, source_format: str | None, options: dict[str, Any]) -> None:
    """Converts a model of another system, checks and saves it."""
    converted = convert(arguments.model_name_or_path, source_format, **options)
    parameters = f"{converted.model.num_parameters():,} parameters"
    print(f"Converted {converted.source}: {parameters}, {converted.model.dtype}.")
    # First of all what was assumed, since the comparison cannot tell whether that is so.
    for note in converted.notes:
        print(f"Note: {note}")
    difference = None
    if not arguments.skip_check:
        difference = converted.check()
        if difference is None:
            print("The original cannot run here, so that the logits were not compared.")
        else:
            print(
                f"Logits differ from the original's by {difference:.1e} of the largest at most (may: {TOLERANCE:.0e})."
            )
    converted.save(arguments.output_dir, difference=difference)
    print(f"Saved to {arguments.output_dir}.")
    if converted.tokenizer is not None:
        print(f"Translate with: python scripts/translate.py --model_name_or_path {shlex.quote(arguments.output_dir)}")


def take_out(arguments: ConversionArguments) -> None:
    """Converts a model of ours and saves it."""
    name = arguments.model_name_or_path
    model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype="auto", trust_remote_code=False)
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        raise ConversionError(f"{name} is no model of this package but a {type(model).__name__}.")
    tokenizer = load_tokenizer(name)
    check = not arguments.skip_check
    TARGETS[cast(str, arguments.to)](model.eval(), tokenizer, arguments.output_dir, check=check)
    if check:
        print(f"Logits of both are equal (by {TOLERANCE:.0e} of the largest).")
    print(f"Saved to {arguments.output_dir}.")


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments (`argv`, else the command line's) and convert."""
    parser = make_parser()
    try:
        source_format = find_format(argv)
        parser = make_parser(source_format)
        arguments, options, strange = parser.parse_args_into_dataclasses(args=argv, return_remaining_strings=True)
        if strange:
            hint = f" (the model's format: {source_format})" if source_format else ""
            raise ValueError(f"unrecognized arguments: {' '.join(strange)}{hint}")
        check_new_folder(arguments.output_dir)
        given = {name: value for name, value in vars(options).items() if value is not None}
        if arguments.to is not None:
            take_out(arguments)
        else:
            bring_in(arguments, source_format, given)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(INTERRUPTED, "\nInterrupted: nothing was written.\n")


if __name__ == "__main__":
    main()
