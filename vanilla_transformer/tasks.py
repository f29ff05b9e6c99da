"""What models are for: the tasks of encoder-decoders with their columns, lengths and scores; those of single stacks.

A model's configuration says in `task_specific_params`, as T5's does, which tasks of `pipeline()` it is for, and what to
put before each source; a model for translation without such a prefix says nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedConfig

from .model.configuration_vanilla_transformer import VanillaTransformerConfig

TaskName = Literal["translation", "summarization", "text2text"]


@dataclass(frozen=True)
class Task:
    """A task of encoder-decoders."""

    name: TaskName
    pipeline: str  # what `pipeline()` calls it
    columns: tuple[tuple[str, str], ...]  # names of its sources and targets in usual datasets
    scores: tuple[str, ...]
    best_by: str  # the score that chooses the best checkpoint; BLEU is near 0 for long, and says little there
    max_source_length: int  # tokens that sources are cut to, unless told otherwise
    max_target_length: int
    # Whether a new model writes no more tokens than its targets have, rather than as many as the source and 50 more.
    is_bounded: bool


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="translation",
            pipeline="translation",
            columns=(("source", "target"),),
            scores=("bleu", "chrf", "exact_match"),
            best_by="chrf",
            max_source_length=256,
            max_target_length=256,
            is_bounded=False,
        ),
        Task(
            name="summarization",
            pipeline="summarization",
            columns=(
                *(("source", "target"), ("text", "summary"), ("document", "summary"), ("article", "highlights")),
                *(("article", "summary"), ("article", "abstract"), ("dialogue", "summary")),
                ("description", "abstract"),
            ),
            scores=("rouge1", "rouge2", "rougeL", "rougeLsum", "exact_match"),
            best_by="rougeL",
            max_source_length=1024,
            max_target_length=128,
            is_bounded=True,
        ),
        Task(
            name="text2text",
            pipeline="text2text-generation",
            columns=(
                *(("source", "target"), ("input", "target"), ("inputs", "targets")),
                *(("input", "output"), ("question", "answer")),
            ),
            scores=("bleu", "chrf", "exact_match", "wer", "per"),
            best_by="chrf",
            max_source_length=256,
            max_target_length=256,
            is_bounded=True,
        ),
    )
}
TRANSLATION = TASKS["translation"]


def get_task(name: str) -> Task:
    """The task of that name; a `ValueError` if there is none."""
    if name not in TASKS:
        raise ValueError(f"task={name!r}: must be one of {', '.join(TASKS)}.")
    return TASKS[name]


def _entries(config: PreTrainedConfig | Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What a configuration, or the content of its file, says of tasks."""
    name = "task_specific_params"
    found = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return {name: entry or {} for name, entry in found.items()} if isinstance(found, Mapping) else {}


def _belongs(entry: str, task: Task) -> bool:
    """Whether an entry such as translation_en_to_de is the task's."""
    return entry == task.pipeline or (task is TRANSLATION and entry.startswith("translation_"))


def find_task(config: PreTrainedConfig | Mapping[str, Any]) -> Task:
    """The task that a configuration, or the content of its file, names; translation if it names none or several."""
    named = [task for task in TASKS.values() if any(_belongs(entry, task) for entry in _entries(config))]
    return named[0] if len(named) == 1 else TRANSLATION


def _entries_to_ask(task: Task, langs: Sequence[str] | None, entries: Mapping[str, Any]) -> list[str]:
    """The names of the task's entries, the most special one first; where only one has languages, they need no name."""
    if task is not TRANSLATION:
        return [task.pipeline]
    if langs:
        return [f"translation_{langs[0]}_to_{langs[1]}", task.pipeline]
    pairs = [name for name in entries if name.startswith("translation_")]
    return [task.pipeline, *pairs] if len(pairs) == 1 else [task.pipeline]


def find_prefix(config: PreTrainedConfig | Mapping[str, Any], task: Task, *, langs: Sequence[str] | None = None) -> str:
    """What a model wants before each source when used for the task; `langs` are its source and target language."""
    entries = _entries(config)
    names = _entries_to_ask(task, langs, entries)
    prefixes = (entries[name].get("prefix") for name in names if name in entries)
    return next((str(prefix) for prefix in prefixes if prefix), "")


def record_task(config: PreTrainedConfig, task: Task, *, prefix: str = "", langs: Sequence[str] | None = None) -> None:
    """Writes into a configuration what its model is trained for; other tasks are dropped: the model unlearns them."""
    entries = {name: dict(entry) for name, entry in _entries(config).items() if _belongs(name, task)}
    for name in _entries_to_ask(task, langs, entries):
        if prefix:
            entries.setdefault(name, {})["prefix"] = prefix
        elif task is not TRANSLATION or name in entries:
            entries.setdefault(name, {}).pop("prefix", None)
    if entries or _entries(config):
        config.task_specific_params = entries or None


def record_directions(config: PreTrainedConfig, directions: Mapping[tuple[str, str], str]) -> None:
    """Writes into a configuration which languages its model translates, each pair with the prefix that it wants."""
    entries = {name: entry for name, entry in _entries(config).items() if name.startswith("translation_")}
    for (source, target), prefix in directions.items():
        entries.setdefault(f"translation_{source}_to_{target}", {})["prefix"] = prefix
    config.task_specific_params = entries
    if hasattr(config, "langs"):  # they are one pair
        config.langs = list(next(iter(directions))) if len(directions) == 1 else None


@dataclass(frozen=True)
class SingleStack:
    """A kind of model that is one stack of the Transformer."""

    name: str
    side: Literal["encoder", "decoder"]
    class_name: str  # what the name of its class ends with
    pipeline: str  # its task, as the Hub calls it, and `pipeline()` where that knows it
    auto_class: str
    has_labels: bool = False
    writes: bool = False  # texts


SINGLE_STACKS = (
    SingleStack("encoder", "encoder", "EncoderModel", "feature-extraction", "AutoModelForTextEncoding"),
    SingleStack(
        "text classifier",
        "encoder",
        "ForSequenceClassification",
        "text-classification",
        "AutoModelForSequenceClassification",
        has_labels=True,
    ),
    SingleStack(
        "token classifier",
        "encoder",
        "ForTokenClassification",
        "token-classification",
        "AutoModelForTokenClassification",
        has_labels=True,
    ),
    SingleStack("reader", "encoder", "ForQuestionAnswering", "question-answering", "AutoModelForQuestionAnswering"),
    SingleStack("decoder", "decoder", "DecoderModel", "feature-extraction", "AutoModel"),
    SingleStack("language model", "decoder", "ForCausalLM", "text-generation", "AutoModelForCausalLM", writes=True),
)


def find_single_stack(settings: Mapping[str, Any]) -> SingleStack | None:
    """The single stack that the content of a config.json describes: by `architectures`, else the one without a head.

    `None` for an encoder-decoder, and for the library's own models.
    """
    is_own = settings.get("model_type") == VanillaTransformerConfig.model_type
    if not is_own or settings.get("is_encoder_decoder", True):
        return None
    side = "decoder" if settings.get("is_decoder") else "encoder"
    plain, *others = (stack for stack in SINGLE_STACKS if stack.side == side)
    names = settings.get("architectures")
    named = str(names[0]) if isinstance(names, list) and names else ""
    return next((stack for stack in others if named.endswith(stack.class_name)), plain)
