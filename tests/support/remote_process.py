"""A Python in a process of its own, kept open for many questions: starting one that knows transformers costs seconds.

Imported, this file is what tests ask it with; run as a program, it is that process.
"""

import ast
import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Runs before everything else in a process "without the package", which is installed in editable mode here.
BLOCK_THE_PACKAGE = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "vanilla_transformer":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Blocker())
try:
    import vanilla_transformer
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("the package can be imported")
"""


class RemoteError(Exception):
    """What was raised there, as `kind: message`."""


class RemotePython:
    """A process that runs what it is given, in one namespace, as at a prompt.

    It works in `folder`, where what it says goes to `said.txt`; `environment` is all that it has.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._log = folder / "said.txt"
        with open(self._log, "w") as log:
            options: Any = {"cwd": folder, "env": dict(environment), "stderr": log, "text": True}
            options |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._process = subprocess.Popen([sys.executable, str(Path(__file__).resolve())], **options)

    def run(self, source: str, **names: Any) -> Any:
        """The value of the program's last line, which is JSON, as are the values that `names` have in it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"source": source, "names": names}) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process ended with status {self._process.wait()}\n{self.said}"
        answer = json.loads(line)
        if "error" in answer:
            raise RemoteError(answer["error"])
        return answer["value"]

    @property
    def said(self) -> str:
        """What it has printed so far, errors included."""
        return self._log.read_text()

    def close(self) -> None:
        """Ends the process, without the seconds that the libraries take to leave."""
        self._process.kill()
        self._process.communicate(timeout=60)


def run_as_at_a_prompt(source: str, namespace: dict[str, Any]) -> Any:
    """Runs the statements and returns the value of the last one, None if it has none."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        return exec(compile(tree, "<program>", "exec"), namespace)
    exec(compile(ast.Module(tree.body[:-1], []), "<program>", "exec"), namespace)
    return eval(compile(ast.Expression(last.value), "<program>", "eval"), namespace)


def serve() -> None:
    """Answers each line of standard input with one on standard output; programs get neither of the two."""
    sys.path.pop(0)  # this folder
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for line in requests:
        request = json.loads(line)
        namespace |= request["names"]
        try:
            answer = json.dumps({"value": run_as_at_a_prompt(request["source"], namespace)})
        except Exception as error:
            traceback.print_exc()
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    serve()
