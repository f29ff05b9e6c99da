"""Attention weights checked against the models' own, labels and words against the text, and alignments."""

import gzip
import re
import unicodedata
from itertools import accumulate, pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from library_models import MODELS, SIZES, make_bart, make_m2m100, make_nllb_tokenizer
from library_models import make_tokenizer as make_word_tokenizer
from library_vocabularies import write_fsmt_vocabulary, write_marian_vocabulary
from tiny_single_stacks import SINGLE_STACKS, make_single_stack
from tiny_vanilla import make_model
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import FSMTTokenizer, MarianTokenizer, PreTrainedTokenizerFast

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.data.tokenizer_training import train_separate_tokenizer, train_tokenizer
from vanilla_transformer.visualization import AttentionMap, align_file, align_lines, align_words, collect_attention
from vanilla_transformer.visualization.attention import KINDS, format_pharaoh
from vanilla_transformer.visualization.labels import find_words, label_tokens, split_words

pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")

CORPUS = [
    "the cat sits on the mat .",
    "die Katze sitzt auf der Matte .",
    "猫坐在垫子上。",
    "बिल्ली चटाई पर बैठी है",
    "قطة",
] * 3
BYTES = VanillaTransformerTokenizer()
TARGET = "papa mike unknown lima"


def make_sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words begin with "▁", and a character that is not in the vocabulary is spelled in bytes."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghé猫"]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, "▁a", "bc", "▁abc"])}
    merges = [("▁", "a"), ("b", "c"), ("▁a", "bc")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS: dict[str, Any] = {
    "bytes": BYTES,
    "byte pairs": train_tokenizer(CORPUS, vocab_size=400, show_progress=False),
    "sentencepiece-like": make_sentencepiece_like(),
}
texts = st.text(alphabet=st.sampled_from("abcdé ß猫坐。ラमेंقط한😀👩\u200d\u0301\n\u200b\x07'!"), max_size=12)


def read_labels(labels: tuple[str, ...]) -> str:
    """The oracle's way back from labels to a text."""
    text = re.sub("<[0-9A-F]{2}>", "", "".join(label for label in labels if label != "</s>"))
    text = text.replace("▁", " ").replace("↵", "\n").replace("◌", "")
    return re.sub(r"<U\+([0-9A-F]{4,})>", lambda found: chr(int(found.group(1), 16)), text)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=texts)
