"""The loss of given translations, checked against a token-by-token loop."""

import math
from typing import Any

import pytest
import tiny_vanilla
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library_models import make_m2m100
from tiny_seq2seq import MAX_TOKENS, WORDS, make_model, make_tokenizer, random_pairs

from vanilla_transformer.inference.losses import score_loss

MODEL: Any = make_model()
TOKENIZER = make_tokenizer()

sentences = st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)


def naive_loss(model: Any, source: list[int], target: list[int]) -> list[float]:
    """The oracle: negative log-likelihood of each target token, one forward pass per token, no padding anywhere."""
    losses = []
    for position, token in enumerate(target):
        decoder_input_ids = torch.tensor([[model.config.decoder_start_token_id, *target[:position]]])
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([source]), decoder_input_ids=decoder_input_ids).logits[0, -1].double()
        losses.append(float(logits.exp().sum().log() - logits[token]))
    return losses


def test_what_has_no_loss_is_refused() -> None:
    for sources, targets, counts in ((["a"], ["a", "b"], (1, 2)), ([], [], (0, 0))):
        with pytest.raises(ValueError, match="{} sources and {} targets".format(*counts)):
            score_loss(MODEL, TOKENIZER, sources, targets, progress=False)
    with pytest.raises(ValueError, match="batch_size is 0"):
        score_loss(MODEL, TOKENIZER, ["w1"], ["w1"], batch_size=0, progress=False)


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_loss_equals_a_loop_over_tokens(batch_size: int) -> None:
    sources, targets = random_pairs(12)
    targets[3] = ""
    encoded = zip(TOKENIZER(sources).input_ids, TOKENIZER(targets).input_ids, strict=True)
    expected = [loss for source, target in encoded for loss in naive_loss(MODEL, source, target)]
    scores = score_loss(MODEL, TOKENIZER, sources, targets, batch_size=batch_size, progress=False)
    assert scores["tokens"] == len(expected) == sum(len(target.split()) + 1 for target in targets)
    assert scores["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-6)
    assert scores["perplexity"] == pytest.approx(math.exp(sum(expected) / len(expected)), rel=1e-5)


@settings(max_examples=10)
@given(pairs=st.lists(st.tuples(sentences, sentences), min_size=1, max_size=8), batch_size=st.integers(1, 5))
def test_loss_of_a_corpus_is_the_mean_of_its_pairs_by_tokens(pairs: list[tuple[str, str]], batch_size: int) -> None:
    sources, targets = map(list, zip(*pairs, strict=True))
    together = score_loss(MODEL, TOKENIZER, sources, targets, batch_size=batch_size, progress=False)
    alone = [score_loss(MODEL, TOKENIZER, [source], [target], progress=False) for source, target in pairs]
    tokens = sum(scores["tokens"] for scores in alone)
    assert together["tokens"] == tokens
    mean = sum(scores["loss"] * scores["tokens"] for scores in alone) / tokens
    assert together["loss"] == pytest.approx(mean, rel=1e-5)


def test_loss_of_a_model_that_shifts_labels_itself() -> None:
    model = make_m2m100(len(TOKENIZER))
    assert not hasattr(model, "prepare_decoder_input_ids_from_labels"), "the other way is tested above"
    sources, targets = random_pairs(5)
    encoded = zip(TOKENIZER(sources).input_ids, TOKENIZER(targets).input_ids, strict=True)
    expected = [loss for source, target in encoded for loss in naive_loss(model, source, target)]
    scores = score_loss(model, TOKENIZER, sources, targets, batch_size=2, progress=False)
    assert scores["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)


def test_loss_neither_trains_nor_drops_out_and_restores_the_training_flag() -> None:
    sources, targets = random_pairs(5)
    model = make_model()
    model.train()
    scores = score_loss(model, TOKENIZER, sources, targets, progress=False)
    assert scores == score_loss(MODEL, TOKENIZER, sources, targets, progress=False)
    assert model.training
    assert model.model.encoder.training


def test_overlong_pairs_are_truncated_with_a_warning_that_names_the_line(caplog: pytest.LogCaptureFixture) -> None:
    long, cut, shortened = (" ".join(WORDS[:length]) for length in (30, MAX_TOKENS - 1, 4))
    scores = score_loss(MODEL, TOKENIZER, ["w1", long], [long, "w2"], max_target_length=5, progress=False)
    assert caplog.messages == [
        f"source line 2: truncated to {MAX_TOKENS} of its 31 tokens",
        "target line 1: truncated to 5 of its 31 tokens",
    ]
    expected = score_loss(MODEL, TOKENIZER, ["w1", cut], [shortened, "w2"], progress=False)
    assert scores["tokens"] == 7
    assert scores["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_learned_positions_limit_what_is_scored(caplog: pytest.LogCaptureFixture) -> None:
    sizes: Any = {"position_embedding_type": "learned", "max_position_embeddings": 8}
    model = tiny_vanilla.make_model(vocab_size=len(TOKENIZER), **sizes)
    long, cut = (" ".join(WORDS[:length]) for length in (20, 7))
    scores = score_loss(model, TOKENIZER, [long, "w1"], ["w1", long], progress=False)
    assert [message.split(":")[0] for message in caplog.messages] == ["source line 1", "target line 2"]
    assert scores == score_loss(model, TOKENIZER, [cut, "w1"], ["w1", cut], progress=False)
