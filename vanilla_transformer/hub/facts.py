"""What the files in a trained model's folder say about it, in words and numbers, for its model card."""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from safetensors import SafetensorError, safe_open
from transformers.utils import logging

from vanilla_transformer.files import AVERAGED_FOLDER, AVERAGING_FILE, digest_weights, read_architecture
from vanilla_transformer.tasks import TASKS, TRANSLATION, Task, find_prefix, find_task

from .words import (
    NOT_RECORDED,
    TaskWords,
    as_code,
    describe_batch,
    describe_dropout,
    describe_hardware,
    describe_norm,
    describe_optimizer,
    describe_precision,
    describe_rate,
    describe_search,
    describe_sides,
    describe_tables,
    describe_vocabulary,
    escape,
    format_duration,
    format_value,
    get_task_words,
    make_rows,
    name_language,
    quote,
    to_number,
)

logger = logging.get_logger(__name__)

_EXAMPLES = 5
_SHOWN_FILES = 6
# How the Trainer's arguments are written that are not set.
_NOTHING = ("None", "[]", "{}", "")
_SCORES = {
    "sacreBLEU": "bleu",
    "lowercased": "bleu_lowercase",
    "chrF": "chrf",
    "TER": "ter",
    "ROUGE-1": "rouge1",
    "ROUGE-2": "rouge2",
    "ROUGE-L": "rougeL",
    "ROUGE-Lsum": "rougeLsum",
    "exact match, %": "exact_match",
    "perplexity": "perplexity",
}
# The model-index: key, kind of the Hub, name, signature.
_RESULTS = (
    ("bleu", "sacrebleu", "sacreBLEU", "bleu_signature"),
    ("chrf", "chrf", "chrF", "chrf_signature"),
    ("rouge1", "rouge", "ROUGE-1", "rouge_signature"),
    ("rouge2", "rouge", "ROUGE-2", "rouge_signature"),
    ("rougeL", "rouge", "ROUGE-L", "rouge_signature"),
    ("rougeLsum", "rouge", "ROUGE-Lsum", "rouge_signature"),
)
# What the summary tells of the best evaluation.
_HEADLINE = {"bleu": "sacreBLEU", "chrf": "chrF", "rouge1": "ROUGE-1", "rouge2": "ROUGE-2", "rougeL": "ROUGE-L"}
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# A name of the Hub, unless it is the path of a local folder.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
# The Hub wants ISO 639 codes; corpora say en, en_XX, eng_Latn or en-US.
_LANGUAGE = re.compile(r"([A-Za-z]{2,3})([-_].*)?")