def test_labels_joined_are_the_text_and_tokens_and_words_belong_together(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer(text)["input_ids"]
    labels = label_tokens(tokenizer, ids)
    joined = text if name == "sentencepiece-like" else unicodedata.normalize("NFC", text)
    # A first token may be the space that the tokenizer itself puts before a text.
    assert read_labels(labels) in (joined, " " + joined)
    assert all(label.isprintable() and label for label in labels)
    for split in (True, False):
        words = find_words(tokenizer, ids, text, split_characters=split)
        assert words[-1] == ()  # </s>
        flat = [word for numbers in words for word in numbers]
        assert flat == sorted(flat)
        named = split_words(text, split_characters=split)
        assert "".join(named) == "".join(text.split())
        if text.strip():
            assert all(words[:-1])
            assert set(flat) == set(range(len(named)))
    assert split_words(text, split_characters=False) == text.split()
    # What a model wrote has no other text than what it decodes to.
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert {word for numbers in find_words(tokenizer, ids) for word in numbers} == set(range(len(split_words(decoded))))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a  b c. ", ["a", "b", "c."]),
        ("我喜欢cats，和狗。", ["我", "喜", "欢", "cats", "，", "和", "狗", "。"]),  # noqa: RUF001
        ("「東京」へ", ["「", "東", "京", "」", "へ"]),
        ("か\u3099き", ["か\u3099", "き"]),
        ("हिन्दी में 한국어", ["हिन्दी", "में", "한국어"]),
        ("👩\u200d👧 👍🏽!", ["👩\u200d👧", "👍🏽!"]),
        ("人々\u3000〇", ["人", "々", "〇"]),  # noqa: RUF001
        (" \n", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert split_words(text) == words
    assert split_words(text, split_characters=False) == text.split()


def test_parts_of_characters_are_named_by_their_bytes() -> None:
    assert label_tokens(BYTES, BYTES("a 猫")["input_ids"]) == ("▁", "a", "▁", "<E7>", "<8C>", "猫", "</s>")
    assert label_tokens(BYTES, BYTES("猫")["input_ids"][:3]) == ("▁", "<E7>", "<8C>")  # the model stopped early
    tokenizer = TOKENIZERS["sentencepiece-like"]
    assert label_tokens(tokenizer, tokenizer("abc ß")["input_ids"]) == ("abc", "▁", "<C3>", "ß", "</s>")
    assert find_words(tokenizer, tokenizer("abc ß")["input_ids"]) == ((0,), (1,), (1,), (1,), ())


def test_each_side_of_two_vocabularies_is_read_with_its_own() -> None:
    tokenizer = train_separate_tokenizer(["aa bb aa"] * 3, ["dd cc dd"] * 3, vocab_size=262, show_progress=False)
    source, target = tokenizer("aa bb")["input_ids"], tokenizer(text_target="dd cc")["input_ids"]
    assert read_labels(label_tokens(tokenizer, source, is_source=True)).strip() == "aa bb"
    assert read_labels(label_tokens(tokenizer, target)).strip() == "dd cc"
    found = find_words(tokenizer, source, "aa bb", is_source=True)
    assert {word for numbers in found for word in numbers} == {0, 1}


@pytest.fixture(scope="module")
def marian_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("marian")
    write_marian_vocabulary(folder, separate=True)
    return MarianTokenizer.from_pretrained(folder)


def test_a_tokenizer_without_offsets(marian_tokenizer: Any) -> None:
    assert not marian_tokenizer.is_fast
    # "½" becomes three characters, and the snow man is unknown.
    for text in ("the ☃ dog ½ man", "☃ the", "man☃ the ☃☃"):
        ids = marian_tokenizer(text)["input_ids"]
        words = find_words(marian_tokenizer, ids, text, is_source=True, split_characters=False)
        assert {word for numbers in words for word in numbers} == set(range(len(text.split()))), text
        labels = label_tokens(marian_tokenizer, ids, is_source=True)
        assert words[labels.index("</s>")] == ()
        assert words[0][0] == 0
        assert "☃" in text.split()[words[labels.index("<unk>")][0]]


def test_two_vocabularies_of_marian(marian_tokenizer: Any) -> None:
    tokenizer = marian_tokenizer
    for side, text in (("source", "the dog runs"), ("target", "die sonne reitet"), ("source", "the dog runs")):
        is_source = side == "source"  # neither spoils the next
        ids = (tokenizer(text) if is_source else tokenizer(text_target=text))["input_ids"]
        pieces = [*getattr(tokenizer, f"spm_{side}").encode(text, out_type=str), "</s>"]
        words = [(word,) for word in np.cumsum([piece.startswith("▁") for piece in pieces[:-1]]) - 1]
        labels = label_tokens(tokenizer, ids, is_source=is_source)
        assert [label.strip("▁") for label in labels] == [piece.strip("▁") for piece in pieces]
        assert find_words(tokenizer, ids, text, is_source=is_source) == (*words, ())
        assert find_words(tokenizer, ids, is_source=is_source)[-2:] == ((2,), ())
    assert label_tokens(tokenizer, tokenizer("the ☃ dog")["input_ids"], is_source=True).count("<unk>") == 1
    tokenizer.add_tokens(["<new>"])
    assert label_tokens(tokenizer, tokenizer("dog <new>")["input_ids"], is_source=True)[-2].endswith("<new>")


def test_two_vocabularies_of_fsmt(tmp_path: Path) -> None:
    pytest.importorskip("sacremoses")
    numbers = dict(zip(("src_vocab_size", "tgt_vocab_size"), write_fsmt_vocabulary(tmp_path), strict=True))
    tokenizer = FSMTTokenizer.from_pretrained(tmp_path)
    sizes: dict[str, Any] = {**SIZES, **numbers, "max_position_embeddings": 30}
    model = transformers.FSMTForConditionalGeneration(transformers.FSMTConfig(langs=["en", "de"], **sizes)).eval()
    model.generation_config.max_length = None
    attention = collect_attention(model, tokenizer, "a cat sat", max_new_tokens=5, suppress_tokens=[0, 1, 3])
    assert attention.source == ("a", "▁c", "a", "t", "▁s", "a", "t", "</s>")
    assert attention.source_words == ((0,), (1,), (1,), (1,), (2,), (2,), (2,), ())
    written = "".join(attention.target).replace("▁", "")
    assert attention.target_text
    assert written.startswith(attention.target_text.replace(" ", ""))
    with pytest.raises(ValueError, match="FSMTTokenizer cannot encode target texts"):
        collect_attention(model, tokenizer, "a cat", "a cat")


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["the cat sits on the mat . " * 40, "abc 猫 ß " * 40, "猫坐在垫子上。" * 20])
def test_a_long_text_is_labelled_without_decoding_it_over_and_over(name: str, text: str, monkeypatch: Any) -> None:
    tokenizer, text = TOKENIZERS[name], text.strip()
    ids = tokenizer(text)["input_ids"]
    decode, lengths = tokenizer.decode, []

    def count(ids: list[int], **options: Any) -> str:
        lengths.append(len(ids))
        return str(decode(ids, **options))

    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "decode", count)
        labels = label_tokens(tokenizer, ids)
    assert sum(lengths) < 150 * len(ids)  # a token each time would be half of len(ids) for each
    # The oracle: each token's text is what decoding it with all before it adds to what is right so far.
    whole = decode(ids, skip_special_tokens=True)
    prefixes = [decode(ids[:length], skip_special_tokens=True) for length in range(len(ids) + 1)]
    alike = [sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(prefix, whole))) for prefix in prefixes]  # noqa: B905
    ends = list(accumulate(alike, max))
    for (start, end), label in zip(pairwise(ends), labels, strict=True):
        if end > start:
            assert label == whole[start:end].replace(" ", "▁")
    assert read_labels(labels) in (text, " " + text)


