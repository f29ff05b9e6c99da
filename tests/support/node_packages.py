"""transformers.js for tests, from npm: `python tests/support/node_packages.py` installs it into .venv, for Node 20.

Tests never install it. They look in the folder that VANILLA_TRANSFORMER_NODE_MODULES names, or else in
.venv/node_modules, and are skipped where there is none.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

VERSION = "4.3.1"
PLACE = Path(__file__).parents[2] / ".venv"
_TRANSLATE = Path(__file__).with_name("transformersjs.mjs")


def install() -> None:
    """Installs the package; without the scripts of others, of which one fetches libraries for GPUs."""
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit("npm is missing (Debian: nodejs, npm).")
    PLACE.mkdir(exist_ok=True)
    package = f"@huggingface/transformers@{VERSION}"
    options = ["--prefix", str(PLACE), "--no-save", "--no-package-lock", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run([npm, "install", *options, package], check=True)


def translate_in_node(folder: Path, texts: list[str], **options: Any) -> dict[str, Any]:
    """What `pipeline("translation", folder)` makes of texts, as `translations`; skips the test where it cannot run.

    Options: `dtype` ("fp32"), `batch_size` (8), `settings`, as the pipeline takes them. For the rest see below.
    """
    return _run(folder, {"texts": texts, "dtype": "fp32", "batch_size": 8, "settings": {}} | options)


def encode_in_node(folder: Path, texts: list[str]) -> dict[str, Any]:
    """The `ids` of texts, and the `texts` that these are decoded to."""
    return _run(folder, {"texts": texts})


def _run(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    node = shutil.which("node")
    packages = Path(os.environ.get("VANILLA_TRANSFORMER_NODE_MODULES", PLACE / "node_modules"))
    manifest = packages / "@huggingface" / "transformers" / "package.json"
    if node is None or not manifest.is_file():
        pytest.skip("transformers.js needs node, and its package: run python tests/support/node_packages.py")
    version = json.loads(manifest.read_text(encoding="utf-8"))["version"]
    if version != VERSION:
        pytest.skip(f"transformers.js {version} is installed, and {VERSION} was asked for")
    command = [node, str(_TRANSLATE), str(packages), str(folder)]
    ended = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, encoding="utf-8")
    assert ended.returncode == 0, ended.stderr
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer


if __name__ == "__main__":
    install()
