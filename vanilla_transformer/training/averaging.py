"""Averages of checkpoints (6.1: the last 5 of the base model, the last 20 of the big one) of any transformers model."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging
from transformers.utils.logging import tqdm

from vanilla_transformer.data.batching import check_at_least
from vanilla_transformer.data.vocabularies import get_vocabularies, load_tokenizer
from vanilla_transformer.files import (
    AVERAGED_FOLDER,
    AVERAGING_FILE,
    check_new_folder,
    digest_files,
    find_weights_problem,
    open_weights,
    read_json,
)

from .arguments import LOWER_IS_BETTER
from .checkpoints import is_checkpoint, list_changed_weights, list_checkpoints

logger = logging.get_logger(__name__)

# These say how and by what a config was saved, or how a model is trained, not what it computes; the dtypes of tensors
# are compared themselves.
_HARMLESS_FIELDS = {
    *("_commit_hash", "_name_or_path", "config_version", "dtype", "torch_dtype", "transformers_version"),
    *("activation_dropout", "attention_dropout", "dropout", "label_smoothing"),
}
# Weights, what belongs to the training of one checkpoint, and the card with its scores.
_NOT_COPIED = (
    *("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack"),
    *(TRAINER_STATE_NAME, "data_state_*.json", "latest", "zero_to_fp32.py", AVERAGING_FILE),
    *("README.md", "arguments.json", "metrics.json", "*_results.json", "*.png"),
)


def average_checkpoints(
    checkpoints: Sequence[str | os.PathLike[str]],
    output_dir: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    progress: bool = True,
) -> None:
    """Averages the weights of checkpoints of one model, element by element, into a folder that loads like any of them.

    Config, generation config, tokenizer and code are those of the last checkpoint; `averaging.json` says what was
    averaged. Sums are kept in float64, the mean is stored in the checkpoints' dtype; a tensor that does not hold
    floating-point numbers must be the same in all of them. In memory are one file of the result and two tensors.

    Args:
        checkpoints: Folders with a config and safetensors, sharded or not, of any transformers model.
        output_dir: A new or an empty folder; it appears once it is complete.
        max_shard_size: In bytes, or as in "5GB"; a larger result is split into several files.
        progress: Whether to show a bar.

    Raises:
        FileExistsError: If the output folder is not empty.
        ValueError: If a checkpoint is not whole, or they differ in config, vocabulary, names, shapes or dtypes; all is
            listed.
    """
    folders = [Path(checkpoint) for checkpoint in checkpoints]
    output = check_new_folder(output_dir).resolve()
    _check_each(folders)
    sources = [_Weights(folder) for folder in folders]
    _check_agreement(sources)
    description = _describe(folders)
    # What an interrupted averaging left is in the way. The Trainer never uploads what begins with an underscore.
    partial = output.with_name(f"_{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_json(partial / AVERAGING_FILE, description)
        for entry in sorted(folders[-1].iterdir()):
            if entry.is_file() and not any(fnmatch(entry.name, pattern) for pattern in _NOT_COPIED):
                shutil.copy(entry, partial)
        _write_mean(sources, partial, max_shard_size=max_shard_size, progress=progress)
        open_weights(partial)
        if output.exists():
            output.rmdir()
        partial.rename(output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def select_checkpoints(
    output_dir: str | os.PathLike[str],
    *,
    last: int | None = None,
    best: int | None = None,
    metric: str | None = None,
    greater_is_better: bool | None = None,
) -> list[Path]:
    """Chooses the `last` or the `best` checkpoints of a run, not counting those whose weights are not whole.

    The metric is "eval_bleu", or "bleu" for short; by default what the run itself chose its best checkpoint by. Of
    equal ones the later is the better. Returns folders, the first step first; too few are a ValueError that lists them.
    """
    given = {name: count for name, count in (("last", last), ("best", best)) if count is not None}
    if len(given) != 1:
        raise ValueError(f"Give exactly one of last and best; got last={last} and best={best}.")
    ((name, count),) = given.items()
    check_at_least(**{name: (count, 1)})
    chosen_by = {"metric": metric, "greater_is_better": greater_is_better}
    if last is not None and (unused := [f"{name}={value!r}" for name, value in chosen_by.items() if value is not None]):
        raise ValueError(f"{unused[0]} goes with best, not with last={last}.")
    usable = _usable_checkpoints(output_dir)
    steps = sorted(usable, reverse=True)
    if best is not None:
        values, metric = _read_metric(usable, metric)
        if greater_is_better is None:
            greater_is_better = not metric.endswith(LOWER_IS_BETTER)
        sign = 1 if greater_is_better else -1
        steps = sorted(values, key=lambda step: (sign * values[step], step), reverse=True)
    if len(steps) < count:
        found = ", ".join(usable[step].name for step in sorted(steps)) or "none"
        logged = f" with {metric}" if best is not None else ""
        raise ValueError(f"{name}={count}: {output_dir} has {len(steps)} whole checkpoint(s){logged}: {found}.")
    return [usable[step] for step in sorted(steps[:count])]


class AverageCheckpoints(TrainerCallback):
    """Averages a run's `last` checkpoints at its end, into the folder `averaged` in the Trainer's output folder.

    If there are fewer, those are averaged, with a warning. An earlier average of other checkpoints is replaced.
    """

    def __init__(self, last: int) -> None:
        check_at_least(last=(last, 1))
        self.last = last

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Makes sure that there will be something to average, and room for the average."""
        wanted = f"{type(self).__name__}(last={self.last})"
        if args.save_strategy == SaveStrategy.NO:
            raise ValueError(f"{wanted} needs checkpoints: set save_strategy={args.save_strategy} to steps or epoch.")
        # Among the checkpoints that it may keep the Trainer keeps the best one, which may be an old one.
        needed = self.last + (args.metric_for_best_model is not None)
        if args.save_total_limit and 0 < args.save_total_limit < needed:
            also = " (the Trainer keeps the best one as well)" if needed > self.last else ""
            raise ValueError(
                f"{wanted} needs more checkpoints than save_total_limit={args.save_total_limit} keeps: set it to at "
                f"least {needed}{also}, or to None."
            )
        folder = Path(str(args.output_dir)) / AVERAGED_FOLDER
        if folder.is_dir() and any(folder.iterdir()) and not (folder / AVERAGING_FILE).is_file():
            raise ValueError(f"{folder}, where {wanted} writes, holds something else: move it away.")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Averages them."""
        if not state.is_world_process_zero:
            return
        run = Path(str(args.output_dir))
        # Later ones may be left of a training from which this one has branched off.
        checkpoints = [folder for step, folder in _usable_checkpoints(run).items() if step <= state.global_step]
        if len(checkpoints) < self.last:
            logger.warning(f"{run} has {len(checkpoints)} checkpoint(s) to average, not {self.last}.")
        if checkpoints:
            _replace_average(checkpoints[-self.last :], run / AVERAGED_FOLDER, progress=not args.disable_tqdm)


class _Format(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class _Weights:
    """The weights of one checkpoint. One of its files is open at a time; a tensor is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = [folder / SAFE_WEIGHTS_NAME]
        if not self.files[0].is_file():
            index = read_json(folder / SAFE_WEIGHTS_INDEX_NAME)
            self.files = [folder / name for name in sorted(set(index["weight_map"].values()))]
        self.formats: dict[str, _Format] = {}
        self._file_of: dict[str, Path] = {}
        for path in self.files:
            self._open(path)
            names: list[str] = self._tensors.keys()
            for name in names:
                values = self._tensors.get_slice(name)
                shape = tuple(values.get_shape())
                dtype = (values[:0] if shape else self._tensors.get_tensor(name)).dtype
                self._file_of[name], self.formats[name] = path, _Format(shape, dtype)

    def _open(self, path: Path) -> None:
        self._path = path
        self._tensors: Any = safe_open(path, framework="pt")

    def read(self, name: str) -> torch.Tensor:
        """Reads one tensor."""
        if self._file_of[name] != self._path:
            self._open(self._file_of[name])
        tensor: torch.Tensor = self._tensors.get_tensor(name)
        return tensor