def oracle(model: Any, tokenizer: Any, source: str, target: str) -> Any:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    labels = torch.tensor([tokenizer(text_target=target)["input_ids"]])
    with torch.no_grad():
        outputs = model(**tokenizer(source, return_tensors="pt"), labels=labels, output_attentions=True)
    model.set_attn_implementation(before)
    return outputs


def check_map(attention: AttentionMap) -> None:
    for kind in KINDS:
        weights, rows, columns = attention.select(kind)
        assert weights.shape[2:] == (len(rows), len(columns))
        np.testing.assert_allclose(weights.sum(axis=-1), 1.0, atol=1e-5)
    future = np.triu(np.ones(attention.decoder.shape[2:], dtype=bool), k=1)
    assert (attention.decoder[:, :, future] == 0).all()


@pytest.mark.parametrize("name", ["vanilla", *MODELS])
def test_weights_are_what_the_model_returns(name: str) -> None:
    tokenizer = make_word_tokenizer()
    model = make_model(vocab_size=20) if name == "vanilla" else MODELS[name]()
    model.train()
    before = model.config._attn_implementation  # T5 of older versions of the library has eager attention only
    attention = collect_attention(model, tokenizer, "alpha delta echo", TARGET)
    assert model.config._attn_implementation == before
    assert all(module.training for module in model.modules())
    model.eval()
    outputs = oracle(model, tokenizer, "alpha delta echo", TARGET)
    for kind in KINDS:
        expected = torch.stack(outputs[f"{kind}_attentions"], dim=1)[0].numpy()
        np.testing.assert_allclose(attention.select(kind)[0], expected, atol=1e-6)
    check_map(attention)
    assert attention.source == ("alpha", "▁delta", "▁echo", "</s>")
    assert attention.target == ("papa", "▁mike", "<unk>", "▁lima", "</s>")
    assert attention.decoder_input[1:] == attention.target[:-1]
    assert attention.target_words == ((0,), (1,), (2,), (3,), ())
    # In what a model writes, "<unk>" is no text, and no word.
    assert find_words(tokenizer, tokenizer(text_target=TARGET)["input_ids"])[2] == ()
    assert (attention.source_text, attention.target_text) == ("alpha delta echo", TARGET)


