"""What the evaluate modules of this package share.

Modules use these classes as `base.SacrebleuMetric`: evaluate takes the first metric class that it finds by name in a
module, which an imported class would be.
"""

import inspect
import os
from collections.abc import Callable
from typing import Any

import evaluate
from datasets import Features, List, Value

from .inputs import list_references
from .sacrebleu_scores import corpus_score

_OWN_ARGUMENTS = frozenset(inspect.signature(evaluate.Metric.__init__).parameters)


class MetricWithOptions(evaluate.Metric):
    """A metric that takes its options when it is loaded too, and refuses wrong ones before it reads what was added."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._options = {name: value for name, value in kwargs.items() if name not in _OWN_ARGUMENTS}
        self._check_options(self._options, complete=False)
        super().__init__(*args, **{name: value for name, value in kwargs.items() if name in _OWN_ARGUMENTS})

    def _check_options(self, options: dict[str, Any], *, complete: bool) -> None:
        """Raises a TypeError or ValueError for wrong options, and where `complete` for missing ones."""
        raise NotImplementedError

    def compute(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> dict[str, Any] | None:
        """Scores what was added together with what is given here.

        Args:
            predictions: See below; likewise the other inputs.
            references: See below.
            **kwargs: Other inputs, and options, which take the place of those given when the metric was loaded.

        Returns:
            The scores; None in every process but the first.
        """
        inputs = self._feature_names()
        self._check_options(
            self._options | {name: value for name, value in kwargs.items() if name not in inputs}, complete=True
        )
        return super().compute(predictions=predictions, references=references, **kwargs)

    def _build_data_dir(self) -> str:
        if self.keep_in_memory:
            return os.path.join(self._data_dir_root, self.name, self.config_name)
        return super()._build_data_dir()


def _checked_prediction(prediction: Any) -> str:
    if not isinstance(prediction, str):
        raise TypeError(f"A prediction is {prediction!r}; it must be a string.")
    return prediction


class TextMetric(MetricWithOptions):
    """A metric of texts and their references, one or several each.

    Subclasses say in `documentation` what [`evaluate.EvaluationModuleInfo`] wants to know, and in `codebase` where the
    code is that computes the score.
    """

    documentation: dict[str, Any]
    codebase: str

    def _info(self) -> evaluate.EvaluationModuleInfo:
        text = Value("string")
        return evaluate.EvaluationModuleInfo(
            features=[
                Features({"predictions": text, "references": List(text)}),
                Features({"predictions": text, "references": text}),
            ],
            codebase_urls=[self.codebase],
            license="Apache-2.0",
            **self.documentation,
        )

    def _infer_feature_from_batch(self, batch: dict[str, Any]) -> Features:
        # References are always stored as lists, so that batches and processes may differ in how they give them, and a
        # batch, which evaluate would look into, may be empty.
        return self.features[0]

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Adds texts and their references, which may be none of either.

        Args:
            predictions: A list of strings.
            references: As many references, or lists of references.
            **kwargs: None; there are no other inputs.

        Raises:
            TypeError: If they are anything else.
            ValueError: If they differ in number, or a list of references is empty.
        """
        for name, texts in (("predictions", predictions), ("references", references)):
            if texts is None or isinstance(texts, str):
                raise TypeError(f"{name} is {texts!r}; it must be a list of strings.")
        super().add_batch(
            predictions=[_checked_prediction(prediction) for prediction in predictions],
            references=[list_references(reference) for reference in references],
            **kwargs,
        )

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """Adds one text and its reference or references.

        Args:
            prediction: A string.
            reference: A string or a list of strings.
            **kwargs: None; there are no other inputs.

        Raises:
            TypeError: If they are anything else.
            ValueError: If the list of references is empty.
        """
        super().add(prediction=_checked_prediction(prediction), reference=list_references(reference), **kwargs)


class SacrebleuMetric(TextMetric):
    """One of sacreBLEU's metrics.

    Subclasses say in `make_scorer` how sacreBLEU's metric is made from options, and in `details` which attributes of
    its score go into the result.
    """

    codebase = "https://github.com/mjpost/sacrebleu"
    make_scorer: Callable[..., Any]
    details: tuple[str, ...]

    def _check_options(self, options: dict[str, Any], *, complete: bool) -> None:
        self.make_scorer(**options)

    def _compute(self, *, predictions: list[str], references: list[list[str]], **options: Any) -> dict[str, Any]:
        score, signature = corpus_score(self.make_scorer(**self._options | options), predictions, references)
        return {
            "score": score.score,
            **{name: getattr(score, name) for name in self.details},
            "signature": signature,
        }
