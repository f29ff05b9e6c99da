"""What the recipes of several trainings share: their command line, their steps, and means over seeds."""

import argparse
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def make_parser(description: str | None, seeds: str) -> argparse.ArgumentParser:
    """The options that they have in common; what else there is on the command line, `train` takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help=f"a training each{seeds}")
    return parser


def call(*words: str | Path) -> None:
    """Runs a command of the package, and shows it."""
    command = [str(word) for word in words]
    print("vanilla-transformer", shlex.join(command), flush=True)
    subprocess.run([sys.executable, "-m", "vanilla_transformer", *command], check=True)


def describe(values: Sequence[float], digits: int) -> str:
    """The mean, and of several values their standard deviation."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, whose first row is the head."""
    head, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *others])
