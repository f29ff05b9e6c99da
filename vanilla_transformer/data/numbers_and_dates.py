"""The built-in parallel corpus: numbers and dates written out in two languages by `num2words` and `Babel`.

It needs no download, and every target is right by construction. It is a demonstration, not a benchmark. A kind of
example that a library does not write in one of the languages is left out, and a warning names it.
"""

import datetime
import logging
import random
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, cast

from datasets import Dataset, DatasetDict
from datasets.utils import tqdm

try:
    from babel import Locale
    from babel.dates import (
        TIMEDELTA_UNITS,
        format_date,
        format_skeleton,
        format_time,
        format_timedelta,
        get_datetime_format,
    )
    from babel.lists import format_list
    from babel.localedata import locale_identifiers
    from num2words import CONVERTER_CLASSES, num2words
except ImportError as error:
    needs = f"The built-in corpus needs num2words and Babel, but there is no {error.name}"
    raise ImportError(f'{needs}: pip install "vanilla-transformer[train]"') from error

from .batching import check_at_least

logger = logging.getLogger(__name__)

# The languages, and variants such as fr_CH, that both libraries know.
LANGUAGES = tuple(sorted(CONVERTER_CLASSES.keys() & set(locale_identifiers())))

_FIRST_DAY = datetime.date(1900, 1, 1)
_LAST_DAY = datetime.date(2099, 12, 31)
_PROBES = 40  # examples by which a kind is tried in a language
_MARKS_OF_DIRECTION = str.maketrans("", "", "\u200e\u200f\u061c")  # nobody types them
# Many languages have no words of their own for these.
_LATIN_EVERYWHERE = re.compile(r"\b[AP]M\b")
_Style = Literal["standard", "or"]
_DateFormat = Literal["full", "long"]
_Unit = Literal["year", "month", "week", "day", "hour", "minute", "second"]
_SECONDS = cast(dict[_Unit, int], dict(TIMEDELTA_UNITS))


@dataclass(frozen=True)
class _Language:
    """A language as num2words calls it, and as Babel does."""

    code: str
    locale: str

    def number(self, value: Any, to: str = "cardinal", **options: Any) -> str:
        """A number in words."""
        return num2words(value, lang=self.code, to=to, **options)


@dataclass(frozen=True)
class _Kind:
    """A kind of example: how often it comes, what it says, how a language says it, and whether that makes sense."""

    name: str
    weight: float
    draw: Callable[[random.Random], Any]
    write: Callable[[_Language, Any], str]
    in_words: bool = False
    makes_sense: Callable[[_Language], bool] = lambda language: True
    # The number that a language may write just like the value.
    plain_number: Callable[[Any], int | None] = lambda value: None

    def text(self, value: Any, language: _Language) -> str:
        """The value in the language; narrow and no-break spaces become plain ones, as people type them."""
        return " ".join(self.write(language, value).translate(_MARKS_OF_DIRECTION).split())


def _draw_integer(rng: random.Random, *, digits: int) -> int:
    """A number of 1 to `digits` digits, each length as likely as the next, so that small numbers are not rare."""
    length = rng.randint(1, digits)
    return rng.randint(10 ** (length - 1) if length > 1 else 0, 10**length - 1)


def _draw_date(rng: random.Random) -> datetime.date:
    return _FIRST_DAY + datetime.timedelta(days=rng.randint(0, (_LAST_DAY - _FIRST_DAY).days))


def _draw_amount(rng: random.Random) -> str:
    return f"{_draw_integer(rng, digits=3)}.{rng.randint(0, 99):02d}"


def _draw_time(rng: random.Random) -> datetime.time:
    return datetime.time(hour=rng.randint(0, 23), minute=rng.randint(0, 59))


def _draw_datetime(rng: random.Random) -> Any:
    return rng.choice(["full", "long"]), _draw_date(rng), _draw_time(rng)


def _draw_difference(rng: random.Random) -> Any:
    return rng.choice([-1, 1]) * rng.randint(1, 99), rng.choice(list(_SECONDS))


