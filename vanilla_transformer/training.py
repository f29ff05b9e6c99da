"""Training with an unmodified `Seq2SeqTrainer`: arguments, data, model, and resuming where a run was stopped."""

import copy
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import get_sampler
from datasets import Dataset, DatasetDict
from huggingface_hub.errors import StrictDataclassError
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import IntervalStrategy
from transformers.utils import logging

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .data import load_parallel_corpus
from .evaluation import make_compute_metrics
from .tokenizer_training import train_tokenizer

logger = logging.get_logger(__name__)

ARGUMENTS_FILE = "arguments.json"


@dataclass
class ModelArguments:
    """Which model to train: a new one by preset or configuration, or one that exists."""

    preset: str | None = field(
        default=None, metadata={"help": "A new model of the paper: base, big, small, iwslt, A-h4, E-learned, ..."}
    )
    config_name: str | None = field(
        default=None, metadata={"help": "A new model with this configuration (path or id)."}
    )
    model_name_or_path: str | None = field(default=None, metadata={"help": "A trained model to go on from."})
    config_overrides: str | None = field(
        default=None,
        metadata={"help": "Fields of the configuration to change, as in dropout=0.3,encoder_layers=4,d_k=null."},
    )
    tokenizer_name: str | None = field(
        default=None,
        metadata={"help": "A tokenizer (path or id). Default: the model's, or one trained on the training data."},
    )
    vocab_size: int = field(default=8000, metadata={"help": "Vocabulary size, where a tokenizer is trained."})

    def __post_init__(self) -> None:
        """Checks that exactly one kind of model is named.

        Raises:
            ValueError: If none or several are.
        """
        named = [name for name in ("preset", "config_name", "model_name_or_path") if getattr(self, name)]
        if len(named) != 1:
            found = ", ".join(named) or "none of them"
            raise ValueError(f"Give exactly one of preset, config_name and model_name_or_path; got {found}.")


@dataclass
class DataArguments:
    """Which sentence pairs to train and validate on."""

    builtin_corpus: bool = field(
        default=False, metadata={"help": "Train on generated numbers and dates, spelled out in two languages."}
    )
    train_file: list[str] | None = field(
        default=None,
        metadata={"help": "Two aligned text files, source first, or one .tsv, .csv, .json(l) or .parquet; .gz too."},
    )
    validation_file: list[str] | None = field(default=None, metadata={"help": "The same for validation."})
    dataset_name: str | None = field(default=None, metadata={"help": "A dataset of the Hub, or a local folder of one."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "The dataset's configuration."})
    train_split: str = field(default="train", metadata={"help": "The dataset's split to train on."})
    validation_split: str | None = field(
        default="validation", metadata={"help": "The dataset's split to validate on; an empty string: none."}
    )
    source_column: str | None = field(default=None, metadata={"help": "Column of the source texts."})
    target_column: str | None = field(default=None, metadata={"help": "Column of the target texts."})
    source_lang: str | None = field(default=None, metadata={"help": "Source language, as in the data: en."})
    target_lang: str | None = field(default=None, metadata={"help": "Target language, as in the data: de."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many pairs only."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Validate on the first so many pairs only."})
    drop_empty_lines: bool = field(
        default=False, metadata={"help": "Leave out pairs that are empty on one side instead of stopping at them."}
    )
    max_source_length: int = field(default=256, metadata={"help": "Longer sources are cut to so many tokens."})
    max_target_length: int = field(default=256, metadata={"help": "Longer targets are cut to so many tokens."})

    def __post_init__(self) -> None:
        """Checks that exactly one corpus is named.

        Raises:
            ValueError: If none or several are.
        """
        named = [name for name in ("builtin_corpus", "train_file", "dataset_name") if getattr(self, name)]
        if len(named) != 1:
            found = ", ".join(named) or "none of them"
            raise ValueError(f"Give exactly one of builtin_corpus, train_file and dataset_name; got {found}.")


