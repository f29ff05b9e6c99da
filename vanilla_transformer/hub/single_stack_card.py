"""What the files in a half's folder say about it, for its model card."""

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vanilla_transformer.tasks import SingleStack, find_single_stack

from .facts import ModelFolder, read_config, read_json
from .words import (
    TaskWords,
    as_code,
    describe_dropout,
    describe_norm,
    format_duration,
    format_value,
    get_task_words,
    make_rows,
    quote,
    to_number,
)

_SHOWN_LABELS = 20
_UNNAMED = re.compile(r"LABEL_\d+")
# Of what the Trainer measures, the parts that say nothing about the model.
_COSTS = re.compile(r"runtime|.*_per_second|.*_time|epoch|mem_.*|num_input_tokens_seen")
# Whose scores these are: the training's own, and both of all together.
_OTHER_RESULTS = ("train_results.json", "all_results.json")


def read_model_folder(
    path: Path, repo_id: str | None, *, config: Mapping[str, Any] | None, **options: Any
) -> ModelFolder:
    """Reads the folder of a whole, or of a half.

    Args:
        path: The folder.
        repo_id: The model's name on the Hub, if it has one.
        config: Its configuration, if it is not what config.json holds.
        **options: As of `ModelFolder`.

    Raises:
        FileNotFoundError: If the folder has no config.json.
        ValueError: If a file is damaged; the message names it.
    """
    config = read_config(path) if config is None else config
    half = find_single_stack(config)
    if half is None:
        return ModelFolder(path, repo_id, config=config, **options)
    return SingleStackFolder(path, repo_id, half, config=config, **options)