def _draw_list(rng: random.Random) -> tuple[_Style, bool, list[datetime.date]]:
    """A conjunction or disjunction of two or three weekdays (True) or days of the year (False)."""
    styles: list[_Style] = ["standard", "or"]
    style, count = rng.choice(styles), rng.randint(2, 3)
    if rng.random() < 0.25:
        return style, True, [_FIRST_DAY + datetime.timedelta(days=day) for day in rng.sample(range(7), count)]
    return style, False, [_draw_date(rng) for _ in range(count)]


def _write_date(language: _Language, date: datetime.date, date_format: str) -> str:
    return format_date(date, format=date_format, locale=language.locale)


def _write_skeleton(language: _Language, date: datetime.date, skeleton: str) -> str:
    return format_skeleton(skeleton, date, locale=language.locale)


def _write_spelled_date(language: _Language, date: datetime.date) -> str:
    return _write_date(language, date, "long").replace(str(date.year), language.number(date.year, to="year"))


def _write_datetime(language: _Language, moment: tuple[_DateFormat, datetime.date, datetime.time]) -> str:
    # Babel's own format_datetime has no full date with a short time. Quotes mark literal text in these patterns.
    date_format, date, time = moment
    locale = language.locale
    pattern = str(get_datetime_format(format=date_format, locale=locale)).replace("'", "")
    return pattern.format(format_time(time, format="short", locale=locale), _write_date(language, date, date_format))


def _write_list(language: _Language, items: tuple[_Style, bool, list[datetime.date]]) -> str:
    style, weekdays, dates = items
    write = partial(_write_date, date_format="EEEE") if weekdays else partial(_write_skeleton, skeleton="MMMMd")
    return format_list([write(language, date) for date in dates], style=style, locale=language.locale)


def _write_difference(language: _Language, difference: tuple[int, _Unit]) -> str:
    # An infinite threshold keeps Babel from turning 14 days into 2 weeks.
    count, unit = difference
    return format_timedelta(
        count * _SECONDS[unit], granularity=unit, threshold=float("inf"), add_direction=True, locale=language.locale
    )


def _has_ordinals(language: _Language) -> bool:
    """Some languages write the plain number instead, or two numbers alike."""
    numbers = [*range(1, 100), *range(100, 1000, 100), 5008]
    ordinals = {language.number(number, to="ordinal") for number in numbers}
    return len(ordinals - {language.number(number) for number in numbers}) == len(numbers)


def _has_decimals(language: _Language) -> bool:
    """Some languages write 1.05 as one point five, and 1.5 as one point fifty."""
    for digit in range(1, 10):
        name = language.number(digit)
        tenth, hundredth = (language.number(float(f"41.{zero}{digit}")) for zero in ("", "0"))
        if tenth == hundredth or (hundredth.endswith(name) and not tenth.endswith(name)):
            return False
    return True


def _has_euros(language: _Language) -> bool:
    """Some languages write another currency, whichever they are asked for."""
    try:
        dollars = language.number("12.50", to="currency", currency="USD")
    except NotImplementedError:
        return True
    return dollars != language.number("12.50", to="currency", currency="EUR")


def _has_years_of_their_own(language: _Language) -> bool:
    """Whether the year stands alone in a date, so that a number in words can take its place: not so in 2071年."""
    written = format_date(datetime.date(2071, 7, 30), format="long", locale=language.locale)
    return re.search(r"(?<!\S)2071(?![^\s,])", written) is not None


