"""The paired tests, checked against sacreBLEU's command line and against all draws there are."""

import json
import os
import random
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from conftest import RunPython
from test_scores import naive_rouge
from tiny_seq2seq import WORDS

from vanilla_transformer.inference.compare import compare_summaries, compare_translations


def make_systems() -> tuple[dict[str, list[str]], list[str]]:
    """A baseline, a better system and one hardly different, by how many words of the references they change."""
    generator = random.Random(3)
    references = [" ".join(generator.choices(WORDS, k=generator.randint(4, 12))) for _ in range(80)]

    def change(share: float) -> list[str]:
        return [
            " ".join(generator.choice(WORDS) if generator.random() < share else word for word in reference.split())
            for reference in references
        ]

    baseline, better = change(0.5), change(0.2)
    return {"baseline.de": baseline, "better.de": better, "similar.de": [*change(0.5)[:10], *baseline[10:]]}, references


def cell(score: dict[str, Any]) -> str:
    """A score as sacreBLEU prints it."""
    printed = f"{score['score']:.6f}"
    if score["mean"] is not None:
        printed += f" ({score['mean']:.6f} ± {score['ci']:.6f})"
    if score["p_value"] is not None:
        printed += f" (p = {score['p_value']:.4f}){'*' if score['p_value'] < 0.05 else ''}"
    return printed


def expected_cells(printed: str, system: str) -> list[str]:
    """The two cells of a system in the table that sacreBLEU prints, where p-values are on a line of their own."""
    rows = [[part.strip() for part in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    (start,) = [index for index, row in enumerate(rows) if row[0].removeprefix("Baseline: ") == system]
    below = rows[start + 1] if start + 1 < len(rows) and not rows[start + 1][0] else ["", "", ""]
    return [f"{score} {p_value}".strip() for score, p_value in zip(rows[start][1:], below[1:], strict=True)]


class TestComparison:
    @pytest.mark.parametrize(
        ("method", "flag", "samples"),
        [("bootstrap", "--paired-bs", 300), ("approximate_randomization", "--paired-ar", 500)],
    )
    def test_is_the_command_lines(
        self, method: Any, flag: str, samples: int, tmp_path: Path, run_python: RunPython
    ) -> None:
        systems, references = make_systems()
        for name, texts in {**systems, "references.de": references}.items():
            (tmp_path / name).write_text("".join(text + "\n" for text in texts), encoding="utf-8")
        # Not its JSON, which fails on the bootstrap's numbers where NumPy is 2.0 or later.
        command = f"-m sacrebleu references.de -i {' '.join(systems)} -m bleu chrf {flag} {flag}-n {samples}"
        printed = run_python(
            *command.split(), "--format", "text", "-w", "6", "--no-color", environment={"SACREBLEU_SEED": "7"}
        ).stdout
        comparison = compare_translations(systems, references, method=method, samples=samples, seed=7)
        assert [system["system"] for system in comparison["systems"]] == list(systems)
        for system in comparison["systems"]:
            assert expected_cells(printed, system["system"]) == [cell(system["bleu"]), cell(system["chrf"])]
        first, better, similar = [system["bleu"]["p_value"] for system in comparison["systems"]]
        assert first is None
        assert better < 0.05 < similar
        kind = "bs" if method == "bootstrap" else "ar"
        for name in ("bleu_signature", "chrf_signature"):
            assert f"|{kind}:{samples}|seed:7|" in comparison[name]
        assert json.loads(json.dumps(comparison)) == comparison

    def test_the_seed_alone_decides_and_the_environment_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        systems, references = make_systems()
        monkeypatch.delenv("SACREBLEU_SEED", raising=False)
        result = compare_translations(systems, references, samples=50, seed=5)
        assert "SACREBLEU_SEED" not in os.environ
        monkeypatch.setenv("SACREBLEU_SEED", "3")
        assert compare_translations(systems, references, samples=50, seed=5) == result
        assert os.environ["SACREBLEU_SEED"] == "3"
        assert compare_translations(systems, references, samples=50, seed=6) != result
        # The same translations do not differ.
        (name, translations), *_ = systems.items()
        _, again = compare_translations({name: translations, "again": translations}, references, samples=50)["systems"]
        assert (again["bleu"]["p_value"], again["chrf"]["p_value"]) == (1, 1)

    def test_options_reach_the_scores(self) -> None:
        systems = {"a": ["THE CAT SAT ON THE MAT"], "b": ["no"]}
        references = ["the cat sat on the mat"]
        plain = compare_translations(systems, references, samples=2)["systems"][0]
        comparison = compare_translations(systems, references, samples=2, lowercase=True, tokenize="char")
        same = comparison["systems"][0]
        assert plain["bleu"]["score"] < 1
        assert same["bleu"]["score"] == pytest.approx(100)
        assert plain["chrf"]["score"] < same["chrf"]["score"] == pytest.approx(100)
        assert "tok:char" in comparison["bleu_signature"]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"systems": {"a": ["x"], "b": ["x", "y"]}}, "b has 2 translations, but there are 1 references"),
            ({"systems": {"a": ["x"]}}, "at least two"),
            ({"systems": {"a": [], "b": []}, "references": []}, "no references"),
            ({"method": "t-test"}, "method is 't-test'; it must be one of bootstrap, approximate_randomization"),
            ({"samples": 0}, "samples is 0"),
            ({"seed": 0}, "seed is 0; it must be at least 1"),
            ({"tokenize": "moses"}, "tokenize is 'moses'"),
        ],
        ids=str,
    )
    def test_refuses_what_cannot_be_compared(self, changes: dict[str, Any], message: str) -> None:
        arguments = {"systems": {"a": ["x"], "b": ["y"]}, "references": ["x"], **changes}
        with pytest.raises(ValueError, match=message):
            compare_translations(**arguments)