@pytest.mark.parametrize("name", ["vanilla", *MODELS])
def test_the_model_translates_where_no_target_is_given(name: str) -> None:
    tokenizer = make_word_tokenizer()
    model: Any = make_model(vocab_size=20) if name == "vanilla" else MODELS[name]()
    inputs = tokenizer("alpha delta echo", return_tensors="pt")
    (output,) = model.generate(**inputs, max_new_tokens=5, num_beams=2)
    attention = collect_attention(model, tokenizer, "alpha delta echo", max_new_tokens=5, num_beams=2)
    check_map(attention)
    assert attention.decoder_input == label_tokens(tokenizer, output[:-1].tolist())
    assert attention.target == label_tokens(tokenizer, output[1:].tolist())
    assert attention.target_text == tokenizer.decode(output, skip_special_tokens=True)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**inputs, decoder_input_ids=output[None, :-1], output_attentions=True)
    expected = torch.stack(outputs.cross_attentions, dim=1)[0]
    np.testing.assert_allclose(attention.cross, expected.numpy(), atol=1e-6)


def test_a_model_with_a_language_token() -> None:
    tokenizer = make_nllb_tokenizer()
    tokenizer.src_lang, tokenizer.tgt_lang = "eng_Latn", "deu_Latn"
    model = make_m2m100(len(tokenizer))
    attention = collect_attention(model, tokenizer, "the cat", "die katze")
    assert attention.decoder_input[:2] == ("</s>", "deu_Latn")
    assert attention.source_words[0] == attention.target_words[0] == ()
    expected = torch.stack(oracle(model, tokenizer, "the cat", "die katze").cross_attentions, dim=1)[0]
    np.testing.assert_allclose(attention.cross, expected.numpy(), atol=1e-6)
    german = tokenizer.convert_tokens_to_ids("deu_Latn")
    written = collect_attention(model, tokenizer, "the cat", forced_bos_token_id=german, max_new_tokens=4)
    assert written.target[0] == "deu_Latn"
    check_map(written)


def test_a_prefix_has_no_words_and_a_long_source_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    arguments: Any = (MODELS["t5"](), make_word_tokenizer(), "papa mike", TARGET)
    attention = collect_attention(*arguments, source_prefix="translate alpha: ")
    assert attention.source_words == ((), (), (0,), (1,), ())
    assert attention.source_text == "papa mike"
    shorter = collect_attention(*arguments, max_source_length=2)
    assert (shorter.source, shorter.source_words) == (("papa", "</s>"), ((0,), ()))
    assert "truncated to 2 of its 3 tokens" in caplog.text
    learned = make_model(vocab_size=20, position_embedding_type="learned", max_position_embeddings=4)
    assert len(collect_attention(learned, make_word_tokenizer(), "papa mike alpha lima", max_new_tokens=2).source) == 4


def test_what_is_no_text_or_too_long_is_refused() -> None:
    model, tokenizer = make_bart(), make_word_tokenizer()
    for source, target in (("", None), (" ", "papa"), ("papa", "\n")):
        with pytest.raises(ValueError, match="needs words"):
            collect_attention(model, tokenizer, source, target)
    broken = b"papa \xff".decode(errors="surrogateescape")
    for source, target, side in ((broken, None, "source"), ("papa", broken, "target")):
        with pytest.raises(ValueError, match=rf"The {side} is no text: its character 6 is U\+DCFF"):
            collect_attention(model, tokenizer, source, target)
    config = transformers.BartConfig(vocab_size=20, max_position_embeddings=10, decoder_start_token_id=2, **SIZES)
    small, long = transformers.BartForConditionalGeneration(config), "papa " * 30
    with pytest.raises(ValueError, match=r"cannot read 31 source tokens \(it has 10 positions\)"):
        collect_attention(small, tokenizer, long)
    with pytest.raises(ValueError, match=r"cannot read 2 source tokens and 31 target tokens"):
        collect_attention(small, tokenizer, "papa", long)
    with pytest.raises(ValueError, match="kind is 'self'"):
        make_map([[1.0]], [(0,)], [(0,)]).select("self")  # type: ignore[arg-type]


