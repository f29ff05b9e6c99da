r"""Show where a translation model looks: pictures, a page to click through, and word alignments.

    vanilla-transformer plot-attention --model_name_or_path out/my-model --text "A man rides a horse." \
        --output_files cross.png attention.html
    vanilla-transformer plot-attention --model_name_or_path out/my-model --text "A man rides a horse." \
        --target "Ein Mann reitet ein Pferd." --kind decoder --layers 4 5 --output_files decoder.svg
    vanilla-transformer plot-attention --model_name_or_path out/my-model --source_file test.en --target_file test.de \
        --alignment_file test.align --align_layer -1
    vanilla-transformer plot-attention --model_name_or_path out/my-model --positions_file positions.png
    vanilla-transformer plot-attention --model_name_or_path out/my-model --text "A man rides a horse." "A dog." \
        --masks_file masks.png

The text is translated by the model, unless --target says how. A page (.html) has every layer and head; pictures (.png,
.svg, .pdf) have those that are asked for. Layers and heads are counted from 0; negative ones from the last.

An alignment is written in Pharaoh's format: a line for each sentence, such as "0-0 1-2 2-1", with the number of a
source word and that of the target word that looks at it.
"""

import os
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vanilla_transformer.inference.arguments import InferenceArguments
from vanilla_transformer.options import option

from .command_line import make_argument_parser, make_main

if TYPE_CHECKING:
    from vanilla_transformer.visualization import AttentionMap


def is_page(path: str) -> bool:
    """Whether a file is to be a page, and not a picture."""
    return Path(path).suffix.lower() == ".html"


@dataclass
class AttentionArguments(InferenceArguments):
    """What to show of which model."""

    text: list[str] | None = option("Source sentence; several only for --masks_file.", None)
    target: list[str] | None = option("Its translation, to be read. Default: the model's own.", None)
    output_files: list[str] | None = option("Attention: .png, .svg or .pdf (pictures), or .html (a page).", None)
    kind: Literal["encoder", "decoder", "cross"] | None = option("Attention in the pictures. Default: cross.", None)
    layers: list[int] | None = option("Layers in the pictures. Default: all.", None)
    heads: list[int] | None = option("Heads in the pictures. Default: all.", None)
    average: Literal["none", "heads", "all"] | None = option(
        "none (default): a map for each layer and head. heads: their mean in each layer. all: the mean of all.", None
    )
    title: str | None = option("Written above pictures and pages.", None)
    alignment_file: str | None = option("Where to write word alignments, of --text or of --source_file.", None)
    source_file: str | None = option("Sentences to align: UTF-8 text, one per line, .gz, .bz2 and .xz too.", None)
    target_file: str | None = option("Their translations, likewise.", None)
    align_layer: int | None = option("Layer to align by. Default: the mean of all.", None)
    align_head: int | None = option("Head to align by. Default: the mean of all.", None)
    words: Literal["characters", "spaces"] = option(
        "Words are what spaces divide (spaces), or also each Chinese or Japanese character (default).", "characters"
    )
    positions_file: str | None = option("Where to draw the table of positions: .png, .svg or .pdf.", None)
    num_positions: int | None = option("Positions to draw. Default: 100.", None)
    masks_file: str | None = option("Where to draw the masks of a batch of all of --text: .png, .svg or .pdf.", None)
    overwrite: bool = option("Replace existing files.", False)

    def __post_init__(self) -> None:
        super().__post_init__()
        from vanilla_transformer.files import check_new_file, check_text_output
        from vanilla_transformer.visualization.figures import find_format

        others = (self.alignment_file, self.positions_file, self.masks_file)
        paths = [*(self.output_files or []), *filter(None, others)]
        if not paths:
            names = "--output_files, --alignment_file, --positions_file, --masks_file"
            raise ValueError(f"Nothing is asked for; give {names}, or several of them.")
        self._check_sentences()
        pictures = [path for path in self.output_files or [] if not is_page(path)]
        self._check_choices(has_pictures=bool(pictures))
        for path in [*pictures, *filter(None, (self.positions_file, self.masks_file))]:
            find_format(path)
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
            (("kind", "layers", "heads", "average"), has_pictures, "pictures of attention; a page has everything"),
            (("align_layer", "align_head"), self.alignment_file is not None, "--alignment_file"),
            (("num_positions",), self.positions_file is not None, "--positions_file"),
        ):
            useless = [f"--{name}" for name in names if getattr(self, name) is not None]
            if useless and not asked:
                raise ValueError(f"{', '.join(useless)}: only for {what}.")

    def _check_sentences(self) -> None:
        if (self.source_file is None) != (self.target_file is None):
            raise ValueError("--source_file and --target_file belong together.")
        if self.source_file is not None and (self.alignment_file is None or self.text is not None):
            raise ValueError("--source_file is for --alignment_file, and goes without --text.")
        count = len(self.text or [])
        needs_text = bool(self.output_files or self.masks_file or (self.alignment_file and not self.source_file))
        if needs_text != (count > 0):
            raise ValueError("--text is missing." if needs_text else "--text is not needed for what is asked for.")
        if self.target is not None and len(self.target) != count:
            raise ValueError(f"--target has {len(self.target)} sentences and --text has {count}.")
        if count > 1 and (self.output_files or self.alignment_file):
            raise ValueError(f"--text has {count} sentences; --output_files and --alignment_file show one.")


