"""fairseq's dictionaries and the tokenizers made of them: the oracle is subword-nmt's algorithm written naively."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_fairseq import EOS, NUM_SPECIAL, UNK
from tiny_codes import MERGES, PIECES, write_codes

from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.conversion.tokenizers.bpe_codes import (
    find_joiner,
    make_bpe_tokenizer,
    read_codes,
    read_dictionary,
)

SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]


def test_dictionaries_are_read_as_fairseq_does(tmp_path: Path) -> None:
    path = tmp_path / "dict.de.txt"
    lines = ["a 5", "b@@ 4", "<unk> 3 #fairseq:overwrite", "two words 2", "a 1 #fairseq:overwrite", "\u3000 1", "x -3"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert read_dictionary(path) == [*SPECIALS, "a#8", "b@@", "<unk>#6", "two words", "a", "\u3000", "x"]
    for content, message in {
        "a 5\nb\n": "dict.de.txt, line 2, must be 'token count', not 'b'",
        "a 5\n\nb 4\n": "line 2, must be",
        "a many\n": "line 1, must be",
        "a 5\nb 4\na 3\n": "line 3: 'a' is in the dictionary already",
        "</s> 5\n": "line 1: '</s>' is in the dictionary already",
    }.items():
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ConversionError, match=message):
            read_dictionary(path)
    path.write_bytes("ä 5\n".encode("latin-1"))
    with pytest.raises(ConversionError, match="is no text in UTF-8"):
        read_dictionary(path)


def test_the_mark_of_pieces_is_found_in_the_dictionary() -> None:
    assert find_joiner(["<s>", "au@@", "to", "ein"]) == "@@"
    assert find_joiner(["<s>", "▁au", "to", "▁ein", "@@"]) == "▁"
    assert find_joiner([*map(str, range(500)), "@@", "▁"]) is None


def cut_naively(text: str, merges: list[tuple[str, str]]) -> list[str]:
    """subword-nmt's tokens: of all neighbours in a word, the pair first in the list is merged, and so on."""
    tokens: list[str] = []
    for word in text.split():
        pieces = [*word[:-1], word[-1] + "</w>"]
        while pairs := [pair for pair in pairwise(pieces) if pair in merges]:
            best = min(pairs, key=merges.index)
            merged: list[str] = []
            for piece in pieces:
                if merged and (merged[-1], piece) == best:
                    merged[-1] += piece
                else:
                    merged.append(piece)
            pieces = merged
        tokens += [piece.removesuffix("</w>") if piece.endswith("</w>") else f"{piece}@@" for piece in pieces]
    return tokens


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    codes = write_codes(tmp_path_factory.mktemp("bpe") / "codes")
    return make_bpe_tokenizer(codes, [*SPECIALS, *PIECES])


@given(text=st.text(alphabet="aabbccüx \t", max_size=30))
def test_words_are_cut_as_by_subword_nmt(text: str, bpe: Any) -> None:
    ids = {piece: NUM_SPECIAL + index for index, piece in enumerate(PIECES)}
    size = NUM_SPECIAL + len(PIECES)
    expected = [ids.get(token, UNK) for token in cut_naively(text, MERGES)] + [EOS]
    assert [UNK if index >= size else index for index in bpe(text).input_ids] == expected
    known = [index for index in expected if index not in (UNK, EOS)]
    words = (" ".join(PIECES[index - NUM_SPECIAL] for index in known) + " ").replace("@@ ", "").rstrip()
    assert bpe.decode([*known, EOS], skip_special_tokens=True) == words


def test_files_of_codes_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "codes"
    assert read_codes(write_codes(path)) == MERGES
    assert read_codes(write_codes(path, style="fastBPE")) == MERGES
    assert read_codes(write_codes(path, [*MERGES, MERGES[0]])) == MERGES
    for content, message in {
        "#version: 0.1\na b\n": r"of a version .* that cannot be read \(can be: 0.2\): '#version: 0.1'",
        "a b\nc d\n": "codes, line 1, is neither of subword-nmt's version 0.2",
        "#version: 0.2\na b\na b 3\n": "codes, line 3, is neither",
        "a b 3\na b\n": "codes, line 2, is neither",
        "": "codes, line 1, is neither",
    }.items():
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ConversionError, match=message):
            read_codes(path)
    path.write_bytes(b"#version: 0.2\n\xff \xfe\n")
    with pytest.raises(ConversionError, match="is no text in UTF-8"):
        read_codes(path)
    with pytest.raises(ConversionError, match="cannot be read"):
        read_codes(tmp_path / "absent")
    different = write_codes(tmp_path / "other", MERGES[:3])
    with pytest.raises(ConversionError, match="a dictionary for both sides can have but one"):
        make_bpe_tokenizer(write_codes(path), SPECIALS, target_codes=different)
