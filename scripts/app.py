r"""Shows a model on a page: text in, translations with their scores and a map of the attention out.

    pip install ".[demo]"            # or ".[demo,convert]", for tokenizers of sentencepiece as MarianMT has them
    python scripts/app.py --model_name_or_path out/my-model
    python scripts/app.py --model_name_or_path facebook/nllb-200-distilled-600M \
        --source_lang eng_Latn --target_lang deu_Latn

Then open the address that is printed, http://127.0.0.1:7860 as a rule; Ctrl-C ends it. Any encoder-decoder model of
text will do. Only this machine can reach the page unless --server_name says otherwise, and only then can other models
be loaded on it unless --other_models says otherwise. Nothing is reported to anybody, and nothing is fetched but models
that are asked for by their names on the Hub.

This file is also the app of a Hugging Face Space, unchanged. --save_space writes a folder that is one: this file with
the options that were given, the model's folder if it has one, this package, and what must be installed. Try it here
(`python my-space/app.py`), and upload it; the second command makes the Space, if there is none yet.

    python scripts/app.py --model_name_or_path out/my-model --save_space my-space
    hf upload my-name/my-space my-space --repo-type space
"""

import logging
import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from transformers import HfArgumentParser

from vanilla_transformer.apps.answers import DemoError, Settings
from vanilla_transformer.apps.page import build_page, launch_page
from vanilla_transformer.apps.shelf import ModelShelf, OtherModels
from vanilla_transformer.apps.spaces import ARGUMENTS_FILE, EXAMPLES_FILE, MODEL_FOLDER, save_space
from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.data.corpora import read_lines

# A Space has its model, examples and options here.
_HERE = Path(__file__).resolve().parent
# Those that a Space takes over. The others are about this machine.
_SPACE_OPTIONS = (
    *("revision", "trust_remote_code", "dtype", "source_lang", "target_lang", "source_prefix", "max_source_tokens"),
    "other_models",
)


