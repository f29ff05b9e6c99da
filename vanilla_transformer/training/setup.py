"""Training with `Seq2SeqTrainer`: data, model, trainer, and resuming where a run was stopped."""

import copy
import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType
from transformers.utils import logging

from vanilla_transformer.conversion.tokenizers.sentencepiece import convert_sentencepiece
from vanilla_transformer.data.mixtures import StreamMixture
from vanilla_transformer.data.streams import sample_pairs
from vanilla_transformer.data.tokenizer_training import train_separate_tokenizer, train_tokenizer
from vanilla_transformer.data.vocabularies import get_vocabularies, load_needed_tokenizer
from vanilla_transformer.files import LOCK_FILE, PARTIAL_FOLDER, explain_missing_model, read_json, replacing_files
from vanilla_transformer.inference.evaluate import make_compute_metrics
from vanilla_transformer.inference.loading import is_multilingual, set_languages
from vanilla_transformer.inference.scores import find_bleu_tokenizer
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.pipeline_vanilla_transformer import find_directions
from vanilla_transformer.model.positions_vanilla_transformer import count_learned_positions
from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.tasks import TRANSLATION, Task, find_prefix, get_task

from .arguments import DataArguments, ModelArguments, TranslationTrainingArguments
from .callbacks import KeepGenerationConfig, MixLengthGroups, ReleaseMemory, ShipCode, StopEarly, WarnOfWarmup
from .checkpoints import RecordWorldSize
from .examples import Corpora, Pair, known_languages, prepare_training_data, stream_batches, tokenize_pairs
from .records import WriteCurves, use_token_progress
from .trainer import TranslationTrainer

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
_SCHEDULES_BY_METRIC = ("reduce_lr_on_plateau", "greedy")


def settle_prefix(model_arguments: ModelArguments, data_arguments: DataArguments) -> str:
    """What is to stand before each source: as the arguments say, or else the model that is to be trained further."""
    if data_arguments.source_prefix is not None or model_arguments.model_name_or_path is None:
        return data_arguments.source_prefix or ""
    config = AutoConfig.from_pretrained(model_arguments.model_name_or_path)
    langs, known = known_languages(data_arguments), find_directions(config)
    is_own = config.model_type == VanillaTransformerConfig.model_type
    if is_own and len(known) > 1 and not data_arguments.lang_pairs and (langs is None or tuple(langs) not in known):
        own = f"The model translates {', '.join(map(' to '.join, known))}"
        if langs is None and data_arguments.task == TRANSLATION.name:
            raise ValueError(f"{own}: name the languages with source_lang and target_lang, or with lang_pairs.")
        if langs is not None:
            raise ValueError(f"{own}, not {' to '.join(langs)}: lang_pairs may add a pair to it.")
    if data_arguments.lang_pairs:
        return ""  # each pair has its own: see `settle_directions`
    return find_prefix(config, get_task(data_arguments.task), langs=langs)


def settle_directions(model_arguments: ModelArguments, data_arguments: DataArguments) -> dict[Pair, str]:
    """What is to stand before each source of a model of several languages, by source and target; empty for one pair.

    It is what the model that is to be trained further has there, or else a token of the target language (Johnson et
    al., 2017), which makes known also pairs of its languages that are not in the data.
    """
    trained = data_arguments.directions
    sources, targets = ([pair[side] for pair in trained] for side in (0, 1))
    unseen = [(source, target) for source in sources for target in targets if source != target]
    directions = {pair: f"<2{pair[1]}> " for pair in (*trained, *unseen)}
    if trained and model_arguments.model_name_or_path is not None:
        directions |= find_directions(AutoConfig.from_pretrained(model_arguments.model_name_or_path))
    return directions


