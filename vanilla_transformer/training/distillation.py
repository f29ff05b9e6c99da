"""Word-level knowledge distillation (Kim & Rush, 2016): a teacher's probabilities of every token are learned.

Shapes: B batch, T target length, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from vanilla_transformer.model.loss_vanilla_transformer import IGNORED_LABEL


def make_teacher_inputs(teacher: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch made for the student, for the teacher: it may begin targets with another symbol, and needs no loss."""
    own = {name: value for name, value in inputs.items() if name != "labels" and not name.startswith("decoder_")}
    shift: Any = getattr(teacher, "prepare_decoder_input_ids_from_labels", None)
    labels = inputs["labels"]
    own |= {"labels": labels} if shift is None else {"decoder_input_ids": shift(labels=labels)}
    return own | {"use_cache": False}


def sum_divergences_from(wanted: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over tokens of KL(teacher || student) between logits `wanted` and `logits` (B, T, V), in nats: a scalar.

    Its gradient is that of the cross-entropy with the teacher's probabilities. `labels` (B, T) say which tokens count:
    all but those of -100.
    """
    counted = labels != IGNORED_LABEL
    teacher, student = (each[counted].float().log_softmax(dim=-1) for each in (wanted, logits))
    return (teacher.exp() * (teacher - student)).sum()
