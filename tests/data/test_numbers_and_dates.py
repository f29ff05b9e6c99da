import datetime
import hashlib
import importlib
import itertools
import json
import re
import sys
import unicodedata
from importlib.metadata import version
from typing import Any

import pytest
from babel import Locale, UnknownLocaleError
from datasets import Dataset, DatasetDict
from num2words import CONVERTER_CLASSES, num2words

from vanilla_transformer.data.numbers_and_dates import LANGUAGES, numbers_and_dates

SPLITS = ("train", "validation", "test")
VERSIONS = (version("Babel"), version("num2words"))

GERMAN_MONTHS = ["Januar", "Februar", "März", "April", "Mai", "Juni", "Juli", "August", "September", "Oktober"]
GERMAN_MONTHS += ["November", "Dezember"]
GERMAN_WEEKDAYS = ["Montag", "Dienstag", "Mittwoch", "Donnerstag", "Freitag", "Samstag", "Sonntag"]
GERMAN_ONES = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn"]
GERMAN_ONES += ["elf", "zwölf"]
GERMAN_TENS = ["zwanzig", "dreißig", "vierzig", "fünfzig", "sechzig", "siebzig", "achtzig", "neunzig"]


def german(number: int) -> str:
    """A German number below a million, from the language's rules."""
    if number >= 1000:
        rest = number % 1000
        return f"{german_factor(number // 1000)}tausend{german(rest) if rest else ''}"
    if number >= 100:
        rest = number % 100
        return f"{german_factor(number // 100)}hundert{german(rest) if rest else ''}"
    if number <= 12:
        return GERMAN_ONES[number]
    if number < 20:
        return {16: "sech", 17: "sieb"}.get(number, GERMAN_ONES[number % 10]) + "zehn"
    tens = GERMAN_TENS[number // 10 - 2]
    return f"{german_factor(number % 10)}und{tens}" if number % 10 else tens


def german_factor(number: int) -> str:
    return re.sub("eins$", "ein", german(number))


def german_date(date: datetime.date, *, weekday: bool) -> str:
    written = f"{date.day}. {GERMAN_MONTHS[date.month - 1]} {date.year}"
    return f"{GERMAN_WEEKDAYS[date.weekday()]}, {written}" if weekday else written


def parse(text: str, pattern: str) -> datetime.datetime | None:
    try:
        return datetime.datetime.strptime(text, pattern)
    except ValueError:
        return None


def expected(source: str, cardinals: dict[str, int]) -> str | None:
    """The German of the kinds that can be read back without the corpus's own libraries; None for the others."""
    for time, german_time in (("", ""), (", %I:%M %p", ", %H:%M")):
        for weekday in (True, False):
            moment = parse(source, ("%A, " if weekday else "") + "%B %d, %Y" + time)
            if moment:
                return german_date(moment.date(), weekday=weekday) + moment.strftime(german_time)
    moment = parse(source, "%I:%M %p")
    if moment:
        return moment.strftime("%H:%M")
    if source in cardinals:
        return german(cardinals[source])
    if match := re.fullmatch(r"(.*) euro, (.*) cents?", source):
        euros, cents = (german_factor(cardinals[part]) for part in match.groups())
        return f"{euros} Euro und {cents} Cent"
    if match := re.fullmatch(r"(.*) point (.*)", source):
        return f"{german(cardinals[match[1]])} Komma {' '.join(german(cardinals[digit]) for digit in match[2].split())}"
    return None


@pytest.fixture(scope="module")
def corpus() -> DatasetDict:
    return numbers_and_dates(num_examples=2000, validation_size=100, test_size=400)


def test_sizes_columns_and_no_source_text_twice(corpus: DatasetDict) -> None:
    assert {name: len(split) for name, split in corpus.items()} == {"train": 2000, "validation": 100, "test": 400}
    assert all(names == ["source", "target"] for names in corpus.column_names.values())
    sources = [source for split in SPLITS for source in corpus[split]["source"]]
    assert len(set(sources)) == len(sources)


def test_every_target_is_the_german_of_its_source(corpus: DatasetDict) -> None:
    cardinals = {num2words(number, lang="en"): number for number in range(10_000)}
    checked = 0
    for split in corpus.values():
        for source, target in zip(split["source"], split["target"], strict=True):
            translation = expected(source, cardinals)
            if translation is not None:
                assert target == translation, source
                checked += 1
    # Ordinals, bare years, years in words, months, differences, lists and the largest numbers cannot be read back.
    assert checked > 0.5 * 2500


def test_one_target_for_each_source_in_both_directions() -> None:
    for source_lang, target_lang in (("en", "de"), ("de", "en")):
        # The same draws in both: what is written alike in one language is written alike in the other.
        corpus = numbers_and_dates(test_size=1500, source_lang=source_lang, target_lang=target_lang, split="test")
        assert len(set(corpus["target"])) == len(corpus)


@pytest.mark.parametrize(
    ("pattern", "german_pattern"),
    [
        (r"one hundred and \S+", r"einhundert\w+"),
        (r"[a-z, -]+(first|second|third|th)", r"\w+te"),
        (r"nineteen \S+", r"neunzehnhundert\S*"),
        (r".* euro, .* cents?", ".* Euro und .* Cent"),
        (r"(Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day, \w+ \d+, \d{4}", r"\w+tag, .*|Mittwoch, .*"),
        (r"\w+ \d+, (nineteen|twenty) \S+", r"\d+\. \w+ (neunzehn|zwei)\w+"),
        (r"in \d+ days?", r"in \d+ Tag(en)?"),
        (r"\d+ weeks? ago", r"vor \d+ Wochen?"),
        (r"\w+day,? (or|and) \w+day", r"\w+ (oder|und) \w+"),
        (r"\w+ \d+, \w+ \d+, and \w+ \d+", r"\d+\. \w+, \d+\. \w+ und \d+\. \w+"),
    ],
)
def test_every_kind_of_example_is_there(corpus: DatasetDict, pattern: str, german_pattern: str) -> None:
    found = [example for example in corpus["train"] if re.fullmatch(pattern, example["source"])]
    assert found
    for example in found:
        assert re.fullmatch(german_pattern, example["target"]), example


def test_held_out_splits_do_not_depend_on_the_training_size(corpus: DatasetDict) -> None:
    smaller = numbers_and_dates(num_examples=50, validation_size=100, test_size=400)
    for split in SPLITS:
        assert smaller[split].to_dict() == corpus[split].take(len(smaller[split])).to_dict()


def test_one_split_alone_is_the_same(corpus: DatasetDict) -> None:
    for split in SPLITS:
        alone: Any = numbers_and_dates(num_examples=2000, validation_size=100, test_size=400, split=split)  # type: ignore[arg-type]
        assert alone.to_dict() == corpus[split].to_dict()


def test_seeds_draw_other_examples() -> None:
    drawn = [{*numbers_and_dates(test_size=300, split="test", seed=seed)["source"]} for seed in (0, 1, -1, 2**40)]
    assert all(len(one & other) < 30 for one, other in itertools.combinations(drawn, 2))


@pytest.mark.skipif(VERSIONS != ("2.18.0", "0.5.14"), reason="other versions write other words")
def test_the_corpus_from_english_to_german_is_what_it_always_was(corpus: DatasetDict) -> None:
    texts = json.dumps([corpus[split].to_dict() for split in SPLITS], ensure_ascii=False)
    digest = hashlib.sha256(texts.encode()).hexdigest()
    assert digest == "0776558685bd43352f02d7c38168ae02498ab95cb8c772008d8f4fbb5e665e66"


@pytest.fixture(scope="module")
def from_english() -> dict[str, Dataset]:
    options: Any = {"test_size": 60, "source_lang": "en", "split": "test"}
    return {language: numbers_and_dates(target_lang=language, **options) for language in LANGUAGES if language != "en"}


class TestLanguages:
    """Of any two languages that both libraries know, each example is right, or its kind is left out."""

    def test_they_are_those_of_both_libraries(self) -> None:
        def is_locale(name: str) -> bool:
            try:
                return str(Locale.parse(name)) == name
            except (UnknownLocaleError, ValueError):
                return False

        assert {*LANGUAGES} == {name for name in CONVERTER_CLASSES if is_locale(name)}
        assert {"en", "de", "fr", "es", "it", "nl", "pl", "ru", "tr", "ja", "ko", "ar", "he", "pt_BR"} <= {*LANGUAGES}

    def test_every_one_tells_values_apart(self, from_english: dict[str, Dataset]) -> None:
        for language, corpus in from_english.items():
            assert len({*corpus["target"]}) >= 59, language
            for text in itertools.chain(corpus["source"], corpus["target"]):
                assert text == " ".join(text.split()).strip() != "", f"{language}: spaces are those that people type"

    def test_no_words_of_another_one_are_among_theirs(self, from_english: dict[str, Dataset]) -> None:
        languages = {"LATIN": ("sr", "tr", "vi", "az", "pl", "sv"), "CYRILLIC MODIFIER": ("ru", "be", "uk", "tg")}
        languages |= {"ARABIC": ("ar", "fa"), "CJK HIRAGANA KATAKANA": ("ja",), "HEBREW": ("he",), "THAI": ("th",)}
        languages |= {"TELUGU": ("te",), "HANGUL": ("ko",), "ETHIOPIC": ("am",)}
        for scripts, own in languages.items():
            text = "\n".join(itertools.chain.from_iterable(from_english[language]["target"] for language in own))
            letters = filter(str.isalpha, re.sub(r"\b[AP]M\b", "", text))
            assert {unicodedata.name(letter).split()[0] for letter in letters} <= {*scripts.split()}, own

    def test_what_cannot_be_written_is_left_out_and_named(self, caplog: pytest.LogCaptureFixture) -> None:
        swedish = numbers_and_dates(test_size=200, source_lang="en", target_lang="sv", split="test")
        assert "from en to sv has no years, no amounts of money, no dates with the year in words" in caplog.text
        assert not [text for text in swedish["source"] if re.search(r"euro|\w+ \d+, [a-z]+ \w+-\w+$", text)]
        assert [text for text in swedish["target"] if re.fullmatch(r"\S*tusen.*", text)], "numbers are there"
        caplog.clear()
        numbers_and_dates(test_size=1, source_lang="de", target_lang="fr", split="test")
        assert caplog.text == ""

    @pytest.mark.parametrize(
        ("language", "missing"),
        [
            ("ar", "no ordinal numbers, no decimal numbers, no amounts of money"),  # plain numbers, 1.5 as 1.50, riyals
            ("tr", "no decimal numbers, no amounts of money"),  # 1.05 and 1.5 are confused
            ("hu", "no dates with the year in words"),  # 2071. is an ordinal number
            ("te", "no amounts of money"),  # the words for them are English
            ("be", "no ordinal numbers"),  # 70th and 80th are one word
        ],
    )
    def test_what_is_written_wrongly_is_left_out(self, language: str, missing: str, caplog: Any) -> None:
        numbers_and_dates(test_size=1, source_lang="en", target_lang=language, split="test")
        assert f"from en to {language} has {missing}:" in caplog.text

    def test_words_are_in_their_place(self, from_english: dict[str, Dataset]) -> None:
        digits = dict(zip("一二三四五六七八九", range(1, 10), strict=True))
        units = {"十": 10, "百": 100, "千": 1000}
        cardinals = {num2words(number, lang="en"): number for number in range(10_000)}

        def read(japanese: str) -> int:
            total = digit = 0
            for character in japanese:
                if character in units:
                    total, digit = total + (digit or 1) * units[character], 0
                else:
                    digit = digits[character]
            return total + digit

        corpus = numbers_and_dates(test_size=300, source_lang="en", target_lang="ja", split="test")
        found = [(cardinals[row["source"]], row["target"]) for row in corpus if cardinals.get(row["source"])]
        assert len(found) > 20
        for number, target in found:
            assert read(target) == number

    def test_one_source_has_one_target(self) -> None:
        """French writes a year as it writes a number, and German does not: such sources would have two targets."""
        cardinals = {num2words(number, lang="fr"): number for number in range(1100, 2000)}
        corpus = numbers_and_dates(test_size=1500, source_lang="fr", target_lang="de", split="test")
        numbers = [(cardinals[row["source"]], row["target"]) for row in corpus if row["source"] in cardinals]
        assert numbers
        for number, target in numbers:
            assert target == german(number)

    def test_any_pair_will_do(self) -> None:
        some = ("ja", "ar", "pt_BR", "sr", "is", "am")
        for source_lang, target_lang in itertools.permutations(some, 2):
            corpus = numbers_and_dates(test_size=20, source_lang=source_lang, target_lang=target_lang, split="test")
            assert len({*corpus["source"]}) == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source_lang": "xx"}, r"source_lang='xx': must be one of am, ar, .*, de, en, .*, vi\."),
        ({"target_lang": "kz"}, "target_lang='kz': must be one of am, ar"),
        ({"source_lang": "de"}, "source_lang and target_lang are both 'de'"),
        ({"validation_size": 0}, "validation_size=0: must be at least 1"),
        ({"split": "dev"}, "split='dev': must be one of train, validation, test, or None"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        numbers_and_dates(**arguments)


@pytest.mark.parametrize("library", ["num2words", "babel.dates"])
def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, "vanilla_transformer.data.numbers_and_dates")
    with pytest.raises(ImportError, match=rf'no {library}.*: pip install "vanilla-transformer\[train\]"'):
        importlib.import_module("vanilla_transformer.data.numbers_and_dates")
