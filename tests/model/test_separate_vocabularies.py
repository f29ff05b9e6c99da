"""A tokenizer with two vocabularies: each side is what a tokenizer of that side alone is, wherever it is used."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from remote_process import RemotePython
from test_tokenization import files_of, nfc
from tiny_vanilla import SHARING, make_model
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, pipeline

from vanilla_transformer.data.tokenizer_training import train_separate_tokenizer, train_tokenizer
from vanilla_transformer.inference.translate import translate
from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer

SOURCES = ["a man rides a horse", "two men ride two horses", "the man is riding", "  a horse is  a horse 🐎", ""]
TARGETS = ["ein Mann reitet ein Pferd", "zwei Männer reiten zwei Pferde", "", "die Pferde 25 </s>", "er ritt 🐎"]


def train_side(texts: list[str], vocab_size: int) -> VanillaTransformerTokenizer:
    return train_tokenizer(texts * 3, vocab_size=vocab_size, show_progress=False, model_max_length=64)


# The oracle: each side as a tokenizer of its own.
SOURCE = train_side(SOURCES, 290)
TARGET = train_side(TARGETS, 300)
TOKENIZER = train_separate_tokenizer(
    SOURCES * 3, TARGETS * 3, vocab_size=290, target_vocab_size=300, show_progress=False, model_max_length=64
)


@pytest.fixture
def tokenizer() -> VanillaTransformerTokenizer:
    return copy.deepcopy(TOKENIZER)


def same_encoding(encoded: Any, expected: Any) -> bool:
    return dict(encoded) == dict(expected) and [one.tokens for one in encoded.encodings] == [
        one.tokens for one in expected.encodings
    ]


@given(st.text())
@example("")
@example("  two  spaces</s> 🐎 é\n")
def test_decoding_gives_the_text_of_either_side_back(text: str) -> None:
    source = TOKENIZER(text, split_special_tokens=True)["input_ids"]
    target = TOKENIZER(text_target=text, split_special_tokens=True)["input_ids"]
    assert TOKENIZER.decode(target, skip_special_tokens=True) == nfc(text)
    assert TOKENIZER.decode(source, skip_special_tokens=True, use_source_tokenizer=True) == nfc(text)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": True},
        {"padding": "max_length", "max_length": 12, "truncation": True, "padding_side": "left"},
        {"truncation": True, "max_length": 3, "return_overflowing_tokens": True},
        {"add_special_tokens": False, "return_offsets_mapping": True, "return_special_tokens_mask": True},
        {"return_length": True, "return_attention_mask": False, "split_special_tokens": True},
    ],
)
def test_each_side_is_encoded_as_by_a_tokenizer_of_its_own(options: dict[str, Any]) -> None:
    assert same_encoding(TOKENIZER(SOURCES, **options), SOURCE(SOURCES, **options))
    assert same_encoding(TOKENIZER(text_target=TARGETS, **options), TARGET(TARGETS, **options))
    if not options.get("return_overflowing_tokens"):
        both = TOKENIZER(SOURCES, text_target=TARGETS, **options)
        assert both.pop("labels") == TARGET(TARGETS, **options)["input_ids"]
        assert same_encoding(both, SOURCE(SOURCES, **options))


def test_sides_as_arguments_by_position_pairs_words_and_tensors() -> None:
    both = TOKENIZER("a man", "a horse", "ein Mann", "ein Pferd", False)
    assert both["input_ids"] == SOURCE("a man", "a horse", add_special_tokens=False)["input_ids"]
    assert both["labels"] == TARGET("ein Mann", "ein Pferd", add_special_tokens=False)["input_ids"]
    words = TOKENIZER(text_target=["ein", "Mann"], is_split_into_words=True)
    assert words["input_ids"] == TARGET(["ein", "Mann"], is_split_into_words=True)["input_ids"]
    tensors = TOKENIZER(SOURCES, text_target=TARGETS, padding=True, return_tensors="pt")
    assert torch.equal(tensors["labels"], TARGET(TARGETS, padding=True, return_tensors="pt")["input_ids"])
    with pytest.raises(ValueError, match="either `text` or `text_target`"):
        TOKENIZER()


def test_tokens_and_sizes_are_the_sources() -> None:
    assert TOKENIZER.tokenize("a man rides") == SOURCE.tokenize("a man rides")
    assert TOKENIZER.encode("a man rides") == SOURCE.encode("a man rides")
    ids = SOURCE("a man rides")["input_ids"]
    assert TOKENIZER.convert_ids_to_tokens(ids) == SOURCE.convert_ids_to_tokens(ids)
    assert TOKENIZER.convert_tokens_to_ids("Ġman") == SOURCE.convert_tokens_to_ids("Ġman")
    assert TOKENIZER.get_vocab() == TOKENIZER.vocab == SOURCE.get_vocab()
    assert (len(TOKENIZER), TOKENIZER.vocab_size, TOKENIZER.target_vocab_size) == (290, 290, 300)


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_decoding_takes_what_a_model_gives(skip_special_tokens: bool) -> None:
    ids = TARGET(TARGETS, padding=True, return_tensors="pt")["input_ids"]
    expected = TARGET.batch_decode(ids, skip_special_tokens=skip_special_tokens)
    for sequences in (ids, ids.numpy(), ids.tolist()):
        assert TOKENIZER.batch_decode(sequences, skip_special_tokens=skip_special_tokens) == expected
        assert TOKENIZER.decode(sequences, skip_special_tokens=skip_special_tokens) == expected
    assert TOKENIZER.decode(ids[0], skip_special_tokens=skip_special_tokens) == expected[0]
    assert TOKENIZER.decode(int(ids[0, 0])) == TARGET.decode(int(ids[0, 0]))
    sources = SOURCE(SOURCES)["input_ids"]
    assert TOKENIZER.batch_decode(sources, use_source_tokenizer=True) == SOURCE.batch_decode(sources)


def test_with_one_vocabulary_the_sides_are_the_tokenizer_itself() -> None:
    assert SOURCE.source_tokenizer is SOURCE.target_tokenizer is SOURCE
    assert SOURCE.target_vocab_size == len(SOURCE) == 290
    assert not SOURCE.separate_vocabs
    ids = SOURCE("a man")["input_ids"]
    assert SOURCE.decode(ids, use_source_tokenizer=True) == SOURCE.decode(ids) == "a man</s>"


def test_each_side_is_a_tokenizer(tokenizer: VanillaTransformerTokenizer, tmp_path: Path) -> None:
    sides = (tokenizer.source_tokenizer, SOURCE, SOURCES), (tokenizer.target_tokenizer, TARGET, TARGETS)
    for side, expected, texts in sides:
        assert not side.separate_vocabs
        assert same_encoding(side(texts), expected(texts))
        assert side.batch_decode(expected(texts)["input_ids"]) == expected.batch_decode(expected(texts)["input_ids"])
        assert side.get_vocab() == expected.get_vocab()
        retrained = side.train_new_from_iterator([texts], 270, show_progress=False)
        assert (len(retrained), retrained.model_max_length, retrained.separate_vocabs) == (270, 64, False)
        side.save_pretrained(tmp_path / "side")
        expected.save_pretrained(tmp_path / "expected")
        assert files_of(tmp_path / "side") == files_of(tmp_path / "expected")


def test_sides_have_the_settings_of_the_moment(tokenizer: VanillaTransformerTokenizer) -> None:
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    tokenizer.model_max_length = 4
    padded, cut = (
        tokenizer(text_target=["Mann", "ein Mann reitet"], **{name: True}) for name in ("padding", "truncation")
    )
    plain = TARGET(["Mann", "ein Mann reitet"])["input_ids"]
    assert padded["input_ids"][0] == [1] * (len(plain[1]) - len(plain[0])) + plain[0]
    assert cut["input_ids"][1] == [*plain[1][:-1][-3:], 2]
    side = tokenizer.target_tokenizer
    side.padding_side = "right"
    side.pad_token = "</s>"
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("left", "<pad>")


def test_training_anew_is_refused() -> None:
    with pytest.raises(ValueError, match="one vocabulary, and this tokenizer has two"):
        TOKENIZER.train_new_from_iterator([SOURCES], 270)


def test_special_tokens_agree() -> None:
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}, "<unk>"))
    message = r"the same id.*bos_token '<s>' is 0 and 1, pad_token '<pad>' is 1 and 0\."
    with pytest.raises(ValueError, match=message):
        VanillaTransformerTokenizer(target_tokenizer_object=words)
    ids = [TOKENIZER.bos_token_id, TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.unk_token_id]
    assert ids == [0, 1, 2, 3]
    assert TOKENIZER.target_tokenizer.convert_ids_to_tokens(ids) == ["<s>", "<pad>", "</s>", "<unk>"]


def test_tokens_are_added_to_both_sides(tokenizer: VanillaTransformerTokenizer, tmp_path: Path) -> None:
    assert tokenizer.add_tokens(["<x>", "Müller"]) == 2
    assert tokenizer.add_special_tokens({"extra_special_tokens": ["<de>"]}) == 1
    tokenizer.save_pretrained(tmp_path)
    for found in (tokenizer, VanillaTransformerTokenizer.from_pretrained(tmp_path)):
        assert (len(found), found.vocab_size, found.target_vocab_size) == (293, 290, 303)
        assert [found.convert_tokens_to_ids(token) for token in ("<x>", "Müller", "<de>")] == [290, 291, 292]
        text = "Herr Müller<x> <de>"
        target = found(text_target=text)["input_ids"]
        assert [token for token in target if token >= 300] == [301, 300, 302]
        assert found.decode(target) == text + "</s>"
        assert found.decode(target, skip_special_tokens=True) == "Herr Müller<x> "
        assert found.decode(found(text)["input_ids"], use_source_tokenizer=True) == text + "</s>"


def test_tokens_known_to_one_side_count_as_new(tokenizer: VanillaTransformerTokenizer, tmp_path: Path) -> None:
    assert tokenizer.source_tokenizer.add_tokens(["<x>"]) == 1
    tokenizer.save_pretrained(tmp_path)
    for found in (tokenizer, VanillaTransformerTokenizer.from_pretrained(tmp_path)):
        assert (len(found), found.target_vocab_size) == (291, 300)
    assert tokenizer.add_tokens(["<x>"]) == 1
    assert (len(tokenizer), tokenizer.target_vocab_size) == (291, 301)


def test_tokens_that_a_side_cannot_take_are_added_to_neither(tokenizer: VanillaTransformerTokenizer) -> None:
    assert "ĠPferd" in TARGET.get_vocab().keys() - SOURCE.get_vocab().keys()
    with pytest.raises(ValueError, match="Cannot add the token 'ĠPferd'"):
        tokenizer.add_tokens(["fine", "ĠPferd"])
    with pytest.raises(ValueError, match="cls_token '<cls>' is 290 and 300"):
        tokenizer.add_special_tokens({"cls_token": "<cls>"})
    with pytest.raises(ValueError, match=r"pad_token '\[PAD\]' is 290 and 300"):
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    for side in (tokenizer, tokenizer.source_tokenizer, tokenizer.target_tokenizer):
        assert (side.pad_token, side.pad_token_id) == ("<pad>", 1)
    assert (len(tokenizer), tokenizer.target_vocab_size) == (290, 300)


def test_a_special_token_with_the_same_id_is_added(tokenizer: VanillaTransformerTokenizer) -> None:
    tokenizer.source_tokenizer.add_tokens([f"<{index}>" for index in range(10)])
    assert tokenizer.add_special_tokens({"cls_token": "<cls>"}) == 1
    assert tokenizer.cls_token_id == tokenizer.target_tokenizer.cls_token_id == 300


def test_bos_and_eos_are_switched_on_both_sides(tokenizer: VanillaTransformerTokenizer, tmp_path: Path) -> None:
    tokenizer.add_bos_token = True  # type: ignore[misc]  # mypy does not find the library's setter
    tokenizer.add_eos_token = False  # type: ignore[misc]
    tokenizer.save_pretrained(tmp_path)
    for found in (tokenizer, VanillaTransformerTokenizer.from_pretrained(tmp_path)):
        both = found("a man", text_target="ein Mann")
        assert both["input_ids"] == [0, *SOURCE("a man", add_special_tokens=False)["input_ids"]]
        assert both["labels"] == [0, *TARGET("ein Mann", add_special_tokens=False)["input_ids"]]
    ended = VanillaTransformerTokenizer.from_pretrained(tmp_path, add_bos_token=False, add_eos_token=True)
    assert ended("a man", text_target="ein Mann")["labels"] == TARGET("ein Mann")["input_ids"]


def test_copies_are_equal_and_independent() -> None:
    for duplicate in (copy.deepcopy(TOKENIZER), pickle.loads(pickle.dumps(TOKENIZER))):
        assert same_encoding(duplicate(SOURCES, text_target=TARGETS), TOKENIZER(SOURCES, text_target=TARGETS))
        duplicate.add_tokens(["<x>"])
        assert (len(TOKENIZER), TOKENIZER.target_vocab_size) == (290, 300)


def test_each_file_is_that_of_a_tokenizer_of_its_side(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path, filename_prefix="two")
    source_file, target_file = (str(tmp_path / f"two-{name}.json") for name in ("tokenizer", "target_tokenizer"))
    for file, expected in ((source_file, SOURCE), (target_file, TARGET)):
        assert Tokenizer.from_file(file).to_str() == expected.backend_tokenizer.to_str()
    one = VanillaTransformerTokenizer(tokenizer_file=source_file)
    assert one(text_target="x")["input_ids"] == SOURCE("x")["input_ids"]
    two = VanillaTransformerTokenizer(tokenizer_file=source_file, target_tokenizer_file=target_file)
    assert two(text_target=TARGETS)["input_ids"] == TARGET(TARGETS)["input_ids"]


def test_a_target_vocabulary_may_be_neither_missing_nor_left_by_another_tokenizer(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    SOURCE.save_pretrained(tmp_path)
    assert (tmp_path / "target_tokenizer.json").exists()
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert not loaded.separate_vocabs
    assert loaded(text_target=TARGETS)["input_ids"] == SOURCE(TARGETS)["input_ids"]
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "target_tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"there is no target vocabulary: target_tokenizer\.json is missing"):
        AutoTokenizer.from_pretrained(tmp_path)


@pytest.fixture(scope="module")
def model() -> Any:
    """Weights with which the source matters; it writes words, since bytes alone would mostly be no text."""
    sizes = {**SHARING["separate-untied"], "vocab_size": 290, "decoder_vocab_size": 300, "max_position_embeddings": 64}
    model: Any = make_model(**sizes, lm_head_bias=True, scale_embedding=False)
    with torch.no_grad():
        model.lm_head.bias[:260] = -1e4
        for name, parameter in model.named_parameters():
            if "encoder_attn" in name:
                parameter.mul_(3)
    model.generation_config.max_new_tokens = 12
    model.generation_config.no_repeat_ngram_size = 1
    return model


def expected_translation(model: Any, text: str, **options: Any) -> str:
    sequences = model.generate(**SOURCE(text, return_tensors="pt"), **options)
    return str(TARGET.decode(sequences[0], skip_special_tokens=True))


def test_pipeline_and_translate_read_targets(model: Any) -> None:
    texts = SOURCES[:3]
    expected = [expected_translation(model, text, num_beams=2) for text in texts]
    assert len(set(expected)) == 3
    make_pipeline: Any = pipeline  # Any, since the library types the names of its own tasks only
    translator = make_pipeline("translation", model=model, tokenizer=TOKENIZER, device="cpu")
    assert [result["translation_text"] for result in translator(texts, num_beams=2)] == expected
    assert translate(model, TOKENIZER, texts, num_beams=2, progress=False) == expected


def test_stop_strings_are_the_target_tokenizers(model: Any) -> None:
    free = expected_translation(model, "a man")
    stop = free.split()[2]
    stops = {"stop_strings": [stop], "tokenizer": TOKENIZER.target_tokenizer}
    stopped = model.generate(**TOKENIZER("a man", return_tensors="pt"), **stops)
    text = str(TOKENIZER.decode(stopped[0], skip_special_tokens=True))
    assert free.startswith(text)
    assert stop in text
    assert len(text) < len(free)


def test_threads_do_not_mix_the_sides_up() -> None:
    sources, targets = SOURCE(SOURCES)["input_ids"], TARGET(TARGETS)["input_ids"]

    def work(number: int) -> bool:
        if number % 2:
            return TOKENIZER(SOURCES)["input_ids"] == sources and TOKENIZER.encode("a man") == SOURCE.encode("a man")
        return TOKENIZER(text_target=TARGETS)["input_ids"] == targets

    with ThreadPoolExecutor(max_workers=8) as executor:
        assert all(executor.map(work, range(400)))


def test_a_target_that_fails_leaves_the_source_side_on(tokenizer: VanillaTransformerTokenizer) -> None:
    with pytest.raises(ValueError, match="text input must be of type"):
        tokenizer("a man", text_target=5)
    assert tokenizer.encode("a man") == SOURCE.encode("a man")


def test_a_process_without_the_package_translates_the_same(
    model: Any, tmp_path: Path, without_the_package: RemotePython
) -> None:
    folder, again, texts = tmp_path / "saved", tmp_path / "again", SOURCES[:3]
    TOKENIZER.save_pretrained(folder)
    model.save_pretrained(folder)
    program = """
from transformers import AutoTokenizer, pipeline
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
tokenizer.save_pretrained(again)
translator = pipeline("translation", model=folder, trust_remote_code=True, device="cpu")
labels = tokenizer(text_target=texts)["input_ids"]
[
    type(tokenizer).__module__.partition(".")[0],
    tokenizer(texts)["input_ids"],
    labels,
    tokenizer.batch_decode(labels, skip_special_tokens=True),
    [result["translation_text"] for result in translator(texts, num_beams=2)],
]
"""
    assert without_the_package.run(program, folder=str(folder), again=str(again), texts=texts) == [
        "transformers_modules",
        SOURCE(texts)["input_ids"],
        TARGET(texts)["input_ids"],
        texts,
        [expected_translation(model, text, num_beams=2) for text in texts],
    ]
    saved_again, saved = files_of(again), files_of(folder)
    assert {"tokenizer.json", "target_tokenizer.json", "tokenizer_config.json"} <= saved_again.keys()
    assert saved_again == {name: saved[name] for name in saved_again}
