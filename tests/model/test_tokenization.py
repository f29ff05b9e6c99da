"""The tokenizer: nothing is lost, special tokens and offsets are right, and every way of loading it gives the same."""

import copy
import json
import logging
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer

SENTENCES = [
    "A man rides a horse, and a man is on a horse.",
    "Ein Mann reitet ein Pferd, und die Männer schließen die Tür.",
    "The men don't ride 25 horses; it's the man's horse!",
    "我喜歡這匹馬。",
    "घोड़ा और आदमी",
]
ADDED = ["<x>", "Müller", "naïve☃", "[SEP]"]


def train(vocab_size: int = 370, **kwargs: Any) -> VanillaTransformerTokenizer:
    untrained = VanillaTransformerTokenizer(**kwargs)
    return untrained.train_new_from_iterator([SENTENCES * 3], vocab_size, show_progress=False)


TOKENIZER = train(model_max_length=64)
WITH_ADDED = copy.deepcopy(TOKENIZER)
WITH_ADDED.add_tokens(ADDED)


@pytest.fixture
def tokenizer() -> VanillaTransformerTokenizer:
    return copy.deepcopy(TOKENIZER)


def token_bytes(token: str) -> bytes:
    """The bytes of a token: printable Latin-1 stands for itself, the characters from 256 on for the other bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
    return bytes(table[character] for character in token)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def round_trip(tokenizer: VanillaTransformerTokenizer, text: str) -> str:
    ids = tokenizer(text, split_special_tokens=True)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def nfc(text: str) -> str:
    normalized: str = TOKENIZER.backend_tokenizer.normalizer.normalize_str(text)
    return normalized


in_unicode_3_2 = st.characters(exclude_categories=["Cs"]).filter(
    lambda character: unicodedata.ucd_3_2_0.category(character) != "Cn"
)
spaced = st.lists(
    st.sampled_from([" ", "  ", "\n", "\t", "\r", "\u00a0", "\u3000", "\u200b", "a", "é", "1", "'s"])
).map("".join)


@settings(max_examples=150)
@given(st.text() | spaced)
@example("")
@example(" ")
@example("  two  spaces  ")
@example("\n\nline\r\n")
@example("Ġ ▁ \u0120\u2581")
@example("<s></s> <pad><unk>")
@example("<0x41> \x00\x7f\ufffd\uffff")
@example("'S 's \u2019s don'T")
def test_decoding_gives_the_text_back(text: str) -> None:
    assert round_trip(TOKENIZER, text) == nfc(text)


def test_every_assigned_character_survives() -> None:
    # Private use beyond the first plane is left to the test above: 131,068 characters that all look alike.
    characters = [
        character for character in map(chr, range(0xF0000)) if unicodedata.category(character) not in ("Cs", "Cn")
    ]
    assert len(characters) > 150_000
    texts = ["".join(characters[start : start + 512]) for start in range(0, len(characters), 512)]
    ids = TOKENIZER(texts, split_special_tokens=True)["input_ids"]
    assert TOKENIZER.batch_decode(ids, skip_special_tokens=True) == [nfc(text) for text in texts]


@settings(max_examples=100)
@given(st.text(alphabet=in_unicode_3_2))
def test_the_normalisation_is_nfc(text: str) -> None:
    assert round_trip(TOKENIZER, text) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("A man rides", [" A", " man", " rides"]),
        ("in 1987.", [" in", " 1", "9", "8", "7", "."]),
        ("don't, it\u2019s HE'S l'homme", [" don", "'t", ",", " it", "\u2019s", " HE", "'S", " l", "'", "homme"]),
        ("l'sac", [" l", "'", "sac"]),
        ("घोड़ा और", [" घोड़ा", " और"]),
        ('He said: "yes!"', [" He", " said", ":", ' "', "yes", '!"']),
        ("a   b\n\nc ", [" a", "  ", " b", "\n", "\n", "c", " "]),
        (" a", ["  a"]),
        ("\na", [" \n", "a"]),
    ],
)
def test_pieces(text: str, pieces: list[str]) -> None:
    found = TOKENIZER.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [token_bytes(piece).decode() for piece, _ in found] == pieces


def test_a_word_has_the_same_tokens_wherever_it_stands() -> None:
    first = TOKENIZER("man", add_special_tokens=False)["input_ids"]
    assert len(first) == 1
    assert TOKENIZER("a man", add_special_tokens=False)["input_ids"][-1:] == first
    assert TOKENIZER(["man", "man"], is_split_into_words=True)["input_ids"] == [*first, *first, 2]


def test_special_tokens() -> None:
    assert TOKENIZER.convert_tokens_to_ids(["<s>", "<pad>", "</s>", "<unk>", "no such token"]) == [0, 1, 2, 3, 3]
    named = (TOKENIZER.bos_token_id, TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.unk_token_id)
    assert named == (0, 1, 2, 3)
    assert sorted(TOKENIZER.all_special_ids) == [0, 1, 2, 3]
    config = VanillaTransformerConfig()
    assert named[:3] == (config.bos_token_id, config.pad_token_id, config.eos_token_id)


def test_source_and_target_end_with_eos() -> None:
    batch = TOKENIZER(["A man", ""], text_target=["Ein Mann", "x"])
    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    for name in ("input_ids", "labels"):
        for ids in batch[name]:
            assert ids[-1] == 2
            assert not {0, 1, 2, 3} & set(ids[:-1])
    assert batch["input_ids"][1] == [2]
    assert TOKENIZER(text_target="Ein Mann")["input_ids"] == batch["labels"][0]
    assert TOKENIZER("A man", return_special_tokens_mask=True)["special_tokens_mask"] == [0, 0, 1]


def test_pairs_end_with_eos_each() -> None:
    encoded = TOKENIZER("a man", "a horse")
    one, other = (TOKENIZER(text)["input_ids"] for text in ("a man", "a horse"))
    assert encoded["input_ids"] == one + other
    assert encoded.sequence_ids() == [0] * (len(one) - 1) + [None] + [1] * (len(other) - 1) + [None]
    assert (TOKENIZER.num_special_tokens_to_add(), TOKENIZER.num_special_tokens_to_add(pair=True)) == (1, 2)


def test_literal_special_tokens_are_matched_unless_split() -> None:
    assert TOKENIZER("man</s>")["input_ids"][-2:] == [2, 2]
    split = TOKENIZER("man</s>", split_special_tokens=True)["input_ids"]
    assert split.count(2) == 1
    assert TOKENIZER.decode(split) == "man</s></s>"


def test_bos_and_eos_can_be_switched(tokenizer: VanillaTransformerTokenizer, tmp_path: Path) -> None:
    plain = tokenizer("a man", add_special_tokens=False)["input_ids"]
    assert (tokenizer.add_bos_token, tokenizer.add_eos_token) == (False, True)
    tokenizer.add_bos_token = True  # type: ignore[misc]  # mypy does not find the library's setter
    assert tokenizer("a man")["input_ids"] == [0, *plain, 2]
    tokenizer.add_eos_token = False  # type: ignore[misc]
    tokenizer.save_pretrained(tmp_path)
    loaded = VanillaTransformerTokenizer.from_pretrained(tmp_path)
    assert (loaded.add_bos_token, loaded.add_eos_token) == (True, False)
    assert loaded("a man")["input_ids"] == [0, *plain]
    assert loaded("a man", return_offsets_mapping=True)["offset_mapping"] == [(0, 0), (0, 1), (2, 5)]


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_bos_and_eos_can_be_given_one_by_one(begins: bool, ends: bool, tmp_path: Path) -> None:
    plain = TOKENIZER("a man", add_special_tokens=False)["input_ids"]

    def expect(begins: bool, ends: bool) -> list[int]:
        return [0] * begins + plain + [2] * ends

    load = VanillaTransformerTokenizer.from_pretrained
    TOKENIZER.save_pretrained(tmp_path)
    load(tmp_path, add_bos_token=begins, add_eos_token=ends).save_pretrained(tmp_path)
    backend = load(tmp_path).backend_tokenizer
    for flag in (False, True):
        for make in (
            lambda **flags: load(tmp_path, **flags),
            lambda **flags: VanillaTransformerTokenizer(tokenizer_object=copy.deepcopy(backend), **flags),
        ):
            assert make(add_bos_token=flag)("a man")["input_ids"] == expect(flag, ends)
            assert make(add_eos_token=flag)("a man")["input_ids"] == expect(begins, flag)
    assert VanillaTransformerTokenizer(add_bos_token=True)("")["input_ids"] == [0, 2]  # nothing saved: `</s>`


def test_padding_is_skipped_and_texts_are_cut_before_their_end() -> None:
    texts = ["a man", "a man rides a horse"]
    left = TOKENIZER(texts, padding=True, padding_side="left")["input_ids"]
    assert TOKENIZER.batch_decode(left, skip_special_tokens=True) == texts
    assert TOKENIZER(texts[1], truncation=True, max_length=3)["input_ids"] == [*left[1][:2], 2]
    assert len(TOKENIZER("horse " * 100, truncation=True)["input_ids"]) == TOKENIZER.model_max_length == 64


@settings(max_examples=60)
@given(st.text(alphabet=in_unicode_3_2) | spaced | st.lists(st.sampled_from(SENTENCES)).map(" ".join))
def test_offsets_point_at_the_text(text: str) -> None:
    text = unicodedata.normalize("NFC", text)
    encoded = TOKENIZER(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
    covered = set()
    last = 0
    for token, (start, end) in zip(encoded.tokens(), encoded["offset_mapping"], strict=True):
        assert last <= start <= end <= len(text) or token == "Ġ"
        last = start
        # Several tokens may spell one character, and then all have its span.
        assert token_bytes(token).strip(b" ") in text[start:end].encode()
        covered |= set(range(start, end))
    assert all(index in covered for index, character in enumerate(text) if character != " ")


def test_offsets_leave_spaces_out_and_count_the_given_text() -> None:
    encoded = TOKENIZER("a man  is", return_offsets_mapping=True)
    assert [encoded.token_to_chars(index) for index in range(2)] == [(0, 1), (2, 5)]
    assert encoded.char_to_token(3) == 1
    assert encoded["offset_mapping"][-2:] == [(7, 9), (0, 0)]
    decomposed = "Ma\u0308nner man"
    assert TOKENIZER(decomposed, return_offsets_mapping=True)["offset_mapping"][-2] == (8, 11)


@given(st.lists(st.sampled_from([*ADDED, " ", "  ", "a man", " horse", "é", "\n", "7"])))
def test_added_tokens_neither_eat_nor_add_spaces(parts: list[str]) -> None:
    text = "".join(parts)
    ids = WITH_ADDED(text, add_special_tokens=False)["input_ids"]
    assert WITH_ADDED.decode(ids) == text
    for token in ADDED:
        assert ids.count(WITH_ADDED.convert_tokens_to_ids(token)) == text.count(token)


def test_added_tokens_are_saved(tokenizer: VanillaTransformerTokenizer, tmp_path: Path) -> None:
    size = len(tokenizer)
    assert tokenizer.add_tokens(["Müller", AddedToken("<x>")]) == 2
    assert tokenizer.add_special_tokens({"extra_special_tokens": ["<de>", "größe"]}) == 2
    tokenizer.save_pretrained(tmp_path)
    loaded = VanillaTransformerTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == size + 4
    ids = loaded("Herr Müller <de> größe", add_special_tokens=False)["input_ids"]
    assert ids[-5:] == tokenizer("Herr Müller <de> größe", add_special_tokens=False)["input_ids"][-5:]
    assert loaded.decode(ids) == "Herr Müller <de> größe"
    assert loaded.decode(ids, skip_special_tokens=True) == "Herr Müller  "


@pytest.mark.parametrize("token", ["é", "Ġman", "à¤"])
def test_tokens_that_stand_for_other_bytes_are_refused(tokenizer: VanillaTransformerTokenizer, token: str) -> None:
    assert token in tokenizer.get_vocab()
    with pytest.raises(ValueError, match=f"Cannot add the token '{token}'"):
        tokenizer.add_tokens(["fine", token])
    assert len(tokenizer) == len(TOKENIZER)


def test_without_a_vocabulary_every_byte_is_a_token() -> None:
    tokenizer = VanillaTransformerTokenizer()
    assert len(tokenizer) == 260
    assert b"".join(map(token_bytes, tokenizer.tokenize("é 7"))) == " é 7".encode()
    assert round_trip(tokenizer, "é 7") == "é 7"


def test_vocab_and_merges_make_the_same_tokenizer() -> None:
    model = json.loads(TOKENIZER.backend_tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    rebuilt = VanillaTransformerTokenizer(vocab=model["vocab"], merges=merges, model_max_length=64)
    assert rebuilt.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()
    assert len(rebuilt) == len(TOKENIZER) == 370


def test_incomplete_vocabularies_are_refused() -> None:
    vocab = VanillaTransformerTokenizer().get_vocab()
    with pytest.raises(ValueError, match="vocab was given without merges"):
        VanillaTransformerTokenizer(vocab=vocab)
    with pytest.raises(ValueError, match="merges was given without vocab"):
        VanillaTransformerTokenizer(merges=[])
    del vocab["a"], vocab["Ġ"]
    with pytest.raises(ValueError, match=r"lacks 2 of the 256 symbols .*first \['a', 'Ġ'\]"):
        VanillaTransformerTokenizer(vocab=vocab, merges=[])


def test_another_kind_of_backend_is_used_as_it_is() -> None:
    words = Tokenizer(models.WordLevel({"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "Mann": 4, "é": 5}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = VanillaTransformerTokenizer(tokenizer_object=words)
    assert tokenizer("Mann é Pferd")["input_ids"] == [4, 5, 3, 2]
    tokenizer.add_tokens(["é", "Müller"])
    assert tokenizer.decode([4, 6, 5, 2]) == "Mann Müller é </s>"


@pytest.fixture
def library_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What the library says; its own handler does not pass it on to pytest."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize("separate", [False, True])
def test_saving_again_gives_the_same_files(
    separate: bool, tmp_path: Path, library_log: pytest.LogCaptureFixture
) -> None:
    backend = TOKENIZER.backend_tokenizer
    tokenizer = copy.deepcopy(TOKENIZER)
    if separate:
        sides: dict[str, Any] = {"tokenizer_object": backend, "target_tokenizer_object": WITH_ADDED.backend_tokenizer}
        tokenizer = VanillaTransformerTokenizer(**copy.deepcopy(sides), model_max_length=64)
    # Padding and truncation of the last call are no part of the tokenizer.
    tokenizer(SENTENCES, text_target=SENTENCES, padding=True, truncation=True, max_length=5)
    names = tokenizer.save_pretrained(tmp_path / "first")
    assert ("target_tokenizer.json" in {Path(name).name for name in names}) == separate
    VanillaTransformerTokenizer.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    VanillaTransformerConfig(vocab_size=370).save_pretrained(tmp_path / "second")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "second")
    loaded.save_pretrained(tmp_path / "third")
    first = files_of(tmp_path / "first")
    second = files_of(tmp_path / "second")
    assert {"tokenizer.json", "tokenizer_config.json", "tokenization_vanilla_transformer.py"} <= first.keys()
    assert ("target_tokenizer.json" in first) == loaded.separate_vocabs == separate
    assert {name: second[name] for name in first} == first == files_of(tmp_path / "third")
    assert type(loaded) is VanillaTransformerTokenizer
    assert (loaded.model_max_length, loaded.padding_side, loaded.clean_up_tokenization_spaces) == (64, "right", False)
    assert loaded(SENTENCES)["input_ids"] == TOKENIZER(SENTENCES)["input_ids"]
    targets = (WITH_ADDED if separate else TOKENIZER)(SENTENCES)["input_ids"]
    assert loaded(text_target=SENTENCES)["input_ids"] == targets
    assert loaded.batch_decode(targets, skip_special_tokens=True) == SENTENCES
    config = json.loads(first["tokenizer_config.json"])
    assert config["tokenizer_class"] == "VanillaTransformerTokenizer"
    assert ("separate_vocabs" in config) == separate
    assert config["auto_map"]["AutoTokenizer"][0] == "tokenization_vanilla_transformer.VanillaTransformerTokenizer"
    assert library_log.records == []


def test_tokenizer_json_says_it_all(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    texts = [*SENTENCES, "  two  spaces 🐎", ""]
    plain = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert plain(texts)["input_ids"] == TOKENIZER(texts)["input_ids"]
    assert plain.batch_decode(plain(texts)["input_ids"], skip_special_tokens=True) == texts
    rust = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [encoding.ids for encoding in rust.encode_batch(texts)] == TOKENIZER(texts)["input_ids"]


def test_a_first_character_that_nfc_takes_apart_gets_one_space() -> None:
    """Symbols whose composition is excluded: two characters with the place of one. Nothing follows them here."""
    characters = [chr(code) for code in (0x2ADC, *range(0x1D15E, 0x1D165), *range(0x1D1BB, 0x1D1C1))]
    for text in (*characters, *(f"{character}\u0301a" for character in characters), "\u2764\ufe0fa"):
        assert round_trip(TOKENIZER, text) == nfc(text)
        assert round_trip(TOKENIZER, f"{text} {text}") == nfc(f"{text} {text}")


def test_special_tokens_that_are_refused_change_nothing(tokenizer: VanillaTransformerTokenizer) -> None:
    known = dict(tokenizer.special_tokens_map)
    for refused in ({"pad_token": "é"}, {"extra_special_tokens": ["<x>", "é"]}, {"pad_token": "<p>", "sep": "<q>"}):
        with pytest.raises(ValueError, match=r"é|sep"):
            tokenizer.add_special_tokens(refused)
        assert dict(tokenizer.special_tokens_map) == known
        assert tokenizer.extra_special_tokens == []
        assert len(tokenizer) == len(TOKENIZER)
