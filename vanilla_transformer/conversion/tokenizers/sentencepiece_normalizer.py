"""Sentencepiece's normalisation of text in the terms of the tokenizers library, with equal results.

A sentencepiece model carries a table of rules: strings of one or more characters, and what becomes of them. At each
place of a text the longest rule counts. The tokenizers library reads the same table (`normalizers.Precompiled`), but
looks for rules only within what a reader sees as one character, and takes the shortest, so that "e" with two accents
loses one.
Therefore, here:

1. Rules of one character are applied by `Precompiled`, with a character in front of every accent that keeps it apart.
2. Rules of several characters are, but for few, Unicode's composition ("e" and an accent become "é"). NFC does it, with
   a character in between wherever sentencepiece does not compose: it neither brings accents into Unicode's order nor
   composes across an accent.
3. The few others are replacements, one for each result.

Whether this gives what the table says is checked for every rule when the normaliser is made.
"""

import re
import sys
import unicodedata
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from tokenizers import Regex, normalizers

from vanilla_transformer.conversion.errors import refuse

SPACE = "▁"  # how pieces write a space
# Code points that no text has: Unicode keeps them free, and readers of text ignore them.
APART = "\ufff0"  # stands between two characters that must not meet, for a while
ALWAYS_APART = "\ufff1"  # the same until the end
STRANGE = "\ufff2"  # stands for characters that the model does not know
MOST_REPLACEMENTS = 64
# What can be one visible character with the character before it.
_JOINING = r"[\n\p{M}\p{Cf}\x{e33}\x{eb3}\x{ff9e}\x{ff9f}\x{1f3fb}-\x{1f3ff}]"


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
    """What a sentencepiece model does with spaces, which pieces write as "▁".

    Args:
        remove_extra: Whether spaces at either end are removed, and several in a row become one.
        add_dummy: Whether a space is added, so that a word at the text's end has the same pieces as within it.
        dummy_at_end: Whether it is added behind the text rather than in front.
    """

    remove_extra: bool
    add_dummy: bool
    dummy_at_end: bool

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


def convert_rules(rules: Mapping[str, str], charsmap: bytes, known: Collection[str]) -> list[normalizers.Normalizer]:
    """Makes a table of rules normalisers of the tokenizers library.

    Args:
        rules: What becomes of which strings.
        charsmap: The same table as sentencepiece stores it.
        known: The characters that the model has pieces of. Rules that concern none of them make no difference, since
            one unknown character is like another.

    Returns:
        Normalisers to be applied one after another.

    Raises:
        ConversionError: If they cannot do what the table says.
    """
    if not rules:
        return []
    counting = {key: value for key, value in rules.items() if _concerns(known, key + value)}
    steps = [
        normalizers.Replace(Regex(rf"(?={_JOINING})(?!\A)"), APART),
        normalizers.Precompiled(charsmap),
        normalizers.Replace(APART, ""),
    ]
    if _composes(rules, known):
        steps = [
            normalizers.Replace(_several(rules), ALWAYS_APART),
            *steps,
            normalizers.Replace(_finished(), APART),
            normalizers.NFC(),
            normalizers.Replace(Regex(f"[{APART}{ALWAYS_APART}]"), ""),
        ]
    left = _find_wrong(steps, counting)
    if left:
        steps = _replacement_steps(left) + steps
        wrong = _find_wrong(steps, counting)
        refuse(
            "The model's normalisation cannot be converted, since some of its rules depend on others",
            [f"{key!r} must become {value!r}" for key, value in list(wrong.items())[:8]],
        )
    return steps


def _concerns(known: Collection[str], characters: str) -> bool:
    return any(character in known for character in characters)


@cache
def _pairs() -> dict[str, str]:
    """Two characters that Unicode, and the tokenizers library's tables of it, compose into one."""
    compose = normalizers.NFC().normalize_str
    pairs = {}
    for character in map(chr, range(sys.maxunicode + 1)):
        parts = unicodedata.decomposition(character).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            pair = "".join(chr(int(part, base=16)) for part in parts)
            if compose(pair) == character:
                pairs[pair] = character
    return pairs


