"""Rules for parallel corpora, read from a file or chosen by languages, and what they say of pairs.

Rules are followed in their order: what one has removed, those after it do not see. Most look at a pair alone, so that
parts of a corpus can be looked at in any order, by many processes; those that compare all pairs decide at the end, by a
number for each.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from vanilla_transformer.files import explain_missing

from . import filters
from .detection import find_iso_code, is_known_to_lingua
from .duplicates import CorpusRule, RemoveDuplicates
from .filters import Change, Filter, Rule
from .readers import Columns

RULES: dict[str, type[Rule]] = {
    each.__name__: each
    for each in vars(filters).values()
    if isinstance(each, type) and issubclass(each, Filter | Change) and each not in (Filter, Change)
}
RULES |= {
    "LinguaFilter": filters.LanguageIDFilter,
    "RemoveDuplicates": RemoveDuplicates,
    # OpusCleaner's names.
    "num_mismatch": RULES.pop("NumMismatch"),
    "url_mismatch": RULES.pop("UrlMismatch"),
}
logger = logging.getLogger(__name__)
Rules = list[Rule]
Verdicts = npt.NDArray[np.uint8]
_MOST_RULES = 200
# Steps of OpusFilter's files: where their rules stand in the parameters.
_STEPS = {"filter": "filters", "preprocess": "preprocessors", "remove_duplicates": None}
# ISO 15924 as Unicode's properties have it.
_SCRIPTS = {"Hans": "Han", "Hant": "Han", "Jpan": "Han|Hiragana|Katakana", "Kore": "Hangul|Han"}
# What is most often found in a wrong place: a choice among few languages is quicker and surer.
_FREQUENT = ("en", "de", "fr", "es", "it", "pt", "nl", "pl", "ru", "zh")
# Scripts that put no spaces between words: of characters that say about as much as a word elsewhere, and of letters.
_IDEOGRAPHS = {"Hans", "Hant", "Jpan"}
_UNDIVIDED = {"Thai", "Laoo", "Khmr", "Mymr", "Tibt"}


def make_rule(kind: str, parameters: Mapping[str, Any] | None, known: Mapping[str, type[Rule]] = RULES) -> Rule:
    """The rule of that name, whose parameters are checked."""
    if kind not in known:
        raise ValueError(f"There is no rule {kind!r}; the rules are {', '.join(sorted(known))}.")
    if not isinstance(parameters or {}, Mapping):
        raise ValueError(f"The rule {kind} has {parameters!r}; its parameters must be a mapping of names and values.")
    legal = [each.name for each in dataclasses.fields(known[kind])]
    if wrong := [name for name in parameters or {} if name not in legal]:
        raise ValueError(f"The rule {kind} has no parameter {wrong[0]!r}; its parameters are {', '.join(legal)}.")
    return known[kind](**{"name": kind, **(parameters or {})})


def make_rules(config: Any, known: Mapping[str, type[Rule]] = RULES) -> Rules:
    """Makes rules of a list, `[{"LengthFilter": {"max_length": 50}}, ...]`, or of the steps of an OpusFilter file.

    Of these, the steps filter, preprocess and remove_duplicates are known; their inputs and outputs do not count.
    """
    if isinstance(config, Mapping) and isinstance(config.get("steps"), list):
        config = [rule for step in config["steps"] for rule in _read_step(step)]
    elif isinstance(config, Mapping) and set(config) == {"filters"}:
        config = config["filters"]
    if not isinstance(config, list) or not all(isinstance(each, Mapping) and len(each) == 1 for each in config):
        raise ValueError('Rules must be a list of "- NAME: {parameter: value}", or have the key filters or steps.')
    rules = [make_rule(kind, parameters, known) for each in config for kind, parameters in each.items()]
    counts: Counter[str] = Counter()
    for rule in rules:
        counts[str(rule)] += 1
        if counts[str(rule)] > 1:
            rule.name = f"{rule}.{counts[str(rule)]}"
    if len(rules) > _MOST_RULES:
        raise ValueError(f"There are {len(rules)} rules; {_MOST_RULES} are the most.")
    return rules


def _read_step(step: Any) -> list[Any]:
    kind = step.get("type") if isinstance(step, Mapping) else None
    if kind not in _STEPS:
        raise ValueError(f"A step of the type {kind!r} is not known here; {', '.join(_STEPS)} are.")
    parameters = step.get("parameters") or {}
    key = _STEPS[kind]
    if key is None:
        own = {name: value for name, value in parameters.items() if name not in ("inputs", "outputs", "hash")}
        return [{"RemoveDuplicates": own}]
    # Such as filterfalse, which keeps what the rules remove.
    if others := [name for name, value in parameters.items() if name not in ("inputs", "outputs", key) and value]:
        raise ValueError(f"The step {kind} has {others[0]}={parameters[others[0]]!r}, which is not known here.")
    rules = parameters.get(key)
    if not isinstance(rules, list):
        raise ValueError(f"The step {kind} has {key}={rules!r}; it must be a list of rules.")
    return rules


def read_rules(path: str | Path, known: Mapping[str, type[Rule]] = RULES) -> Rules:
    """Reads the rules of a YAML file, as [`make_rules`] takes them."""
    try:
        return make_rules(yaml.safe_load(Path(path).read_text(encoding="utf-8")), known)
    except (UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {error}") from error


def find_script(language: str) -> str:
    """The script (ISO 15924) that a language, such as "de", "deu_Latn" or "zh", is mostly written in."""
    with explain_missing("The scripts of languages need Babel", extra="clean", packages="Babel"):
        from babel.core import get_global

    def find_named(parts: list[str]) -> str | None:
        return next((part.title() for part in parts[1:] if len(part) == 4 and part.isalpha()), None)

    parts = language.replace("-", "_").split("_")
    # Such as sr_Latn for Serbo-Croatian.
    alias = get_global("language_aliases").get(parts[0].lower(), parts[0].lower()).split("_")
    if named := find_named(parts) or find_named(alias):
        return named
    likely = get_global("likely_subtags")
    found = likely.get(alias[0]) or likely.get(find_iso_code(language))
    if found is None:
        raise ValueError(f"The language {language!r} is not known: give a code such as de, or deu_Latn.")
    return next(part for part in str(found).split("_")[1:] if len(part) == 4)


def default_rules(source_lang: str, target_lang: str) -> list[dict[str, Any]]:
    """What suits most corpora of sentences in two languages, as [`make_rules`] takes it."""
    languages = [source_lang, target_lang]
    scripts = [find_script(language) for language in languages]
    units = ["char" if script in _IDEOGRAPHS | _UNDIVIDED else "word" for script in scripts]
    longest = [1000 if script in _UNDIVIDED else 200 for script in scripts]
    # Letters are as many as letters, not as words.
    ratio_units = ["char"] * 2 if _UNDIVIDED.intersection(scripts) else units
    # One ideograph is about as much as 3 to 6 letters.
    ratio = 12 if _UNDIVIDED.intersection(scripts) and _IDEOGRAPHS.intersection(scripts) else 4
    rules: list[dict[str, Any]] = [
        {"FixEncoding": {}},
        {"WhitespaceNormalizer": {}},
        {"EncodingFilter": {}},
        {"HtmlTagFilter": {}},
        {"LengthFilter": {"min_length": 1, "max_length": longest, "unit": units}},
        {"LengthRatioFilter": {"threshold": ratio, "unit": ratio_units}},
        {"LongWordFilter": {"threshold": [40 if unit == "word" else 400 for unit in units]}},
        {"AlphabetRatioFilter": {"threshold": 0.4, "exclude_whitespace": True}},
        {"SimilarityFilter": {"threshold": 1.0, "lowercase": True}},
        {"TerminalPunctuationFilter": {"threshold": -2}},
        {"num_mismatch": {"ratio": 0.5}},  # one number may be written in words
        {"url_mismatch": {}},
        {"RemoveDuplicates": {"name": "duplicates"}},
        {"RemoveDuplicates": {"name": "near_duplicates", "lowercase": True, "alphanumeric_only": True}},
        {"CharacterScoreFilter": {"scripts": [_SCRIPTS.get(each, each) for each in scripts], "thresholds": 0.5}},
    ]
    if unknown := [language for language in languages if not is_known_to_lingua(language)]:
        logger.warning("lingua does not know the language %r: there is no LanguageIDFilter.", unknown[0])
    elif find_iso_code(source_lang) != find_iso_code(target_lang):
        among = [code for code in _FREQUENT if code not in map(find_iso_code, languages)]
        options = {"langid_languages": among, "lingua_mode": "high", "ratio": 2}
        rules.append({"LanguageIDFilter": {"languages": languages, **options}})
    return rules


def tell_rules(rules: Rules, columns: Columns | None = None) -> None:
    """Tells the rules that compare a corpus with other files what is changed before, and how columns are called.

    It is to be called before all else.
    """
    for number, rule in enumerate(rules):
        if isinstance(rule, RemoveDuplicates):
            rule.columns = columns or rule.columns
            rule.changes = [each for each in rules[:number] if isinstance(each, Change)]


@dataclass
class Outcome:
    """What rules say of pairs that follow each other, each by its number in the list of rules."""

    pairs: list[tuple[str, str]]  # as they were when they were removed, or at the end
    verdicts: list[int]  # the first rule that removes each by itself, or the number of rules
    values: dict[int, list[Any]] = field(default_factory=dict)  # of rules that compare all; 0 for pairs not reached
    changed: dict[int, list[int]] = field(default_factory=dict)  # rows of pairs
    before: dict[int, list[tuple[int, str, str]]] = field(default_factory=dict)  # some of them: row and texts


def apply_rules(rules: Rules, pairs: Iterable[tuple[str, str]], *, examples: int = 3) -> Outcome:
    """Follows all rules, but for the decisions of those that compare all pairs."""
    kept = list(pairs)
    outcome = Outcome(kept, [len(rules)] * len(kept))
    rows = list(range(len(kept)))
    for number, rule in enumerate(rules):
        if isinstance(rule, Filter):
            passed = [rule.accepts(*kept[row]) for row in rows]
            for row, passes in zip(rows, passed, strict=True):
                if not passes:
                    outcome.verdicts[row] = number
            rows = [row for row, passes in zip(rows, passed, strict=True) if passes]
        elif isinstance(rule, Change):
            changed = [(row, (rule.change(kept[row][0]), rule.change(kept[row][1]))) for row in rows]
            changed = [(row, pair) for row, pair in changed if pair != kept[row]]
            outcome.changed[number] = [row for row, _ in changed]
            outcome.before[number] = [(row, *kept[row]) for row, _ in changed[:examples]]
            for row, pair in changed:
                kept[row] = pair
        elif isinstance(rule, CorpusRule):
            values = [0] * len(kept)
            for row, value in zip(rows, rule.find_values([kept[row] for row in rows]), strict=True):
                values[row] = value
            outcome.values[number] = values
    return outcome


def decide(rules: Rules, outcomes: Callable[[], Iterable[Outcome]]) -> Verdicts:
    """The number of the rule that removes each pair (pairs,), or that of rules, after all outcomes, in their order.

    They are read anew for each rule that compares all pairs, and only those of one part are held at a time.
    """
    verdicts = np.fromiter((each for outcome in outcomes() for each in outcome.verdicts), dtype=np.uint8)

    def find_reached(number: int) -> Iterator[tuple[npt.NDArray[np.intp], Outcome, int]]:
        start = 0
        for outcome in outcomes():
            end = start + len(outcome.verdicts)
            yield np.flatnonzero(verdicts[start:end] > number), outcome, start
            start = end

    for number, rule in enumerate(rules):
        if isinstance(rule, CorpusRule):
            # Apart, since a rule may want all values before it says anything.
            found = find_reached(number)
            values = (np.array(outcome.values[number], dtype=rule.value_type)[rows] for rows, outcome, _ in found)
            reached = ((rows, start) for rows, _, start in find_reached(number))
            for flags, (rows, start) in zip(rule.decide(values), reached, strict=True):
                verdicts[start + rows[~flags]] = number
    return verdicts


def clean_pairs(rules: Rules, pairs: Iterable[tuple[str, str]]) -> tuple[list[tuple[str, str]], Verdicts]:
    """Follows all rules in memory; returns the pairs that stay, and which rule has removed each of the others.

    [`inference.cleaning.clean_corpus`] does this with corpora of any size, from file to file.
    """
    tell_rules(rules)
    outcome = apply_rules(rules, pairs)
    verdicts = decide(rules, lambda: [outcome])
    return [pair for pair, verdict in zip(outcome.pairs, verdicts, strict=True) if verdict == len(rules)], verdicts
