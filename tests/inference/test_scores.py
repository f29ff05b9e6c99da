"""The metrics, checked against sacreBLEU itself: its API and its command line; ROUGE against its definition."""

import json
import os
import sys
import unicodedata
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import evaluate
import numpy as np
import pytest
import regex
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score import rouge_scorer
from tiny_seq2seq import WORDS, make_model, make_tokenizer

from vanilla_transformer.inference.evaluate import make_compute_metrics, score_summaries
from vanilla_transformer.inference.losses import score_loss
from vanilla_transformer.inference.scores import ROUGE_TYPES, load, split_words
from vanilla_transformer.tasks import TASKS

SACREBLEU = {"bleu": sacrebleu.BLEU, "chrf": sacrebleu.CHRF, "ter": sacrebleu.TER}
SACREBLEUS_NAMES = {"use_effective_order": "effective_order", "ignore_punct": "no_punct"}
SACREBLEUS_NAMES["support_zh_ja_chars"] = "asian_support"
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
    return load(name, keep_in_memory=True, **options)


class TestScores:
    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("bleu", {}),
            ("bleu", {"lowercase": True, "tokenize": "char"}),
            ("bleu", {"smooth_method": "floor", "smooth_value": 0.3, "use_effective_order": True, "force": True}),
            ("chrf", {}),
            ("chrf", {"word_order": 2}),
            ("chrf", {"char_order": 3, "beta": 1, "lowercase": True, "whitespace": True, "eps_smoothing": True}),
            ("ter", {}),
            ("ter", dict.fromkeys(("normalized", "ignore_punct", "support_zh_ja_chars", "case_sensitive"), True)),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("references", [REFERENCES, SEVERAL], ids=["strings", "lists"])
    def test_are_sacrebleus(self, name: str, options: dict[str, Any], references: list[Any]) -> None:
        oracle = SACREBLEU[name](**{SACREBLEUS_NAMES.get(option, option): value for option, value in options.items()})
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

    @settings(max_examples=15)
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

    def test_options_given_to_compute_take_the_place_of_those_given_to_load(self) -> None:
        chrf = in_memory("chrf", word_order=2, beta=1)
        result = chrf.compute(predictions=PREDICTIONS, references=REFERENCES, beta=3)
        assert (result["word_order"], result["beta"]) == (2, 3)


class TestLoading:
    @pytest.mark.parametrize("name", [*SACREBLEU, "rouge"])
    def test_gives_a_metric_whose_help_names_every_result(self, name: str) -> None:
        metric = load(name)
        assert isinstance(metric, evaluate.Metric)
        assert metric.name == name
        result = metric.compute(predictions=PREDICTIONS, references=REFERENCES)
        assert result == in_memory(name).compute(predictions=PREDICTIONS, references=REFERENCES)
        for key in (*result, "predictions", "references"):
            assert key in metric.inputs_description
            assert key in metric.compute.__doc__

    def test_in_memory_writes_nothing_and_otherwise_nothing_stays_in_the_cache(self, tmp_path: Path) -> None:
        cache = Path(os.environ["HF_HOME"])
        before = sorted(cache.rglob("*"))
        bleu = in_memory("bleu", cache_dir=str(tmp_path / "cache"))
        bleu.add_batch(predictions=PREDICTIONS, references=REFERENCES)
        assert bleu.compute()["score"] > 0
        assert list(tmp_path.iterdir()) == []
        assert sorted(cache.rglob("*")) == before
        bleu = load("bleu", cache_dir=str(tmp_path))
        bleu.add_batch(predictions=PREDICTIONS, references=REFERENCES)
        assert list(tmp_path.rglob("*.arrow"))
        bleu.compute()
        assert list(tmp_path.rglob("*.arrow")) == []


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
            ({"predictions": ["a", None], "references": ["a", "b"]}, TypeError, "A prediction is no string"),
            ({"predictions": ["a", "b"], "references": ["a", 3]}, TypeError, "A reference is 3"),
            ({"predictions": ["a", "b"], "references": ["a", [None]]}, TypeError, r"A reference is \[None\]"),
            ({"predictions": ["a", "b"], "references": ["a", []]}, ValueError, "empty list of references"),
            ({"tokenize": "moses"}, ValueError, "tokenize is 'moses'; it must be one of .*13a"),
            ({"smooth_method": "linear"}, ValueError, "smooth_method is 'linear'; it must be one of .*exp"),
            ({"lower_case": True}, TypeError, "lower_case"),
        ],
        ids=str,
    )
    def test_what_is_refused_costs_nothing_that_was_added(self, inputs: Any, error: Any, message: str) -> None:
        bleu = in_memory("bleu")
        bleu.add_batch(predictions=PREDICTIONS, references=REFERENCES)
        with pytest.raises(error, match=message):
            bleu.compute(**inputs)
        assert bleu.compute() == in_memory("bleu").compute(predictions=PREDICTIONS, references=REFERENCES)

    def test_wrong_options_are_refused_at_loading(self) -> None:
        with pytest.raises(ValueError, match="no metric 'meteor'; it must be one of bleu, chrf"):
            load("meteor")
        with pytest.raises(ValueError, match="tokenize is 'moses'"):
            load("bleu", tokenize="moses")
        with pytest.raises(TypeError, match="words"):
            load("chrf", words=2)
        with pytest.raises(TypeError, match="lowercase"):
            load("exact_match", lowercase=True)


