r"""Show where a translation model looks: pictures, a page to click through, and word alignments.

    python scripts/plot_attention.py --model_name_or_path out/my-model --text "A man rides a horse." \
        --output_files cross.png attention.html
    python scripts/plot_attention.py --model_name_or_path out/my-model --text "A man rides a horse." \
        --target "Ein Mann reitet ein Pferd." --kind decoder --layers 4 5 --output_files decoder.svg
    python scripts/plot_attention.py --model_name_or_path out/my-model --source_file test.en --target_file test.de \
        --alignment_file test.align --align_layer -1
    python scripts/plot_attention.py --model_name_or_path out/my-model --positions_file positions.png
    python scripts/plot_attention.py --model_name_or_path out/my-model --text "A man rides a horse." "A dog." \
        --masks_file masks.png

The text is translated by the model, unless --target says how. A page (.html) has every layer and head; pictures (.png,
.svg, .pdf) have those that are asked for. Layers and heads are counted from 0, as in the names of a model's parameters;
negative ones from the last.

An alignment is written in Pharaoh's format: a line for each sentence, such as "0-0 1-2 2-1", with the number of a
source word and that of the target word that looks at it. Words are what spaces divide, and each Chinese or Japanese
character.
"""

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.files import check_new_file, check_text_output, new_file
from vanilla_transformer.inference.arguments import InferenceArguments
from vanilla_transformer.visualization import (
    AttentionMap,
    align_file,
    align_words,
    collect_attention,
    format_pharaoh,
    plot_attention,
    plot_masks,
    plot_positions,
    position_table,
    save_attention_page,
    split_words,
)
from vanilla_transformer.visualization.attention import AttentionKind
from vanilla_transformer.visualization.figures import find_format
from vanilla_transformer.visualization.heatmaps import Average


def is_page(path: str) -> bool:
    """Whether a file is to be a page, and not a picture."""
    return Path(path).suffix.lower() == ".html"


@dataclass
class AttentionArguments(InferenceArguments):
    """What to show of which model."""

    text: list[str] | None = field(default=None, metadata={"help": "Source sentence; several only for --masks_file."})
    target: list[str] | None = field(
        default=None, metadata={"help": "Its translation, to be read. Default: the model's own."}
    )
    output_files: list[str] | None = field(
        default=None, metadata={"help": "Where to write attention: .png, .svg or .pdf (pictures), or .html (a page)."}
    )
    kind: AttentionKind | None = field(default=None, metadata={"help": "Attention in the pictures. Default: cross."})
    layers: list[int] | None = field(default=None, metadata={"help": "Layers in the pictures. Default: all."})
    heads: list[int] | None = field(default=None, metadata={"help": "Heads in the pictures. Default: all."})
    average: Average | None = field(
        default=None,
        metadata={
            "help": "none (default): a heat map for each layer and head. heads: their mean in each layer. all: the "
            "mean of all."
        },
    )
    title: str | None = field(default=None, metadata={"help": "Written above pictures and pages."})
    alignment_file: str | None = field(
        default=None, metadata={"help": "Where to write word alignments, of --text or of --source_file."}
    )
    source_file: str | None = field(
        default=None, metadata={"help": "Sentences to align: UTF-8 text, one per line, .gz too."}
    )
    target_file: str | None = field(default=None, metadata={"help": "Their translations, likewise."})
    align_layer: int | None = field(default=None, metadata={"help": "Layer to align by. Default: the mean of all."})
    align_head: int | None = field(default=None, metadata={"help": "Head to align by. Default: the mean of all."})
    words: Literal["characters", "spaces"] = field(
        default="characters",
        metadata={
            "help": "What alignments count as a word: what spaces divide, and in addition each Chinese or Japanese "
            "character (characters), or not (spaces)."
        },
    )
    positions_file: str | None = field(
        default=None, metadata={"help": "Where to draw the table of positions: .png, .svg or .pdf."}
    )
    num_positions: int | None = field(default=None, metadata={"help": "Positions to draw. Default: 100."})
    masks_file: str | None = field(
        default=None, metadata={"help": "Where to draw the masks of a batch of all of --text: .png, .svg or .pdf."}
    )
    overwrite: bool = field(default=False, metadata={"help": "Replace existing files."})

    def __post_init__(self) -> None:
        """Checks that what is asked for belongs together, and that it can be written.

        Raises:
            FileExistsError: If a file exists and must not be replaced.
            ValueError: If something is missing or superfluous.
        """
        super().__post_init__()
        wanted = {"--alignment_file": self.alignment_file, "--positions_file": self.positions_file}
        wanted |= {"--masks_file": self.masks_file}
        if not self.output_files and not any(wanted.values()):
            raise ValueError(f"Nothing is asked for; give --output_files, {', '.join(wanted)}, or several of them.")
        self._check_sentences()
        pictures = [path for path in self.output_files or [] if not is_page(path)]
        self._check_choices(has_pictures=bool(pictures))
        for path in [*pictures, *filter(None, (self.positions_file, self.masks_file))]:
            find_format(path)
        paths = [*(self.output_files or []), *filter(None, wanted.values())]
        for path in paths:
            check_new_file(path, overwrite=self.overwrite)
        if self.alignment_file is not None:
            inputs = filter(None, (self.source_file, self.target_file))
            check_text_output(self.alignment_file, inputs=inputs, overwrite=self.overwrite)
        if len(set(map(os.path.realpath, paths))) < len(paths):
            raise ValueError(f"Two files have one name: {' '.join(sorted(paths))}.")

    def _check_choices(self, *, has_pictures: bool) -> None:
        """Refuses choices about what is not asked for."""
        for names, asked, what in (
            (
                ("kind", "layers", "heads", "average"),
                has_pictures,
                "pictures of attention; a page (.html) has everything",
            ),
            (("align_layer", "align_head"), self.alignment_file is not None, "--alignment_file"),
            (("num_positions",), self.positions_file is not None, "--positions_file"),
        ):
            useless = [f"--{name}" for name in names if getattr(self, name) is not None]
            if useless and not asked:
                raise ValueError(f"{', '.join(useless)}: only for {what}.")

    def _check_sentences(self) -> None:
        if (self.source_file is None) != (self.target_file is None):
            raise ValueError("--source_file and --target_file belong together; scripts/translate.py makes the second.")
        if self.source_file is not None and (self.alignment_file is None or self.text is not None):
            raise ValueError("--source_file is for --alignment_file, and goes without --text.")
        count = len(self.text or [])
        needs_text = bool(self.output_files or self.masks_file or (self.alignment_file and not self.source_file))
        if needs_text != (count > 0):
            raise ValueError(
                "--text is missing." if needs_text else "--text is not needed for what is asked for; leave it out."
            )
        if self.target is not None and len(self.target) != count:
            raise ValueError(f"--target has {len(self.target)} sentences and --text has {count}.")
        if count > 1 and (self.output_files or self.alignment_file):
            raise ValueError(f"--text has {count} sentences; --output_files and --alignment_file show one.")


