"""One repository for Python and JavaScript: what `export --format transformersjs` wrote, on a branch of its own.

Both want a config.json and a tokenizer.json, with other contents. So the main branch is Python's, and JavaScript names
the other one: `pipeline("translation", "me/my-model", { revision: "transformersjs" })`.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from safetensors import safe_open

from .files import CARD_NAME, Problem, Selection, find_refused_files, read_settings
from .push import Target

BRANCH = "transformersjs"
# In the exported config.json: which weights were exported.
DIGEST_FIELD = "weights_digest"
FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *(f"onnx/{name}{kind}.onnx" for name in ("encoder_model", "decoder_model_merged") for kind in ("", "_quantized")),
)
_KEPT = (CARD_NAME, ".gitattributes", "LICENSE", "NOTICE")


def digest_tensors(tensors: Iterable[torch.Tensor]) -> str:
    """Tells weights from others, whatever their names and however often one is there; compared as float32."""
    found = {hashlib.sha256(tensor.float().contiguous().cpu().numpy().tobytes()).hexdigest() for tensor in tensors}
    return hashlib.sha256("".join(sorted(found)).encode()).hexdigest()


def find_javascript_problems(folder: str | os.PathLike[str], model: str | os.PathLike[str]) -> list[Problem]:
    """Says why a folder cannot be pushed beside the model: it is not whole, is of another one, or has secrets."""
    root = Path(folder)
    missing = [name for name in FILES if not (root / name).is_file()]
    if missing:
        message = f"{folder} lacks {', '.join(missing)}: make it with export --format transformersjs."
        return [Problem("transformersjs", message)]
    problems = list(find_refused_files(root, Selection({name: root / name for name in FILES})))
    if read_settings(root / "config.json").get(DIGEST_FIELD) != digest_tensors(_read_weights(Path(model))):
        message = f"{folder} was not exported from the weights in {model}: export that again."
        problems.append(Problem("transformersjs", message))
    return problems


def _read_weights(folder: Path) -> Iterator[torch.Tensor]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                yield tensors.get_tensor(name)


def push_javascript(folder: str | os.PathLike[str], repo_id: str, *, token: str | None = None) -> str:
    """Pushes a folder that was checked to its branch, which has nothing else of the model; returns the address.

    The card and the licence that the main branch has are there too, as they were when the branch was made. A PushError
    says what the Hub refuses.
    """
    target = Target(repo_id, private=False, revision=BRANCH, create_pr=False, token=token)
    target.look()
    deleted = [name for name in target.files if name not in (*FILES, *_KEPT)]
    operations: list[CommitOperationAdd | CommitOperationDelete] = [CommitOperationDelete(name) for name in deleted]
    operations += [CommitOperationAdd(name, str(Path(folder, name))) for name in FILES]
    url, _ = target.commit(operations, "Files for transformers.js")
    return url
