"""Export to CTranslate2: what it computes and finds against this package's own model, and what it refuses."""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tiny_vanilla import ALL_SHARING, logits_of, make_model, make_sentences, pad
from torch import nn
from transformers import AutoTokenizer, GenerationConfig, MarianConfig, MarianMTModel, PreTrainedTokenizerBase

from vanilla_transformer.apps.batches import find_max_tokens
from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.data.tokenizer_training import train_separate_tokenizer, train_tokenizer
from vanilla_transformer.export.ctranslate2 import ACTIVATIONS, export_ctranslate2, import_ctranslate2, list_tokens
from vanilla_transformer.export.ctranslate2_model import CTranslate2Model, load_for_ctranslate2
from vanilla_transformer.inference.files import translate_file
from vanilla_transformer.inference.losses import score_loss
from vanilla_transformer.inference.translate import translate, translate_n_best

pytest.importorskip("ctranslate2")

START, PAD, END = 0, 1, 2
SOURCES = [*make_sentences([9, 2, 5], seed=3), [END]]
TEXTS = ["a man rides a horse .", "two dogs run", "", "the sun shines on the old house", "a dog"]
EVERYTHING: dict[str, dict[str, Any]] = {
    "defaults": {},
    "concatenated": {"position_embedding_type": "sinusoidal_concatenated", "scale_embedding": False},
    "tensor2tensor-offset": {"position_embedding_type": "sinusoidal_tensor2tensor", "position_offset": 2},
    "learned-offset": {"position_embedding_type": "learned", "position_offset": 2},
    "pre-norm": {"normalize_before": True},
    "pre-norm-no-final": {"normalize_before": True, "add_final_layer_norm": False},
    "post-norm-final": {"add_final_layer_norm": True, "normalize_embedding": True},
    "all-biases": {"attention_bias": True, "lm_head_bias": True, "layer_norm_eps": 0.01},
    "no-bias": {"ffn_bias": False},
    "narrow-keys": {"d_k": 2, "d_v": 6},
    "narrow-values": {"d_k": 6, "d_v": 2, "attention_bias": True},
    "odd-heads": {"d_k": 5, "d_v": 5, "encoder_attention_heads": 3, "decoder_attention_heads": 1},
    **ALL_SHARING,
    **{f"activation-{name}": {"activation_function": name} for name in ACTIVATIONS if name != "relu"},
}


make: Any = make_model  # the library types `generate` in a way that no call of it suits


def export(model: Any, folder: Path, **settings: Any) -> CTranslate2Model:
    own = {name: settings.pop(name) for name in ("tokenizer", "quantization", "max_positions") if name in settings}
    export_ctranslate2(model, folder / "exported", **own)
    return CTranslate2Model(folder / "exported", **{"device": "cpu", "compute_type": "float32", **settings})


def both(ours: Any, theirs: Any, side: str = "right", **settings: Any) -> list[Any]:
    ids, mask = pad(SOURCES[:3], side)
    return [model.generate(input_ids=ids, attention_mask=mask, **settings) for model in (ours, theirs)]


def assert_same_beams(ours: Any, theirs: Any, **settings: Any) -> None:
    expected, found = both(ours, theirs, return_dict_in_generate=True, **settings)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(TEXTS, vocab_size=270)


@pytest.mark.parametrize("changes", EVERYTHING.values(), ids=EVERYTHING)
def test_every_configuration_is_the_same_function(changes: dict[str, Any], tmp_path: Path) -> None:
    ours = make(**changes)
    theirs = export(ours, tmp_path)
    targets = make_sentences([4, 7, 1], vocab_size=13, seed=1)
    found = theirs.translator.score_batch(*([list(map(str, ids)) for ids in side] for side in (SOURCES[:3], targets)))
    for source, target, result in zip(SOURCES, targets, found, strict=False):
        logits = logits_of(ours, input_ids=torch.tensor([source]), decoder_input_ids=torch.tensor([[START, *target]]))
        expected = logits[0].log_softmax(dim=-1).gather(1, torch.tensor([*target, END])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(result.log_probs), expected, atol=2e-5, rtol=2e-5)
    settings: dict[str, Any] = {"max_new_tokens": 12}
    for side in ("right", "left"):
        assert torch.equal(*both(ours, theirs, side, **settings))
    # When this setting is on, both end their searches by the same rule.
    settings |= {"num_beams": 3, "num_return_sequences": 2, "early_stopping": True}
    assert_same_beams(ours, theirs, **settings)
    assert_same_beams(ours, theirs, **settings, length_penalty_type="gnmt", length_penalty=0.6)


