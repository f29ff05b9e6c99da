"""What the command lines of the scripts have in common."""

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import HfArgumentParser

USAGE = "%(prog)s [-h] [--argument value ...]"


class _DefaultsHelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults, and the description as it stands."""


def make_argument_parser(
    argument_classes: type | Sequence[type],
    description: str | None,
    *,
    shows_defaults: bool = False,
    usage: str = USAGE,
) -> HfArgumentParser:
    """Returns a parser for the fields of dataclasses.

    Args:
        argument_classes: The dataclass, or several.
        description: The script's docstring, shown as it stands.
        shows_defaults: Whether the help gives every default; else what an argument's own help says of it.
        usage: What stands ahead of every error, where the library's own lists all arguments.
    """
    classes: Any = argument_classes
    return HfArgumentParser(
        classes,
        description=description,
        formatter_class=_DefaultsHelpFormatter if shows_defaults else argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a misspelt argument is an error, not the beginning of another one
        usage=usage,
    )


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
