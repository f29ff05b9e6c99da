"""The tokenizer for JavaScript has the ids of the original: in Python for every text, and in Node where it can run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from letters import TOKENIZER
from node_packages import encode_in_node
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.data.tokenizer_training import train_separate_tokenizer, train_tokenizer
from vanilla_transformer.export import javascript_tokenizer
from vanilla_transformer.export.javascript_tokenizer import find_differing_texts, rewrite_for_javascript

# Spaces that merge with each other, and apostrophes that begin a text.
TEXTS = [
    "a man  rides   a horse",
    "  two spaces in  front",
    "'s morgens it's 's",
    "\n\nlines\n\n",
    "été  naïve",
    "12 345",
] * 9


def make_tokenizer(**settings: Any) -> VanillaTransformerTokenizer:
    tokenizer = train_tokenizer(TEXTS, vocab_size=330, show_progress=False, **settings)
    tokenizer.add_special_tokens({"extra_special_tokens": [">>de<<"]})
    return tokenizer


TRAINED = make_tokenizer()
REWRITTEN = Tokenizer.from_str(json.dumps(rewrite_for_javascript(TRAINED)["tokenizer.json"]))
PARTS = st.one_of(
    st.text(max_size=8), st.sampled_from([*TRAINED.all_special_tokens, " ", "  ", "'s", "\u212b", *TEXTS])
)


def test_the_vocabulary_is_one_in_which_mistakes_show() -> None:
    assert any(token.startswith("ĠĠ") for token in TRAINED.get_vocab())
    content = json.loads(TRAINED.backend_tokenizer.to_str())
    normalizers = [{"type": "NFC"}, {"type": "Prepend", "prepend": " "}]
    content["normalizer"] = {"type": "Sequence", "normalizers": normalizers}
    content["pre_tokenizer"]["pretokenizers"] = content["pre_tokenizer"]["pretokenizers"][:2]
    simpler = Tokenizer.from_str(json.dumps(content))
    texts = ["a man", "'s morgens", ">>de<< a man"]
    assert find_differing_texts(TRAINED, simpler, texts) == texts[1:]


@given(st.lists(PARTS, max_size=6).map("".join))
def test_ids_are_those_of_the_original(text: str) -> None:
    assert REWRITTEN.encode(text).ids == TRAINED(text)["input_ids"]


def test_a_pair_is_encoded_alike() -> None:
    assert REWRITTEN.encode("a man", " two").ids == TRAINED("a man", " two")["input_ids"]


def test_ids_in_node_are_those_of_the_original(tmp_path: Path) -> None:
    for name, content in rewrite_for_javascript(TRAINED).items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    texts = [*TEXTS[:6], *javascript_tokenizer._make_texts(TRAINED)]
    answer = encode_in_node(tmp_path, texts)
    expected = TRAINED(texts)["input_ids"]
    assert answer["ids"] == expected
    assert answer["texts"] == TRAINED.batch_decode(expected, skip_special_tokens=True)


def refuse(tokenizer: Any) -> str:
    with pytest.raises(ConversionError, match=r"^transformers\.js cannot use this tokenizer:") as error:
        rewrite_for_javascript(tokenizer)
    return str(error.value)


def test_what_javascript_cannot_read_is_refused() -> None:
    assert "there is none" in refuse(None)
    other = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer)
    assert re.search(r"it is a (PreTrainedTokenizerFast|TokenizersBackend) \(can be", refuse(other))
    two = train_separate_tokenizer(TEXTS, TEXTS, vocab_size=280, show_progress=False)
    assert "source and target have a vocabulary each" in refuse(two)
    assert "it is no byte-level BPE" in refuse(make_tokenizer(model_type="wordlevel"))
    assert "add_bos_token" in refuse(VanillaTransformerTokenizer(add_bos_token=True))
    assert "padding_side is 'left'" in refuse(VanillaTransformerTokenizer(padding_side="left"))
    added = make_tokenizer()
    added.add_tokens(["new"])
    assert "the added token 'new' is not special" in refuse(added)


def test_other_ids_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(javascript_tokenizer, "_rewrite", lambda content: content | {"normalizer": {"type": "NFKC"}})
    with pytest.raises(ConversionError, match=r"cannot be rewritten for transformers\.js:\n  - .* has other ids"):
        rewrite_for_javascript(TRAINED)
