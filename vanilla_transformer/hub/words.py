"""How a model card puts numbers, settings and names into words; what is unknown is called so."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Undefined

from vanilla_transformer.data.detection import find_iso_code

NOT_RECORDED = "not recorded"


def _is_unknown(value: Any) -> bool:
    return value is None or value == "" or isinstance(value, Undefined)


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
    names = Locale("en").languages
    return str(names.get(code.replace("-", "_")) or names.get(find_iso_code(code), code))


def format_value(value: Any) -> str:
    """A number, a word or a text, safe in Markdown."""
    if _is_unknown(value):
        return NOT_RECORDED
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else escape(str(value))


def format_cell(value: Any) -> str:
    """What stands in a table: numbers are formatted; texts stay, since they may hold Markdown."""
    text = value if isinstance(value, str) and value else format_value(value)
    return text.replace("|", "\\|")


def escape(text: str) -> str:
    """Keeps Markdown from reading a text; tables take care of their own separator."""
    text = re.sub(r"([\\`*\[\]])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;")


def as_code(value: Any) -> str:
    """In Markdown's signs for code."""
    if _is_unknown(value):
        return NOT_RECORDED
    text = " ".join(str(value).split()).replace("`", "'")
    return f"`{text}`"


def quote(text: str) -> str:
    """As a string of Python."""
    return json.dumps(text, ensure_ascii=False)


def describe_search(beams: Any, settings: Mapping[str, Any]) -> str:
    """How an output is searched for."""
    if settings.get("do_sample"):
        return "sampling"
    search = "greedy" if beams == 1 else f"{format_value(beams)} beams"
    penalty = settings.get("length_penalty")
    kind = settings.get("length_penalty_type") or "transformers"
    if beams == 1 or penalty is None or (penalty == 1 and kind == "transformers"):
        return search
    return f"{search}, {'GNMT ' if kind == 'gnmt' else ''}length penalty {format_value(penalty)}"


def describe_rate(training: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The learning rate, and how it changes."""
    rate, warmup = training.get("learning_rate"), to_number(training.get("warmup_steps"))
    peak = format_value(rate)
    if rate is None and warmup and config.get("d_model"):
        peak = f"{(config['d_model'] * warmup) ** -0.5:.3g}, the paper's (d_model · warm-up)^-0.5"
    text = f"peak {peak}; schedule {as_code(training.get('lr_scheduler_type'))}"
    if not warmup:
        return text
    if warmup < 1:
        return f"{text}, warm-up {warmup:.3g} of the updates"
    return f"{text}, {format_value(warmup)} warm-up updates"


def format_duration(value: Any) -> str | None:
    """A number of seconds in words."""
    seconds = to_number(value)
    if seconds is None:
        return None
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
