"""Modules of the evaluate library that need no network: sacreBLEU's BLEU, chrF and TER, ROUGE, and perplexity.

    from vanilla_transformer.inference import metrics

    bleu = metrics.load("bleu", tokenize="13a")
    bleu.compute(predictions=["A man rides."], references=["A man is riding."])["score"]

`evaluate.load(str(metrics.module_path("bleu")))` loads the same module by its path; it copies the code into evaluate's
module cache first. Both take what `evaluate.load` takes, such as `experiment_id`, and the metric's own options, which
`compute` may override. With given options, modules of different metrics can be combined (`evaluate.combine`). Inputs,
options and results of `"bleu"`, `"chrf"` and `"ter"` are those of evaluate's own "sacrebleu", "chrf" and "ter", with
two additions: sentences may differ in their number of references, and the result holds sacreBLEU's `signature`. So are
those of `"rouge"`, but for its `tokenize`, and for means where evaluate's own gives medians of drawn samples.

Where files go: a metric collects its inputs in evaluate's cache, or in the folder `cache_dir`. With
`keep_in_memory=True`, `metrics.load` and the metric write nothing at all, so that a read-only cache will do.

Several processes: the safe way is to gather the translations and to compute in one process alone, as the Trainer and
Accelerate's `gather_for_metrics` do. Otherwise give every process `num_process`, its `process_id`, and an
`experiment_id` that no other evaluation has. All must share `cache_dir`, and all must add something before they
compute, if only `add_batch(predictions=[], references=[])`; process 0 gets the result, the others None. For another
evaluation load the metric again, with another `experiment_id`.
"""

import importlib
from pathlib import Path
from typing import Any

_CLASSES = {"bleu": "MtBleu", "chrf": "MtChrf", "ter": "MtTer", "rouge": "MtRouge", "perplexity": "MtPerplexity"}


def _check_name(name: str) -> None:
    if name not in _CLASSES:
        raise ValueError(f"There is no metric {name!r}; it must be one of {', '.join(_CLASSES)}.")


def module_path(name: str) -> Path:
    """The folder that `evaluate.load` takes, as a string, for the metric `name`.

    Raises:
        ValueError: If `name` is none of `"bleu"`, `"chrf"`, `"ter"`, `"rouge"` and `"perplexity"`.
    """
    _check_name(name)
    return Path(__file__).parent / f"mt_{name}"


def load(name: str, **kwargs: Any) -> Any:
    """Loads a metric without the network, and without the copy of its code that `evaluate.load` makes.

    Args:
        name: `"bleu"`, `"chrf"` (chrF++ with `word_order=2`), `"ter"`, `"rouge"` or `"perplexity"`.
        **kwargs: Arguments of `evaluate.Metric` (`num_process`, `process_id`, `experiment_id`, `cache_dir`,
            `keep_in_memory`, ...) and options of the metric, from then on its defaults.

    Returns:
        An `evaluate.Metric` with `add`, `add_batch` and `compute`.

    Raises:
        TypeError: If the metric has no such option.
        ValueError: If there is no metric `name`, or the value of an option is illegal.
    """
    _check_name(name)
    module = importlib.import_module(f"{__name__}.mt_{name}.mt_{name}")
    return getattr(module, _CLASSES[name])(**kwargs)


__all__ = ["load", "module_path"]
