"""The restored tasks of `pipeline()`: what registering them changes, here and in other processes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from library_models import MODELS, TEXTS, generate_by_hand, make_marian, make_tokenizer, texts_of
from remote_process import RemotePython
from transformers import pipelines
from transformers.pipelines.base import PipelineRegistry, get_default_model_and_revision

from vanilla_transformer.model import pipeline_vanilla_transformer
from vanilla_transformer.model.pipeline_vanilla_transformer import (
    SummarizationPipeline,
    Text2TextGenerationPipeline,
    TranslationPipeline,
)
from vanilla_transformer.registration import register_pipeline_tasks

pipeline: Any = pipelines.pipeline  # its types know only the tasks that the library has itself
pytestmark = pytest.mark.usefixtures("registry")

TASKS = {
    "text2text-generation": (Text2TextGenerationPipeline, "generated"),
    "summarization": (SummarizationPipeline, "summary"),
    "translation": (TranslationPipeline, "translation"),
    "translation_en_to_de": (TranslationPipeline, "translation"),
}


class Foreign(TranslationPipeline):
    """What another package registers."""


class TestRegistration:
    @pytest.mark.parametrize(("task", "model_name"), [*zip(TASKS, [*MODELS, "marian"], strict=True)])
    def test_every_task_serves_models_from_a_folder(self, task: str, model_name: str, tmp_path: Path) -> None:
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

    @pytest.mark.parametrize("kind", ["before", "after", "alias", "one pair"])
    def test_a_foreign_registration_is_respected(self, registry: PipelineRegistry, kind: str) -> None:
        if kind == "after":  # a later one wins, as the library has it
            register_pipeline_tasks()
        name = {"alias": "foreign-translation", "one pair": "translation_en_to_de"}.get(kind, "translation")
        registry.register_pipeline(name, pipeline_class=Foreign)
        if kind == "alias":
            registry.task_aliases["translation"] = name
        register_pipeline_tasks()
        model, tokenizer = make_marian(), make_tokenizer()
        others = TranslationPipeline if kind == "one pair" else Foreign
        expected = {"translation_en_to_de": Foreign, "translation_en_to_fr": others, "translation": others}
        for task, pipeline_class in {**expected, "summarization": SummarizationPipeline}.items():
            assert type(pipeline(task, model=model, tokenizer=tokenizer, device="cpu")) is pipeline_class

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
        ("task", "message"), [("translation", "defaults can't be"), ("translation_de_to_zh", r"options \('de', 'zh'\)")]
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


def test_a_checkpoint_that_carries_the_file_needs_no_package(tmp_path: Path, without_the_package: RemotePython) -> None:
    make_marian().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    shutil.copy(str(pipeline_vanilla_transformer.__file__), tmp_path)
    entry = {"pt": ["AutoModelForSeq2SeqLM"], "type": "text"}
    entry["impl"] = "pipeline_vanilla_transformer.TranslationPipeline"
    config = json.loads((tmp_path / "config.json").read_text())
    config["custom_pipelines"] = {"translation": entry, "translation_en_to_de": entry}
    (tmp_path / "config.json").write_text(json.dumps(config))
    program = """
from transformers import pipeline
pipes = [
    pipeline(task, model=folder, device="cpu", trust_remote_code=True)
    for task in ("translation", "translation_en_to_de")
]
assert all(type(pipe).__module__.startswith("transformers_modules.") for pipe in pipes)
[pipe(texts, max_new_tokens=6, num_beams=2, batch_size=2) for pipe in pipes]
"""
    expected = TranslationPipeline(make_marian(), make_tokenizer())(TEXTS, max_new_tokens=6, num_beams=2)
    assert without_the_package.run(program, folder=str(tmp_path), texts=TEXTS) == [expected, expected]
