"""Duplicates and near duplicates, against sets of texts, and the memory that they take."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vanilla_transformer.data.cleaning import clean_pairs, make_rule, make_rules
from vanilla_transformer.data.duplicates import DigestSet

WORDS = st.sampled_from(["Tom", "tom", "tom.", "To m!", "7", "7 8", "?!", "", "Äh"])


@given(st.lists(st.lists(st.integers(0, 40), max_size=20), max_size=12))
def test_a_set_of_digests_is_a_set(parts: list[list[int]]) -> None:
    digests, expected = DigestSet(), set()
    for part in parts:
        array = np.array(part, dtype=np.uint64)
        is_new = digests.find_new(array)
        assert is_new.tolist() == [each not in expected and each not in part[:row] for row, each in enumerate(part)]
        digests.add(array[is_new])
        expected |= set(part)


def test_digests_take_little_memory() -> None:
    count, step = 400_000, 4_000
    generator = np.random.default_rng(0)
    digests = DigestSet()
    tracemalloc.start()
    for _ in range(0, count, step):
        part = generator.integers(2**64, size=step, dtype=np.uint64)
        digests.add(part[digests.find_new(part)])
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 8 * count <= kept < 9 * count
    assert peak < 21 * count


NORMALIZED: list[tuple[dict[str, Any], Any]] = [
    ({}, lambda text: text),
    ({"lowercase": True}, str.lower),
    ({"letters_only": True}, lambda text: "".join(filter(str.isalpha, text)) or text),
    (
        {"lowercase": True, "alphanumeric_only": True},
        lambda text: "".join(filter(str.isalnum, text.lower())) or text.lower(),
    ),
]


@pytest.mark.parametrize(("parameters", "normalize"), NORMALIZED)
@pytest.mark.parametrize("compare", ["all", [0], [1]])
@given(pairs=st.lists(st.tuples(WORDS, WORDS), max_size=30))
def test_the_first_of_equal_pairs_stays(
    parameters: dict[str, Any], normalize: Any, compare: Any, pairs: list[tuple[str, str]]
) -> None:
    kept, _ = clean_pairs(make_rules([{"RemoveDuplicates": {**parameters, "compare": compare}}]), pairs)
    sides = [0, 1] if compare == "all" else compare
    seen, expected = set(), []
    for pair in pairs:
        key = tuple(normalize(pair[side]) for side in sides)
        expected += [] if key in seen else [pair]
        seen.add(key)
    assert kept == expected


def test_what_is_in_other_files_is_removed(tmp_path: Path) -> None:
    (tmp_path / "test.tsv").write_text("A man.\tEin Mann.\nA dog.\tEin Hund.\n", encoding="utf-8")
    options = {"overlap": [str(tmp_path / "test.tsv")], "lowercase": True}
    pairs = [("a man.", "Ein mann."), ("A cat.", "Eine Katze."), ("A cat.", "Eine Katze."), ("A dog.", "Der Hund.")]
    rules = make_rules([{"RemoveDuplicates": options}])
    assert clean_pairs(rules, pairs)[0] == pairs[1:], "and duplicates are another matter"
    before = rules[0].identify()
    (tmp_path / "test.tsv").write_text("A man.\tEin Mann.\n", encoding="utf-8")
    assert make_rule("RemoveDuplicates", options).identify() != before


def test_other_files_are_mended_as_the_corpus_is(tmp_path: Path) -> None:
    (tmp_path / "test.tsv").write_text("A  man &amp; a dog. \tEin Mann\nA cat.\tEine Katze\n", encoding="utf-8")
    overlap = {"RemoveDuplicates": {"overlap": [str(tmp_path / "test.tsv")]}}
    pairs = [("A  man &amp; a dog. ", "Ein Mann"), ("A cat.", "Eine Katze"), ("A cow.", "Eine Kuh")]
    rules = [{"FixEncoding": {}}, {"WhitespaceNormalizer": {}}, overlap]
    assert clean_pairs(make_rules(rules), pairs)[0] == pairs[2:]
    assert clean_pairs(make_rules([overlap, *rules[:2]]), pairs)[0] == pairs[2:]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({"compare": [2]}, r"compare is \[2\]; it must be all"), ({"overlap": "a.tsv"}, "it must be a list of files")],
)
def test_wrong_parameters_are_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_rule("RemoveDuplicates", parameters)
