"""A program that uses a model's folder as somebody without this package does; `hub_checks` starts it.

    python -P hub_trial.py TASK FOLDER REPORT TEXT [TEXT ...]

It hides the package from itself, lets the library run the code in the folder, and writes what it found to the file
REPORT as JSON: what the task makes of the texts, and the modules of those classes that the folder's code should have
provided.
"""

import importlib.abc
import json
import sys
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent.name


class _HidePackage(importlib.abc.MetaPathFinder):
    """Asked before all others, it finds the package nowhere."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Refuses the package, and leaves every other name to the others."""
        if fullname.partition(".")[0] == _PACKAGE:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def main(task: str, folder: str, report: str, *texts: str) -> None:
    """Translate `texts`, if that is the `task`, with the model in `folder`, and write the `report`."""
    sys.meta_path.insert(0, _HidePackage())
    from transformers import pipeline

    # Any, since the library types the names of its own tasks only.
    make_pipeline: Any = pipeline
    pipe = make_pipeline(task, model=folder, trust_remote_code=True, device="cpu")
    found = {
        "translations": [output[f"{pipe.return_name}_text"] for output in pipe(list(texts))],
        "modules": {
            type(item).__name__: type(item).__module__ for item in (pipe.model.config, pipe.model, pipe.tokenizer, pipe)
        },
    }
    Path(report).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
