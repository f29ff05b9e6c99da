"""Rules for single pairs: each against what its description says, written out, and against what it must leave alone."""

import difflib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vanilla_transformer.data import detection, filters
from vanilla_transformer.data.cleaning import make_rule
from vanilla_transformer.data.detection import Detection
from vanilla_transformer.data.filters import find_numbers, find_tags

TEXTS = st.text(alphabet="ab Ä.?!0129\t<>/,", max_size=12)
MOJIBAKE = "Ã¼ber die StraÃŸe"


def accepts(kind: str, source: str, target: str, **parameters: Any) -> bool:
    rule: Any = make_rule(kind, parameters)
    return bool(rule.accepts(source, target))


@given(
    source=TEXTS, target=TEXTS, least=st.integers(0, 3), most=st.integers(2, 9), unit=st.sampled_from(["word", "char"])
)
def test_lengths_and_their_ratio(source: str, target: str, least: int, most: int, unit: str) -> None:
    lengths = [len(text.split() if unit == "word" else list(text)) for text in (source, target)]
    expected = all(least <= length <= most for length in lengths)
    assert accepts("LengthFilter", source, target, min_length=least, max_length=most, unit=unit) is expected
    ratio = 0.0 if max(lengths) == 0 else math.inf if min(lengths) == 0 else max(lengths) / min(lengths)
    assert accepts("LengthRatioFilter", source, target, threshold=most, unit=unit) is (ratio < most)


@given(source=TEXTS, target=TEXTS)
def test_digits_marks_and_letters(source: str, target: str) -> None:
    digits = [[each for each in text if each in "129"] for text in (source, target)]
    ratio = difflib.SequenceMatcher(None, digits[0], digits[1]).ratio()
    assert accepts("NonZeroNumeralsFilter", source, target) is (ratio >= 0.5)
    marks = [sum(each in ".?!" for each in text) for text in (source, target)]
    penalty = abs(marks[0] - marks[1]) + sum(count - 1 for count in marks if count > 1)
    assert accepts("TerminalPunctuationFilter", source, target, threshold=-1) is (-math.log(penalty + 1) >= -1)
    shares = [sum(map(str.isalpha, text)) / len(text) for text in (source, target) if text]
    assert accepts("AlphabetRatioFilter", source, target, threshold=0.4) is all(share >= 0.4 for share in shares)


@pytest.mark.parametrize(
    ("kind", "parameters", "kept", "removed"),
    [
        ("LengthFilter", {"min_length": [1, 2]}, ("a", "a b"), ("a b", "a")),
        ("LengthFilter", {"pass_empty": True}, ("", ""), ("", "a")),
        ("LongWordFilter", {"threshold": [4, 9]}, ("abc", "abcdefgh"), ("abcd", "abcd")),
        ("SimilarityFilter", {"threshold": 1.0, "lowercase": True}, ("Hello, Tom", "Hallo, Tom"), ("Tom!", "tom!")),
        ("SimilarityFilter", {}, ("Tom ist da.", "Tom is here."), ("Hello there, Tom", "Hallo there, Tom")),
        ("SimilarityFilter", {"unit": "word", "threshold": 0.5}, ("a b c", "a y z"), ("a b c", "a b z")),
        ("HtmlTagFilter", {}, ("a < b and c > d, I <3 it", "x"), ("a", "<p>b</p>")),
        ("HtmlTagFilter", {}, ("a", "b"), ("a </i>", "b")),
        ("HtmlTagFilter", {"allow_matching": True}, ("<b>a</b>", "<b>x</b>"), ("<b>a</b>", "<b>x")),
        ("RegExpFilter", {"regexps": "^#"}, ("a #", "b"), ("# a", "b")),
        ("RegExpFilter", {"regexps": [r"\d", "x"], "accept_match": True}, ("1", "x"), ("x", "1")),
        ("AlphabetRatioFilter", {"threshold": 0.7, "exclude_whitespace": True}, ("a b c .", "d"), ("a b . .", "d")),
        ("CharacterScoreFilter", {"scripts": ["Latin", "Cyrillic"]}, ("Hi 5!", "Привет, 5"), ("Hi", "Hi")),
        ("CharacterScoreFilter", {"scripts": "Latin", "thresholds": 0.5}, ("aб", "ab"), ("aбв", "ab")),
        ("CharacterScoreFilter", {"scripts": ["Latin", "Han|Hiragana"]}, ("I", "私は"), ("I", "プロ")),
        ("num_mismatch", {}, ("In 1,234.5 years", "1.234,5 Jahre"), ("1984", "1985")),
        ("num_mismatch", {"ratio": 0.5}, ("2 men", "zwei Männer"), ("2 men, 3", "zwei Männer")),
        ("url_mismatch", {}, ("See http://a.de/x.", "http://A.de/x lesen"), ("See www.a.de", "www.b.de")),
        ("url_mismatch", {}, ("Mr. Smith", "so.Dann"), ("write to me@a.de", "schreib")),
        ("url_mismatch", {}, ("See http://a.de.", "见http://a.de。"), ("See http://a.de.", "见http://b.de。")),
        ("url_mismatch", {}, ("To me@a.de, www.a.de", "请访问www.a.de获取me@a.de获"), ("me@a.de", "联系you@a.de获取")),
        ("EncodingFilter", {}, ("über “die” Straße – 5 €", "ok"), ("ok", MOJIBAKE)),
        ("EncodingFilter", {}, ("naïve", "中文，好"), ("na\ufffdve", "x")),
    ],
)
def test_rules_keep_and_remove(
    kind: str, parameters: dict[str, Any], kept: tuple[str, str], removed: tuple[str, str]
) -> None:
    assert accepts(kind, *kept, **parameters)
    assert not accepts(kind, *removed, **parameters)


