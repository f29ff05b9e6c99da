"""Dual conditional cross-entropy, against one forward pass for each pair and the formula written out."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from letters import TOKENIZER as LETTERS
from letters import make_letters_model
from library_models import make_marian
from library_models import make_tokenizer as make_marian_tokenizer
from tiny_seq2seq import make_model, make_tokenizer
from tiny_translations import random_sentences

from vanilla_transformer.data.cleaning import clean_pairs, make_rule
from vanilla_transformer.inference.cleaning import ALL_RULES
from vanilla_transformer.inference.cross_entropy import DualCrossEntropyFilter
from vanilla_transformer.inference.losses import score_loss, score_pairs
from vanilla_transformer.tasks import record_directions

TOKENIZER = make_tokenizer()
MODELS: list[Any] = [make_model(seed=seed) for seed in (1, 2)]
PAIRS = list(zip(random_sentences(9), random_sentences(9, seed=1), strict=True))


def entropy(model: Any, source: str, target: str) -> float:
    """The oracle: nats per token of the target, </s> included, without a batch."""
    ids = [torch.tensor([TOKENIZER(text)["input_ids"]]) for text in (source, target)]
    start = torch.tensor([[model.config.decoder_start_token_id]])
    with torch.no_grad():
        logits = model(input_ids=ids[0], decoder_input_ids=torch.cat([start, ids[1][:, :-1]], dim=1)).logits[0]
    total = 0.0
    for row, token in zip(logits.double(), ids[1][0].tolist(), strict=True):
        total -= row[token].item() - math.log(row.exp().sum().item())
    return total / ids[1].shape[1]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    found = []
    for model in MODELS:
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        TOKENIZER.save_pretrained(folder)
        found.append(str(folder))
    return found


def make(folders: list[str], **parameters: Any) -> DualCrossEntropyFilter:
    names = dict(zip(("model", "reverse_model"), folders, strict=False))
    rule = make_rule("DualCrossEntropyFilter", {**names, "batch_size": 2, "device": "cpu", **parameters}, ALL_RULES)
    assert isinstance(rule, DualCrossEntropyFilter)
    return rule


def test_scores_of_one_model_and_two(folders: list[str]) -> None:
    forward = [entropy(MODELS[0], *pair) for pair in PAIRS]
    reverse = [entropy(MODELS[1], *pair[::-1]) for pair in PAIRS]
    assert make(folders[:1], share=1.0).find_values(PAIRS) == pytest.approx(forward, abs=1e-5)
    expected = [abs(one - other) + (one + other) / 2 for one, other in zip(forward, reverse, strict=True)]
    assert make(folders, share=1.0).find_values(PAIRS) == pytest.approx(expected, abs=1e-5)
    assert make(folders, share=1.0).find_values([]) == []
    sides: Any = [list(side) for side in zip(*PAIRS, strict=True)]
    weights = [len(TOKENIZER(target)["input_ids"]) for _, target in PAIRS]
    mean = np.average(score_pairs(MODELS[0], TOKENIZER, *sides), weights=weights)
    assert score_loss(MODELS[0], TOKENIZER, *sides, progress=False)["loss"] == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_a_share_and_a_threshold(folders: list[str], share: float) -> None:
    rule = make(folders, share=share)
    scores = np.array(rule.find_values(PAIRS), dtype=np.float32)
    best = sorted(range(len(PAIRS)), key=lambda row: scores[row])[: round(share * len(PAIRS))]
    expected = [PAIRS[row] for row in sorted(best)]
    assert clean_pairs([rule], PAIRS)[0] == expected
    parts = list(rule.decide([scores[:4], scores[4:4], scores[4:]]))
    assert np.flatnonzero(np.concatenate(parts)).tolist() == sorted(best), "of all parts together"
    limit = float(max(scores[best])) + 1e-4
    assert clean_pairs([make(folders, threshold=limit)], PAIRS)[0] == expected
    assert list(rule.decide([])) == []


def test_a_text_that_is_too_long_is_told_by_its_beginning(
    folders: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = make(folders[:1], share=1.0)
    monkeypatch.setattr(rule._models[0][1], "model_max_length", 3)
    rule.find_values(PAIRS[:1])
    assert [f"source {PAIRS[0][0]!r}: truncated to 3" in record.message for record in caplog.records] == [True, False]


def test_a_threshold_is_a_number() -> None:
    for name in ("threshold", "share"):
        with pytest.raises(ValueError, match=f"{name} is '1e-3'; it must be a number"):
            make(["model"], **{name: "1e-3"})


def test_other_weights_are_another_rule(folders: list[str]) -> None:
    one, other = (make([folder], share=0.5).identify()["models"] for folder in folders)
    assert one != other
    rule = make(folders[:1], share=0.5)
    assert rule.identify() == make(folders[:1], share=0.5, batch_size=1, device="cpu").identify(), (
        "these decide nothing"
    )


@pytest.mark.parametrize("languages", ["en", ["eng_Latn"], 5, ["en", 1]])
def test_languages_are_two(languages: Any) -> None:
    with pytest.raises(ValueError, match=r"languages is .*; it must be two names, such as \[en, de\]"):
        make(["model"], share=0.5, languages=languages)


def test_a_model_of_several_languages_is_told_which(tmp_path: Path) -> None:
    model: Any = make_model(seed=1)
    record_directions(model.config, {("en", "de"): "<2de>", ("de", "en"): "<2en>"})
    for part in (model, TOKENIZER):
        part.save_pretrained(tmp_path)
    both = [str(tmp_path)] * 2
    forward = [entropy(model, f"<2de>{source}", target) for source, target in PAIRS]
    reverse = [entropy(model, f"<2en>{target}", source) for source, target in PAIRS]
    expected = [abs(one - other) + (one + other) / 2 for one, other in zip(forward, reverse, strict=True)]
    assert make(both, share=1.0, languages=["en", "de"]).find_values(PAIRS) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="languages must be given, since a model knows several"):
        make(both, share=1.0).find_values(PAIRS)


def test_a_model_of_the_other_direction_is_refused(tmp_path: Path) -> None:
    for part in (make_letters_model(langs=["en", "de"]), LETTERS):
        part.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"The model translates en to de \(langs in its config.json\), not de to en"):
        make([str(tmp_path)], share=1.0, languages=["de", "en"]).find_values(PAIRS)


def test_a_model_of_marian_scores(tmp_path: Path) -> None:
    model, tokenizer = make_marian(), make_marian_tokenizer()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    scores = make([str(tmp_path)], share=1.0).find_values([("a b", "b a"), ("a", "a")])
    assert all(math.isfinite(score) and score > 0 for score in scores)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"share": 0.5, "model": ""}, "model must be given"),
        ({}, "threshold is None and share is None; one of them"),
        ({"share": 0.5, "threshold": 1.0}, "threshold is 1.0 and share is 0.5; one of them"),
        ({"share": 0.0}, "share is 0.0; it must be above 0"),
        ({"share": 0.5, "batch_size": "2"}, "batch_size is '2'; it must be a number"),
    ],
)
def test_wrong_parameters_are_refused(folders: list[str], parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(folders, **parameters)
