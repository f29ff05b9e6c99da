"""What the commands share: a parser made from dataclasses, and one way to say what is wrong.

Nothing here imports torch or transformers, which take seconds: `--help` must not wait for them.
"""

import argparse
import dataclasses
import difflib
import io
import logging
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vanilla_transformer.memory import keep_freed_memory

USAGE = "%(prog)s [-h] [--argument value ...]"
INTERRUPTED = 130  # the exit status of a process that Ctrl-C ended, as shells have it


class OptionParser(argparse.ArgumentParser):
    """A parser whose options are the fields of dataclasses, as transformers' `HfArgumentParser` makes them."""

    def __init__(self, classes: Sequence[type], **options: Any) -> None:
        super().__init__(**options)
        self.classes = classes
        for each in classes:
            hints = typing.get_type_hints(each)
            for field in dataclasses.fields(each):
                self._add_field(field, hints[field.name])

    def _add_field(self, field: "dataclasses.Field[Any]", hint: Any) -> None:
        options: dict[str, Any] = dict(field.metadata)
        aliases = options.pop("aliases", [])
        if field.default_factory is not dataclasses.MISSING:
            options["default"] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            options["default"] = field.default
        else:
            options["required"] = True
        members = typing.get_args(hint)
        kind = members[0] if type(None) in members else hint  # `int | None` is read as int
        if typing.get_origin(kind) is typing.Literal:
            options["choices"] = typing.get_args(kind)
        elif typing.get_origin(kind) is list:
            options |= {"type": typing.get_args(kind)[0], "nargs": "+"}
        elif kind is bool:
            options["type"] = _read_bool
            if hint is bool:  # a switch: its name alone says true
                options |= {"nargs": "?", "const": True}
        else:
            options["type"] = kind
        self.add_argument(*_spell(field.name), *aliases, **options)
        if field.default is True:
            options = {"action": "store_false", "dest": field.name, "help": options.get("help")}
            self.add_argument(*_spell(f"no_{field.name}"), **options)

    def parse_args_into_dataclasses(
        self, args: Sequence[str] | None = None, return_remaining_strings: bool = False
    ) -> tuple[Any, ...]:
        """Returns an instance of each dataclass and, if asked for, a list of the arguments that none of them has.

        What the dataclasses refuse (`ValueError`) ends the process, as what the parser refuses does (status 2).
        """
        if not return_remaining_strings:
            check_spelling(self, sys.argv[1:] if args is None else args)
        namespace, rest = self.parse_known_args(args)
        if rest and not return_remaining_strings:
            self.error(explain_unknown(self, rest))
        given = vars(namespace)
        values = [{field.name: given[field.name] for field in dataclasses.fields(each)} for each in self.classes]
        try:
            parsed = [each(**own) for each, own in zip(self.classes, values, strict=True)]
        except ValueError as error:
            self.error(str(error))
        return (*parsed, rest) if return_remaining_strings else tuple(parsed)


def _spell(name: str) -> list[str]:
    """An option may be written with underscores or with hyphens."""
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def explain_unknown(parser: argparse.ArgumentParser, words: Sequence[str]) -> str:
    """Says which words no option is for, and what may be meant by misspelt ones."""
    options = [option for action in parser._actions for option in action.option_strings]
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    close = dict.fromkeys(match for name in names for match in difflib.get_close_matches(name, options, 1, cutoff=0.75))
    return f"unrecognized arguments: {' '.join(words)}" + (f" (did you mean {' '.join(close)}?)" if close else "")


def check_spelling(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Looks for misspelt options before argparse misses those that must be given."""
    known = {"--", *(option for action in parser._actions for option in action.option_strings)}
    if unknown := [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]:
        parser.error(explain_unknown(parser, unknown))


def _read_bool(text: str) -> bool:
    is_true = text.lower() in ("yes", "true", "t", "y", "1")
    if not is_true and text.lower() not in ("no", "false", "f", "n", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} must be true or false")
    return is_true


class _DefaultsHelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults that the help does not name, and the description as it stands."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        names_none = action.default is None or "default" in (action.help or "").lower()
        return action.help if names_none else super()._get_help_string(action)


def parser_options(description: str | None, *, shows_defaults: bool = False, usage: str = USAGE) -> dict[str, Any]:
    """What every command's parser has; `usage` stands ahead of errors, where argparse would list all options."""
    command = re.search(r"vanilla-transformer [a-z-]+", description or "")
    return {
        "prog": command and command[0],
        "description": description,
        "formatter_class": _DefaultsHelpFormatter if shows_defaults else argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,  # a misspelt option is an error, not the beginning of another one
        "usage": usage,
    }


def make_argument_parser(
    argument_classes: type | Sequence[type], description: str | None, *, shows_defaults: bool = False
) -> OptionParser:
    """Returns a parser for the fields of one dataclass or several; `description` is the command's docstring."""
    classes = [argument_classes] if isinstance(argument_classes, type) else argument_classes
    return OptionParser(classes, **parser_options(description, shows_defaults=shows_defaults))


@contextmanager
def explaining_errors(
    parser: argparse.ArgumentParser, interrupted: str = "Interrupted.", *, divides_work: bool = False
) -> Iterator[None]:
    """Ends the process with one line for what is wrong with the input (status 2), and for Ctrl-C (status 130).

    Unless the command divides its work, several processes are an error.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        count = os.environ.get("WORLD_SIZE") or "1"
        if count != "1" and not divides_work:
            raise ValueError(
                f"torchrun, accelerate or the like started {count} processes (WORLD_SIZE={count}), and each would do "
                "all the work and write the same files. Run the command without them: only clean, train, translate, "
                "backtranslate, distill and evaluate divide their work."
            )
        yield
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        parser.exit(INTERRUPTED, f"\n{interrupted}\n")


@contextmanager
def settled_bars(arguments: Any, *, reads_datasets: bool = False) -> Iterator[None]:
    """Lets the libraries draw progress bars on a terminal only, and none with --disable_tqdm.

    Only a command that reads with datasets waits for that library, the better part of a second.
    """
    if sys.stderr.isatty() and not getattr(arguments, "disable_tqdm", False):
        yield
        return
    from transformers.utils import logging as bars

    switches = [(bars.is_progress_bar_enabled(), bars.disable_progress_bar, bars.enable_progress_bar)]
    if reads_datasets:
        from datasets import utils

        switches += [(not utils.are_progress_bars_disabled(), utils.disable_progress_bars, utils.enable_progress_bars)]
    shown = [(disable, enable) for is_shown, disable, enable in switches if is_shown]
    for disable, _ in shown:
        disable()
    try:
        yield
    finally:
        for _, enable in shown:
            enable()


def make_main(
    make_parser: Callable[[], OptionParser],
    run: Callable[..., None],
    interrupted: str = "Interrupted.",
    *,
    divides_work: bool = False,
    reads_datasets: bool = False,
) -> Callable[..., None]:
    """Makes a command's `main(argv)`: it parses the arguments (`argv`, else the command line's) and runs with them."""

    def main(argv: list[str] | None = None) -> None:
        parser = make_parser()
        keep_freed_memory()
        with explaining_errors(parser, interrupted, divides_work=divides_work):
            parsed = parser.parse_args_into_dataclasses(argv)
            with settled_bars(parsed[0], reads_datasets=reads_datasets):
                run(*parsed)

    main.__module__ = run.__module__
    return main


@contextmanager
def utf8_to_a_reader_who_may_leave() -> Iterator[None]:
    """Writes UTF-8 whatever the locale, and ends the program quietly when nobody reads any more (`| head`)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still to be written, at the interpreter's end, goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
