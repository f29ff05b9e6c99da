"""A trainer of the library, or this package's, with a tiny model, a few sentences to copy, and quick settings."""

from pathlib import Path
from typing import Any

from datasets import Dataset
from tiny_vanilla import make_model, make_sentences
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback

from vanilla_transformer import VanillaTransformerTokenizer


def make_dataset(count: int = 12) -> Dataset:
    sentences = make_sentences([3 + number % 4 for number in range(count)])
    masks = [[1] * len(ids) for ids in sentences]
    return Dataset.from_dict({"input_ids": sentences, "attention_mask": masks, "labels": sentences})


def make_trainer(
    output_dir: Path, *callbacks: TrainerCallback, trainer_class: Any = Seq2SeqTrainer, args: Any = None, **changes: Any
) -> Any:
    """Six updates, two passes, each second of them evaluated and saved; `changes` are training arguments, or `args`."""
    settings: dict[str, Any] = {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 0.05}
    settings |= {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
    settings |= {"save_steps": 2, "use_cpu": True, "disable_tqdm": True, "report_to": "none", **changes}
    tokenizer = VanillaTransformerTokenizer()
    return trainer_class(
        model=make_model(dropout=0.1).train(),
        args=args or Seq2SeqTrainingArguments(output_dir=str(output_dir), dataloader_pin_memory=False, **settings),
        train_dataset=make_dataset(),
        eval_dataset=make_dataset(6),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        callbacks=list(callbacks),
    )
