"""The restored pipelines, against tokenizer, `generate()` and decoding called by hand, for models of the library."""

import copy
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from conftest import RunPython
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from library_models import (
    MODELS,
    PREFIXES,
    TEXTS,
    WORDS,
    generate_by_hand,
    make_bart,
    make_m2m100,
    make_marian,
    make_nllb_tokenizer,
    make_t5,
    make_tokenizer,
    texts_of,
)
from tokenizers import processors
from transformers import (
    BertConfig,
    BertModel,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianMTModel,
    MarianTokenizer,
    NllbTokenizer,
    Pipeline,
    PreTrainedTokenizerFast,
    T5ForConditionalGeneration,
    pipelines,
)
from transformers.generation.streamers import BaseStreamer
from transformers.pipelines.base import PipelineRegistry, get_default_model_and_revision
from transformers.pipelines.pt_utils import KeyDataset, PipelineIterator
from transformers.tokenization_utils_base import TruncationStrategy

from vanilla_transformer import pipeline_vanilla_transformer
from vanilla_transformer.pipeline_vanilla_transformer import (
    ReturnType,
    SummarizationPipeline,
    Text2TextGenerationPipeline,
    TranslationPipeline,
    parse_language_pair,
)
from vanilla_transformer.registration import register_pipeline_tasks

pipeline: Any = pipelines.pipeline  # its types know only the tasks that the library has itself

TASKS = {
    "text2text-generation": (Text2TextGenerationPipeline, "generated"),
    "summarization": (SummarizationPipeline, "summary"),
    "translation": (TranslationPipeline, "translation"),
    "translation_en_to_de": (TranslationPipeline, "translation"),
}


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> PipelineRegistry:
    """The registry as it is without this package; the real one is left in peace."""
    own = [task for task in TASKS if "_to_" not in task]
    supported = {task: entry for task, entry in pipelines.SUPPORTED_TASKS.items() if task not in own}
    fresh = PipelineRegistry(supported_tasks=supported, task_aliases=dict(pipelines.TASK_ALIASES))
    monkeypatch.setattr(pipelines, "PIPELINE_REGISTRY", fresh)
    if hasattr(pipelines, "REMOVED_TASKS"):
        monkeypatch.setattr(pipelines, "REMOVED_TASKS", {**dict.fromkeys(own, "It is gone."), "question-answering": ""})
    return fresh


@pytest.fixture(scope="module")
def marian() -> MarianMTModel:
    return make_marian()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("marian")
    make_marian().save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def nllb() -> tuple[M2M100ForConditionalGeneration, NllbTokenizer]:
    tokenizer = make_nllb_tokenizer()
    return make_m2m100(len(tokenizer)), tokenizer


