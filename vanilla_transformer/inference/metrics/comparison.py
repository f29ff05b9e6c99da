"""Is one system better than another, or was it luck? SacreBLEU's paired tests on a test set.

The tests themselves, drawing included, are sacreBLEU's for summaries too: it is told the ROUGE scores of each summary,
and that the score of some of them together is the mean.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypedDict, cast

import numpy as np

from .rouge_scores import ROUGE_TYPES, make_rouge, rouge_signature, score_each
from .sacrebleu_scores import import_sacrebleu, make_bleu, make_chrf

_TESTS = {"bootstrap": "bs", "approximate_randomization": "ar"}
_SAMPLES = {"bootstrap": 1000, "approximate_randomization": 10_000}
_SEED_VARIABLE = "SACREBLEU_SEED"
# Scores are added up in these parts of one, so that the sums of approximate randomization are exact, and no difference
# counts as larger than its equal. The bootstrap's are float32, as sacreBLEU has them.
_PARTS = 10**9

Method = Literal["bootstrap", "approximate_randomization"]


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


class SummarySystemScores(TypedDict):
    """The scores of one system that summarizes."""

    system: str
    rouge1: PairedScore
    rouge2: PairedScore
    rougeL: PairedScore
    rougeLsum: PairedScore


class SummaryComparison(TypedDict):
    """What [`compare_summaries`] returns; the baseline is the first of `systems`."""

    method: str
    samples: int
    seed: int
    sentences: int
    rouge_signature: str
    systems: list[SummarySystemScores]


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


def _check(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    *,
    unit: str,
    method: str,
    samples: int | None,
    seed: int,
) -> int:
    """Refuses what cannot be compared, and returns the number of samples; `unit` says what systems have made."""
    if method not in _TESTS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(_TESTS)}.")
    if seed < 1:
        raise ValueError(f"seed is {seed}; it must be at least 1 (sacreBLEU draws from the system where it is 0).")
    if len(systems) < 2:
        raise ValueError(f"{len(systems)} system(s); a comparison needs at least two of different names.")
    if not references:
        raise ValueError("There are no references; there must be at least one.")
    for name, texts in systems.items():
        if len(texts) != len(references):
            raise ValueError(f"{name} has {len(texts):,} {unit}, but there are {len(references):,} references.")
    samples = _SAMPLES[method] if samples is None else samples
    if samples < 1:
        raise ValueError(f"samples is {samples}; it must be at least 1.")
    return samples


def _run_test(
    systems: Sequence[tuple[str, Sequence[Any]]],
    scorers: Mapping[str, Any],
    references: list[list[str]] | None,
    *,
    method: str,
    samples: int,
    seed: int,
) -> tuple[list[str], list[list[PairedScore]]]:
    """Has sacreBLEU compare systems.

    Args:
        systems: Names, and what the scorers score.
        scorers: SacreBLEU's metrics, or what has their methods.
        references: One stream of references, if the scorers need them.
        method: See [`compare_translations`].
        samples: See [`compare_translations`].
        seed: See [`compare_translations`].

    Returns:
        The signature of each scorer, and of each one the scores of the systems.
    """
    with _sacrebleu_seed(seed):
        test = import_sacrebleu().significance.PairedTest(
            systems, scorers, references, test_type=_TESTS[method], n_samples=samples
        )
        signatures, scores = test()
    # One entry per scorer, in their order, under the full name of the score; among the scores the systems' names first.
    columns = [column for name, column in scores.items() if name != "System"]
    return [str(signature) for signature in signatures.values()], [
        [_paired_score(result, baseline=column[0].score) for result in column] for column in columns
    ]


def compare_translations(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    *,
    method: Method = "bootstrap",
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
    samples = _check(systems, references, unit="translations", method=method, samples=samples, seed=seed)
    scorers = {"BLEU": make_bleu(lowercase=lowercase, tokenize=tokenize), "CHRF": make_chrf(lowercase=lowercase)}
    outputs = [(name, list(translations)) for name, translations in systems.items()]
    signatures, (bleu, chrf) = _run_test(
        outputs, scorers, [list(references)], method=method, samples=samples, seed=seed
    )
    bleu_signature, chrf_signature = signatures
    return {
        "method": method,
        "samples": samples,
        "seed": seed,
        "sentences": len(references),
        "bleu_signature": bleu_signature,
        "chrf_signature": chrf_signature,
        "systems": [{"system": name, "bleu": bleu[index], "chrf": chrf[index]} for index, name in enumerate(systems)],
    }


class _Mean(NamedTuple):
    """A score as sacreBLEU's tests know it."""

    name: str
    score: float