_ORDINAL, _YEAR = (partial(_Language.number, to=to) for to in ("ordinal", "year"))
_EUROS = partial(_Language.number, to="currency", currency="EUR")
_KINDS = (
    # thirty-one thousand and five; twenty-first
    _Kind("numbers", 3, lambda rng: _draw_integer(rng, digits=6), _Language.number, in_words=True),
    _Kind("ordinal numbers", 1, lambda rng: max(1, _draw_integer(rng, digits=4)), _ORDINAL, True, _has_ordinals),
    # nineteen eighty-four; from 2000 on, German and others write them as numbers, English does not
    _Kind("years", 0.5, lambda rng: rng.randint(1100, 1999), _YEAR, True, plain_number=lambda year: year),
    _Kind(
        "decimal numbers",  # twelve point five
        weight=1,
        draw=lambda rng: float(f"{_draw_integer(rng, digits=3)}.{_draw_integer(rng, digits=2)}"),
        write=_Language.number,
        in_words=True,
        makes_sense=_has_decimals,
        plain_number=lambda number: int(number) if number.is_integer() else None,
    ),
    # twelve euro, fifty cents
    _Kind("amounts of money", 1, _draw_amount, _EUROS, True, _has_euros),
    # Wednesday, March 21, 1984; March 21, 1984; March 21, nineteen eighty-four; March 1984
    _Kind("dates with the weekday", 2, _draw_date, partial(_write_date, date_format="full")),
    _Kind("dates", 1, _draw_date, partial(_write_date, date_format="long")),
    _Kind("dates with the year in words", 1, _draw_date, _write_spelled_date, makes_sense=_has_years_of_their_own),
    _Kind("months", 0.25, lambda rng: _draw_date(rng).replace(day=1), partial(_write_skeleton, skeleton="yMMMM")),
    # 3:05 PM; March 21, 1984, 3:05 PM; in 3 days; 3 days ago
    _Kind("times", 0.25, _draw_time, lambda language, time: format_time(time, "short", locale=language.locale)),
    _Kind("dates with times", 1, _draw_datetime, _write_datetime),
    _Kind("differences of time", 0.5, _draw_difference, _write_difference),
    # Monday, Tuesday, or Friday; March 21 and April 3
    _Kind("lists", 1, _draw_list, _write_list),
)
_NUMBERS = _KINDS[0]


def _scripts(text: str) -> set[str]:
    """The scripts of its letters: LATIN, CYRILLIC, CJK, ..."""
    return {unicodedata.name(letter, "UNKNOWN").split()[0] for letter in {*text} if letter.isalpha()}


def _scripts_of_locale(locale: str) -> set[str]:
    """The scripts in which Babel writes months and weekdays."""
    data = Locale.parse(locale)
    names = [*data.months["format"]["wide"].values(), *data.days["format"]["wide"].values()]
    scripts = _scripts("".join(names))
    return scripts | {"CJK", "HIRAGANA", "KATAKANA"} if "CJK" in scripts else scripts


def _find_language(code: str) -> _Language:
    """Finds the locale in the script of num2words, which writes Serbian, say, in Latin letters: sr_Latn."""
    scripts = _scripts(num2words(21.5, lang=code))
    variants = sorted(name for name in locale_identifiers() if re.fullmatch(rf"{code}_[A-Z][a-z]{{3}}", name))
    fitting = (name for name in [code, *variants] if scripts <= _scripts_of_locale(name))
    return _Language(code, next(fitting, code))


@lru_cache(maxsize=len(LANGUAGES))
def _language_and_kinds(code: str) -> tuple[_Language, frozenset[str]]:
    """A language, and the names of the kinds that the libraries write in it, as far as can be told by trying."""
    language = _find_language(code)
    scripts = _scripts_of_locale(language.locale)
    return language, frozenset(kind.name for kind in _KINDS if _is_written(kind, language, scripts))


def _is_written(kind: _Kind, language: _Language, scripts: set[str]) -> bool:
    """Whether examples can be written, make sense, differ where their values do, and are in the language's script."""
    rng = random.Random(kind.name)
    values = {repr(value): value for value in (kind.draw(rng) for _ in range(_PROBES))}
    try:
        texts = [kind.text(value, language) for value in values.values()]
        makes_sense = kind.makes_sense(language)
    except Exception:  # NotImplementedError is only one of the ways in which num2words says no
        return False
    if not makes_sense or len(set(texts)) < len(values) or (kind.in_words and not all(map(_is_in_words, texts))):
        return False
    return all(_scripts(_LATIN_EVERYWHERE.sub("", text)) <= scripts for text in texts)