@pytest.fixture
def translator(marian: MarianMTModel) -> TranslationPipeline:
    return TranslationPipeline(marian, make_tokenizer(), task="translation", max_new_tokens=8, num_beams=1)


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """What the pipelines log, filled while the test runs."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Collector()
    logger = logging.getLogger(pipeline_vanilla_transformer.__name__)
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


class TestRegistration:
    @pytest.mark.parametrize("model_name", MODELS)
    @pytest.mark.parametrize("task", TASKS)
    def test_every_task_serves_every_model_from_a_folder(self, task: str, model_name: str, tmp_path: Path) -> None:
        model, tokenizer = MODELS[model_name](), make_tokenizer()
        model.config.task_specific_params = None
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        register_pipeline_tasks()
        pipe = pipeline(task, model=str(tmp_path), device="cpu")
        pipeline_class, name = TASKS[task]
        assert type(pipe) is pipeline_class
        assert pipe.task == task
        expected = [generate_by_hand(model, tokenizer, text, num_beams=2, max_new_tokens=6)[0] for text in TEXTS]
        assert texts_of(pipe(TEXTS, num_beams=2, max_new_tokens=6), name) == expected
        assert len(set(expected)) > 1

    def test_without_registration_the_tasks_are_unknown(self) -> None:
        for task in TASKS:
            with pytest.raises(KeyError):
                pipeline(task, model=make_marian(), tokenizer=make_tokenizer())

    def test_registering_twice_changes_nothing(self, registry: PipelineRegistry) -> None:
        register_pipeline_tasks()
        entries, check_task = dict(registry.supported_tasks), registry.check_task
        register_pipeline_tasks()
        assert registry.supported_tasks == entries
        assert all(registry.supported_tasks[task] is entry for task, entry in entries.items())
        assert registry.check_task is check_task

    @pytest.mark.parametrize("as_alias", [False, True])
    def test_a_foreign_registration_is_respected(self, registry: PipelineRegistry, as_alias: bool) -> None:
        class Foreign(TranslationPipeline):
            pass

        registry.register_pipeline("foreign-translation" if as_alias else "translation", pipeline_class=Foreign)
        if as_alias:
            registry.task_aliases["translation"] = "foreign-translation"
        register_pipeline_tasks()
        for task in ("translation", "translation_en_to_de"):
            assert type(pipeline(task, model=make_marian(), tokenizer=make_tokenizer(), device="cpu")) is Foreign
        pipe = pipeline("summarization", model=make_marian(), tokenizer=make_tokenizer(), device="cpu")
        assert type(pipe) is SummarizationPipeline

    def test_a_foreign_registration_of_one_language_pair_is_respected(self, registry: PipelineRegistry) -> None:
        class Foreign(TranslationPipeline):
            pass

        registry.register_pipeline("translation_en_to_de", pipeline_class=Foreign)
        register_pipeline_tasks()
        for task, pipeline_class in {
            "translation_en_to_de": Foreign,
            "translation_en_to_fr": TranslationPipeline,
        }.items():
            assert type(pipeline(task, model=make_marian(), tokenizer=make_tokenizer(), device="cpu")) is pipeline_class

    def test_a_later_foreign_registration_wins_as_the_library_has_it(self, registry: PipelineRegistry) -> None:
        class Foreign(TranslationPipeline):
            pass

        register_pipeline_tasks()
        registry.register_pipeline("translation", pipeline_class=Foreign)
        register_pipeline_tasks()
        for task in ("translation", "translation_en_to_de"):
            assert type(pipeline(task, model=make_marian(), tokenizer=make_tokenizer(), device="cpu")) is Foreign

    def test_a_library_that_has_the_tasks_is_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class CompleteRegistry(PipelineRegistry):
            def check_task(self, task: str) -> tuple[str, dict[str, Any], Any]:
                pair = parse_language_pair(task)
                return (
                    super().check_task(task)
                    if pair is None
                    else ("translation", self.supported_tasks["translation"], pair)
                )

        entries = {task: {"impl": Pipeline, "pt": ()} for task in TASKS if "_to_" not in task}
        complete = CompleteRegistry(supported_tasks=dict(entries), task_aliases={})
        monkeypatch.setattr(pipelines, "PIPELINE_REGISTRY", complete)
        register_pipeline_tasks()
        assert complete.supported_tasks == entries
        assert "check_task" not in vars(complete)

    def test_unknown_tasks_fail_as_before(self) -> None:
        def message(task: str) -> str:
            with pytest.raises(KeyError) as caught:
                pipeline(task, model=make_marian(), tokenizer=make_tokenizer())
            return str(caught.value)

        unknown_before, removed_before = message("no-such-task"), message("question-answering")
        register_pipeline_tasks()
        restored = ["summarization", "text2text-generation", "translation"]
        unknown_after = message("no-such-task")
        for task in restored:
            assert f"'{task}', " in unknown_after
            unknown_after = unknown_after.replace(f"'{task}', ", "")
        assert unknown_after == unknown_before
        if hasattr(pipelines, "REMOVED_TASKS"):
            assert message("question-answering") == removed_before

    @pytest.mark.parametrize(
        "task", ["translation_en_de", "translation_en_to_", "translation_a_b_to_c", "translation_"]
    )
    def test_a_malformed_translation_task_is_named(self, task: str) -> None:
        register_pipeline_tasks()
        with pytest.raises(KeyError, match=f"Unknown task {task}: .* 'translation_XX_to_YY'"):
            pipeline(task, model=make_marian(), tokenizer=make_tokenizer())

    def test_default_models_are_those_of_transformers_4(self) -> None:
        register_pipeline_tasks()
        defaults = {}
        for task in ("summarization", "text2text-generation", "translation_en_to_fr", "translation_en_to_ro"):
            _, entry, options = pipelines.check_task(task)
            defaults[task] = get_default_model_and_revision(entry, options)
        assert defaults == {
            "summarization": ("sshleifer/distilbart-cnn-12-6", "a4f8f3e"),
            "text2text-generation": ("google-t5/t5-base", "a9723ea"),
            "translation_en_to_fr": ("google-t5/t5-base", "a9723ea"),
            "translation_en_to_ro": ("google-t5/t5-base", "a9723ea"),
        }

    @pytest.mark.parametrize(
        ("task", "message"),
        [("translation", "has no default model: name one"), ("translation_de_to_zh", r"options \('de', 'zh'\)")],
    )
    def test_without_a_model_or_a_default_the_error_is_clear(self, task: str, message: str) -> None:
        register_pipeline_tasks()
        with pytest.raises(ValueError, match=message):
            pipeline(task)

    def test_a_saved_pipeline_asks_for_no_remote_code(self, tmp_path: Path) -> None:
        register_pipeline_tasks()
        pipe = pipeline("translation", model=make_marian(), tokenizer=make_tokenizer(), device="cpu")
        pipe.save_pretrained(tmp_path)
        assert not list(tmp_path.glob("*.py"))
        assert "custom_pipelines" not in json.loads((tmp_path / "config.json").read_text())
        again = pipeline("translation", model=str(tmp_path), device="cpu")
        assert again(TEXTS, max_new_tokens=5) == pipe(TEXTS, max_new_tokens=5)


class TestOtherProcesses:
    SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
{steps}
from transformers import pipeline
for task, expected in {{"translation": "{owner}", "translation_en_to_de": "{owner}",
                        "summarization": "SummarizationPipeline",
                        "text2text-generation": "Text2TextGenerationPipeline"}}.items():
    found = type(pipeline(task, model=sys.argv[2], device="cpu")).__name__
    assert found == expected, (task, found, expected)
"""
    OURS = "from vanilla_transformer.registration import register_pipeline_tasks; register_pipeline_tasks()"
    FOREIGN = """
from transformers import Pipeline, pipelines, AutoModelForSeq2SeqLM
class Foreign(Pipeline):
    _load_tokenizer = True
    _load_processor = _load_image_processor = _load_video_processor = _load_feature_extractor = False
    def _sanitize_parameters(self, **kwargs): return {}, {}, {}
    def preprocess(self, text): return text
    def _forward(self, inputs): return inputs
    def postprocess(self, outputs): return outputs
pipelines.PIPELINE_REGISTRY.register_pipeline("translation", pipeline_class=Foreign, pt_model=AutoModelForSeq2SeqLM)
"""

    @pytest.mark.parametrize(
        ("steps", "owner"),
        [
            ([OURS, OURS], "TranslationPipeline"),
            ([FOREIGN, OURS], "Foreign"),
        ],
        ids=["twice", "after another plugin"],
    )
    def test_order_of_imports(
        self, steps: list[str], owner: str, folder: Path, run_python: RunPython, repository_root: Path
    ) -> None:
        script = self.SCRIPT.format(steps="\n".join(steps), owner=owner)
        run_python("-c", script, repository_root, folder)

    def test_a_checkpoint_that_carries_the_file_needs_no_package(
        self, folder: Path, tmp_path: Path, run_python: RunPython, marian: MarianMTModel
    ) -> None:
        checkpoint = tmp_path / "checkpoint"
        shutil.copytree(folder, checkpoint)
        shutil.copy(str(pipeline_vanilla_transformer.__file__), checkpoint)
        entry = {"pt": ["AutoModelForSeq2SeqLM"], "type": "text"}
        entry["impl"] = "pipeline_vanilla_transformer.TranslationPipeline"
        config = json.loads((checkpoint / "config.json").read_text())
        config["custom_pipelines"] = {"translation": entry, "translation_en_to_de": entry}
        (checkpoint / "config.json").write_text(json.dumps(config))
        script = """
import json, sys
sys.modules["vanilla_transformer"] = None  # importing it fails
from transformers import pipeline
for task in ("translation", "translation_en_to_de"):
    pipe = pipeline(task, model=sys.argv[1], device="cpu", trust_remote_code=True)
    assert type(pipe).__module__.startswith("transformers_modules."), type(pipe)
    print(json.dumps(pipe(sys.argv[2:], max_new_tokens=6, num_beams=2, batch_size=2)))
"""
        printed = run_python("-c", script, checkpoint, *TEXTS).stdout.splitlines()
        expected = TranslationPipeline(marian, make_tokenizer())(TEXTS, max_new_tokens=6, num_beams=2)
        assert [json.loads(line) for line in printed] == [expected, expected]


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

    @pytest.mark.parametrize("kind", ["list", "tuple", "column", "key dataset", "generator", "iterator"])
    def test_every_kind_of_input(self, kind: str, translator: TranslationPipeline) -> None:
        dataset = Dataset.from_dict({"text": TEXTS})
        inputs = {
            "list": TEXTS,
            "tuple": tuple(TEXTS),
            "column": dataset["text"],
            "key dataset": KeyDataset(dataset, "text"),
            "generator": (text for text in TEXTS),
            "iterator": iter(TEXTS),
        }[kind]
        results = translator(inputs, batch_size=2)
        if kind in {"key dataset", "generator", "iterator"}:
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

    def test_batch_size_of_the_constructor_reaches_the_model(
        self, marian: MarianMTModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[int] = []
        untyped: Any = marian
        generate = untyped.generate

        def counted(**kwargs: Any) -> Any:
            seen.append(len(kwargs["input_ids"]))
            return generate(**kwargs)

        monkeypatch.setattr(marian, "generate", counted)
        pipe = TranslationPipeline(marian, make_tokenizer(), max_new_tokens=3, batch_size=3)
        pipe(TEXTS)
        assert seen == [3, 1]

    def test_return_tensors(self, translator: TranslationPipeline) -> None:
        model: Any = translator.model
        expected = model.generate(**make_tokenizer()(TEXTS[0], return_tensors="pt"), max_new_tokens=8)[0]
        for arguments in ({"return_tensors": True}, {"return_type": ReturnType.TENSORS, "return_text": True}):
            (result,) = translator(TEXTS[0], **arguments)
            assert result.keys() == {"translation_token_ids"}
            assert torch.equal(result["translation_token_ids"], expected)
        with_text = translator(TEXTS[0], return_tensors=False, return_text=True)
        assert with_text == translator(TEXTS[0])
        by_default = TranslationPipeline(translator.model, make_tokenizer(), return_tensors=True)
        assert by_default(TEXTS[0])[0].keys() == {"translation_token_ids"}
        assert by_default(TEXTS[0], return_tensors=False)[0].keys() == {"translation_text"}

    def test_generation_outputs_with_scores(self, translator: TranslationPipeline) -> None:
        results = translator(TEXTS, return_dict_in_generate=True, output_scores=True, batch_size=2)
        assert results == translator(TEXTS)

    def test_clean_up_tokenization_spaces(self, marian: MarianMTModel) -> None:
        class Spy(PreTrainedTokenizerFast):
            cleaned: list[bool | None] = []

            def decode(self, *args: Any, clean_up_tokenization_spaces: bool | None = None, **kwargs: Any) -> Any:
                self.cleaned.append(clean_up_tokenization_spaces)
                return super().decode(*args, clean_up_tokenization_spaces=clean_up_tokenization_spaces, **kwargs)

        backend = make_tokenizer().backend_tokenizer
        pipe = TranslationPipeline(marian, Spy(tokenizer_object=backend, pad_token="<pad>"), max_new_tokens=3)
        pipe(TEXTS[0])
        pipe(TEXTS[0], clean_up_tokenization_spaces=True)
        assert Spy.cleaned == [False, True]

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

    @pytest.mark.parametrize("wrong", [4, None, b"alpha", {"text": "alpha"}, [4], ["alpha", None], [["alpha"]]])
    def test_wrong_types_are_named(self, wrong: Any, translator: TranslationPipeline) -> None:
        with pytest.raises(TypeError, match=r"TranslationPipeline takes a str, .*KeyDataset"):
            translator(wrong)

    def test_a_dataset_without_a_column_is_refused(self, translator: TranslationPipeline) -> None:
        with pytest.raises(TypeError, match="For one column of a dataset pass"):
            translator(Dataset.from_dict({"text": TEXTS}))

    def test_a_chat_is_refused(self, translator: TranslationPipeline) -> None:
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
        small: dict[str, Any] = {
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "intermediate_size": 8,
        }
        with pytest.raises(ValueError, match=r"SummarizationPipeline needs a model that can generate.*BertModel"):
            SummarizationPipeline(BertModel(BertConfig(vocab_size=8, **small)), make_tokenizer())
        with pytest.raises(ValueError, match="needs a tokenizer, got None"):
            SummarizationPipeline(make_marian())
        assert not messages
        SummarizationPipeline(
            GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)), make_tokenizer()
        )
        assert "for encoder-decoder models, GPT2LMHeadModel is none" in messages[0]


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

    def test_the_defaults_are_those_of_transformers_4(self) -> None:
        model, tokenizer = make_bart(), make_tokenizer()
        expected = generate_by_hand(model, tokenizer, TEXTS[0], num_beams=4, max_new_tokens=30)
        assert (
            texts_of(Text2TextGenerationPipeline(model, tokenizer, max_new_tokens=30)(TEXTS[0]), "generated")
            == expected
        )

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

    def test_sampling_equals_sampling_by_hand(self, translator: TranslationPipeline) -> None:
        torch.manual_seed(3)
        expected = generate_by_hand(
            translator.model, make_tokenizer(), TEXTS[0], do_sample=True, num_return_sequences=3, max_new_tokens=8
        )
        torch.manual_seed(3)
        assert texts_of(translator(TEXTS[0], do_sample=True, num_return_sequences=3)) == expected

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
        expected = [
            generate_by_hand(model, tokenizer, PREFIXES[task] + text, max_length=12, num_beams=3, early_stopping=True)[
                0
            ]
            for text in TEXTS
        ]
        for _ in range(2):  # the second pipeline finds the model's config as the first did
            pipe = pipeline(task, model=model, tokenizer=tokenizer, device="cpu")
            assert texts_of(pipe(TEXTS, batch_size=2), name) == expected
        assert model.config.task_specific_params == before
        assert expected != [generate_by_hand(model, tokenizer, text, max_length=12, num_beams=3)[0] for text in TEXTS]

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

    def test_language_arguments_choose_the_pair(self, messages: list[str]) -> None:
        register_pipeline_tasks()
        model, tokenizer = make_t5(), make_tokenizer()
        pipe = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", src_lang="en", tgt_lang="fr")
        french = pipeline("translation_en_to_fr", model=model, tokenizer=tokenizer, device="cpu")
        assert pipe(TEXTS[1], max_length=30) == french(TEXTS[1], max_length=30)
        assert not messages
        pipeline("translation", model=model, tokenizer=tokenizer, device="cpu", src_lang="en", tgt_lang="zh")
        assert "{'src_lang': 'en', 'tgt_lang': 'zh'} has no effect" in messages[0]


