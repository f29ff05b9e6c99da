"""Batches of texts of like length: their order and size, and that pipelines, scripts and `generate()` agree on them."""

import random
from collections.abc import Iterator
from functools import partial
from itertools import chain, pairwise
from typing import Any

import pytest
import tiny_seq2seq
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from library_models import MODELS, TEXTS, WORDS, make_marian, make_nllb_tokenizer, make_tokenizer, texts_of
from tiny_vanilla import make_model as make_vanilla
from transformers import GenerationConfig, MarianMTModel
from transformers.pipelines.pt_utils import KeyDataset, PipelineIterator

from vanilla_transformer.inference.translate import translate, translate_lines, translate_n_best
from vanilla_transformer.model.pipeline_vanilla_transformer import (
    WINDOW_SIZE,
    SummarizationPipeline,
    Text2TextGenerationPipeline,
    TranslationPipeline,
    count_sentences,
    map_by_length,
)

LENGTHS = [3, 11, 1, 7, 2, 12, 1, 9, 4]


def make_texts(lengths: list[int], words: list[str] = WORDS) -> list[str]:
    chooser = random.Random(0)
    return [" ".join(chooser.choices(words, k=length)) for length in lengths]


class Recorder:
    """Runs `map_by_length` on numbered items of these lengths, and notes what it does."""

    def __init__(self, lengths: list[int], **options: Any) -> None:
        self.remaining = iter([(length, number) for number, length in enumerate(lengths)])
        self.lengths = lengths
        self.num_read = self.num_yielded = self.most_ahead = 0
        self.batches: list[list[int]] = []
        self.results = []
        for result in map_by_length(self.run, self.read, **options):
            self.num_yielded += 1
            self.results.append(result)

    def read(self, count: int) -> list[tuple[int, int]]:
        items = [item for _, item in zip(range(count), self.remaining, strict=False)]
        self.num_read += len(items)
        self.most_ahead = max(self.most_ahead, self.num_read - self.num_yielded)
        return items

    def run(self, batch: list[int]) -> list[str]:
        self.batches.append([self.lengths[number] for number in batch])
        return [f"result {number}" for number in batch]

    def padding(self) -> float:
        """Share of the padded batches that is padding."""
        return 1 - sum(self.lengths) / sum(len(batch) * max(batch) for batch in self.batches)