def _is_in_words(text: str) -> bool:
    """Whether every word has letters, and none has digits."""
    return all(any(map(str.isalpha, word)) and not any(map(str.isdigit, word)) for word in text.split())


def _find_kinds(source_lang: str, target_lang: str) -> list[_Kind]:
    """The kinds of example that both languages have."""
    known = _language_and_kinds(source_lang)[1] & _language_and_kinds(target_lang)[1]
    if missing := [kind.name for kind in _KINDS if kind.name not in known]:
        logger.warning(
            "The corpus from %s to %s has no %s: num2words or Babel does not write them in both languages.",
            *(source_lang, target_lang, ", no ".join(missing)),
        )
    return [kind for kind in _KINDS if kind.name in known]


def _pairs(*, source_lang: str, target_lang: str, seed: int) -> Iterator[tuple[str, str]]:
    """Yields (source, target) without end; sources may repeat."""
    kinds = _find_kinds(source_lang, target_lang)
    source_language, target_language = (_language_and_kinds(code)[0] for code in (source_lang, target_lang))
    rng = random.Random(str(seed))  # Random(-1) would equal Random(1); text is hashed whole
    weights = [kind.weight for kind in kinds]
    while True:
        (kind,) = rng.choices(kinds, weights=weights)
        value = kind.draw(rng)
        source, target = kind.text(value, source_language), kind.text(value, target_language)
        number = kind.plain_number(value) if _NUMBERS in kinds else None
        is_plain = number is not None and source == _NUMBERS.text(number, source_language)
        # French writes a year as it writes a number, German does not: the source would not tell which one is meant.
        if not is_plain or target == _NUMBERS.text(number, target_language):
            yield source, target


def _unique_pairs(*, count: int, source_lang: str, target_lang: str, seed: int) -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    with tqdm(total=count, desc="Generating numbers and dates", unit="pair", delay=3) as progress:
        for source, target in _pairs(source_lang=source_lang, target_lang=target_lang, seed=seed):
            if source not in found:
                found[source] = target
                progress.update()
            if len(found) == count:
                break
    return list(found.items())


def numbers_and_dates(
    *,
    num_examples: int = 20_000,
    validation_size: int = 500,
    test_size: int = 1_000,
    source_lang: str = "en",
    target_lang: str = "de",
    seed: int = 0,
    split: Literal["train", "validation", "test"] | None = None,
) -> Any:
    """Generates the built-in corpus of numbers, amounts, dates and times written out in two languages.

    No source text comes twice, also not in two splits. The corpus depends on the arguments alone (and the versions of
    num2words and Babel); a smaller training split is the beginning of a larger one.

    Returns a dictionary of three datasets with the string columns "source" and "target", or the one that `split` names.
    """
    for name, lang in (("source_lang", source_lang), ("target_lang", target_lang)):
        if lang not in LANGUAGES:
            raise ValueError(f"{name}={lang!r}: must be one of {', '.join(LANGUAGES)}.")
    if source_lang == target_lang:
        raise ValueError(f"source_lang and target_lang are both {source_lang!r}: they must differ.")
    check_at_least(test_size=(test_size, 1), validation_size=(validation_size, 1), num_examples=(num_examples, 1))
    sizes = {"test": test_size, "validation": validation_size, "train": num_examples}
    if split is not None and split not in sizes:
        raise ValueError(f"split={split!r}: must be one of train, validation, test, or None for all.")
    # The held-out splits come first in the stream, whatever the size of the training split.
    ends = {"test": test_size, "validation": test_size + validation_size, "train": sum(sizes.values())}
    count = ends[split or "train"]
    pairs = _unique_pairs(count=count, source_lang=source_lang, target_lang=target_lang, seed=seed)
    wanted = [split] if split is not None else ["train", "validation", "test"]
    rows = [{"source": source, "target": target} for source, target in pairs]
    datasets = {name: Dataset.from_list(rows[ends[name] - sizes[name] : ends[name]]) for name in wanted}
    return DatasetDict(datasets) if split is None else datasets[split]
