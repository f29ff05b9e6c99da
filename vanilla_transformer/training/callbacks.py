"""Callbacks that make `Seq2SeqTrainer` train translation models well."""

import copy
import filecmp
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from transformers import GenerationConfig, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.dynamic_module_utils import custom_object_save
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from vanilla_transformer.files import replacing_files
from vanilla_transformer.memory import release_kept_memory

from .arguments import TranslationTrainingArguments
from .recipe import find_warmup_problem
from .sharding import unsharded_class

logger = logging.get_logger(__name__)


class KeepGenerationConfig(TrainerCallback):
    """Undoes the limit of 20 tokens that `Seq2SeqTrainer` writes into the generation config in its prediction step."""

    def __init__(self, generation_config: GenerationConfig) -> None:
        self.generation_config = generation_config

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the config as it is now: the Trainer has given it the tokenizer's special tokens."""
        model = kwargs["model"]
        self.generation_config = copy.deepcopy(getattr(model, "module", model).generation_config)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Puts the config back as it was."""
        model = kwargs.get("model")
        if model is not None:
            getattr(model, "module", model).generation_config = copy.deepcopy(self.generation_config)


class StopEarly(TrainerCallback):
    """Ends a training whose `metric_for_best_model` has not improved in `patience` validations.

    It counts them in the log, which checkpoints keep; the library's `EarlyStoppingCallback` begins anew in a run that
    is resumed.
    """

    def __init__(self, patience: int) -> None:
        self.patience = patience

    def is_over(self, args: TrainingArguments, state: TrainerState) -> bool:
        """Whether the log says that it is time to end."""
        name = f"eval_{(args.metric_for_best_model or 'loss').removeprefix('eval_')}"
        # A run that is resumed with eval_on_start validates its checkpoint once more.
        values = list({record["step"]: record[name] for record in state.log_history if name in record}.values())
        if not values:
            return False
        best = max(values) if args.greater_is_better else min(values)
        return len(values) - 1 - values.index(best) >= self.patience

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ends the training if it is time, with a checkpoint, by which the same command sees that it has ended."""
        name = f"eval_{(args.metric_for_best_model or 'loss').removeprefix('eval_')}"
        if not any(name in record for record in state.log_history):
            known = sorted({key for record in state.log_history for key in record if key.startswith("eval_")})
            raise ValueError(f"early_stopping_patience: {name} is not among what was measured: {', '.join(known)}.")
        if self.is_over(args, state):
            control.should_training_stop = True
            control.should_save |= args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH)


class MixLengthGroups(TrainerCallback):
    """Has the batches of the Trainer's `group_by_length` come in any order; the library's fall in length 50 by 50.

    The order is of the training's seed and the epoch alone: a resumed run has another random state.

    Args:
        lengths: That of each example, such as the longer side of a pair, (examples,).
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Puts a sampler of the epoch in the place of the library's."""
        batches: Any = getattr(kwargs.get("train_dataloader"), "batch_sampler", None)
        # With several processes, accelerate puts one of its own around the one that asks the sampler.
        while hasattr(batches, "batch_sampler"):
            batches = batches.batch_sampler
        sampler = getattr(batches, "sampler", None)
        if isinstance(sampler, LengthGroupedSampler):
            seed = (args.seed if args.data_seed is None else args.data_seed) + int(state.epoch or 0)
            generator = torch.Generator().manual_seed(seed)
            batches.sampler = _MixedLengthGroups(sampler.batch_size, lengths=self.lengths, generator=generator)


class _MixedLengthGroups(LengthGroupedSampler):
    """The library's batches, shuffled."""

    def __iter__(self) -> Iterator[int]:
        """Indices, those of a batch one after the other; one that is not full stays the last."""
        indices = list(super().__iter__())
        whole = len(indices) // self.batch_size
        for batch in torch.randperm(whole, generator=self.generator).tolist():
            yield from indices[batch * self.batch_size : (batch + 1) * self.batch_size]
        yield from indices[whole * self.batch_size :]


class WarnOfWarmup(TrainerCallback):
    """Warns, before the first update, of a warm-up that is too long for the training ([`find_warmup_problem`])."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Compares the warm-up with the number of updates, which is known by now."""
        problem = find_warmup_problem(args, state.max_steps)
        if problem is not None and state.is_world_process_zero:
            logger.warning(problem)


class ReleaseMemory(TrainerCallback):
    """Gives freed memory back to the system after every tenth update: see [`release_kept_memory`]."""

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """After each update."""
        if state.global_step % 10 == 0:
            release_kept_memory()


class ShipCode(TrainerCallback):
    """Puts the code of a model that brings its own into the output folder before the Trainer pushes it to the Hub.

    What the library pushes while training lacks the files that `trust_remote_code=True` needs. This works with every
    class that was registered with `register_for_auto_class`. It warns of a `hub_token` in training_args.bin.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Warns of a token that would be published; `TranslationTrainer` leaves it out."""
        is_safe = isinstance(args, TranslationTrainingArguments) or not args.push_to_hub or args.hub_token is None
        if state.is_world_process_zero and not is_safe:
            logger.warning(
                "hub_token will stand in training_args.bin, which the library's Trainer pushes, for everybody to read. "
                "Leave hub_token out, and log in with `hf auth login`, or set HF_TOKEN."
            )

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes the files, in the process that pushes."""
        if not state.is_world_process_zero or kwargs.get("model") is None:
            return
        model = extract_model_from_parallel(kwargs["model"], keep_torch_compile=False)
        parts = (model, getattr(model, "config", None), kwargs.get("processing_class"))
        with unsharded_class(model):
            # The classes are asked, not the objects: an adapter's model answers for the one that it wraps.
            objects = [part for part in parts if getattr(type(part), "_auto_class", None) is not None]
            if not objects:
                return
            folder = Path(str(args.output_dir))
            with replacing_files(folder) as partial:
                for part in objects:
                    custom_object_save(part, partial)
                for path in partial.iterdir():
                    present = folder / path.name
                    if present.is_file() and filecmp.cmp(path, present, shallow=False):
                        path.unlink()