def test_double_precision_is_written_as_single(tmp_path: Path) -> None:
    ours = make()
    theirs = export(ours.double(), tmp_path)
    assert torch.equal(*both(ours.float(), theirs, max_new_tokens=12))


@pytest.mark.parametrize("quantization", ["int8", "int8_float32", "int16", "bfloat16", "float16"])
def test_in_fewer_bits_little_changes(quantization: str, tmp_path: Path) -> None:
    ours = make(d_model=64, d_k=8, d_v=24, scale=0.2)
    ids, mask = pad(SOURCES[:3])
    labels = torch.tensor([[5, 6, END], [7, END, -100], [8, 9, 10]])
    logits = logits_of(ours, input_ids=ids, attention_mask=mask, labels=labels)
    theirs = export(ours, tmp_path, quantization=quantization, compute_type="default")
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert theirs.sum_losses(ids, mask, labels) == pytest.approx(float(expected), rel=0.05)
    # CTranslate2 quantizes in place what it is given.
    assert torch.equal(logits_of(ours, input_ids=ids, attention_mask=mask, labels=labels), logits)


def test_weights_are_copied_only_where_they_would_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = make()
    own = {parameter.data_ptr(): name for name, parameter in ours.named_parameters()}
    shared: list[set[str]] = []
    specs: Any = import_ctranslate2().specs
    optimize = specs.TransformerSpec.optimize

    def watch(spec: Any, quantization: str | None = None) -> None:
        tensors = [getattr(variable, "tensor", None) for variable in spec.variables().values()]
        shared.append({own[one.data_ptr()] for one in tensors if one is not None and one.data_ptr() in own})
        optimize(spec, quantization)

    monkeypatch.setattr(specs.TransformerSpec, "optimize", watch)
    before = {name: parameter.clone() for name, parameter in ours.named_parameters()}
    for quantization in (None, "float16", "int8", "int16"):
        export_ctranslate2(ours, tmp_path / f"exported-{quantization}", quantization=quantization)
    plain, half, *integers = shared
    assert {"model.shared.weight", "model.encoder.layers.0.fc1.weight"} <= plain
    assert (half, integers) == (plain, [set(), set()])
    assert all(torch.equal(parameter, before[name]) for name, parameter in ours.named_parameters())


def test_positions_end_where_the_table_was_made_to_end(tmp_path: Path) -> None:
    ours = make()
    theirs = export(ours, tmp_path, max_positions=70)
    long = torch.tensor(make_sentences([70]))
    assert torch.equal(theirs.generate(long, max_new_tokens=70), ours.generate(long, max_new_tokens=70))
    with pytest.raises(ValueError, match="A source of 71 tokens is too long: the exported model has 70 positions"):
        theirs.generate(torch.full((1, 71), 4), max_new_tokens=3)
    with pytest.raises(ConversionError, match="71 new tokens are asked for"):
        theirs.generate(long, max_new_tokens=71)
    with pytest.raises(ValueError, match="A target of 71 tokens is too long"):
        theirs.sum_losses(long, torch.ones_like(long), torch.full((1, 71), 4))


