"""Tokenizers over lists of tokens, and the batch that converted models are compared with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_vanilla import make_model
from transformers import AutoTokenizer

from vanilla_transformer.conversion.converted import Batch, compare_with, draw_batch
from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.conversion.tokenizers.vocabularies import align_special_tokens, make_word_tokenizer

NAMES: dict[str, Any] = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>"}
SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]
# With what would be a pattern, a special token, or nothing at all, if it were not a token.
WORDS = ["a@@", "b", "@@", "x@@y", "$&", "¶", "▁b", "￭,", "(￭", "<b>", "."]

sentences = st.lists(st.sampled_from([*WORDS, "unheard-of"]))


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("end_source", [False, True])
def test_tokens_are_looked_up_as_they_are(separate: bool, end_source: bool, tmp_path: Path) -> None:
    tokens, target_tokens = [*SPECIALS, *WORDS], [*SPECIALS, *reversed(WORDS)]
    tokenizer = make_word_tokenizer(
        tokens, target_tokens=target_tokens if separate else None, **NAMES, end_source=end_source
    )
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.separate_vocabs == (separate or not end_source)
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1, 2)

    @given(sentences, sentences)
    def check(source: list[str], target: list[str]) -> None:
        expected = [tokens.index(word) if word in tokens else 3 for word in source]
        labels = [(target_tokens if separate else tokens).index(word) if word in tokens else 3 for word in target]
        for each in (tokenizer, again):
            batch = each(" \t".join(source), text_target=f"  {' '.join(target)} ")
            assert batch["input_ids"] == ([*expected, 2] if end_source else expected)
            assert batch["labels"] == [*labels, 2]
            known = " ".join(word for word in target if word in tokens)
            assert each.decode(batch["labels"], skip_special_tokens=True) == known

    check()
    assert tokenizer("</s> <unk>")["input_ids"][:2] == [2, 3]


def remove_marks(words: list[str]) -> str:
    """What subword-nmt's README does with sed: s/(@@ )|(@@ ?$)//g."""
    return (" ".join(words) + " ").replace("@@ ", "").removesuffix(" ")


@given(st.lists(st.sampled_from(WORDS)))
def test_pieces_are_joined(words: list[str]) -> None:
    ids = [4 + WORDS.index(word) for word in words]

    def decode(joiner: str) -> str:
        return str(JOINERS[joiner].decode([*ids, 2, 1], skip_special_tokens=True))

    assert decode("@@") == remove_marks(words)
    assert decode("￭") == " ".join(words).replace(" ￭", "￭").replace("￭ ", "￭").replace("￭", "")
    assert decode("▁") == "".join(words).replace("▁", " ").removeprefix(" ")


JOINERS = {joiner: make_word_tokenizer([*SPECIALS, *WORDS], **NAMES, joiner=joiner) for joiner in ("@@", "▁", "￭")}


def test_vocabularies_that_cannot_be_a_models() -> None:
    tokens = [*SPECIALS, "a"]
    for source, target, message in (
        ([*tokens, "a", "b", "b"], None, "the source vocabulary has 2 tokens twice, first 'a'"),
        (tokens[1:], tokens[:2], "the source vocabulary lacks '<s>'; the target vocabulary lacks '</s>'; .*'<unk>'"),
        (tokens, ["a", *SPECIALS], "'<s>' has the ids 0 and 1 .*; '<pad>' has the ids 1 and 2"),
    ):
        with pytest.raises(ConversionError, match=message):
            make_word_tokenizer(source, target_tokens=target, **NAMES)


@given(st.permutations([*SPECIALS, *WORDS]), st.permutations([*SPECIALS, *"abcdefghijkl"]))
def test_special_tokens_are_moved_to_the_same_places(tokens: list[str], target_tokens: list[str]) -> None:
    order = align_special_tokens(tokens, target_tokens, SPECIALS)
    assert sorted(order) == list(range(len(target_tokens)))
    moved = [target_tokens[index] for index in order]
    assert all(moved.index(token) == tokens.index(token) for token in SPECIALS)
    untouched = set(range(len(order))) - {each.index(token) for each in (tokens, target_tokens) for token in SPECIALS}
    assert all(order[index] == index for index in untouched)


def test_tokens_for_which_there_is_no_place_stay() -> None:
    assert align_special_tokens(["a", "b", "c", "<s>"], ["<s>", "x"], ["<s>", "</s>"]) == [0, 1]


def test_both_models_get_the_same_batch_in_float32() -> None:
    model = make_model(decoder_vocab_size=9, share_encoder_decoder_embeddings=False)
    model.to(dtype=torch.bfloat16)  # type: ignore[call-arg]
    batches: list[Batch] = []

    def compute(batch: Batch) -> torch.Tensor:
        batches.append(batch)
        return torch.zeros(())

    expected, actual = compare_with(compute, model)
    (batch,) = batches
    ids, mask, targets = batch["input_ids"], batch["attention_mask"], batch["decoder_input_ids"]
    config = model.config
    assert torch.equal(expected, torch.zeros(()))
    assert (actual.dtype, actual.shape, model.dtype) == (torch.float32, (*targets.shape, 9), torch.bfloat16)
    assert torch.equal(ids == config.pad_token_id, mask == 0)
    assert len(set(mask.sum(dim=1).tolist())) == len(mask)
    assert (targets[:, 0] == config.decoder_start_token_id).all()
    assert targets.max() < 9
    assert all(torch.equal(tensor, draw_batch(config)[name]) for name, tensor in batch.items())


def test_a_flag_that_is_set_changes_nothing_else_of_the_target() -> None:
    """Only the target ends with `</s>`, as in OpenNMT-py: that stays, whatever is said of `<s>`."""
    tokenizer: Any = make_word_tokenizer(
        [*SPECIALS, *WORDS], target_tokens=[*SPECIALS, *WORDS], **NAMES, end_source=False
    )
    word, bos, eos = tokenizer.convert_tokens_to_ids([WORDS[0], tokenizer.bos_token, tokenizer.eos_token])

    def read() -> tuple[list[int], list[int]]:
        batch = tokenizer(WORDS[0], text_target=WORDS[0])
        return batch["input_ids"], batch["labels"]

    assert read() == ([word], [word, eos])
    tokenizer.add_bos_token = True
    assert read() == ([bos, word], [bos, word, eos])
    tokenizer.add_bos_token = False
    assert read() == ([word], [word, eos])
    tokenizer.add_eos_token = True
    assert read() == ([word, eos], [word, eos])
    tokenizer.add_eos_token = False
    assert read() == ([word], [word])
