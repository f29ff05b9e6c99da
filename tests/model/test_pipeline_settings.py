"""What the restored pipelines tell `generate()`, out of call, constructor, task and model."""

import copy
from typing import Any

import pytest
import torch
from library_models import PREFIXES, TEXTS, generate_by_hand, make_marian, make_t5, make_tokenizer, texts_of
from tiny_vanilla import make_model as make_vanilla
from transformers import GenerationConfig, MarianMTModel, T5ForConditionalGeneration, pipelines
from transformers.generation.streamers import BaseStreamer

from vanilla_transformer.model.pipeline_vanilla_transformer import (
    SummarizationPipeline,
    Text2TextGenerationPipeline,
    TranslationPipeline,
)
from vanilla_transformer.registration import register_pipeline_tasks

pipeline: Any = pipelines.pipeline  # its types know only the tasks that the library has itself
pytestmark = pytest.mark.usefixtures("registry")


@pytest.fixture(scope="module")
def marian() -> MarianMTModel:
    return make_marian()


@pytest.fixture
def translator(marian: MarianMTModel) -> TranslationPipeline:
    return TranslationPipeline(marian, make_tokenizer(), task="translation", max_new_tokens=8, num_beams=1)


class TestGenerationSettings:
    @pytest.fixture
    def settings_seen(self, monkeypatch: pytest.MonkeyPatch) -> list[GenerationConfig]:
        """The settings that each call of generate() ended up with, as the library itself merged them."""
        seen: list[GenerationConfig] = []
        prepare = MarianMTModel._prepare_generation_config

        def record(model: Any, *args: Any, **kwargs: Any) -> Any:
            prepared = prepare(model, *args, **kwargs)
            seen.append(copy.deepcopy(prepared[0]))
            return prepared

        for model_class in (MarianMTModel, T5ForConditionalGeneration):
            monkeypatch.setattr(model_class, "_prepare_generation_config", record)
        return seen

    def test_order_of_precedence(self, settings_seen: list[GenerationConfig]) -> None:
        def settings_of(
            model_settings: dict[str, Any], constructor: dict[str, Any], call: dict[str, Any]
        ) -> dict[str, Any]:
            model = make_marian()
            model.generation_config.update(**model_settings)
            TranslationPipeline(model, make_tokenizer(), **constructor)(TEXTS[0], **call)
            final = settings_seen[-1]
            return {key: getattr(final, key) for key in ("num_beams", "max_new_tokens", "max_length", "length_penalty")}

        nothing = settings_of({}, {}, {})
        assert (nothing["num_beams"], nothing["max_new_tokens"]) == (4, 256)
        model = settings_of({"num_beams": 1, "max_length": 9}, {}, {})
        assert (model["num_beams"], model["max_new_tokens"], model["max_length"]) == (1, None, 9)
        constructor = settings_of({"num_beams": 1, "max_length": 9}, {"num_beams": 2, "length_penalty": 0.6}, {})
        assert (constructor["num_beams"], constructor["max_length"], constructor["length_penalty"]) == (2, 9, 0.6)
        call = settings_of({"num_beams": 1}, {"num_beams": 2, "max_length": 9}, {"num_beams": 3})
        assert (call["num_beams"], call["max_new_tokens"], call["max_length"]) == (3, None, 9)
        config = GenerationConfig(max_new_tokens=4)
        whole = settings_of({"length_penalty": 0.8}, {"num_beams": 2}, {"generation_config": config})
        assert (whole["num_beams"], whole["max_new_tokens"], whole["length_penalty"]) == (1, 4, 0.8)
        in_constructor = settings_of({"length_penalty": 0.8}, {"generation_config": config}, {})
        assert in_constructor == whole
        assert config.to_diff_dict().keys() == {"max_new_tokens", "transformers_version"}

    def test_the_tokenizers_padding_token_stands_in(self, settings_seen: list[GenerationConfig]) -> None:
        model = make_marian()
        model.generation_config.pad_token_id = None
        pipe = TranslationPipeline(model, make_tokenizer(), max_new_tokens=3)
        settings_seen.clear()  # older base classes merge settings of their own when they are built
        pipe(TEXTS[0])
        pipe(TEXTS[0], generation_config=GenerationConfig(max_new_tokens=3))
        pipe(TEXTS[0], generation_config=GenerationConfig(max_new_tokens=3, pad_token_id=5))
        assert [settings.pad_token_id for settings in settings_seen] == [1, 1, 5]

    def test_any_argument_of_generate_is_passed_on(self, translator: TranslationPipeline) -> None:
        allowed = make_tokenizer()("lima oscar", add_special_tokens=False)["input_ids"]
        (result,) = translator(TEXTS[0], prefix_allowed_tokens_fn=lambda batch, ids: allowed)
        assert set(result["translation_text"].split()) <= {"lima", "oscar"}
        with pytest.raises(ValueError, match="no_such_argument"):
            translator(TEXTS[0], no_such_argument=1)

    @pytest.mark.parametrize("num_beams", [1, 2])
    def test_stop_sequence(self, num_beams: int, translator: TranslationPipeline) -> None:
        free = texts_of(translator(TEXTS[2], num_beams=num_beams))[0].split()
        stop = free[2]
        for stop_sequence in (stop, ["never", stop]):
            stopped = texts_of(translator(TEXTS[2], num_beams=num_beams, stop_sequence=stop_sequence))[0].split()
            assert stopped[-1] == stop
            assert stop not in stopped[:-1]
        if num_beams == 1:
            assert stopped == free[: len(stopped)]

    def test_streamer_and_assistant_need_no_num_beams(self, marian: MarianMTModel) -> None:
        class Collector(BaseStreamer):
            def __init__(self) -> None:
                self.tokens: list[int] = []

            def put(self, value: torch.Tensor) -> None:
                self.tokens += value.flatten().tolist()

            def end(self) -> None:
                pass

        pipe = TranslationPipeline(marian, make_tokenizer(), max_new_tokens=6)
        greedy = pipe(TEXTS[0], num_beams=1, return_tensors=True)[0]["translation_token_ids"]
        streamer = Collector()
        streamed = pipe(TEXTS[0], streamer=streamer, return_tensors=True)[0]["translation_token_ids"]
        assert streamer.tokens == streamed.tolist() == greedy.tolist()
        assisted = TranslationPipeline(marian, make_tokenizer(), max_new_tokens=6, assistant_model=make_marian())
        assert assisted(TEXTS[0], return_tensors=True)[0]["translation_token_ids"].tolist() == greedy.tolist()


