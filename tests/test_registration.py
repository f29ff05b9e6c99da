"""What tools of others find out about our models through the library's tables and the Auto classes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.commands import estimate
from tiny_single_stacks import SINGLE_STACKS, TRAINABLE, make_single_stack
from tiny_vanilla import make_model
from transformers import AutoModelForSeq2SeqLM, modelcard

from vanilla_transformer import VanillaTransformerForConditionalGeneration

WHOLE = VanillaTransformerForConditionalGeneration.__name__
AUTO_CLASSES: dict[str, Any] = {
    WHOLE: AutoModelForSeq2SeqLM,
    **{name: auto_class for name, auto_class in SINGLE_STACKS.items() if name in TRAINABLE},
}


def make(name: str) -> Any:
    return make_model() if name == WHOLE else make_single_stack(name)


@pytest.mark.parametrize("name", AUTO_CLASSES)
def test_the_librarys_tables_name_each_model(name: str) -> None:
    """By these lm-eval chooses between translation and language models, and the Trainer's card names the task."""
    table = AUTO_CLASSES[name]._model_mapping._model_mapping
    assert table["vanilla_transformer"] == name
    tables: dict[str, Any] = modelcard.TASK_MAPPING
    tasks = [task for task, names in tables.items() if name in names.values()]
    assert len(tasks) == 1


@pytest.mark.parametrize("name", [WHOLE, *TRAINABLE[::3]])
@pytest.mark.parametrize("with_auto_map", [True, False])
def test_accelerate_estimates_the_memory_of_the_whole_model(
    name: str, with_auto_map: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(name)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    if not with_auto_map:
        del config["auto_map"]
    # All that it asks of the Hub before it loads the configuration.
    found = SimpleNamespace(config=config, library_name="transformers")
    monkeypatch.setattr(estimate, "model_info", lambda *_, **__: found)
    empty = estimate.create_empty_model(str(tmp_path), library_name=None)
    expected = {key: value.shape for key, value in model.base_model.state_dict().items()}
    assert {key: value.shape for key, value in empty.base_model.state_dict().items()} == expected
    assert all(parameter.device.type == "meta" for parameter in empty.parameters())
