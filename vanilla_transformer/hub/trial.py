"""What a model makes of texts; and a program that tries that as somebody without this package does.

    python -P trial.py TASK FOLDER REPORT TEXT [TEXT ...]

`checks` starts it. It hides the package from itself, lets the library run the code in the folder, and writes what came
out for each text, and the modules of classes, to REPORT as JSON.
"""

import importlib.abc
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, pipeline

QUESTION = "Who rides a horse?"
# What came out in words, and numbers that a repetition gives again.
Outcome = tuple[str, list[float]]

_PACKAGE = Path(__file__).resolve().parents[1].name


class _QuestionAnswerer:
    """Finds the answer to a question in texts; the library's pipeline for that ended with its version 4."""

    def __init__(self, model: Any, tokenizer: Any = None, **options: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        if isinstance(model, str):
            self.model = AutoModelForQuestionAnswering.from_pretrained(model, **options)
            self.tokenizer = AutoTokenizer.from_pretrained(model, **options)

    def __call__(self, texts: Iterable[str]) -> list[Outcome]:
        """The best span of each text, and its score."""
        return [self._answer(text) for text in texts]

    def _answer(self, text: str) -> Outcome:
        batch = self.tokenizer(QUESTION, text, return_tensors="pt", return_offsets_mapping=True)
        places = batch.pop("offset_mapping")[0]
        with torch.no_grad():
            scores = self.model(**batch)
        pairs = scores.start_logits[0, :, None] + scores.end_logits[0]
        inside = torch.tensor([part == 1 for part in batch.sequence_ids()])
        legal = (inside[:, None] & inside).triu()  # in the text, not in the question, and no end before its start
        start, end = divmod(int(pairs.masked_fill(~legal, -torch.inf).argmax()), len(inside))
        return text[places[start][0] : places[end][1]], [float(pairs[start, end])]


def make_user(task: str, model: Any, tokenizer: Any = None, **options: Any) -> Any:
    """What uses a model, or the model in a folder, for a task: the library's pipeline, where it has one."""
    if task == "question-answering":
        return _QuestionAnswerer(model, tokenizer, **options)
    # Any, since the library types the names of its own tasks only.
    make_pipeline: Any = pipeline
    return make_pipeline(task, model=model, tokenizer=tokenizer, device="cpu", **options)


def use(task: str, user: Any, texts: Sequence[str]) -> list[Outcome]:
    """What comes out for each text where a model does its task."""
    return _USES.get(task, _write)(user, list(texts))


def _write(user: Any, texts: list[str]) -> list[Outcome]:
    return [(output[f"{user.return_name}_text"], []) for output in user(texts)]


def _go_on(user: Any, texts: list[str]) -> list[Outcome]:
    outputs = user(texts, do_sample=False, max_new_tokens=8, return_full_text=False)
    return [(output["generated_text"], []) for [output] in outputs]


def _classify(user: Any, texts: list[str]) -> list[Outcome]:
    return [(output["label"], [output["score"]]) for output in user(texts)]


def _label(user: Any, texts: list[str]) -> list[Outcome]:
    """The labels but O, which the pipeline leaves out."""
    outputs = ([(item["entity"], float(item["score"])) for item in output] for output in user(texts))
    return [(" ".join(label for label, _ in found), [score for _, score in found]) for found in outputs]


def _encode(user: Any, texts: list[str]) -> list[Outcome]:
    return [
        (f"{len(states)} states of {len(states[0])} numbers", [number for state in states for number in state])
        for [states] in user(texts)
    ]


_USES: dict[str, Callable[[Any, list[str]], list[Outcome]]] = {
    "feature-extraction": _encode,
    "question-answering": lambda user, texts: list(user(texts)),
    "text-classification": _classify,
    "text-generation": _go_on,
    "token-classification": _label,
}


class _HidePackage(importlib.abc.MetaPathFinder):
    """Asked before all others, it finds the package nowhere, and leaves every other name to the others."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.partition(".")[0] == _PACKAGE:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def main(task: str, folder: str, report: str, *texts: str) -> None:
    """Use the model in `folder` for its `task`, with `texts`, and write the `report`."""
    sys.meta_path.insert(0, _HidePackage())
    user = make_user(task, folder, trust_remote_code=True)
    provided = [user.model.config, user.model, user.tokenizer, user]
    modules = {type(item).__name__: type(item).__module__ for item in provided if type(item).__module__ != __name__}
    found = {"outcomes": use(task, user, texts), "modules": modules}
    Path(report).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
