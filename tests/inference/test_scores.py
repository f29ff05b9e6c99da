"""The modules for evaluate and the paired tests, checked against sacreBLEU itself: its API and its command line."""

import json
import os
import random
import runpy
import sys
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import evaluate
import numpy as np
import pytest
import regex  # type: ignore[import-untyped]
import sacrebleu
from conftest import RunPython
from hypothesis import given
from hypothesis import strategies as st
from rouge_score import rouge_scorer
from tiny_seq2seq import WORDS, make_model, make_tokenizer

from vanilla_transformer.inference import metrics
from vanilla_transformer.inference.evaluate import make_compute_metrics, score_loss, score_summaries
from vanilla_transformer.inference.metrics.comparison import PairedScore, compare_summaries, compare_translations
from vanilla_transformer.inference.metrics.rouge_scores import (
    ROUGE_TYPES,
    corpus_rouge,
    make_rouge,
    score_each,
    split_words,
)
from vanilla_transformer.inference.metrics.sacrebleu_scores import corpus_score, make_chrf
from vanilla_transformer.tasks import TASKS

SACREBLEU = {"bleu": sacrebleu.BLEU, "chrf": sacrebleu.CHRF, "ter": sacrebleu.TER}
RESULTS = {
    "bleu": ("score", "counts", "totals", "precisions", "bp", "sys_len", "ref_len", "signature"),
    "chrf": ("score", "char_order", "word_order", "beta", "signature"),
    "ter": ("score", "num_edits", "ref_length", "signature"),
}
PREDICTIONS = ["A man rides a horse .", "Two DOGS, on the beach!", "  nobody is here", "drei vier fünf"]
REFERENCES = ["A man is riding a horse .", "Two dogs, on the beach!", "nobody is here", "eins zwei drei"]
SEVERAL = [["A man is riding a horse .", "A rider"], ["Two dogs!", "dogs"], ["nobody", "is here"], ["eins", "vier"]]

sentences = st.lists(st.sampled_from(["a", "b", "C", "c", "dog", "Dogs,", "ü", "."]), min_size=1, max_size=8).map(
    " ".join
)


def in_memory(name: str, **options: Any) -> Any:
    return metrics.load(name, keep_in_memory=True, **options)


