"""`TranslationTrainer`: a `Seq2SeqTrainer` that can fill batches by tokens, and that counts them."""

import copy
import inspect
import json
import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, SaveStrategy, TrainOutput, seed_worker

from vanilla_transformer.data.batching import IntArray, TokenBatchSampler, pair_lengths
from vanilla_transformer.data.padding import PaddedColumns
from vanilla_transformer.data.stream_batches import StreamingTokenBatches
from vanilla_transformer.files import open_weights, read_json, replacing_files
from vanilla_transformer.inference.losses import to_perplexity
from vanilla_transformer.model.loss_vanilla_transformer import IGNORED_LABEL
from vanilla_transformer.model.pretrained_vanilla_transformer import VanillaTransformerPreTrainedModel

from .averaging import AverageCheckpoints
from .callbacks import StopEarly
from .checkpoints import CheckpointError, delete_old_checkpoints, find_last_whole_checkpoint
from .distillation import TeacherLoss
from .pushes import PushingTrainer, describe_error
from .r_drop import RDropLoss, repeat_rows
from .sharding import drop_tied_copies, is_sharded, keep_tables_together, unsharded_class
from .token_losses import RowLoss, make_inputs_for_logits, sum_token_losses

# Where a checkpoint's state says what led to it: pairs, tokens and seconds.
_SPENT = "TranslationTrainer"


class DataError(ValueError):
    """The training data cannot be trained on."""


class _SetEpoch(TrainerCallback):
    """Tells a sampler which epoch begins."""

    def __init__(self, sampler: TokenBatchSampler) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.sampler.set_epoch(int(state.epoch or 0))