class TestMapByLength:
    @given(
        lengths=st.lists(st.integers(0, 40), max_size=60),
        window_size=st.none() | st.integers(1, 30),
        batch_size=st.none() | st.integers(1, 9),
        max_batch_tokens=st.integers(1, 400),
        rows=st.integers(1, 3),
    )
    def test_order_completeness_and_limits(
        self, lengths: list[int], window_size: int | None, batch_size: int | None, max_batch_tokens: int, rows: int
    ) -> None:
        fits = partial(count_sentences, batch_size=batch_size, max_batch_tokens=max_batch_tokens, rows=rows)
        run = Recorder(lengths, fits=fits, window_size=window_size)
        assert run.results == [f"result {number}" for number in range(len(lengths))]
        assert sorted(chain(*run.batches)) == sorted(lengths)
        assert run.most_ahead <= (window_size or len(lengths))
        for batch in run.batches:
            assert batch == sorted(batch, reverse=True)
            assert 0 not in batch or not any(batch), "what has no words needs no model"
            if any(batch) and len(batch) > 1:
                assert len(batch) * rows * max(batch) <= max_batch_tokens
                assert len(batch) <= (batch_size or len(batch))
        if window_size is None:
            longest = [batch[0] for batch in run.batches]
            assert longest == sorted(longest, reverse=True)

    def test_a_window_is_enough_for_little_padding(self) -> None:
        chooser = random.Random(0)
        lengths = [round(chooser.lognormvariate(3, 0.6)) + 1 for _ in range(3000)]
        fits = partial(count_sentences, max_batch_tokens=800)
        windowed, whole = (Recorder(lengths, fits=fits, window_size=size).padding() for size in (1000, None))
        in_given_order = Recorder(lengths, fits=fits, window_size=1 + 800 // max(lengths)).padding()
        assert whole < windowed < 0.1
        assert in_given_order > 0.3

    def test_results_keep_coming(self) -> None:
        run = iter([(length, length) for length in random.Random(0).choices(range(1, 50), k=2000)])
        batches = 0

        def count(batch: list[int]) -> list[int]:
            nonlocal batches
            batches += 1
            return [batches for _ in batch]

        def read(size: int) -> list[tuple[int, int]]:
            return [item for _, item in zip(range(size), run, strict=False)]

        waited = []
        for _ in map_by_length(count, read, fits=lambda longest: 10, window_size=200):
            waited.append(batches)
        assert waited[0] == 1
        pauses = [after - before for before, after in pairwise(waited)]
        assert max(pauses) == 1, "every batch holds the oldest text"

    def test_texts_without_words_make_no_batch_small(self) -> None:
        run = Recorder([4, 0] * 100, fits=lambda longest: 10, window_size=50)
        assert [len(batch) for batch in run.batches if any(batch)] == [10] * 10

    def test_short_sources_count_as_sixteen_tokens(self) -> None:
        counts = [count_sentences(longest, max_batch_tokens=640, rows=2) for longest in (1, 16, 32, 900)]
        assert counts == [20, 20, 10, 1]
        assert count_sentences(1, batch_size=3, max_batch_tokens=640) == 3


@pytest.fixture(scope="module")
def marian() -> MarianMTModel:
    return make_marian()


@pytest.fixture
def translator(marian: MarianMTModel) -> TranslationPipeline:
    return TranslationPipeline(marian, make_tokenizer(), max_new_tokens=6, num_beams=2)


@pytest.fixture
def shapes(marian: MarianMTModel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    model: Any = marian
    generate = model.generate

    def recorded(**kwargs: Any) -> Any:
        found.append(tuple(kwargs["input_ids"].shape))
        return generate(**kwargs)

    monkeypatch.setattr(marian, "generate", recorded)
    return found


class TestBatchesOfAPipeline:
    def test_a_list_is_sorted_for_its_batches(
        self, translator: TranslationPipeline, shapes: list[tuple[int, int]]
    ) -> None:
        texts = make_texts(LENGTHS)
        batched = translator(texts, batch_size=3)
        # With </s>, the batch that holds the oldest text first: 3 words, then 11, then 1.
        assert shapes == [(3, 8), (3, 13), (3, 3)]
        assert batched == [translator(text)[0] for text in texts]

    @pytest.mark.parametrize(("kind", "num_workers"), [("list", 0), ("key dataset", 2), ("generator", 1)])
    def test_batches_filled_to_a_number_of_tokens(
        self, kind: str, num_workers: int, translator: TranslationPipeline, shapes: list[tuple[int, int]]
    ) -> None:
        texts = make_texts(LENGTHS * 3)
        expected = [translator(text) for text in texts]
        shapes.clear()
        dataset = KeyDataset(Dataset.from_dict({"text": texts}), "text")
        inputs = {"list": texts, "key dataset": dataset, "generator": (text for text in texts)}[kind]
        results = translator(inputs, max_batch_tokens=128, num_workers=num_workers)
        if kind == "list":
            results = [[result] for result in results]
        else:
            assert isinstance(results, PipelineIterator)
            if kind == "key dataset":
                assert len(results) == len(texts)
        assert list(results) == expected
        # Two beams of at least 16 tokens each.
        assert {rows for rows, _ in shapes} == {3, 4}

    def test_both_limits_hold(self, marian: MarianMTModel, shapes: list[tuple[int, int]]) -> None:
        pipe = TranslationPipeline(marian, make_tokenizer(), max_new_tokens=3, max_batch_tokens=40, num_beams=1)
        texts = make_texts([19] * 4 + [1] * 6)
        pipe(texts, batch_size=2)
        assert sorted(shapes) == [(2, 2)] * 3 + [(2, 20)] * 2
        shapes.clear()
        pipe(texts, batch_size=2, num_beams=2)
        assert sorted(shapes) == [(1, 2)] * 6 + [(1, 20)] * 4
        shapes.clear()
        TranslationPipeline(marian, make_tokenizer(), max_new_tokens=3, batch_size=4)(texts[4:])
        assert shapes == [(4, 2), (2, 2)]
        with pytest.raises(ValueError, match="max_batch_tokens is 0; it must be at least 1"):
            pipe(texts, max_batch_tokens=0)

    def test_one_text_may_come_with_a_limit(self, translator: TranslationPipeline) -> None:
        assert translator(TEXTS[0], max_batch_tokens=3) == translator(TEXTS[0])

    def test_a_generator_is_read_no_further_than_the_window(self, translator: TranslationPipeline) -> None:
        num_read = 0

        def endless() -> Iterator[str]:
            nonlocal num_read
            while True:
                num_read += 1
                yield TEXTS[num_read % len(TEXTS)]

        results = iter(translator(endless(), max_batch_tokens=64))
        for num_taken in range(1, 6):
            assert next(results) == translator(TEXTS[num_taken % len(TEXTS)])
            assert num_read < WINDOW_SIZE + num_taken

    def test_a_language_token_is_shared_by_every_batch(self, marian: MarianMTModel) -> None:
        tokenizer = make_nllb_tokenizer()
        model = make_marian(vocab_size=len(tokenizer))
        pipe = TranslationPipeline(model, tokenizer, src_lang="eng_Latn", tgt_lang="deu_Latn", max_new_tokens=3)
        texts = ["a", "face", "deed a bead", "a bad cab"]
        results = pipe(texts, max_batch_tokens=200, return_tensors=True)
        german = tokenizer.convert_tokens_to_ids("deu_Latn")
        assert [result["translation_token_ids"][1] for result in results] == [german] * 4

    def test_an_error_in_a_text_reaches_the_caller(self, translator: TranslationPipeline) -> None:
        with pytest.raises(TypeError, match="takes a str"):
            translator([*TEXTS, 4], batch_size=2)
        pipe = TranslationPipeline(translator.model, make_tokenizer(pad_token=None), max_new_tokens=3)
        with pytest.raises(ValueError, match="pad_token"):
            pipe(TEXTS, max_batch_tokens=100)


class TestScores:
    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("name", ["vanilla", *MODELS])
    def test_scores_are_those_of_generate(self, name: str, batch_size: int) -> None:
        model, tokenizer, texts = (*make_vanilla_pair(), VANILLA_TEXTS)
        if name != "vanilla":
            model, tokenizer, texts = MODELS[name](), make_tokenizer(), TEXTS
        settings: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 6, "length_penalty": 0.6}
        pipe = TranslationPipeline(model, tokenizer, **settings)
        settings |= {"num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}
        n_best = pipe(texts, return_scores=True, num_return_sequences=3, batch_size=batch_size)
        for text, results in zip(texts, n_best, strict=True):
            output = model.generate(**tokenizer(text, return_tensors="pt"), **settings)
            decoded = tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
            assert [result["translation_text"] for result in results] == decoded
            scores = [result["score"] for result in results]
            assert scores == pytest.approx(output.sequences_scores.tolist(), abs=1e-4)
            assert scores == sorted(scores, reverse=True)
        (best,) = pipe(texts[:1], return_scores=True)
        assert best["score"] == pytest.approx(n_best[0][0]["score"], abs=1e-5)

    def test_every_way_to_ask(self, marian: MarianMTModel, translator: TranslationPipeline) -> None:
        (with_text,) = translator(TEXTS[0], return_scores=True)
        (with_ids,) = translator(TEXTS[0], return_scores=True, return_tensors=True)
        assert with_ids.keys() == {"translation_token_ids", "score"}
        assert with_ids["score"] == with_text["score"]
        by_default = SummarizationPipeline(marian, make_tokenizer(), num_beams=2, max_new_tokens=6, return_scores=True)
        assert by_default(TEXTS[0])[0] == {"summary_text": with_text["translation_text"], "score": with_text["score"]}
        assert by_default(TEXTS[0], return_scores=False)[0].keys() == {"summary_text"}
        config = GenerationConfig(num_beams=2, max_new_tokens=6)
        assert translator(TEXTS[0], generation_config=config, return_scores=True) == [with_text]
        assert not config.return_dict_in_generate

    @pytest.mark.parametrize("search", [{"num_beams": 1}, {"num_beams": 1, "do_sample": True}], ids=str)
    def test_without_beams_there_are_no_scores(self, search: dict[str, Any], translator: TranslationPipeline) -> None:
        with pytest.raises(ValueError, match="return_scores needs beam search"):
            translator(TEXTS[0], return_scores=True, **search)

    def test_a_vanilla_model_keeps_no_scores_of_the_vocabulary(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, tokenizer = make_vanilla_pair()
        seen = []
        generate = model.generate

        def recorded(**kwargs: Any) -> Any:
            seen.append(generate(**kwargs))
            return seen[-1]

        monkeypatch.setattr(model, "generate", recorded)
        pipe = TranslationPipeline(model, tokenizer, num_beams=2)
        assert "score" in pipe(VANILLA_TEXTS[0], return_scores=True)[0]
        assert seen[0].scores is None


VANILLA_TEXTS = make_texts([3, 12, 1, 7], tiny_seq2seq.WORDS)


def make_vanilla_pair() -> tuple[Any, Any]:
    """A random model of this package with the settings of a newly trained one, and a tokenizer for it."""
    tokenizer = tiny_seq2seq.make_tokenizer()
    model = make_vanilla(vocab_size=len(tokenizer), scale=0.6)
    paper: dict[str, Any] = {"num_beams": 4, "length_penalty": 0.6, "length_penalty_type": "gnmt"}
    model.generation_config.update(**paper, allow_custom_entries=True)
    return model, tokenizer


class TestAgreement:
    """One sentence gets one translation, whoever asks, and whatever it is batched with."""

    @pytest.mark.parametrize("settings", [{}, {"num_beams": 1}, {"num_beams": 2, "max_new_tokens": 5}], ids=str)
    def test_generate_pipeline_and_script(self, settings: dict[str, Any]) -> None:
        model, tokenizer = make_vanilla_pair()
        texts = make_texts([17, 1, 9, 4, 12, 2, 6], tiny_seq2seq.WORDS)
        expected = []
        with torch.no_grad():
            for text in texts:
                (output,) = model.generate(**tokenizer(text, return_tensors="pt"), **settings)
                expected.append(tokenizer.decode(output, skip_special_tokens=True))
        assert len(set(expected)) > 4
        longest = max(len(text.split()) for text in expected)
        assert longest > 30 or "max_new_tokens" in settings, "the limit must be felt"
        pipe = TranslationPipeline(model, tokenizer)
        ways: list[dict[str, Any]] = [{"batch_size": 4}, {"max_batch_tokens": 300}]
        for batches in ways:
            assert texts_of(pipe(texts, **batches, **settings)) == expected
            assert translate(model, tokenizer, texts, progress=False, **batches, **settings) == expected
        lines = translate_lines(model, tokenizer, texts, window_size=7, progress=False, **settings)
        assert list(lines) == expected

    def test_without_settings_a_vanilla_model_is_as_generate_leaves_it(self) -> None:
        model, tokenizer = make_vanilla_pair()
        model.generation_config = GenerationConfig.from_model_config(model.config)
        (output,) = model.generate(**tokenizer(VANILLA_TEXTS[1], return_tensors="pt"))
        expected = tokenizer.decode(output, skip_special_tokens=True)
        assert texts_of(TranslationPipeline(model, tokenizer)(VANILLA_TEXTS[1])) == [expected]

    def test_n_best_of_pipeline_and_script(self) -> None:
        model, tokenizer = make_vanilla_pair()
        pipe = TranslationPipeline(model, tokenizer, return_scores=True, num_return_sequences=3, batch_size=2)
        found = translate_n_best(model, tokenizer, VANILLA_TEXTS, num_return_sequences=3, progress=False)
        for results, translations in zip(pipe(VANILLA_TEXTS), found, strict=True):
            assert [result["translation_text"] for result in results] == [text for text, _ in translations]
            scores = [score for _, score in translations]
            assert [result["score"] for result in results] == pytest.approx(scores, abs=1e-5)

    @pytest.mark.parametrize("pipeline_class", [TranslationPipeline, SummarizationPipeline])
    def test_no_warning_where_the_source_sets_the_limit(
        self, pipeline_class: type[Text2TextGenerationPipeline], caplog: pytest.LogCaptureFixture
    ) -> None:
        model, tokenizer = make_vanilla_pair()
        pipeline_class(model, tokenizer)(make_texts([23], tiny_seq2seq.WORDS))
        assert not caplog.records
