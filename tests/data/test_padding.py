"""Batches padded from a dataset's columns are those of the library's collator."""

from typing import Any

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tiny_vanilla import make_model
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq

from vanilla_transformer import VanillaTransformerTokenizer
from vanilla_transformer.data.padding import PaddedColumns

SENTENCES = st.lists(st.integers(0, 30), max_size=9)
ROWS = [{"input_ids": [5, 6, 2], "labels": [7, 2]}, {"input_ids": [8, 2], "labels": [9, 4, 4, 2]}]


@given(
    pairs=st.lists(st.tuples(SENTENCES, SENTENCES), min_size=1, max_size=6).filter(any),
    has_mask=st.booleans(),
    side=st.sampled_from(["left", "right"]),
    multiple=st.sampled_from([None, 4]),
    has_model=st.booleans(),
    data=st.data(),
)
def test_they_are_those_of_the_collator(
    pairs: Any, has_mask: bool, side: str, multiple: int | None, has_model: bool, data: st.DataObject
) -> None:
    rows = [{"input_ids": source, "labels": target} for source, target in pairs]
    if has_mask:
        rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]
    dataset = Dataset.from_list([{name: [int(token) for token in row[name]] for name in row} for row in rows])
    tokenizer = VanillaTransformerTokenizer(padding_side=side)
    collator = DataCollatorForSeq2Seq(tokenizer, make_model() if has_model else None, pad_to_multiple_of=multiple)
    if not PaddedColumns.can_replace(dataset, collator):  # a column of empty lists has no type
        assert not all(any(row[name] for row in rows) for name in ("input_ids", "labels"))
        return
    indices = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=8))
    columns = PaddedColumns(dataset, collator)
    (batch,) = DataLoader(columns, batch_sampler=[indices], collate_fn=columns.collate)
    expected = collator([dataset[index] for index in indices])
    assert batch.keys() == expected.keys()
    for name, tensor in batch.items():
        assert tensor.dtype == expected[name].dtype == torch.int64
        assert torch.equal(tensor, expected[name]), name


class OwnCollator(DataCollatorForSeq2Seq):
    """A collator of a user's, which may do anything."""


@pytest.mark.parametrize(
    ("dataset", "collator"),
    [
        pytest.param(Dataset.from_list(ROWS), OwnCollator(VanillaTransformerTokenizer()), id="a collator of one's own"),
        pytest.param(
            Dataset.from_list(ROWS),
            DataCollatorForSeq2Seq(VanillaTransformerTokenizer(), padding="max_length", max_length=8),
            id="padding to a length",
        ),
        pytest.param(
            Dataset.from_list(ROWS).with_transform(lambda rows: rows),
            DataCollatorForSeq2Seq(VanillaTransformerTokenizer()),
            id="rows made anew each time",
        ),
        pytest.param(
            Dataset.from_list([{**row, "weight": 1.0} for row in ROWS]),
            DataCollatorForSeq2Seq(VanillaTransformerTokenizer()),
            id="another column",
        ),
    ],
)
def test_other_batches_are_left_to_the_collator(dataset: Dataset, collator: Any) -> None:
    assert PaddedColumns.can_replace(Dataset.from_list(ROWS), DataCollatorForSeq2Seq(VanillaTransformerTokenizer()))
    assert not PaddedColumns.can_replace(dataset, collator)
