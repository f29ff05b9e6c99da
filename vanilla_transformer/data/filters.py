"""Rules for the pairs of a parallel corpus: what a pair must keep to, and what mends its texts.

Names and parameters are those of OpusFilter (Aulamo et al., ACL 2020) where they mean the same, and in small letters
those of OpusCleaner. Lengths are in words, cut at white space, or characters; ratios and thresholds have no unit.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from html.parser import HTMLParser
from importlib import import_module
from typing import Any

import regex

from vanilla_transformer.files import explain_missing

from .detection import DETECTORS, Detector, find_iso_code, is_known_to_lingua, load_lingua

# In ASCII: in scripts without spaces, letters and full-width marks follow at once.
_ADDRESS = regex.compile(
    # So many characters at most, or the time for a long word would grow with its square.
    r"(?:[a-z][a-z0-9+.-]{0,20}://|www\.)[!#-;=?-~]+|[a-z0-9_.+-]{1,64}@[a-z0-9-]+(?:\.[a-z0-9-]+)+",
    regex.IGNORECASE | regex.ASCII,
)
# Python's parser needs time with the square of a text's length for tags that do not end.
_LONG_TEXT = 5000
_TAG = regex.compile(r"<(/?[a-z][^\s/<>]*+)[^<>]*+>", regex.IGNORECASE | regex.ASCII)
# Of 1,234.5 and 1.234,5; a space divides groups of three digits.
_NUMBER = regex.compile(r"(?:\p{Nd}{1,3}(?:\s\p{Nd}{3})+(?!\p{Nd})|\p{Nd}+)(?:[.,:']\p{Nd}+)*")
_NOT_ALPHABETIC = regex.compile(r"\p{Alphabetic=No}")
_WHITESPACE = regex.compile(r"\s+")
_TERMINAL = ".?!…"
# Of parameters that have one value for both texts, or a list of two, and what that may be.
_PER_SIDE: dict[str, Any] = {"choices": ()}
_UNITS: dict[str, Any] = {"choices": ("word", "char", "character")}
_DAMAGE = "needs ftfy, which knows encoding damage"


@dataclass(kw_only=True)
class Rule:
    """A rule with its parameters; `name` tells several of a kind apart."""

    name: str | None = None

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if "choices" not in each.metadata:
                self._check(each.name, value, each.default, ())
                continue
            values = tuple(value) if isinstance(value, list | tuple) else (value, value)
            if len(values) != 2 or None in values:
                raise ValueError(f"{self}: {each.name} is {value!r}; it must be given, once or for each of both sides.")
            for one in values:
                self._check(each.name, one, each.default, each.metadata["choices"])
            setattr(self, each.name, values)

    def __str__(self) -> str:
        return self.name or type(self).__name__

    def _check(self, name: str, value: Any, default: Any, choices: tuple[str, ...]) -> None:
        if choices and value not in choices:
            raise ValueError(f"{self}: {name} is {value!r}; it must be {' or '.join(choices)}.")
        number = "a number"
        kinds = {bool: "true or false", int: number, float: number, str: "a string"}
        wanted = kinds.get(type(default))
        if wanted is not None and kinds.get(type(value)) != wanted:
            raise ValueError(f"{self}: {name} is {value!r}; it must be {wanted}.")

    def _compile(self, name: str, pattern: str) -> Any:
        try:
            return regex.compile(pattern)
        except regex.error as error:
            raise ValueError(f"{self}: {name} is {getattr(self, name)!r}: {error}.") from error

    @property
    def parameters(self) -> dict[str, Any]:
        """What it was made with."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "name"}

    def identify(self) -> dict[str, Any]:
        """What decides its results: the parameters, and what they name."""
        return self.parameters


class Filter(Rule):
    """A rule that looks at one pair at a time."""

    def accepts(self, source: str, target: str) -> bool:
        """Whether the pair stays."""
        raise NotImplementedError


class Change(Rule):
    """A rule that mends a text, and removes none."""

    def change(self, text: str) -> str:
        """The text as it should be."""
        raise NotImplementedError


def count_length(text: str, unit: str) -> int:
    """The length in words (`word`) or characters."""
    return len(text.split()) if unit == "word" else len(text)


