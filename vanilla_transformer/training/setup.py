"""What a training is put together from: tokenizer, configuration, model and trainer, by its arguments."""

import copy
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields
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
)
from transformers.trainer_utils import IntervalStrategy

from vanilla_transformer.conversion.tokenizers.sentencepiece import convert_sentencepiece
from vanilla_transformer.data.mixtures import StreamMixture
from vanilla_transformer.data.streams import sample_pairs
from vanilla_transformer.data.tokenizer_training import train_separate_tokenizer, train_tokenizer
from vanilla_transformer.inference.evaluate import make_compute_metrics
from vanilla_transformer.inference.loading import is_multilingual, set_languages
from vanilla_transformer.inference.scores import find_bleu_tokenizer
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.pipeline_vanilla_transformer import find_directions
from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.tasks import TRANSLATION, Task, find_prefix, get_task

from .arguments import DataArguments, ModelArguments, TranslationTrainingArguments
from .callbacks import KeepGenerationConfig, MixLengthGroups, ReleaseMemory, ShipCode, StopEarly, WarnOfWarmup
from .checkpoints import RecordWorldSize
from .checks import SCHEDULES_BY_METRIC
from .examples import Corpora, Pair, known_languages, prepare_training_data, stream_batches, tokenize_pairs
from .output_folder import read_own_file
from .records import WriteCurves, use_token_progress
from .trainer import TranslationTrainer


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
            read_own_file(Path(output_dir) / file_name)
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
    if arguments.model_name_or_path is None:
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
        config = type(base)(**settings)
    except StrictDataclassError as error:
        raise ValueError(f"config_overrides: {error}") from error
    _check_tokenizer(config, tokenizer, arguments)
    return config


def _check_tokenizer(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, arguments: ModelArguments) -> None:
    """The model must know all of the tokenizer's tokens."""
    target_tokens = getattr(tokenizer, "target_vocab_size", len(tokenizer))
    target_known = getattr(config, "decoder_vocab_size", None) or config.vocab_size
    sides = {"source": (len(tokenizer), config.vocab_size), "target": (target_tokens, target_known)}
    for side, (tokens, known) in sides.items():
        if tokens <= known:
            continue
        if arguments.model_name_or_path is None:
            raise ValueError(
                f"config_overrides: the tokenizer has {tokens} {side} tokens, and the model would know {known} of "
                "them. Leave the model's vocabulary to the tokenizer, which is trained with --vocab_size."
            )
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
    if arguments.lr_scheduler_type in SCHEDULES_BY_METRIC:  # the library's take the lowest value for the best
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