@given(pairs=st.lists(st.tuples(st.text("ab ", max_size=9), st.text("ab ", max_size=9)), min_size=1, max_size=4))
def test_error_rates_are_what_their_definitions_say(pairs: list[tuple[str, str]]) -> None:
    @cache
    def edits(one: tuple[str, ...], other: tuple[str, ...]) -> int:
        if not one or not other:
            return len(one) + len(other)
        kept = edits(one[1:], other[1:]) + (one[0] != other[0])
        return min(kept, edits(one[1:], other) + 1, edits(one, other[1:]) + 1)

    predictions, references = map(list, zip(*pairs, strict=True))
    found = {name: load(name).compute(predictions=predictions, references=references) for name in ("wer", "per")}
    wrong = [prediction.strip() != reference.strip() for prediction, reference in pairs]
    assert found["wer"]["score"] == pytest.approx(100 * fmean(wrong))
    tokens = max(sum(len(reference.split()) for reference in references), 1)
    total = sum(edits(tuple(one.split()), tuple(other.split())) for one, other in pairs)
    assert found["per"]["score"] == pytest.approx(100 * total / tokens)


def test_the_nearest_of_several_references_counts() -> None:
    found = load("per").compute(predictions=["a b c"], references=[["x", "a b d e"]])
    assert found == {"score": pytest.approx(50)}


def test_exact_match_ignores_white_space_at_the_ends_only() -> None:
    metric = in_memory("exact_match")
    assert metric.compute(predictions=["a b ", "a  b", "A b"], references=["a b"] * 3) == {"score": 100 / 3}
    assert metric.compute(predictions=["a", "b"], references=[["b", " a"], ["a"]]) == {"score": 50}


