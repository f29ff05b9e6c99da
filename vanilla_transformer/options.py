"""Options of the command line, as fields of dataclasses."""

import dataclasses
from typing import Any

DISABLE_TQDM = "Show no progress bars, which are drawn on a terminal only."


def option(help: str, default: Any = dataclasses.MISSING, **metadata: Any) -> Any:
    """A field of a dataclass of options, with its text in `--help`; one without a default must be given."""
    return dataclasses.field(default=default, metadata={"help": help, **metadata})
