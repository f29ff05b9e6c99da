"""Translate text line by line with any sequence-to-sequence model.

    echo "A man rides a horse." | vanilla-transformer translate --model_name_or_path out/my-model --num_beams 4
    vanilla-transformer translate --model_name_or_path out/my-model --input_file test.en --output_file test.de
    vanilla-transformer translate --model_name_or_path out/my-model --input_file test.en --num_beams 4 --n_best 4
    vanilla-transformer translate --model_name_or_path out/seed1 out/seed2 --input_file test.en --output_file test.de
    vanilla-transformer translate --model_name_or_path out/my-model --input_file test.en --glossary terms.tsv

The input may be of any size: --window_size lines of it are held at a time, and translations are written in order. With
--n_best N, each input line gives N output lines, best first, of three fields with tabs in between: the input line's
number, counted from 1, the score (log-probability over the length penalty), and the translation.

With --glossary, the translation of each term in a line appears in its translation, as whole words; beam search finds
the best place. terms.tsv has lines such as "term TAB Begriff", with a tab before each alternative ("TAB Begriffe").

With --engine ctranslate2 the same translations come several times as fast, in 8 bits above all (--dtype int8):

    vanilla-transformer export --model_name_or_path out/my-model --format ctranslate2 --output_dir out/my-ct2
    vanilla-transformer translate --engine ctranslate2 --model_name_or_path out/my-ct2 --dtype int8 --input_file test.en

From a file to a file, an interrupted run goes on where it stopped when the same command is given again. An existing
output file is not touched without --overwrite.
"""

import io
import logging
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

from vanilla_transformer.export.engines import EngineArguments
from vanilla_transformer.inference.arguments import GlossaryArguments
from vanilla_transformer.options import option

from .command_line import make_argument_parser, make_main, utf8_to_a_reader_who_may_leave


@dataclass
class TranslationArguments(GlossaryArguments, EngineArguments):
    """What to translate, with which model, and how."""

    input_file: str | None = option("UTF-8 text, one sentence per line, .gz too. Default: stdin.", None)
    output_file: str | None = option("Needs --input_file. Default: stdout.", None)
    overwrite: bool = option("Replace an existing output file, and do not resume an interrupted run.", False)
    n_best: int | None = option("Write so many translations of each line, with scores; at least 2.", None)
    window_size: int | None = option("Lines held at a time. Default: 4096, but 1 when typing at a terminal.", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output_file is not None and self.input_file is None:
            raise ValueError("--output_file needs --input_file; to keep the translation of stdin, redirect stdout.")


def open_input(input_file: str | None) -> AbstractContextManager[Iterable[str]]:
    """The lines of the file, or of stdin read like a file: UTF-8 whatever the locale, only line feeds end a line."""
    from vanilla_transformer.data.readers import decode_lines, open_text

    if input_file is not None:
        return open_text(input_file)
    has_bytes = isinstance(sys.stdin, io.TextIOWrapper)
    return nullcontext(decode_lines(sys.stdin.buffer, "standard input") if has_bytes else sys.stdin)


def run(arguments: TranslationArguments) -> None:
    """Loads the model and translates."""
    logging.getLogger("vanilla_transformer").setLevel(logging.INFO)
    from vanilla_transformer.inference.translate import translate_file, translate_lines
    from vanilla_transformer.model.pipeline_vanilla_transformer import WINDOW_SIZE

    model, tokenizer, options = arguments.load()
    at_terminal = arguments.input_file is None and sys.stdin.isatty()
    names = ("n_best", "batch_size", "max_batch_tokens", "max_source_length", "window_size")
    options |= {name: getattr(arguments, name) for name in names}
    options |= arguments.find_glossary(model, arguments.source_lang)
    if arguments.window_size is None:
        options["window_size"] = 1 if at_terminal else WINDOW_SIZE
    options |= {"source_prefix": arguments.find_prefix(model), "progress": not (arguments.disable_tqdm or at_terminal)}
    if arguments.input_file is not None and arguments.output_file is not None:
        paths = (arguments.input_file, arguments.output_file)
        translate_file(model, tokenizer, *paths, overwrite=arguments.overwrite, **options)
        return
    with utf8_to_a_reader_who_may_leave(), open_input(arguments.input_file) as lines:
        for translation in translate_lines(model, tokenizer, lines, **options):
            print(translation, flush=True)


make_parser = partial(make_argument_parser, TranslationArguments, __doc__)
main = make_main(
    make_parser, run, "Interrupted: what was written are whole lines, in order; to a file, the same command goes on."
)
