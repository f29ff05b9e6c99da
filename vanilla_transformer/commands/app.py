r"""Show a model on a page: text in, translations with their scores and a map of the attention out.

    pip install "vanilla-transformer[demo]"     # or [demo,convert], for tokenizers of sentencepiece as MarianMT's
    vanilla-transformer app --model_name_or_path out/my-model
    vanilla-transformer app --model_name_or_path facebook/nllb-200-distilled-600M \
        --source_lang eng_Latn --target_lang deu_Latn

Then open the address that is printed; Ctrl-C ends it. Any encoder-decoder model of text will do. Only this machine can
reach the page unless --server_name says otherwise, and only then can other models be loaded on it unless --other_models
says otherwise. Nothing is reported to anybody, and nothing is fetched but models that are asked for by name.

--save_space writes the folder of a Hugging Face Space with this page. Try it here (`python my-space/app.py`), and
upload it; the second command makes the Space, if there is none yet.

    vanilla-transformer app --model_name_or_path out/my-model --save_space my-space
    hf upload my-name/my-space my-space --repo-type space
"""

import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from vanilla_transformer.memory import keep_freed_memory
from vanilla_transformer.options import option

from .command_line import explaining_errors, make_argument_parser

# Options that a Space takes over. The others are about this machine.
_SPACE_OPTIONS = ["revision", "trust_remote_code", "dtype", "source_lang", "target_lang", "source_prefix"]
_SPACE_OPTIONS += ["max_source_tokens", "other_models"]


@dataclass
class AppArguments:
    """Which model to show, and to whom."""

    model_name_or_path: str | None = option(
        "Folder or Hub name. Default: the variable MODEL_NAME_OR_PATH, in a Space its folder `model`, or none.", None
    )
    revision: str = option("Branch, tag or commit on the Hub. Default: main.", "main")
    trust_remote_code: bool = option("Let code from this checkpoint run.", False)
    device: str = option("auto (default: cuda, mps or cpu), or one such as cuda:1.", "auto")
    dtype: str = option("auto (default: as saved), float32, bfloat16 or float16.", "auto")
    source_lang: str | None = option("Of multilingual models: en, eng_Latn, ...", None)
    target_lang: str | None = option("Of multilingual models: de, deu_Latn, ...", None)
    source_prefix: str = option("Put before each text, for T5 and its like.", "")
    max_source_tokens: int | None = option(
        "The longest text, in tokens. Default: as in the model's training, else 256, or 1024 for summarization.", None
    )
    examples: str | None = option("UTF-8 text, an example per line. Default: in a Space its examples.txt.", None)
    other_models: Literal["any", "hub", "none"] | None = option(
        "Which other models the page loads: any, those of the Hub (hub), or none. They run no code of their own; "
        "private ones are read with your token. Default: any if only this machine reaches the page, else none.",
        None,
    )
    server_name: str | None = option("0.0.0.0 lets others in. Default: GRADIO_SERVER_NAME, or 127.0.0.1.", None)
    server_port: int | None = option("Default: GRADIO_SERVER_PORT, or the first free one from 7860 on.", None)
    share: bool = option("Make a public link by Gradio's own servers.", False)
    save_space: str | None = option("Write the folder of a Hugging Face Space instead; it must not exist yet.", None)

    def __post_init__(self) -> None:
        self.model_name_or_path = self.model_name_or_path or os.environ.get("MODEL_NAME_OR_PATH") or None
        if self.examples is not None:
            self.examples = os.path.expanduser(self.examples)
        if self.max_source_tokens is not None and self.max_source_tokens < 1:
            raise ValueError(f"max_source_tokens is {self.max_source_tokens}; it must be at least 1.")
        if self.model_name_or_path is None and self.others == "none":
            raise ValueError("There is no model to show: give --model_name_or_path, or set MODEL_NAME_OR_PATH.")

    @property
    def others(self) -> Literal["any", "hub", "none"]:
        """Which other models the page loads: none by default if more than this machine can reach it."""
        name = self.server_name or os.environ.get("GRADIO_SERVER_NAME") or "127.0.0.1"
        is_space = self.save_space is not None or "SPACE_ID" in os.environ
        is_public = self.share or is_space or name not in ("127.0.0.1", "localhost", "::1")
        return self.other_models or ("none" if is_public else "any")

    @property
    def space_options(self) -> list[str]:
        """The options for a Space that are not as they are without being given."""
        defaults = {each.name: each.default for each in fields(self)}
        given = {name: getattr(self, name) for name in _SPACE_OPTIONS if getattr(self, name) != defaults[name]}
        return [f"--{name}={value}" for name, value in given.items()]


