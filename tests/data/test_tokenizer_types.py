"""Vocabularies of other tokens than merged bytes: likely pieces, words and characters."""

import json
import logging
import math
import unicodedata
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from vanilla_transformer.data.tokenizer_training import SPECIAL_TOKENS, train_separate_tokenizer, train_tokenizer

PIECES = ["sever@@ al men ride a hor@@ se .", "a man rid@@ es a hor@@ se .", "zwei männ@@ er reit@@ en ."]
TYPES = ("unigram", "wordlevel", "char")
TRAINED = {name: train_tokenizer(PIECES * 3, model_type=name, vocab_size=300) for name in TYPES}  # type: ignore[arg-type]
known_words = st.lists(st.sampled_from(sorted({word for text in PIECES for word in text.split()}))).map(" ".join)
known_characters = st.text(sorted(set("".join(PIECES))))


def restore(tokenizer: Any, text: str, **options: Any) -> Any:
    return tokenizer.decode(tokenizer(text, **options)["input_ids"], skip_special_tokens=True)


@given(known_words, known_characters, st.text())
def test_what_each_can_write_comes_back(words: str, characters: str, text: str) -> None:
    assert restore(TRAINED["wordlevel"], words) == words
    assert restore(TRAINED["char"], characters) == characters
    literal = restore(TRAINED["unigram"], text, split_special_tokens=True)
    assert literal == unicodedata.normalize("NFC", text)


@given(st.lists(st.text("abc \u0301\n", max_size=8), min_size=1), st.integers(5, 9), st.integers(1, 3))
@settings(max_examples=40)
def test_whole_pieces_are_the_most_frequent_ones(texts: list[str], vocab_size: int, min_frequency: int) -> None:
    texts = [*texts, "a"]
    for name, cut in (("wordlevel", str.split), ("char", list)):
        counts = Counter(piece for text in texts for piece in cut(text))
        options: Any = {"model_type": name, "vocab_size": vocab_size, "min_frequency": min_frequency}
        tokenizer = train_tokenizer(texts, **options)
        frequent = sorted((piece for piece in counts if counts[piece] >= min_frequency), key=lambda x: (-counts[x], x))
        expected = [*SPECIAL_TOKENS, *frequent][:vocab_size]
        assert tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))) == expected
        for text in texts:
            tokens = [piece if piece in expected else "<unk>" for piece in cut(text)]
            assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == [*tokens, "</s>"]


def test_unigrams_are_those_of_the_likeliest_cut() -> None:
    """Against every way to cut a word, with the probabilities that were learned."""
    tokenizer = train_tokenizer(["reading reader reads read ready"] * 9, model_type="unigram", vocab_size=275)
    scores = dict(json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"])

    def best(word: str) -> float:
        if not word:
            return 0.0
        ends = range(1, len(word) + 1)
        return max((scores[word[:end]] + best(word[end:]) for end in ends if word[:end] in scores), default=-math.inf)

    for word in ("readers", "dearest", "ready"):
        found = sum(scores[token] for token in tokenizer.tokenize(word))
        assert found == pytest.approx(best(f"Ġ{word}"))
    assert len(tokenizer) <= 275
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == SPECIAL_TOKENS
    assert tokenizer("</s>", split_special_tokens=True)["input_ids"].count(2) == 1


@pytest.mark.parametrize("name", TYPES)
def test_a_saved_one_is_the_same(name: str, tmp_path: Path) -> None:
    TRAINED[name].save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(PIECES)["input_ids"] == TRAINED[name](PIECES)["input_ids"]
    assert [restore(loaded, text) for text in PIECES] == PIECES


def test_each_side_may_have_its_own_type() -> None:
    tokenizer = train_separate_tokenizer(["ab", "ba"], ["x œ̃", "œ̃"], model_type="char", target_model_type="wordlevel")
    assert tokenizer.tokenize("ab") == ["a", "b"]
    assert tokenizer.target_tokenizer.tokenize("œ̃ x") == ["œ̃", "x"]
    assert (len(tokenizer), tokenizer.target_vocab_size) == (6, 6)


def test_what_is_lost_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train_tokenizer(["a a a b", "a  c"], model_type="wordlevel", vocab_size=5)
    lost, spaces = (record.getMessage() for record in caplog.records)
    assert lost.startswith("2 of 3 different pieces have no token, 33.33% of the texts: they become <unk>.")
    assert spaces.startswith("1 of the texts have other white space than single spaces")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "bytes"}, "model_type='bytes': must be one of bpe, unigram, wordlevel, char"),
        (
            {"model_type": "char", "vocab_size": 4},
            "vocab_size=4 .* at least 5 ",
        ),
        ({"model_type": "unigram", "vocab_size": 100}, "vocab_size=100 .* at least 260"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_tokenizer(PIECES, **options)