@dataclass(frozen=True)
class _TestSet:
    """What an evaluation was run on: its name for readers, and for the model-index."""

    name: str
    type: str
    config: str | None = None
    split: str | None = None
    note: str = ""

    @property
    def label(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name


@dataclass(frozen=True)
class _Evaluation:
    """What scripts/evaluate_translation.py wrote into a sub-folder."""

    folder: Path
    scores: Mapping[str, Any]
    test_set: _TestSet

    @cached_property
    def search(self) -> str:
        settings = _mapping(self.scores, "generation_config")
        beams = self.scores.get("num_beams", settings.get("num_beams"))
        dtype = self.scores.get("dtype")
        parts = [describe_search(beams, settings), *([str(dtype)] if dtype not in (None, "float32") else [])]
        return ", ".join(part for part in parts if part)

    def results(self) -> Iterator[EvalResult]:
        """The scores as the Hub's model-index has them."""
        task = TASKS.get(str(self.scores.get("task")), TRANSLATION)
        for key, kind, name, signature_key in _RESULTS:
            score, signature = to_number(self.scores.get(key)), self.scores.get(signature_key)
            if score is not None:
                yield EvalResult(
                    task_type=task.pipeline,
                    dataset_type=self.test_set.type,
                    dataset_name=self.test_set.name,
                    dataset_config=self.test_set.config,
                    dataset_split=self.test_set.split,
                    metric_type=kind,
                    metric_name=f"{name} ({self.search})",
                    metric_value=round(score, 2),
                    metric_args={"signature": signature} if isinstance(signature, str) else None,
                )


class ModelFolder:
    """Reads a model's folder, and says in words what is in it."""

    template = "model_card.md"

    def __init__(
        self,
        path: Path,
        repo_id: str | None,
        *,
        revision: str | None = None,
        config: Mapping[str, Any] | None = None,
        base_model: str | None = None,
    ) -> None:
        self.path, self.repo_id, self.revision = path, repo_id, revision
        self.given_base_model = base_model
        self.name = path.resolve().name
        self.config = read_config(path) if config is None else config
        self.generation = read_json(path / "generation_config.json") or {}
        self.metrics = read_json(path / "metrics.json") or {}
        self.state = read_json(path / "trainer_state.json") or {}
        self.conversion = read_json(path / "conversion.json") or {}
        arguments = read_json(path / "arguments.json")
        self.has_arguments = arguments is not None
        self.model, self.data, self.training = (
            {name: None if value in _NOTHING else value for name, value in _mapping(arguments or {}, part).items()}
            for part in ("model", "data", "training")
        )
        # metrics.json has what these have, and more; older trainings have only these.
        self.scores: dict[str, Any] = {
            **(read_json(path / "train_results.json") or {}),
            **(read_json(path / "eval_results.json") or {}),
            **_mapping(self.metrics, "metrics"),
        }

    @cached_property
    def task(self) -> Task:
        """What the model is for."""
        return find_task(self.config)

    @property
    def pipeline(self) -> str:
        """The same as the Hub calls it."""
        return self.task.pipeline

    @cached_property
    def words(self) -> TaskWords:
        """How to speak of that."""
        return get_task_words(self.task)

    @cached_property
    def is_converted(self) -> bool:
        """Whether its weights are another system's, as that left them."""
        return bool(self.conversion) and not self.has_arguments

    @cached_property
    def was_trained_here(self) -> bool:
        """Whether a training left anything here but the model."""
        return bool(self.has_arguments or self.metrics or self.state)

    @cached_property
    def languages(self) -> list[str] | None:
        """Source and target."""
        languages = self.config.get("langs")
        if not languages and self.data.get("builtin_corpus"):
            languages = [self.data.get("source_lang") or "en", self.data.get("target_lang") or "de"]
        languages = languages or [self.data.get("source_lang"), self.data.get("target_lang")]
        is_pair = isinstance(languages, list) and len(languages) == 2 and all(languages)
        return [str(language) for language in languages] if is_pair else None

    @cached_property
    def parameters(self) -> int | None:
        """Their number, tied ones counted once."""
        recorded = self.metrics.get("parameters")
        if isinstance(recorded, int):
            return recorded
        return None if self.stored is None else self.stored[0]

    @cached_property
    def stored(self) -> tuple[int, str] | None:
        """Number and type of the stored parameters; a type of model that stores more than parameters has more."""
        return _count_stored(self.path)

    @cached_property
    def _digests(self) -> dict[str, str]:
        return digest_weights(self.path)

    @cached_property
    def base_model(self) -> str | None:
        """The model that the training went on from, or the one on the Hub that was converted."""
        if self.given_base_model is not None:
            return self.given_base_model
        name = self.model.get("model_name_or_path")
        if self.is_converted and self.conversion.get("revision"):
            name = self.conversion.get("name")
        return str(name) if name else None

    @cached_property
    def evaluations(self) -> list[_Evaluation]:
        """Those of this folder's own weights, test sets before data that the training has seen, wide searches first."""
        found = []
        for path in sorted(self.path.glob("*/metrics.json")):
            scores = read_json(path) or {}
            if to_number(scores.get("bleu")) is None and to_number(scores.get("rouge1")) is None:
                continue  # the metrics of a training in a sub-folder
            if self._is_own(scores):
                found.append(_Evaluation(path.parent, scores, self._test_set(scores)))
            else:
                scored = _base_name(str(_mapping(scores, "arguments").get("model_name_or_path", "another model")))
                logger.warning_once(
                    f"{path} is left out of the card: it scores {scored}, not the model now in {self.path}."
                )

        def place(item: _Evaluation) -> tuple[bool, str, float]:
            return bool(item.test_set.note), item.test_set.name, -(to_number(item.scores.get("num_beams")) or 0)

        return sorted(found, key=place)

    def _is_own(self, scores: Mapping[str, Any]) -> bool:
        """The folder may have been moved since; the two paths of that time have not."""
        arguments = _mapping(scores, "arguments")
        model, output = arguments.get("model_name_or_path"), arguments.get("output_dir")
        recorded = self.metrics.get("parameters")
        if recorded is not None and scores.get("parameters", recorded) != recorded:
            return False
        # Older evaluations have no digests of the weights, and those of a model on the Hub empty ones.
        is_outdated = scores.get("weights_sha256") not in (None, {}, self._digests)
        # Nor have they the configuration; of later code's new fields it says nothing.
        architecture = read_architecture(self.config)
        fields = _mapping(scores, "architecture")
        is_outdated |= any(architecture.get(name) != value for name, value in fields.items())
        if is_outdated or not isinstance(model, str) or not isinstance(output, str):
            return False
        return model == self.repo_id or _is_same_path(model, os.path.join(output, ".."))

    def _test_set(self, scores: Mapping[str, Any]) -> _TestSet:
        arguments = _mapping(scores, "arguments")
        split = arguments.get("dataset_split")
        notes = []
        for part, files, split_key in (
            ("training", "train_file", "train_split"),
            ("validation", "validation_file", "validation_split"),
        ):
            same_files = arguments.get("test_file") and _base_names(arguments["test_file"]) == _base_names(
                self.data.get(files)
            )
            same_name = arguments.get("dataset_name") and arguments["dataset_name"] == self.data.get("dataset_name")
            both_built_in = arguments.get("builtin_corpus") and self.data.get("builtin_corpus")
            if same_files or ((same_name or both_built_in) and split == (self.data.get(split_key) or part)):
                notes.append(f"{part} data")
        if arguments.get("max_samples"):
            notes.append(f"first {format_value(arguments['max_samples'])} pairs")
        return _name_test_set(arguments, split, self.languages, ", ".join(notes))

    def metadata(self, name: str) -> dict[str, Any]:
        """What the Hub reads, as keyword arguments of `ModelCardData`."""
        results: dict[str, EvalResult] = {}
        for evaluation in self.evaluations:
            if not evaluation.test_set.note:
                for result in evaluation.results():
                    results.setdefault(identify_result(result), result)
        codes = [match[1].lower() for language in self.languages or [] if (match := _LANGUAGE.fullmatch(language))]
        dataset = self.data.get("dataset_name")
        is_paper = self.config.get("model_type") == "vanilla_transformer"
        base_model = self.base_model if is_hub_name(self.base_model) else None
        return {
            "language": codes or None,
            "library_name": "transformers",
            "pipeline_tag": self.pipeline,
            "tags": [self.pipeline, *(["vanilla_transformer", "attention-is-all-you-need"] if is_paper else [])],
            "datasets": [dataset] if is_hub_name(dataset) else None,
            "base_model": base_model,
            "base_model_relation": "finetune" if base_model and not self.is_converted else None,
            "metrics": sorted({result.metric_type for result in results.values()}, reverse=True) or None,
            "eval_results": list(results.values()) or None,
            "model_name": name if results else None,
        }

    def facts(self) -> dict[str, Any]:
        """What the template needs besides the metadata."""
        examples = self._examples()
        source = next((row[0] for row in examples or [] if len(row) == 3), None)
        language = name_language(self.languages[0]) if self.languages else None
        sentence = source or (f"A sentence in {language}." if language else self.words.sample)
        return {
            **self._shared_facts(),
            "direction": " to ".join(map(name_language, self.languages)) if self.languages else None,
            "headline": self._headline(),
            "sentence": quote(sentence),
            "other_tasks": ", ".join(
                f"`{task}`" for task in _mapping(self.config, "custom_pipelines") if task != self.pipeline
            ),
            "default_search": self._default_search(),
            "data_rows": self._data() if self.has_arguments else None,
            "cut": self._cut(),
            "recipe": self._recipe() if self.was_trained_here else None,
            "validation": self._validation(),
            **self._evaluation_table(),
            "examples": None if examples is None else [[escape(text) for text in row] for row in examples],
            "examples_from": examples and f"{escape(self.evaluations[0].test_set.name)} ({self.evaluations[0].search})",
            "examples_head": ["source", "reference", self.words.result][-len(examples[0]) :] if examples else None,
        }

    def _shared_facts(self) -> dict[str, Any]:
        """Those of a whole and of a half."""
        modules = {str(name).partition(".")[0] for name in _mapping(self.config, "auto_map").values()}
        return {
            "is_vanilla": self.config.get("model_type") == "vanilla_transformer",
            "model_type": self.config.get("model_type", NOT_RECORDED),
            "parameters": "an unknown number of" if self.parameters is None else f"{self.parameters:,}",
            "origin": self._origin(),
            "needs_code": bool(modules),
            "has_tokenizer": any(self.path.glob("token*.json")),
            "has_code": bool(modules) and all((self.path / f"{module}.py").is_file() for module in modules),
            "address": self._address(),
            "task": self.pipeline,
            "words": self.words,
            "architecture": self._architecture(),
            "curves": "curves.png" if (self.path / "curves.png").is_file() else None,
        }

    def _address(self) -> str:
        """What the loading functions are given, as arguments of Python."""
        address = quote(self.repo_id or f"path/to/{self.name}")
        return f"{address}, revision={quote(self.revision)}" if self.revision else address

    def _origin(self) -> str:
        if self.is_converted:
            name, system = (as_code(str(self.conversion.get(key))) for key in ("name", "system"))
            origin = f"It was converted by `vanilla_transformer` from {name} ({system})."
            return f"{origin} How that was trained is not recorded."
        if self.base_model is None:
            trained = "It was trained from scratch with `vanilla_transformer`."
            return trained if self.has_arguments else "How it was trained is not recorded."
        tool = " with `vanilla_transformer`" if self.has_arguments else ""
        return f"It was trained further{tool}, from {as_code(_public_name(self.base_model))}."

    def _default_search(self) -> str | None:
        if self.generation.get("do_sample"):
            return "samples"
        search = describe_search(self.generation.get("num_beams", 1), self.generation)
        return "decodes greedily" if search == "greedy" else f"searches with {search}"

    def _headline(self) -> str | None:
        best = next((item for item in self.evaluations if not item.test_set.note), None)
        if best is None:
            return None
        found = {name: to_number(best.scores.get(key)) for key, name in _HEADLINE.items()}
        *scores, last = [f"{score:.2f} {name}" for name, score in found.items() if score is not None]
        told = f"{', '.join(scores)} and {last}" if scores else last
        return f"On {escape(best.test_set.name)} it scores {told} ({best.search})."

    def _architecture(self) -> list[list[str]]:
        config = self.config
        heads = describe_sides(config, "{}_attention_heads")
        key_sizes = ", ".join(f"{name} {format_value(config[name])}" for name in ("d_k", "d_v") if config.get(name))
        sides = "both languages" if self.task is TRANSLATION else "source and target"
        parameters = format_value(self.parameters) + (f", {self.stored[1]}" if self.stored is not None else "")
        rows = [
            ("parameters", parameters),
            ("layers, encoder + decoder", describe_sides(config, "{}_layers", always=True)),
            ("width (d_model)", config.get("d_model")),
            ("inner width of feed-forward layers (d_ff)", describe_sides(config, "{}_ffn_dim")),
            ("attention heads", f"{heads} ({key_sizes})" if key_sizes else heads),
            ("vocabulary", describe_vocabulary(config, sides=sides)),
            ("embedding tables", describe_tables(config)),
            ("positions", config.get("position_embedding_type")),
            ("layer normalization", describe_norm(config)),
            ("activation", config.get("activation_function")),
        ]
        return make_rows(rows)

    def _data(self) -> list[list[str]]:
        tokenizer = self.model.get("tokenizer_name")
        if tokenizer:
            origin = as_code(_public_name(str(tokenizer)))
        else:
            origin = "trained on the training data" if self.base_model is None else "the base model's"
        if rate := self.data.get("bpe_dropout"):
            origin += f"; BPE-dropout {format_value(rate)} in training"
        prefix = find_prefix(self.config, self.task, langs=self.languages)
        return make_rows(
            [
                *([("put before each source", as_code(prefix))] if prefix else []),
                ("training", self._corpus("train")),
                ("number of training pairs", self.scores.get("train_samples")),
                ("validation", self._corpus("validation")),
                ("tokenizer", origin),
            ]
        )

    def _corpus(self, part: str) -> str | None:
        data = self.data
        limit = data.get("max_train_samples" if part == "train" else "max_eval_samples")
        suffix = "" if limit is None else f", at most the first {format_value(limit)} pairs"
        if data.get("builtin_corpus"):
            return f"numbers and dates in words, generated by `vanilla_transformer`{suffix}"
        if files := _base_names(data.get(f"{part}_file")):
            shown = ", ".join(map(as_code, files[:_SHOWN_FILES]))
            more = len(files) - _SHOWN_FILES
            return shown + (f" and {more} more files" if more > 0 else "") + suffix
        name, split = data.get("dataset_name"), data.get(f"{part}_split")
        if not name or not split:
            return "none" if part == "validation" else None
        config = data.get("dataset_config_name")
        parts = [as_code(_public_name(str(name))), *([f"configuration {as_code(config)}"] if config else [])]
        return ", ".join([*parts, f"split {as_code(split)}"]) + suffix

    def _cut(self) -> str | None:
        source, target = self.data.get("max_source_length"), self.data.get("max_target_length")
        if not source or not target:
            return None
        return f"sources were cut to {format_value(source)} tokens and targets to {format_value(target)}"

    def _recipe(self) -> list[list[str]]:
        """Hyper-parameters as they were when training began, results as they were at its end."""
        training, has = self.training, self.has_arguments
        steps = self.metrics.get("steps", self.state.get("global_step"))
        epochs = to_number(self.metrics.get("epochs", self.state.get("epoch")))
        updates = None if steps is None else format_value(steps)
        if updates is not None and epochs is not None:
            updates += f" ({epochs:.4g} epochs)"
        tokens = _mapping(self.metrics, "tokens_seen")
        seconds = to_number(self.scores.get("train_runtime"))
        smoothing = self.config.get("label_smoothing", training.get("label_smoothing_factor"))
        processes = self.metrics.get("processes")
        seed = training.get("seed")
        rows: list[tuple[str, Any]] = [
            ("updates", updates),
            ("batch", describe_batch(training, processes) if has else None),
            ("optimizer", describe_optimizer(training) if has else None),
            ("learning rate", describe_rate(training, self.config) if has else None),
            ("dropout", describe_dropout(self.config)),
            ("label smoothing", smoothing),
            ("gradients clipped to norm", training.get("max_grad_norm") or ("not clipped" if has else None)),
            ("precision", describe_precision(training) if has else None),
            ("seed", None if seed is None else str(seed)),
            ("weights", self._weights()),
            (
                "tokens seen, without padding",
                f"{format_value(tokens['source'])} source, {format_value(tokens['target'])} target"
                if tokens.get("source") and tokens.get("target")
                else None,
            ),
            ("time", None if seconds is None else format_duration(seconds)),
            ("hardware", describe_hardware(self.metrics)),
            ("software", ", ".join(f"{name} {number}" for name, number in _mapping(self.metrics, "versions").items())),
        ]
        return make_rows(rows)

    def _weights(self) -> str | None:
        """Which of a training's weights these are."""
        if not self.has_arguments or not (self.metrics or self.state):
            return None
        sharded = self.training.get("fsdp") or self.training.get("deepspeed")
        if (most := self.training.get("average_checkpoints")) and not sharded:
            averaged = (read_json(self.path / AVERAGED_FOLDER / AVERAGING_FILE) or {}).get("checkpoints")
            count = format_value(len(averaged)) if isinstance(averaged, list) else f"at most {format_value(most)}"
            return f"average of the last {count} checkpoints"
        best = _mapping(self.metrics, "best")
        step = best.get("step", self.state.get("best_global_step"))
        if self.training.get("load_best_model_at_end") and step:
            metric = best.get("metric") or self.training.get("metric_for_best_model")
            by = f"by {metric} on the validation data" if metric else "on the validation data"
            return f"best checkpoint {by}, that of update {format_value(step)}"
        return "those of the last update"

    def _validation(self) -> str | None:
        """The Trainer's own scores, which sacreBLEU's signatures do not cover."""
        forms = {key: f"{name} {{:.2f}}" for key, name in _HEADLINE.items()} | {"bleu": "BLEU {:.2f}"}
        forms |= {"perplexity": "perplexity {:.2f}", "loss": "loss {:.3f}"}
        found = [
            form.format(score)
            for name, form in forms.items()
            if (score := to_number(self.scores.get(f"eval_{name}"))) is not None
        ]
        if not found:
            return None
        beams = self.training.get("generation_num_beams")
        search = f" ({describe_search(beams, {})})" if beams else ""
        return (
            f"The trainer's last evaluation on the validation data{search}: {', '.join(found)}. Such figures compare "
            "checkpoints of one training, not systems."
        )

    def _evaluation_table(self) -> dict[str, Any]:
        columns = {
            head: key
            for head, key in _SCORES.items()
            if any(to_number(item.scores.get(key)) is not None for item in self.evaluations)
        }
        rows = []
        for item in self.evaluations:
            scores = [to_number(item.scores.get(key)) for key in columns.values()]
            shown = ["" if score is None else f"{score:.2f}" for score in scores]
            rows.append([escape(item.test_set.label), format_value(item.scores.get("sentences")), item.search, *shown])
        return {
            "evaluations": rows,
            "evaluation_head": ["test set", "sentences", "search", *columns],
            "signatures": self._signatures(columns),
        }

    def _signatures(self, columns: Mapping[str, str]) -> list[str]:
        """One for each kind of score, unless evaluations differ in it."""
        found: dict[str, dict[str, list[str]]] = {head: {} for head in columns}
        for item in self.evaluations:
            for head, key in columns.items():
                # ROUGE's scores share one.
                kind = "rouge" if key == "rouge1" else key
                if isinstance(signature := item.scores.get(f"{kind}_signature"), str):
                    found[head].setdefault(signature, []).append(f"{item.test_set.label}, {item.search}")
        lines = []
        for head, signatures in found.items():
            for signature, labels in signatures.items():
                where = f" ({escape('; '.join(labels))})" if len(signatures) > 1 else ""
                lines.append(f"{head}{where}: {as_code(signature)}")
        return lines

    def _examples(self) -> list[list[str]] | None:
        """The first sentences of the first evaluation, with sources if they are there."""
        for item in self.evaluations[:1]:
            names = [
                name for name in ("sources", "references", "hypotheses") if (item.folder / f"{name}.txt").is_file()
            ]
            if "references" in names and "hypotheses" in names:
                columns = [_first_lines(item.folder / f"{name}.txt", _EXAMPLES) for name in names]
                return [list(row) for row in zip(*columns, strict=False)] or None
        return None


def identify_result(result: EvalResult) -> str:
    """Tells a result of the model-index from the others, whatever its value and however its test set is called."""
    return json.dumps([*result.unique_identifier, result.metric_type, result.metric_name, result.metric_config])


def read_config(folder: Path) -> dict[str, Any]:
    """What a model's config.json holds.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged.
    """
    config = read_json(folder / "config.json")
    if config is None:
        raise FileNotFoundError(f"{folder} has no config.json: a card is made for a folder with a saved model.")
    return config


def read_json(path: Path) -> dict[str, Any] | None:
    """A file's object, or `None` if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(content).__name__}.")
    return content


def _mapping(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = content.get(name)
    return value if isinstance(value, dict) else {}


def _first_lines(path: Path, count: int) -> list[str]:
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            return [line.strip() for line in islice(file, count)]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def _count_stored(folder: Path) -> tuple[int, str] | None:
    """Number and type of the stored parameters, from the headers; `None` for quantized, damaged or absent weights."""
    count, types = 0, set()
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(path, framework="pt") as weights:
                slices = [weights.get_slice(name) for name in weights.keys()]  # noqa: SIM118 (not a mapping)
                count += sum(math.prod(part.get_shape()) for part in slices)
                types |= {part.get_dtype() for part in slices}
        except (OSError, SafetensorError):
            return None
    if not types or not types <= _FLOATS.keys():
        return None
    return count, ", ".join(sorted(_FLOATS[name] for name in types))


def _base_name(path: str) -> str:
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1]


def _base_names(paths: Any) -> list[str]:
    return [_base_name(str(path)) for path in paths] if isinstance(paths, list) else []


def is_hub_name(name: Any) -> bool:
    """Whether this can be a name on the Hub, and is not that of a local file or folder."""
    return isinstance(name, str) and _HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _public_name(name: str) -> str:
    """A name of the Hub whole, of a local path the last part."""
    return name if is_hub_name(name) else _base_name(name)


def _is_same_path(one: str, other: str) -> bool:
    """Whether two paths, seen from the same unknown folder, can only be the same; one of them may be absolute."""
    normal = [os.path.normpath(path.replace("\\", "/")) for path in (one, other)]
    if normal[0] == normal[1]:
        return True
    relative, *more = [path for path in normal if not os.path.isabs(path)] or [""]
    known = relative.split("../")[-1]
    if more or not known or known in (".", ".."):
        return False
    return any(os.path.isabs(path) and f"{path}/".endswith(f"/{known}/") for path in normal)


def _name_test_set(arguments: Mapping[str, Any], split: Any, languages: list[str] | None, note: str) -> _TestSet:
    split = str(split) if split else None
    if arguments.get("builtin_corpus"):
        sides = "-".join(languages) if languages else None
        return _TestSet(f"numbers and dates in words ({split})", "generated", config=sides, split=split, note=note)
    if name := arguments.get("dataset_name"):
        public, config = _public_name(str(name)), arguments.get("dataset_config_name")
        kind = public if is_hub_name(name) else "local"
        return _TestSet(f"{public} ({split})", kind, config=config, split=split, note=note)
    files = _base_names(arguments.get("test_file"))
    stems = {name.partition(".")[0] for name in files}
    stem = stems.pop() if len(stems) == 1 else ", ".join(files)
    name = stem or NOT_RECORDED
    return _TestSet(name, "local", config=name, note=note)
