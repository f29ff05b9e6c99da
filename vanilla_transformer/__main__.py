"""The command line: `vanilla-transformer COMMAND ...`, or `python -m vanilla_transformer COMMAND ...`."""

import importlib
import sys

from vanilla_transformer.commands.command_line import utf8_to_a_reader_who_may_leave

# The command `train-tokenizer` is in the module commands/train_tokenizer.py, and so on.
COMMANDS = {
    "train": "train a model on pairs of texts, or go on with one",
    "train-tokenizer": "train a tokenizer by itself",
    "clean": "remove what is no translation from a parallel corpus",
    "translate": "translate text line by line",
    "backtranslate": "make parallel text of text in the target language",
    "distill": "make the training data of a smaller model",
    "evaluate": "score a model on a test set, or compare several",
    "convert": "bring a model of another system in, or take one of ours out",
    "export": "take a model to CTranslate2, ONNX, Argos Translate, transformers.js or a web page",
    "push": "check a model's folder and push it to the Hub",
    "app": "show a model on a page in the browser",
    "serve": "serve translations over HTTP, with the API of LibreTranslate",
    "plot-attention": "draw where a model looks, and align words",
    "plot-curves": "draw the learning curves of trainings",
    "average": "average checkpoints into one model",
}


def describe() -> str:
    """The text of --help."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    usage = "usage: vanilla-transformer COMMAND [--argument value ...]"
    advice = "Each command explains itself, with examples: vanilla-transformer COMMAND --help"
    return "\n".join([usage, "", *lines, "", advice])


def main(argv: list[str] | None = None) -> None:
    """Runs the command that the first of the arguments (`argv`, else the command line's) names."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        with utf8_to_a_reader_who_may_leave():
            print(describe())
    elif name in COMMANDS:
        importlib.import_module(f"vanilla_transformer.commands.{name.replace('-', '_')}").main(rest)
    else:
        print(f"vanilla-transformer: there is no command {name!r}. There are: {', '.join(COMMANDS)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