class TestPerplexity:
    SOURCES = ("w1 w2 w3", "w4", "w5 w6")
    TARGETS = ("w2 w3", "w9 w8 w7 w6", "")

    def test_is_that_of_score_loss(self, tmp_path: Path) -> None:
        model, tokenizer = make_model(), make_tokenizer()
        expected = score_loss(model, tokenizer, self.SOURCES, self.TARGETS, batch_size=2, progress=False)
        metric = load("perplexity", cache_dir=str(tmp_path / "cache"), batch_size=2)
        metric.add(sources=self.SOURCES[0], reference=self.TARGETS[0])
        metric.add_batch(sources=self.SOURCES[1:], references=self.TARGETS[1:])
        assert metric.compute(model=model, tokenizer=tokenizer) == expected
        model.save_pretrained(tmp_path / "model")
        tokenizer.save_pretrained(tmp_path / "model")
        by_name = load("perplexity", model_id=str(tmp_path / "model"), device="cpu")
        result = by_name.compute(sources=self.SOURCES, references=self.TARGETS, batch_size=2)
        assert result == pytest.approx(expected)
        shorter = by_name.compute(sources=self.SOURCES, references=self.TARGETS, max_target_length=2)
        assert shorter["tokens"] == 5

    def test_wrong_options_and_inputs_are_refused(self) -> None:
        model, tokenizer = make_model(), make_tokenizer()
        pairs = {"sources": list(self.SOURCES), "references": list(self.TARGETS)}
        loaded = {"model": model, "tokenizer": tokenizer}
        cases: list[tuple[dict[str, Any], str]] = [
            (pairs, "There is no model"),
            ({**pairs, "model": model}, "tokenizer is missing"),
            ({**pairs, **loaded, "model_id": "x"}, r"model_id \(here 'x'\)"),
            ({**pairs, **loaded, "temperature": 1}, "temperature"),
            ({**pairs, **loaded, "batch_size": 0}, "batch_size is 0"),
            ({**loaded, "references": ["a"]}, "sources"),
            ({**loaded, "sources": ["a"], "references": ["a", "b"]}, r"sources \(1\) and references \(2\)"),
        ]
        for arguments, message in cases:
            with pytest.raises((TypeError, ValueError), match=message):
                in_memory("perplexity").compute(**arguments)


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
    @settings(max_examples=15)
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
                assert found[name] == pytest.approx(mean)
            stem = "yes" if use_stemmer else "no"
            assert found["rouge_signature"].startswith(f"tok:{tokenize}|stem:{stem}|")

    @settings(max_examples=20)
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

    def test_results_are_evaluates(self) -> None:
        rouge = in_memory("rouge")
        result = rouge.compute(predictions=["a b", "c"], references=[["x", "a b c"], "c"])
        assert [*result] == [*ROUGE_TYPES, "signature"]
        assert result["rouge1"] == pytest.approx((0.8 + 1) / 2), "the nearest reference counts"
        options: Any = {"use_aggregator": False, "rouge_types": ["rougeL", "rougeLsum"]}
        each = rouge.compute(predictions=["a b\nc", "c"], references=["c\na b", "d"], **options)
        assert each["rougeL"] == pytest.approx([2 / 3, 0])
        assert each["rougeLsum"] == [1, 0], "line by line"

    def test_wrong_options_are_refused(self) -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"tokenize": "13a"}, "tokenize is '13a'; it must be unicode or ascii"),
            ({"rouge_types": ["rouge0"]}, r"rouge_types is \['rouge0'\]; legal names are rouge1 to rouge9"),
            ({"rouge_types": []}, "rouge_types is"),
            ({"rouge_types": "rouge1"}, "must be a list"),
            ({"stemmer": True}, "stemmer"),
        ]
        for options, message in cases:
            with pytest.raises((TypeError, ValueError), match=message):
                load("rouge", **options)

    def test_a_missing_library_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "rouge_score", None)
        monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
        with pytest.raises(ImportError, match=r'pip install "vanilla-transformer\[train\]"'):
            load("rouge")
        with pytest.raises(ImportError, match="ROUGE needs rouge_score"):
            make_compute_metrics(make_tokenizer(), TASKS["summarization"])
        make_compute_metrics(make_tokenizer())  # which needs sacrebleu only


def test_combined_metrics_keep_their_options() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    perplexity = in_memory("perplexity", model=model, tokenizer=tokenizer)
    metrics = {"bleu": in_memory("bleu", lowercase=True), "chrf": in_memory("chrf", word_order=2)}
    combined = evaluate.combine({**metrics, "perplexity": perplexity})
    inputs = {"predictions": WORDS[:3], "references": WORDS[1:4], "sources": WORDS[2:5]}
    combined.add_batch(**inputs)
    scores = combined.compute()
    bleu = in_memory("bleu").compute(predictions=WORDS[:3], references=WORDS[1:4], lowercase=True)
    assert scores["bleu_score"] == bleu["score"]
    assert scores["bleu_signature"] == bleu["signature"]
    assert "|nw:2|" in scores["chrf_signature"]
    loss = score_loss(model, tokenizer, WORDS[2:5], WORDS[1:4], batch_size=32, progress=False)
    assert scores["perplexity"] == loss["perplexity"]


def score_shares(rank: int, folder: Path) -> list[Any]:
    results = []
    # Uneven shares, references in two forms; then one process that has nothing to add. Each time a metric of its own.
    for experiment, shares in (("uneven", (slice(0, 3), slice(3, 4))), ("all in one", (slice(0, 4), slice(0, 0)))):
        options: dict[str, Any] = {"experiment_id": experiment, "cache_dir": str(folder)}
        for metric in (load(name, num_process=2, process_id=rank, **options) for name in SACREBLEU):
            mine = REFERENCES[shares[rank]]
            metric.add_batch(
                predictions=PREDICTIONS[shares[rank]], references=[[one] for one in mine] if rank else mine
            )
            results.append(metric.compute())
    return results


def test_two_processes_score_together(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        other_process = pool.submit(score_shares, 1, tmp_path)
        try:
            first = score_shares(0, tmp_path)
        finally:  # where the other fails, this one only says that it waited in vain
            second = other_process.result(timeout=120)
    expected = [in_memory(name).compute(predictions=PREDICTIONS, references=REFERENCES) for name in SACREBLEU]
    assert first == expected * 2
    assert second == [None] * 6
    assert list(tmp_path.rglob("*.arrow")) == []
