"""BPE-dropout: other tokens for the same text each time, by the paper's algorithm, and nothing else is touched."""

import json
import math
import pickle
import random
import unicodedata
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from vanilla_transformer.data.subword_regularization import BpeDropout, measure_length_growth
from vanilla_transformer.data.tokenizer_training import train_separate_tokenizer, train_tokenizer

SOURCES = ["a man rides a horse", "two men ride two horses", "the man is riding", "a horse is a horse"]
TARGETS = ["ein Mann reitet ein Pferd", "zwei Männer reiten zwei Pferde", "der Mann reitet", "ein Pferd ist ein Pferd"]
PAIRS = {"source": SOURCES, "target": TARGETS}

SHARED = train_tokenizer((SOURCES + TARGETS) * 3, vocab_size=330, show_progress=False)
SEPARATE = train_separate_tokenizer(SOURCES * 3, TARGETS * 3, vocab_size=290, target_vocab_size=295)
TOKENIZERS = pytest.mark.parametrize("tokenizer", [SHARED, SEPARATE], ids=["shared", "separate"])


def draws(dropout: BpeDropout, text: str, count: int) -> list[tuple[int, ...]]:
    batch = dropout({"source": [text] * count, "target": [""] * count})
    return [tuple(ids) for ids in batch["input_ids"]]


@TOKENIZERS
@given(text=st.text(), p=st.floats(min_value=0, max_value=1, exclude_max=True))
@example(text="a man rides a horse", p=0.9)
@example(text="  two  spaces 🐎 é\n", p=0.5)
def test_decoding_gives_the_text_back(tokenizer: Any, text: str, p: float) -> None:
    text = text.replace("<", "")  # no literal special tokens
    drawn = BpeDropout(tokenizer, p)({"source": text, "target": text})
    expected = unicodedata.normalize("NFC", text)
    assert tokenizer.source_tokenizer.decode(drawn["input_ids"], skip_special_tokens=True) == expected
    assert tokenizer.decode(drawn["labels"], skip_special_tokens=True) == expected
    assert drawn["attention_mask"] == [1] * len(drawn["input_ids"])
    for ids in (drawn["input_ids"], drawn["labels"]):
        assert ids[-1] == 2
        assert not {0, 1, 2, 3} & set(ids[:-1])


@TOKENIZERS
def test_without_dropout_the_tokens_are_the_tokenizers(tokenizer: Any) -> None:
    expected = dict(tokenizer(SOURCES, text_target=TARGETS))
    assert BpeDropout(tokenizer, 0.0)(PAIRS) == expected
    dropout = BpeDropout(tokenizer, 0.0, source_column="en", target_column="de")
    assert dropout({"en": SOURCES, "de": TARGETS}) == expected


def segment(word: str, merges: dict[tuple[str, str], int], p: float, chance: random.Random) -> tuple[str, ...]:
    """The paper's Algorithm 1: of the merges possible at each step, those not dropped compete; without any, it ends."""
    symbols = list(word)
    while True:
        pairs = [(index, pair) for index, pair in enumerate(pairwise(symbols)) if pair in merges]
        possible = [(merges[pair], index) for index, pair in pairs if chance.random() >= p]
        if not possible:
            return tuple(symbols)
        _, index = min(possible)
        symbols[index : index + 2] = ["".join(symbols[index : index + 2])]


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_segmentations_are_as_frequent_as_in_the_paper(p: float) -> None:
    model = json.loads(SHARED.backend_tokenizer.to_str())["model"]
    merges = {(first, second): rank for rank, (first, second) in enumerate(model["merges"])}
    chance = random.Random(0)
    count = 20_000
    expected = Counter(segment("Ġhorses", merges, p, chance) for _ in range(count))
    drawn = draws(BpeDropout(SHARED, p), "horses", count)
    found = Counter(tuple(SHARED.convert_ids_to_tokens(list(ids[:-1]))) for ids in drawn)
    assert len(expected) > 5
    for segmentation in expected | found:
        rate = (expected[segmentation] + found[segmentation]) / (2 * count)
        # Six standard deviations of the difference of two counts: by chance, one run in millions fails.
        tolerance = 6 * math.sqrt(2 * count * rate * (1 - rate)) + 1
        assert abs(expected[segmentation] - found[segmentation]) <= tolerance, segmentation


def test_added_tokens_are_never_cut() -> None:
    tokenizer = pickle.loads(pickle.dumps(SHARED))
    tokenizer.add_tokens(["horsemen"])
    drawn = draws(BpeDropout(tokenizer, 0.9), "two horsemen</s>", 50)
    added = tokenizer.convert_tokens_to_ids("horsemen")
    assert all(ids[-3:] == (added, 2, 2) for ids in drawn)


