"""What a training refuses before it begins."""

from pathlib import Path
from typing import Any

import pytest
from transformers import MarianConfig, T5Config

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.training.arguments import DataArguments, TranslationTrainingArguments
from vanilla_transformer.training.checks import check_lengths, check_validation


@pytest.mark.parametrize("name", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_by_a_metric_needs_validation_data(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"lr_scheduler_type={name} needs validation data"):
        check_validation(TranslationTrainingArguments(str(tmp_path), lr_scheduler_type=name))


def test_a_validation_at_the_start_needs_validation_data(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="eval_on_start needs validation data"):
        check_validation(TranslationTrainingArguments(str(tmp_path), eval_on_start=True))


@pytest.mark.parametrize("kind", ["own", "Marian"])
def test_texts_longer_than_a_models_positions_are_refused(kind: str) -> None:
    settings: dict[str, Any] = {"vocab_size": 99, "max_position_embeddings": 100}
    own = VanillaTransformerConfig(**settings, position_embedding_type="learned")
    config = MarianConfig(**settings) if kind == "Marian" else own
    lengths: dict[str, Any] = {"max_source_length": 100, "max_target_length": 101}
    with pytest.raises(ValueError, match=r"max_target_length=101: .* at most 100 tokens"):
        check_lengths(config, DataArguments(train_file=["a.tsv"], **lengths))
    for each in (config, VanillaTransformerConfig(**settings), T5Config(vocab_size=99)):
        longest = 100 if each is config else 2000
        data = DataArguments(train_file=["a.tsv"], max_source_length=longest, max_target_length=longest)
        check_lengths(each, data)
