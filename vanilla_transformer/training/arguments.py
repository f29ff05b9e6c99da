"""What the training script can be told: which recipe, which model, which sentence pairs, and how to train."""

import re
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from transformers import Seq2SeqTrainingArguments
from transformers.integrations.integration_utils import is_tensorboard_available

from vanilla_transformer.data.mixtures import check_weights
from vanilla_transformer.data.subword_regularization import check_numbers
from vanilla_transformer.data.tokenizer_training import ModelType
from vanilla_transformer.options import DISABLE_TQDM, SWITCH, option
from vanilla_transformer.tasks import TASKS, TRANSLATION, Task, get_task

# How the names of measures end of which a smaller value is better.
LOWER_IS_BETTER = ("loss", "perplexity", "ppl", "ter", "wer", "per", "cer")


@dataclass
class RecipeArguments:
    """A set of defaults for all that is not said otherwise."""

    recipe: str | None = option("paper: train as the paper did, but for what you give.", None)
    tokens_per_batch: int = option("With a recipe: source tokens, and as many target tokens, in an update.", 25_000)
    tokens_per_device: int = option("With a recipe: those that fit into one forward pass on one device.", 4096)

    def __post_init__(self) -> None:
        """Checks that there is such a recipe, and that the numbers belong to one."""
        if self.recipe not in (None, "paper"):
            raise ValueError(f"recipe={self.recipe!r}: must be paper, or absent.")
        if self.recipe is None:
            for name, default in (("tokens_per_batch", 25_000), ("tokens_per_device", 4096)):
                if (value := getattr(self, name)) != default:
                    raise ValueError(f"{name}={value} needs a recipe; without one give max_source_tokens.")


@dataclass
class ModelArguments:
    """Which model to train: a new one by preset or configuration, or one that exists."""

    preset: str | None = option("A new model of the paper: base, big, small, iwslt, A-h4, E-learned, ...", None)
    config_name: str | None = option("A new model with this configuration (path or id).", None)
    model_name_or_path: str | None = option("A trained model to go on from.", None)
    config_overrides: str | None = option("Fields to change, as in dropout=0.3,encoder_layers=4,d_k=null.", None)
    tokenizer_name: str | None = option(
        "A tokenizer (path or id), or the .model file of sentencepiece. Default: the model's, or a new one.", None
    )
    target_tokenizer_name: str | None = option("With tokenizer_name a .model file: another one, for the target.", None)
    tokenizer_type: str = option("Of a new tokenizer: bpe, unigram, wordlevel (words as they stand) or char.", "bpe")
    target_tokenizer_type: str | None = option("With separate_vocabularies. Default: tokenizer_type.", None)
    vocab_size: int = option("Vocabulary size, where a tokenizer is trained.", 8000)
    added_tokens: list[str] | None = field(
        default=None,
        metadata={"help": "Tokens of a new tokenizer that are never cut, such as <BT>, besides vocab_size."},
    )
    separate_vocabularies: bool = option("Train a vocabulary for each language instead of one for both.", False)
    target_vocab_size: int | None = option("Size of the target's own vocabulary. Default: vocab_size.", None)

    def __post_init__(self) -> None:
        """Checks that exactly one kind of model is named, and that a second vocabulary's size belongs to one."""
        _check_one(self, "preset", "config_name", "model_name_or_path")
        if self.target_tokenizer_name is not None and self.tokenizer_name is None:
            raise ValueError(f"target_tokenizer_name={self.target_tokenizer_name} needs tokenizer_name, the source's.")
        for name in ("target_vocab_size", "target_tokenizer_type"):
            if (value := getattr(self, name)) is not None and not self.separate_vocabularies:
                raise ValueError(f"{name}={value} needs separate_vocabularies.")
        if existing := self.tokenizer_name or self.model_name_or_path:
            for name in ("added_tokens", "separate_vocabularies"):
                if getattr(self, name):
                    raise ValueError(f"{name} is for a new tokenizer, and that of {existing} exists.")
        for name in ("tokenizer_type", "target_tokenizer_type"):
            if (value := getattr(self, name)) is not None and value not in get_args(ModelType):
                raise ValueError(f"{name}={value}: must be one of {', '.join(get_args(ModelType))}.")


def _check_one(arguments: object, first: str, second: str, third: str) -> None:
    """Of these fields exactly one must be given."""
    given = [name for name in (first, second, third) if getattr(arguments, name)]
    if len(given) != 1:
        raise ValueError(
            f"Give exactly one of {first}, {second} and {third}; got {', '.join(given) or 'none of them'}."
        )