class SingleStackFolder(ModelFolder):
    """Reads the folder of an encoder or a decoder alone, which the library's Trainer may have trained.

    What `scripts/train.py`, an evaluation or a conversion left in it tells of a whole, of which this is a half.
    """

    template = "single_stack_card.md"

    def __init__(self, path: Path, repo_id: str | None, half: SingleStack, **options: Any) -> None:
        super().__init__(path, repo_id, **options)
        self.half = half
        self.has_other_records = self.has_arguments or bool(self.conversion)
        if self.has_other_records:
            self.state, self.scores = {}, {}
        self.has_arguments, self.metrics, self.conversion = False, {}, {}
        self.model, self.data, self.training = {}, {}, {}

    @property
    def pipeline(self) -> str:
        """Its task, as the Hub calls it."""
        return self.half.pipeline

    @cached_property
    def words(self) -> TaskWords:
        """How to speak of what it does."""
        return get_task_words(self.half, is_regression=self.is_regression)

    @cached_property
    def is_regression(self) -> bool:
        """Whether what it says of a text are numbers, not labels; by the same rule as the library's loss."""
        kind = self.config.get("problem_type")
        is_one_number = kind is None and len(self._label_names) == 1
        return self.pipeline == "text-classification" and (kind == "regression" or is_one_number)

    @cached_property
    def _label_names(self) -> list[str]:
        recorded = self.config.get("id2label")
        # The library leaves out what is so by default. Of a file the keys are texts, of a configuration integers.
        labels = recorded if isinstance(recorded, dict) and recorded else {"0": "LABEL_0", "1": "LABEL_1"}
        return [str(name) for _, name in sorted(labels.items(), key=lambda item: (len(str(item[0])), str(item[0])))]

    @cached_property
    def languages(self) -> list[str] | None:
        """That of its side of the whole."""
        languages = self.config.get("langs")
        if not isinstance(languages, list) or len(languages) != 2:
            return None
        return [str(languages[self.half.side == "decoder"])]

    @cached_property
    def evaluations(self) -> list[Any]:
        """None: what `scripts/evaluate_translation.py` scores are wholes."""
        return []

    def facts(self) -> dict[str, Any]:
        """What the template needs besides the metadata."""
        begin, end = self._added_tokens() if self.half.writes else ([], [])
        shared = self._shared_facts()
        return {
            **shared,
            "curves": None if self.has_other_records else shared["curves"],
            "half": self.half,
            "is_regression": self.is_regression,
            "sentence": quote(self.words.sample),
            "texts": self._texts(begin, end) if self.half.writes else None,
            "ends_prompts": self.half.writes and bool(end),
            "default_search": self._default_search(),
            "recipe": self._recipe() if self.state or self.scores else None,
            "scores": list(self._told_scores()),
        }

    @cached_property
    def _backend(self) -> Tokenizer | None:
        path = self.path / "tokenizer.json"
        if not path.is_file():
            return None
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more special
            raise ValueError(f"{path} is not a tokenizer: {error}") from error

    def _added_tokens(self) -> tuple[list[str], list[str]]:
        """What the tokenizer puts before and behind a text."""
        if self._backend is None:
            return [], []
        bare = self._backend.encode("a", add_special_tokens=False).tokens
        tokens = self._backend.encode("a").tokens
        places = range(len(tokens) - len(bare) + 1)
        start = next((place for place in places if tokens[place : place + len(bare)] == bare), len(tokens))
        return tokens[:start], tokens[start + len(bare) :]

    def _texts(self, begin: list[str], end: list[str]) -> str | None:
        """What a language model's texts begin and end with."""
        backend = self._backend
        if backend is None:
            return None
        ends = self.generation.get("eos_token_id", self.config.get("eos_token_id"))
        numbers = ends if isinstance(ends, list) else [ends]
        stops = [token for number in numbers if number is not None and (token := backend.id_to_token(number))]
        told = ["The tokenizer puts nothing before a prompt."]
        if begin:
            told = [f"Texts begin with {' '.join(map(as_code, begin))}, which the tokenizer adds."]
        if stops:
            subject = "They" if begin else "Texts"
            told.append(f"{subject} end with {' or '.join(map(as_code, stops))}, at which `generate` stops.")
        if end:
            added = " ".join(map(as_code, end))
            told.append(f"This tokenizer adds {added} too; a prompt must not end so, hence `add_eos_token=False`.")
        return " ".join(told)

    def _origin(self) -> str:
        if self.base_model is None and self.state:
            return "It was trained with a `Trainer` of `transformers`."
        return super()._origin()

    def _architecture(self) -> list[list[str]]:
        config, side = self.config, self.half.side
        heads = format_value(config.get(f"{side}_attention_heads"))
        key_sizes = ", ".join(f"{name} {format_value(config[name])}" for name in ("d_k", "d_v") if config.get(name))
        parameters = format_value(self.parameters) + (f", {self.stored[1]}" if self.stored is not None else "")
        tables = "one for input and output" if config.get("tie_word_embeddings") else "one each for input and output"
        rows = [
            ("parameters", parameters),
            ("layers", config.get(f"{side}_layers")),
            ("width (d_model)", config.get("d_model")),
            ("inner width of feed-forward layers (d_ff)", config.get(f"{side}_ffn_dim")),
            ("attention heads", f"{heads} ({key_sizes})" if key_sizes else heads),
            ("vocabulary", f"{format_value(config.get('vocab_size'))} tokens"),
            *([("embedding tables", tables)] if self.half.writes else []),
            ("positions", config.get("position_embedding_type")),
            ("layer normalization", describe_norm(config)),
            ("activation", config.get("activation_function")),
            *([self._outputs()] if self.half.has_labels else []),
        ]
        return make_rows(rows)

    def _outputs(self) -> tuple[str, str]:
        """What its head says, as a row of a table."""
        names, kind = self._label_names, self.config.get("problem_type")
        if self.is_regression:
            return "numbers for each text (regression)", format_value(len(names))
        shown = ", ".join(map(as_code, names[:_SHOWN_LABELS]))
        more = f" and {len(names) - _SHOWN_LABELS} more" if len(names) > _SHOWN_LABELS else ""
        several = "; a text may have several" if kind == "multi_label_classification" else ""
        unknown = "; what they mean is not recorded" if all(map(_UNNAMED.fullmatch, names)) else ""
        return "labels", f"{len(names)}: {shown}{more}{several}{unknown}"

    def _recipe(self) -> list[list[str]]:
        """What the Trainer records in files that are no pickles."""
        steps, epochs = self.state.get("global_step"), to_number(self.state.get("epoch"))
        updates = None if steps is None else format_value(steps)
        if updates is not None and epochs is not None:
            updates += f" ({epochs:.4g} epochs)"
        size, seconds = self.state.get("train_batch_size"), to_number(self.scores.get("train_runtime"))
        return make_rows(
            [
                ("updates", updates),
                ("texts at a time in each process", size),
                ("training texts", self.scores.get("train_samples")),
                ("dropout", describe_dropout(self.config)),
                *([("label smoothing", self.config.get("label_smoothing"))] if self.half.writes else []),
                ("time", None if seconds is None else format_duration(seconds)),
            ]
        )

    def _told_scores(self) -> Iterator[str]:
        """What each of the Trainer's files with scores says, in a line, or else the last evaluation of its history."""
        if self.has_other_records:
            return
        found = False
        for path in sorted(self.path.glob("*_results.json")):
            if path.name not in _OTHER_RESULTS and (told := _tell_scores(read_json(path) or {})):
                found = True
                yield f"{as_code(path.name)}: {told}"
        history = self.state.get("log_history")
        entries = [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
        last = next((entry for entry in reversed(entries) if "eval_loss" in entry), None)
        if last is not None and not found:
            yield f"while it was trained, after update {format_value(last.get('step'))}: {_tell_scores(last)}"


def _tell_scores(entry: Mapping[str, Any]) -> str:
    scores = {}
    for key, value in entry.items():
        prefix, _, rest = key.partition("_")
        name = rest if prefix in ("eval", "predict", "test") else key
        if (number := to_number(value)) is not None and not _COSTS.fullmatch(name) and name != "step":
            scores[name] = number
    texts = scores.pop("samples", None)
    told = ", ".join(f"{name.replace('_', ' ')} {number:.4g}" for name, number in scores.items())
    return f"{told} ({format_value(int(texts))} texts)" if told and texts is not None else told