class TestLanguages:
    TEXT = "a bad cab"

    @staticmethod
    def by_hand(model: Any, tokenizer: Any, text: str, src_lang: str, target_id: int, **kwargs: Any) -> str:
        tokenizer.src_lang = src_lang
        return generate_by_hand(model, tokenizer, text, forced_bos_token_id=target_id, **kwargs)[0]

    @pytest.mark.parametrize("batch_size", [1, 2])
    def test_nllb(self, nllb: tuple[Any, Any], batch_size: int) -> None:
        model, tokenizer = nllb
        pipe = TranslationPipeline(
            model, tokenizer, src_lang="eng_Latn", tgt_lang="deu_Latn", max_new_tokens=6, num_beams=1
        )
        texts = [self.TEXT, "face", "deed a bead"]
        found = {}
        for languages in ({}, {"tgt_lang": "fra_Latn"}, {"src_lang": "fra_Latn"}):
            source, target = {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn", **languages}.values()
            target_id = tokenizer.convert_tokens_to_ids(target)
            expected = [self.by_hand(model, tokenizer, text, source, target_id, max_new_tokens=6) for text in texts]
            found[source, target] = texts_of(pipe(texts, batch_size=batch_size, **languages))
            assert found[source, target] == expected
        assert len(set(map(tuple, found.values()))) == 3

    def test_a_batch_shares_one_language_token(self, nllb: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        model, tokenizer = nllb
        found: list[Any] = []
        generate = model.generate

        def recorded(**kwargs: Any) -> Any:
            found.append(kwargs["forced_bos_token_id"])
            return generate(**kwargs)

        monkeypatch.setattr(model, "generate", recorded)
        pipe = TranslationPipeline(model, tokenizer, src_lang="eng_Latn", tgt_lang="fra_Latn", max_new_tokens=3)
        pipe([self.TEXT, "face", "bead"], batch_size=2)
        assert found == [tokenizer.convert_tokens_to_ids("fra_Latn")] * 2

    def test_language_arguments_come_before_the_task_name(self, nllb: tuple[Any, Any]) -> None:
        model, tokenizer = nllb
        languages = {"src_lang": "eng_Latn", "tgt_lang": "fra_Latn"}
        expected = TranslationPipeline(model, tokenizer, max_new_tokens=4)(self.TEXT, **languages)
        named = TranslationPipeline(model, tokenizer, task="translation_en_to_de", max_new_tokens=4, **languages)
        assert named(self.TEXT) == expected

    def test_a_users_generation_config_keeps_the_language(self, nllb: tuple[Any, Any]) -> None:
        model, tokenizer = nllb
        pipe = TranslationPipeline(model, tokenizer, src_lang="eng_Latn", tgt_lang="deu_Latn")
        config = GenerationConfig(max_new_tokens=5, num_beams=2)
        ids = pipe(self.TEXT, generation_config=config, return_tensors=True)[0]["translation_token_ids"]
        assert ids[1] == tokenizer.convert_tokens_to_ids("deu_Latn")
        assert config.forced_bos_token_id is None
        ids = pipe(self.TEXT, forced_bos_token_id=7, max_new_tokens=3, return_tensors=True)[0]["translation_token_ids"]
        assert ids[1] == 7

    @pytest.mark.parametrize(
        ("languages", "message"),
        [
            ({}, "requires a `src_lang` and a `tgt_lang`"),
            ({"src_lang": "eng_Latn"}, "requires a `src_lang` and a `tgt_lang`"),
            ({"src_lang": "en", "tgt_lang": "fra_Latn"}, "src_lang='en' is not a language code .* NllbTokenizer"),
            ({"src_lang": "eng_Latn", "tgt_lang": "xx"}, "tgt_lang='xx' is not a language code .* NllbTokenizer"),
        ],
    )
    def test_missing_and_unknown_languages(
        self, nllb: tuple[Any, Any], languages: dict[str, str], message: str
    ) -> None:
        model, tokenizer = nllb
        with pytest.raises(ValueError, match=message):
            TranslationPipeline(model, tokenizer)(self.TEXT, **languages)

    def test_m2m100_reads_the_task_name(self, tmp_path: Path) -> None:
        train_sentencepiece(tmp_path / "pieces")
        processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "pieces.model"))
        pieces = [processor.id_to_piece(index) for index in range(3, processor.get_piece_size())]
        vocabulary = {piece: index for index, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *pieces])}
        (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
        tokenizer = M2M100Tokenizer(vocab_file=tmp_path / "vocab.json", spm_file=str(tmp_path / "pieces.model"))
        model = make_m2m100(1 + max(map(tokenizer.get_lang_id, tokenizer.lang_code_to_token)))
        register_pipeline_tasks()
        pipe = pipeline("translation_en_to_de", model=model, tokenizer=tokenizer, device="cpu", max_new_tokens=6)
        for languages in ({}, {"tgt_lang": "fr"}, {"src_lang": "zh", "tgt_lang": "en"}):
            source, target = {"src_lang": "en", "tgt_lang": "de", **languages}.values()
            expected = self.by_hand(
                model, tokenizer, TEXTS[0], source, tokenizer.get_lang_id(target), max_new_tokens=6, num_beams=4
            )
            assert texts_of(pipe([TEXTS[0]], **languages)) == [expected]
        with pytest.raises(ValueError, match="M2M100Tokenizer does not know the language 'xx'"):
            pipe(TEXTS[0], tgt_lang="xx")

    # The tokenizer's own advice to install another package.
    @pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
    def test_marian_tokenizer(self, tmp_path: Path) -> None:
        for side in ("source", "target"):
            train_sentencepiece(tmp_path / side)
            (tmp_path / f"{side}.model").rename(tmp_path / f"{side}.spm")
        processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "source.spm"))
        pieces = [processor.id_to_piece(index) for index in range(3, processor.get_piece_size())]
        vocabulary = {piece: index for index, piece in enumerate(["</s>", "<unk>", *pieces, "<pad>"])}
        (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
        tokenizer = MarianTokenizer(
            source_spm=str(tmp_path / "source.spm"),
            target_spm=str(tmp_path / "target.spm"),
            vocab=str(tmp_path / "vocab.json"),
        )
        pad = len(vocabulary) - 1
        model = make_marian(vocab_size=len(vocabulary), eos_token_id=0, pad_token_id=pad, decoder_start_token_id=pad)
        pipe = TranslationPipeline(model, tokenizer, task="translation_en_to_de", max_new_tokens=8, num_beams=2)
        expected = [generate_by_hand(model, tokenizer, text, max_new_tokens=8, num_beams=2)[0] for text in TEXTS]
        assert texts_of(pipe(TEXTS, batch_size=3)) == expected

    def test_languages_that_the_tokenizer_cannot_use(
        self, translator: TranslationPipeline, messages: list[str]
    ) -> None:
        assert translator(TEXTS[0], src_lang="en") == translator(TEXTS[0])
        assert messages == ["TokenizersBackend knows no languages, so {'src_lang': 'en'} has no effect"]

    @pytest.mark.parametrize(
        ("task", "pair"),
        [
            ("translation_en_to_de", ("en", "de")),
            ("translation_zh-Hans_to_pt-BR", ("zh-Hans", "pt-BR")),
            ("translation", None),
            ("translation_en_de", None),
            ("translation_eng_Latn_to_fra_Latn", None),
            ("my_translation_en_to_de", None),
        ],
    )
    def test_parse_language_pair(self, task: str, pair: tuple[str, str] | None) -> None:
        assert parse_language_pair(task) == pair


def train_sentencepiece(prefix: Path) -> None:
    corpus = prefix.with_suffix(".txt")
    corpus.write_text("\n".join(f"{first} {second}" for first in WORDS for second in WORDS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(prefix), vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )


class TestWarnings:
    def test_an_ordinary_call_is_silent(self, translator: TranslationPipeline, messages: list[str]) -> None:
        translator(TEXTS, max_new_tokens=20)
        assert not messages

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