class TestTaskSpecificParams:
    @pytest.mark.parametrize("task", PREFIXES)
    def test_prefix_and_settings_of_the_task(self, task: str) -> None:
        model, tokenizer = make_t5(), make_tokenizer()
        before = copy.deepcopy(model.config.task_specific_params)
        register_pipeline_tasks()
        name = "summary" if task == "summarization" else "translation"
        search = {"max_length": 12, "num_beams": 3, "early_stopping": True}
        expected = [generate_by_hand(model, tokenizer, PREFIXES[task] + text, **search)[0] for text in TEXTS]
        for _ in range(2):  # the second pipeline finds the model's config as the first did
            pipe = pipeline(task, model=model, tokenizer=tokenizer, device="cpu")
            assert texts_of(pipe(TEXTS, batch_size=2), name) == expected
        assert model.config.task_specific_params == before
        assert expected != [generate_by_hand(model, tokenizer, text, **search)[0] for text in TEXTS]

    @pytest.mark.parametrize("limit_of_task", ["max_length", "max_new_tokens"])
    @pytest.mark.parametrize("limit", ["max_length", "max_new_tokens"])
    def test_arguments_of_the_user_come_first(self, limit: str, limit_of_task: str) -> None:
        model, tokenizer = make_t5(), make_tokenizer()
        model.config.task_specific_params["summarization"] = {limit_of_task: 12, "num_beams": 3}
        (expected,) = generate_by_hand(model, tokenizer, TEXTS[0], num_beams=2, **{limit: 5})
        arguments: dict[str, Any] = {"num_beams": 2, limit: 5}
        in_call = SummarizationPipeline(model, tokenizer, task="summarization")(TEXTS[0], **arguments)
        in_constructor = SummarizationPipeline(model, tokenizer, task="summarization", **arguments)(TEXTS[0])
        assert texts_of(in_call, "summary") == texts_of(in_constructor, "summary") == [expected]
        (longer,) = generate_by_hand(model, tokenizer, TEXTS[0], num_beams=2, max_length=12)
        assert longer != expected

    def test_a_task_without_params_has_no_prefix(self) -> None:
        model, tokenizer = make_t5(), make_tokenizer()
        pipe = TranslationPipeline(model, tokenizer, task="translation_de_to_en", max_new_tokens=6, num_beams=1)
        assert texts_of(pipe(TEXTS[0])) == generate_by_hand(model, tokenizer, TEXTS[0], max_new_tokens=6)

    def test_prefix_of_the_config(self) -> None:
        model, tokenizer = make_marian(), make_tokenizer()
        model.config.prefix = "oscar "
        pipe = Text2TextGenerationPipeline(model, tokenizer, max_new_tokens=6, num_beams=1)
        expected = generate_by_hand(model, tokenizer, "oscar " + TEXTS[0], max_new_tokens=6)
        assert texts_of(pipe(TEXTS[0]), "generated") == expected

    def test_translation_alone_takes_the_first_pair(self) -> None:
        register_pipeline_tasks()
        model, tokenizer = make_t5(), make_tokenizer()
        with pytest.warns(UserWarning, match="'translation_en_to_de' is used, the first"):
            pipe = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu")
        assert pipe.task == "translation_en_to_de"
        assert pipe(TEXTS) == pipeline(pipe.task, model=model, tokenizer=tokenizer, device="cpu")(TEXTS)

    def test_language_arguments_choose_the_pair(self, caplog: pytest.LogCaptureFixture) -> None:
        register_pipeline_tasks()
        model, tokenizer = make_t5(), make_tokenizer()
        pipe = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", src_lang="en", tgt_lang="fr")
        french = pipeline("translation_en_to_fr", model=model, tokenizer=tokenizer, device="cpu")
        assert pipe(TEXTS[1], max_length=30) == french(TEXTS[1], max_length=30)
        assert not caplog.messages
        pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", src_lang="en", tgt_lang="zh")
        assert "{'src_lang': 'en', 'tgt_lang': 'zh'} has no effect" in caplog.messages[0]


