"""Is one system better than another, or was it luck? SacreBLEU's paired tests on a test set, also for summaries.

For those sacreBLEU is told the ROUGE scores of each summary, and that the score of some of them together is the mean.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from vanilla_transformer.data.lines import read_lines
from vanilla_transformer.data.records import find_kind

from .evaluate import LINE_FILES, SCORES, TEXTS_FILE
from .scores import ROUGE_TYPES, Bleu, Chrf, Rouge, import_sacrebleu

Method = Literal["bootstrap", "approximate_randomization"]
# SacreBLEU's names of the tests, and its numbers of samples.
_TESTS = {"bootstrap": ("bs", 1000), "approximate_randomization": ("ar", 10_000)}
_SEED_VARIABLE = "SACREBLEU_SEED"  # SacreBLEU takes its seed from nowhere else.
# Scores are added up in these parts of one, so that the sums of approximate randomization are exact, and no difference
# counts as larger than its equal. The bootstrap's are float32, as sacreBLEU has them.
_PARTS = 10**9


def compare_translations(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: str = "13a",
    **test: Any,
) -> dict[str, Any]:
    """Compares systems with the first of them, by BLEU and chrF, as `sacrebleu --paired-bs` or `--paired-ar` does.

    A p-value estimates how often a difference as large as that to the baseline would come about by chance if the two
    systems were equally good. It knows the luck of the test set only, not that of another training run.

    `systems` maps names to detokenised translations; `lowercase` and `tokenize` are sacreBLEU's, and `test` has
    `method`, `samples` and `seed` of [`_run_test`]. Returns the method, the signatures, and for each system and score
    the score, the p-value (None for the baseline), the bootstrap's mean and `ci`, half its 95% confidence interval.
    """
    _check_systems(systems, references, unit="translations")
    bleu_scorer = Bleu.make_scorer(lowercase=lowercase, tokenize=tokenize)
    scorers = {"bleu": bleu_scorer, "chrf": Chrf.make_scorer(lowercase=lowercase)}
    outputs = {name: list(translations) for name, translations in systems.items()}
    report, (bleu, chrf) = _run_test(outputs, scorers, [list(references)], **test)
    return {**report, "sentences": len(references), "bleu_signature": bleu, "chrf_signature": chrf}


def compare_summaries(
    systems: Mapping[str, Sequence[str]],
    references: Sequence[str],
    *,
    tokenize: str = "unicode",
    use_stemmer: bool = False,
    **test: Any,
) -> dict[str, Any]:
    """Compares systems with the first of them by ROUGE, as [`compare_translations`] does by BLEU and chrF."""
    _check_systems(systems, references, unit="summaries")
    rouge = Rouge(keep_in_memory=True, tokenize=tokenize, use_stemmer=use_stemmer)
    rows = {}
    for name, summaries in systems.items():
        found: Any = rouge.compute(predictions=summaries, references=references, use_aggregator=False)
        signature = found.pop("signature")
        rows[name] = [dict(zip(found, scores, strict=True)) for scores in zip(*found.values(), strict=True)]
    scorers = {name: _MeanOfScores(name, signature) for name in ROUGE_TYPES}
    report, signatures = _run_test(rows, scorers, None, **test)
    return {**report, "sentences": len(references), "rouge_signature": signatures[0]}


def _check_systems(systems: Mapping[str, Sequence[str]], references: Sequence[str], *, unit: str) -> None:
    """Refuses what cannot be compared; `unit` says what systems have made."""
    if len(systems) < 2:
        raise ValueError(f"{len(systems)} system(s); a comparison needs at least two of different names.")
    if not references:
        raise ValueError("There are no references; there must be at least one.")
    for name, texts in systems.items():
        if len(texts) != len(references):
            raise ValueError(f"{name} has {len(texts):,} {unit}, but there are {len(references):,} references.")


def _run_test(
    systems: Mapping[str, Sequence[Any]],
    scorers: Mapping[str, Any],
    references: list[list[str]] | None,
    *,
    method: Method = "bootstrap",
    samples: int | None = None,
    seed: int = 12345,
) -> tuple[dict[str, Any], list[str]]:
    """What sacreBLEU's test finds, and the signature of each scorer; `references` only where the scorers need them.

    The method "bootstrap" draws test sets from the sentences, with replacement, and gives confidence intervals, too;
    "approximate_randomization" swaps the texts of two systems at random. `samples` is how often (`None`: sacreBLEU's
    1,000 or 10,000). The bootstrap needs memory for about 100 bytes times samples times sentences.
    """
    if method not in _TESTS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(_TESTS)}.")
    if seed < 1:
        raise ValueError(f"seed is {seed}; it must be at least 1 (sacreBLEU draws from the system where it is 0).")
    test_type, usual = _TESTS[method]
    samples = usual if samples is None else samples
    if samples < 1:
        raise ValueError(f"samples is {samples}; it must be at least 1.")
    paired_test = import_sacrebleu().significance.PairedTest
    before = os.environ.get(_SEED_VARIABLE)
    os.environ[_SEED_VARIABLE] = str(seed)
    try:
        test = paired_test(list(systems.items()), scorers, references, test_type=test_type, n_samples=samples)
        signatures, scores = test()
    finally:
        del os.environ[_SEED_VARIABLE]
        os.environ |= {} if before is None else {_SEED_VARIABLE: before}
    # One column per scorer, in their order, under the full name of the score; another has the systems' names.
    columns = [column for name, column in scores.items() if name != "System"]
    rows: list[dict[str, Any]] = [{"system": system} for system in systems]
    for name, column in zip(scorers, columns, strict=True):
        for row, result in zip(rows, column, strict=True):
            row[name] = _paired_score(result, baseline=column[0].score)
    return {"method": method, "samples": samples, "seed": seed, "systems": rows}, list(map(str, signatures.values()))


def _paired_score(result: Any, *, baseline: float) -> dict[str, Any]:
    # The means and intervals are NumPy's floats.
    mean, ci, p_value = (None if value is None else float(value) for value in (result.mean, result.ci, result.p_value))
    if p_value is not None and result.score == baseline:
        # Chance always makes a difference as large as none; sacreBLEU gives its smallest value to the same texts.
        p_value = 1.0
    return {"score": float(result.score), "mean": mean, "ci": ci, "p_value": p_value}


class _Signature:
    """A signature to which sacreBLEU's tests add how they were made."""

    def __init__(self, text: str) -> None:
        self.parts = [text]

    def update(self, name: str, value: object) -> None:
        self.parts.append(f"{name}:{value}")

    def __str__(self) -> str:
        return "|".join(self.parts)


