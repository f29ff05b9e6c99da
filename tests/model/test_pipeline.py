"""The restored pipelines, against tokenizer, `generate()` and decoding called by hand, for models of the library."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from library_models import TEXTS, WORDS, generate_by_hand, make_marian, make_t5, make_tokenizer, texts_of
from tiny_vanilla import make_loud_model
from tokenizers import processors
from transformers import BertConfig, BertModel, GenerationConfig, GPT2Config, GPT2LMHeadModel, MarianMTModel
from transformers.pipelines.pt_utils import KeyDataset, PipelineIterator
from transformers.tokenization_utils_base import TruncationStrategy

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerTokenizer
from vanilla_transformer.model import pipeline_vanilla_transformer
from vanilla_transformer.model.pipeline_vanilla_transformer import (
    ReturnType,
    SummarizationPipeline,
    Text2TextGenerationPipeline,
    TranslationPipeline,
)


@pytest.fixture(scope="module")
def marian() -> MarianMTModel:
    return make_marian()


@pytest.fixture(scope="module")
def vanilla() -> Any:
    tokens = len(VanillaTransformerTokenizer())
    return make_loud_model(VanillaTransformerConfig.from_preset("tiny", vocab_size=tokens, d_model=16))


@pytest.fixture
def translator(marian: MarianMTModel) -> TranslationPipeline:
    return TranslationPipeline(marian, make_tokenizer(), task="translation", max_new_tokens=8, num_beams=1)


@pytest.fixture
def messages() -> Iterator[list[str]]:
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Collector()
    logger = logging.getLogger(pipeline_vanilla_transformer.__name__)
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


class TestInputsAndOutputs:
    def test_shapes_are_those_of_transformers_4(self, translator: TranslationPipeline) -> None:
        single, many = translator(TEXTS[0]), translator(TEXTS)
        assert len(single) == 1
        assert texts_of(many)[0] == texts_of(single)[0]
        assert len(texts_of(many)) == len(TEXTS)
        several = translator(TEXTS, num_beams=3, num_return_sequences=2)
        assert [len(texts_of(results)) for results in several] == [2] * len(TEXTS)
        assert len(translator(TEXTS[0], num_beams=3, num_return_sequences=2)) == 2
        assert translator([TEXTS[0]]) == single
        assert translator([]) == []

    @pytest.mark.parametrize("kind", ["list", "tuple", "column", "key dataset", "generator"])
    def test_every_kind_of_input(self, kind: str, translator: TranslationPipeline) -> None:
        dataset = Dataset.from_dict({"text": TEXTS})
        inputs = {
            "list": TEXTS,
            "tuple": tuple(TEXTS),
            "column": dataset["text"],
            "key dataset": KeyDataset(dataset, "text"),
            "generator": (text for text in TEXTS),
        }[kind]
        results = translator(inputs, batch_size=2)
        if kind in {"key dataset", "generator"}:
            assert isinstance(results, PipelineIterator)
            results = [result for (result,) in results]
        expected = [generate_by_hand(translator.model, make_tokenizer(), text, max_new_tokens=8)[0] for text in TEXTS]
        assert texts_of(results) == expected

    def test_a_generator_is_read_only_as_far_as_needed(self, translator: TranslationPipeline) -> None:
        read: list[str] = []

        def endless() -> Iterator[str]:
            while True:
                read.append(TEXTS[len(read) % len(TEXTS)])
                yield read[-1]

        results = iter(translator(endless(), batch_size=2))
        assert next(results) == translator(TEXTS[0])
        assert len(read) == 2

    @settings(max_examples=15)
    @given(
        texts=st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), min_size=1, max_size=6),
        batch_size=st.integers(min_value=1, max_value=7),
    )
    def test_batching_changes_nothing(self, marian: MarianMTModel, texts: list[str], batch_size: int) -> None:
        tokenizer = make_tokenizer()
        pipe = TranslationPipeline(marian, tokenizer, max_new_tokens=6, num_beams=2)
        expected = [generate_by_hand(marian, tokenizer, text, max_new_tokens=6, num_beams=2)[0] for text in texts]
        assert texts_of(pipe(texts, batch_size=batch_size)) == expected

    def test_return_tensors(self, translator: TranslationPipeline) -> None:
        model: Any = translator.model
        expected = model.generate(**make_tokenizer()(TEXTS[0], return_tensors="pt"), max_new_tokens=8)[0]
        for arguments in ({"return_tensors": True}, {"return_type": ReturnType.TENSORS, "return_text": True}):
            (result,) = translator(TEXTS[0], **arguments)
            assert result.keys() == {"translation_token_ids"}
            assert torch.equal(result["translation_token_ids"], expected)
        with_text = translator(TEXTS[0], return_tensors=False, return_text=True)
        assert with_text == translator(TEXTS[0])
        by_default = TranslationPipeline(translator.model, make_tokenizer(), return_tensors=True, max_new_tokens=3)
        assert by_default(TEXTS[0])[0].keys() == {"translation_token_ids"}
        assert by_default(TEXTS[0], return_tensors=False)[0].keys() == {"translation_text"}

    def test_generation_outputs_with_scores(self, translator: TranslationPipeline) -> None:
        results = translator(TEXTS, return_dict_in_generate=True, output_scores=True, batch_size=2)
        assert results == translator(TEXTS)

    def test_clean_up_tokenization_spaces(
        self, translator: TranslationPipeline, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cleaned: list[bool] = []
        monkeypatch.setattr(
            translator.tokenizer, "decode", lambda _, **options: cleaned.append(options["clean_up_tokenization_spaces"])
        )
        translator(TEXTS[0])
        translator(TEXTS[0], clean_up_tokenization_spaces=True)
        assert cleaned == [False, True]

    def test_truncation(self, marian: MarianMTModel) -> None:
        text, cut = " ".join(WORDS[:12]), " ".join(WORDS[:5])
        tokenizer = make_tokenizer(model_max_length=6)
        (expected,) = generate_by_hand(marian, tokenizer, cut, max_new_tokens=6)
        pipe = TranslationPipeline(marian, tokenizer, max_new_tokens=6, num_beams=1)
        for truncation in (True, "longest_first", TruncationStrategy.LONGEST_FIRST):
            assert texts_of(pipe([text], truncation=truncation)) == [expected]
        always = TranslationPipeline(marian, tokenizer, max_new_tokens=6, num_beams=1, truncation=True)
        assert texts_of(always(text)) == [expected]
        (uncut,) = generate_by_hand(marian, tokenizer, text, max_new_tokens=6)
        assert uncut != expected
        for no_truncation in (None, False, TruncationStrategy.DO_NOT_TRUNCATE):
            assert texts_of(pipe(text, truncation=no_truncation)) == [uncut]

    def test_truncation_without_a_tokenizer_limit_uses_the_models(self) -> None:
        pipe = TranslationPipeline(make_marian(max_position_embeddings=40), make_tokenizer(), max_new_tokens=4)
        text = "alpha " * 100
        with pytest.raises(IndexError):
            pipe(text)
        assert pipe(text, truncation=True) == pipe("alpha " * 39)

    @pytest.mark.parametrize("wrong", [4, None, b"alpha", {"text": "alpha"}, [4], ["alpha", None]])
    def test_wrong_types_are_named(self, wrong: Any, translator: TranslationPipeline) -> None:
        with pytest.raises(TypeError, match=r"TranslationPipeline takes a str, .*For one column .*KeyDataset"):
            translator(wrong)

    def test_datasets_without_a_column_and_chats_are_refused(self, translator: TranslationPipeline) -> None:
        with pytest.raises(TypeError, match="For one column of a dataset pass"):
            translator(Dataset.from_dict({"text": TEXTS}))
        with pytest.raises(TypeError, match="but got Chat"):
            translator([{"role": "user", "content": "alpha"}])

    def test_an_empty_text(self, translator: TranslationPipeline) -> None:
        expected = generate_by_hand(translator.model, make_tokenizer(), "", max_new_tokens=8)
        assert texts_of(translator("")) == expected
        bare = make_tokenizer()
        bare.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A")
        with pytest.raises(ValueError, match="'' has no tokens"):
            TranslationPipeline(translator.model, bare)("")

    def test_batching_needs_a_padding_token(self, marian: MarianMTModel) -> None:
        pipe = TranslationPipeline(marian, make_tokenizer(pad_token=None), max_new_tokens=3)
        with pytest.raises(ValueError, match="pad_token"):
            pipe(TEXTS, batch_size=2)
        assert len(pipe(TEXTS)) == len(TEXTS)

    def test_models_that_cannot_serve(self, messages: list[str]) -> None:
        bert = BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        with pytest.raises(ValueError, match=r"SummarizationPipeline needs a model that can generate.*BertModel"):
            SummarizationPipeline(BertModel(bert), make_tokenizer())
        with pytest.raises(ValueError, match="needs a tokenizer, got None"):
            SummarizationPipeline(make_marian())
        assert not messages
        gpt2 = GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)
        SummarizationPipeline(GPT2LMHeadModel(gpt2), make_tokenizer())
        assert "for encoder-decoder models, GPT2LMHeadModel is none" in messages[0]


class TestWarnings:
    def test_translation_close_to_the_output_limit(self, marian: MarianMTModel, messages: list[str]) -> None:
        pipe = TranslationPipeline(marian, make_tokenizer(), num_beams=1)
        pipe("alpha " * 8, max_length=10)  # 9 tokens with the end of the sequence
        assert not messages
        pipe("alpha " * 9, max_length=10)
        pipe("alpha " * 9, max_new_tokens=10)
        pipe("alpha " * 9, generation_config=GenerationConfig(max_new_tokens=10))
        with pytest.warns(UserWarning, match="model-agnostic default `max_length`"):
            pipe("alpha " * 19, generation_config=GenerationConfig(num_beams=1))
        expected = ["Your input_length: 10 is bigger than 0.9 * max_length: 10."] * 3
        expected.append("Your input_length: 20 is bigger than 0.9 * max_length: 20.")
        assert [message.split(" If ")[0] for message in messages] == expected

    def test_summary_longer_than_its_text(self, marian: MarianMTModel, messages: list[str]) -> None:
        pipe = SummarizationPipeline(marian, make_tokenizer(), num_beams=1)
        pipe("alpha " * 9, max_length=10)
        assert not messages
        pipe("alpha " * 8, max_length=10)
        assert messages[0].startswith("Your max_length is set to 10, but your input_length is only 9.")
        assert messages[0].endswith("max_length=4).")
        assert len(messages) == 1

    def test_summary_that_cannot_be(self, marian: MarianMTModel, messages: list[str]) -> None:
        pipe = SummarizationPipeline(marian, make_tokenizer())
        assert not pipe.check_inputs(input_length=20, min_length=12, max_length=10)
        assert messages == ["Your min_length=12 is above your max_length=10."]

    @pytest.mark.parametrize(
        "pipeline_class", [Text2TextGenerationPipeline, SummarizationPipeline, TranslationPipeline]
    )
    def test_input_longer_than_the_models_positions(
        self, pipeline_class: type[Text2TextGenerationPipeline], messages: list[str]
    ) -> None:
        pipe = pipeline_class(make_marian(max_position_embeddings=10), make_tokenizer(), max_length=10)
        assert pipe.check_inputs(input_length=10, min_length=0, max_length=20) is (
            pipeline_class is not SummarizationPipeline
        )
        messages.clear()
        with pytest.raises(IndexError):  # Marian's table of positions ends there
            pipe("alpha " * 10)
        assert messages[0].startswith("Your input has 11 tokens, more than the 10 that the model is made for")
        assert "truncation=True" in messages[0]
        messages.clear()
        pipe("alpha " * 10, truncation=True)
        assert not any("made for" in message for message in messages)

    def test_input_longer_than_the_tokenizers_limit(self, marian: MarianMTModel, messages: list[str]) -> None:
        pipe = TranslationPipeline(marian, make_tokenizer(model_max_length=10), max_new_tokens=30, num_beams=1)
        pipe(["alpha " * 9, "alpha " * 10])
        assert len(messages) == 1
        assert messages[0].startswith("Your input has 11 tokens, more than the 10")

    def test_a_model_without_positions_has_no_limit(self, messages: list[str]) -> None:
        pipe = TranslationPipeline(make_t5(), make_tokenizer(), max_new_tokens=200, num_beams=1)
        assert pipe.check_inputs(input_length=10_000, min_length=0, max_length=20_000)
        assert not messages

    def test_languages_that_the_tokenizer_cannot_use(
        self, translator: TranslationPipeline, messages: list[str]
    ) -> None:
        assert translator(TEXTS[0], src_lang="en") == translator(TEXTS[0])
        assert messages == ["TokenizersBackend knows no languages, so {'src_lang': 'en'} has no effect"]


class TestOwnModels:
    """What only models of this package do."""

    TOKENIZER = VanillaTransformerTokenizer()

    @pytest.mark.parametrize("settings", [{}, {"batch_size": 3}, {"num_beams": 3, "num_return_sequences": 2}], ids=str)
    def test_a_text_without_words_stays_one(self, settings: dict[str, Any], vanilla: Any) -> None:
        pipe = TranslationPipeline(vanilla, self.TOKENIZER, max_new_tokens=6, **settings)
        texts = ["", "abc", " \t\u3000", "hi there"]
        alone = {text: pipe(text) for text in texts if text.strip()}
        empty = [{"translation_text": ""}] * settings.get("num_return_sequences", 1)
        found = [result if isinstance(result, list) else [result] for result in pipe(texts)]
        assert found == [alone.get(text, empty) for text in texts]
        assert pipe(" ") == empty

    def test_its_score_and_tokens_are_those_of_nothing(self, vanilla: Any) -> None:
        pipe = TranslationPipeline(vanilla, self.TOKENIZER, max_new_tokens=6, num_beams=2)
        (empty, full) = pipe(["  ", "abc"], return_scores=True, return_tensors=True, batch_size=2)
        assert empty["score"] == 0 > full["score"]
        assert self.TOKENIZER.decode(empty["translation_token_ids"], skip_special_tokens=True) == ""

    def test_other_models_are_asked(self, translator: TranslationPipeline) -> None:
        (made_up,) = generate_by_hand(translator.model, make_tokenizer(), " ", max_new_tokens=8)
        assert made_up
        assert texts_of(translator([" "])) == [made_up]


def test_lists_of_lists_give_lists_of_lists(translator: TranslationPipeline) -> None:
    one, two, three = translator(TEXTS[:3])
    assert translator([[TEXTS[0]], [TEXTS[1], TEXTS[2]], []], batch_size=2) == [[one], [two, three], []]
    several = translator([[TEXTS[0]]], num_beams=2, num_return_sequences=2)
    assert [[len(results) for results in inner] for inner in several] == [[2]]
    with pytest.raises(TypeError, match="takes a str"):
        translator([TEXTS[0], [TEXTS[1]]])


def test_the_framework_may_be_named_as_in_transformers_4(marian: MarianMTModel) -> None:
    pipe = TranslationPipeline(marian, make_tokenizer(), framework="pt", max_new_tokens=3)
    assert len(pipe(TEXTS)) == len(TEXTS)
    with pytest.raises(ValueError, match='framework must be "pt"'):
        TranslationPipeline(marian, make_tokenizer(), framework="tf")
