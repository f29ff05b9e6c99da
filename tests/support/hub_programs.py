"""What the processes of `test_hub_training` run: trainings that push to the Hub of their environment."""

from __future__ import annotations

import os
import sys
from threading import Event
from typing import Any

import torch
import train as training_script
from datasets import Dataset
from huggingface_hub import run_as_future
from tiny_seq2seq import make_model as make_bart
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback, set_seed

from vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizer,
)
from vanilla_transformer.training.arguments import TranslationTrainingArguments
from vanilla_transformer.training.callbacks import ShipCode
from vanilla_transformer.training.trainer import TranslationTrainer

torch.set_num_threads(1)

ROWS = [{"input_ids": [5, 6, 7, 2], "labels": [7, 6, 5, 2]}] * 8
TRAINERS = {
    "library": (Seq2SeqTrainer, Seq2SeqTrainingArguments),
    "package": (TranslationTrainer, TranslationTrainingArguments),
}


class WaitForPushes(TrainerCallback):
    """Trains on when a push is done: files are replaced while they are uploaded, and such a push may fail."""

    def __init__(self, trainer: Seq2SeqTrainer) -> None:
        self.trainer = trainer

    def on_step_begin(self, *arguments: Any, **kwargs: Any) -> None:
        self.trainer._finish_current_push()


class HoldPushes(TrainerCallback):
    """Lets no push begin before the training's last step is done and saved."""

    def __init__(self) -> None:
        self.is_over = Event()
        run_as_future(self.is_over.wait)  # pushes come one after another

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == state.max_steps:
            self.is_over.set()


def train(
    trainer: str,
    *,
    model: str = "vanilla",
    resume: Any = None,
    push: Any = None,
    hold_pushes: bool = False,
    **settings: Any,
) -> None:
    """Trains for four steps with two checkpoints, and pushes at the end with the arguments `push`, unless `False`."""
    set_seed(1)
    tokenizer = VanillaTransformerTokenizer()
    config = VanillaTransformerConfig.from_preset("tiny", vocab_size=len(tokenizer))
    built = make_bart() if model == "bart" else VanillaTransformerForConditionalGeneration(config)
    trainer_class, arguments_class = TRAINERS[trainer]
    arguments: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "save_strategy": "steps", "eval_strategy": "no"}
    arguments |= {"learning_rate": 1e-3, "per_device_train_batch_size": 2, "use_cpu": True}
    arguments |= {"push_to_hub": True, "hub_always_push": True, "disable_tqdm": True, "report_to": []}
    instance = trainer_class(
        model=built,
        args=arguments_class(**arguments | settings),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=built),
        callbacks=[ShipCode()],
    )
    instance.add_callback(HoldPushes() if hold_pushes else WaitForPushes(instance))
    instance.train(resume_from_checkpoint=resume)
    if push is not False:
        instance.push_to_hub(**push or {})


def train_beside_a_deletion(doomed: str, **settings: Any) -> None:
    """Trains as `train` does; the empty folder `doomed` is deleted just before anybody looks into it.

    A checkpoint may be deleted at that moment: the trainer removes the oldest ones while it pushes in a thread.
    """

    def delete(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.scandir" and str(arguments[0]) == doomed and os.path.exists(doomed):
            os.rmdir(doomed)

    sys.addaudithook(delete)
    train(**settings)


def run_script(argv: list[str]) -> None:
    """Runs scripts/train.py."""
    try:
        training_script.main(argv)
    except SystemExit as error:
        print(f"ended with: {error}")
