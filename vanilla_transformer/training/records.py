"""Watching any `Seq2SeqTrainer`: a progress bar that shows the speed, learning curves, and `metrics.json`."""

import json
import math
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_pt_utils import get_model_param_count
from transformers.trainer_utils import IntervalStrategy
from transformers.utils import logging
from transformers.utils.logging import tqdm

from vanilla_transformer.files import new_file, read_json
from vanilla_transformer.processor import describe_processor
from vanilla_transformer.visualization.curves import plot_learning_curves

logger = logging.get_logger(__name__)

METRICS_FILE = "metrics.json"
# What the progress bar shows of a log, the most telling first, since a narrow terminal cuts off the rest.
_SHOWN = {
    "loss": "loss {:.3f}",
    "target_tokens_per_second": "{:,.0f} target tokens/s",
    "padding_share": "padding {:.1%}",
    "learning_rate": "lr {:.2e}",
}
_TIMINGS = ("_runtime", "_per_second", "_time")


class TokenProgressCallback(ProgressCallback):
    """The library's progress bars, with loss, tokens per second, padding and learning rate at the training's one."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Opens the bar, at the step that a resumed training goes on from."""
        self.current_step = state.global_step
        if state.is_world_process_zero:
            self.training_bar = tqdm(
                total=state.max_steps, initial=state.global_step, desc="training", unit="step", dynamic_ncols=True
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Shows a log beside the bar, or, if it is an evaluation's, as a line."""
        if self.training_bar is None or logs is None:
            return
        if scores := _describe_scores(logs):
            self.training_bar.write(f"step {state.global_step:,}: {scores}")
        if numbers := _describe_numbers(logs):
            self.training_bar.set_postfix_str(numbers)


class LogLines(PrinterCallback):
    """A plain line for each log, where there is no progress bar."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Prints what the bar would show."""
        shown = _describe_scores(logs or {}) or _describe_numbers(logs or {})
        if shown and state.is_local_process_zero:
            print(f"step {state.global_step:,} of {state.max_steps:,}: {shown}", flush=True)  # noqa: T201


def _describe_scores(logs: dict[str, Any]) -> str:
    numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
    scores = [name for name in numbers if name.startswith("eval_") and not name.endswith(_TIMINGS)]
    return ", ".join(f"{name.removeprefix('eval_')} {numbers[name]:.4g}" for name in scores)


def _describe_numbers(logs: dict[str, Any]) -> str:
    return ", ".join(form.format(logs[name]) for name, form in _SHOWN.items() if name in logs)


def use_token_progress(trainer: Trainer) -> None:
    """Puts [`TokenProgressCallback`] in the place of a Trainer's progress bar, or [`LogLines`] in its printer's."""
    for callback in trainer.callback_handler.callbacks:
        if type(callback) in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(callback)
            trainer.add_callback(TokenProgressCallback() if type(callback) is ProgressCallback else LogLines())
            return


def close_progress(trainer: Trainer) -> None:
    """Ends the progress bars of a training that was interrupted, so that nothing is drawn below what is said of it."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ProgressCallback):
            for bar in (callback.prediction_bar, callback.training_bar):
                if bar is not None:
                    bar.close()


class WriteCurves(TrainerCallback):
    """Draws the learning curves into the output folder at the end of a training, and while it goes on.

    A picture that cannot be made is reported once, and never ends a training. The last update is always logged.

    Args:
        file_name, min_interval: The picture's name in the output folder, and the seconds between two of them at least.
    """

    def __init__(self, file_name: str = "curves.png", *, min_interval: float = 60.0) -> None:
        self.file_name = file_name
        self.min_interval = min_interval
        self._last_time = -math.inf
        self._is_training = False
        self._has_warned = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Notes that what is evaluated from now on belongs to the training."""
        self._is_training = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Logs the last update."""
        if state.global_step >= state.max_steps and args.logging_strategy != IntervalStrategy.NO:
            control.should_log = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Draws the training so far; the checkpoint that it marks as the best is the best of those that exist."""
        if self._is_training and time.monotonic() - self._last_time >= self.min_interval:
            self._write(args, state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Draws the whole training."""
        self._is_training = False
        self._write(args, state)

    def _write(self, args: TrainingArguments, state: TrainerState) -> None:
        self._last_time = time.monotonic()
        if not state.is_world_process_zero:
            return
        path = Path(str(args.output_dir)) / self.file_name
        try:
            title = args.run_name or path.absolute().parent.name
            plot_learning_curves(state.log_history, path, title=title, best_step=state.best_global_step, overwrite=True)
        # Whatever goes wrong in drawing is no reason to lose a training.
        except Exception as error:
            if not self._has_warned:
                logger.warning(f"{path} was not written: {error}")
            self._has_warned = True


def write_metrics(
    output_dir: str | os.PathLike[str],
    state: TrainerState,
    metrics: Mapping[str, Any],
    *,
    args: TrainingArguments,
    model: torch.nn.Module,
) -> Path | None:
    """Writes what came out of a training (`metrics`, of `train()` and `evaluate()`) and its cost into `metrics.json`.

    The file holds one JSON object, in which a value that is unknown, infinite or not a number is null:

    - "metrics": `metrics` under the Trainer's own names ("train_loss", "eval_bleu", ...);
    - "last_log": what was logged last while training (loss, learning rate, tokens per second, ...);
    - "best": "metric", "value", "step" and "checkpoint" (relative to the folder) of the best evaluation, or null;
    - "tokens_seen" (without padding) and "runtime_seconds": if "resumed_at_step" is null, of all parts of a
      [`TranslationTrainer`]'s training that was resumed, or else of those since that update;
    - "parameters" and "trainable_parameters": their number, shared ones counted once;
    - "steps" (updates), "epochs", "device", "device_name", "processes" and "versions".

    Metrics of an earlier call for the same number of steps are kept where `metrics` has none of that name. A process
    that is not the main one writes nothing and returns `None`.
    """
    if not state.is_world_process_zero:
        return None
    path = Path(output_dir) / METRICS_FILE
    earlier = read_json(path)
    is_same = isinstance(earlier, dict) and earlier.get("steps") == state.global_step
    every_metric: dict[str, Any] = {**((is_same and earlier.get("metrics")) or {}), **metrics}
    best: dict[str, Any] | None = None
    if state.best_metric is not None:
        best = {"metric": args.metric_for_best_model, "value": state.best_metric, "step": state.best_global_step}
        best["checkpoint"] = state.best_model_checkpoint and os.path.relpath(state.best_model_checkpoint, output_dir)
    content = {
        "metrics": every_metric,
        "last_log": next((entry for entry in reversed(state.log_history) if "loss" in entry), None),
        "best": best,
        "steps": state.global_step,
        "epochs": state.epoch,
        "resumed_at_step": every_metric.get("train_resumed_at_step"),
        "tokens_seen": {side: every_metric.get(f"train_{side}_tokens") for side in ("source", "target")},
        "runtime_seconds": every_metric.get("train_runtime"),
        "parameters": get_model_param_count(model),
        "trainable_parameters": get_model_param_count(model, trainable_only=True),
        **_describe_surroundings(args),
    }
    text = json.dumps(_to_json(content), indent=2, ensure_ascii=False, allow_nan=False)
    with new_file(path, overwrite=True) as partial:
        partial.write_text(text + "\n", encoding="utf-8")
    return path


def explain_choice(trainer: Trainer, averaged: int = 0) -> str:
    """Says in a sentence which weights a training ended with, and why; the scores are those logged at their step.

    `averaged` says of how many checkpoints they are the average.
    """
    state, args = trainer.state, trainer.args
    if averaged:
        return f"It is the average of the last {averaged} checkpoints."
    if not args.load_best_model_at_end or state.best_model_checkpoint is None:
        return f"It is that of the last update, {state.global_step:,}."
    logged = [entry for entry in state.log_history if entry.get("step") == state.best_global_step]
    scores = _describe_scores({name: value for entry in logged for name, value in entry.items()})
    return (
        f"It is that of update {state.best_global_step:,}, the best by {args.metric_for_best_model} of those saved "
        f"(of equal ones, by loss): {scores}."
    )


def _describe_surroundings(args: TrainingArguments) -> dict[str, Any]:
    device_name = describe_processor()
    if args.device.type == "cuda":
        device_name = torch.cuda.get_device_name(args.device)
    versions = {"python": platform.python_version()}
    for name in ("vanilla-transformer", "torch", "transformers", "accelerate"):
        with suppress(PackageNotFoundError):  # of a source that is run as it is, without being installed
            versions[name.replace("-", "_")] = version(name)
    processes = args.world_size
    return {"device": str(args.device), "device_name": device_name, "processes": processes, "versions": versions}


def _to_json(value: Any) -> Any:
    """Turns numbers of numpy and torch into Python's, and those that JSON does not know into null."""
    if isinstance(value, Mapping):
        return {str(name): _to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, np.generic | np.ndarray | torch.Tensor):
        return _to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