def make_parser() -> HfArgumentParser:
    """Returns the parser of the command line."""
    return make_argument_parser(AttentionArguments, __doc__)


def collect(
    arguments: AttentionArguments, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]
) -> list[AttentionMap]:
    """Returns the attention of each sentence, and prints them with their translations."""
    maps = []
    for number, text in enumerate(arguments.text or []):
        attention = collect_attention(
            model,
            tokenizer,
            text,
            arguments.target[number] if arguments.target else None,
            source_prefix=arguments.find_prefix(model),
            max_source_length=arguments.max_source_length,
            split_characters=arguments.words == "characters",
            **options,
        )
        print(f"Source: {attention.source_text}\nTarget: {attention.target_text}")
        maps.append(attention)
    return maps


def write_attention(arguments: AttentionArguments, attention: AttentionMap) -> None:
    """Writes pictures and pages."""
    for path in arguments.output_files or []:
        if is_page(path):
            title = arguments.title or f"Attention of {Path(arguments.model_name_or_path).name}"
            save_attention_page(attention, path, title=title, overwrite=arguments.overwrite)
        else:
            plot_attention(
                attention,
                path,
                kind=arguments.kind or "cross",
                layers=arguments.layers,
                heads=arguments.heads,
                average=arguments.average or "none",
                title=arguments.title,
                overwrite=arguments.overwrite,
            )
        print(f"The attention is in {path}")


def write_alignment(arguments: AttentionArguments, attention: AttentionMap, path: str) -> None:
    """Writes the alignment of one sentence, and prints its words."""
    alignment = align_words(attention, layer=arguments.align_layer, head=arguments.align_head)
    split = arguments.words == "characters"
    sources, targets = (
        split_words(text, split_characters=split) for text in (attention.source_text, attention.target_text)
    )
    for source, target in alignment:
        print(f"{source}-{target}  {sources[source]}  {targets[target]}")
    with new_file(path, overwrite=arguments.overwrite) as partial:
        partial.write_text(format_pharaoh(alignment) + "\n", encoding="utf-8")
    print(f"The alignment is in {path}")


def align_files(
    arguments: AttentionArguments, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, paths: tuple[str, ...]
) -> None:
    """Writes the alignments of a file of sentences."""
    source_file, target_file, alignment_file = paths
    count = align_file(
        model,
        tokenizer,
        source_file,
        target_file,
        alignment_file,
        overwrite=arguments.overwrite,
        layer=arguments.align_layer,
        head=arguments.align_head,
        split_characters=arguments.words == "characters",
        batch_size=arguments.batch_size,
        max_batch_tokens=arguments.max_batch_tokens,
        max_source_length=arguments.max_source_length,
        source_prefix=arguments.find_prefix(model),
        progress=not arguments.disable_tqdm,
    )
    print(f"The alignments of {count} sentences are in {alignment_file}")


def run(arguments: AttentionArguments) -> None:
    """Loads the model and writes what is asked for."""
    model, tokenizer, options = arguments.load()
    overwrite = arguments.overwrite
    if arguments.positions_file is not None:
        table = position_table(model, arguments.num_positions)
        plot_positions(table, arguments.positions_file, title=arguments.title, overwrite=overwrite)
        print(f"The positions are in {arguments.positions_file}")
    if arguments.source_file and arguments.target_file and arguments.alignment_file:
        align_files(
            arguments, model, tokenizer, (arguments.source_file, arguments.target_file, arguments.alignment_file)
        )
    maps = collect(arguments, model, tokenizer, options)
    if arguments.masks_file is not None:
        sources, inputs = [attention.source for attention in maps], [attention.decoder_input for attention in maps]
        pad_token = str(tokenizer.pad_token or "<pad>")
        plot_masks(
            sources, inputs, arguments.masks_file, pad_token=pad_token, title=arguments.title, overwrite=overwrite
        )
        print(f"The masks are in {arguments.masks_file}")
    if arguments.output_files:
        write_attention(arguments, maps[0])
    if maps and arguments.alignment_file is not None:
        write_alignment(arguments, maps[0], arguments.alignment_file)


def main(argv: list[str] | None = None) -> None:
    """Parses the arguments (`argv`, else the command line's), and writes."""
    parser = make_parser()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        (arguments,) = parser.parse_args_into_dataclasses(args=argv)
        run(arguments)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