def test_texts_are_cut_where_the_table_ends(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr(logging.getLogger("vanilla_transformer"), "propagate", True)
    theirs = export(make(vocab_size=len(tokenizer)), tmp_path, tokenizer=tokenizer, max_positions=8)
    texts = ["a dog", "a dog " * 9]
    settings: dict[str, Any] = {"max_source_length": 500, "progress": False}
    translate(theirs, tokenizer, texts, **settings)
    score_loss(theirs, tokenizer, texts, texts[::-1], **settings)
    cut = f"2: truncated to 8 of its {len(tokenizer(texts[1]).input_ids)} tokens"
    assert caplog.messages == [f"source line {cut}", f"source line {cut}", f"target line {cut.replace('2', '1', 1)}"]
    assert find_max_tokens(theirs, tokenizer, 500) == find_max_tokens(theirs, tokenizer, None) == 8, "the server's"


def test_a_text_of_a_thousand_tokens_is_neither_cut_nor_refused(tmp_path: Path) -> None:
    """CTranslate2 would cut sources at 1,024 tokens and translations at 256 unless told otherwise."""
    ours = make(seed=1)
    theirs = export(ours, tmp_path)
    long = torch.tensor(make_sentences([1100]))
    settings: dict[str, Any] = {"max_new_tokens": 300, "eos_token_id": None}
    expected = ours.generate(long, **settings)
    assert expected.shape == (1, 301)
    assert torch.equal(theirs.generate(long, **settings), expected)
    loss = float(ours(input_ids=long, labels=long).loss.detach())
    assert theirs.sum_losses(long, torch.ones_like(long), long) == pytest.approx(loss * 1100, rel=1e-4)


def test_learned_positions_have_as_many_as_they_have(tmp_path: Path) -> None:
    """A table of 23 rows, from the third on, is no multiple of what CTranslate2 may pad to."""
    ours = make(position_embedding_type="learned", position_offset=2, max_position_embeddings=25)
    theirs = export(ours, tmp_path)
    long = torch.tensor(make_sentences([23]))
    settings: dict[str, Any] = {"eos_token_id": None}
    expected = ours.generate(long, **settings)
    assert expected.shape == (1, 1 + 23)
    assert torch.equal(theirs.generate(long, **settings), expected)
    with pytest.raises(ValueError, match="has 23 positions"):
        theirs.generate(torch.tensor(make_sentences([24])))


def test_with_enough_patience_the_papers_search_is_found_whole(tmp_path: Path) -> None:
    """This package searches until no open beam can win: so does CTranslate2 when it never has enough."""
    ours = make(seed=5, scale=0.3)
    theirs = export(ours, tmp_path, patience=1000.0)
    for alpha in (0.0, 0.6, 1.5):
        settings = {"num_beams": 4, "length_penalty_type": "gnmt", "length_penalty": alpha}
        assert_same_beams(ours, theirs, **settings, max_new_tokens=52)


def test_each_sentence_has_its_own_limit(tmp_path: Path) -> None:
    """Its length and 50 more: the end is so improbable that most come to it, but not so that none comes before."""
    ours = make(lm_head_bias=True, seed=2, scale=0.2)
    with torch.no_grad():
        ours.lm_head.bias[END] = -3.0
    theirs = export(ours, tmp_path)
    expected, found = both(ours, theirs)
    assert torch.equal(found, expected)
    assert expected.shape[1] == 1 + 59
    lengths = (expected != PAD).sum(dim=1)
    assert lengths.unique().numel() > 1
    beams, _ = both(theirs, ours, num_beams=3, suppress_tokens=[END], renormalize_logits=True)
    assert (beams != PAD).sum(dim=1).tolist() == [60, 53, 56]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_length": 6},
        {"max_new_tokens": 6, "forced_eos_token_id": END},
        {"forced_eos_token_id": [END], "max_new_tokens": 1},
        {"max_new_tokens": 9, "min_new_tokens": 5, "renormalize_logits": True},
        {"max_new_tokens": 9, "min_length": 5, "renormalize_logits": True},
        {"max_new_tokens": 9, "bad_words_ids": [[5], [6, 7]], "suppress_tokens": [8], "renormalize_logits": True},
        {"max_new_tokens": 9, "no_repeat_ngram_size": 2, "renormalize_logits": True},
        {"max_new_tokens": 9, "eos_token_id": [END, 5, 9]},
        {"max_new_tokens": 9, "eos_token_id": None, "pad_token_id": PAD},
        {"generation_config": GenerationConfig(max_new_tokens=4, pad_token_id=7)},
        {"max_new_tokens": 9, "temperature": 1.0, "repetition_penalty": 1.0, "use_cache": True},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_settings_mean_what_they_do_in_the_library(settings: dict[str, Any], tmp_path: Path) -> None:
    ours = make(seed=4, scale=0.3)
    theirs = export(ours, tmp_path)
    plain, greedy = both(ours, theirs, **settings)
    assert torch.equal(greedy, plain)
    for alpha in (1.0, 0.5):
        beams = {"num_beams": 3, "early_stopping": True, "length_penalty": alpha}
        expected, found = both(ours, theirs, **{**settings, **beams})
        assert torch.equal(found, expected)


def test_without_a_length_penalty_early_stopping_still_ends_the_search(tmp_path: Path) -> None:
    """CTranslate2 would wait for the best open beam, which here never ends and is worth more than what has ended."""
    ours = make(lm_head_bias=True)
    with torch.no_grad():
        for parameter in ours.model.decoder.layers[-1].final_layer_norm.parameters():
            parameter.zero_()
        ours.lm_head.bias.copy_(torch.linspace(-12.0, -10.0, 17))
        ours.lm_head.bias[END], ours.lm_head.bias[5] = -3.0, 0.0
    theirs = export(ours, tmp_path)
    settings: dict[str, Any] = {"num_beams": 3, "early_stopping": True, "length_penalty": 0.0, "max_new_tokens": 9}
    expected, found = both(ours, theirs, **settings)
    assert expected.tolist() == [[START, END]] * 3
    assert torch.equal(found, expected)


def test_without_a_mask_pad_tokens_are_padding_and_a_greedy_search_returns_an_object(tmp_path: Path) -> None:
    theirs = export(make(), tmp_path)
    # A source of special tokens only gives an empty translation.
    assert theirs.generate(torch.tensor([SOURCES[3]]), num_beams=2).tolist() == [[START]]
    ids, mask = pad(SOURCES[:3], junk=PAD)
    expected = theirs.generate(ids, mask, max_new_tokens=8)
    found = theirs.generate(ids, max_new_tokens=8, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)


def test_divided_batches_and_several_workers_change_nothing(tmp_path: Path) -> None:
    ours = make()
    theirs = export(ours, tmp_path, inter_threads=2, intra_threads=1, max_batch_size=2)
    assert torch.equal(*both(ours, theirs, max_new_tokens=9))


class Watched:
    """A translator, and the largest batches that it was told to compute."""

    def __init__(self, translator: Any) -> None:
        self.translator = translator
        self.batch_sizes: list[int] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.translator, name)

        def call(*arguments: Any, max_batch_size: int, **settings: Any) -> Any:
            self.batch_sizes.append(max_batch_size)
            return found(*arguments, max_batch_size=max_batch_size, **settings)

        return call if callable(found) else found


