"""ROUGE of summaries behind one door: checked options, checked inputs, and a signature with every score.

The scores are those of Google's package rouge_score, averaged over the summaries. Its own words are runs of a to z and
0 to 9, which leaves nothing of Russian or Chinese; here, unless told otherwise, they are runs of letters and digits of
any script. For text in ASCII the two are the same.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.metadata import version
from statistics import fmean
from typing import Any

from vanilla_transformer.files import explain_missing

from .inputs import list_all_references

# The scores reported unless others are asked for: words, pairs of words, the longest common subsequence of the whole
# text, and that of its lines.
ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
TOKENIZERS = ("unicode", "ascii")

_LEGAL_TYPE = re.compile(r"rouge([1-9]|L|Lsum)")
_STEMMED_LENGTH = 4  # rouge_score leaves shorter words alone
# Scripts without spaces between words, by the beginning of their characters' names.
_ALONE = (
    *("CJK ", "IDEOGRAPHIC ", "VERTICAL IDEOGRAPHIC ", "PARENTHESIZED IDEOGRAPH", "CIRCLED IDEOGRAPH", "HANGZHOU "),
    *("HIRAGANA ", "HENTAIGANA ", "KATAKANA ", "KATAKANA-HIRAGANA ", "HALFWIDTH KATAKANA", "VERTICAL KANA ", "MASU "),
    *("BOPOMOFO ", "THAI ", "LAO ", "KHMER ", "MYANMAR ", "TAI ", "NEW TAI LUE ", "AHOM "),
)
# SingleStack-width katakana writes the marks of voiced sounds after the letter, as characters of their own.
_HALFWIDTH_MARKS = ("HALFWIDTH KATAKANA VOICED", "HALFWIDTH KATAKANA SEMI-VOICED")


def import_rouge() -> Any:
    """The package rouge_score, with its modules `rouge_scorer` and `tokenizers`.

    Raises:
        ImportError: If it is not installed; says how to install it.
    """
    with explain_missing("ROUGE needs rouge_score", extra="train", packages="rouge-score"):
        import rouge_score.rouge_scorer
    return rouge_score


@lru_cache(maxsize=65536)
def _place(character: str) -> str:
    """What a character is to words: "part" of one, a word "alone", a "mark" on the one before it, or a "gap"."""
    category = unicodedata.category(character)
    name = unicodedata.name(character, "")
    if category[0] == "M" or name.startswith(_HALFWIDTH_MARKS):
        return "mark"
    if category[0] not in "LN":
        return "gap"
    return "alone" if name.startswith(_ALONE) else "part"


def split_words(text: str) -> list[str]:
    """Splits text of any script into lowercase words; each character is one in scripts without spaces.

    Args:
        text: Any text.

    Returns:
        Its words, without punctuation.
    """
    words: list[str] = []
    is_open = False  # whether the next letter goes on with the last word
    for character in unicodedata.normalize("NFC", text).lower():
        place = _place(character)
        if words and (place == "mark" or (place == "part" and is_open)):
            words[-1] += character
        elif place in ("part", "alone"):
            words.append(character)
        is_open = place == "part" or (place == "mark" and is_open)
    return words


class _UnicodeTokenizer:
    """What rouge_score asks for words."""

    def __init__(self, stem: Callable[[str], str] | None) -> None:
        self.stem = stem

    def tokenize(self, text: str) -> list[str]:
        words = split_words(text)
        if self.stem is None:
            return words
        return [self.stem(word) if len(word) >= _STEMMED_LENGTH and word.isascii() else word for word in words]


def make_rouge(
    *, rouge_types: Sequence[str] = ROUGE_TYPES, tokenize: str = "unicode", use_stemmer: bool = False
) -> Any:
    """A scorer of single summaries.

    Args:
        rouge_types: Scores to compute: `"rouge1"` to `"rouge9"`, `"rougeL"`, `"rougeLsum"`.
        tokenize: `"unicode"`, words of any script, or `"ascii"`, rouge_score's own.
        use_stemmer: Strip the endings of English words of more than three letters.

    Returns:
        A `rouge_score.rouge_scorer.RougeScorer`.

    Raises:
        ImportError: If rouge_score is not installed.
        TypeError: If `rouge_types` is a single string.
        ValueError: If there is no such score or tokeniser.
    """
    if isinstance(rouge_types, str):
        raise TypeError(f"rouge_types is {rouge_types!r}; it must be a list of names.")
    if not rouge_types or not all(map(_LEGAL_TYPE.fullmatch, rouge_types)):
        raise ValueError(f"rouge_types is {rouge_types!r}; legal names are rouge1 to rouge9, rougeL and rougeLsum.")
    if tokenize not in TOKENIZERS:
        raise ValueError(f"tokenize is {tokenize!r}; it must be one of {', '.join(TOKENIZERS)}.")
    package = import_rouge()
    if tokenize == "ascii":
        return package.rouge_scorer.RougeScorer(list(rouge_types), use_stemmer=use_stemmer)
    stem = package.tokenizers.porter.PorterStemmer().stem if use_stemmer else None
    return package.rouge_scorer.RougeScorer(list(rouge_types), tokenizer=_UnicodeTokenizer(stem))


def rouge_signature(*, tokenize: str, use_stemmer: bool) -> str:
    """What makes the scores comparable, in the style of sacreBLEU's signatures."""
    stemmer = "yes" if use_stemmer else "no"
    return f"tok:{tokenize}|stem:{stemmer}|score:F1|mean:plain|rouge_score:{version('rouge_score')}"


def score_each(
    scorer: Any, predictions: Sequence[str], references: Sequence[str | Sequence[str]]
) -> dict[str, list[float]]:
    """Scores summaries one by one.

    Args:
        scorer: From [`make_rouge`].
        predictions: Summaries.
        references: For each of them its reference, or a list of them, of which the nearest counts for each score.

    Returns:
        F1, from 0 to 1, of each summary, by the name of the score.

    Raises:
        TypeError: If predictions or references are a single string, or a reference is no string.
        ValueError: If there is nothing to score, predictions and references differ in number, or a summary has no
            reference.
    """
    listed = list_all_references(predictions, references)
    found: dict[str, list[float]] = {name: [] for name in scorer.rouge_types}
    for prediction, group in zip(predictions, listed, strict=True):
        for name, score in scorer.score_multi(group, prediction).items():
            found[name].append(float(score.fmeasure))
    return found


def corpus_rouge(
    scorer: Any, predictions: Sequence[str], references: Sequence[str | Sequence[str]]
) -> dict[str, float]:
    """The means of [`score_each`], from 0 to 1; rouge_score's own aggregator draws samples, and varies a little.

    Args:
        scorer: From [`make_rouge`].
        predictions: See [`score_each`].
        references: See [`score_each`].

    Returns:
        Each score's mean over the summaries.

    Raises:
        TypeError: See [`score_each`].
        ValueError: See [`score_each`].
    """
    return {name: fmean(scores) for name, scores in score_each(scorer, predictions, references).items()}
