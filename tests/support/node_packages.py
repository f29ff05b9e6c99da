"""npm's packages for tests: `python tests/support/node_packages.py` installs them into .venv, for Node 20.

Tests never install them. They look in the folder that VANILLA_TRANSFORMER_NODE_MODULES names, or else in
.venv/node_modules, and are skipped where they are missing or others.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

# transformers.js brings those of the page, onnxruntime-web and @huggingface/tokenizers.
PACKAGES = {
    "@huggingface/transformers": "4.3.1",
    "@eslint/js": "10.0.1",
    "eslint": "10.15.0",
    "typescript": "7.0.2",
}
PLACE = Path(__file__).parents[2] / ".venv"
SUPPORT = Path(__file__).parent


def install() -> None:
    """Installs the packages; without the scripts of others, of which one fetches libraries for GPUs."""
    npm = shutil.which("npm")
    if npm is None:
        raise SystemExit("npm is missing (Debian: nodejs, npm).")
    PLACE.mkdir(exist_ok=True)
    packages = [f"{name}@{version}" for name, version in PACKAGES.items()]
    options = ["--prefix", str(PLACE), "--no-save", "--no-package-lock", "--ignore-scripts", "--no-audit", "--no-fund"]
    subprocess.run([npm, "install", *options, *packages], check=True)


def find_node_modules(*names: str) -> Path:
    """The folder of npm's packages; skips the test where one of these is missing or has another version."""
    packages = Path(os.environ.get("VANILLA_TRANSFORMER_NODE_MODULES", PLACE / "node_modules"))
    for name in names:
        manifest = packages / name / "package.json"
        if not manifest.is_file():
            pytest.skip(f"the npm package {name} is missing: run python tests/support/node_packages.py")
        version = json.loads(manifest.read_text(encoding="utf-8"))["version"]
        if version != PACKAGES[name]:
            pytest.skip(f"{name} {version} is installed, and {PACKAGES[name]} was asked for")
    return packages.resolve()


def run_node(script: str, *arguments: str | Path, request: Any = None) -> Any:
    """What a script of tests/support makes of a request; both are JSON. Skips the test where there is no Node."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("JavaScript needs node (Debian: nodejs)")
    command = [node, str(SUPPORT / script), *map(str, arguments)]
    ended = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, encoding="utf-8")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def translate_in_node(folder: Path, texts: list[str], **options: Any) -> dict[str, Any]:
    """What `pipeline("translation", folder)` makes of texts, as `translations`; skips the test where it cannot run.

    Options: `dtype` ("fp32"), `batch_size` (8), `settings`, as the pipeline takes them. For the rest see below.
    """
    return _run(folder, {"texts": texts, "dtype": "fp32", "batch_size": 8, "settings": {}} | options)


def encode_in_node(folder: Path, texts: list[str]) -> dict[str, Any]:
    """The `ids` of texts, and the `texts` that these are decoded to."""
    return _run(folder, {"texts": texts})


def _run(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    packages = find_node_modules("@huggingface/transformers")
    answer: dict[str, Any] = run_node("transformersjs.mjs", packages, folder, request=request)
    return answer


if __name__ == "__main__":
    install()
