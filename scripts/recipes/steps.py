"""What the recipes of several trainings share: their command line, their steps, and means over seeds."""

import argparse
import hashlib
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def make_parser(description: str | None, seeds: str) -> argparse.ArgumentParser:
    """The options that they have in common; what else there is on the command line, `train` takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help=f"a training each{seeds}")
    return parser


def call(*words: str) -> None:
    """Runs a command of the package, and shows it."""
    print("vanilla-transformer", shlex.join(words), flush=True)
    status = subprocess.run([sys.executable, "-m", "vanilla_transformer", *words], check=False).returncode
    if status:
        raise SystemExit(f"That ended with status {status}. What is finished stays: the same command goes on.")


def run_once(folder: Path, output: Path, *words: str | Path) -> None:
    """Runs a command that makes a file, unless the file is there.

    Args:
        folder: That of the recipe's outputs; its steps.json keeps the command that made each, and the time it took.
        output: The file, which the command writes last.
        words: The command and its arguments.

    Raises:
        SystemExit: If the file is there but another command made it, or if the command fails.
    """
    spelled = [str(word) for word in words]
    command = shlex.join(map(_identify, spelled))
    steps, name = read_steps(folder), output.relative_to(folder).as_posix()
    if output.is_file():
        made_by = steps.get(name, {}).get("command", command)
        if not _is_same(made_by, command):
            raise SystemExit(f"{output} was made by\n  {made_by}\nnot by\n  {command}\nGive another output folder.")
        return
    start = time.monotonic()
    call(*spelled)
    steps = read_steps(folder) | {name: {"command": command, "seconds": time.monotonic() - start}}
    (folder / "steps.json").write_text(json.dumps(steps, indent=2) + "\n", encoding="utf-8")


def _identify(word: str) -> str:
    """A word of a command as it is compared: of a path the name, since folders move, and of a file a digest."""
    name, path = word.rpartition("/")[2], Path(word)
    return f"{name}@{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}" if path.is_file() else name


def _is_same(made_by: str, command: str) -> bool:
    """Whether two commands are the same; an output has no digest before the first one has run."""
    words, others = shlex.split(made_by), shlex.split(command)
    pairs = zip(words, others, strict=False)
    return len(words) == len(others) and all(other in (word, f"{word}@{other[-8:]}") for word, other in pairs)


def read_steps(folder: Path) -> dict[str, Any]:
    """What `run_once` has done so far, by output."""
    path = folder / "steps.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def describe(values: Sequence[float], digits: int) -> str:
    """The mean of those that are known (not nan), and of several their standard deviation."""
    values = [value for value in values if not math.isnan(value)] or [math.nan]
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, whose first row is the head."""
    head, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *others])