def check_target_tokens(tokenizer: PreTrainedTokenizerBase, directions: Mapping[Pair, str]) -> None:
    """Refuses a tokenizer that would cut the tokens by which a model of several languages is told the target."""
    tokens = dict.fromkeys(prefix.strip() for prefix in directions.values() if prefix.startswith("<2"))
    if missing := [token for token in tokens if tokenizer.tokenize(token) != [token]]:
        quoted = " ".join(f'"{token}"' for token in missing)
        raise ValueError(
            f"lang_pairs: the tokenizer does not have {', '.join(missing)} as a token each. `vanilla-transformer "
            f"train-tokenizer --added_tokens {quoted}` makes one that has, and so does a training that is given none."
        )


def settle_languages(tokenizer: PreTrainedTokenizerBase, arguments: DataArguments) -> dict[str, int]:
    """Sets the languages of a multilingual tokenizer (NLLB, M2M100, mBART-50); returns what `generate` needs then."""
    langs = known_languages(arguments)
    if not is_multilingual(tokenizer):
        return {}
    if langs is None:
        raise ValueError(
            f"{type(tokenizer).__name__} marks texts with their languages: give source_lang and target_lang, as it "
            "spells them."
        )
    return set_languages(tokenizer, source_lang=langs[0], target_lang=langs[1])


def check_special_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer that cannot pad, or does not end a target: the model would not learn where to stop."""
    if missing := [name for name in ("pad_token", "eos_token") if getattr(tokenizer, name) is None]:
        raise ValueError(f"The tokenizer has no {' and no '.join(missing)}; set them and save it again.")
    if tokenizer.eos_token_id not in tokenizer(text_target="a", verbose=False)["input_ids"]:
        raise ValueError(
            f"The tokenizer does not put its eos_token, {tokenizer.eos_token}, behind a target: without it no model "
            "learns where to stop. Give the tokenizer a post-processor (TemplateProcessing), and save it again."
        )


def check_validation(arguments: TranslationTrainingArguments) -> None:
    """Refuses, where there are no validation data, what needs them."""
    if arguments.early_stopping_patience is not None:
        raise ValueError("early_stopping_patience needs validation data.")
    if arguments.save_strategy == SaveStrategy.BEST:
        raise ValueError("save_strategy=best needs validation data.")
    if arguments.lr_scheduler_type in _SCHEDULES_BY_METRIC:
        raise ValueError(f"lr_scheduler_type={SchedulerType(arguments.lr_scheduler_type).value} needs validation data.")


def check_lengths(config: PreTrainedConfig, arguments: DataArguments) -> None:
    """Refuses texts that may be longer than a model's table of positions."""
    is_own = config.model_type == VanillaTransformerConfig.model_type
    positions = count_learned_positions(config) if is_own else getattr(config, "max_position_embeddings", None)
    lengths = dict(zip(("max_source_length", "max_target_length"), arguments.lengths, strict=True))
    if positions is not None and (
        longer := [f"{name}={length}" for name, length in lengths.items() if length > positions]
    ):
        raise ValueError(
            f"{' and '.join(longer)}: the model reads at most {positions} tokens, by its table of positions. Give no "
            "more than these."
        )


def load_or_train_tokenizer(
    arguments: ModelArguments,
    train_dataset: Dataset | IterableDataset | StreamMixture,
    output_dir: str | os.PathLike[str],
    *,
    sample: int = 1_000_000,
    model_max_length: int = 1024,
    added_tokens: Iterable[str] = (),
) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that is named, or the one that this run trained before it was stopped, or trains one."""
    name = arguments.tokenizer_name or arguments.model_name_or_path
    # Of its files, the one that takes its place last.
    if name is None and (Path(output_dir) / "tokenizer_config.json").is_file():
        name = str(output_dir)
        for file_name in ("tokenizer_config.json", "tokenizer.json"):
            _read_own_file(Path(output_dir) / file_name)
    target = arguments.target_tokenizer_name
    if name is not None:
        if os.path.isfile(name):
            return convert_sentencepiece(name, target_model_file=target, model_max_length=model_max_length)
        if target is not None:
            raise ValueError(
                f"target_tokenizer_name={target} is for two .model files of sentencepiece, and {name} is no file."
            )
        return AutoTokenizer.from_pretrained(name)
    pairs = train_dataset if isinstance(train_dataset, Dataset) else sample_pairs(train_dataset, sample)
    sources, targets = pairs["source"], pairs["target"]
    sizes: dict[str, Any] = {"vocab_size": arguments.vocab_size, "model_max_length": model_max_length}
    sizes |= {"model_type": arguments.tokenizer_type, "added_tokens": [*(arguments.added_tokens or ()), *added_tokens]}
    if arguments.separate_vocabularies:
        sizes["target_model_type"] = arguments.target_tokenizer_type
        return train_separate_tokenizer(sources, targets, target_vocab_size=arguments.target_vocab_size, **sizes)
    return train_tokenizer(chain(sources, targets), length=2 * len(pairs), **sizes)


def _read_own_file(path: Path) -> dict[str, Any]:
    """A file that this run wrote when it began."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is missing or damaged: put it back, or begin again in another output_dir.")
    return content


