"""The output folder of a training: whose it is, and what a run that is resumed may change."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.utils import logging

from vanilla_transformer.data.vocabularies import get_vocabularies, load_needed_tokenizer
from vanilla_transformer.files import LOCK_FILE, PARTIAL_FOLDER, read_json, replacing_files

from .arguments import DataArguments, ModelArguments

logger = logging.get_logger(__name__)

ARGUMENTS_FILE = "arguments.json"
# Arguments without which a run that is resumed is not the one that was begun.
_WATCHED_ARGUMENTS = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("weight_decay", "max_grad_norm", "label_smoothing_factor", "bf16", "fp16", "seed", "data_seed"),
    *("max_source_tokens", "max_target_tokens", "per_device_train_batch_size", "gradient_accumulation_steps"),
    "train_sampling_strategy",
    *("r_drop", "teacher_model", "teacher_weight"),
)


def check_output_dir(
    output_dir: str | os.PathLike[str], model_arguments: ModelArguments, data_arguments: DataArguments
) -> None:
    """The output folder must be new, or hold an earlier part of a run with the same model and data."""
    folder = Path(output_dir)
    marker = folder / ARGUMENTS_FILE
    if marker.is_file():
        found = read_own_file(marker)
        differences = [
            f"{name}: {found.get(part, {}).get(name)!r} there, {value!r} now"
            for part, settings in (("model", model_arguments), ("data", data_arguments))
            for name, value in asdict(settings).items()
            # At an empty line the run stopped. What an older version did not know was as it is by default.
            if name != "drop_empty_lines"
            and found.get(part, {}).get(name, getattr(type(settings), name, None)) != value
        ]
        if differences:
            raise ValueError(
                f"{folder} holds a run with other arguments ({'; '.join(differences)}). "
                "Give the same ones to resume it, or another output_dir."
            )
    elif folder.is_file():
        raise ValueError(f"{folder} is a file. Give another output_dir.")
    elif folder.exists() and (names := {entry.name for entry in folder.iterdir()} - {PARTIAL_FOLDER, LOCK_FILE}):
        raise ValueError(
            f"{folder} is not empty and has no {ARGUMENTS_FILE} of an earlier run; it holds "
            f"{', '.join(sorted(names)[:5])}. Give another output_dir."
        )


def claim_output_dir(
    output_dir: str | os.PathLike[str],
    model_arguments: ModelArguments,
    data_arguments: DataArguments,
    training_arguments: TrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    *,
    files: Mapping[str, str | int] | None = None,
) -> None:
    """Checks the output folder, and marks it as this run's with the arguments, the tokenizer and what is in its files.

    Called once all is known to be good: a folder that was marked before would refuse the command without the mistake.
    """
    check_output_dir(output_dir, model_arguments, data_arguments)
    if not training_arguments.should_save:
        return
    names = (model_arguments.model_name_or_path, data_arguments.dataset_name)
    settings: dict[str, Any] = {
        "model": asdict(model_arguments),
        "data": asdict(data_arguments),
        "training": training_arguments.to_sanitized_dict(),
        "files": dict(files or {}),
        "local": [name for name in names if name and os.path.exists(name)],  # and not on the Hub, for the card
    }
    marker = Path(output_dir) / ARGUMENTS_FILE
    _report_changes(marker, settings["training"])
    begun_with = (read_json(marker) or {}).get("files")
    if begun_with and files and (changed := sorted({path for path, _ in begun_with.items() ^ files.items()})):
        raise ValueError(
            f"{output_dir} holds a run with other data: {', '.join(changed)} changed since. Put the data back to "
            "resume it, or give another output_dir."
        )
    is_resumed = (Path(output_dir) / "tokenizer_config.json").is_file()
    if is_resumed and get_vocabularies(load_needed_tokenizer(str(output_dir))) != get_vocabularies(tokenizer):
        raise ValueError(
            f"{output_dir} holds a run with another tokenizer. Name that one to resume it, or give another output_dir."
        )
    with replacing_files(output_dir) as partial:
        text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        (partial / ARGUMENTS_FILE).write_text(text, encoding="utf-8")
        tokenizer.save_pretrained(partial)


def _report_changes(marker: Path, training: dict[str, Any]) -> None:
    """Warns where a run goes on in another way than it began, which is allowed but no longer the same run."""
    found = (read_json(marker) or {}).get("training", {})
    changes = [
        f"{name} from {found[name]} to {training.get(name)}"
        for name in _WATCHED_ARGUMENTS
        if name in found and found[name] != training.get(name)
    ]
    if changes:
        logger.warning(
            f"{marker.parent} began with other arguments; changed: {', '.join(changes)}. The run goes on from its last "
            "checkpoint and its schedule, but not to the same weights as an unbroken one."
        )


def read_own_file(path: Path) -> dict[str, Any]:
    """A file that this run wrote when it began."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is missing or damaged: put it back, or begin again in another output_dir.")
    return content