def test_what_is_found_in_texts() -> None:
    assert find_numbers("007 agents, 1'000 or 1\u202f000 at 2:30, ٣ x10") == {"7", "1000", "230", "3", "10"}
    assert find_numbers("1 234 567,8 men, 1984 200, 12 3456") == {"12345678", "1984", "200", "12", "3456"}
    assert find_numbers("no 0 or 00") == {"0"}
    assert find_tags('<a href="x">y</a><br/>') == ["a", "/a", "br", "/br"]
    for text in ("<![LOG[done]LOG]!>", "<![%HTML;[ x", "<![foo]>", "<![ x", "<![CDATA[x]]>", "<<![![x"):
        assert find_tags(text) == ["!["]
    rest = "x " * 5000  # in which Python's parser would look for the end of "<b"
    assert find_tags(f'<A href="x">1 < 2</a> <br/>{rest}<b ') == ["a", "/a", "br"]
    assert find_tags(f"<![CDATA[{rest}") == ["!["]


def test_texts_are_mended() -> None:
    fix: Any = make_rule("FixEncoding", {})
    assert fix.change(MOJIBAKE) == "über die Straße"
    assert fix.change("Tom &amp; Mary\u0007") == "Tom & Mary"
    for text in ("„Anführung“ ‘so’", "中文，好！", "ﬁ"):
        assert fix.change(text) == text
    space: Any = make_rule("WhitespaceNormalizer", {})
    assert space.change("\u00a0a \t b\n") == "a b"


def make_detector(languages: list[str]) -> detection.Detector:
    """Takes the first letter for a language, half as sure of the second one."""
    return lambda text: [Detection(each, 60.0 / (place + 1)) for place, each in enumerate(text.split()[:2])]


@pytest.mark.parametrize(
    ("texts", "parameters", "expected"),
    [
        (("en de", "de en"), {}, True),
        (("en de", "fr de"), {}, False),
        (("en de", "fr de"), {"ratio": 2}, True),  # it is twice as likely, and not more
        (("en de", "fr de"), {"ratio": 1.9}, False),
        (("en de", "fr en"), {"ratio": 9}, False),
        (("en", "de"), {"thresholds": 0.6}, False),
        (("en", "de"), {"thresholds": [0.59, 0.5]}, True),
        (("", "de"), {"thresholds": 0.5}, True),
    ],
)
def test_a_detector_of_ones_own(texts: tuple[str, str], parameters: dict[str, Any], expected: bool) -> None:
    own: dict[str, Any] = {"languages": ["en", "de"], "id_method": f"{__name__}:make_detector"}
    assert accepts("LanguageIDFilter", *texts, **(own | parameters)) is expected


def test_two_spellings_of_one_language_are_both_found() -> None:
    rule: Any = make_rule("LanguageIDFilter", {"languages": ["zh_CN", "zh_TW"], "langid_languages": ["en"]})
    assert rule.accepts("他是一位医生。", "他是一位醫生。")
    assert not rule.accepts("他是一位医生。", "He is a doctor.")


def test_lingua_knows_languages() -> None:
    own: dict[str, Any] = {"languages": ["eng_Latn", "de"], "langid_languages": ["fr"]}
    english, german, french = "The man is riding a horse.", "Der Mann reitet ein Pferd.", "L'homme monte à cheval."
    for mode in ("low", "high"):
        rule: Any = make_rule("LinguaFilter", {**own, "lingua_mode": mode, "ratio": 2})
        assert rule.accepts(english, german)
        assert rule.accepts("5:30", "…")
        assert not rule.accepts(english, french)
        assert not rule.accepts(german, english)


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        ("LengthFilter", {"max_lenght": 5}, "no parameter 'max_lenght'; its parameters are name, min_length"),
        ("LengthFilter", {"max_length": "5"}, "max_length is '5'; it must be a number"),
        ("LengthFilter", {"min_length": [1, 2, 3]}, r"min_length is \[1, 2, 3\]; it must be given, once or for each"),
        ("LengthFilter", {"unit": "words"}, "unit is 'words'; it must be word or char"),
        ("LengthFilter", [5], r"has \[5\]; its parameters must be a mapping"),
        ("HtmlTagFilter", {"allow_matching": 1}, "allow_matching is 1; it must be true or false"),
        ("RegExpFilter", {}, "regexps is None; it must be given"),
        ("RegExpFilter", {"regexps": "("}, "regexps"),
        ("CharacterScoreFilter", {"scripts": "Latn1"}, "scripts is .*Latn1"),
        (
            "LanguageIDFilter",
            {"languages": "en", "id_method": "langid"},
            "id_method is 'langid'; it must be lingua, or",
        ),
        (
            "LanguageIDFilter",
            {"languages": "en", "lingua_mode": "fast"},
            "lingua_mode is 'fast'; it must be low or high",
        ),
        ("LanguageIDFilter", {"languages": "en", "id_method": f"{__name__}:nothing"}, "has no 'nothing'"),
        ("LanguageIDFilter", {"languages": ["en", "tlh"]}, "lingua does not know the language 'tlh'"),
        ("WordAlignFilter", {}, "no rule 'WordAlignFilter'; the rules are AlphabetRatioFilter, "),
    ],
)
def test_wrong_parameters_are_refused(kind: str, parameters: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        accepts(kind, "a", "b", **parameters) if isinstance(parameters, dict) else make_rule(kind, parameters)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ftfy", None)
    with pytest.raises(ImportError, match=r'FixEncoding needs ftfy.*"vanilla-transformer\[clean\]"'):
        filters.FixEncoding()