def parse_overrides(text: str | None) -> dict[str, Any]:
    """Parses `name=value,name=value`; a value is JSON (0.3, true, null, [1, 2]) or else a string."""
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
    with suppress(json.JSONDecodeError):
        value, end = json.JSONDecoder().raw_decode(text)
        rest = text[end:].lstrip()
        if not rest or rest.startswith(","):
            return value, rest
    word, _, rest = text.partition(",")
    return word.strip(), rest


def build_config(
    arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, *, langs: list[str] | None = None
) -> PreTrainedConfig:
    """Builds the configuration asked for; a new model takes vocabulary and special tokens from the tokenizer."""
    overrides = parse_overrides(arguments.config_overrides)
    if arguments.preset is not None:
        base = VanillaTransformerConfig.from_preset(arguments.preset, vocab_size=len(tokenizer))
    else:
        base = AutoConfig.from_pretrained(str(arguments.config_name or arguments.model_name_or_path))
    if arguments.config_name is not None:  # what another model was trained for
        base.task_specific_params = None
        if hasattr(base, "langs"):
            base.langs = None
    legal = {item.name for item in fields(base)} | set(base.attribute_map)
    if unknown := sorted(set(overrides) - legal):
        fields_of = f"the fields of {type(base).__name__}: {', '.join(sorted(legal))}."
        raise ValueError(f"config_overrides: {', '.join(unknown)} not among {fields_of}")
    settings = base.to_dict()
    if arguments.model_name_or_path is not None:
        _check_tokenizer(base, tokenizer, arguments)
    else:
        settings["vocab_size"] = len(tokenizer)
        if getattr(tokenizer, "separate_vocabs", False):
            settings["decoder_vocab_size"] = tokenizer.target_vocab_size
            settings["share_encoder_decoder_embeddings"] = False
        for name in ("bos_token_id", "pad_token_id", "eos_token_id"):
            settings[name] = getattr(tokenizer, name)
        # T5 and Marian, whose tokenizers have no token for the beginning, take that of padding.
        start = tokenizer.pad_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        settings["decoder_start_token_id"] = start
    if langs is not None and "langs" in legal and len(find_directions(base)) < 2:
        settings["langs"] = langs
    for name, value in overrides.items():
        settings[base.attribute_map.get(name, name)] = value
    try:
        return type(base)(**settings)
    except StrictDataclassError as error:
        raise ValueError(f"config_overrides: {error}") from error


def _check_tokenizer(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, arguments: ModelArguments) -> None:
    """The model to go on from must know all of the tokenizer's tokens."""
    target_tokens = getattr(tokenizer, "target_vocab_size", len(tokenizer))
    target_known = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    sides = {"source": (len(tokenizer), config.vocab_size), "target": (target_tokens, target_known)}
    for side, (tokens, known) in sides.items():
        if tokens > known:
            raise ValueError(
                f"The tokenizer {arguments.tokenizer_name} has {tokens} {side} tokens, but the model "
                f"{arguments.model_name_or_path} knows {known}: give its own tokenizer, or resize it first."
            )


