"""R-Drop: the loss of two passes, against the publication's formula written as loops."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from test_trainer import make_model, make_rows, make_trainer

from vanilla_transformer.training.arguments import TranslationTrainingArguments


def naive_loss(logits: Any, labels: Any, smoothing: float, weight: float) -> float:
    """Equation 4 of the publication by half, since its first term is a sum of two passes: (2 B, T, V) and (2 B, T)."""
    probabilities = logits.double().softmax(dim=-1).tolist()
    size, vocab_size = len(labels) // 2, logits.shape[-1]
    total, count = 0.0, 0
    for row in range(size):
        for place, label in enumerate(labels[row].tolist()):
            if label == -100:
                continue
            count += 1
            p, q = probabilities[row][place], probabilities[row + size][place]
            for each in (p, q):
                smooth = -sum(map(math.log, each)) / vocab_size
                total += ((1 - smoothing) * -math.log(each[label]) + smoothing * smooth) / 2
            there = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            back = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
            total += weight / 2 * (there + back) / 2
    return total / count


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_it_is_the_publications_formula(tmp_path: Path, smoothing: float) -> None:
    rows = make_rows(5)
    trainer = make_trainer(tmp_path, rows, model=make_model(dropout=0.3, label_smoothing=smoothing), r_drop=3.0)
    model: Any = trainer.model
    batch = trainer.data_collator(rows)
    model.train()
    for count in (None, batch["labels"].ne(-100).sum()):
        loss, outputs = trainer.compute_loss(model, dict(batch), True, count)
        halves = outputs.logits.chunk(2)
        assert not torch.allclose(*halves), "each pass has its own dropout"
        labels = torch.cat([batch["labels"], batch["labels"]])
        assert float(loss.detach()) == pytest.approx(
            naive_loss(outputs.logits.detach(), labels, smoothing, 3.0), rel=1e-5
        )
    with torch.no_grad():
        in_evaluation, own = trainer.compute_loss(model.eval(), dict(batch)), model(**batch).loss
    assert float(in_evaluation) == pytest.approx(float(own), rel=1e-6)


def test_updates_in_parts_are_those_of_the_whole(tmp_path: Path) -> None:
    """Without dropout both passes are one, so that parts of a batch can be compared with the batch."""
    rows = Dataset.from_list(make_rows(8, longest=6))
    models: list[Any] = []
    for name, changes in (
        ("whole", {}),
        ("parts", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    ):
        torch.manual_seed(1)
        settings: dict[str, Any] = {"max_source_tokens": None, "per_device_train_batch_size": 8, "max_steps": 2}
        settings |= {"r_drop": 2.0, "train_sampling_strategy": "sequential", **changes}
        trainer = make_trainer(tmp_path / name, rows, model=make_model(dropout=0.0), **settings)
        trainer.train()
        models.append(trainer.model)
    one, other = (dict(model.named_parameters()) for model in models)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], atol=2e-5, rtol=1e-4)


def test_a_negative_weight_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"r_drop=-1\.0: must not be negative"):
        TranslationTrainingArguments(output_dir=str(tmp_path), r_drop=-1.0)