def write_attention(arguments: AttentionArguments, attention: "AttentionMap", path: str) -> None:
    """Writes a picture or a page."""
    from vanilla_transformer.visualization import plot_attention, save_attention_page

    if is_page(path):
        title = arguments.title or f"Attention of {Path(arguments.model_name_or_path).name}"
        save_attention_page(attention, path, title=title, overwrite=arguments.overwrite)
    else:
        names = ("kind", "layers", "heads", "average", "title", "overwrite")
        given = {name: getattr(arguments, name) for name in names}
        plot_attention(attention, path, **{name: value for name, value in given.items() if value is not None})
    print(f"The attention is in {path}")


def write_alignment(arguments: AttentionArguments, attention: "AttentionMap", path: str) -> None:
    """Writes the alignment of one sentence, and prints its words."""
    from vanilla_transformer.files import new_file
    from vanilla_transformer.visualization import align_words, format_pharaoh, split_words

    alignment = align_words(attention, layer=arguments.align_layer, head=arguments.align_head)
    splits = arguments.words == "characters"
    sources = split_words(attention.source_text, split_characters=splits)
    targets = split_words(attention.target_text, split_characters=splits)
    for source, target in alignment:
        print(f"{source}-{target}  {sources[source]}  {targets[target]}")
    with new_file(path, overwrite=arguments.overwrite) as partial:
        partial.write_text(format_pharaoh(alignment) + "\n", encoding="utf-8")
    print(f"The alignment is in {path}")


def run(arguments: AttentionArguments) -> None:
    """Loads the model and writes what is asked for."""
    from vanilla_transformer.visualization import (
        align_file,
        collect_attention,
        plot_masks,
        plot_positions,
        position_table,
    )

    model, tokenizer, search = arguments.load()
    reading: Any = {"source_prefix": arguments.find_prefix(model), "max_source_length": arguments.max_source_length}
    reading["split_characters"] = arguments.words == "characters"
    look: Any = {"title": arguments.title, "overwrite": arguments.overwrite}
    if arguments.positions_file is not None:
        plot_positions(position_table(model, arguments.num_positions), arguments.positions_file, **look)
        print(f"The positions are in {arguments.positions_file}")
    if arguments.source_file and arguments.target_file and arguments.alignment_file:
        files = (arguments.source_file, arguments.target_file, arguments.alignment_file)
        options: Any = {"layer": arguments.align_layer, "head": arguments.align_head, "overwrite": arguments.overwrite}
        options |= {"batch_size": arguments.batch_size, "max_batch_tokens": arguments.max_batch_tokens}
        options |= {"progress": not arguments.disable_tqdm, **reading}
        count = align_file(model, tokenizer, *files, **options)
        print(f"The alignments of {count} sentences are in {arguments.alignment_file}")
    maps = []
    for text, target in zip_longest(arguments.text or [], arguments.target or []):
        maps.append(collect_attention(model, tokenizer, text, target, **reading, **search))
        print(f"Source: {maps[-1].source_text}\nTarget: {maps[-1].target_text}")
    if arguments.masks_file is not None:
        sources, inputs = [attention.source for attention in maps], [attention.decoder_input for attention in maps]
        look |= {"predicted": [each.target for each in maps], "pad_token": str(tokenizer.pad_token or "<pad>")}
        plot_masks(sources, inputs, arguments.masks_file, **look)
        print(f"The masks are in {arguments.masks_file}")
    for path in arguments.output_files or []:
        write_attention(arguments, maps[0], path)
    if maps and arguments.alignment_file is not None:
        write_alignment(arguments, maps[0], arguments.alignment_file)


make_parser = partial(make_argument_parser, AttentionArguments, __doc__)
main = make_main(make_parser, run)
