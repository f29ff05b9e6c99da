r"""Translate text line by line with any sequence-to-sequence model.

    echo "A man rides a horse." | vanilla-transformer translate --model_name_or_path out/my-model --num_beams 4
    vanilla-transformer translate --model_name_or_path out/my-model --input_file test.en --output_file test.de
    vanilla-transformer translate --model_name_or_path out/my-model --input_file test.en --num_beams 4 --n_best 4
    vanilla-transformer translate --model_name_or_path out/seed1 out/seed2 --input_file test.en --output_file test.de
    vanilla-transformer translate --model_name_or_path out/my-model --input_file test.en --glossary terms.tsv

The input may be of any size; translations are written in order. It may be text, .tsv, .jsonl or .parquet, compressed
too (.gz), a folder of such files or a pattern, on any file system of fsspec; so may the output, of the same kind or
another. A table keeps its columns and gets one more; a folder (de/) gets a file for each one of the input:

    vanilla-transformer translate --model_name_or_path out/my-model --input_file "corpus/*.parquet" --output_file de/
    vanilla-transformer translate --model_name_or_path out/my-model --input_file c.jsonl.gz --output_file c.de.jsonl.gz

On many processes and machines, which share a folder, each takes parts of the input, and the first joins them:

    torchrun --nproc_per_node 8 -m vanilla_transformer translate --model_name_or_path out/my-model \
        --input_file corpus.en --output_file corpus.de

With --n_best N, each source gives N output lines, best first, of three fields with tabs in between: the source's
number, counted from 1 (a table's header is none), the score (log-probability over the length penalty), the translation.

With --glossary, the translation of each term in a line appears in its translation, as whole words; beam search finds
the best place. terms.tsv has lines such as "term TAB Begriff", with a tab before each alternative ("TAB Begriffe").

With CTranslate2 the same translations come several times as fast, in 8 bits above all (--dtype int8). An export in the
model's folder is taken without being asked for (--engine auto):

    vanilla-transformer export --model_name_or_path out/my-model --format ctranslate2
    vanilla-transformer translate --model_name_or_path out/my-model --input_file test.en
    vanilla-transformer translate --model_name_or_path out/my-model --dtype int8 --input_file test.en

With --ray, Ray Data translates parquet or text into a folder of parquet, on a cluster that it runs on or this machine:

    vanilla-transformer translate --ray --ray_actors 8 --model_name_or_path out/my-model --source_column en \
        --input_file "corpus/*.parquet" --output_file translated

From a file to a file, an interrupted run goes on with the parts that it had not finished when the same command is given
again, on as many processes or others. An existing output file is not touched without --overwrite.
"""

from __future__ import annotations  # the types are not imported: --help does not wait for torch

import io
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vanilla_transformer.export.engines import EngineArguments
from vanilla_transformer.inference.arguments import GLOSSARY_NEEDS, GlossaryArguments
from vanilla_transformer.options import option, refuse_unused