class TestLimits:
    """Each limit has two names; what a call says under one must not be undone by what the model has under the other."""

    SAVED = ({"max_length": 12}, {"max_new_tokens": 11}, {"max_length": 20, "max_new_tokens": 11})
    GIVEN = ({"max_length": 6}, {"max_new_tokens": 5})

    @staticmethod
    def make(kind: str, **saved: Any) -> Any:
        """A model that writes until a limit stops it."""
        model: Any = make_marian() if kind == "marian" else make_vanilla(vocab_size=len(make_tokenizer()))
        model.generation_config.update(num_beams=1, **saved)
        model.generation_config.eos_token_id = None
        return model

    @staticmethod
    def count(pipe: Text2TextGenerationPipeline, **call: Any) -> int:
        (result,) = pipe(TEXTS[0], return_tensors=True, **call)
        return len(result[f"{pipe.return_name}_token_ids"])

    @pytest.mark.parametrize("given", GIVEN, ids=str)
    @pytest.mark.parametrize("saved", SAVED, ids=str)
    @pytest.mark.parametrize("kind", ["marian", "vanilla"])
    def test_the_nearest_one_counts(self, kind: str, saved: dict[str, int], given: dict[str, Any]) -> None:
        model, tokenizer = self.make(kind, **saved), make_tokenizer()
        for pipeline_class in (SummarizationPipeline, TranslationPipeline, Text2TextGenerationPipeline):
            pipe = pipeline_class(model, tokenizer)
            assert self.count(pipe) == 12
            assert self.count(pipe, **given) == 6
            assert self.count(pipe, generation_config=GenerationConfig(**given)) == 6
            assert self.count(pipe) == 12, "the model keeps its own"
        for constructor in (given, {"generation_config": GenerationConfig(**given)}):
            pipe = TranslationPipeline(model, tokenizer, **constructor)
            assert self.count(pipe) == 6
            for other in ({"max_length": 9}, {"max_new_tokens": 8}):
                assert self.count(pipe, **other) == 9
        model.config.task_specific_params = {"summarization": given}
        assert self.count(SummarizationPipeline(model, tokenizer, task="summarization")) == 6

    @pytest.mark.parametrize("given", [{"min_length": 4}, {"min_new_tokens": 3}], ids=str)
    @pytest.mark.parametrize("saved", [{"min_length": 8}, {"min_new_tokens": 7}], ids=str)
    def test_so_does_the_nearest_least_length(self, saved: dict[str, int], given: dict[str, int]) -> None:
        model, tokenizer = make_marian(), make_tokenizer()
        model.generation_config.update(num_beams=1, max_new_tokens=15, sequence_bias={(2,): 1000.0}, **saved)
        pipe = SummarizationPipeline(model, tokenizer)
        assert self.count(pipe) == 9, "the start symbol, seven tokens, and the end, as early as it may be"
        assert self.count(pipe, **given) == 5
        assert self.count(pipe, generation_config=GenerationConfig(**given)) == 5

    def test_a_prompt_counts_for_lengths_that_include_it(self) -> None:
        model, tokenizer = self.make("marian", max_new_tokens=11), make_tokenizer()
        prompt = torch.tensor([[model.config.decoder_start_token_id, 5, 6]])
        pipe = TranslationPipeline(model, tokenizer)
        for call in ({"max_length": 6}, {"generation_config": GenerationConfig(max_length=6)}):
            assert self.count(pipe, decoder_input_ids=prompt, **call) == 6

    def test_a_length_without_room_is_named(self) -> None:
        pipe = TranslationPipeline(self.make("vanilla", max_new_tokens=11), make_tokenizer())
        with pytest.raises(ValueError, match="max_length=1 leaves no room behind the 1 token"):
            pipe(TEXTS[0], generation_config=GenerationConfig(max_length=1))

    def test_warnings_know_them(self, caplog: pytest.LogCaptureFixture) -> None:
        pipe = SummarizationPipeline(self.make("vanilla", max_new_tokens=128), make_tokenizer())
        pipe(TEXTS[0], max_length=4)
        assert not caplog.messages
        pipe(TEXTS[0], max_length=7)
        assert "Your max_length is set to 7, but your input_length is only 4" in caplog.text