def test_weights_for_something_else_than_pairs_of_tokens_are_refused() -> None:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
    config = transformers.LongT5Config(**sizes, pad_token_id=1, eos_token_id=2, local_radius=2)
    config.decoder_start_token_id = 1
    tokenizer, model = make_word_tokenizer(), transformers.LongT5ForConditionalGeneration(config).eval()
    with pytest.raises(ValueError, match=r"encoder_attentions are \(1, .* a weight for each pair of tokens"):
        collect_attention(model, tokenizer, "papa mike", TARGET)
    # An alignment needs no more than cross-attention, which this model has.
    (alignment,) = align_lines(model, tokenizer, [("papa mike", TARGET)], progress=False)
    assert [target for _, target in alignment] == [0, 1, 2, 3]
    pegasus_config = transformers.PegasusXConfig(vocab_size=20, block_size=4, num_global_tokens=2, **SIZES)
    pegasus = transformers.PegasusXForConditionalGeneration(pegasus_config)
    with pytest.raises(ValueError, match="encoder_attentions are dict; they must have a weight for each"):
        collect_attention(pegasus, tokenizer, "papa mike", TARGET)


def test_a_model_without_a_target_or_a_source_is_refused() -> None:
    for name in SINGLE_STACKS:
        model: Any = make_single_stack(name, vocab_size=20)
        message = f"{type(model).__name__} is no encoder-decoder"
        with pytest.raises(ValueError, match=message):
            collect_attention(model, make_word_tokenizer(), "papa mike", TARGET)
        with pytest.raises(ValueError, match=message):
            next(align_lines(model, make_word_tokenizer(), [("papa mike", TARGET)]))


def test_weights_that_are_no_numbers_are_refused() -> None:
    model, tokenizer = make_bart(), make_word_tokenizer()
    (parameter,) = [p for name, p in model.named_parameters() if "encoder_attn.q_proj.weight" in name]
    with torch.no_grad():
        parameter[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"Some of the model's cross_attentions are not numbers \(NaN\)"):
        collect_attention(model, tokenizer, "papa mike", TARGET)
    with pytest.raises(ValueError, match=r"cross_attentions are not numbers"):
        list(align_lines(model, tokenizer, [("papa mike", TARGET)], progress=False))


def make_map(cross: Any, source_words: Any, target_words: Any) -> AttentionMap:
    """A map whose cross-attention is given: (N, H, T, S), or (T, S) for one layer and head."""
    weights = np.array(cross, dtype=np.float32)
    weights = weights.reshape((1,) * (4 - weights.ndim) + weights.shape)
    source, target = ("s",) * weights.shape[3], ("t",) * weights.shape[2]
    nothing = np.zeros((1, 1, 1, 1), dtype=np.float32)
    words = tuple(source_words), tuple(target_words)
    return AttentionMap(source, target, target, nothing, nothing, weights, *words, "", "")


