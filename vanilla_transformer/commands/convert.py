r"""Bring a model of another system into this package's form, or take one of ours back.

    vanilla-transformer convert --model_name_or_path Helsinki-NLP/opus-mt-en-de --output_dir out/opus-en-de
    vanilla-transformer convert --model_name_or_path wmt16/checkpoint_best.pt --codes wmt16/bpecodes \
        --output_dir out/wmt16
    vanilla-transformer convert --model_name_or_path model.pt --format torch_nn --nhead 4 --output_dir out/mine
    vanilla-transformer convert --model_name_or_path out/my-model --to marian --output_dir out/my-marian

The system is found out (or said with --format); `--format fairseq --help` lists what else may be said of its models. A
model with a feature that ours lacks is refused, with all reasons. At the end the converted model's logits are compared
with the original's where that can run here. The output folder is complete or absent.
"""

import argparse
import shlex
from dataclasses import dataclass, make_dataclass
from typing import Any, Literal, cast

from vanilla_transformer.options import option

from .command_line import OptionParser, explain_unknown, explaining_errors, make_argument_parser


@dataclass
class ConversionArguments:
    """What to convert, and where to."""

    model_name_or_path: str = option("A folder, a file or a name on the Hub, as --format has it.")
    output_dir: str = option("A folder that is not there yet, or an empty one.")
    # As conversion/sources.py has them.
    format: Literal["marian", "fsmt", "fairseq", "torch_nn", "annotated", "opennmt_py", "joeynmt"] | None = option(
        "What the model is; found out by default. marian, fsmt: MarianMT (opus-mt) and FSMT (wmt19) of transformers; "
        "fairseq: a checkpoint beside its dictionaries; torch_nn: a state dict of a model around torch.nn.Transformer, "
        "whose number of heads must be said; annotated: a state dict of the Annotated Transformer; opennmt_py: a "
        "checkpoint of OpenNMT-py 3; joeynmt: the folder of a training by JoeyNMT 2, or a checkpoint in it.",
        None,
    )
    to: Literal["marian", "torch_nn"] | None = option("Convert a model of ours, in the other direction.", None)
    skip_check: bool = option("Do not compare logits with the original's.", False)

    def __post_init__(self) -> None:
        if self.format is not None and self.to is not None:
            raise ValueError(f"--format {self.format} brings a model in, and --to {self.to} takes one out: give one.")


def make_parser(source_format: str | None = None) -> OptionParser:
    """The command line's parser, with the options of models of a format."""
    if source_format is None:
        return make_argument_parser(ConversionArguments, __doc__)
    from vanilla_transformer.conversion.sources import SOURCES

    # An option that is not given is left to the converter.
    fields = [(each.name, each.type | None, option(each.help, None)) for each in SOURCES[source_format].list_options()]
    return make_argument_parser([ConversionArguments, make_dataclass("FormatOptions", fields)], __doc__)


def find_format(argv: list[str] | None) -> str | None:
    """The format that the arguments name, or that the model named in them is of; `None` without one."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--format", "--to"):
        finder.add_argument(name)
    finder.add_argument("--model_name_or_path", "--model-name-or-path")
    finder.add_argument("--revision", default="main")
    known, _ = finder.parse_known_args(argv)
    if known.to is not None or (known.format is None and known.model_name_or_path is None):
        return None
    from vanilla_transformer.conversion.sources import SOURCES, detect_format

    if known.format is not None:
        return known.format if known.format in SOURCES else None
    return detect_format(known.model_name_or_path, known.revision)


def bring_in(arguments: ConversionArguments, source_format: str | None, options: dict[str, Any]) -> None:
    """Converts a model of another system, checks and saves it."""
    from vanilla_transformer.conversion.converted import TOLERANCE
    from vanilla_transformer.conversion.sources import convert

    converted = convert(arguments.model_name_or_path, source_format, **options)
    model = converted.model
    print(f"Converted {converted.source}: {model.num_parameters():,} parameters, {model.dtype}.")
    # First of all what was assumed, since the comparison cannot tell whether that is so.
    for note in converted.notes:
        print(f"Note: {note}")
    difference = None if arguments.skip_check else converted.check()
    if difference is not None:
        print(f"Logits differ from the original's by {difference:.1e} of the largest at most (may: {TOLERANCE:.0e}).")
    elif not arguments.skip_check:
        print("The original cannot run here, so that the logits were not compared.")
    converted.save(arguments.output_dir, difference=difference)
    print(f"Saved to {arguments.output_dir}.")
    if converted.tokenizer is not None:
        folder = shlex.quote(arguments.output_dir)
        print(f"Translate with: vanilla-transformer translate --model_name_or_path {folder}")


def take_out(arguments: ConversionArguments) -> None:
    """Converts a model of ours and saves it."""
    from transformers import AutoModelForSeq2SeqLM

    from vanilla_transformer.conversion.converted import TOLERANCE
    from vanilla_transformer.conversion.sources import TARGETS
    from vanilla_transformer.data.vocabularies import load_tokenizer
    from vanilla_transformer.export.engines import check_not_exported
    from vanilla_transformer.files import explain_missing_model
    from vanilla_transformer.model.generation_vanilla_transformer import VanillaTransformerForConditionalGeneration

    name = arguments.model_name_or_path
    check_not_exported(name)
    with explain_missing_model(name):
        model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype="auto", trust_remote_code=False)
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        raise ValueError(f"{name} is no model of this package but a {type(model).__name__}.")
    check = not arguments.skip_check
    TARGETS[cast(str, arguments.to)](model.eval(), load_tokenizer(name), arguments.output_dir, check=check)
    if check:
        print(f"Logits of both are equal (by {TOLERANCE:.0e} of the largest).")
    print(f"Saved to {arguments.output_dir}.")


def main(argv: list[str] | None = None) -> None:
    """Parses the arguments (`argv`, else the command line's) and converts."""
    parser = make_parser()
    with explaining_errors(parser, "Interrupted: nothing was written."):
        source_format = find_format(argv)
        parser = make_parser(source_format)
        arguments, *options, strange = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True)
        if strange:
            hint = f" (the model's format: {source_format})" if source_format else ""
            raise ValueError(f"{explain_unknown(parser, strange)}{hint}")
        from vanilla_transformer.files import check_new_folder

        check_new_folder(arguments.output_dir)
        if arguments.to is not None:
            take_out(arguments)
        else:
            given = {name: value for each in options for name, value in vars(each).items() if value is not None}
            bring_in(arguments, source_format, given)