@dataclass
class TranslationTrainingArguments(Seq2SeqTrainingArguments):
    """The library's `Seq2SeqTrainingArguments` with defaults for training a Transformer from scratch.

    Optimiser and schedule are the paper's (5.3); the learning rate is `learning_rate` at the end of the warm-up, and if
    none is given (d_model * warmup_steps)^-0.5, the paper's formula.
    """

    learning_rate: float | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Peak learning rate. Default: the paper's, (d_model * warmup_steps)^-0.5."}
    )
    lr_scheduler_type: str = field(default="inverse_sqrt", metadata={"help": "The paper's schedule by default."})
    warmup_steps: float = field(default=4000, metadata={"help": "Steps of linear warm-up (a share if below 1)."})
    adam_beta2: float = field(default=0.98, metadata={"help": "The paper's."})
    adam_epsilon: float = field(default=1e-9, metadata={"help": "The paper's."})
    num_train_epochs: float = field(default=10.0, metadata={"help": "Number of passes over the training data."})
    per_device_train_batch_size: int = field(default=64, metadata={"help": "Sentence pairs in a training batch."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Sentence pairs in a validation batch."})
    train_sampling_strategy: str = field(
        default="group_by_length", metadata={"help": "Sentences of similar length in one batch, by default."}
    )
    eval_strategy: str = field(default="epoch", metadata={"help": "When to validate: no, steps or epoch."})
    save_strategy: str = field(default="epoch", metadata={"help": "When to save a checkpoint: no, steps, epoch, best."})
    save_total_limit: int | None = field(default=2, metadata={"help": "Checkpoints to keep; the best is always kept."})
    load_best_model_at_end: bool = field(default=True, metadata={"help": "Whether to end with the best checkpoint."})
    metric_for_best_model: str | None = field(
        default=None, metadata={"help": "What to choose the best checkpoint by. Default: bleu, or loss without it."}
    )
    dataloader_pin_memory: bool = field(
        default=torch.accelerator.is_available(), metadata={"help": "Whether to pin memory; by default with a GPU."}
    )
    predict_with_generate: bool = field(default=True, metadata={"help": "Whether to translate when validating."})
    generation_num_beams: int | None = field(
        default=1, metadata={"help": "Beams when validating during training; the saved model's default is 4."}
    )

    def __post_init__(self) -> None:
        """Chooses the metric before the library does.

        Raises:
            ValueError: If the peak learning rate is left to the paper's formula without a number of warm-up steps.
        """
        if self.learning_rate is None and self.warmup_steps < 1:
            raise ValueError(
                f"learning_rate must be given with warmup_steps={self.warmup_steps}: the paper's formula, which is "
                "taken otherwise, needs a number of steps, at least 1."
            )
        if self.metric_for_best_model is None and self.load_best_model_at_end:
            self.metric_for_best_model = "bleu" if self.predict_with_generate else "loss"
        super().__post_init__()


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
        sampler = get_sampler(train_dataloader)
        if isinstance(sampler, LengthGroupedSampler):
            seed = (args.seed if args.data_seed is None else args.data_seed) + int(state.epoch or 0)
            numbers = list(range(max(self.lengths) + 1))
            random.Random(seed).shuffle(numbers)
            sampler.lengths = [numbers[length] for length in self.lengths]
            sampler.generator = torch.Generator().manual_seed(seed)


def load_corpora(arguments: DataArguments) -> DatasetDict:
    """Loads the training pairs and, where there are any, the validation pairs.

    Args:
        arguments: Where they are.

    Returns:
        "train" and possibly "validation", each with the string columns "source" and "target".

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If the data are not what they should be; the message names file and line.
    """
    if arguments.builtin_corpus:
        return _generate_corpora(arguments)

    def load(files: list[str] | None, split: str, max_samples: int | None) -> Dataset:
        return load_parallel_corpus(
            files=files,
            dataset_name=arguments.dataset_name,
            dataset_config_name=arguments.dataset_config_name,
            split=split,
            source_column=arguments.source_column,
            target_column=arguments.target_column,
            source_lang=arguments.source_lang,
            target_lang=arguments.target_lang,
            max_samples=max_samples,
            empty_lines="drop" if arguments.drop_empty_lines else "error",
        )

    corpora = DatasetDict(train=load(arguments.train_file, arguments.train_split, arguments.max_train_samples))
    if arguments.validation_file or (arguments.dataset_name and arguments.validation_split):
        corpora["validation"] = load(
            arguments.validation_file, arguments.validation_split or "", arguments.max_eval_samples
        )
    return corpora


def _generate_corpora(arguments: DataArguments) -> DatasetDict:
    # Its generators, num2words and Babel, are needed for nothing else.
    from .numbers_and_dates import numbers_and_dates

    for name in ("max_train_samples", "max_eval_samples"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: must be at least 1, or None for all.")
    # As many as are trained on: generating them takes time, and fewer are the beginning of more.
    size: dict[str, Any] = {} if arguments.max_train_samples is None else {"num_examples": arguments.max_train_samples}
    generated = numbers_and_dates(
        source_lang=arguments.source_lang or "en", target_lang=arguments.target_lang or "de", **size
    )
    validation = generated["validation"]
    if arguments.max_eval_samples is not None:
        validation = validation.take(min(arguments.max_eval_samples, len(validation)))
    return DatasetDict(train=generated["train"], validation=validation)


def load_or_train_tokenizer(
    arguments: ModelArguments, train_dataset: Dataset, output_dir: str | os.PathLike[str]
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that is named, or the one this run trained before it was stopped, or trains one.

    Args:
        arguments: Names of tokenizer and model.
        train_dataset: Pairs to train one on.
        output_dir: Where an earlier part of this run saved the tokenizer it trained.

    Returns:
        The tokenizer.
    """
    name = arguments.tokenizer_name or arguments.model_name_or_path
    if name is None and (Path(output_dir) / "tokenizer.json").is_file():
        name = str(output_dir)
    if name is not None:
        return AutoTokenizer.from_pretrained(name)
    texts = (text for column in ("source", "target") for text in train_dataset[column])
    return train_tokenizer(texts, vocab_size=arguments.vocab_size, length=2 * len(train_dataset))


def parse_overrides(text: str | None) -> dict[str, Any]:
    """Parses `name=value,name=value`; a value is JSON (0.3, true, null, [1, 2]) or else a string.

    Args:
        text: What was given on the command line.

    Returns:
        Values by name.

    Raises:
        ValueError: If a part has no `=`.
    """
    overrides: dict[str, Any] = {}
    rest = text or ""
    while rest := rest.strip(" ,"):
        name, separator, rest = rest.partition("=")
        if not separator or "," in name:
            raise ValueError(f"config_overrides: {name.partition(',')[0]!r} is not of the form name=value.")
        overrides[name.strip()], rest = _split_off_value(rest.lstrip())
    return overrides


def _split_off_value(text: str) -> tuple[Any, str]:
    """Takes the first value, which may be JSON with commas of its own, off `value,name=value`."""
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError:
        pass
    else:
        rest = text[end:].lstrip()
        if not rest or rest.startswith(","):
            return value, rest
    word, _, rest = text.partition(",")
    return word.strip(), rest


def build_config(arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Builds the configuration that preset, configuration or model and the overrides ask for.

    Args:
        arguments: Which of them.
        tokenizer: Gives a new model its vocabulary size and special tokens.

    Returns:
        The configuration.

    Raises:
        ValueError: If an override is not a field of the configuration, or not a legal value of it, or the tokenizer
            has more tokens than the model to go on from.
    """
    overrides = parse_overrides(arguments.config_overrides)
    if arguments.preset is not None:
        base = VanillaTransformerConfig.from_preset(arguments.preset, vocab_size=len(tokenizer))
    else:
        base = AutoConfig.from_pretrained(str(arguments.config_name or arguments.model_name_or_path))
    legal = {item.name for item in fields(base)} | set(base.attribute_map)
    if unknown := sorted(set(overrides) - legal):
        raise ValueError(
            f"config_overrides: {', '.join(unknown)} not among the fields of {type(base).__name__}: "
            f"{', '.join(sorted(legal))}."
        )
    settings = base.to_dict()
    if arguments.model_name_or_path is not None and len(tokenizer) > base.vocab_size:
        raise ValueError(
            f"The tokenizer {arguments.tokenizer_name} has {len(tokenizer)} tokens, but the model "
            f"{arguments.model_name_or_path} knows {base.vocab_size}: give its own tokenizer, or resize it first."
        )
    if arguments.model_name_or_path is None:
        settings["vocab_size"] = len(tokenizer)
        for name in ("bos_token_id", "pad_token_id", "eos_token_id"):
            settings[name] = getattr(tokenizer, name)
        settings["decoder_start_token_id"] = tokenizer.bos_token_id
    for name, value in overrides.items():
        settings[base.attribute_map.get(name, name)] = value
    try:
        return type(base)(**settings)
    except StrictDataclassError as error:
        raise ValueError(f"config_overrides: {error}") from error


def build_model(arguments: ModelArguments, config: PreTrainedConfig) -> PreTrainedModel:
    """Builds a new model, or loads the one to go on from.

    Args:
        arguments: Which of them.
        config: Its configuration.

    Returns:
        The model, with beam 4 as a new model's default for `generate` (6.1).
    """
    if arguments.model_name_or_path is not None:
        return AutoModelForSeq2SeqLM.from_pretrained(arguments.model_name_or_path, config=config)
    model = AutoModelForSeq2SeqLM.from_config(config)
    model.generation_config.num_beams = 4
    return model


def tokenize_pairs(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, max_source_length: int, max_target_length: int, name: str
) -> Dataset:
    """Turns texts into ids, and reports how many were cut.

    Args:
        dataset: String columns "source" and "target".
        tokenizer: Takes them apart.
        max_source_length: Tokens a source is cut to.
        max_target_length: Tokens a target is cut to.
        name: What the progress bar and the report call the data.

    Returns:
        Columns "input_ids", "attention_mask" and "labels".
    """

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        encoded = tokenizer(batch["source"], text_target=batch["target"])
        too_long = [
            len(source) > max_source_length or len(target) > max_target_length
            for source, target in zip(encoded["input_ids"], encoded["labels"], strict=True)
        ]
        if any(too_long):
            encoded = tokenizer(batch["source"], max_length=max_source_length, truncation=True)
            targets = tokenizer(text_target=batch["target"], max_length=max_target_length, truncation=True)
            encoded["labels"] = targets["input_ids"]
        return {**encoded, "too_long": too_long}

    tokenized = dataset.map(tokenize, batched=True, remove_columns=dataset.column_names, desc=f"Tokenizing {name}")
    cut = [row for row, too_long in enumerate(tokenized["too_long"], start=1) if too_long]
    if cut:
        logger.warning(
            f"{len(cut)} of {len(tokenized)} pairs of {name} were cut to max_source_length={max_source_length} or "
            f"max_target_length={max_target_length} tokens, the first ones being number {', '.join(map(str, cut[:5]))}."
        )
    return tokenized.remove_columns("too_long")


def check_output_dir(
    output_dir: str | os.PathLike[str], model_arguments: ModelArguments, data_arguments: DataArguments
) -> None:
    """Makes sure that the output folder is new, or holds an earlier part of the same run. Writes nothing.

    Args:
        output_dir: The folder.
        model_arguments: What is trained.
        data_arguments: On what.

    Raises:
        ValueError: If the folder holds something else, or a run with another model or other data.
    """
    folder = Path(output_dir)
    marker = folder / ARGUMENTS_FILE
    if marker.is_file():
        found = json.loads(marker.read_text(encoding="utf-8"))
        differences = [
            f"{name}: {found.get(part, {}).get(name)!r} there, {value!r} now"
            for part, settings in (("model", model_arguments), ("data", data_arguments))
            for name, value in asdict(settings).items()
            if found.get(part, {}).get(name) != value
        ]
        if differences:
            raise ValueError(
                f"{folder} holds a run with other arguments ({'; '.join(differences)}). "
                "Give the same ones to resume it, or another output_dir."
            )
    elif folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file. Give another output_dir.")
    elif folder.exists() and (strangers := sorted(entry.name for entry in folder.iterdir())):
        raise ValueError(
            f"{folder} is not empty and has no {ARGUMENTS_FILE} of an earlier run; it holds "
            f"{', '.join(strangers[:5])}. Give another output_dir."
        )


def claim_output_dir(
    output_dir: str | os.PathLike[str],
    model_arguments: ModelArguments,
    data_arguments: DataArguments,
    training_arguments: TrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Checks the output folder as `check_output_dir` does, and marks it as this run's.

    Called once data, tokenizer and configuration are known to be good: a folder that was marked before would refuse
    the command in which a mistake is mended.

    Args:
        output_dir: The folder.
        model_arguments: What is trained.
        data_arguments: On what.
        training_arguments: How; recorded, but free to change from one part of the run to the next (more epochs, say).
        tokenizer: Saved, so that the run has the same one when it is resumed.

    Raises:
        ValueError: If the folder holds something else, or a run with another model or other data.
    """
    check_output_dir(output_dir, model_arguments, data_arguments)
    if not training_arguments.should_save:
        return
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(
        folder / ARGUMENTS_FILE,
        {
            "model": asdict(model_arguments),
            "data": asdict(data_arguments),
            "training": training_arguments.to_sanitized_dict(),
        },
    )
    tokenizer.save_pretrained(folder)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    # A process that is killed leaves the old file or the new one, never half of one.
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)


def build_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    corpora: DatasetDict,
    data_arguments: DataArguments,
    training_arguments: Seq2SeqTrainingArguments,
) -> Seq2SeqTrainer:
    """Builds an ordinary `Seq2SeqTrainer` that batches, translates and scores sentence pairs.

    Args:
        model: What to train.
        tokenizer: Its tokenizer.
        corpora: "train" and possibly "validation", with string columns "source" and "target".
        data_arguments: Length limits.
        training_arguments: Everything else.

    Returns:
        The trainer.
    """
    tokenized = {}
    with training_arguments.main_process_first(desc="tokenizing"):
        for split, dataset in corpora.items():
            tokenized[split] = tokenize_pairs(
                dataset,
                tokenizer,
                max_source_length=data_arguments.max_source_length,
                max_target_length=data_arguments.max_target_length,
                name=f"{split} data",
            )
    compute_metrics: Callable[..., dict[str, float]] | None = None
    if training_arguments.predict_with_generate and "validation" in tokenized:
        compute_metrics = make_compute_metrics(tokenizer)
    callbacks: list[TrainerCallback] = [KeepGenerationConfig(copy.deepcopy(model.generation_config))]
    if training_arguments.train_sampling_strategy == "group_by_length":
        sides = zip(tokenized["train"]["input_ids"], tokenized["train"]["labels"], strict=True)
        callbacks.append(MixLengthGroups([max(len(source), len(target)) for source, target in sides]))
    return Seq2SeqTrainer(
        model=model,
        args=training_arguments,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=compute_metrics,
        callbacks=callbacks,
    )


def settle_training_arguments(
    arguments: TranslationTrainingArguments, config: PreTrainedConfig, *, validates: bool
) -> None:
    """Fills in, in place, what depends on model and data.

    Args:
        arguments: Get the paper's learning rate where none was given, and lose what needs validation data without any.
        config: Takes label smoothing over, if it knows it: the model's own loss applies it, in training mode only,
            and the Trainer, which would apply it a second time, shall not.
        validates: Whether there are validation data.
    """
    if arguments.learning_rate is None:
        arguments.learning_rate = (config.hidden_size * arguments.warmup_steps) ** -0.5
    if arguments.label_smoothing_factor and hasattr(config, "label_smoothing"):
        config.label_smoothing = arguments.label_smoothing_factor
        arguments.label_smoothing_factor = 0.0
    if not validates:
        arguments.eval_strategy = IntervalStrategy.NO
        arguments.load_best_model_at_end = False
        arguments.metric_for_best_model = None


__all__ = [
    "DataArguments",
    "KeepGenerationConfig",
    "MixLengthGroups",
    "ModelArguments",
    "TranslationTrainingArguments",
    "build_config",
    "build_model",
    "build_trainer",
    "check_output_dir",
    "claim_output_dir",
    "load_corpora",
    "load_or_train_tokenizer",
    "parse_overrides",
    "settle_training_arguments",
    "tokenize_pairs",
]