@dataclass(kw_only=True)
class LengthFilter(Filter):
    """Both lengths are from `min_length` to `max_length`; `pass_empty` lets pairs of two empty texts through."""

    min_length: Any = field(default=1, metadata=_PER_SIDE)
    max_length: Any = field(default=100, metadata=_PER_SIDE)
    unit: Any = field(default="word", metadata=_UNITS)
    pass_empty: bool = False

    def accepts(self, source: str, target: str) -> bool:
        """Whether the pair stays."""
        lengths = [count_length(text, unit) for text, unit in zip((source, target), self.unit, strict=True)]
        limits = zip(self.min_length, lengths, self.max_length, strict=True)
        return all(least <= length <= most for least, length, most in limits) or (self.pass_empty and not any(lengths))


@dataclass(kw_only=True)
class LengthRatioFilter(Filter):
    """The longer text is less than `threshold` times as long as the shorter one."""

    threshold: float = 3
    unit: Any = field(default="word", metadata=_UNITS)

    def accepts(self, source: str, target: str) -> bool:
        """Whether the pair stays."""
        short, long = sorted(count_length(text, unit) for text, unit in zip((source, target), self.unit, strict=True))
        return long < self.threshold * short if short else not long


@dataclass(kw_only=True)
class LongWordFilter(Filter):
    """All words have fewer than `threshold` characters."""

    threshold: Any = field(default=40, metadata=_PER_SIDE)

    def accepts(self, source: str, target: str) -> bool:
        """Whether the pair stays."""
        pairs = zip((source, target), self.threshold, strict=True)
        return all(len(word) < most for text, most in pairs for word in text.split())


@dataclass(kw_only=True)
class SimilarityFilter(Filter):
    """The texts are less similar than `threshold`: 1 - Levenshtein's distance over the largest that is possible.

    A threshold of 1 removes equal texts alone. `weights` are the costs of an insertion, a deletion and a substitution.
    """

    threshold: float = 0.9
    weights: Any = (1, 1, 1)
    unit: str = "char"
    lowercase: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("unit", self.unit, "", _UNITS["choices"])
        with explain_missing(f"{self} needs RapidFuzz", extra="clean", packages="rapidfuzz"):
            from rapidfuzz.distance.Levenshtein import normalized_similarity
        is_list = isinstance(self.weights, list | tuple) and len(self.weights) == 3
        if not is_list or not all(type(each) is int and each >= 0 for each in self.weights):
            raise ValueError(f"{self}: weights is {self.weights!r}; it must be three whole numbers, none below 0.")
        self.weights = tuple(self.weights)
        self._compare = partial(normalized_similarity, weights=self.weights)

    def accepts(self, source: str, target: str) -> bool:
        """Whether the pair stays."""
        if self.lowercase:
            source, target = source.lower(), target.lower()
        if self.unit == "word":
            return self._compare(source.split(), target.split()) < self.threshold
        return self._compare(source, target) < self.threshold


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.found.append(f"/{tag}")


def find_tags(text: str) -> list[str]:
    """The names of HTML's or XML's tags in a text: those of end tags with a slash before them, XML's "![" first."""
    if "<" not in text:
        return []
    # Python's parser fails at words behind it that it does not know; newer versions leave it out.
    found, text = text.count("<![") * ["!["], text.replace("<![", " ")
    if len(text) > _LONG_TEXT:
        return found + [tag.lower() for tag in _TAG.findall(text)]
    parser = _Tags()
    parser.feed(text)
    parser.close()
    return found + parser.found


@dataclass(kw_only=True)
class HtmlTagFilter(Filter):
    """No text has a tag; with `allow_matching`, those of both may be the same."""

    allow_matching: bool = False

    def accepts(self, source: str, target: str) -> bool:
        """Whether the pair stays."""
        tags = [find_tags(text) for text in (source, target)]
        return not any(tags) or (self.allow_matching and sorted(tags[0]) == sorted(tags[1]))


@dataclass(kw_only=True)
class RegExpFilter(Filter):
    """No text matches its regular expression (of the package regex); with `accept_match`, both do."""

    regexps: Any = field(default=None, metadata=_PER_SIDE)
    accept_match: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._compiled = [self._compile("regexps", each) for each in self.regexps]

    def accepts(self, source: str, target: str) -> bool:
        """Whether the pair stays."""
        found = [bool(each.search(text)) for each, text in zip(self._compiled, (source, target), strict=True)]
        return all(found) if self.accept_match else not any(found)


