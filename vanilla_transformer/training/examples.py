"""The data of a training, by its arguments: pairs of texts with their prefix, token ids, batches of a stream."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from vanilla_transformer.data.batching import IntArray, pair_lengths
from vanilla_transformer.data.corpora import load_parallel_corpus
from vanilla_transformer.data.mixtures import StreamMixture, mix_corpora, temper
from vanilla_transformer.data.readers import expand_files
from vanilla_transformer.data.stream_batches import StreamingTokenBatches
from vanilla_transformer.data.streams import stream_parallel_corpus, tokenize_stream
from vanilla_transformer.data.subword_regularization import SubwordRegularization, measure_length_growth
from vanilla_transformer.files import digest_files, replacing_files
from vanilla_transformer.tasks import get_task

from .arguments import DataArguments, TranslationTrainingArguments

logger = logging.get_logger(__name__)

LENGTH_GROWTH_FILE = "bpe_dropout_lengths.json"
# What it has processed, at last and while it is being written.
_OF_DATASETS = re.compile(r"\.|cache-|tmp\w{8}$")
_GROWTH_SAMPLE = 2000  # pairs by which it is measured how much longer regularised texts are

Corpora = Mapping[str, Any]  # of Dataset, IterableDataset or StreamMixture
Pair = tuple[str, str]  # source and target language


def load_corpora(
    arguments: DataArguments,
    *,
    source_prefix: str = "",
    directions: Mapping[Pair, str] | None = None,
    seed: int = 0,
) -> Corpora:
    """Loads "train" and possibly "validation", with the columns "source", which has the prefix, and "target".

    `directions` are the prefixes by source and target language, of a model of several. `seed` draws which pairs are
    there once more where several corpora have weights.
    """
    if arguments.builtin_corpus:
        corpora = _generate_corpora(arguments)
    else:
        corpora = _read_corpora(arguments, directions or {}, seed)
    if not source_prefix:
        return corpora

    def put(batch: dict[str, list[str]]) -> dict[str, list[str]]:
        return {**batch, "source": [source_prefix + source for source in batch["source"]]}

    return {split: dataset.map(put, batched=True) for split, dataset in corpora.items()}


def _read_corpora(arguments: DataArguments, directions: Mapping[Pair, str], seed: int) -> Corpora:
    common: dict[str, Any] = {name: getattr(arguments, name) for name in ("source_column", "target_column")}
    common["usual_columns"] = get_task(arguments.task).columns
    common["empty_lines"] = "drop" if arguments.drop_empty_lines else "error"
    load_training: Callable[..., Any] = stream_parallel_corpus if arguments.streaming else load_parallel_corpus
    dataset: dict[str, Any] = {name: getattr(arguments, name) for name in ("dataset_name", "dataset_config_name")}
    places = [dataset | {"split": arguments.train_split}] if arguments.dataset_name else []
    places += [{"files": files} for files in arguments.train_files]

    def load(load_one: Callable[..., Any], places: list[dict[str, Any]]) -> list[Any]:
        loaded = []
        languages: Any = arguments.corpus_languages or [(arguments.source_lang, arguments.target_lang)] * len(places)
        if arguments.lang_pairs and arguments.dataset_name and arguments.train_file and "files" in places[0]:
            # The first pair is the dataset's; files for validation go with those for training.
            languages = languages[1:]
        for place, (source, target) in zip(places, languages, strict=False):
            corpus = load_one(**place, **common, source_lang=source, target_lang=target)
            loaded += _point(corpus, (source, target), arguments, directions) if arguments.lang_pairs else [corpus]
        return loaded

    loaded = load(load_training, [place | {"max_samples": arguments.max_train_samples} for place in places])
    corpora = {"train": loaded[0] if len(loaded) == 1 else _mix(loaded, arguments, seed)}
    places = [{"files": files} for files in arguments.validation_files]
    if not places and arguments.dataset_name and arguments.validation_split:
        places = [dataset | {"split": arguments.validation_split, "streaming": arguments.streaming}]
    if places:
        limit = {"max_samples": arguments.max_eval_samples}
        corpora["validation"] = mix_corpora(load(load_parallel_corpus, [place | limit for place in places]))
    return corpora


def _point(corpus: Any, pair: Pair, arguments: DataArguments, directions: Mapping[Pair, str]) -> list[Any]:
    """A corpus whose sources say by their prefix which language to translate into; and the same backwards, if asked."""

    def put(batch: dict[str, list[str]], source: str, target: str, prefix: str) -> dict[str, list[str]]:
        return {"source": [prefix + text for text in batch[source]], "target": batch[target]}

    ways = [("source", "target", directions[pair])]
    if arguments.both_directions:
        ways.append(("target", "source", directions[pair[::-1]]))
    names = ("source", "target", "prefix")
    return [corpus.map(put, batched=True, fn_kwargs=dict(zip(names, way, strict=True))) for way in ways]


def _mix(loaded: list[Any], arguments: DataArguments, seed: int) -> Dataset | StreamMixture:
    weights = arguments.dataset_weights
    if weights and len(loaded) > len(weights):
        weights = [weight for weight in weights for _ in range(2)]  # one for each direction
    if arguments.streaming:
        return StreamMixture(loaded, weights or [1.0] * len(loaded))
    if arguments.dataset_temperature is not None:
        weights = temper(list(map(len, loaded)), arguments.dataset_temperature)
    return mix_corpora(loaded, weights, seed=seed)


def _generate_corpora(arguments: DataArguments) -> Corpora:
    # Its generators, num2words and Babel, are needed for nothing else.
    from vanilla_transformer.data.numbers_and_dates import numbers_and_dates

    for name in ("max_train_samples", "max_eval_samples"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ValueError(f"{name}={value}: must be at least 1, or None for all.")
    # As many as are trained on: generating them takes time, and fewer are the beginning of more.
    size: dict[str, Any] = {} if arguments.max_train_samples is None else {"num_examples": arguments.max_train_samples}
    source_lang, target_lang = known_languages(arguments) or ("en", "de")
    generated = numbers_and_dates(source_lang=source_lang, target_lang=target_lang, **size)
    validation = generated["validation"]
    if arguments.max_eval_samples is not None:
        validation = validation.take(min(arguments.max_eval_samples, len(validation)))
    return {"train": generated["train"], "validation": validation}


def describe_files(arguments: DataArguments, output_dir: str | None = None) -> dict[str, str | int]:
    """What tells the files of the corpora from other content of the same names, by path: digests, of a stream sizes.

    The output folder may lie in a dataset's.
    """
    streamed = list(expand_files([file for files in arguments.train_files for file in files]))
    whole = list(expand_files([file for files in arguments.validation_files for file in files]))
    if arguments.dataset_name is not None:
        streamed += _list_folder(Path(arguments.dataset_name), output_dir)
    if not arguments.streaming:
        streamed, whole = [], streamed + whole
    sizes: dict[str, str | int] = {path: Path(path).stat().st_size for path in streamed}
    return sizes | {path: digest_files([Path(path)])[Path(path).name] for path in whole}


def _list_folder(folder: Path, output_dir: str | None) -> list[str]:
    """The files of a dataset's folder; none of one on the Hub. What `datasets` keeps there for itself is none of it."""
    own = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    if output_dir is not None and folder.resolve() in (output := Path(output_dir).resolve()).parents:
        own = [path for path in own if not (folder / path).resolve().is_relative_to(output)]
    return [str(folder / path) for path in own if not any(map(_OF_DATASETS.match, path.parts))]