def test_texts_are_cut_to_their_limits() -> None:
    drawn = BpeDropout(SEPARATE, 0.5, max_source_length=5, max_target_length=3)(PAIRS)
    for name, limit in (("input_ids", 5), ("labels", 3)):
        assert all(len(ids) <= limit and ids[-1] == 2 for ids in drawn[name])
        assert any(len(ids) == limit for ids in drawn[name])
    unlimited = BpeDropout(SHARED, 0.0)({"source": "a " * 5000, "target": ""})
    assert len(unlimited["input_ids"]) > SHARED.model_max_length


@TOKENIZERS
def test_the_tokenizer_itself_stays_without_dropout(tokenizer: Any) -> None:
    sides = (tokenizer.source_tokenizer.backend_tokenizer, tokenizer.target_tokenizer.backend_tokenizer)
    before = [json.loads(side.to_str()) for side in sides]
    expected = tokenizer(SOURCES, text_target=TARGETS)
    BpeDropout(tokenizer, 0.9)(PAIRS)
    assert all(tokenizer(SOURCES, text_target=TARGETS) == expected for _ in range(5))
    assert [json.loads(side.to_str()) for side in sides] == before
    assert all(side.model.dropout is None for side in sides)


@TOKENIZERS
def test_a_dataset_is_tokenized_anew_in_every_epoch(tokenizer: Any) -> None:
    pairs = Dataset.from_dict(PAIRS).with_transform(BpeDropout(tokenizer, 0.5))
    epochs = [[pairs[index] for index in range(len(pairs))] for _ in range(10)]
    for name in ("input_ids", "labels"):
        assert len({json.dumps([row[name] for row in rows]) for rows in epochs}) == 10
    assert pairs[0].keys() == {"input_ids", "attention_mask", "labels"}
    assert len(pairs[:3]["labels"]) == 3
    decoded = [tokenizer.decode(pairs[index]["labels"], skip_special_tokens=True) for index in range(len(pairs))]
    assert decoded == TARGETS


def test_a_stream_is_tokenized_anew_in_every_epoch() -> None:
    stream = IterableDataset.from_generator(
        lambda: ({"source": a, "target": b} for a, b in zip(SOURCES, TARGETS, strict=True))
    )
    for options in ({}, {"batched": True, "batch_size": 3}):
        drawn = stream.map(BpeDropout(SHARED, 0.5), remove_columns=["source", "target"], **options)
        epochs = [list(drawn) for _ in range(10)]
        assert len({json.dumps(epoch) for epoch in epochs}) == 10
        assert SHARED.batch_decode([row["labels"] for row in epochs[0]], skip_special_tokens=True) == TARGETS


def test_worker_processes_draw_on_their_own() -> None:
    """Forked workers inherit their parent's random state, and would all draw the same in every epoch."""
    pairs = Dataset.from_dict({"source": [SOURCES[0]] * 8, "target": [TARGETS[0]] * 8})
    pairs = pairs.with_transform(BpeDropout(SHARED, 0.5))
    pairs[0]  # the parent has drawn before
    loader: Any = DataLoader(pairs, batch_size=4, num_workers=2, collate_fn=list, multiprocessing_context="fork")
    batches = [json.dumps(batch) for _ in range(3) for batch in loader]
    assert len(batches) == 6
    assert len(set(batches)) == 6


def test_a_copy_draws_too() -> None:
    dropout = pickle.loads(pickle.dumps(BpeDropout(SEPARATE, 0.5, 20)))
    assert (dropout.p, dropout.max_source_length, dropout.max_target_length) == (0.5, 20, None)
    assert len(set(draws(dropout, "two men ride two horses", 20))) > 10


def test_growth_of_lengths() -> None:
    assert measure_length_growth(SEPARATE, 0.0, SOURCES, TARGETS) == (1.0, 1.0)
    source, target = measure_length_growth(SEPARATE, 0.5, SOURCES * 200, TARGETS * 200)
    dropout = BpeDropout(SEPARATE, 0.5)
    drawn = [dropout(PAIRS) for _ in range(200)]
    plain = SEPARATE(SOURCES, text_target=TARGETS)
    for name, factor in (("input_ids", source), ("labels", target)):
        mean = sum(len(ids) for batch in drawn for ids in batch[name]) / 200
        assert factor == pytest.approx(mean / sum(map(len, plain[name])), rel=0.05)
        assert factor > 1.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p": 1.0}, r"bpe_dropout=1\.0: must be at least 0 and less than 1"),
        ({"p": float("nan")}, "bpe_dropout=nan"),
        ({"p": 0.1, "max_source_length": 0}, "max_source_length=0: must be at least 1"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BpeDropout(SHARED, **options)


def test_tokenizers_without_merges_are_refused() -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>")))
    with pytest.raises(ValueError, match="needs byte-pair merges, but TokenizersBackend is a WordLevel model"):
        BpeDropout(words, 0.1)
    with pytest.raises(ValueError, match="ByT5Tokenizer is no fast tokenizer"):
        BpeDropout(ByT5Tokenizer(), 0.1)
