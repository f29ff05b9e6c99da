"""A tiny model that learns within a second to copy letters, or to reverse them: one whose tokens mean something."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, set_seed

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.training.arguments import TranslationTrainingArguments
from vanilla_transformer.training.trainer import TranslationTrainer

TOKENIZER = VanillaTransformerTokenizer()
TEXTS = ["abc", "hgfe", "d"]


def make_letters_model(**changes: Any) -> VanillaTransformerForConditionalGeneration:
    """An untrained model; `changes` are fields of the configuration."""
    set_seed(1)
    settings = {"vocab_size": len(TOKENIZER), "dropout": 0.0, "label_smoothing": 0.0, "normalize_before": True}
    config = VanillaTransformerConfig.from_preset("tiny", **{**settings, **changes})
    model = VanillaTransformerForConditionalGeneration(config)
    model.generation_config.max_length = None
    model.generation_config.max_new_tokens = 8
    return model


def train_on_letters(
    model: Any, output_dir: Path, *, reverse: bool = False, steps: int = 200, **changes: Any
) -> list[float]:
    """Trains on one to four letters and their copy, or their reverse; returns the loss of every ten steps.

    `changes` are fields of the training's arguments.
    """
    generator = np.random.default_rng(0)
    words = ["".join(generator.choice(list("abcdefgh"), size=generator.integers(1, 5))) for _ in range(2000)]
    settings: dict[str, Any] = {"max_steps": steps, "warmup_steps": 20, "learning_rate": 5e-3, "logging_steps": 10}
    settings |= {"max_source_tokens": 256, "lr_scheduler_type": "linear", "use_cpu": True}
    settings |= {"eval_strategy": "no", "save_strategy": "no", "disable_tqdm": True, "report_to": []}
    pairs = {
        "input_ids": [TOKENIZER(word)["input_ids"] for word in words],
        "labels": [TOKENIZER(text_target=word[::-1] if reverse else word)["input_ids"] for word in words],
    }
    trainer = TranslationTrainer(
        model=model,
        args=TranslationTrainingArguments(output_dir=str(output_dir), **{**settings, **changes}),
        train_dataset=Dataset.from_dict(pairs),
        processing_class=TOKENIZER,
        data_collator=DataCollatorForSeq2Seq(TOKENIZER, model=model),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def logits_of(model: Any, **inputs: torch.Tensor) -> torch.Tensor:
    """The logits in evaluation mode; without inputs, of `TEXTS` and their copies."""
    if not inputs:
        inputs = dict(TOKENIZER(TEXTS, text_target=TEXTS, padding=True, return_tensors="pt"))
    with torch.no_grad():
        return model.eval()(**inputs).logits


def translate(model: Any, num_beams: int = 1) -> list[list[int]]:
    """What the model makes of `TEXTS`, as tokens."""
    inputs = TOKENIZER(TEXTS, padding=True, return_tensors="pt")
    return model.eval().generate(**inputs, num_beams=num_beams).tolist()