@pytest.fixture
def four_threads() -> Iterator[None]:
    """As many threads as torch may use."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(
    ("given", "workers", "largest"),
    [
        ({}, 4, 2),
        ({"intra_threads": 2}, 2, 4),
        ({"inter_threads": 3}, 3, 3),
        ({"max_batch_size": 5}, 4, 5),
        ({"max_batch_size": 0, "inter_threads": 1}, 1, 0),
    ],
)
def test_a_batch_is_divided_among_the_threads(
    given: dict[str, Any], workers: int, largest: int, tmp_path: Path
) -> None:
    ours = make()
    undivided = export(ours, tmp_path, inter_threads=1, max_batch_size=0)
    divided = CTranslate2Model(tmp_path / "exported", device="cpu", compute_type="float32", **given)
    divided.translator = Watched(divided.translator)
    assert divided.translator.num_translators == workers
    assert torch.get_num_threads() == 4  # CTranslate2 would leave torch with as many as a worker has
    ids, mask = pad(make_sentences([9, 2, 5, 1, 30, 4, 8], seed=3))
    settings: dict[str, Any] = {"max_new_tokens": 12, "return_dict_in_generate": True}
    assert torch.equal(*(each.generate(ids, mask, **settings).sequences for each in (divided, undivided)))
    beams: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2}
    found, expected = (each.generate(ids, mask, **settings, **beams) for each in (divided, undivided))
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=1e-5)
    losses = [each.sum_losses(ids, mask, ids.masked_fill(mask == 0, -100)) for each in (divided, undivided)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert divided.translator.batch_sizes == [largest] * 3


def test_all_settings_without_a_counterpart_are_refused_together(tmp_path: Path) -> None:
    theirs = export(make(), tmp_path)
    wrong: dict[str, Any] = {"do_sample": True, "repetition_penalty": 1.2, "output_scores": True}
    wrong |= {"length_penalty_type": "none", "decoder_start_token_id": 5}
    with pytest.raises(ConversionError) as error:
        theirs.generate(torch.tensor([[5, 6]]), **wrong, num_return_sequences=3, decoder_input_ids=torch.tensor([[0]]))
    assert str(error.value).splitlines() == [
        "CTranslate2 cannot generate as asked:",
        "  - decoder_input_ids is none of its settings",
        "  - do_sample is True, of which it has no counterpart",
        "  - repetition_penalty is 1.2, of which it has no counterpart",
        "  - output_scores is True, of which it has no counterpart",
        "  - length_penalty_type is 'none' (can be: gnmt, transformers)",
        "  - num_return_sequences is 3, more than num_beams, 1",
        f"  - decoder_start_token_id is 5; it was exported with {theirs.target_tokens[0]!r}",
    ]


def test_what_a_training_with_generation_leaves_is_no_setting(tmp_path: Path) -> None:
    """`Seq2SeqTrainer` writes the library's defaults into the model's settings, a limit of 20 tokens among them."""
    ours = make(seed=4)
    expected = ours.generate(torch.tensor([[5, 6, 7]]), suppress_tokens=[ours.config.eos_token_id])
    ours.generation_config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    theirs = export(ours, tmp_path)
    assert not theirs.find_refused({})
    found = theirs.generate(torch.tensor([[5, 6, 7]]), suppress_tokens=[ours.config.eos_token_id])
    assert found.shape == expected.shape == (1, 1 + 3 + 50)


def test_the_end_is_no_bad_word(tmp_path: Path) -> None:
    ours = make(seed=4)
    theirs, end = export(ours, tmp_path), ours.config.eos_token_id
    found = [each.generate(torch.tensor([[5, 6, 7]]), bad_words_ids=[[end], [9]]) for each in (ours, theirs)]
    assert found[0].equal(found[1])


def test_beam_search_refuses_to_forbid_tokens_in_another_way_than_the_library(tmp_path: Path) -> None:
    ours = make(seed=4, scale=0.3)
    theirs = export(ours, tmp_path)
    settings: dict[str, Any] = {"suppress_tokens": [5], "bad_words_ids": [[5]]}
    settings |= dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size"), 2)
    for name, value in settings.items():
        assert torch.equal(*both(ours, theirs, max_new_tokens=9, **{name: value}))
        message = rf"{name} is .*, which changes other .*num_beams=1, or renormalize_logits=true"
        with pytest.raises(ConversionError, match=message):
            both(theirs, ours, num_beams=3, max_new_tokens=9, **{name: value})


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    st.dictionaries(st.text(max_size=3) | st.just("<no token 1>"), st.integers(0, 8), max_size=6), st.integers(9, 12)
)
def test_tokens_are_all_different_and_in_the_order_of_their_ids(vocabulary: dict[str, int], size: int) -> None:
    one_token_each = {token: token_id for token_id, token in {value: key for key, value in vocabulary.items()}.items()}
    tokens = list_tokens(one_token_each, size)
    assert len(set(tokens)) == len(tokens) == size
    assert all(tokens[token_id] == token for token, token_id in one_token_each.items())


def test_a_folder_is_all_that_translating_needs(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """The model has more tokens than the tokenizer, and settings of its own for the search."""
    ours = make(vocab_size=len(tokenizer) + 5)
    settings: dict[str, Any] = {"length_penalty_type": "gnmt", "num_beams": 3, "length_penalty": 0.6}
    ours.generation_config.update(**settings, early_stopping=True, allow_custom_entries=True)
    exported = export_ctranslate2(ours, tmp_path / "exported", tokenizer=tokenizer)
    shutil.move(exported, tmp_path / "moved")
    theirs, reloaded = load_for_ctranslate2(str(tmp_path / "moved"), device="cpu")
    assert theirs.config.to_dict() == ours.config.to_dict()
    assert theirs.num_parameters() == ours.num_parameters()
    assert (theirs.device, theirs.dtype) == (torch.device("cpu"), "float32")
    more: dict[str, Any] = {"num_return_sequences": 2, "max_new_tokens": 20, "progress": False}
    expected = translate_n_best(ours, tokenizer, TEXTS, **more)
    found = translate_n_best(theirs, reloaded, TEXTS, **more)
    texts = [[[one.text for one in of_text] for of_text in each] for each in (found, expected)]
    assert texts[0] == texts[1]
    assert found[0][0].score == pytest.approx(expected[0][0].score, abs=1e-4)


def test_two_vocabularies(tmp_path: Path) -> None:
    tokenizer = train_separate_tokenizer(TEXTS, [text.upper() for text in TEXTS], vocab_size=268)
    sizes = {"vocab_size": len(tokenizer), "decoder_vocab_size": tokenizer.target_vocab_size + 2}
    ours = make(**sizes, share_encoder_decoder_embeddings=False)
    theirs = export(ours, tmp_path, tokenizer=tokenizer)
    assert theirs.source_tokens == tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    ids = list(range(tokenizer.target_vocab_size))
    assert theirs.target_tokens[:-2] == tokenizer.target_tokenizer.convert_ids_to_tokens(ids)
    reloaded = AutoTokenizer.from_pretrained(tmp_path / "exported")
    settings: dict[str, Any] = {"max_new_tokens": 9, "progress": False}
    assert translate(theirs, reloaded, TEXTS, **settings) == translate(ours, tokenizer, TEXTS, **settings)


def test_losses_are_the_models_even_of_cut_references(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    ours = make(vocab_size=len(tokenizer))
    theirs = export(ours, tmp_path, tokenizer=tokenizer)
    sources = [text or "x" for text in TEXTS]
    expected = score_loss(ours, tokenizer, sources, sources, max_target_length=5, progress=False)
    found = score_loss(theirs, tokenizer, sources, sources, max_target_length=5, progress=False)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    ids, labels = torch.tensor([[5, 6, END]]), torch.tensor([[7, 8, 9]])  # nothing ends this one
    logits = logits_of(ours, input_ids=ids, labels=labels)
    loss = nn.functional.cross_entropy(logits[0], labels[0], reduction="sum")
    assert theirs.sum_losses(ids, torch.ones_like(ids), labels) == pytest.approx(float(loss), abs=1e-4)


def test_a_file_is_translated_and_knows_the_type(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """By its state a resumed translation knows a model."""
    export(make(vocab_size=len(tokenizer)), tmp_path, tokenizer=tokenizer)
    source, target = tmp_path / "source.txt", tmp_path / "target.txt"
    source.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    models = [CTranslate2Model(tmp_path / "exported", device="cpu", compute_type=name) for name in ("float32", "int8")]
    translate_file(models[0], tokenizer, source, target, max_new_tokens=5, progress=False)
    lines = target.read_text(encoding="utf-8").splitlines()
    assert lines == translate(models[0], tokenizer, TEXTS, max_new_tokens=5, progress=False)
    digests = [model.state_dict()["digest"] for model in models]
    assert not torch.equal(*digests)


def test_all_reasons_against_a_model_are_given_together(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    class Adapted(nn.Linear):
        """As adapters are: more than its weight."""

    ours = make(activation_function="mish", position_embedding_type="learned", vocab_size=20)
    ours.model.encoder.layers[0].fc1 = Adapted(16, 24)
    ours.generation_config.decoder_start_token_id = None
    ours.config.decoder_start_token_id = None
    with pytest.raises(ConversionError) as error:
        export_ctranslate2(ours, tmp_path / "out", tokenizer=tokenizer, quantization="int4", max_positions=9)
    lines = str(error.value).splitlines()
    beginnings = [
        "The model cannot be exported to CTranslate2:",
        "  - model.encoder.layers.0.fc1 is test_ctranslate2.Adapted, whose weights",
        "  - activation_function is 'mish' (can be: 'relu', 'gelu'",
        "  - max_positions is 9, but learned positions end where their table ends",
        "  - decoder_start_token_id is None: CTranslate2 needs one",
        f"  - the source vocabulary has the id {len(tokenizer) - 1}, and the model 20 tokens",
        f"  - the target vocabulary has the id {len(tokenizer) - 1}, and the model 20 tokens",
        "  - quantization is 'int4' (can be: float32, float16",
    ]
    assert [line[: len(beginning)] for line, beginning in zip(lines, beginnings, strict=True)] == beginnings
    sizes: dict[str, Any] = {"vocab_size": 20, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    other: Any = MarianMTModel(MarianConfig(**sizes, pad_token_id=1, decoder_start_token_id=1))
    with pytest.raises(ConversionError, match="it is MarianMTModel, not a model of this package"):
        export_ctranslate2(other, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_what_is_no_exported_model_is_explained(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"holds no model exported to CTranslate2 .*vanilla-transformer export --format"
    ):
        CTranslate2Model(tmp_path)
    export(make(), tmp_path)
    with pytest.raises(ValueError, match=r"patience is 0\.5; it must be at least 1"):
        CTranslate2Model(tmp_path / "exported", patience=0.5)
    for device in ("mps", "foo", "cuda:99"):
        with pytest.raises(ValueError, match=f"exported cannot be loaded on {device}: "):
            CTranslate2Model(tmp_path / "exported", device=device)
    with pytest.raises(ValueError, match=r"exported cannot be loaded on cpu: .*int5"):
        CTranslate2Model(tmp_path / "exported", device="cpu", compute_type="int5")
    assert json.loads((tmp_path / "exported" / "shared_vocabulary.json").read_text()) == [str(i) for i in range(17)]


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    export(make(), tmp_path)
    folder = tmp_path / "exported"
    # What CTranslate2 itself needs, and its own converters write.
    no_positions = b"""{"unk_token": "2", "bos_token": "2", "eos_token": "2", "decoder_start_token": "0"}"""
    damages = [("model.bin", b"\0" * 9), ("shared_vocabulary.json", None), ("generation_config.json", None)]
    damages += [("config.json", b"{}"), ("config.json", no_positions)]
    for name, content in [*damages, ("vanilla_transformer_config.json", b'{"dropout": 7.0}')]:
        whole = (folder / name).read_bytes()
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(f"{folder} cannot be loaded on cpu: ")):
            CTranslate2Model(folder, device="cpu")
        (folder / name).write_bytes(whole)
    CTranslate2Model(folder, device="cpu")


def test_ids_that_are_no_tokens_are_refused(tmp_path: Path) -> None:
    """As indices of lists, negative ones would name tokens from the end."""
    theirs = export(make(decoder_vocab_size=13, share_encoder_decoder_embeddings=False), tmp_path)
    for wrong in (-1, 17):
        ids = torch.tensor([[5, wrong, END]])
        with pytest.raises(ValueError, match=rf"The ids \[5, {wrong}, 2\] are not all within a vocabulary of 17"):
            theirs.generate(ids, torch.ones_like(ids))
        assert theirs.generate(ids, torch.tensor([[1, 0, 1]]), max_new_tokens=3).shape[0] == 1
    with pytest.raises(ValueError, match=r"The ids \[13\] are not all within a vocabulary of 13 tokens"):
        theirs.sum_losses(torch.tensor([[5, END]]), torch.ones(1, 2), torch.tensor([[13, -100]]))
    with pytest.raises(ValueError, match=r"The ids \[4, -1\] are not all"):
        theirs.generate(torch.tensor([[5]]), bad_words_ids=[[3], [4, -1]])


@pytest.mark.parametrize("padding", [0, 2])
def test_a_forced_end_without_a_limit_is_at_each_sentences_own(padding: int, tmp_path: Path) -> None:
    ours = make(lm_head_bias=True, seed=2, scale=0.2)
    with torch.no_grad():
        ours.lm_head.bias[END] = -9.0
    theirs = export(ours, tmp_path)
    ids, mask = (nn.functional.pad(tensor, (0, padding)) for tensor in pad(SOURCES[:3]))
    settings: dict[str, Any] = {"forced_eos_token_id": END}
    expected, found = (model.generate(input_ids=ids, attention_mask=mask, **settings) for model in (ours, theirs))
    assert torch.equal(found, expected)
    assert (expected == END).sum(dim=1).tolist() == [1, 1, 1]


def test_the_extra_is_named_where_ctranslate2_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    for attempt in (
        lambda: export_ctranslate2(make(), tmp_path / "out"),
        lambda: CTranslate2Model(tmp_path),
        lambda: load_for_ctranslate2("nowhere"),
    ):
        with pytest.raises(ImportError, match=r'pip install "vanilla-transformer\[export\]"'):
            attempt()
    assert not any(tmp_path.iterdir())
