r"""Shows a model on a page: text in, translations with their scores and a map of the attention out.

    pip install "vanilla-transformer[demo]"
    python scripts/app.py --model_name_or_path out/my-model
    python scripts/app.py --model_name_or_path facebook/nllb-200-distilled-600M \
        --source_lang eng_Latn --target_lang deu_Latn

Then open the address that is printed, http://127.0.0.1:7860 as a rule; Ctrl-C ends it. Any encoder-decoder model of
text will do. Only this machine can reach the page unless --server_name says otherwise, and only then can other models
be loaded on it unless --other_models says otherwise. Nothing is reported to anybody, and nothing is fetched but models
that are asked for by their names on the Hub.

This file is also the app of a Hugging Face Space, unchanged: copied there as app.py, beside a requirements.txt that
names this package (`vanilla-transformer[demo]`, with ` @ git+https://...` behind it if that is where it is). The front
matter of the Space's README.md needs two lines, and its settings a variable MODEL_NAME_OR_PATH with the model's name.

    sdk: gradio
    app_file: app.py
"""

import argparse
import logging
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Literal

from transformers import HfArgumentParser
from transformers.hf_argparser import DataClassType

from vanilla_transformer.data import open_text
from vanilla_transformer.demo import MAX_SOURCE_TOKENS, DemoError, ModelShelf, Settings
from vanilla_transformer.demo_page import build_page, launch_page


@dataclass
class AppArguments:
    """Which model to show, and to whom."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Folder or Hub name of a sequence-to-sequence model. Default: the environment variable "
            "MODEL_NAME_OR_PATH, or none until somebody names one on the page."
        },
    )
    revision: str = field(default="main", metadata={"help": "Branch, tag or commit on the Hub. Default: main."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Let code from this checkpoint run."})
    device: str = field(default="auto", metadata={"help": "auto (default: cuda, mps or cpu), or one such as cuda:1."})
    dtype: str = field(default="auto", metadata={"help": "auto (default: as saved), float32, bfloat16 or float16."})
    source_lang: str | None = field(default=None, metadata={"help": "Of multilingual models: en, eng_Latn, ..."})
    target_lang: str | None = field(default=None, metadata={"help": "Of multilingual models: de, deu_Latn, ..."})
    source_prefix: str = field(default="", metadata={"help": "Put before each text, for T5 and its like."})
    max_source_tokens: int = field(
        default=MAX_SOURCE_TOKENS, metadata={"help": f"The longest text. Default: {MAX_SOURCE_TOKENS} tokens."}
    )
    examples: str | None = field(
        default=None, metadata={"help": "UTF-8 text, an example sentence per line. Default: such as suit the model."}
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

    def __post_init__(self) -> None:
        self.model_name_or_path = self.model_name_or_path or os.environ.get("MODEL_NAME_OR_PATH") or None
        if self.max_source_tokens < 1:
            raise ValueError(f"max_source_tokens is {self.max_source_tokens}; it must be at least 1.")
        if self.other_models is None:
            self.other_models = "none" if self.is_public else "any"
        if self.model_name_or_path is None and self.other_models == "none":
            raise ValueError(
                "There is no model to show and none can be loaded on the page: give --model_name_or_path, or set "
                "MODEL_NAME_OR_PATH."
            )

    @property
    def is_public(self) -> bool:
        """Whether more than this machine can reach the page."""
        name = self.server_name or os.environ.get("GRADIO_SERVER_NAME") or "127.0.0.1"
        return self.share or "SPACE_ID" in os.environ or name not in ("127.0.0.1", "localhost", "::1")


def make_parser() -> HfArgumentParser:
    """Returns the parser of the command line."""
    return HfArgumentParser(
        DataClassType(AppArguments), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def read_examples(path: str) -> list[str]:
    """Reads the lines of a file that are not empty."""
    with open_text(path) as lines:
        return [line.strip() for line in lines if line.strip()]


def show(arguments: AppArguments) -> None:
    """Loads the model and serves the page until Ctrl-C, or until the system asks for an end."""
    examples = None if arguments.examples is None else read_examples(arguments.examples)
    shelf = ModelShelf(
        arguments.model_name_or_path,
        others=arguments.other_models or "none",
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


def main(argv: list[str] | None = None) -> None:
    """Parses the arguments (`argv`, else the command line's), and shows the page."""
    parser = make_parser()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    # Containers are stopped with this signal.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        (arguments,) = parser.parse_args_into_dataclasses(args=argv)
        show(arguments)
    except (DemoError, ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("The page is closed.")


if __name__ == "__main__":
    main()
