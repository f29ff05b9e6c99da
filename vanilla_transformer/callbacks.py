"""Callbacks that make `Seq2SeqTrainer` train translation models well."""

import copy
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LengthGroupedSampler


class KeepGenerationConfig(TrainerCallback):
    """Keeps `Seq2SeqTrainer` from writing the library's default of 20 tokens into the model's generation config.

    Its prediction step fills every unset value of that config, after which no later batch would be translated with the
    paper's limit of input length + 50, and the number would be saved with the model.
    """

    def __init__(self, generation_config: GenerationConfig) -> None:
        self.generation_config = generation_config

    def on_prediction_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel | None = None,
        **kwargs: Any,
    ) -> None:
        """Puts the config back as it was."""
        if model is not None:
            unwrapped = getattr(model, "module", model)
            unwrapped.generation_config = copy.deepcopy(self.generation_config)


class MixLengthGroups(TrainerCallback):
    """Improves the order in which the Trainer's `group_by_length` goes through the training examples.

    The library's sampler sorts every 50 batches from the longest examples to the shortest, so that training swings from
    long sentences to short ones. Here the lengths are renumbered at random in each epoch: sorting still brings equal
    lengths together, but in any order. It also draws from torch's global random state, which a run that is resumed in
    the middle of an epoch does not have at its beginning; here the order depends on seed and epoch alone.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: DataLoader[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Gives the sampler the epoch's numbers and seed."""
        sampler = _find_sampler(train_dataloader)
        if isinstance(sampler, LengthGroupedSampler):
            seed = (args.seed if args.data_seed is None else args.data_seed) + int(state.epoch or 0)
            numbers = list(range(max(self.lengths) + 1))
            random.Random(seed).shuffle(numbers)
            sampler.lengths = [numbers[length] for length in self.lengths]
            sampler.generator = torch.Generator().manual_seed(seed)


def _find_sampler(loader: DataLoader[Any] | None) -> Sampler[int] | None:
    """With several processes, accelerate puts a batch sampler of its own around the one that asks the sampler."""
    batch_sampler: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batch_sampler, "batch_sampler"):
        batch_sampler = batch_sampler.batch_sampler
    return getattr(batch_sampler, "sampler", None)


__all__ = ["KeepGenerationConfig", "MixLengthGroups"]