def _composes(rules: Mapping[str, str], known: Collection[str]) -> bool:
    """Tells whether Unicode's composition is among the rules: that of letters which are not composed themselves."""
    counting = [
        pair
        for pair, one in _pairs().items()
        if _concerns(known, pair + one) and unicodedata.normalize("NFD", pair) == pair and pair[0] not in rules
    ]
    lacking = [pair for pair in counting if pair not in rules]
    if len(lacking) * 2 > len(counting):
        return False
    refuse(
        "The model's normalisation cannot be converted: it composes letters and accents, but not",
        [f"{pair!r} ({' '.join(f'U+{ord(part):04X}' for part in pair)})" for pair in lacking[:8]],
    )
    return bool(counting)


def _compositions() -> dict[str, str]:
    """All that is composed into one character: a letter that is not composed itself, and one or more accents."""
    pairs = _pairs()
    found = {pair: one for pair, one in pairs.items() if unicodedata.normalize("NFD", pair) == pair}
    longer = found
    while longer:
        by_letter = defaultdict(list)
        for sequence, letter in longer.items():
            by_letter[letter].append(sequence)
        longer = {sequence + pair[1]: one for pair, one in pairs.items() for sequence in by_letter.get(pair[0], ())}
        found = found | longer
    return found


@cache
def _accents() -> dict[int, list[str]]:
    """All accents by their canonical combining class, which says in what order they come."""
    accents = defaultdict(list)
    for character in map(chr, range(sys.maxunicode + 1)):
        if order := unicodedata.combining(character):
            accents[order].append(character)
    return dict(accents)


@cache
def _second() -> str:
    """All that is composed with, or moved before, what is in front of it, as the inside of brackets."""
    accents = (accent for group in _accents().values() for accent in group)
    final_consonants = map(chr, range(0x11A8, 0x11C3))  # of Korean syllables
    return write_class([*accents, *(pair[1] for pair in _pairs()), *final_consonants])


def _several(rules: Mapping[str, str]) -> Regex:
    """Finds the places beside characters that become several, where these would be composed with their neighbours.

    An accent behind a ligature stays as it is, and so does one that becomes two, unless there is a rule for it and the
    letter before it.
    """
    several = [key for key, value in rules.items() if len(key) == 1 and len(value) > 1]
    marks = [key for key in several if unicodedata.combining(key)]
    letters = {mark: write_class(key[0] for key in rules if key[1:] == mark) for mark in marks}
    places = [f"(?<=[{write_class(several)}])"] if several else []
    places += [f"(?={mark})" + (f"(?<![{group}])" if group else "") for mark, group in letters.items()]
    return Regex(f"(?=[{_second()}])(?!\\A)(?:{'|'.join(places)})" if places else f"[{ALWAYS_APART}]")


@cache
def _finished() -> Regex:
    """Finds the places at which NFC would compose, or move, what sentencepiece leaves as it is.

    Sentencepiece composes a letter that is not composed yet with the accents behind it, as far as they come in
    Unicode's order and each can be composed. So an accent is kept apart from a composed letter, and from another accent
    unless that one will be composed and comes first in order. The pattern begins with what lies ahead, which nearly
    every place of a text fails at once.
    """
    accents = _accents()
    every = write_class(accent for group in accents.values() for accent in group)
    composed = [
        character
        for character in map(chr, range(sys.maxunicode + 1))
        if not unicodedata.combining(character) and len(unicodedata.normalize("NFD", character)) > 1
    ]
    letters = defaultdict(list)
    for sequence in _compositions():
        if all(map(unicodedata.combining, sequence[1:])):
            letters[sequence[1:]].append(sequence[0])
    will_be_composed = "|".join(f"[{write_class(group)}]{tail}" for tail, group in letters.items())
    out_of_order = [
        f"(?<=[{write_class(accents[order])}])"
        f"(?=[{write_class(accent for other in accents if other < order for accent in accents[other])}])"
        for order in sorted({unicodedata.combining(tail[-1]) for tail in letters} - {min(accents)})
    ]
    behind_accent = "|".join([f"(?<!{will_be_composed})", *out_of_order])
    return Regex(f"(?=[{_second()}])(?:(?<=[{write_class(composed)}])|(?<=[{every}])(?:{behind_accent}))")


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
