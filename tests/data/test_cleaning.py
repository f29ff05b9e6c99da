"""Rules in their order, against a loop over pairs; files of rules; what the default rules leave and remove."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vanilla_transformer.data.cleaning import (
    Outcome,
    apply_rules,
    clean_pairs,
    decide,
    default_rules,
    find_script,
    make_rules,
    read_rules,
)
from vanilla_transformer.data.detection import Detection, Detector
from vanilla_transformer.data.duplicates import RemoveDuplicates
from vanilla_transformer.data.filters import Change, Filter, Rule

SOME_RULES: list[dict[str, Any]] = [
    {"WhitespaceNormalizer": {}},
    {"LengthFilter": {"max_length": 3}},
    {"LengthFilter": {"unit": "char", "max_length": 6}},
    {"RemoveDuplicates": {}},
    {"RemoveDuplicates": {"lowercase": True}},
    {"RemoveDuplicates": {"compare": [0], "name": "sources"}},
    {"SimilarityFilter": {"threshold": 1.0}},
]
TEXTS = st.text(alphabet="aA b", max_size=8)


def follow(rules: list[Rule], pairs: list[tuple[str, str]]) -> list[tuple[str, str, int]]:
    """The oracle: one pair after the other, through all rules, as a person would do it."""
    seen: dict[int, set[Any]] = {number: set() for number in range(len(rules))}
    found = []
    for source, target in pairs:
        number = 0
        for number, rule in enumerate(rules):
            if isinstance(rule, Change):
                source, target = rule.change(source), rule.change(target)
            elif isinstance(rule, Filter):
                if not rule.accepts(source, target):
                    break
            elif isinstance(rule, RemoveDuplicates):
                texts = (source, target) if rule.compare == "all" else (source,)
                key = tuple(text.lower() if rule.lowercase else text for text in texts)
                if key in seen[number]:
                    break
                seen[number].add(key)
        else:
            number = len(rules)
        found.append((source, target, number))
    return found


@given(
    order=st.permutations(SOME_RULES),
    parts=st.lists(st.lists(st.tuples(TEXTS, TEXTS), max_size=6), max_size=5),
)
def test_parts_are_cleaned_as_one_pair_after_the_other(
    order: list[dict[str, Any]], parts: list[list[tuple[str, str]]]
) -> None:
    rules = make_rules(order)
    pairs = [pair for part in parts for pair in part]
    outcomes: list[Outcome] = [apply_rules(rules, part) for part in parts]
    verdicts = decide(rules, lambda: iter(outcomes)).tolist()
    expected = follow(rules, pairs)
    assert verdicts == [number for *_, number in expected]
    kept = [pair for outcome in outcomes for pair in outcome.pairs]
    kept = [pair for pair, verdict in zip(kept, verdicts, strict=True) if verdict == len(rules)]
    assert kept == [(source, target) for source, target, number in expected if number == len(rules)]
    assert clean_pairs(rules, pairs)[0] == kept


def test_files_of_rules_of_both_styles(tmp_path: Path) -> None:
    own = [
        {"WhitespaceNormalizer": {}},
        {"LengthFilter": {"unit": "word", "max_length": 9}},
        {"LengthFilter": {"unit": "char"}},
        {"RemoveDuplicates": {"lowercase": True}},
    ]
    step = {"inputs": ["a", "b"], "outputs": ["c", "d"]}
    steps = [
        {"type": "preprocess", "parameters": {**step, "preprocessors": own[:1]}},
        {"type": "filter", "parameters": {**step, "filters": own[1:3]}},
        {"type": "remove_duplicates", "parameters": {**step, "lowercase": True, "hash": "xxh64"}},
    ]
    expected = make_rules(own)
    assert list(map(str, expected)) == ["WhitespaceNormalizer", "LengthFilter", "LengthFilter.2", "RemoveDuplicates"]
    for config in (own, {"filters": own}, {"steps": steps, "common": {"output_directory": "x"}}):
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        assert read_rules(tmp_path / "rules.yaml") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "rules.yaml: while parsing"),
        ("LengthFilter: {}", "rules.yaml: Rules must be a list"),
        ("- LengthFilter", "Rules must be a list"),
        ("- {LengthFilter: {}, HtmlTagFilter: {}}", "Rules must be a list"),
        ("steps: [{type: opus_read}]", "A step of the type 'opus_read' is not known here; filter, preprocess"),
        ("steps: [{type: filter, parameters: {}}]", "The step filter has filters=None; it must be a list"),
        ("steps:", "Rules must be a list"),
        (
            "steps: [{type: filter, parameters: {filters: [], limit: 3}}]",
            "limit=3, which is not known here",
        ),
        ("[LanguageIDFilter: {languages: [en, no]}]", 'False is no language; in YAML, write "no"'),
        ("[SimilarityFilter: {weights: 3}]", "weights is 3; it must be three whole numbers"),
    ],
)
def test_wrong_files_of_rules_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rules.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_rules(tmp_path / "rules.yaml")


@pytest.mark.parametrize(
    ("language", "script"),
    [
        *(("de", "Latn"), ("deu_Latn", "Latn"), ("ru", "Cyrl"), ("zh", "Hans"), ("zh-Hant", "Hant"), ("jpn", "Jpan")),
        *(("sh", "Latn"), ("tl", "Latn"), ("bh", "Deva"), ("prs", "Arab"), ("sr-Latn", "Latn"), ("sr", "Cyrl")),
    ],
)
def test_languages_have_scripts(language: str, script: str) -> None:
    assert find_script(language) == script


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(ValueError, match="'xx' is not known"):
        default_rules("en", "xx")


GOOD = {
    "de": [("It is 5:30.", "Es ist 5:30."), ("I see Tom.", "Ich sehe Tom."), ("That's all!", "Das war's!")],
    "zh": [("I like you very much.", "我很喜欢你。"), ("He is a doctor.", "他是医生。"), ("Hi.", "嗨。")],
    "ja": [("I am a student.", "私は学生です。")],
    "th": [
        ("Hello, how are you?", "สวัสดี คุณเป็นอย่างไรบ้าง"),
        ("He works at the university.", "เขาทำงานที่มหาวิทยาลัย"),
    ],
}


@pytest.mark.parametrize("language", GOOD)
def test_the_default_rules_leave_translations(language: str) -> None:
    rules = make_rules(default_rules("en", language))
    kept, verdicts = clean_pairs(rules, GOOD[language])
    assert kept == GOOD[language], [str(rules[each]) for each in verdicts if each < len(rules)]


def test_an_ideograph_is_several_letters() -> None:
    pairs = [("学校", "โรงเรียน"), ("医院", "โรงพยาบาล"), ("他是医生。", "เขาเป็นหมอ")]
    assert clean_pairs(make_rules(default_rules("zh", "th")), pairs)[0] == pairs


def test_the_default_rules_mend_and_remove() -> None:
    rules = make_rules(default_rules("en", "de"))
    pairs = [
        ("The street  is wide.", "Die StraÃŸe ist breit."),
        ("THE STREET IS WIDE", "Die Straße ist breit!"),
        ("The street is wide.", "Die Straße ist breit."),
        ("He sleeps.", "He sleeps."),
        ("He sleeps.", "<p>Er schläft.</p>"),
        ("He came in 1984.", "Er kam 1985."),
        ("She is reading a book.", "Elle lit un livre à la maison."),
        ("She is reading a book.", "她在看书呢，她喜欢。"),
        ("", "Er schläft."),
        ("Yes.", "Ja, das habe ich auch schon immer gesagt und gemeint."),
    ]
    kept, verdicts = clean_pairs(rules, pairs)
    assert kept == [("The street is wide.", "Die Straße ist breit.")]
    assert [str(rules[each]) for each in verdicts[1:]] == [
        "near_duplicates",
        "duplicates",
        "SimilarityFilter",
        "HtmlTagFilter",
        "num_mismatch",
        "LanguageIDFilter",
        "LengthRatioFilter",
        "LengthFilter",
        "LengthRatioFilter",
    ]


def test_a_language_needs_its_confidence_wherever_it_stands() -> None:
    own = {"languages": ["en", "de"], "id_method": "test_cleaning:make_detector", "ratio": 2}
    rules = make_rules([{"LanguageIDFilter": {**own, "thresholds": 0.5}}])
    # The first is English with 0.8; the second English with 0.4, and German with 0.45.
    assert clean_pairs(rules, [("sure", "x"), ("unsure", "x")])[0] == [("sure", "x")]
    assert clean_pairs(make_rules([{"LanguageIDFilter": own}]), [("unsure", "x")])[0] == [("unsure", "x")]


def make_detector(languages: list[str]) -> Detector:
    found = {"sure": {"en": 80.0, "de": 20.0}, "unsure": {"de": 45.0, "en": 40.0}, "x": {"de": 100.0}}
    return lambda text: [Detection(*each) for each in found[text].items()]