def _describe_lengths(name: str) -> str:
    """The defaults of a length, by task."""
    return "Default: " + ", ".join(f"{getattr(task, name)} ({task.name})" for task in TASKS.values()) + "."


def _list_files(files: list[Any] | None) -> list[list[str]]:
    if any(isinstance(each, list) for each in files or []):
        return [each if isinstance(each, list) else [each] for each in files or []]
    return [files] if files else []


@dataclass
class DataArguments:
    """What to learn, and which pairs of texts to train and validate on."""

    task: str = option(f"What to learn: {', '.join(TASKS)}.", "translation")
    source_prefix: str | None = option("Put before each source, and saved with the model. Default: the model's.", None)
    builtin_corpus: bool = option("Train on generated numbers and dates, spelled out in two languages.", False)
    train_file: list[str] | None = field(
        default=None,
        metadata={
            "help": "Two aligned text files, source first, or one .tsv, .csv, .json(l) or .parquet; .gz, .bz2 and .xz "
            "too. Give it again for each further corpus.",
            "action": "append",
        },
    )
    dataset_weights: list[float] | None = field(
        default=None,
        metadata={
            "help": "A number for each corpus, dataset_name's before the files': pairs are trained on in this "
            "proportion. Default: all as often."
        },
    )
    dataset_temperature: float | None = option(
        "Instead: weights that are the corpora's sizes to the power of 1/temperature; 5 is usual for languages.", None
    )
    validation_file: list[str] | None = field(
        default=None,
        metadata={
            "help": "The same for validation, on all corpora together; with lang_pairs, in the order of train_file.",
            "action": "append",
        },
    )
    lang_pairs: list[str] | None = field(
        default=None,
        metadata={
            "help": "For one model of several languages: source and target of each corpus, such as en-de en-fr. A "
            "token for the target, such as <2de>, is put before each source. Default: one pair, without it."
        },
    )
    both_directions: bool = option("With lang_pairs: learn each corpus from its target to its source, too.", False)
    dataset_name: str | None = option("A dataset of the Hub, or a local folder of one.", None)
    dataset_config_name: str | None = option("The dataset's configuration.", None)
    train_split: str = option("The dataset's split to train on.", "train")
    validation_split: str | None = option("The dataset's split to validate on; an empty string: none.", "validation")
    source_column: str | None = option("Column of the source texts. Default: source, document, input, ...", None)
    target_column: str | None = option("Column of the target texts. Default: target, summary, output, ...", None)
    source_lang: str | None = option("Source language, as in the data: en.", None)
    target_lang: str | None = option("Target language, as in the data: de.", None)
    max_train_samples: int | None = option("Train on the first so many pairs only, of each corpus.", None)
    max_eval_samples: int | None = option("Validate on the first so many pairs only, of each corpus.", None)
    drop_empty_lines: bool = option("Leave out pairs that are empty on one side instead of stopping at them.", False)
    max_source_length: int | None = option(
        f"Longer sources are cut to so many tokens. {_describe_lengths('max_source_length')}", None
    )
    max_target_length: int | None = option(
        f"Longer targets are cut to so many tokens. {_describe_lengths('max_target_length')}", None
    )
    streaming: bool = option("Read and tokenize while training, for corpora that do not fit in memory.", False)
    streaming_window: int = option("Pairs that streaming reads ahead, to shuffle them and to sort by length.", 20_000)
    tokenizer_sample: int = option("With streaming: a tokenizer is trained on so many pairs.", 1_000_000)
    bleu_tokenize: str | None = option("SacreBLEU's tokeniser when validating. Default: the target language's.", None)
    remove_bpe: str | None = option("Join pieces that end with this (@@, say) before they are scored.", None)
    bpe_dropout: float = option("Probability of leaving out a merge of a training text (0.1 is usual).", 0.0)
    unigram_alpha: float | None = option(
        "Of unigram vocabularies: draw how a training text is cut by its probability to this power (0.1 to 0.5).", None
    )

    def __post_init__(self) -> None:
        """Fills in the lengths, and checks the numbers, the task, and that exactly one corpus is named."""
        task = get_task(self.task)
        for name in ("max_source_length", "max_target_length"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(task, name))
        if task is not TRANSLATION:
            alien = [name for name in ("builtin_corpus", "source_lang", "target_lang") if getattr(self, name)]
            if alien:
                verb = "belongs" if len(alien) == 1 else "belong"
                raise ValueError(f"task={self.task}: {', '.join(alien)} {verb} to the task translation.")
        if self.train_file is not None and len(self.train_files) == 1:
            self.train_file = self.train_files[0]
        if self.validation_file is not None and len(self.validation_files) == 1:
            self.validation_file = self.validation_files[0]
        self._check_corpora()
        self._check_languages()
        for name in ("max_source_length", "max_target_length", "streaming_window", "tokenizer_sample"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value}: must be at least 1.")
        check_numbers(self.bpe_dropout, self.unigram_alpha)
        if self.streaming and self.builtin_corpus:
            raise ValueError("streaming reads train_file or dataset_name; the built-in corpus is made in memory.")

    def _check_corpora(self) -> None:
        if self.builtin_corpus or not (self.train_file and self.dataset_name):
            _check_one(self, "builtin_corpus", "train_file", "dataset_name")
        if not self.dataset_name and (self.dataset_config_name or self.train_split != "train"):
            raise ValueError("dataset_config_name and train_split need dataset_name.")
        if self.builtin_corpus and self.validation_file:
            raise ValueError("validation_file: the built-in corpus has validation pairs of its own.")
        count = self.num_corpora
        if self.dataset_weights is not None:
            if self.dataset_temperature is not None:
                raise ValueError("Give dataset_weights or dataset_temperature, not both.")
            check_weights(self.dataset_weights, count)
        if self.dataset_temperature is not None and self.dataset_temperature <= 0:
            raise ValueError(f"dataset_temperature={self.dataset_temperature}: must be above 0.")
        if self.streaming and count > 1 and self.dataset_weights is None:
            raise ValueError(f"streaming {count} corpora needs dataset_weights: how large they are is not known.")

    def _check_languages(self) -> None:
        if self.lang_pairs is None:
            if self.both_directions:
                raise ValueError("both_directions needs lang_pairs.")
            if not self.builtin_corpus and (self.source_lang is None) != (self.target_lang is None):
                given, other = ("source_lang", "target_lang") if self.source_lang else ("target_lang", "source_lang")
                raise ValueError(f"{given}={getattr(self, given)} needs {other}, too.")
            return
        others = ("builtin_corpus", "source_lang", "target_lang", "source_prefix", "source_column", "target_column")
        if alien := [name for name in others if getattr(self, name)]:
            raise ValueError(f"Give lang_pairs or {' and '.join(alien)}, not both.")
        if self.task != TRANSLATION.name:
            raise ValueError(f"task={self.task}: lang_pairs belongs to the task translation.")
        for pair in self.lang_pairs:
            source, *targets = pair.split("-")
            if len(targets) != 1 or not re.fullmatch(r"\w+", source) or not re.fullmatch(r"\w+", targets[0]):
                raise ValueError(f"lang_pairs has {pair!r}: must be of the form en-de, or pt_BR-de.")
            if source == targets[0]:
                raise ValueError(f"lang_pairs has {pair!r}: the languages must differ.")
        if len(self.lang_pairs) != self.num_corpora:
            raise ValueError(
                f"lang_pairs has {len(self.lang_pairs)} pair(s), and there are {self.num_corpora} corpora: give one "
                "each, of dataset_name first."
            )
        if len(self.validation_files) > (len(self.train_files) or len(self.lang_pairs)):
            raise ValueError("There are more corpora for validation than lang_pairs.")

    @property
    def train_files(self) -> list[list[str]]:
        """The files of each corpus: one list, or several where `train_file` was given several times."""
        return _list_files(self.train_file)

    @property
    def validation_files(self) -> list[list[str]]:
        """The same for validation."""
        return _list_files(self.validation_file)

    @property
    def corpus_languages(self) -> list[tuple[str, str]]:
        """Source and target language of each corpus, where `lang_pairs` says them."""
        return [(source, target) for source, _, target in (pair.partition("-") for pair in self.lang_pairs or [])]

    @property
    def directions(self) -> list[tuple[str, str]]:
        """The pairs of languages that a model of several is trained on, each once."""
        ways = [pair for one in self.corpus_languages for pair in ([one, one[::-1]] if self.both_directions else [one])]
        return list(dict.fromkeys(ways))

    @property
    def num_corpora(self) -> int:
        """How many corpora there are to train on."""
        return len(self.train_files) + bool(self.dataset_name) + self.builtin_corpus

    @property
    def lengths(self) -> tuple[int, int]:
        """The tokens that sources and targets are cut to."""
        task = get_task(self.task)
        return self.max_source_length or task.max_source_length, self.max_target_length or task.max_target_length

    @property
    def regularizes_subwords(self) -> bool:
        """Whether training texts are cut into other tokens each time."""
        return bool(self.bpe_dropout) or self.unigram_alpha is not None