@dataclass
class AppArguments:
    """Which model to show, and to whom."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Folder or Hub name of a sequence-to-sequence model. Default: the environment variable "
            "MODEL_NAME_OR_PATH, or the folder `model` beside this file, or none until somebody names one on the page."
        },
    )
    revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the Hub. Default: main."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Let code from this checkpoint run."})
    device: str = field(default="auto", metadata={"help": "auto (default: cuda, mps or cpu), or one such as cuda:1."})
    dtype: str = field(default="auto", metadata={"help": "auto (default: as saved), float32, bfloat16 or float16."})
    source_lang: str | None = field(default=None, metadata={"help": "Of multilingual models: en, eng_Latn, ..."})
    target_lang: str | None = field(default=None, metadata={"help": "Of multilingual models: de, deu_Latn, ..."})
    source_prefix: str = field(default="", metadata={"help": "Put before each text, for T5 and its like."})
    max_source_tokens: int | None = field(
        default=None,
        metadata={
            "help": "The longest text, in tokens. Default: what the model's sources were cut to in training, or else "
            "what is usual: 256, and 1024 for summarization."
        },
    )
    examples: str | None = field(
        default=None,
        metadata={
            "help": "UTF-8 text, an example sentence per line. Default: examples.txt beside this file, or such as suit "
            "the model."
        },
    )
    other_models: Literal["any", "hub", "none"] | None = field(
        default=None,
        metadata={
            "help": "Which other models the page loads: any, those of the Hub (hub), or none. They run no code of "
            "their own; private ones are read with your token. Default: any if only this machine reaches the "
            "page, else none."
        },
    )
    server_name: str | None = field(
        default=None,
        metadata={"help": "0.0.0.0 to let others in. Default: GRADIO_SERVER_NAME, or this machine only (127.0.0.1)."},
    )
    server_port: int | None = field(
        default=None, metadata={"help": "Default: GRADIO_SERVER_PORT, or the first free one from 7860 on."}
    )
    share: bool = field(default=False, metadata={"help": "Make a public link by Gradio's own servers."})

    save_space: str | None = field(
        default=None, metadata={"help": "Write the folder of a Hugging Face Space instead; it must not exist yet."}
    )

    def __post_init__(self) -> None:
        self.model_name_or_path = self.model_name_or_path or os.environ.get("MODEL_NAME_OR_PATH") or None
        if self.model_name_or_path is None and (_HERE / MODEL_FOLDER / "config.json").is_file():
            self.model_name_or_path = str(_HERE / MODEL_FOLDER)
        if self.examples is not None:
            self.examples = os.path.expanduser(self.examples)
        elif (_HERE / EXAMPLES_FILE).is_file():
            self.examples = str(_HERE / EXAMPLES_FILE)
        if self.max_source_tokens is not None and self.max_source_tokens < 1:
            raise ValueError(f"max_source_tokens is {self.max_source_tokens}; it must be at least 1.")
        if self.model_name_or_path is None and self.others == "none":
            raise ValueError(
                "There is no model to show and none can be loaded on the page: give --model_name_or_path, or set "
                "MODEL_NAME_OR_PATH."
            )

    @property
    def others(self) -> OtherModels:
        """Which other models the page loads."""
        return self.other_models or ("none" if self.is_public else "any")

    @property
    def is_public(self) -> bool:
        """Whether more than this machine can reach the page."""
        name = self.server_name or os.environ.get("GRADIO_SERVER_NAME") or "127.0.0.1"
        is_space = self.save_space is not None or "SPACE_ID" in os.environ
        return self.share or is_space or name not in ("127.0.0.1", "localhost", "::1")

    @property
    def space_options(self) -> list[str]:
        """The options for a Space that are not as they are without being given."""
        defaults = {each.name: each.default for each in fields(self)}
        given = {name: getattr(self, name) for name in _SPACE_OPTIONS if getattr(self, name) != defaults[name]}
        return [f"--{name}={value}" for name, value in given.items()]


def make_parser() -> HfArgumentParser:
    """Returns the parser of the command line."""
    return make_argument_parser(AppArguments, __doc__)


def read_examples(path: str) -> list[str]:
    """Reads the lines of a file that are not empty."""
    return [line.strip() for line in read_lines(path) if line.strip()]


def read_saved_arguments() -> list[str]:
    """What `--save_space` wrote beside this file, if it did."""
    path = _HERE / ARGUMENTS_FILE
    return shlex.split(path.read_text(encoding="utf-8"), comments=True) if path.is_file() else []


def show(arguments: AppArguments) -> None:
    """Loads the model and serves the page until Ctrl-C, or until the system asks for an end."""
    examples = None if arguments.examples is None else read_examples(arguments.examples)
    shelf = ModelShelf(
        arguments.model_name_or_path,
        others=arguments.others,
        examples=examples,
        device=arguments.device,
        dtype=arguments.dtype,
        revision=arguments.revision,
        trust_remote_code=arguments.trust_remote_code,
    )
    settings = Settings(
        source_lang=arguments.source_lang,
        target_lang=arguments.target_lang,
        source_prefix=arguments.source_prefix,
        max_source_tokens=arguments.max_source_tokens,
    )
    page = build_page(shelf, settings)
    address = launch_page(
        page, server_name=arguments.server_name, server_port=arguments.server_port, share=arguments.share
    )
    print(f"The page is at {address} (Ctrl-C ends it)", flush=True)
    if page.share_url:
        print(f"and for everybody at {page.share_url}", flush=True)
    try:
        while page.is_running:
            time.sleep(0.2)
    finally:
        page.close(verbose=False)


def save(arguments: AppArguments) -> None:
    """Writes a Space that will show what these arguments show."""
    space = save_space(
        arguments.save_space or "",
        __file__,
        model_name_or_path=arguments.model_name_or_path,
        examples=None if arguments.examples is None else read_examples(arguments.examples),
        options=arguments.space_options,
    )
    print(f"The Space is in {space}; upload it with: hf upload NAME/{space.name} {space} --repo-type space")


def main(argv: list[str] | None = None) -> None:
    """Parses the arguments (`argv`, else the command line's), and shows the page."""
    parser = make_parser()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    # Containers are stopped with this signal.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        # What comes later wins.
        given = [*read_saved_arguments(), *(sys.argv[1:] if argv is None else argv)]
        (arguments,) = parser.parse_args_into_dataclasses(args=given, look_for_args_file=False)
        if arguments.save_space is None:
            show(arguments)
        else:
            save(arguments)
    except DemoError as error:
        parser.error(error.whole)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("The page is closed.")


if __name__ == "__main__":
    main()