make_parser = partial(make_argument_parser, AppArguments, __doc__)


def read_examples(path: str | None) -> list[str] | None:
    """The lines of a file that are not empty."""
    from vanilla_transformer.data.lines import read_lines

    return None if path is None else [line.strip() for line in read_lines(path) if line.strip()]


def read_space(folder: Path) -> list[str]:
    """The options of the Space in a folder; none where there is no Space."""
    from vanilla_transformer.apps.spaces import ARGUMENTS_FILE, EXAMPLES_FILE, MODEL_FOLDER

    options = []
    if (folder / MODEL_FOLDER / "config.json").is_file() and not os.environ.get("MODEL_NAME_OR_PATH"):
        options.append(f"--model_name_or_path={folder / MODEL_FOLDER}")
    if (folder / EXAMPLES_FILE).is_file():
        options.append(f"--examples={folder / EXAMPLES_FILE}")
    if (folder / ARGUMENTS_FILE).is_file():
        options += shlex.split((folder / ARGUMENTS_FILE).read_text(encoding="utf-8"), comments=True)
    return options


def show(arguments: AppArguments) -> None:
    """Loads the model and serves the page until Ctrl-C, or until the system asks for an end."""
    from vanilla_transformer.apps.answers import Settings
    from vanilla_transformer.apps.page import build_page, launch_page
    from vanilla_transformer.apps.shelf import ModelShelf

    def given(*names: str) -> dict[str, Any]:
        return {name: getattr(arguments, name) for name in names}

    loading = given("others", "device", "dtype", "revision", "trust_remote_code")
    shelf = ModelShelf(arguments.model_name_or_path, examples=read_examples(arguments.examples), **loading)
    settings = Settings(**given("source_lang", "target_lang", "source_prefix", "max_source_tokens"))
    page = build_page(shelf, settings)
    address = launch_page(page, **given("server_name", "server_port", "share"))
    print(f"The page is at {address} (Ctrl-C ends it)", flush=True)
    if page.share_url:
        print(f"and for everybody at {page.share_url}", flush=True)
    try:
        while page.is_running:
            time.sleep(0.2)
    finally:
        page.close(verbose=False)


def main(argv: list[str] | None = None, *, space: Path | None = None) -> None:
    """Parses the arguments (`argv`, else the command line's) over those of a Space's folder, and shows the page."""
    parser = make_parser()
    keep_freed_memory()
    # Containers are stopped with this signal.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with explaining_errors(parser):
        words = [*(read_space(space) if space else []), *(sys.argv[1:] if argv is None else argv)]
        (arguments,) = parser.parse_args_into_dataclasses(words)  # of which the later ones win
        from vanilla_transformer.apps.answers import DemoError

        try:
            if arguments.save_space is None:
                show(arguments)
                return
            from vanilla_transformer.apps.spaces import save_space

            name, options = arguments.model_name_or_path, arguments.space_options
            examples = read_examples(arguments.examples)
            path = save_space(arguments.save_space, model_name_or_path=name, examples=examples, options=options)
            print(f"The Space is in {path}; upload it with: hf upload NAME/{path.name} {path} --repo-type space")
        except DemoError as error:
            parser.error(error.whole)
        except KeyboardInterrupt:
            print("The page is closed.")