from .command_line import make_argument_parser, make_main, utf8_to_a_reader_who_may_leave

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class TranslationArguments(GlossaryArguments, EngineArguments):
    """What to translate, with which model, and how."""

    input_file: str | None = option(
        "UTF-8 text, one sentence per line, or a .tsv, .jsonl or .parquet; .gz, .bz2 and .xz too; a folder of them, a "
        "pattern, or a URL of fsspec. Default: stdin.",
        None,
    )
    output_file: str | None = option(
        "Of these kinds, too; a new folder if it ends with a slash. Needs --input_file. Default: stdout.", None
    )
    source_column: str | None = option(
        "Column of the sources in tables, such as en or translation.en. Default: source or text, the only one, or the "
        "first of a .tsv without names.",
        None,
    )
    target_column: str = option("Column of the translations in tables. Default: translation.", "translation")
    parts_dir: str | None = option(
        "Folder for unfinished parts, which all processes share. Default: beside a local output.", None
    )
    overwrite: bool = option("Replace an existing output file, or a run that was begun with other settings.", False)
    ray: bool = option(
        "Translate parquet or text with Ray Data into a new folder of parquet, on this machine or RAY_ADDRESS.", False
    )
    ray_actors: int = option("The most copies of the model that Ray keeps. Default: 2.", 2)
    ray_gpus: float = option("GPUs of each of them, less than 1 for a share. Default: 0.", 0.0)
    n_best: int | None = option("Write so many translations of each line, with scores; at least 2.", None)
    window_size: int | None = option(
        "Lines held at a time, which an interruption may cost. Default: 4096, but 1 when typing at a terminal.", None
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output_file is not None and self.input_file is None:
            raise ValueError("--output_file needs --input_file; to keep the translation of stdin, redirect stdout.")
        places = [os.path.realpath(path) for path in (self.output_file, self.glossary) if path is not None]
        if len(set(places)) < len(places):
            raise ValueError(f"{self.output_file}: the output file is the glossary.")
        if self.ray:
            wrong = [name for name in ("n_best", "overwrite", "parts_dir", "window_size") if getattr(self, name)]
            if wrong or self.input_file is None or self.output_file is None:
                raise ValueError(
                    "--ray needs --input_file and --output_file, a new folder"
                    + (f"; it has no --{' and --'.join(wrong)}." if wrong else ".")
                )
        refuse_unused(self, _NEEDS)
        if self.output_file is None and int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise ValueError("Several processes need --input_file and --output_file.")


_NEEDS = {
    **GLOSSARY_NEEDS,
    "input_file": {"source_column"},
    "output_file": {"overwrite", "parts_dir", "target_column"},
    "ray": {"ray_actors", "ray_gpus"},
}


def read_input(arguments: TranslationArguments) -> Iterator[str]:
    """The sources in the files, or of stdin read like a file: UTF-8 whatever the locale, only line feeds end a line."""
    from vanilla_transformer.data.lines import decode_lines
    from vanilla_transformer.data.records import EVERYTHING, find_records

    if arguments.input_file is None:
        has_bytes = isinstance(sys.stdin, io.TextIOWrapper)
        yield from decode_lines(sys.stdin.buffer, "standard input") if has_bytes else sys.stdin
        return
    for file in find_records(arguments.input_file, arguments.source_column):
        yield from file.texts(EVERYTHING)


def load(arguments: TranslationArguments) -> tuple[Any, PreTrainedTokenizerBase, dict[str, Any]]:
    """The model, its tokenizer, and the options of `translate` and `generate`."""
    model, tokenizer, options = arguments.load()
    names = ("batch_size", "max_batch_tokens", "max_source_length")
    options |= {name: getattr(arguments, name) for name in names}
    options |= arguments.find_glossary(model, arguments.source_lang)
    return model, tokenizer, options | {"source_prefix": arguments.find_prefix(model)}


def run_ray(arguments: TranslationArguments) -> None:
    """Translates with Ray, whose actors load the model."""
    from vanilla_transformer.inference.ray import translate_with_ray

    translate_with_ray(
        partial(load, arguments),
        str(arguments.input_file),
        str(arguments.output_file),
        actors=arguments.ray_actors,
        gpus=arguments.ray_gpus,
        source_column=arguments.source_column,
        target_column=arguments.target_column,
    )


def run(arguments: TranslationArguments) -> None:
    """Loads the model and translates."""
    if arguments.ray:
        run_ray(arguments)
        return
    logging.getLogger("vanilla_transformer").setLevel(logging.INFO)
    from vanilla_transformer.inference.files import translate_file
    from vanilla_transformer.inference.processes import Processes
    from vanilla_transformer.inference.translate import translate_lines
    from vanilla_transformer.model.pipeline_vanilla_transformer import WINDOW_SIZE

    model, tokenizer, options = load(arguments)
    at_terminal = arguments.input_file is None and sys.stdin.isatty()
    options |= {"n_best": arguments.n_best, "window_size": arguments.window_size}
    if arguments.window_size is None:
        options["window_size"] = 1 if at_terminal else WINDOW_SIZE
    options["progress"] = not (arguments.disable_tqdm or at_terminal)
    if arguments.input_file is not None and arguments.output_file is not None:
        paths = (arguments.input_file, arguments.output_file)
        own = ("overwrite", "source_column", "target_column", "parts_dir")
        options |= {name: getattr(arguments, name) for name in own}
        translate_file(model, tokenizer, *paths, processes=Processes.from_environment(), **options)
        return
    with utf8_to_a_reader_who_may_leave():
        for translation in translate_lines(model, tokenizer, read_input(arguments), **options):
            print(translation, flush=True)


make_parser = partial(make_argument_parser, TranslationArguments, __doc__)
main = make_main(
    make_parser,
    run,
    "Interrupted: what was written are whole lines, in order; to a file, the same command goes on.",
    divides_work=True,
)