class _MeanOfScores:
    """What sacreBLEU's tests ask of a metric, for one that is the mean of each text's score of this name."""

    def __init__(self, name: str, signature: str) -> None:
        self.name = name
        self.signature = signature

    def _extract_corpus_statistics(self, texts: Sequence[Mapping[str, float]], references: None) -> np.ndarray:
        """A row for each text, of which only sums are needed: its score and 1."""
        return np.array([[round(scores[self.name] * _PARTS), 1.0] for scores in texts])

    def _compute_score_from_stats(self, sums: Any) -> SimpleNamespace:
        total, count = sums
        return SimpleNamespace(name=self.name, score=float(100 * total / (count * _PARTS)))

    def _aggregate_and_compute(self, statistics: Any) -> SimpleNamespace:
        return self._compute_score_from_stats(np.sum(statistics, axis=0))

    def get_signature(self) -> _Signature:
        return _Signature(self.signature)


def read_systems(names: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The texts of folders, .jsonl or text files by their names, and the references of those that bring them along."""
    texts: dict[str, list[str]] = {}
    references: dict[str, list[str]] = {}
    for name in names:
        if name in texts:
            raise ValueError(f"--compare: {name} is given twice.")
        texts[name], found = _read_system(Path(name))
        if found is not None:
            references[name] = found
    return texts, references


def find_references(saved: Mapping[str, list[str]]) -> list[str]:
    """The references that systems bring along, which must be the same ones."""
    if not saved:
        raise ValueError("--compare: no folder has a references.txt; give the test set too, such as --test_file.")
    (first, references), *others = saved.items()
    for name, found in others:
        if found != references:
            raise ValueError(f"--compare: {first} and {name} were scored on different references.")
    return references


def _read_system(path: Path) -> tuple[list[str], list[str] | None]:
    if path.is_dir() and (path / TEXTS_FILE).exists():
        return _read_rows(path / TEXTS_FILE)
    if find_kind(str(path)) == "jsonl":
        return _read_rows(path)
    if not path.is_dir():
        return read_lines(path), None
    hypotheses, references = path / LINE_FILES["hypothesis"], path / LINE_FILES["reference"]
    if not hypotheses.exists():
        raise ValueError(f"--compare: {path} holds no hypotheses.txt; score the model with --output_dir {path} first.")
    return read_lines(hypotheses), read_lines(references) if references.exists() else None


def _read_rows(path: Path) -> tuple[list[str], list[str] | None]:
    """The texts of a file like texts.jsonl, and their references if all have one."""
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("hypothesis"), str):
            raise ValueError(f"{path}, line {number} must be a JSON object with a text named hypothesis.")
        rows.append(row)
    references = [row["reference"] for row in rows if isinstance(row.get("reference"), str)]
    return [row["hypothesis"] for row in rows], references if len(references) == len(rows) else None


def make_comparison_table(report: dict[str, Any]) -> str:
    """The systems, one per line: each score, the bootstrap's mean and 95% interval, and the p-value."""
    systems = report["systems"]
    names = [("" if index else "baseline: ") + system["system"] for index, system in enumerate(systems)]
    width = max(map(len, names))
    interval = "(mean ± 95% CI)" if report["method"] == "bootstrap" else ""
    scores = [(label, name) for label, name, _ in SCORES if name in systems[0]]
    lines = []
    for start in range(0, len(scores), 2):  # more side by side would be too wide
        pair = scores[start : start + 2]
        lines.append(" " * width + "".join(f"{label:>8} {interval:<16}{'p':<8}" for label, _ in pair))
        for name, system in zip(names, systems, strict=True):
            lines.append(f"{name:<{width}}{''.join(_write_score(system[score]) for _, score in pair)}")
    test, unit = report["method"].replace("_", " "), "summaries" if "rouge1" in systems[0] else "sentences"
    lines += [
        f"Paired {test} over {report['sentences']:,} {unit}, {report['samples']:,} samples, seed {report['seed']}",
        "p: how often chance alone would make as large a difference to the baseline; * below 0.05",
        *(f"{label.partition('-')[0]} {report[name]}" for label, _, name in SCORES if name in report),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _write_score(score: dict[str, Any]) -> str:
    interval = "" if score["mean"] is None else f"({score['mean']:.2f} ± {score['ci']:.2f})"
    p_value = "" if score["p_value"] is None else f"{score['p_value']:.4f}{'*' if score['p_value'] < 0.05 else ''}"
    return f"{score['score']:>8.2f} {interval:<16}{p_value:<8}"
