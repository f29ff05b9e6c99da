"""SacreBLEU's corpus scores behind one door: checked options, checked inputs, and a signature with every score.

The evaluate modules beside this file, [`score_translations`] and [`compare_translations`] all score through it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from vanilla_transformer.files import explain_missing

from .inputs import list_all_references

if TYPE_CHECKING:
    from sacrebleu.metrics.base import Metric
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF
    from sacrebleu.metrics.ter import TER


def import_sacrebleu() -> Any:
    """The package sacrebleu, with its modules `metrics` and `significance`.

    Raises:
        ImportError: If it is not installed; says how to install it.
    """
    with explain_missing("BLEU, chrF and TER need sacrebleu", extra="train", packages="sacrebleu"):
        import sacrebleu
        import sacrebleu.significance
    return sacrebleu


def find_bleu_tokenizer(langs: Sequence[str] | None) -> str:
    """SacreBLEU's tokeniser for texts of a language: "zh" for Chinese, "ja-mecab" for Japanese, "13a" for others.

    "13a" takes a sentence without spaces for a single word. Japanese is cut into characters ("char") unless
    `sacrebleu[ja]` is installed; the signature of a score says which it was.

    Args:
        langs: Languages of a model or corpus, the target last, as in `config.langs`: codes such as `"zh"`, `"zh_CN"` or
            `"zho_Hant"`; `None`: not known.
    """
    language = re.split("[-_]", langs[-1])[0].lower() if langs else ""
    if language in ("zh", "zho", "cmn", "yue"):
        return "zh"
    if language in ("ja", "jpn"):
        return "ja-mecab" if find_spec("MeCab") and find_spec("ipadic") else "char"
    return "13a"


def make_bleu(
    *,
    smooth_method: str = "exp",
    smooth_value: float | None = None,
    force: bool = False,
    lowercase: bool = False,
    tokenize: str | None = None,
    use_effective_order: bool = False,
) -> BLEU:
    """BLEU of a corpus.

    Args:
        smooth_method: How n-gram orders without a match count: `"exp"`, `"floor"`, `"add-k"` or `"none"`.
        smooth_value: The value that `"floor"` (default: 0.1) and `"add-k"` (default: 1) add.
        force: Do not warn of text that looks tokenised.
        lowercase: Ignore case.
        tokenize: SacreBLEU's tokeniser (`"13a"`, `"intl"`, `"zh"`, `"char"`, ...). `None`: `"13a"`.
        use_effective_order: Leave out n-gram orders that no translation is long enough for: for single sentences.

    Raises:
        ImportError: If sacrebleu is not installed.
        ValueError: If sacreBLEU has no such smoothing or tokeniser.
    """
    metric = import_sacrebleu().metrics.BLEU
    if smooth_method not in metric.SMOOTH_DEFAULTS:
        raise ValueError(f"smooth_method is {smooth_method!r}; it must be one of {', '.join(metric.SMOOTH_DEFAULTS)}.")
    if tokenize is not None and tokenize not in metric.TOKENIZERS:
        raise ValueError(f"tokenize is {tokenize!r}; it must be one of {', '.join(metric.TOKENIZERS)}.")
    return metric(
        lowercase=lowercase,
        force=force,
        tokenize=tokenize,
        smooth_method=smooth_method,
        smooth_value=smooth_value,
        effective_order=use_effective_order,
    )


def make_chrf(
    *,
    char_order: int = 6,
    word_order: int = 0,
    beta: int = 2,
    lowercase: bool = False,
    whitespace: bool = False,
    eps_smoothing: bool = False,
) -> CHRF:
    """The character n-gram F-score of a corpus: chrF2 by default, chrF2++ with `word_order=2`.

    Args:
        char_order: Longest character n-grams.
        word_order: Longest word n-grams; 0 leaves words out.
        beta: Recall counts so many times as much as precision.
        lowercase: Ignore case.
        whitespace: Count white space as characters.
        eps_smoothing: Smooth as chrF++.py, NLTK and Moses do, instead of leaving out orders without n-grams.

    Raises:
        ImportError: If sacrebleu is not installed.
        ValueError: If an order is negative, both are 0, or `beta` is not positive.
    """
    if char_order < 0 or word_order < 0 or char_order + word_order == 0:
        raise ValueError(
            f"char_order is {char_order} and word_order is {word_order}; they must be at least 0, and not both 0."
        )
    if beta <= 0:
        raise ValueError(f"beta is {beta}; it must be greater than 0.")
    return import_sacrebleu().metrics.CHRF(
        char_order=char_order,
        word_order=word_order,
        beta=beta,
        lowercase=lowercase,
        whitespace=whitespace,
        eps_smoothing=eps_smoothing,
    )


def make_ter(
    *,
    normalized: bool = False,
    ignore_punct: bool = False,
    support_zh_ja_chars: bool = False,
    case_sensitive: bool = False,
) -> TER:
    """The translation edit rate of a corpus: edits per 100 reference words, so less is better and 100 is no limit.

    Args:
        normalized: Split off punctuation and resolve XML entities first.
        ignore_punct: Leave out punctuation (sacreBLEU's `no_punct`).
        support_zh_ja_chars: Let these two treat Chinese and Japanese characters too (sacreBLEU's `asian_support`).
        case_sensitive: Do not ignore case.

    Raises:
        ImportError: If sacrebleu is not installed.
    """
    return import_sacrebleu().metrics.TER(
        normalized=normalized,
        no_punct=ignore_punct,
        asian_support=support_zh_ja_chars,
        case_sensitive=case_sensitive,
    )


def corpus_score(
    scorer: Metric, predictions: Sequence[str], references: Sequence[str | Sequence[str]]
) -> tuple[Any, str]:
    """Scores a corpus.

    Args:
        scorer: From [`make_bleu`], [`make_chrf`] or [`make_ter`].
        predictions: Translations, detokenised.
        references: For each of them its reference, or a list of references; lists may differ in length.

    Returns:
        SacreBLEU's score object, whose `score` is the number to report, and the signature to report it with.

    Raises:
        TypeError: If predictions or references are a single string, or a reference is no string.
        ValueError: If there is nothing to score, predictions and references differ in number, or one prediction has no
            reference.
    """
    # SacreBLEU wants the first reference of every sentence, then the second of each, and None where there is none.
    streams = [list(stream) for stream in zip_longest(*list_all_references(predictions, references))]
    score = scorer.corpus_score(list(predictions), streams)
    return score, str(scorer.get_signature())
