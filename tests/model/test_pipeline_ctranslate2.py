"""Pipelines whose `compute_type` has CTranslate2 compute: the same as with torch, by every way through a pipeline."""

import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from library_models import make_marian
from library_models import make_tokenizer as make_marian_tokenizer
from tiny_vanilla import make_model
from transformers import GenerationConfig, pipelines
from transformers.pipelines.pt_utils import KeyDataset

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.export.ctranslate2_model import CTranslate2Model
from vanilla_transformer.inference.glossary import TranslationPipeline as PipelineWithGlossary
from vanilla_transformer.model.pipeline_vanilla_transformer import (
    SummarizationPipeline,
    Text2TextGenerationPipeline,
    TranslationPipeline,
)

pytest.importorskip("ctranslate2")
pipeline: Any = pipelines.pipeline  # its types know only the tasks that the library has itself

TEXTS = ["a man rides", "b", "", "the sun shines on it", " \t", "two dogs"]
TOKENIZER = VanillaTransformerTokenizer()
BEAMS: dict[str, Any] = {"num_beams": 3, "early_stopping": True}  # by which both end their searches alike


@pytest.fixture(scope="module")
def model() -> Any:
    """A model that was never saved, of languages of its own."""
    made: Any = make_model(vocab_size=len(TOKENIZER), seed=4, scale=0.3, langs=["en", "de"])
    made.generation_config.update(max_new_tokens=9, num_beams=2, early_stopping=True)
    return made


@pytest.fixture(scope="module")
def both(model: Any) -> list[Any]:
    """The same pipeline with torch and with CTranslate2."""
    options: list[dict[str, Any]] = [{}, {"compute_type": "float32"}]
    return [TranslationPipeline(model, TOKENIZER, task="translation", device="cpu", **each) for each in options]


def list_results(found: Any) -> list[Any]:
    """A pipeline's results, read to the end, in lists."""
    return list(found) if not isinstance(found, list) else found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch_size": 2},
        {"max_batch_tokens": 60},
        {"num_beams": 1},
        {"num_beams": 1, "batch_size": 4, "max_length": 6},
        {**BEAMS, "num_return_sequences": 2, "batch_size": 3},
        {**BEAMS, "length_penalty": 0.3, "max_new_tokens": 5, "truncation": True},
        {"generation_config": GenerationConfig(num_beams=3, early_stopping=True, max_new_tokens=4)},
        {"generation_config": GenerationConfig(num_beams=1, max_length=4), "batch_size": 6},
        {"src_lang": "en", "tgt_lang": "de"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["text", "list", "lists", "generator", "dataset"])
def test_texts_are_those_of_torch(kind: str, settings: dict[str, Any], both: list[Any]) -> None:
    def make_inputs() -> Any:
        dataset: Any = Dataset.from_dict({"text": TEXTS})
        return {
            "text": TEXTS[0],
            "list": TEXTS,
            "lists": [TEXTS[:2], TEXTS[2:]],
            "generator": iter(TEXTS),
            "dataset": KeyDataset(dataset, "text"),
        }[kind]

    expected, found = (list_results(pipe(make_inputs(), **settings)) for pipe in both)
    assert found == expected
    assert isinstance(both[1].model, CTranslate2Model)
    assert "CTranslate2Model" in repr(both[1])
    assert len(found) == {"text": settings.get("num_return_sequences", 1), "lists": 2}.get(kind, len(TEXTS))


def test_scores_and_tokens_are_those_of_torch(both: list[Any]) -> None:
    settings = {**BEAMS, "num_return_sequences": 3, "return_scores": True, "return_tensors": True}
    for batch_size in (1, 4):
        expected, found = (pipe(TEXTS, batch_size=batch_size, **settings) for pipe in both)
        for ours, theirs in zip(chain.from_iterable(expected), chain.from_iterable(found), strict=True):
            assert theirs["score"] == pytest.approx(ours["score"], abs=1e-4)
            ids = [one["translation_token_ids"].tolist() for one in (ours, theirs)]
            # Those of blank texts and of padding may be more or less.
            first, second = ([token_id for token_id in row if token_id > 2] for row in ids)
            assert second == first


def test_the_constructors_settings_hold_and_the_models_own(model: Any) -> None:
    for settings in ({"max_new_tokens": 3}, {"num_beams": 1, "generation_config": GenerationConfig(max_new_tokens=4)}):
        expected, found = (
            Text2TextGenerationPipeline(model, TOKENIZER, device="cpu", **settings, **more)(TEXTS)
            for more in ({}, {"compute_type": "default"})
        )
        assert found == expected


def test_pipeline_takes_it_as_one_argument(model: Any, tmp_path: Path) -> None:
    for part in (model, TOKENIZER):
        part.save_pretrained(tmp_path)
    for task, name in (
        ("translation", "translation"),
        ("translation_en_to_de", "translation"),
        ("summarization", "summary"),
        ("text2text-generation", "generated"),
    ):
        pipes = [
            pipeline(task, model=str(tmp_path), device="cpu", compute_type=kind) for kind in (None, "float32", "int8")
        ]
        expected, found, in_8_bits = (pipe(TEXTS[3]) for pipe in pipes)
        assert found == expected
        assert in_8_bits[0][f"{name}_text"]
        assert [str(pipe.model.dtype) for pipe in pipes] == ["torch.float32", "float32", "int8_float32"]
        assert pipes[2].device == torch.device("cpu")
    with pytest.raises(ValueError, match="The model translates en to de"):
        pipeline("translation_en_to_fr", model=str(tmp_path), compute_type="int8")


def test_what_ctranslate2_lacks_is_refused(model: Any, both: list[Any]) -> None:
    theirs = both[1]
    for settings, reason in (
        ({"do_sample": True}, "do_sample is True, of which it has no counterpart"),
        ({"stop_sequence": "a"}, "stopping_criteria is none of its settings"),
    ):
        with pytest.raises(ConversionError, match=reason):
            theirs("abc", **settings)
    with pytest.raises(ValueError, match="return_scores needs beam search"):
        theirs("abc", return_scores=True, num_beams=1)
    with pytest.raises(NotImplementedError, match="save the one that it was made of"):
        theirs.model.save_pretrained("somewhere")
    with pytest.raises(ValueError, match=r"cannot be loaded on cpu: .*int5"):
        SummarizationPipeline(model, TOKENIZER, device="cpu", compute_type="int5")
    with_glossary = PipelineWithGlossary(model, TOKENIZER, device="cpu", compute_type="int8")
    with pytest.raises(ValueError, match="A glossary needs a model that searches with torch"):
        with_glossary("abc", glossary={"a": "b"})


def test_models_of_other_kinds_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"it is MarianMTModel, .*`vanilla-transformer convert` makes one of"):
        TranslationPipeline(make_marian(), make_marian_tokenizer(), device="cpu", compute_type="int8")


def test_what_is_missing_is_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in ("ctranslate2", "vanilla_transformer.export.ctranslate2_model"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, missing, None)
            with pytest.raises(ImportError, match=r'pip install "vanilla-transformer\[export\]"'):
                TranslationPipeline(model, TOKENIZER, device="cpu", compute_type="int8")