@dataclass
class TranslationTrainingArguments(Seq2SeqTrainingArguments):
    """The library's `Seq2SeqTrainingArguments` with defaults for training a Transformer from scratch.

    Optimiser and schedule are the paper's (5.3); the learning rate is `learning_rate` at the end of the warm-up, and if
    none is given (d_model * warmup_steps)^-0.5, the paper's formula.
    """

    learning_rate: float | None = option("Peak learning rate. Default: (d_model * warmup_steps)^-0.5.", None)  # type: ignore[assignment]
    lr_scheduler_type: str = option("The paper's schedule by default.", "inverse_sqrt")
    warmup_steps: float = option("Steps of linear warm-up (a share if below 1).", 4000)
    adam_beta2: float = option("The paper's.", 0.98)
    adam_epsilon: float = option("The paper's.", 1e-9)
    label_smoothing_factor: float | None = option("In place of the model's own label_smoothing.", None)  # type: ignore[assignment]
    has_own_label_smoothing: bool = field(default=False, init=False)
    disable_tqdm: bool | None = option(DISABLE_TQDM, None, **SWITCH)
    logging_steps: float = option("Updates between two lines of the log (a share if < 1).", 50)
    num_train_epochs: float = option("Number of passes over the training data.", 10.0)
    per_device_train_batch_size: int = option("Sentence pairs in a training batch.", 64)
    per_device_eval_batch_size: int = option("Sentence pairs in a validation batch.", 64)
    max_source_tokens: int | None = option("Fill a batch up to so many source tokens, with padding, per device.", None)
    max_target_tokens: int | None = option("The same on the target side. Default: max_source_tokens.", None)
    r_drop: float = option("Weight of R-Drop, two passes whose predictions are to agree; 5 is usual, 0: one pass.", 0.0)
    teacher_model: str | None = option(
        "A trained model with the same tokenizer, whose probabilities are learned, too.", None
    )
    teacher_weight: float = option("With teacher_model: the share of its probabilities in the loss.", 0.5)
    average_checkpoints: int = option("End with the average of the last so many checkpoints; 0: do not.", 0)
    train_sampling_strategy: str = option("Sentences of similar length in one batch, by default.", "group_by_length")
    eval_strategy: str = option("When to validate: no, steps or epoch.", "epoch")
    save_strategy: str = option("When to save a checkpoint: no, steps, epoch, best.", "epoch")
    save_total_limit: int | None = option("Checkpoints to keep; the best, and those to average, always are.", 2)
    early_stopping_patience: int | None = option(
        "End when metric_for_best_model has not improved in so many validations.", None
    )
    load_best_model_at_end: bool | None = option(
        "Whether to end with the best checkpoint. Default: yes, but with average_checkpoints, no eval or no save.",
        None,
        **SWITCH,
    )  # type: ignore[assignment]
    metric_for_best_model: str | None = option(
        "What to choose the best checkpoint by. Default: "
        + ", ".join(f"{task.best_by} ({task.name})" for task in TASKS.values())
        + ", or loss without predict_with_generate.",
        None,
    )
    is_best_by_task: bool = field(default=False, init=False)
    dataloader_pin_memory: bool = option("Pin memory; by default with a GPU.", torch.accelerator.is_available())
    report_to: list[str] = field(
        default_factory=lambda: ["tensorboard"] if is_tensorboard_available() else [],
        metadata={"help": "Where to write the logs besides the output; by default TensorBoard's files, if installed."},
    )
    predict_with_generate: bool = option("Whether to translate when validating.", True)
    hub_license: str | None = option("With push_to_hub: the license that the model card names, apache-2.0 say.", None)
    hub_datasets: list[str] | None = field(
        default=None, metadata={"help": "With push_to_hub: datasets of the Hub that the model card names."}
    )
    generation_num_beams: int | None = option("Beams when validating; the saved model's default is 4.", 1)

    def __post_init__(self) -> None:
        """Checks what this package adds, and chooses the metric before the library does."""
        if self.learning_rate is None and self.warmup_steps < 1:
            raise ValueError(
                f"learning_rate must be given with warmup_steps={self.warmup_steps}, which is less than 1."
            )
        self.has_own_label_smoothing = self.label_smoothing_factor is not None
        self.label_smoothing_factor = self.label_smoothing_factor or 0.0
        if self.max_target_tokens is None:
            self.max_target_tokens = self.max_source_tokens
        elif self.max_source_tokens is None:
            self.max_source_tokens = self.max_target_tokens
        for name in ("max_source_tokens", "max_target_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}={value}: must be at least 1 token, or absent.")
        if self.r_drop < 0:
            raise ValueError(f"r_drop={self.r_drop}: must not be negative.")
        if not 0 < self.teacher_weight <= 1:
            raise ValueError(f"teacher_weight={self.teacher_weight}: must be above 0 and at most 1.")
        if self.teacher_model and self.r_drop:
            raise ValueError("Give teacher_model or r_drop, not both.")
        if self.average_checkpoints < 0:
            raise ValueError(f"average_checkpoints={self.average_checkpoints}: must not be negative.")
        if self.early_stopping_patience is not None:
            if self.early_stopping_patience < 1:
                raise ValueError(f"early_stopping_patience={self.early_stopping_patience}: must be at least 1.")
            if self.eval_strategy == "no":
                raise ValueError("early_stopping_patience needs validations: eval_strategy is no.")
        if self.load_best_model_at_end is None:
            validates, saves = self.eval_strategy != "no", self.save_strategy != "no"
            self.load_best_model_at_end = validates and saves and not self.average_checkpoints
            if self.load_best_model_at_end and self.save_strategy not in (self.eval_strategy, "best"):
                raise ValueError(
                    f"save_strategy={self.save_strategy} and eval_strategy={self.eval_strategy}: give both the same "
                    "one, for the best checkpoint is loaded at the end; or give load_best_model_at_end=false, or "
                    "eval_strategy=no if there is nothing to validate on."
                )
        elif self.average_checkpoints and self.load_best_model_at_end:
            raise ValueError(
                f"average_checkpoints={self.average_checkpoints} and load_best_model_at_end ask for two different "
                "models at the end: give one of them."
            )
        if self.prediction_loss_only:
            self.predict_with_generate = False
        if self.metric_for_best_model is None and (self.load_best_model_at_end or self.early_stopping_patience):
            self.is_best_by_task = self.predict_with_generate
            self.metric_for_best_model = TRANSLATION.best_by if self.predict_with_generate else "loss"
        if self.average_checkpoints and self.save_strategy == "no":
            raise ValueError(f"average_checkpoints={self.average_checkpoints} needs checkpoints: save_strategy is no.")
        known = Seq2SeqTrainingArguments.__dataclass_fields__["train_sampling_strategy"].metadata.get("choices", ())
        if known and self.train_sampling_strategy not in known:
            raise ValueError(
                f"train_sampling_strategy={self.train_sampling_strategy!r}: must be one of {', '.join(known)}."
            )
        if self.max_source_tokens is not None and self.dataloader_drop_last:
            raise ValueError("dataloader_drop_last has no effect with max_source_tokens.")
        if self.max_source_tokens is not None and self.train_sampling_strategy != "group_by_length":
            raise ValueError(
                f"train_sampling_strategy={self.train_sampling_strategy} has no effect with max_source_tokens: its "
                "batches are of similar lengths, and come in a random order."
            )
        if self.metric_for_best_model and self.greater_is_better is None:
            self.greater_is_better = not self.metric_for_best_model.endswith(LOWER_IS_BETTER)
        super().__post_init__()
        # The Trainer keeps the best one as well, which some schedules choose, too.
        needed = self.average_checkpoints + bool(self.metric_for_best_model)
        if self.average_checkpoints and 0 < (self.save_total_limit or 0) < needed:
            self.save_total_limit = needed

    def choose_metric(self, task: Task) -> None:
        """Chooses the best checkpoint by the task's score if the user named none; refuses what is not measured."""
        if self.is_best_by_task:
            self.metric_for_best_model = task.best_by
        if self.metric_for_best_model is None:
            return
        chosen, generated = self.metric_for_best_model.removeprefix("eval_"), (*task.scores, "gen_len")
        if chosen in generated and not self.predict_with_generate:
            raise ValueError(f"metric_for_best_model={self.metric_for_best_model} needs predict_with_generate.")
        known = (*generated, "loss", "perplexity")
        if chosen not in known:
            raise ValueError(
                f"metric_for_best_model={self.metric_for_best_model}: must be one of {', '.join(known)}, which are "
                f"measured of the task {task.name}."
            )