@dataclass(kw_only=True)
class AlphabetRatioFilter(Filter):
    """The share of alphabetic characters in each text is at least `threshold`."""

    threshold: Any = field(default=0.75, metadata=_PER_SIDE)
    exclude_whitespace: bool = False

    def accepts(self, source: str, target: str) -> bool:
        """Whether the pair stays."""
        if self.exclude_whitespace:
            source, target = _WHITESPACE.sub("", source), _WHITESPACE.sub("", target)
        sides = zip((source, target), self.threshold, strict=True)
        return all(len(_NOT_ALPHABETIC.sub("", text)) >= least * len(text) for text, least in sides if text)


@dataclass(kw_only=True)
class CharacterScoreFilter(Filter):
    """The share of the alphabetic characters that are of the text's script is at least its threshold.

    Scripts have Unicode's names, such as Latin; "Han|Hiragana|Katakana" are several.
    """

    scripts: Any = field(default=None, metadata=_PER_SIDE)
    thresholds: Any = field(default=1.0, metadata=_PER_SIDE)

    def __post_init__(self) -> None:
        super().__post_init__()
        classes = ["".join(rf"\p{{Script={each}}}" for each in scripts.split("|")) for scripts in self.scripts]
        self._foreign = [self._compile("scripts", f"[^{each}]") for each in classes]

    def accepts(self, source: str, target: str) -> bool:
        """Whether the pair stays."""
        for text, foreign, least in zip((source, target), self._foreign, self.thresholds, strict=True):
            letters = _NOT_ALPHABETIC.sub("", text)
            if len(foreign.sub("", letters)) < least * len(letters):
                return False
        return True


@dataclass(kw_only=True)
class LanguageIDFilter(Filter):
    """The likeliest language of each text is its own; the confidence in that one (0 to 1) is above its threshold.

    `id_method` is lingua, or "module:function" of your own, which is given the languages, and returns a `Detector` as
    those of `detection.DETECTORS` do. `langid_languages` are those that lingua chooses among, all by default, which
    takes several times as long. Short texts are easily mistaken: one stays unless another language is `ratio` times as
    likely as its own.
    """

    languages: Any = field(default=None, metadata=_PER_SIDE)
    id_method: str = "lingua"
    thresholds: Any = field(default=0.0, metadata=_PER_SIDE)
    langid_languages: Any = None
    lingua_mode: str = "low"
    ratio: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("lingua_mode", self.lingua_mode, "", ("low", "high"))
        for language in [*self.languages, *(self.langid_languages or ())]:
            if not isinstance(language, str):
                raise ValueError(f'{self}: {language!r} is no language; in YAML, write "no" for Norwegian.')
        if self.id_method not in DETECTORS and ":" not in self.id_method:
            told = f"{self}: id_method is {self.id_method!r}"
            raise ValueError(f'{told}; it must be {" or ".join(DETECTORS)}, or "module:function" of your own.')

    @cached_property
    def _detect(self) -> Detector:
        languages = list(dict.fromkeys([*self.languages, *(self.langid_languages or ())]))
        if self.id_method == "lingua":
            if unknown := [language for language in languages if not is_known_to_lingua(language)]:
                raise ValueError(f"{self}: lingua does not know the language {unknown[0]!r}.")
            is_low = self.lingua_mode == "low"
            return load_lingua(languages, among_all=self.langid_languages is None, low_accuracy=is_low)
        module, _, function = self.id_method.partition(":")
        make: Callable[[list[str]], Detector] | None = getattr(import_module(module), function, None)
        if make is None:
            raise ValueError(f"{self}: id_method is {self.id_method!r}, and {module} has no {function!r}.")
        return make(languages)

    @cached_property
    def _names(self) -> list[str]:
        """What the detector calls the languages: lingua, those of one code (zh_CN and zh_TW) as the first of them."""
        if self.id_method != "lingua":
            return list(self.languages)
        spelled = [*self.languages, *(self.langid_languages or ())]
        firsts = {find_iso_code(language): language for language in reversed(spelled)}
        return [firsts[find_iso_code(language)] for language in self.languages]

    def accepts(self, source: str, target: str) -> bool:
        """Whether the pair stays."""
        for text, language, least in zip((source, target), self._names, self.thresholds, strict=True):
            found = self._detect(text) if text else []
            if not found or not found[0].confidence:  # a text without letters is in no language
                continue
            own = next((each.confidence for each in found if each.language == language), 0.0)
            is_other = found[0].language != language and found[0].confidence > self.ratio * own
            if is_other or own <= 100 * least:
                return False
        return True