class TranslationTrainer(PushingTrainer):
    """The library's `Seq2SeqTrainer`, with batches of a number of tokens where the arguments ask for them.

    With `max_source_tokens` and `max_target_tokens` in its arguments ([`TranslationTrainingArguments`]) a batch of one
    device holds as many sentence pairs of similar length as fit into these budgets, padding included; without them
    batches are the library's own. `train_dataset` is an ordinary dataset with the columns "input_ids" and "labels", or
    a [`StreamingTokenBatches`], which brings its own budgets and needs `max_steps`.

    It logs `source_tokens_per_second` and `target_tokens_per_second` (real tokens of all processes; evaluating and
    saving do not count) and `padding_share`, the share of both sides' cells that is padding; of a stream `corpus_pass`,
    counted from 0, and as `epoch` the share of `max_steps` that is done. The evaluation loss is a mean over tokens, so
    that `eval_perplexity`, its exponential, does not depend on the batches. With `average_checkpoints` it averages the
    last ones at the end ([`AverageCheckpoints`]). Without a learning rate it takes the paper's, (d_model *
    warmup_steps)^-0.5. What `train` returns counts the tokens and seconds of all parts of a training that was resumed,
    or those since the update `train_resumed_at_step`, where the checkpoint of older code does not tell what led to it.
    No token of the Hub is ever written to disk.

    Args:
        *args, **kwargs: As `Seq2SeqTrainer` takes them.
        train_lengths: Source and target tokens of each training pair, (pairs,), where the dataset does not tell.
        teacher: A model of the same vocabulary, whose probabilities have the share `teacher_weight` of the arguments in
            the loss (word-level distillation). It stays as it is.
    """

    def __init__(
        self,
        *args: Any,
        train_lengths: tuple[IntArray, IntArray] | None = None,
        teacher: PreTrainedModel | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = self.model_accepts_loss_kwargs and self._divides_by_targets()
        self.train_lengths = train_lengths
        self.teacher: Any = None if teacher is None else cast(Any, teacher).to(self.args.device).eval()
        own_loss = teacher is not None or getattr(self.args, "r_drop", 0.0) > 0
        if self.compute_loss_func is not None and own_loss:
            raise ValueError("Give compute_loss_func, or a teacher or r_drop, which have losses of their own.")
        if self.args.learning_rate is None:
            # The caller's own may serve a model of another width next.
            self.args = copy.copy(self.args)
            d_model = cast(PreTrainedModel, self.model).config.hidden_size
            self.args.learning_rate = (d_model * self.args.warmup_steps) ** -0.5
        average = getattr(self.args, "average_checkpoints", 0)
        if average and not any(isinstance(each, AverageCheckpoints) for each in self.callback_handler.callbacks):
            self.add_callback(AverageCheckpoints(last=average))
        if self.stream is not None and self.args.dataloader_num_workers:
            raise ValueError(f"dataloader_num_workers={self.args.dataloader_num_workers}: must be 0 for a stream.")
        self._counts: dict[str, int | torch.Tensor] = {}
        self._since_log: dict[str, int] = {}
        self._totals = dict.fromkeys(("pairs", "source", "target"), 0)
        self._resumed_step = self._counted_from = 0
        self._has_ended_early = False
        self._seconds_before = self._begin = 0.0
        self._interval_start: float | None = None
        self._pause = 0.0
        self._loss_sums: list[torch.Tensor] = []

    def _divides_by_targets(self) -> bool:
        """Whether a pass's loss is divided by the targets of the whole update, and not by its own.

        Many models of the library, as MarianMT, take the number of the update's targets, and do nothing with it.
        """
        if self.label_smoother is not None:
            return "num_items_in_batch" in inspect.signature(type(self.label_smoother).__call__).parameters
        model = self._unwrapped_model
        model = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft's
        if isinstance(model, VanillaTransformerPreTrainedModel) or hasattr(model, "accepts_loss_kwargs"):
            return True
        return "loss_function" in inspect.unwrap(type(model).forward).__code__.co_names  # the library's, which does

    @property
    def stream(self) -> StreamingTokenBatches | None:
        """The training data, if they come as a stream of batches."""
        return self.train_dataset if isinstance(self.train_dataset, StreamingTokenBatches) else None

    # Batches

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Returns this process's training batches; a `DataError` if there are none."""
        if self.stream is not None:
            collate = self._get_collator_with_removed_columns(self.data_collator)
            return DataLoader(self.stream, batch_size=None, collate_fn=collate, **self._loader_settings())
        if getattr(self.args, "max_source_tokens", None) is None:
            return super().get_train_dataloader()
        with _blaming_data():
            return self._token_dataloader()

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Returns the validation batches, of all pairs: `dataloader_drop_last` is for training."""
        with _put_away(self.args, "dataloader_drop_last", False):
            return super().get_eval_dataloader(*args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Returns the batches of a test set, of all its pairs."""
        with _put_away(self.args, "dataloader_drop_last", False):
            return super().get_test_dataloader(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The batches of an update; a `DataError` if they cannot be read."""
        with _blaming_data():
            return super().get_batch_samples(*args, **kwargs)

    def _loader_settings(self) -> dict[str, Any]:
        names = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
        settings = {name: getattr(self.args, f"dataloader_{name}") for name in names}
        # Creating an iterator draws a seed, which must not come from the random state that a checkpoint restores.
        return {**settings, "generator": torch.Generator().manual_seed(self.args.seed)}

    def _token_dataloader(self) -> DataLoader[Any]:
        arguments: Any = self.args
        if not isinstance(self.train_dataset, Dataset):
            raise ValueError(
                f"max_source_tokens={arguments.max_source_tokens} needs a datasets.Dataset or a StreamingTokenBatches "
                f"to train on, not a {type(self.train_dataset).__name__}."
            )
        source_lengths, target_lengths = self.train_lengths or pair_lengths(self.train_dataset)
        counts = len(source_lengths), len(self.train_dataset)
        if counts[0] != counts[1]:
            raise ValueError(f"train_lengths has {counts[0]} pairs, the training data have {counts[1]}.")
        sampler = TokenBatchSampler(
            source_lengths=source_lengths,
            target_lengths=target_lengths,
            max_source_tokens=arguments.max_source_tokens,
            max_target_tokens=arguments.max_target_tokens,
            seed=arguments.seed if arguments.data_seed is None else arguments.data_seed,
            num_replicas=arguments.world_size,
            rank=arguments.process_index,
        )
        # Older versions of the library do not tell a sampler behind `skip_first_batches` which epoch it is.
        self.remove_callback(_SetEpoch)
        self.add_callback(_SetEpoch(sampler))
        workers = arguments.dataloader_num_workers
        dataset: Any = self._remove_unused_columns(self.train_dataset, description="training")
        collate = self.data_collator
        if PaddedColumns.can_replace(dataset, collate):
            dataset = PaddedColumns(dataset, collate)
            collate = dataset.collate
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=collate,
            worker_init_fn=partial(seed_worker, num_workers=workers, rank=arguments.process_index),
            **self._loader_settings(),
        )
        # The sampler knows its rank: as one of one process, accelerate leaves its batches alone.
        return prepare_data_loader(
            loader, device=arguments.device, num_processes=1, process_index=0, put_on_device=True, non_blocking=True
        )

    # Many processes

    def create_accelerator_and_postprocess(self) -> None:
        """Creates the accelerator, which is to divide models with shared tables of embeddings in one piece."""
        super().create_accelerator_and_postprocess()
        keep_tables_together(self.accelerator)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        model = cast(PreTrainedModel, self.model)
        if state_dict is not None and is_sharded(model):
            state_dict = drop_tied_copies(model, state_dict)
        # The library pickles all arguments into training_args.bin, and the token must not be there.
        with unsharded_class(model), _put_away(self.args, "hub_token"):
            if output_dir not in (None, self.args.output_dir) or not self.args.should_save:
                super()._save(output_dir, state_dict=state_dict)
                open_weights(output_dir or str(self.args.output_dir))
                return
            # The tokenizer there is the one that a run which is resumed goes on with.
            with _explaining_failure("The model"), replacing_files(str(self.args.output_dir)) as partial_folder:
                super()._save(str(partial_folder), state_dict=state_dict)

    # Resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains as the library does; a stream that is resumed goes on where the checkpoint left it."""
        if resume_from_checkpoint is True:
            folder = str(self.args.output_dir)
            found = find_last_whole_checkpoint(folder, world_size=self.args.world_size, set_aside=False)
            if found is None:
                raise ValueError(f"resume_from_checkpoint=True, but {folder} holds no whole checkpoint.")
            resume_from_checkpoint = str(found)
        self._resumed_step, self._resumed_epoch, self._has_ended_early, spent = 0, 0.0, False, {}
        if resume_from_checkpoint:
            state = TrainerState.load_from_json(str(Path(str(resume_from_checkpoint)) / TRAINER_STATE_NAME))
            self._resumed_step, self._resumed_epoch = state.global_step, state.epoch or 0.0
            early = [each for each in self.callback_handler.callbacks if isinstance(each, StopEarly)]
            self._has_ended_early = any(each.is_over(self.args, state) for each in early)
            spent = cast(dict[str, Any], state.stateful_callbacks).get(_SPENT, {})
        self._interval_start, self._pause = None, 0.0
        self._counts, self._since_log = {}, {}
        self._counted_from = 0 if spent else self._resumed_step
        self._totals = {name: spent.get(name, 0) for name in self._totals}
        self._seconds_before, self._begin = spent.get("seconds", 0.0), time.perf_counter()
        skips = self.args.ignore_data_skip
        try:
            if self.stream is not None and resume_from_checkpoint:
                data_state = self._read_stream_state(str(resume_from_checkpoint))
                try:
                    self.stream.load_state_dict(data_state)
                except ValueError as error:
                    raise CheckpointError(str(error)) from error
                self.args.ignore_data_skip = True
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.ignore_data_skip = skips

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """Works out the length of the training as the library does, but ends one that had already ended."""
        values: tuple[Any, ...] = super().set_initial_training_values(*args, **kwargs)
        num_train_epochs, num_update_steps_per_epoch, *others = values
        self._check_epochs(num_update_steps_per_epoch)
        # The library trains on where a training that ended early, or within an epoch, is started again.
        if self._has_ended_early or self._resumed_step >= others[-1]:  # the number of steps in all
            num_train_epochs = self._resumed_step // num_update_steps_per_epoch
        return (num_train_epochs, num_update_steps_per_epoch, *others)

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Begins or resumes as the library does, but logs, validates and saves as often as the arguments say now."""
        place = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)
        return place

    def _check_epochs(self, updates: int) -> None:
        """Refuses to count a checkpoint's updates as epochs of another number of `updates`."""
        if self.args.max_steps > 0 or self.args.ignore_data_skip or not self._resumed_epoch:
            return
        before = self._resumed_step / self._resumed_epoch
        if abs(before - updates) >= 1:
            raise CheckpointError(
                f"The checkpoint of update {self._resumed_step:,} was saved after {self._resumed_epoch:.2f} epochs, of "
                f"about {before:,.0f} updates each, and now an epoch has {updates:,}: its updates cannot be counted as "
                "epochs. Give as many processes, passes and pairs or tokens as before, or the updates in all "
                "(--max_steps)."
            )

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> TrainOutput:
        """Ends as the library does, but keeps the last checkpoint, by which the same command sees that it has ended."""
        step, is_last_saved = self.state.global_step, self.state.best_global_step == self.state.global_step
        if self.args.save_strategy == SaveStrategy.BEST and step > self._resumed_step and not is_last_saved:
            self._save_checkpoint(self.model_wrapped, trial)
        with _put_away(self.args, "save_total_limit"):
            output = super()._finalize_training(trial, *args, **kwargs)
        if self._uploads:
            self._delete_old_checkpoints(trial)  # that were kept for pushes, which are done
        return output

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warns of missing weights as the library does, but not of other names of those that were loaded."""
        # A table that source, target and output layer share is stored once.
        tensors = cast(PreTrainedModel, self.model).state_dict(keep_vars=True)
        loaded = {id(tensor) for name, tensor in tensors.items() if name not in load_result.missing_keys}
        missing = [name for name in load_result.missing_keys if id(tensors.get(name)) not in loaded]
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _read_stream_state(self, checkpoint: str) -> dict[str, Any]:
        path = Path(checkpoint) / data_state_name(self.args.process_index)
        state: dict[str, Any] | None = read_json(path)
        if state is None:
            raise CheckpointError(f"{path} is missing: the checkpoint was not streaming, or saved by fewer processes.")
        return state

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.stream is not None:
            path = Path(output_dir) / data_state_name(self.args.process_index)
            path.write_text(json.dumps(self.stream.state_dict()), encoding="utf-8")
        # The main process says that the checkpoint is whole, and deletes older ones, only when all have written.
        self.accelerator.wait_for_everyone()

    # Stopping

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        """Does what its name says, unless the update has spoilt the weights."""
        # With float16 an update whose gradients overflow is left out.
        if grad_norm is not None and not self.accelerator.optimizer_step_was_skipped:
            self._stop_if_diverged("gradient norm", float(grad_norm))
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    def _stop_if_diverged(self, name: str, value: float) -> None:
        if self.is_in_train and not math.isfinite(value):
            raise FloatingPointError(
                f"The training has diverged: at update {self.state.global_step:,} the {name} is {value}. Nothing was "
                "saved since, but checkpoints shortly before may be spoilt too. Begin again in another output_dir with "
                f"a learning rate lower than {self.args.learning_rate:g} or a longer warm-up."
            )

    # Loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The library's, or with `r_drop` the mean of two passes' losses and how far their predictions are apart.

        With a teacher it is their mean with how far the predictions are from the teacher's.
        """
        weight = getattr(self.args, "r_drop", 0.0)
        if not (model.training and (weight or self.teacher)):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        labels, own = inputs["labels"], cast(PreTrainedModel, self.model)
        count = labels.ne(IGNORED_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
        smoothing = self.args.label_smoothing_factor or getattr(own.config, "label_smoothing", 0.0)
        row_loss: RowLoss
        if self.teacher is not None:
            with torch.no_grad():
                wanted = self.teacher(**make_inputs_for_logits(self.teacher, inputs)).logits
            row_loss = TeacherLoss(wanted, smoothing, getattr(self.args, "teacher_weight", 0.5))
        else:
            row_loss, inputs, count = RDropLoss(smoothing, weight), repeat_rows(inputs), 2 * count
        outputs = model(**make_inputs_for_logits(own, inputs))
        # As the library does: gradients of several processes are averaged.
        is_of_all = self.args.average_tokens_across_devices and num_items_in_batch is not None
        processes = self.accelerator.num_processes if is_of_all else 1
        loss = processes * sum_token_losses(outputs.logits, labels, row_loss) / count
        return (loss, outputs) if return_outputs else loss

    # Counting

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Trains on one batch, and counts its tokens."""
        if self._interval_start is None:
            self._interval_start, self._pause = time.perf_counter(), 0.0
        if "labels" in inputs and "input_ids" in inputs:
            source, labels = inputs["input_ids"], inputs["labels"]
            mask = inputs.get("attention_mask")
            # Sums stay on their device until they are logged, so that none of them waits for it.
            counts: dict[str, int | torch.Tensor] = {
                "pairs": len(labels),
                "source": source.numel() if mask is None else mask.sum(),
                "target": labels.ne(IGNORED_LABEL).sum(),
                "cells": source.numel() + labels.numel(),
            }
            for name, count in counts.items():
                self._counts[name] = self._counts.get(name, 0) + count
        return super().training_step(model, inputs, *args, **kwargs)

    def _add_counts(self) -> None:
        """Adds up what all processes counted since the last time."""
        if not self._counts:
            return
        counts = torch.stack([torch.as_tensor(count, device=self.args.device) for count in self._counts.values()])
        if self.args.world_size > 1:
            counts = self.accelerator.reduce(counts, reduction="sum")
        for name, count in zip(self._counts, map(int, counts.tolist()), strict=True):
            self._since_log[name] = self._since_log.get(name, 0) + count
            if name in self._totals:
                self._totals[name] += count
        self._counts = {}

    def _speed(self) -> dict[str, float]:
        now = time.perf_counter()
        seconds = now - (self._interval_start or now) - self._pause
        self._interval_start, self._pause = now, 0.0
        self._add_counts()
        counts, self._since_log = self._since_log, {}
        if not counts:
            return {}
        return {
            "source_tokens_per_second": round(counts["source"] / seconds, 1),
            "target_tokens_per_second": round(counts["target"] / seconds, 1),
            "padding_share": round(1 - (counts["source"] + counts["target"]) / counts["cells"], 4),
        }

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Logs what the library logs, and what was counted."""
        if "loss" in logs:
            logs.update(self._speed())
        if "train_runtime" in logs:
            # The library multiplies the number of updates by per_device_train_batch_size.
            self._add_counts()
            logs["train_runtime"] += self._seconds_before
            updates = self.state.global_step - self._counted_from
            logs["train_samples_per_second"] = round(self._totals["pairs"] / logs["train_runtime"], 3)
            logs["train_steps_per_second"] = round(updates / logs["train_runtime"], 3)
            for side in ("source", "target"):
                logs[f"train_{side}_tokens"] = self._totals[side]
            if self._counted_from:
                logs["train_resumed_at_step"] = self._counted_from
        if self.stream is not None:
            # A stream has no length: what has been done of it is a share of max_steps.
            self.state.epoch = self.state.global_step / max(self.state.max_steps, 1)
            if "loss" in logs:
                logs["corpus_pass"] = self.stream.state_dict()["position"]["number"]
        super().log(logs, *args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        start = time.perf_counter()
        name = f"checkpoint-{self.state.global_step}"
        self._add_counts()
        if not self._counted_from:
            seconds = self._seconds_before + start - self._begin
            cast(dict[str, Any], self.state.stateful_callbacks)[_SPENT] = {**self._totals, "seconds": seconds}
        try:
            # The library would delete by the folders' times.
            with _put_away(self.args, "save_total_limit"), _explaining_failure(name):
                super()._save_checkpoint(model, trial)
        except OSError:
            if self.args.should_save:  # room for the next attempt
                shutil.rmtree(Path(self._get_output_dir(trial)) / name, ignore_errors=True)
            raise
        self._delete_old_checkpoints(trial)
        self._pause += time.perf_counter() - start

    def _delete_old_checkpoints(self, trial: Any) -> None:
        if self.args.should_save and self.args.save_total_limit:
            kept = self.steps_in_push | {self.state.best_global_step}
            folder, limit = self._get_output_dir(trial), self.args.save_total_limit
            delete_old_checkpoints(folder, limit, step=self.state.global_step, kept=kept)

    # Evaluating

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluates as the library does, but draws nothing from the random state of the training."""
        start, pause = time.perf_counter(), self._pause
        with torch.random.fork_rng([self.args.device] if self.args.device.type == "cuda" else []):
            metrics: dict[str, float] = super().evaluate(*args, **self._limit_length(kwargs))
        # Not in addition to what was counted inside: several evaluation sets are evaluated by calls of this method.
        self._pause = pause + time.perf_counter() - start
        return metrics

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Predicts as the library does."""
        output: PredictionOutput = super().predict(*args, **self._limit_length(kwargs))
        return output

    def _limit_length(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Has `generation_max_length` count more than the model's own `max_new_tokens`, which `generate()` prefers."""
        limit = getattr(self.args, "generation_max_length", None)
        config = getattr(self.model, "generation_config", None)
        if limit is None or getattr(config, "max_new_tokens", None) is None:
            return kwargs
        if any(kwargs.get(name) is not None for name in ("max_length", "max_new_tokens")):
            return kwargs
        return {**kwargs, "max_new_tokens": max(limit - 1, 1)}  # The start token counts towards a length.

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Whether this evaluation is the best so far by what was logged; of equal ones, the one with the lower loss."""
        if self.args.metric_for_best_model is None:
            return False
        is_saved = self.control.should_save or self.args.save_strategy == SaveStrategy.BEST
        if self.args.load_best_model_at_end and not is_saved:
            return False  # There would be nothing to load.
        name = "eval_" + self.args.metric_for_best_model.removeprefix("eval_")
        if name not in metrics:
            is_best: bool = super()._determine_best_metric(metrics, trial)  # which says what there is
            return is_best
        sign = 1 if self.args.greater_is_better else -1
        ranks = {
            entry["step"]: (sign * entry[name], -entry.get("eval_loss", math.inf))
            for entry in self.state.log_history
            if math.isfinite(entry.get(name, math.nan))
        }
        best, now = self.state.best_global_step, self.state.global_step
        is_best = now in ranks and (best not in ranks or ranks[now] > ranks[best])
        if is_best:
            self.state.best_global_step = best = now
        if best in ranks:
            self.state.best_metric = sign * ranks[best][0]
        return is_best

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Evaluates one batch, without smoothing its labels, and keeps the sum of its tokens' losses."""
        if "labels" in inputs:
            inputs = {**inputs, "labels": self._ignore_repeats(inputs["labels"])}
        # Else the library may divide by the tokens of all processes' batches instead of this one's.
        accepts_loss_kwargs, self.model_accepts_loss_kwargs = self.model_accepts_loss_kwargs, False
        try:
            with _put_away(self, "label_smoother"):
                loss, predictions, labels = super().prediction_step(model, inputs, *args, **kwargs)
        finally:
            self.model_accepts_loss_kwargs = accepts_loss_kwargs
        if loss is not None and "labels" in inputs:
            tokens = inputs["labels"].ne(IGNORED_LABEL).sum().to(self.args.device)
            # Without any token the mean is not a number.
            total = torch.where(tokens > 0, torch.as_tensor(loss).float() * tokens, 0.0)
            sums = torch.stack([total, tokens.float()])
            self._loss_sums.append(self.accelerator.gather(sums[None]).cpu().double().sum(dim=0))
        return loss, predictions, labels

    def _ignore_repeats(self, labels: torch.Tensor) -> torch.Tensor:
        """Ignores the labels (B, T) of sentences that fill up the last batches, so that all processes have as many."""
        state = self.accelerator.gradient_state
        if self.args.world_size == 1 or not state.end_of_dataloader or state.remainder <= 0:
            return labels
        # What accelerate keeps of the last batches, put one after the other.
        own = max(state.remainder - self.args.process_index * len(labels), 0)
        repeats = torch.arange(len(labels), device=labels.device) >= own
        return labels.masked_fill(repeats[:, None], IGNORED_LABEL)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Goes through the data as the library does, and puts the loss per token in the place of the mean of means."""
        self._loss_sums = []
        if self.args.world_size > 1:
            # The library's `Seq2SeqTrainer` also scores the sentences that fill up the last batches.
            self.gather_function = self.accelerator.gather_for_metrics
        output: EvalLoopOutput = super().evaluation_loop(*args, **kwargs)
        sums, self._loss_sums = self._loss_sums, []
        if output.metrics is not None and sums:
            total, tokens = torch.stack(sums).sum(dim=0).tolist()
            self._stop_if_diverged("validation loss", total)
            for name in [name for name in output.metrics if name.endswith("_loss")]:
                output.metrics[name] = total / tokens if tokens else math.nan
                output.metrics[name.removesuffix("loss") + "perplexity"] = to_perplexity(output.metrics[name])
        return output


@contextmanager
def _put_away(holder: Any, name: str, instead: Any = None) -> Iterator[None]:
    """Hides an argument, or what else its holder has, from the library for a while."""
    value = getattr(holder, name)
    setattr(holder, name, instead)
    try:
        yield
    finally:
        setattr(holder, name, value)


@contextmanager
def _blaming_data() -> Iterator[None]:
    """Tells what readers and batches refuse from other errors of a training."""
    try:
        yield
    except ValueError as error:
        raise DataError(str(error)) from error


@contextmanager
def _explaining_failure(what: str) -> Iterator[None]:
    """What torch and safetensors say of a full disk is of other kinds, and hard to read."""
    try:
        yield
    except Exception as error:
        raise OSError(
            f"{what} could not be saved: {describe_error(error)}. If the disk is full, make room. The same command "
            "goes on from the last whole checkpoint."
        ) from error


def data_state_name(rank: int) -> str:
    """The file of a checkpoint that says where a process stands in its stream of training data."""
    return f"data_state_{rank}.json"
