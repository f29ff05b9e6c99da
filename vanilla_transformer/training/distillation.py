"""Word-level knowledge distillation (Kim & Rush, 2016): a teacher's probabilities of every token are learned.

Shapes: B batch, T target length, V vocabulary.
"""

import torch

from vanilla_transformer.model.loss_vanilla_transformer import IGNORED_LABEL


def sum_divergences_from(wanted: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over tokens of KL(teacher || student) between logits `wanted` and `logits` (B, T, V), in nats: a scalar.

    Its gradient is that of the cross-entropy with the teacher's probabilities. `labels` (B, T) say which tokens count:
    all but those of -100.
    """
    counted = labels != IGNORED_LABEL
    teacher, student = (each[counted].float().log_softmax(dim=-1) for each in (wanted, logits))
    return (teacher.exp() * (teacher - student)).sum()
