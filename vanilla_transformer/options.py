"""Options of the command line, as fields of dataclasses."""

import dataclasses
from typing import Any


def option(help: str, default: Any = dataclasses.MISSING, **metadata: Any) -> Any:
    """A field of a dataclass of options, with its text in `--help`; one without a default must be given."""
    return dataclasses.field(default=default, metadata={"help": help, **metadata})