def _check_each(folders: Sequence[Path]) -> None:
    if not folders:
        raise ValueError("There is no checkpoint to average: name at least one.")
    problems = [f"{folder} is named more than once" for folder in {*folders} if folders.count(folder) > 1]
    for folder in folders:
        problem = find_weights_problem(folder)
        if not (folder / CONFIG_NAME).is_file():
            problems.append(f"{folder} has no {CONFIG_NAME}")
        elif problem is not None:
            problems.append(f"{folder}: {problem}")
        elif not any((folder / name).is_file() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
            problems.append(f"{folder} has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}")
    if problems:
        raise ValueError(f"These checkpoints cannot be averaged: {'; '.join(problems)}. Only safetensors are read.")


def _check_agreement(sources: Sequence[_Weights]) -> None:
    """All that can be averaged agrees, or everything that differs is listed."""
    first = sources[0]
    vocabularies = _read_vocabularies(first.folder)
    differences: list[str] = []
    for other in sources[1:]:
        pair = (str(first.folder), str(other.folder))
        fields, other_fields = (dict(_flatten(read_json(each.folder / CONFIG_NAME))) for each in (first, other))
        differences += _list_differences("config.", fields, other_fields, pair)
        differences += _list_differences("tensor ", first.formats, other.formats, pair)
        if vocabularies is not None and (_read_vocabularies(other.folder) or vocabularies) != vocabularies:
            differences.append(f"vocabulary: not the same in {' and '.join(pair)}")
        for name, (_, dtype) in first.formats.items():
            if dtype.is_floating_point or other.formats.get(name) != first.formats[name]:
                continue
            if not torch.equal(first.read(name), other.read(name)):
                where = " and ".join(pair)
                differences.append(f"tensor {name}: of {dtype}, which has no mean, and not the same in {where}")
    if differences:
        raise ValueError("These checkpoints cannot be averaged:\n  " + "\n  ".join(differences))


def _read_vocabularies(folder: Path) -> tuple[dict[str, int], dict[str, int]] | None:
    """Those of the tokenizer in a folder; `None` if there is none, or one that needs code of its own."""
    with suppress(ImportError, OSError, ValueError):
        tokenizer = load_tokenizer(folder)
        return None if tokenizer is None else get_vocabularies(tokenizer)
    return None


def _list_differences(
    kind: str, first: Mapping[str, Any], other: Mapping[str, Any], pair: tuple[str, str]
) -> Iterator[str]:
    for name in dict.fromkeys([*first, *other]):
        value, other_value = first.get(name, "absent"), other.get(name, "absent")
        if value != other_value:
            yield f"{kind}{name}: {value} in {pair[0]}, {other_value} in {pair[1]}"


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a configuration and of those within it, by dotted names."""
    for name, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        elif name not in _HARMLESS_FIELDS:
            yield prefix + name, value


def _describe(folders: Sequence[Path]) -> dict[str, Any]:
    """What is averaged, with digests: a run that was started anew has other weights in folders of the same names."""
    checkpoints = []
    for folder in folders:
        sums = digest_files(_Weights(folder).files)
        # The state of a finished run is of its last checkpoint, whose weights it need not have.
        if is_checkpoint(folder) and (problems := list_changed_weights(folder, sums)):
            raise ValueError(f"{folder} cannot be averaged: {'; '.join(problems)}.")
        step = _read_state(folder).get("global_step")
        checkpoints.append({"name": folder.resolve().name, "step": step, "sha256": sums})
    return {"checkpoints": checkpoints}


def _write_mean(sources: Sequence[_Weights], folder: Path, *, max_shard_size: int | str, progress: bool) -> None:
    formats = sources[0].formats
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in formats.items()}
    shards = split_torch_state_dict_into_shards(
        empty, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    with tqdm(total=len(formats), desc="Averaging", unit="tensor", disable=not progress) as bar:
        for file_name, names in shards.filename_to_tensors.items():
            tensors = {}
            for name in names:
                tensors[name] = _mean(name, sources)
                bar.update()
            save_file(tensors, folder / file_name, metadata={"format": "pt"})
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename}
        _write_json(folder / SAFE_WEIGHTS_INDEX_NAME, index)


def _mean(name: str, sources: Sequence[_Weights]) -> torch.Tensor:
    shape, dtype = sources[0].formats[name]
    if not dtype.is_floating_point:
        return sources[0].read(name)
    total = torch.zeros(shape, dtype=torch.float64)
    for source in sources:
        tensor = source.read(name)
        # Float32 holds every smaller format, and torch adds it to float64 without a copy.
        total += tensor if dtype == torch.float64 else tensor.to(torch.float32)
        del tensor
    return total.div_(len(sources)).to(dtype)


def _usable_checkpoints(output_dir: str | os.PathLike[str]) -> dict[int, Path]:
    """Those that can be averaged. Files of other processes, which may still be written, are not looked at."""
    if not Path(output_dir).is_dir():
        raise ValueError(f"There is no folder {output_dir}.")
    return {
        step: folder
        for step, folder in list_checkpoints(output_dir).items()
        if (folder / CONFIG_NAME).is_file() and _read_state(folder) and find_weights_problem(folder) is None
    }


def _read_metric(usable: Mapping[int, Path], metric: str | None) -> tuple[dict[int, float], str]:
    """The metric's values by the steps of checkpoints, from the log in the newest one, and its full name."""
    state = _read_state(usable[max(usable)]) if usable else {}
    log: list[dict[str, Any]] = state.get("log_history", [])
    if metric is None:
        names = sorted({name for entry in log for name in entry if name.startswith("eval_")})
        best = [entry for entry in log if entry.get("step") == state.get("best_global_step")]
        chosen_by = {name for entry in best for name in names if entry.get(name) == state.get("best_metric")}
        if len(chosen_by) != 1:
            listed = ", ".join(names) or "none"
            raise ValueError(f"The run does not say what its best checkpoint is. Give metric: {listed}.")
        metric = chosen_by.pop()
    elif not metric.startswith("eval_"):
        metric = f"eval_{metric}"
    logged = {entry["step"]: entry[metric] for entry in log if isinstance(entry.get(metric), int | float)}
    return {step: value for step, value in logged.items() if step in usable and math.isfinite(value)}, metric


def _replace_average(checkpoints: Sequence[Path], folder: Path, *, progress: bool) -> None:
    if read_json(folder / AVERAGING_FILE) == _describe(checkpoints) and find_weights_problem(folder) is None:
        logger.info(f"{folder} is the average of these checkpoints already.")
        return
    outdated = folder.with_name(f"_{folder.name}.old")
    if (folder / AVERAGING_FILE).is_file():
        shutil.rmtree(outdated, ignore_errors=True)
        folder.rename(outdated)
    try:
        average_checkpoints(checkpoints, folder, progress=progress)
    except BaseException:
        if outdated.exists() and not folder.exists():
            outdated.rename(folder)
        raise
    shutil.rmtree(outdated, ignore_errors=True)
    logger.info(f"The average of {', '.join(checkpoint.name for checkpoint in checkpoints)} is in {folder}.")


def _read_state(checkpoint: Path) -> dict[str, Any]:
    """The Trainer's state, or an empty dictionary if there is none that can be read."""
    state = read_json(checkpoint / TRAINER_STATE_NAME)
    return state if isinstance(state, dict) else {}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