class TestComparisonOfSummaries:
    REFERENCES = ("a dog runs", "two cats sleep on a mat", "rain", "the red boat sails", "a horse", "birds sing here")
    SYSTEMS: ClassVar = {
        "worse": ["a dog", "two cats", "sun", "a boat", "a horse", "birds"],
        "better": ["a dog runs", "two cats sleep", "rain", "the boat sails", "a cow", "birds sing"],
    }

    def naive_scores(self, summaries: list[str], name: str) -> list[Fraction]:
        pairs = zip(summaries, self.REFERENCES, strict=True)
        found = [naive_rouge(summary.split(), reference.split())[name] for summary, reference in pairs]
        return [Fraction(score).limit_denominator(1000) for score in found]

    @pytest.mark.parametrize("name", ["rouge1", "rouge2", "rougeL"])
    def test_swaps_come_to_the_share_among_all_swaps(self, name: str) -> None:
        worse, better = (self.naive_scores(summaries, name) for summaries in self.SYSTEMS.values())
        differences = [one - other for one, other in zip(better, worse, strict=True)]
        swapped = [
            abs(sum((sign * difference for sign, difference in zip(signs, differences, strict=True)), Fraction()))
            for signs in product((1, -1), repeat=len(differences))
        ]
        share = sum(found > abs(sum(differences, Fraction())) for found in swapped) / len(swapped)
        options: Any = {"method": "approximate_randomization", "samples": 4000}
        comparison = compare_summaries(self.SYSTEMS, self.REFERENCES, **options)
        first, second = [system[name] for system in comparison["systems"]]
        assert first["score"] == pytest.approx(float(100 * sum(worse) / 6))
        assert second["score"] == pytest.approx(float(100 * sum(better) / 6))
        assert first["p_value"] is None
        assert second["p_value"] == pytest.approx(share, abs=0.03)
        assert second["mean"] is None

    @pytest.mark.parametrize("name", ["rouge1", "rouge2", "rougeL"])
    def test_drawn_test_sets_come_to_the_share_among_all_test_sets(self, name: str) -> None:
        size = len(self.REFERENCES)
        drawn = np.array([*product(range(size), repeat=size)])
        scores = [np.array(self.naive_scores(summaries, name), float) for summaries in self.SYSTEMS.values()]
        worse, better = (100 * each[drawn].mean(axis=1) for each in scores)
        differences = np.abs(better - worse)
        observed = 100 * abs(scores[0].mean() - scores[1].mean())
        share = float(np.mean(differences - differences.mean() > observed))
        comparison = compare_summaries(self.SYSTEMS, self.REFERENCES, samples=4000, seed=5)
        for system, values in zip(comparison["systems"], (worse, better), strict=True):
            score = system[name]
            low, high = np.quantile(values, [0.025, 0.975])
            assert score["mean"] == pytest.approx(values.mean(), abs=1)
            assert score["ci"] == pytest.approx((high - low) / 2, abs=2.5)
        assert comparison["systems"][1][name]["p_value"] == pytest.approx(share, abs=0.03)
        assert comparison["rouge_signature"].startswith("tok:unicode|stem:no|")
        assert comparison["rouge_signature"].endswith("|seed:5|bs:4000")
        assert json.loads(json.dumps(comparison)) == comparison

    def test_a_difference_of_nothing_is_none(self) -> None:
        """The same words in another order: ROUGE-1 does not change, the others do."""
        systems = {"one": [*self.REFERENCES], "other": [" ".join(reversed(text.split())) for text in self.REFERENCES]}
        _, other = compare_summaries(systems, self.REFERENCES, samples=50)["systems"]
        assert (other["rouge1"]["score"], other["rouge1"]["p_value"]) == (100, 1)
        assert other["rouge2"]["score"] < 10
        assert other["rouge2"]["p_value"] is not None
        assert other["rouge2"]["p_value"] < 0.05

    def test_lines_and_options_count(self) -> None:
        systems = {"two lines": ["Dogs\nruns"], "one line": ["Dogs runs"]}
        first, second = compare_summaries(systems, ["runs\ndogs"], samples=2)["systems"]
        assert first["rougeL"]["score"] == second["rougeL"]["score"] == 50
        assert first["rougeLsum"]["score"] == 100
        stemmed = compare_summaries(systems, ["running\ndog"], samples=2, use_stemmer=True, tokenize="ascii")
        assert stemmed["systems"][0]["rougeLsum"]["score"] == 100
        assert stemmed["rouge_signature"].startswith("tok:ascii|stem:yes|")
        with pytest.raises(ValueError, match="b has 2 summaries, but there are 1 references"):
            compare_summaries({"a": ["x"], "b": ["x", "y"]}, ["x"])