def known_languages(arguments: DataArguments) -> list[str] | None:
    """The source and the target language of the data, or `None` where the arguments do not name both."""
    if arguments.builtin_corpus:
        return [arguments.source_lang or "en", arguments.target_lang or "de"]
    if arguments.source_lang is None or arguments.target_lang is None:
        return None
    return [arguments.source_lang, arguments.target_lang]


def tokenize_pairs(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, max_source_length: int, max_target_length: int, name: str
) -> Dataset:
    """Turns texts into "input_ids", "attention_mask" and "labels", cut to so many tokens with a warning."""

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[Any]]:
        # The tokenizer's own remark about long texts names none: verbose=False spares it.
        encoded = tokenizer(batch["source"], text_target=batch["target"], verbose=False)
        long_sources = [len(ids) > max_source_length for ids in encoded["input_ids"]]
        long_targets = [len(ids) > max_target_length for ids in encoded["labels"]]
        if any(long_sources) or any(long_targets):
            encoded = tokenizer(batch["source"], max_length=max_source_length, truncation=True)
            targets = tokenizer(text_target=batch["target"], max_length=max_target_length, truncation=True)
            encoded["labels"] = targets["input_ids"]
        return {**encoded, "long_source": long_sources, "long_target": long_targets}

    tokenized = dataset.map(tokenize, batched=True, remove_columns=dataset.column_names, desc=f"Tokenizing {name}")
    sources, targets = (np.flatnonzero(tokenized[column]) for column in ("long_source", "long_target"))
    cut = np.union1d(sources, targets)
    if len(cut):
        logger.warning(
            f"{len(cut)} of {len(tokenized)} pairs of {name} were cut to max_source_length={max_source_length} or "
            f"max_target_length={max_target_length} tokens ({len(sources)} sources, {len(targets)} targets), the first "
            f"ones being number {', '.join(str(row + 1) for row in cut[:5])}."
        )
    return tokenized.remove_columns(["long_source", "long_target"])


