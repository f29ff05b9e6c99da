"""Is one system better than another, or was it luck? SacreBLEU's paired tests on a test set."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypedDict

from .sacrebleu_scores import import_sacrebleu, make_bleu, make_chrf

_TESTS = {"bootstrap": "bs", "approximate_randomization": "ar"}
_SAMPLES = {"bootstrap": 1000, "approximate_randomization": 10_000}
_SEED_VARIABLE = "SACREBLEU_SEED"


class PairedScore(TypedDict):
    """One score of one system.

    `mean` and `ci`, half the width of the 95% confidence interval around it, are the bootstrap's: None under
    approximate randomization. `p_value` is None for the baseline.
    """

    score: float
    mean: float | None
    ci: float | None
    p_value: float | None


class SystemScores(TypedDict):
    """The scores of one system."""

    system: str
    bleu: PairedScore
    chrf: PairedScore


class Comparison(TypedDict):
    """What [`compare_translations`] returns; the baseline is the first of `systems`."""

    method: str
    samples: int
    seed: int
    sentences: int
    bleu_signature: str
    chrf_signature: str
    systems: list[SystemScores]


@contextmanager
def _sacrebleu_seed(seed: int) -> Iterator[None]:
    """SacreBLEU takes its seed from the environment only, which is as before afterwards."""
    previous = os.environ.get(_SEED_VARIABLE)
    os.environ[_SEED_VARIABLE] = str(seed)
    try:
        yield
    finally:
        if previous is None:
            del os.environ[_SEED_VARIABLE]
        else:
            os.environ[_SEED_VARIABLE] = previous


def _check(systems: Mapping[str, Sequence[str]], references: Sequence[str], method: str, seed: int) -> None:
    if method not in _TESTS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(_TESTS)}.")
    if seed < 1:
        raise ValueError(f"seed is {seed}; it must be at least 1 (sacreBLEU draws from the system where it is 0).")
    if len(systems) < 2:
        raise ValueError(f"{len(systems)} system(s); a comparison needs at least two of different names.")
    if not references:
        raise ValueError("There are no references; there must be at least one.")
    for name, translations in systems.items():
        if len(translations) != len(references):
            raise ValueError(
                f"{name} has {len(translations):,} translations, but there are {len(references):,} references."
            )


def compare_translations(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    *,
    method: Literal["bootstrap", "approximate_randomization"] = "bootstrap",
    samples: int | None = None,
    seed: int = 12345,
    lowercase: bool = False,
    tokenize: str = "13a",
) -> Comparison:
    """Compares systems with the first of them, by BLEU and chrF, as `sacrebleu --paired-bs` or `--paired-ar` does.

    A p-value estimates how often a difference as large as that to the baseline would come about by chance if the two
    systems were equally good. It knows the luck of the test set only, not that of another training run.

    Args:
        systems: From a name to the translations, detokenised; the first system is the baseline.
        references: The reference of each sentence.
        method: `"bootstrap"` draws test sets from the sentences, with replacement, and gives confidence intervals too;
            `"approximate_randomization"` swaps the translations of two systems at random.
        samples: Test sets or swaps. `None`: sacreBLEU's 1,000 or 10,000. The bootstrap needs memory for about
            100 bytes times samples times sentences.
        seed: Of the draws. SacreBLEU reads it from the variable SACREBLEU_SEED, which is set meanwhile.
        lowercase: Ignore case.
        tokenize: SacreBLEU's tokeniser for BLEU.

    Returns:
        The scores of each system in the order of `systems`, and sacreBLEU's signatures.

    Raises:
        ImportError: If sacrebleu is not installed.
        ValueError: If there are fewer than two systems, a system has not as many translations as there are references,
            there are none, or an option is illegal.
    """
    _check(systems, references, method, seed)
    samples = _SAMPLES[method] if samples is None else samples
    if samples < 1:
        raise ValueError(f"samples is {samples}; it must be at least 1.")
    scorers = {"BLEU": make_bleu(lowercase=lowercase, tokenize=tokenize), "CHRF": make_chrf(lowercase=lowercase)}
    with _sacrebleu_seed(seed):
        test = import_sacrebleu().significance.PairedTest(
            [(name, list(translations)) for name, translations in systems.items()],
            scorers,
            [list(references)],
            test_type=_TESTS[method],
            n_samples=samples,
        )
        signatures, scores = test()
    baseline = list(next(iter(systems.values())))
    # One entry per scorer, in their order, under the full name of the score; among the scores the systems' names first.
    bleu, chrf = [column for name, column in scores.items() if name != "System"]
    bleu_signature, chrf_signature = map(str, signatures.values())
    return {
        "method": method,
        "samples": samples,
        "seed": seed,
        "sentences": len(references),
        "bleu_signature": bleu_signature,
        "chrf_signature": chrf_signature,
        "systems": [
            {
                "system": name,
                "bleu": _paired_score(bleu[index], same=list(translations) == baseline),
                "chrf": _paired_score(chrf[index], same=list(translations) == baseline),
            }
            for index, (name, translations) in enumerate(systems.items())
        ],
    }


def _paired_score(result: Any, *, same: bool) -> PairedScore:
    # The means and intervals are NumPy's floats.
    mean, ci, p_value = (None if value is None else float(value) for value in (result.mean, result.ci, result.p_value))
    if same and p_value is not None:
        # sacreBLEU gives its smallest value to a difference of nothing.
        p_value = 1.0
    return {"score": float(result.score), "mean": mean, "ci": ci, "p_value": p_value}


__all__ = ["Comparison", "PairedScore", "SystemScores", "compare_translations"]
