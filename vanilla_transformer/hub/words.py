"""How a model card puts numbers, settings and names into words; what is unknown is called so."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vanilla_transformer.tasks import SingleStack, Task

NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class TaskWords:
    """How to speak of what a model does.

    Attributes:
        verb: What it does with a text, as a name in Python.
        doing: The same as a participle.
        does: The same as it is said of the model.
        purpose: What kind of model it is.
        joint: The word between a text and what comes out, after `does`.
        result: What comes out.
        sample: What to try it with.
        limits: What else not to expect of it.
    """

    verb: str
    doing: str
    does: str
    purpose: str
    joint: str
    result: str
    sample: str
    limits: tuple[str, ...]


_TASK_WORDS = {
    "translation": TaskWords(
        verb="translate",
        doing="translating",
        does="translates",
        purpose="for translation; its languages are not recorded",
        joint="as",
        result="translation",
        sample="A sentence to translate.",
        limits=(
            "It translates sentence by sentence, without the context.",
            "A translation can read well and be wrong: it may leave out, add or repeat. Have it checked where that "
            "matters.",
            "What the training data assume about people, their gender above all, comes back in the translations.",
        ),
    ),
    "summarization": TaskWords(
        verb="summarize",
        doing="summarizing",
        does="summarizes",
        purpose="that summarizes texts",
        joint="as",
        result="summary",
        sample="A text to summarize.",
        limits=(
            "It reads no further than the length that it was trained for.",
            "A summary can read well and be wrong: it may leave out what matters, or say what the text does not. Have "
            "it checked where that matters.",
            "What the training data assume about people comes back in the summaries.",
        ),
    ),
    "text2text": TaskWords(
        verb="generate",
        doing="answering",
        does="answers",
        purpose="that makes one text of another",
        joint="with",
        result="output",
        sample="A text to start from.",
        limits=(
            "It reads one text at a time, without the context.",
            "What it writes can read well and be wrong. Have it checked where that matters.",
            "What the training data assume about people comes back in what it writes.",
        ),
    ),
    "encoder": TaskWords(
        verb="encode",
        doing="encoding",
        does="encodes",
        purpose="which makes a state of each token of a text",
        joint="as",
        result="states",
        sample="A text to encode.",
        limits=("Its states are what its layers compute: that near ones mean the same is not promised.",),
    ),
    "text classifier": TaskWords(
        verb="classify",
        doing="classifying",
        does="classifies",
        purpose="with a head that classifies texts",
        joint="as",
        result="label",
        sample="A text to classify.",
        limits=(
            "It answers for every text, also for one of a kind that it has never seen.",
            "The score that comes with a label does not say how often the model is right.",
            "What the training data assume about people comes back in what it answers.",
        ),
    ),
    "regression": TaskWords(
        verb="rate",
        doing="rating",
        does="rates",
        purpose="with a head that rates texts in numbers",
        joint="as",
        result="number",
        sample="A text to rate.",
        limits=(
            "It answers for every text, also for one of a kind that it has never seen.",
            "Its numbers have no bounds, and nothing that comes with them says how far off they may be.",
            "What the training data assume about people comes back in what it answers.",
        ),
    ),
    "token classifier": TaskWords(
        verb="label",
        doing="labelling",
        does="labels",
        purpose="with a head that classifies the tokens of a text",
        joint="as",
        result="labels",
        sample="A text with words to label.",
        limits=(
            "It labels tokens, which may be parts of words.",
            "The score that comes with a label does not say how often the model is right.",
            "What the training data assume about people comes back in what it answers.",
        ),
    ),
    "reader": TaskWords(
        verb="answer",
        doing="answering a question about",
        does="answers a question about",
        purpose="with a head that finds in a text where the answer to a question starts and ends",
        joint="with",
        result="answer",
        sample="A man rides a horse.",
        limits=(
            "It answers every question with a part of the text, also one whose answer is not there.",
            "What the training data assume about people comes back in what it answers.",
        ),
    ),
    "decoder": TaskWords(
        verb="encode",
        doing="encoding",
        does="encodes",
        purpose="which makes a state of each token of a text from those up to it",
        joint="as",
        result="states",
        sample="A text to encode.",
        limits=("Its states are what its layers compute: that near ones mean the same is not promised.",),
    ),
    "language model": TaskWords(
        verb="write",
        doing="continuing",
        does="continues",
        purpose="as a language model",
        joint="with",
        result="text",
        sample="A text that goes on",
        limits=(
            "What it writes can read well and be wrong. Have it checked where that matters.",
            "What the training data assume about people comes back in what it writes.",
        ),
    ),
}


def get_task_words(task: Task | SingleStack, *, is_regression: bool = False) -> TaskWords:
    """How to speak of a model for the task, or of a half; of a classifier of texts, whether it says numbers instead."""
    return _TASK_WORDS["regression" if is_regression else task.name]


def to_number(value: Any) -> float | None:
    """The value, if it is a number and finite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def name_language(code: str) -> str:
    """A language's English name, or its code where no name is known."""
    try:
        from babel import Locale
    except ImportError:  # it is needed for scripts only
        return code
    return str(Locale("en").languages.get(code.replace("-", "_"), code))


def format_value(value: Any) -> str:
    """A number, a word or a text, safe in Markdown."""
    if value is None or value == "":
        return NOT_RECORDED
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escape(str(value))


def make_rows(rows: list[tuple[str, Any]]) -> list[list[str]]:
    """Numbers are formatted; texts stand as they are, since they may hold Markdown."""
    return [[label, value if isinstance(value, str) and value else format_value(value)] for label, value in rows]


def escape(text: str) -> str:
    """Keeps Markdown from reading a text; tables take care of their own separator."""
    text = re.sub(r"([\\`*\[\]])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;")