def test_alignment_of_known_attention() -> None:
    # Source words a, b b (two tokens) and </s>; target words x x (two tokens), y and </s>.
    source_words, target_words = [(0,), (1,), (1,), ()], [(0,), (0,), (1,), ()]
    cross = [[0.4, 0.3, 0.2, 0.1], [0.5, 0.3, 0.2, 0.0], [0.2, 0.0, 0.1, 0.7], [0.0, 0.0, 0.0, 1.0]]
    # x: a has 0.45 on the mean, b 0.25 + 0.2 + 0.05 = 0.5. y: what </s> gets does not count.
    cross[0][1] += 0.1
    attention = make_map(cross, source_words, target_words)
    assert align_words(attention) == [(1, 0), (0, 1)]
    assert format_pharaoh(align_words(attention)) == "0-1 1-0"
    assert format_pharaoh([]) == ""
    # Words that share a token share its links.
    attention = make_map([[0.9, 0.1], [0.2, 0.8]], [(0, 1), (2,)], [(0,), (1, 2)])
    assert align_words(attention) == [(0, 0), (1, 0), (2, 1), (2, 2)]
    # Special tokens alone have none.
    assert align_words(make_map([[1.0]], [()], [(0,)])) == align_words(make_map([[1.0]], [(0,)], [()])) == []


def test_layers_and_heads_are_chosen() -> None:
    eye, swap = np.eye(2), np.eye(2)[::-1]
    attention = make_map([[eye, 0.9 * eye], [swap, eye]], [(0,), (1,)], [(0,), (1,)])
    straight, crossed = [(0, 0), (1, 1)], [(1, 0), (0, 1)]
    assert align_words(attention) == straight
    assert align_words(attention, layer=-1, head=0) == align_words(attention, layer=1, head=0) == crossed
    assert align_words(attention, layer=1, head=1) == straight
    for wrong, message in (({"layer": 2}, r"layer is 2; it must be from 0 to 1"), ({"head": -3}, r"head is -3")):
        with pytest.raises(ValueError, match=message):
            align_words(attention, **wrong)


PAIRS = [
    ("alpha delta echo", TARGET),
    ("papa", "lima lima"),
    ("", "papa"),
    ("mike lima kilo juliet india", "  "),
    ("golf hotel unknown india papa", "juliet"),
    ("kilo", "echo alpha delta mike oscar papa"),
]


@pytest.mark.parametrize("name", ["vanilla", *MODELS])
def test_many_pairs_are_aligned_as_one_by_one(name: str) -> None:
    tokenizer = make_word_tokenizer()
    model = make_model(vocab_size=20, scale=0.8) if name == "vanilla" else MODELS[name]()
    expected = [
        align_words(collect_attention(model, tokenizer, *pair), layer=0) if all(map(str.strip, pair)) else []
        for pair in PAIRS
    ]
    assert len({source for alignment in expected for source, _ in alignment}) > 1
    for options in ({}, {"batch_size": 1}, {"max_batch_tokens": 40, "window_size": 3}):
        found = align_lines(model, tokenizer, PAIRS, layer=0, progress=False, **options)  # type: ignore[arg-type]
        assert list(found) == expected


def test_a_file_of_pairs(tmp_path: Path) -> None:
    tokenizer, model = make_word_tokenizer(), MODELS["marian"]()
    paths = (tmp_path / "source.gz", tmp_path / "target.txt", tmp_path / "new" / "pairs.align")
    paths[0].write_bytes(gzip.compress("".join(source + "\r\n" for source, _ in PAIRS).encode()))
    paths[1].write_text("\n".join(target for _, target in PAIRS), encoding="utf-8")
    with pytest.raises(ValueError, match="layer is 7"):
        align_file(model, tokenizer, *paths, layer=7, progress=False)
    assert not list(paths[2].parent.iterdir())  # neither a part of it
    assert align_file(model, tokenizer, *paths, progress=False) == len(PAIRS)
    alignments = align_lines(model, tokenizer, PAIRS, progress=False)
    assert paths[2].read_text() == "".join(format_pharaoh(alignment) + "\n" for alignment in alignments)
    with pytest.raises(FileExistsError, match=r"pairs\.align exists"):
        align_file(model, tokenizer, *paths, progress=False)
    paths[1].write_text("papa\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"source\.gz has 6 lines and .*target\.txt has 1;"):
        align_file(model, tokenizer, *paths, overwrite=True, progress=False)
    assert len(paths[2].read_text().splitlines()) == len(PAIRS)