class _Signature:
    """A signature to which sacreBLEU's tests add how they were made."""

    def __init__(self, text: str) -> None:
        self.parts = [text]

    def update(self, name: str, value: object) -> None:
        self.parts.append(f"{name}:{value}")

    def __str__(self) -> str:
        return "|".join(self.parts)


class _MeanOfScores:
    """What sacreBLEU's tests ask of a metric, for one that is the mean of each text's score.

    Args:
        name: The score's name among those of a text.
        signature: Of the scores.
    """

    def __init__(self, name: str, signature: str) -> None:
        self.name = name
        self.signature = signature

    def _extract_corpus_statistics(self, texts: Sequence[Mapping[str, float]], references: None) -> np.ndarray:
        """A row for each text, of which only sums are needed: its score and 1."""
        return np.array([[round(scores[self.name] * _PARTS), 1.0] for scores in texts])

    def _compute_score_from_stats(self, sums: Any) -> _Mean:
        total, count = sums
        return _Mean(self.name, float(100 * total / (count * _PARTS)))

    def _aggregate_and_compute(self, statistics: Any) -> _Mean:
        return self._compute_score_from_stats(np.sum(statistics, axis=0))

    def get_signature(self) -> _Signature:
        return _Signature(self.signature)


def compare_summaries(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    *,
    method: Method = "bootstrap",
    samples: int | None = None,
    seed: int = 12345,
    tokenize: str = "unicode",
    use_stemmer: bool = False,
) -> SummaryComparison:
    """Compares systems with the first of them by ROUGE, as [`compare_translations`] does by BLEU and chrF.

    Args:
        systems: From a name to the summaries; the first system is the baseline.
        references: The reference of each text.
        method: See [`compare_translations`].
        samples: See [`compare_translations`].
        seed: See [`compare_translations`].
        tokenize: What ROUGE takes for words: `"unicode"` or `"ascii"` (see `make_rouge`).
        use_stemmer: Strip the endings of English words.

    Returns:
        The scores of each system in the order of `systems`, from 0 to 100, and the signature of them all.

    Raises:
        ImportError: If rouge_score or sacrebleu is not installed.
        ValueError: If there are fewer than two systems, a system has not as many summaries as there are references,
            there are none, or an option is illegal.
    """
    samples = _check(systems, references, unit="summaries", method=method, samples=samples, seed=seed)
    scorer = make_rouge(tokenize=tokenize, use_stemmer=use_stemmer)
    rows = []
    for name, summaries in systems.items():
        scores = score_each(scorer, summaries, references)
        rows.append((name, [dict(zip(scores, values, strict=True)) for values in zip(*scores.values(), strict=True)]))
    signature = rouge_signature(tokenize=tokenize, use_stemmer=use_stemmer)
    scorers = {name: _MeanOfScores(name, signature) for name in ROUGE_TYPES}
    signatures, columns = _run_test(rows, scorers, None, method=method, samples=samples, seed=seed)
    return {
        "method": method,
        "samples": samples,
        "seed": seed,
        "sentences": len(references),
        "rouge_signature": signatures[0],
        "systems": [
            cast(SummarySystemScores, {"system": name, **dict(zip(ROUGE_TYPES, scores, strict=True))})
            for name, *scores in zip(systems, *columns, strict=True)
        ],
    }


def _paired_score(result: Any, *, baseline: float) -> PairedScore:
    # The means and intervals are NumPy's floats.
    mean, ci, p_value = (None if value is None else float(value) for value in (result.mean, result.ci, result.p_value))
    if p_value is not None and result.score == baseline:
        # Chance always makes a difference as large as none; sacreBLEU gives its smallest value to the same texts.
        p_value = 1.0
    return {"score": float(result.score), "mean": mean, "ci": ci, "p_value": p_value}