class TestScores:
    @pytest.mark.parametrize(
        ("name", "options", "sacrebleu_options"),
        [
            ("bleu", {}, {}),
            ("bleu", {"lowercase": True, "tokenize": "char"}, {"lowercase": True, "tokenize": "char"}),
            (
                "bleu",
                {"smooth_method": "floor", "smooth_value": 0.3, "use_effective_order": True, "force": True},
                {"smooth_method": "floor", "smooth_value": 0.3, "effective_order": True, "force": True},
            ),
            ("chrf", {}, {}),
            ("chrf", {"word_order": 2}, {"word_order": 2}),
            (
                "chrf",
                {"char_order": 3, "beta": 1, "lowercase": True, "whitespace": True, "eps_smoothing": True},
                {"char_order": 3, "beta": 1, "lowercase": True, "whitespace": True, "eps_smoothing": True},
            ),
            ("ter", {}, {}),
            (
                "ter",
                {"normalized": True, "ignore_punct": True, "support_zh_ja_chars": True, "case_sensitive": True},
                {"normalized": True, "no_punct": True, "asian_support": True, "case_sensitive": True},
            ),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("references", [REFERENCES, SEVERAL], ids=["strings", "lists"])
    def test_are_sacrebleus(
        self, name: str, options: dict[str, Any], sacrebleu_options: dict[str, Any], references: list[Any]
    ) -> None:
        oracle = SACREBLEU[name](**sacrebleu_options)
        streams = [REFERENCES] if references is REFERENCES else [list(stream) for stream in zip(*SEVERAL, strict=True)]
        expected = oracle.corpus_score(PREDICTIONS, streams)
        given_now = in_memory(name).compute(predictions=PREDICTIONS, references=references, **options)
        assert tuple(given_now) == RESULTS[name]
        assert given_now["signature"] == str(oracle.get_signature())
        for key in RESULTS[name][:-1]:
            assert given_now[key] == getattr(expected, key)
        json.dumps(given_now)
        given_at_load = in_memory(name, **options)
        assert given_at_load.compute(predictions=PREDICTIONS, references=references) == given_now

    @given(pairs=st.lists(st.tuples(sentences, st.lists(sentences, min_size=1, max_size=3)), min_size=1, max_size=6))
    def test_sentences_may_differ_in_their_number_of_references(self, pairs: list[tuple[str, list[str]]]) -> None:
        predictions, references = map(list, zip(*pairs, strict=True))
        streams = [[group[index] if index < len(group) else None for group in references] for index in range(3)]
        for name, oracle in SACREBLEU.items():
            scorer: Any = oracle()
            expected = scorer.corpus_score(predictions, streams)
            result = in_memory(name).compute(predictions=predictions, references=references)
            assert result["score"] == expected.score
            assert result["signature"] == str(scorer.get_signature())

    def test_are_those_of_the_command_line(self, tmp_path: Path, run_python: RunPython) -> None:
        for name, texts in (("hypotheses", PREDICTIONS), ("references", REFERENCES)):
            (tmp_path / name).write_text("".join(text + "\n" for text in texts), encoding="utf-8")
        command = "-m sacrebleu references -i hypotheses -m bleu chrf ter -w 9 --chrf-word-order 2"
        printed = json.loads(run_python(*command.split()).stdout)
        for name, line in zip(("bleu", "ter", "chrf"), sorted(printed, key=lambda line: line["name"]), strict=True):
            options = {"word_order": 2} if name == "chrf" else {}
            result = in_memory(name, **options).compute(predictions=PREDICTIONS, references=REFERENCES)
            assert round(result["score"], 9) == line["score"]
            assert result["signature"] == line["signature"]

    def test_options_given_to_compute_take_the_place_of_those_given_to_load(self) -> None:
        chrf = in_memory("chrf", word_order=2, beta=1)
        result = chrf.compute(predictions=PREDICTIONS, references=REFERENCES, beta=3)
        assert (result["word_order"], result["beta"]) == (2, 3)


class TestLoading:
    @pytest.mark.parametrize("name", sorted(SACREBLEU))
    def test_by_path_gives_the_same_metric(self, name: str) -> None:
        by_path = evaluate.load(str(metrics.module_path(name)))
        by_file = evaluate.load(str(metrics.module_path(name) / f"mt_{name}.py"), keep_in_memory=True)
        expected = metrics.load(name).compute(predictions=PREDICTIONS, references=REFERENCES)
        for metric in (by_path, by_file):
            assert isinstance(metric, evaluate.Metric)
            assert metric.name == f"mt_{name}"
            assert metric.module_type == "metric"
            assert metric.compute(predictions=PREDICTIONS, references=REFERENCES) == expected
            for key in RESULTS[name]:
                assert key in metric.inputs_description, "the help names every result"
        by_path = evaluate.load(str(metrics.module_path("chrf")), word_order=2)
        assert by_path.compute(predictions=["a"], references=["a"])["word_order"] == 2

    def test_in_memory_writes_nothing(self, tmp_path: Path) -> None:
        def cached_files() -> list[Path]:
            return sorted(Path(os.environ["HF_HOME"]).rglob("*"))

        before = cached_files()
        bleu = in_memory("bleu", cache_dir=str(tmp_path / "cache"))
        bleu.add_batch(predictions=PREDICTIONS, references=REFERENCES)
        assert bleu.compute()["score"] > 0
        assert list(tmp_path.iterdir()) == []
        assert cached_files() == before

    def test_otherwise_nothing_stays_in_the_cache(self, tmp_path: Path) -> None:
        bleu = metrics.load("bleu", cache_dir=str(tmp_path))
        bleu.add_batch(predictions=PREDICTIONS, references=REFERENCES)
        assert list(tmp_path.rglob("*.arrow"))
        bleu.compute()
        assert list(tmp_path.rglob("*.arrow")) == []

    def test_refuses_what_it_does_not_know(self) -> None:
        with pytest.raises(
            ValueError, match=r"no metric 'meteor'; it must be one of bleu, chrf, ter, rouge, perplexity"
        ):
            metrics.load("meteor")
        with pytest.raises(ValueError, match=r"'\.\./bleu'"):
            metrics.module_path("../bleu")


class TestAdding:
    @pytest.mark.parametrize("name", sorted(SACREBLEU))
    def test_in_any_portions_and_forms_gives_the_same_score(self, name: str) -> None:
        expected = in_memory(name).compute(predictions=PREDICTIONS, references=REFERENCES)
        metric = in_memory(name)
        metric.add_batch(predictions=[], references=[])
        metric.add(prediction=PREDICTIONS[0], reference=REFERENCES[0])
        metric.add(prediction=PREDICTIONS[1], reference=[REFERENCES[1]])
        metric.add_batch(predictions=np.array(PREDICTIONS[2:3]), references=((REFERENCES[2],),))
        assert metric.compute(predictions=PREDICTIONS[3:], references=REFERENCES[3:]) == expected
        assert metric.compute(predictions=PREDICTIONS, references=REFERENCES) == expected, "it can be used again"

    @pytest.mark.parametrize(
        ("inputs", "error", "message"),
        [
            ({"predictions": ["a"], "references": ["a", "b"]}, ValueError, r"predictions \(1\) and references \(2\)"),
            ({"predictions": "a b", "references": ["a b"]}, TypeError, "predictions is 'a b'; it must be a list"),
            ({"predictions": ["a"]}, TypeError, "references is None"),
            ({"predictions": ["a", None], "references": ["a", "b"]}, TypeError, "A prediction is None"),
            ({"predictions": ["a", "b"], "references": ["a", 3]}, TypeError, "A reference is 3"),
            ({"predictions": ["a", "b"], "references": ["a", [None]]}, TypeError, r"A reference is \[None\]"),
            ({"predictions": ["a", "b"], "references": ["a", []]}, ValueError, "empty list of references"),
            ({"tokenize": "moses"}, ValueError, "tokenize is 'moses'; it must be one of .*13a"),
            ({"smooth_method": "linear"}, ValueError, "smooth_method is 'linear'; it must be one of .*exp"),
            ({"lower_case": True}, TypeError, "lower_case"),
        ],
        ids=str,
    )
    def test_what_is_wrong_is_refused_and_costs_nothing_that_was_added(
        self, inputs: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        bleu = in_memory("bleu")
        bleu.add_batch(predictions=PREDICTIONS, references=REFERENCES)
        with pytest.raises(error, match=message):
            bleu.compute(**inputs)
        assert bleu.compute() == in_memory("bleu").compute(predictions=PREDICTIONS, references=REFERENCES)

    def test_nothing_at_all_cannot_be_scored(self) -> None:
        with pytest.raises(ValueError, match=r"0 predictions and 0 references; .* at least one"):
            in_memory("ter").compute(predictions=[], references=[])

    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("bleu", {"tokenize": "moses"}, "tokenize is 'moses'"),
            ("chrf", {"char_order": 0}, "char_order is 0 and word_order is 0"),
            ("chrf", {"word_order": -1}, "word_order is -1"),
            ("chrf", {"beta": 0}, "beta is 0"),
        ],
        ids=str,
    )
    def test_wrong_options_are_refused_at_loading(self, name: str, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            metrics.load(name, **options)


class TestPerplexity:
    SOURCES = ("w1 w2 w3", "w4", "w5 w6")
    TARGETS = ("w2 w3", "w9 w8 w7 w6", "")

    def test_is_that_of_score_loss(self, tmp_path: Path) -> None:
        model, tokenizer = make_model(), make_tokenizer()
        expected = score_loss(model, tokenizer, self.SOURCES, self.TARGETS, batch_size=2, progress=False)
        metric = metrics.load("perplexity", cache_dir=str(tmp_path / "cache"), batch_size=2)
        metric.add(sources=self.SOURCES[0], reference=self.TARGETS[0])
        metric.add_batch(sources=self.SOURCES[1:], references=self.TARGETS[1:])
        assert metric.compute(model=model, tokenizer=tokenizer) == expected
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        by_path = evaluate.load(str(metrics.module_path("perplexity")), model_id=str(tmp_path / "model"), device="cpu")
        result = by_path.compute(sources=self.SOURCES, references=self.TARGETS, batch_size=2)
        assert result == pytest.approx(expected)
        shorter = by_path.compute(sources=self.SOURCES, references=self.TARGETS, max_target_length=2)
        assert shorter["tokens"] == 5

    def test_wrong_options_and_inputs_are_refused(self) -> None:
        model, tokenizer = make_model(), make_tokenizer()
        pairs = {"sources": list(self.SOURCES), "references": list(self.TARGETS)}
        metric = in_memory("perplexity")
        with pytest.raises(ValueError, match="There is no model"):
            metric.compute(**pairs)
        with pytest.raises(ValueError, match="tokenizer is missing"):
            metric.compute(**pairs, model=model)
        with pytest.raises(ValueError, match="model_id \\(here 'x'\\)"):
            metric.compute(**pairs, model=model, tokenizer=tokenizer, model_id="x")
        with pytest.raises(TypeError, match="temperature"):
            metric.compute(**pairs, model=model, tokenizer=tokenizer, temperature=1)
        with pytest.raises(ValueError, match="batch_size is 0"):
            metrics.load("perplexity", batch_size=0)
        with pytest.raises(ValueError, match="sources"):
            metric.compute(references=["a"], model=model, tokenizer=tokenizer)
        with pytest.raises(ValueError, match=r"sources \(1\) and references \(2\)"):
            metric.compute(sources=["a"], references=["a", "b"], model=model, tokenizer=tokenizer)


def naive_lcs(one: list[str], other: list[str]) -> int:
    """The length of the longest common subsequence, straight from its definition."""
    if not one or not other:
        return 0
    if one[0] == other[0]:
        return 1 + naive_lcs(one[1:], other[1:])
    return max(naive_lcs(one[1:], other), naive_lcs(one, other[1:]))


def naive_f1(common: int, predicted: int, expected: int) -> float:
    return 2 * common / (predicted + expected) if common else 0.0


def naive_rouge(prediction: list[str], reference: list[str]) -> dict[str, float]:
    scores = {}
    for size in (1, 2):
        found, wanted = (
            [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
            for words in (prediction, reference)
        )
        common = sum(min(found.count(gram), wanted.count(gram)) for gram in {*found})
        scores[f"rouge{size}"] = naive_f1(common, len(found), len(wanted))
    scores["rougeL"] = naive_f1(naive_lcs(prediction, reference), len(prediction), len(reference))
    return scores


class TestRouge:
    @given(st.lists(st.tuples(sentences, sentences), min_size=1, max_size=4), st.booleans())
    def test_for_ascii_it_is_that_of_rouge_score(self, pairs: list[tuple[str, str]], use_stemmer: bool) -> None:
        pairs = [(prediction.replace("ü", "u_2"), reference.replace("ü", "3 u")) for prediction, reference in pairs]
        scorer = rouge_scorer.RougeScorer([*ROUGE_TYPES], use_stemmer=use_stemmer)
        expected = [scorer.score(reference, prediction) for prediction, reference in pairs]
        for tokenize in ("unicode", "ascii"):
            predictions, references = zip(*pairs, strict=True)
            found = score_summaries(predictions, references, tokenize=tokenize, use_stemmer=use_stemmer)
            for name in ROUGE_TYPES:
                mean = 100 * fmean(score[name].fmeasure for score in expected)
                assert found[name] == pytest.approx(mean)  # type: ignore[literal-required]
            stem = "yes" if use_stemmer else "no"
            assert found["rouge_signature"].startswith(f"tok:{tokenize}|stem:{stem}|")

    @given(sentences, sentences)
    def test_it_is_what_its_definition_says(self, prediction: str, reference: str) -> None:
        metric = in_memory("rouge", rouge_types=["rouge1", "rouge2", "rougeL"])
        found = metric.compute(predictions=[prediction], references=[reference])
        words = [text.replace(",", "").replace(".", "").lower().split() for text in (prediction, reference)]
        assert {name: found[name] for name in found if name != "signature"} == pytest.approx(naive_rouge(*words))

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("Don't  STOP_now: 3.5!", ["don", "t", "stop", "now", "3", "5"]),
            ("Большой Café", ["большой", "café"]),
            ("Cafe\u0301", ["café"]),
            ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
            ("今天GPT4好", ["今", "天", "gpt4", "好"]),
            ("カメラ、ok", ["カ", "メ", "ラ", "ok"]),
            ("ラーメンok", ["ラ", "ー", "メ", "ン", "ok"]),
            ("人々a", ["人", "々", "a"]),
            ("二\u3007二四年x", ["二", "\u3007", "二", "四", "年", "x"]),
            ("ｶﾞｯｺｰa", ["ｶﾞ", "ｯ", "ｺ", "ｰ", "a"]),
            ("ที่นี่", ["ที่", "นี่"]),
            ("한국어 말", ["한국어", "말"]),
            ("\u0301 ...", []),
        ],
    )
    def test_words_are_those_of_any_script(self, text: str, words: list[str]) -> None:
        assert split_words(text) == words

    def test_characters_that_stand_alone_are_those_of_scripts_without_spaces(self) -> None:
        """By Unicode's own table of scripts, which the module, reading names, does not have."""
        scripts = ["Han", "Hiragana", "Katakana", "Bopomofo", "Thai", "Lao", "Khmer", "Myanmar"]
        scripts += ["Tai_Le", "New_Tai_Lue", "Tai_Tham", "Tai_Viet"]
        of_these = regex.compile("[" + "".join(rf"\p{{Script_Extensions={script}}}" for script in scripts) + "]")
        known = regex.compile(r"[\p{L}\p{N}]")
        wrong = []
        for code in (*range(0xE00, 0x10000), *range(0x20000, 0x33500)):
            character = chr(code)
            if unicodedata.category(character)[0] in "LN" and known.match(character):
                is_alone = split_words(character + "x")[1:] == ["x"]
                if is_alone != bool(of_these.match(character)):
                    wrong.append(character)
        assert wrong == ["ﾞ", "ﾟ"], "marks on the letter before them"

    def test_rouge_scores_own_words_are_lost_in_other_scripts(self) -> None:
        same = {"predictions": ["Новый год"], "references": ["Новый год"]}
        assert in_memory("rouge").compute(**same)["rougeL"] == 1
        assert in_memory("rouge", tokenize="ascii").compute(**same)["rougeL"] == 0

    def test_results_are_evaluates(self) -> None:
        rouge = in_memory("rouge")
        result = rouge.compute(predictions=["a b", "c"], references=[["x", "a b c"], "c"])
        assert [*result] == [*ROUGE_TYPES, "signature"]
        assert result["rouge1"] == pytest.approx((0.8 + 1) / 2), "the nearest reference counts"
        each = rouge.compute(
            predictions=["a b\nc", "c"],
            references=["c\na b", "d"],
            use_aggregator=False,
            rouge_types=["rougeL", "rougeLsum"],
        )
        assert each["rougeL"] == pytest.approx([2 / 3, 0])
        assert each["rougeLsum"] == [1, 0], "line by line"

    def test_by_path_gives_the_same_metric(self) -> None:
        by_path = evaluate.load(str(metrics.module_path("rouge")), use_stemmer=True)
        inputs = {"predictions": PREDICTIONS, "references": REFERENCES}
        assert by_path.compute(**inputs) == in_memory("rouge", use_stemmer=True).compute(**inputs)
        assert all(key in by_path.inputs_description for key in (*ROUGE_TYPES, "signature"))

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"tokenize": "13a"}, ValueError, "tokenize is '13a'; it must be one of unicode, ascii"),
            ({"rouge_types": ["rouge0"]}, ValueError, r"rouge_types is \['rouge0'\]; legal names are rouge1 to rouge9"),
            ({"rouge_types": []}, ValueError, "rouge_types is"),
            ({"rouge_types": "rouge1"}, TypeError, "must be a list"),
            ({"stemmer": True}, TypeError, "stemmer"),
        ],
        ids=str,
    )
    def test_wrong_options_are_refused(self, options: dict[str, Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            metrics.load("rouge", **options)

    @pytest.mark.parametrize(
        ("hypotheses", "references", "error"),
        [(["a"], ["a", "b"], ValueError), ([], [], ValueError), ("a", "a", TypeError)],
    )
    def test_what_cannot_be_scored_is_refused(self, hypotheses: Any, references: Any, error: type[Exception]) -> None:
        with pytest.raises(error):
            score_summaries(hypotheses, references)

    def test_an_empty_list_of_references_is_named(self) -> None:
        message = "A prediction has an empty list of references; each must have at least one"
        scorer = make_rouge()
        for compute in (score_each, corpus_rouge):
            with pytest.raises(ValueError, match=message):
                compute(scorer, ["a", "b"], ["a", []])
        with pytest.raises(ValueError, match=message):
            corpus_score(make_chrf(), ["a", "b"], ["a", []])
        with pytest.raises(ValueError, match=message):
            in_memory("rouge").compute(predictions=["a", "b"], references=["a", []])

    def test_a_missing_library_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "rouge_score", None)
        monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
        with pytest.raises(ImportError, match=r'pip install "vanilla-transformer\[train\]"'):
            make_rouge()
        with pytest.raises(ImportError, match="ROUGE needs rouge_score"):
            make_compute_metrics(make_tokenizer(), TASKS["summarization"])
        make_compute_metrics(make_tokenizer())  # which needs sacrebleu only


def test_combined_metrics_keep_their_options() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    combined = evaluate.combine(
        {
            "bleu": in_memory("bleu", lowercase=True),
            "chrf": in_memory("chrf", word_order=2),
            "perplexity": in_memory("perplexity", model=model, tokenizer=tokenizer),
        }
    )
    inputs = {"predictions": WORDS[:3], "references": WORDS[1:4], "sources": WORDS[2:5]}
    combined.add_batch(**inputs)
    scores = combined.compute()
    bleu = in_memory("bleu").compute(predictions=WORDS[:3], references=WORDS[1:4], lowercase=True)
    assert scores["bleu_score"] == bleu["score"]
    assert scores["bleu_signature"] == bleu["signature"]
    assert "|nw:2|" in scores["chrf_signature"]
    assert (
        scores["perplexity"]
        == score_loss(model, tokenizer, WORDS[2:5], WORDS[1:4], batch_size=32, progress=False)["perplexity"]
    )


SCORE_SHARES = """
import json, sys
from pathlib import Path
import evaluate
from vanilla_transformer.inference import metrics

def score_shares(rank, folder):
    predictions, references = json.loads(Path(folder, "texts.json").read_text())
    results = []
    # Uneven shares, references in two forms; then one process that has nothing to add. Each time a metric of its own.
    for experiment, shares in (("uneven", (slice(0, 3), slice(3, 4))), ("all in one", (slice(0, 4), slice(0, 0)))):
        arguments = {"num_process": 2, "process_id": rank, "experiment_id": experiment, "cache_dir": f"{folder}/cache"}
        chrf = evaluate.load(str(metrics.module_path("chrf")), **arguments)
        for metric in (metrics.load("bleu", **arguments), chrf, metrics.load("ter", **arguments)):
            mine = references[shares[rank]]
            listed = [[one] for one in mine] if rank else mine
            metric.add_batch(predictions=predictions[shares[rank]], references=listed)
            results.append(metric.compute())
    return results

if __name__ == "__main__":
    print(json.dumps(score_shares(1, sys.argv[1])))
"""


def test_two_processes_score_together(tmp_path: Path, run_python: RunPython) -> None:
    (tmp_path / "texts.json").write_text(json.dumps([PREDICTIONS, REFERENCES]))
    (tmp_path / "script.py").write_text(SCORE_SHARES)
    with ThreadPoolExecutor(1) as pool:
        other_process = pool.submit(run_python, "script.py", tmp_path, timeout=120)
        try:
            first = runpy.run_path(str(tmp_path / "script.py"))["score_shares"](0, tmp_path)
        finally:  # where the other fails, this one only says that it waited in vain
            second = json.loads(other_process.result().stdout)
    expected = [
        in_memory(name).compute(predictions=PREDICTIONS, references=REFERENCES) for name in ("bleu", "chrf", "ter")
    ]
    assert first == expected * 2
    assert second == [None] * 6
    assert list((tmp_path / "cache").rglob("*.arrow")) == []


def make_systems() -> tuple[dict[str, list[str]], list[str]]:
    """A baseline, a better system and one hardly different, by how many words of the references they change."""
    generator = random.Random(3)
    references = [" ".join(generator.choices(WORDS, k=generator.randint(4, 12))) for _ in range(80)]

    def change(share: float) -> list[str]:
        return [
            " ".join(generator.choice(WORDS) if generator.random() < share else word for word in reference.split())
            for reference in references
        ]

    baseline = change(0.5)
    return {
        "baseline.de": baseline,
        "better.de": change(0.2),
        "similar.de": [*change(0.5)[:10], *baseline[10:]],
    }, references


def cell(score: PairedScore) -> str:
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
    def test_is_that_of_the_command_line(
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
        p_values = [system["bleu"]["p_value"] for system in comparison["systems"]]
        assert p_values[0] is None
        assert p_values[1] is not None
        assert p_values[2] is not None
        assert p_values[1] < 0.05 < p_values[2]
        kind = "bs" if method == "bootstrap" else "ar"
        assert f"|{kind}:{samples}|seed:7|" in comparison["bleu_signature"]
        assert f"|{kind}:{samples}|seed:7|" in comparison["chrf_signature"]
        assert json.loads(json.dumps(comparison)) == comparison

    def test_the_seed_alone_decides_and_the_environment_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        systems, references = make_systems()
        results = []
        for variable in (None, "3", "none"):
            if variable is None:
                monkeypatch.delenv("SACREBLEU_SEED", raising=False)
            else:
                monkeypatch.setenv("SACREBLEU_SEED", variable)
            results.append(compare_translations(systems, references, samples=50, seed=5))
            assert os.environ.get("SACREBLEU_SEED") == variable
        assert results[0] == results[1] == results[2]
        assert compare_translations(systems, references, samples=50, seed=6) != results[0]

    def test_the_same_translations_do_not_differ(self) -> None:
        systems, references = make_systems()
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
    WORSE = ("a dog", "two cats", "sun", "a boat", "a horse", "birds")
    BETTER = ("a dog runs", "two cats sleep", "rain", "the boat sails", "a cow", "birds sing")

    def systems(self) -> dict[str, list[str]]:
        return {"worse": list(self.WORSE), "better": list(self.BETTER)}

    def naive_scores(self, summaries: tuple[str, ...], name: str) -> list[Fraction]:
        pairs = zip(summaries, self.REFERENCES, strict=True)
        found = [naive_rouge(summary.split(), reference.split())[name] for summary, reference in pairs]
        return [Fraction(score).limit_denominator(1000) for score in found]

    @pytest.mark.parametrize("name", ["rouge1", "rouge2", "rougeL"])
    def test_swaps_come_to_the_share_among_all_swaps(self, name: str) -> None:
        worse, better = self.naive_scores(self.WORSE, name), self.naive_scores(self.BETTER, name)
        differences = [one - other for one, other in zip(better, worse, strict=True)]
        swapped = [
            abs(sum((sign * difference for sign, difference in zip(signs, differences, strict=True)), Fraction()))
            for signs in product((1, -1), repeat=len(differences))
        ]
        share = sum(found > abs(sum(differences, Fraction())) for found in swapped) / len(swapped)
        comparison = compare_summaries(
            self.systems(), self.REFERENCES, method="approximate_randomization", samples=4000
        )
        (first, second) = [system[name] for system in comparison["systems"]]  # type: ignore[literal-required]
        assert first["score"] == pytest.approx(float(100 * sum(worse) / 6))
        assert second["score"] == pytest.approx(float(100 * sum(better) / 6))
        assert first["p_value"] is None
        assert second["p_value"] == pytest.approx(share, abs=0.03)
        assert second["mean"] is None

    @pytest.mark.parametrize("name", ["rouge1", "rouge2", "rougeL"])
    def test_drawn_test_sets_come_to_the_share_among_all_test_sets(self, name: str) -> None:
        size = len(self.REFERENCES)
        drawn = np.array([*product(range(size), repeat=size)])
        scores = [np.array(self.naive_scores(summaries, name), float) for summaries in (self.WORSE, self.BETTER)]
        worse, better = (100 * each[drawn].mean(axis=1) for each in scores)
        differences = np.abs(better - worse)
        observed = 100 * abs(scores[0].mean() - scores[1].mean())
        share = float(np.mean(differences - differences.mean() > observed))
        comparison = compare_summaries(self.systems(), self.REFERENCES, samples=4000, seed=5)
        for system, values in zip(comparison["systems"], (worse, better), strict=True):
            score = system[name]  # type: ignore[literal-required]
            low, high = np.quantile(values, [0.025, 0.975])
            assert score["mean"] == pytest.approx(values.mean(), abs=1)
            assert score["ci"] == pytest.approx((high - low) / 2, abs=2.5)
        assert comparison["systems"][1][name]["p_value"] == pytest.approx(share, abs=0.03)  # type: ignore[literal-required]
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

    def test_refuses_what_cannot_be_compared(self) -> None:
        with pytest.raises(ValueError, match="b has 2 summaries, but there are 1 references"):
            compare_summaries({"a": ["x"], "b": ["x", "y"]}, ["x"])
        with pytest.raises(ValueError, match="samples is 0"):
            compare_summaries(self.systems(), self.REFERENCES, samples=0)
        with pytest.raises(ValueError, match="tokenize is '13a'"):
            compare_summaries(self.systems(), self.REFERENCES, tokenize="13a")