def prepare_training_data(
    pairs: Dataset,
    tokenized: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    arguments: DataArguments,
    training_arguments: TranslationTrainingArguments,
) -> tuple[Dataset, tuple[IntArray, IntArray]]:
    """Returns what to train on, which is tokenized whenever it is read if so asked, and expected lengths (pairs,)."""
    source_lengths, target_lengths = pair_lengths(tokenized)
    limits = arguments.lengths
    draw = make_regularization(tokenizer, arguments, max_source_length=limits[0], max_target_length=limits[1])
    if draw is None:
        return tokenized, (source_lengths, target_lengths)
    growth = _agree_on_growth(pairs, tokenizer, arguments, training_arguments)
    expected = [
        np.minimum(np.ceil(lengths * factor), limit).astype(np.int64)
        for lengths, factor, limit in zip((source_lengths, target_lengths), growth, limits, strict=True)
    ]
    lengths = np.maximum(*expected)
    return pairs.add_column("length", lengths).with_transform(draw), (expected[0], expected[1])


def make_regularization(
    tokenizer: PreTrainedTokenizerBase, arguments: DataArguments, **limits: Any
) -> SubwordRegularization | None:
    """Makes what draws the tokens of training texts, if so asked; a `ValueError` if the tokenizer cannot."""
    if not arguments.regularizes_subwords:
        return None
    return SubwordRegularization(
        tokenizer, bpe_dropout=arguments.bpe_dropout or None, unigram_alpha=arguments.unigram_alpha, **limits
    )


def _agree_on_growth(
    pairs: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    arguments: DataArguments,
    training_arguments: TranslationTrainingArguments,
) -> tuple[float, float]:
    """Measures how much longer texts get, once: all processes, now and later, must plan the same batches."""
    path = Path(str(training_arguments.output_dir)) / LENGTH_GROWTH_FILE
    with training_arguments.main_process_first(local=False, desc="measuring subword regularisation"):
        if not path.is_file():
            sample = pairs.select(np.linspace(0, len(pairs) - 1, min(len(pairs), _GROWTH_SAMPLE), dtype=int))
            growth = measure_length_growth(
                *(tokenizer, arguments.bpe_dropout or None, sample["source"], sample["target"]),
                unigram_alpha=arguments.unigram_alpha,
            )
            with replacing_files(path.parent) as partial:
                (partial / path.name).write_text(json.dumps(growth), encoding="utf-8")
        source, target = json.loads(path.read_text(encoding="utf-8"))
    return source, target


def stream_batches(
    pairs: IterableDataset | StreamMixture,
    tokenizer: PreTrainedTokenizerBase,
    data_arguments: DataArguments,
    training_arguments: TranslationTrainingArguments,
) -> StreamingTokenBatches:
    """Makes an endless stream of token batches for this process from a stream with "source" and "target"."""
    limits = dict(zip(("max_source_length", "max_target_length"), data_arguments.lengths, strict=True))
    # Without limits: what is too long is cut, and reported, further on.
    encode = make_regularization(tokenizer, data_arguments)
    seed = training_arguments.data_seed
    return StreamingTokenBatches(
        tokenize_stream(pairs, tokenizer, **limits, encode=encode),
        max_source_tokens=training_arguments.max_source_tokens or 0,
        max_target_tokens=training_arguments.max_target_tokens or 0,
        window=data_arguments.streaming_window,
        seed=training_arguments.seed if seed is None else seed,
        num_replicas=training_arguments.world_size,
        rank=training_arguments.process_index,
    )
