"""Sentences to try a model with, by what is known of its training."""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from vanilla_transformer.tasks import TRANSLATION, find_task

logger = logging.getLogger(__name__)

# Sentences by the two- and three-letter codes of their language.
_SENTENCES: dict[tuple[str, str], tuple[str, ...]] = {
    ("en", "eng"): (
        "A man in a blue shirt is riding a bicycle.",
        "Two children are playing with a dog in the park.",
        "A woman is reading a book by the window.",
    ),
    ("de", "deu"): (
        "Ein Mann in einem blauen Hemd fährt Fahrrad.",
        "Zwei Kinder spielen im Park mit einem Hund.",
        "Eine Frau liest am Fenster ein Buch.",
    ),
    ("fr", "fra"): (
        "Un homme en chemise bleue fait du vélo.",
        "Deux enfants jouent avec un chien dans le parc.",
        "Une femme lit un livre près de la fenêtre.",
    ),
    ("zh", "zho"): ("他每天骑自行车去上班。", "孩子们在公园里和狗玩。", "她坐在窗边看书。"),
}
# Of so many examples of the built-in corpus, every fourth in the order of length is shown.
_BUILTIN_EXAMPLES = 20
_EVERY = 4
_FIRST = 3


def find_examples(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """Finds sentences that suit a model.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        data: What is known of the data that it was trained on, see [`read_training_data`].

    Returns:
        Examples of the built-in corpus for a model that was trained on it, or none where num2words and Babel are
        missing; everyday sentences in the source language of another model that translates (English, where the
        language cannot be known), if there are some; for other tasks none.
    """
    if find_task(model.config) is not TRANSLATION:
        return ()
    data = data or {}
    langs = getattr(model.config, "langs", None) or [None]
    own = (getattr(tokenizer, side, None) for side in ("src_lang", "source_lang"))
    language = next((str(lang) for lang in (data.get("source_lang"), langs[0], *own) if lang), "en")
    if data.get("builtin_corpus"):
        return _make_builtin_examples(language, str(data.get("target_lang")))
    code = re.split("[-_]", language)[0].lower()
    return next((sentences for codes, sentences in _SENTENCES.items() if code in codes), ())


def _make_builtin_examples(source_lang: str, target_lang: str) -> tuple[str, ...]:
    """Examples of the built-in corpus; none where they cannot be made, for the model knows nothing else."""
    try:
        from vanilla_transformer.data.numbers_and_dates import numbers_and_dates

        corpus = numbers_and_dates(
            split="test", test_size=_BUILTIN_EXAMPLES, source_lang=source_lang, target_lang=target_lang
        )
    except (ImportError, ValueError) as error:
        logger.warning("No examples of the built-in corpus can be shown: %s", error)
        return ()
    return tuple(sorted(corpus["source"], key=len)[_FIRST::_EVERY])


def read_training_data(name: str, revision: str = "main") -> dict[str, Any]:
    """Reads what `scripts/train.py` noted of the data that a model was trained on.

    Args:
        name: The model's folder or name on the Hub.
        revision: Branch, tag or commit on the Hub.

    Returns:
        The arguments of the data, such as "builtin_corpus" and "source_lang"; empty if there is no such note.
    """
    problems = ("gated_repo", "missing_entries", "connection_errors")
    quiet = {f"_raise_exceptions_for_{problem}": False for problem in problems}
    try:
        path = cached_file(name, "arguments.json", revision=revision, **quiet)
        record = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    data = record.get("data") if isinstance(record, dict) else None
    return data if isinstance(data, dict) else {}
