"""The paper's training recipe (section 5) as training arguments, for whatever hardware there is."""

import os
from typing import Any

import torch
from transformers import SchedulerType, TrainingArguments

from vanilla_transformer.data.batching import check_at_least
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig

from .arguments import TranslationTrainingArguments

TOKENS_PER_BATCH = 25_000
WARMUP_STEPS = 4000
TOKENS_PER_DEVICE = 4096
_SCHEDULES_WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
# How many updates (5.2), how many of them lie between two checkpoints (the paper writes one every 10 minutes, an update
# taking 0.4 s or 1.0 s), and how many checkpoints are averaged (6.1).
_BASE = {"max_steps": 100_000, "save_steps": 1500, "average_checkpoints": 5}
_BIG = {"max_steps": 300_000, "save_steps": 600, "average_checkpoints": 20}


def paper_learning_rate(step: int, d_model: int, warmup_steps: int = WARMUP_STEPS) -> float:
    """The learning rate of equation (3): d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5), and 0 for step 0.

    The library's schedule "inverse_sqrt" with the peak (d_model * warmup_steps)^-0.5 is this formula at each of its
    steps, but one update late: it counts from 0, so that update number n, counted from 1, is made with the rate of step
    n - 1. The first update has the rate 0 and changes nothing. Impossible numbers are a ValueError.
    """
    check_at_least(step=(step, 0), d_model=(d_model, 1), warmup_steps=(warmup_steps, 1))
    if step == 0:
        return 0.0
    return float(d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5))


def find_warmup_problem(arguments: TrainingArguments, updates: int) -> str | None:
    """Says what is wrong with a warm-up after which the rate has less time to fall than it took to rise, or `None`."""
    schedule = SchedulerType(arguments.lr_scheduler_type).value
    if arguments.warmup_steps < 1 or schedule in _SCHEDULES_WITHOUT_WARMUP:
        return None
    warmup = arguments.get_warmup_steps(updates)
    if updates <= warmup:
        effect = "never reaches its peak"
    elif schedule == SchedulerType.INVERSE_SQRT.value and updates <= 2 * warmup:
        effect = "has hardly begun to fall at the end"
    else:
        return None
    return (
        f"{updates:,} update(s), but the warm-up takes {warmup:,}: the learning rate {effect}. Choose fewer "
        "--warmup_steps and a --learning_rate that suits them, or train longer."
    )


def split_token_batch(tokens_per_batch: int, tokens_per_device: int, num_devices: int) -> tuple[int, int]:
    """Divides the tokens of an update over devices and forward passes: as few passes as fit, and all of one size.

    Returns the number of passes before an update (`gradient_accumulation_steps`) and the tokens of each, of one side.
    """
    check_at_least(tokens_per_batch=(tokens_per_batch, 1), tokens_per_device=(tokens_per_device, 1))
    check_at_least(num_devices=(num_devices, 1))
    if num_devices > tokens_per_batch:
        raise ValueError(f"num_devices={num_devices}: must not exceed tokens_per_batch={tokens_per_batch}.")
    passes = -(-tokens_per_batch // (tokens_per_device * num_devices))
    return passes, -(-tokens_per_batch // (num_devices * passes))


def find_num_devices() -> int:
    """The size of the running process group; else what the launcher announces in the variable WORLD_SIZE; else 1."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE") or 1)


def paper_recipe(
    preset: str = "base",
    *,
    tokens_per_batch: int = TOKENS_PER_BATCH,
    tokens_per_device: int | None = None,
    num_devices: int | None = None,
    use_cpu: bool = False,
) -> dict[str, Any]:
    """The recipe of `paper_training_arguments` as defaults for [`TranslationTrainingArguments`], by name.

    The learning rate is not among them: the arguments find the paper's by the model's width and the warm-up. Every
    preset but "big" has the training length of "base".
    """
    VanillaTransformerConfig.from_preset(preset)  # refuses a name that is none
    num_devices = find_num_devices() if num_devices is None else num_devices
    tokens_per_device = TOKENS_PER_DEVICE if tokens_per_device is None else tokens_per_device
    passes, tokens = split_token_batch(tokens_per_batch, tokens_per_device, num_devices)
    length = _BIG if preset == "big" else _BASE
    settings: dict[str, Any] = {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": WARMUP_STEPS}
    # 5.3
    settings |= {"adam_beta1": 0.9, "adam_beta2": 0.98, "adam_epsilon": 1e-9, "weight_decay": 0.0, "max_grad_norm": 0.0}
    # 5.1
    settings |= {"max_source_tokens": tokens, "max_target_tokens": tokens, "gradient_accumulation_steps": passes}
    # 5.2 and 6.1
    settings |= {**length, "save_strategy": "steps", "save_total_limit": length["average_checkpoints"]}
    settings |= {"eval_strategy": "steps", "eval_steps": length["save_steps"], "load_best_model_at_end": False}
    return {**settings, "logging_steps": 100, "use_cpu": use_cpu}


def paper_training_arguments(
    preset: str = "base",
    *,
    output_dir: str | os.PathLike[str],
    tokens_per_batch: int = TOKENS_PER_BATCH,
    tokens_per_device: int | None = None,
    num_devices: int | None = None,
    **overrides: Any,
) -> TranslationTrainingArguments:
    """Returns the paper's recipe, ready for a [`TranslationTrainer`] or a plain `Seq2SeqTrainer`.

    Optimiser and schedule are those of 5.3; 100,000 updates (big: 300,000), a checkpoint every 1,500 (600) of them, and
    the average of the last 5 (20) at the end. Validation comes with the checkpoints and needs an `eval_dataset`, or
    `eval_strategy="no"`. An update has 25,000 source and 25,000 target tokens on any hardware, padding included. A
    plain `Seq2SeqTrainer` knows no token budget and takes `per_device_train_batch_size` sentence pairs.

    `label_smoothing_factor` is 0: the model's own loss smooths while it trains, as its configuration says. Give it when
    you train another kind of model.

    Args:
        preset: A key of `PRESETS`.
        output_dir: Where the run is written to.
        tokens_per_batch: Source tokens, and as many target tokens, in an update.
        tokens_per_device: How many of them fit into a forward pass on one device. Default: 4,096.
        num_devices: Number of processes that train together. Default: those that there are.
        **overrides: Any field of [`TranslationTrainingArguments`]; they win. `warmup_steps` changes the learning rate,
            `average_checkpoints` the number of checkpoints that are kept, and `num_train_epochs` takes the place of
            the number of updates.
    """
    sizes: dict[str, Any] = {"tokens_per_device": tokens_per_device, "num_devices": num_devices}
    settings = paper_recipe(preset, tokens_per_batch=tokens_per_batch, **sizes)
    if "num_train_epochs" in overrides:
        settings["max_steps"] = -1  # the library's value for "as many as the epochs have"
    settings["save_total_limit"] = max(settings["save_total_limit"], overrides.get("average_checkpoints", 0))
    settings |= overrides
    if settings.get("learning_rate") is None and settings["warmup_steps"] >= 1:
        d_model = VanillaTransformerConfig.from_preset(preset).d_model
        settings["learning_rate"] = (d_model * settings["warmup_steps"]) ** -0.5
    return TranslationTrainingArguments(output_dir=str(output_dir), **settings)