@dataclass(kw_only=True)
class TerminalPunctuationFilter(Filter):
    """How many marks end sentences in both texts: -log(1 + their difference + those beyond the first of each).

    See Vázquez et al. (2019), The University of Helsinki submission to the WMT19 parallel corpus filtering task.
    """

    threshold: float = -2

    def accepts(self, source: str, target: str) -> bool:
        """Whether the pair stays."""
        one, other = (sum(map(text.count, _TERMINAL)) for text in (source, target))
        return -math.log(1 + abs(one - other) + max(one - 1, 0) + max(other - 1, 0)) >= self.threshold


@dataclass(kw_only=True)
class NonZeroNumeralsFilter(Filter):
    """The similarity (difflib's ratio) of the digits from 1 to 9 of both texts; see Vázquez et al. (2019)."""

    threshold: float = 0.5

    def accepts(self, source: str, target: str) -> bool:
        """Whether the pair stays."""
        one, other = ([each for each in text if each in "123456789"] for text in (source, target))
        return difflib.SequenceMatcher(None, one, other).ratio() >= self.threshold


def find_numbers(text: str) -> set[str]:
    """The numbers that are written in digits of any script, without signs, separators and leading zeros."""
    found = ("".join(str(int(each)) for each in number if each.isdecimal()) for number in _NUMBER.findall(text))
    return {number.lstrip("0") or "0" for number in found}


@dataclass(kw_only=True)
class NumMismatch(Filter):
    """Of the different numbers of both texts, (shared + 1) / (not shared + 1) is at least `ratio`."""

    ratio: float = 1.0

    def accepts(self, source: str, target: str) -> bool:
        """Whether the pair stays."""
        one, other = find_numbers(source), find_numbers(target)
        return not one | other or len(one & other) + 1 >= self.ratio * (len(one ^ other) + 1)


@dataclass(kw_only=True)
class UrlMismatch(Filter):
    """Both texts have the same URLs and e-mail addresses, in any order."""

    def accepts(self, source: str, target: str) -> bool:
        """Whether the pair stays."""
        found = ([each.lower().rstrip(".,;:!?)]'") for each in _ADDRESS.findall(text)] for text in (source, target))
        one, other = map(sorted, found)
        return one == other


@dataclass(kw_only=True)
class EncodingFilter(Filter):
    """No text has the signs of a wrong encoding that ftfy knows, or U+FFFD, which stands for what was lost."""

    def __post_init__(self) -> None:
        super().__post_init__()
        with explain_missing(f"{self} {_DAMAGE}", extra="clean", packages="ftfy"):
            from ftfy.badness import is_bad
        self._is_bad = is_bad

    def accepts(self, source: str, target: str) -> bool:
        """Whether the pair stays."""
        return not any("\ufffd" in text or self._is_bad(text) for text in (source, target))


@dataclass(kw_only=True)
class FixEncoding(Change):
    """Lets ftfy mend wrong encodings and HTML's entities, and remove control characters; NFC. Quotes stay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        with explain_missing(f"{self} {_DAMAGE}", extra="clean", packages="ftfy"):
            from ftfy import TextFixerConfig, fix_text
        kept: Any = dict.fromkeys(("uncurl_quotes", "fix_character_width", "fix_latin_ligatures"), False)
        self._fix = partial(fix_text, config=TextFixerConfig(explain=False, **kept))

    def change(self, text: str) -> str:
        """The text as it should be."""
        return self._fix(text)


@dataclass(kw_only=True)
class WhitespaceNormalizer(Change):
    """Makes one space of every white space, and none of that at the ends."""

    def change(self, text: str) -> str:
        """The text as it should be."""
        return _WHITESPACE.sub(" ", text).strip()
