"""Word-level knowledge distillation (Kim & Rush, 2016): a teacher's probabilities of every token are learned.

Shapes: B batch, T target length, n tokens, V vocabulary.
"""

import torch

from .token_losses import normalize, score, subtract_labels_


class TeacherLoss:
    """`1 - weight` times the cross-entropy with labels, and `weight` times KL(teacher || student), in nats.

    Args:
        wanted: The teacher's logits (B, T, V).
        label_smoothing: Of the labels.
        weight: From 0 to 1.
    """

    def __init__(self, wanted: torch.Tensor, label_smoothing: float, weight: float) -> None:
        self.wanted = wanted.flatten(0, 1)
        self.label_smoothing = label_smoothing
        self.weight = weight

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum for the student's logits (1, n, V) at n places of the B T, and its gradient."""
        share, (student,), teacher = 1 - self.weight, logits, self.wanted[places].float()
        (by_student, log_z), (by_teacher, teachers_log_z) = normalize(student), normalize(teacher)
        total = share * (log_z - score(student, labels, self.label_smoothing)).sum()
        total += self.weight * (by_teacher * teacher.sub_(student)).sum()
        total += self.weight * (log_z - teachers_log_z).sum()
        gradient = by_student.sub_(by_teacher, alpha=self.weight)
        subtract_labels_(gradient, labels, self.label_smoothing, share)
        return total, gradient[None]
