"""R-Drop (Liang et al., 2021): two passes with different dropout, whose predictions are to agree.

Shapes: n tokens, V vocabulary.
"""

from typing import Any

import torch

from .token_losses import normalize, score, subtract_labels_


def repeat_rows(inputs: dict[str, Any]) -> dict[str, Any]:
    """The batch twice, as one of 2 B rows: dropout treats every row on its own."""
    return {name: torch.cat([each, each]) if torch.is_tensor(each) else each for name, each in inputs.items()}


class RDropLoss:
    """Sums of cross-entropies of both passes, and `weight` times (KL(p || q) + KL(q || p)) / 2 of their predictions."""

    def __init__(self, label_smoothing: float, weight: float) -> None:
        self.label_smoothing = label_smoothing
        self.weight = weight

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum for logits (2, n, V) and labels (n, 1), and its gradient."""
        (p, q), log_z = normalize(logits)
        cross_entropies = log_z - score(logits, labels, self.label_smoothing)
        apart = logits[0].sub_(logits[1]).sub_(log_z[0] - log_z[1])  # log p - log q
        by_p, by_q = p * apart, apart.mul_(q)
        there, back = by_p.sum(dim=-1, keepdim=True), -by_q.sum(dim=-1, keepdim=True)  # KL(p || q), KL(q || p)
        half = self.weight / 2
        total = cross_entropies.sum() + half * (there + back).sum()
        by_p.mul_(half).addcmul_(p, 1 + half * (1 - there)).sub_(q, alpha=half)
        by_q.mul_(-half).addcmul_(q, 1 + half * (1 - back)).sub_(p, alpha=half)
        gradient = torch.stack([by_p, by_q])
        subtract_labels_(gradient, labels, self.label_smoothing, share=1.0)
        return total, gradient