def check_model_arguments(arguments: ModelArguments) -> None:
    """Checks preset and overrides of a new model before data are read and a tokenizer is trained."""
    if arguments.preset is not None:
        build_config(arguments, VanillaTransformerTokenizer())


def build_model(
    arguments: ModelArguments, config: PreTrainedConfig, *, max_new_tokens: int | None = None
) -> PreTrainedModel:
    """Builds a new model, which searches as the paper's does (6.1), or loads the one to go on from."""
    if arguments.model_name_or_path is not None:
        # Small updates of weights in 16 bits are rounded away, whatever the precision of the products.
        return AutoModelForSeq2SeqLM.from_pretrained(arguments.model_name_or_path, config=config, dtype=torch.float32)
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
    model.generation_config.num_beams = 4
    if max_new_tokens is not None:
        model.generation_config.max_new_tokens = max_new_tokens
    if isinstance(config, VanillaTransformerConfig):
        model.generation_config.length_penalty = 0.6
        model.generation_config.length_penalty_type = "gnmt"
    return model


def check_output_dir(
    output_dir: str | os.PathLike[str], model_arguments: ModelArguments, data_arguments: DataArguments
) -> None:
    """The output folder must be new, or hold an earlier part of a run with the same model and data."""
    folder = Path(output_dir)
    marker = folder / ARGUMENTS_FILE
    if marker.is_file():
        found = _read_own_file(marker)
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


def build_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    corpora: Corpora,
    data_arguments: DataArguments,
    training_arguments: TranslationTrainingArguments,
) -> TranslationTrainer:
    """Builds a trainer that batches, translates and scores the pairs of "train" and possibly "validation"."""
    limits = dict(zip(("max_source_length", "max_target_length"), data_arguments.lengths, strict=True))
    tokenized: dict[str, Any] = {}
    with training_arguments.main_process_first(desc="tokenizing"):
        for split, dataset in corpora.items():
            if isinstance(dataset, Dataset):
                tokenized[split] = tokenize_pairs(dataset, tokenizer, **limits, name=f"{split} data")
    compute_metrics: Callable[..., dict[str, float]] | None = None
    if training_arguments.predict_with_generate and "validation" in tokenized:
        langs = known_languages(data_arguments) or getattr(model.config, "langs", None)
        task = get_task(data_arguments.task)
        kinds = {find_bleu_tokenizer(pair) for pair in data_arguments.directions} or {find_bleu_tokenizer(langs)}
        bleu_tokenize = data_arguments.bleu_tokenize or (kinds.pop() if len(kinds) == 1 else find_bleu_tokenizer(None))
        compute_metrics = make_compute_metrics(
            tokenizer, task, bleu_tokenize=bleu_tokenize, remove_bpe=data_arguments.remove_bpe
        )
    callbacks: list[TrainerCallback] = [
        RecordWorldSize(streaming=not isinstance(corpora["train"], Dataset)),
        WarnOfWarmup(),
        WriteCurves(),
        ShipCode(),
        ReleaseMemory(),
    ]
    if training_arguments.early_stopping_patience is not None:
        callbacks.append(StopEarly(training_arguments.early_stopping_patience))
    pairs, train_lengths = corpora["train"], None
    if not isinstance(pairs, Dataset):
        train_dataset = stream_batches(pairs, tokenizer, data_arguments, training_arguments)
    else:
        train_dataset, train_lengths = prepare_training_data(
            pairs, tokenized["train"], tokenizer, data_arguments, training_arguments
        )
        groups_by_length = training_arguments.train_sampling_strategy == "group_by_length"
        if training_arguments.max_source_tokens is None and groups_by_length:
            callbacks.append(MixLengthGroups(np.maximum(*train_lengths).tolist()))
    name = training_arguments.teacher_model
    trainer = TranslationTrainer(
        model=model,
        teacher=AutoModelForSeq2SeqLM.from_pretrained(name) if name else None,
        args=training_arguments,
        train_dataset=train_dataset,
        eval_dataset=tokenized.get("validation"),
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=compute_metrics,
        callbacks=callbacks,
        train_lengths=train_lengths,
    )
    # Now, since the trainer may have given the model another one (`generation_config` of the arguments).
    trainer.add_callback(KeepGenerationConfig(copy.deepcopy(model.generation_config)))
    use_token_progress(trainer)
    return trainer


