"""Options of the command line, as fields of dataclasses."""

import dataclasses
from collections.abc import Mapping
from typing import Any

DISABLE_TQDM = "Show no progress bars, which are drawn on a terminal only."
# For `bool | None`: without a value, true, as transformers' parser has it for `bool`.
SWITCH: dict[str, Any] = {"nargs": "?", "const": True}


def option(help: str, default: Any = dataclasses.MISSING, **metadata: Any) -> Any:
    """A field of a dataclass of options, with its text in `--help`; one without a default must be given."""
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


def refuse_unused(arguments: Any, needs: Mapping[str, set[str]]) -> None:
    """Refuses options that are without effect, since one that they need was not given.

    Args:
        arguments: A dataclass of options. One that has its default counts as not given.
        needs: The names of options that need another, by its name.
    """
    given = {each.name for each in dataclasses.fields(arguments) if getattr(arguments, each.name) != each.default}
    for name, options in needs.items():
        if name not in given and (unused := sorted(given & options)):
            raise ValueError(f"--{' and --'.join(unused)} need{'s' * (len(unused) == 1)} --{name}.")
