"""Sentencepiece's normalisation of text in the terms of the tokenizers library.

A sentencepiece model carries a table of rules, of which the longest counts at each place of a text. The tokenizers
library reads the same table (`normalizers.Precompiled`), but takes the shortest rule within one visible character, so
that "e" with two accents loses one. Therefore, here:

1. Rules of one character are applied by `Precompiled`, with a character in front of every accent that keeps it apart.
2. Most rules of several characters are Unicode's composition ("e" and an accent become "é"). NFC does it before and
   after, with a character between accents that it would put in another order.
3. Of the others each result is a replacement.

Whether everything is as the table says is checked for every rule when the normaliser is made.
"""

import re
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cache

from tokenizers import Regex, normalizers

from vanilla_transformer.conversion.errors import refuse

SPACE = "▁"  # how pieces write a space
# Code points that no text has: Unicode keeps them free, and readers of text ignore them.
APART = "\ufff0"  # stands between two characters that must not meet, for a while
STRANGE = "\ufff2"  # stands for characters that the model does not know
MOST_REPLACEMENTS = 64
# What can be one visible character with the character before it.
_JOINING = r"[\n\p{M}\p{Cf}\x{e33}\x{eb3}\x{ff9e}\x{ff9f}\x{1f3fb}-\x{1f3ff}]"
# A table that has these has Unicode's composition.
_COMPOSITIONS = {"e\u0301": "é", "\u304b\u3099": "\u304c", "\u1100\u1161": "\uac00"}


def write_class(characters: Iterable[str]) -> str:
    """Writes a set of characters as the inside of a regular expression's brackets."""
    ranges: list[list[int]] = []
    for code in sorted(set(map(ord, characters))):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(
        rf"\x{{{first:x}}}-\x{{{last:x}}}" if first != last else rf"\x{{{first:x}}}" for first, last in ranges
    )


@dataclass(frozen=True)
class Spacing:
    """What a sentencepiece model does with spaces, which pieces write as "▁"."""

    remove_extra: bool  # whether spaces at either end are removed, and several in a row become one
    add_dummy: bool  # whether a space is added, so that a word at the text's end has the same pieces as within it
    dummy_at_end: bool  # whether it is added behind the text rather than in front

    def normalizers(self) -> list[normalizers.Normalizer]:
        """Makes normalisers that do it, after all other normalisation."""
        steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
        if self.remove_extra:
            inner = normalizers.Replace(Regex(r"\A +|(?<= ) +"), "")
            steps = [inner, *steps, normalizers.Replace(Regex(rf"{SPACE}+\z"), "")]
        if self.add_dummy and self.dummy_at_end:
            steps.append(normalizers.Replace(Regex(r"(?!\A)\z"), SPACE))
        elif self.add_dummy:
            steps.append(normalizers.Prepend(SPACE))
        return steps


def convert_rules(rules: Mapping[str, str], charsmap: bytes, known: Set[str]) -> list[normalizers.Normalizer]:
    """Makes normalisers, to be applied one after another, that do what a model's table of rules says.

    `charsmap` is the same table as sentencepiece stores it. Rules that concern none of the `known` characters, of which
    the model has pieces, make no difference, since one unknown character is like another.
    """
    if not rules:
        return []
    apart = Regex(rf"(?={_JOINING})(?!\A)")
    steps = [normalizers.Replace(apart, APART), normalizers.Precompiled(charsmap), normalizers.Replace(APART, "")]
    counting = {key: value for key, value in rules.items() if not known.isdisjoint(key + value)}
    if all(rules.get(key) == value for key, value in _COMPOSITIONS.items()):
        compose = [normalizers.Replace(_out_of_order(), APART), normalizers.NFC(), normalizers.Replace(APART, "")]
        steps = [*compose, *steps, *compose]
        counting = {key: value for key, value in counting.items() if not _is_unicodes(key, value)}
    left = _find_wrong(steps, counting)
    if left:
        steps = _replacement_steps(left) + steps
        wrong = _find_wrong(steps, counting)
        refuse(
            "The model's normalisation cannot be converted, since some of its rules depend on others",
            [f"{key!r} must become {value!r}" for key, value in list(wrong.items())[:8]],
        )
    return steps


def _is_unicodes(key: str, value: str) -> bool:
    """Tells whether a rule is one of Unicode's own of several characters, which are composed."""
    return len(key) > 1 and _fold(key) == _fold(value)


def _fold(text: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


@cache
def _out_of_order() -> Regex:
    """Finds the places between two accents that NFC would exchange, by their canonical combining classes."""
    accents = defaultdict(list)
    for character in map(chr, range(sys.maxunicode + 1)):
        if order := unicodedata.combining(character):
            accents[order].append(character)
    classes = {order: write_class(group) for order, group in sorted(accents.items())}
    places = [
        f"(?<=[{after}])(?=[{''.join(before for other, before in classes.items() if other < order)}])"
        for order, after in list(classes.items())[1:]
    ]
    # It begins with what lies ahead, which nearly every place of a text fails at once.
    return Regex(f"(?=[{''.join(classes.values())}])(?:{'|'.join(places)})")


def _find_wrong(steps: list[normalizers.Normalizer], rules: Mapping[str, str]) -> dict[str, str]:
    """Finds the rules that the normalisers break; all at once, since there are hundreds of thousands."""
    normalized = normalizers.Sequence(steps).normalize_str(STRANGE.join(rules)).split(STRANGE)
    pairs = zip(rules.items(), normalized, strict=True)
    return {key: value for (key, value), found in pairs if found != value}


def _replacement_steps(rules: Mapping[str, str]) -> list[normalizers.Normalizer]:
    groups: dict[tuple[int, str], list[str]] = defaultdict(list)
    beginnings: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for key, value in rules.items():
        group = -len(key), value
        groups[group].append(key)
        for length in range(1, len(key) + 1):
            beginnings[key[:length]].add(group)
    overlapping = [
        key
        for group, keys in groups.items()
        for key in keys
        if any(beginnings.get(key[start:], {group}) != {group} for start in range(1, len(key)))
    ]
    reasons = [f"{key!r}, whose end is the beginning of another rule" for key in overlapping[:8]]
    if len(groups) > MOST_REPLACEMENTS:
        reasons.append(f"{len(rules):,} rules with {len(groups):,} results (can be: {MOST_REPLACEMENTS} results)")
    refuse("The model's normalisation has rules of several characters that cannot be converted", reasons)
    return [
        normalizers.Replace(Regex("|".join(map(re.escape, keys))), value) for (_, value), keys in sorted(groups.items())
    ]