def check_teacher(
    name: str,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    prefixes: Mapping[Pair | None, str],
) -> None:
    """Refuses a model to learn from that writes other tokens than the one to train, or reads others before sources.

    `prefixes` are what stands before sources, by the pair of languages, or None.
    """
    with explain_missing_model(name):
        teacher: Any = AutoConfig.from_pretrained(name)
    sizes = [getattr(each, "decoder_vocab_size", None) or each.vocab_size for each in (teacher, config)]
    if sizes[0] != sizes[1] or get_vocabularies(load_needed_tokenizer(name)) != get_vocabularies(tokenizer):
        raise ValueError(f"teacher_model={name} has another vocabulary: train with tokenizer_name={name}.")
    for langs, prefix in prefixes.items():
        if task is TRANSLATION and langs is None and len(known := find_directions(teacher)) > 1:
            pairs = ", ".join(map(" to ".join, known))
            raise ValueError(f"teacher_model={name} translates {pairs}: name source_lang and target_lang.")
        wanted = find_prefix(teacher, task, langs=langs)
        if wanted != prefix:
            where = "" if langs is None else f" of {' to '.join(langs)}"
            advice = f": give source_prefix={wanted!r}" if len(prefixes) == 1 else ""
            raise ValueError(
                f"teacher_model={name} wants {wanted!r} before each source{where}, and here {prefix!r} stands "
                f"there{advice}."
            )


def check_streaming(data_arguments: DataArguments, arguments: TranslationTrainingArguments) -> None:
    """Checks that a run with `streaming` has all that a corpus without a known length needs."""
    if not data_arguments.streaming:
        return
    problems = []
    if arguments.max_source_tokens is None:
        problems.append("max_source_tokens must be given: its batches are filled by tokens")
    if arguments.max_steps <= 0:
        problems.append("max_steps must be given instead of a number of epochs: a stream has no length")
    for name in ("eval_strategy", "save_strategy"):
        if getattr(arguments, name) == "epoch":
            problems.append(f"{name} must be steps or no, not epoch")
    if problems:
        raise ValueError(f"streaming: {'; '.join(problems)}.")


def settle_training_arguments(
    arguments: TranslationTrainingArguments,
    config: PreTrainedConfig,
    *,
    validates: bool,
    regularizes_subwords: bool = False,
    task: Task = TRANSLATION,
) -> None:
    """Fills in, in place, what depends on model and data; `validates` says whether there are validation data."""
    arguments.choose_metric(task)
    if arguments.lr_scheduler_type in _SCHEDULES_BY_METRIC:  # the library's take the lowest value for the best
        mode = "max" if arguments.greater_is_better else "min"
        arguments.lr_scheduler_kwargs = {"mode": mode, **cast(dict[str, Any], arguments.lr_scheduler_kwargs or {})}
    # The model's own loss smooths labels, in training mode only.
    if arguments.has_own_label_smoothing and hasattr(config, "label_smoothing"):
        config.label_smoothing = arguments.label_smoothing_factor
        arguments.label_smoothing_factor = 0.0
    # Every update uses all parameters of these models; the library's default looks for unused ones, and then warns.
    if arguments.ddp_find_unused_parameters is None and isinstance(config, VanillaTransformerConfig):
        arguments.ddp_find_unused_parameters = False
    if regularizes_subwords:  # the training data stay texts until a batch is made
        arguments.remove_unused_columns = False
        if arguments.train_sampling_strategy == "batch_rebalance" and arguments.max_source_tokens is None:
            raise ValueError(
                "train_sampling_strategy=batch_rebalance needs fixed lengths, and subword regularisation changes them."
            )
    if not validates:
        arguments.eval_strategy = IntervalStrategy.NO
        arguments.load_best_model_at_end = False
        arguments.metric_for_best_model = None