def as_code(value: Any) -> str:
    """In Markdown's signs for code, where nothing else is read but the comments around a card's sections."""
    text = " ".join(str(value).split()).replace("`", "'").replace("<!--", "<! --")
    return f"`{text}`"


def quote(text: str) -> str:
    """As a string of Python."""
    return json.dumps(text, ensure_ascii=False)


def describe_norm(config: Mapping[str, Any]) -> str | None:
    """Where the layer normalization is."""
    before, last = config.get("normalize_before"), config.get("add_final_layer_norm")
    if before is None:
        return None
    place = "before each sub-layer (pre-LN)" if before else "after each sub-layer (post-LN)"
    unusual = {True: "and once more after a stack", False: "and none after a stack"}
    return place if last in (None, before) else f"{place}, {unusual[last]}"


def describe_sides(config: Mapping[str, Any], name: str, *, always: bool = False) -> str | None:
    """What encoder and decoder have, once if it is the same."""
    sides = [config.get(name.format(side)) for side in ("encoder", "decoder")]
    if None in sides:
        return None
    return format_value(sides[0]) if sides[0] == sides[1] and not always else " + ".join(map(format_value, sides))


def describe_vocabulary(config: Mapping[str, Any], *, sides: str = "both languages") -> str | None:
    """The numbers of tokens; `sides` are source and target."""
    source, target = config.get("vocab_size"), config.get("decoder_vocab_size")
    if source is None:
        return None
    if target is None or config.get("share_encoder_decoder_embeddings"):
        return f"{format_value(source)} tokens, the same for {sides}"
    return f"{format_value(source)} source tokens, {format_value(target)} target tokens"


def describe_tables(config: Mapping[str, Any]) -> str | None:
    """Which embeddings are shared."""
    shared, tied = config.get("share_encoder_decoder_embeddings"), config.get("tie_word_embeddings")
    if shared is None or tied is None:
        return None
    if shared:
        return "one for encoder, decoder and output layer" if tied else "one for encoder and decoder"
    return "one for the encoder, one for decoder and output layer" if tied else "one each for encoder and decoder"


def describe_search(beams: Any, settings: Mapping[str, Any]) -> str:
    """How a translation is searched for."""
    if settings.get("do_sample"):
        return "sampling"
    search = "greedy" if beams == 1 else f"{format_value(beams)} beams"
    penalty = settings.get("length_penalty")
    kind = settings.get("length_penalty_type") or "transformers"
    if beams == 1 or penalty is None or (penalty == 1 and kind == "transformers"):
        return search
    return f"{search}, {'GNMT ' if kind == 'gnmt' else ''}length penalty {format_value(penalty)}"


def describe_batch(training: Mapping[str, Any], processes: Any) -> str | None:
    """What an update is computed from."""
    source, target = training.get("max_source_tokens"), training.get("max_target_tokens")
    pairs = training.get("per_device_train_batch_size")
    if source:
        sizes = format_value(source), format_value(target or source)
        batch = "at most {} source and {} target tokens, padding included".format(*sizes)
    elif pairs:
        batch = f"{format_value(pairs)} sentence pairs"
    else:
        return None
    passes = training.get("gradient_accumulation_steps") or 1
    factors = [f"{format_value(passes)} passes"] if passes != 1 else []
    if processes is None:
        factors.append("devices (their number is not recorded)")
    elif processes != 1:
        factors.append(f"{format_value(processes)} devices")
    return " x ".join([batch, *factors])


def describe_optimizer(training: Mapping[str, Any]) -> str:
    """The optimizer and its settings."""
    betas = ", ".join(format_value(training.get(name)) for name in ("adam_beta1", "adam_beta2"))
    text = f"{as_code(training.get('optim'))}, betas {betas}, epsilon {format_value(training.get('adam_epsilon'))}"
    decay = training.get("weight_decay")
    return f"{text}, weight decay {format_value(decay)}" if decay else text


def describe_rate(training: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The learning rate, and how it changes."""
    rate, warmup = training.get("learning_rate"), to_number(training.get("warmup_steps"))
    peak = format_value(rate)
    if rate is None and warmup and config.get("d_model"):
        peak = f"{(config['d_model'] * warmup) ** -0.5:.3g}, the paper's (d_model · warm-up)^-0.5"
    text = f"peak {peak}; schedule {as_code(training.get('lr_scheduler_type'))}"
    if not warmup:
        return text
    return (
        f"{text}, {format_value(warmup)} warm-up updates"
        if warmup >= 1
        else f"{text}, warm-up {warmup:.3g} of the updates"
    )


def describe_dropout(config: Mapping[str, Any]) -> str | None:
    """Which dropout there is, and how much."""
    kinds = {"dropout": "{}", "attention_dropout": "attention {}", "activation_dropout": "activations {}"}
    parts = [form.format(format_value(config[name])) for name, form in kinds.items() if config.get(name)]
    return ", ".join(parts) or (None if config.get("dropout") is None else "0")


def describe_precision(training: Mapping[str, Any]) -> str:
    """What the training computed in."""
    for name, precision in (("bf16", "bfloat16 autocast"), ("fp16", "float16 autocast")):
        if training.get(name):
            return precision
    return "float32"


def describe_hardware(metrics: Mapping[str, Any]) -> str | None:
    """What the training ran on."""
    name, device, processes = (metrics.get(key) for key in ("device_name", "device", "processes"))
    if not name or not device:
        return None
    kind = str(device).partition(":")[0].upper()
    count = f"{format_value(processes)} x " if processes not in (None, 1) else ""
    return f"{count}{escape(str(name))} ({kind})"


def format_duration(seconds: float) -> str:
    """A time in words."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
