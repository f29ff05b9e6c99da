"""Solutions of the tutorial's twelve exercises, in their order. Try first: each check gives hints.

The notebooks' exercises are these functions without their bodies (build.py).

Shapes: B  batch, S  source length, T  target length, L  either, K  length of what is looked at, D  d_model, H  heads,
d_k and d_v  size of one head's keys and values, V  vocabulary. Masks are true where looking is allowed.
"""

import math
from collections.abc import Callable

import torch


def positional_encoding(length: int, d_model: int) -> torch.Tensor:
    """The sinusoids of positions 0 to length - 1: (length, d_model)."""
    positions = torch.arange(length, dtype=torch.float64)[:, None]
    angles = positions / 10000 ** (torch.arange(0, d_model, 2) / d_model)  # (length, d_model / 2)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).float()


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Equation 1, of (..., L, d_k), (..., K, d_k), (..., K, d_v) and a mask (..., L or 1, K): (..., L, d_v)."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    weights = scores.masked_fill(~allowed, -math.inf).softmax(dim=-1)
    return weights @ value


def split_heads(states: torch.Tensor, heads: int) -> torch.Tensor:
    """From (B, L, heads * d_k) to (B, heads, L, d_k)."""
    return states.unflatten(-1, (heads, -1)).transpose(1, 2)


def padding_mask(input_ids: torch.Tensor, pad_id: int) -> torch.Tensor:
    """True at words, false at padding: from ids (B, S) to (B, 1, 1, S)."""
    return (input_ids != pad_id)[:, None, None, :]


def add_and_norm(
    x: torch.Tensor, sublayer: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """LayerNorm(x + Sublayer(x)): from x and Sublayer(x), both (B, L, D), and gain and bias (D,) to (B, L, D)."""
    x = x + sublayer
    mean = x.mean(dim=-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
    return (x - mean) / (variance + epsilon).sqrt() * gain + bias


def feed_forward(
    x: torch.Tensor, w1: torch.Tensor, b1: torch.Tensor, w2: torch.Tensor, b2: torch.Tensor
) -> torch.Tensor:
    """Equation 2, with matrices w1 (D, d_ff) and w2 (d_ff, D): from (B, L, D) to (B, L, D)."""
    return (x @ w1 + b1).clamp(min=0) @ w2 + b2


def shift_right(labels: torch.Tensor, start_id: int, pad_id: int) -> torch.Tensor:
    """What the decoder reads where it is to predict labels (B, T): (B, T), with pad_id where labels have -100."""
    start = torch.full_like(labels[:, :1], start_id)
    shifted = torch.cat([start, labels[:, :-1]], dim=1)
    return shifted.masked_fill(shifted == -100, pad_id)


def causal_mask(length: int) -> torch.Tensor:
    """Which position (row) may look at which (column): (length, length), true where it may."""
    return torch.ones(length, length).tril().bool()


def smoothed_loss(logits: torch.Tensor, labels: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The cross-entropy of 5.4, of logits (B, T, V) and labels (B, T), averaged over the labels that are not -100."""
    counted = labels != -100
    log_p = logits[counted].log_softmax(dim=-1)  # (N, V)
    right = log_p.gather(1, labels[counted][:, None])[:, 0]
    return -((1 - epsilon) * right + epsilon * log_p.mean(dim=-1)).mean()


def learning_rate(step: int, d_model: int, warmup_steps: int) -> float:
    """Equation 3, for steps counted from 1; 0 for step 0."""
    if step == 0:
        return 0.0
    return float(d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5))


def greedy_search(
    predict: Callable[[torch.Tensor], torch.Tensor], start_id: int, end_id: int, longest: int
) -> list[int]:
    """The tokens after start_id, the most probable each time, up to end_id (included) or `longest` tokens.

    predict maps N beginnings (N, L), start_id included, to the next tokens' log-probabilities (N, V).
    """
    ids = [start_id]
    while len(ids) <= longest and (len(ids) == 1 or ids[-1] != end_id):
        ids.append(int(predict(torch.tensor([ids]))[0].argmax()))
    return ids[1:]


def beam_search(
    predict: Callable[[torch.Tensor], torch.Tensor],
    start_id: int,
    end_id: int,
    beams: int,
    alpha: float,
    longest: int,
) -> tuple[list[int], float]:
    """The best translation's tokens, as above, and its score: log-probability / ((5 + tokens) / 6)^alpha."""
    beginnings: list[tuple[float, list[int]]] = [(0.0, [start_id])]
    ended: list[tuple[float, list[int]]] = []
    for length in range(1, longest + 1):
        log_p = torch.tensor([[total] for total, _ in beginnings]) + predict(
            torch.tensor([ids for _, ids in beginnings])
        )
        totals, places = log_p.flatten().topk(min(beams, log_p.numel()))
        extended = [
            (total, [*beginnings[place // log_p.shape[1]][1], place % log_p.shape[1]])
            for total, place in zip(totals.tolist(), places.tolist(), strict=True)
        ]
        beginnings = [(total, ids) for total, ids in extended if ids[-1] != end_id]
        is_over = length == longest or not beginnings
        finished = extended if is_over else [(total, ids) for total, ids in extended if ids[-1] == end_id]
        ended += [(total / ((5 + length) / 6) ** alpha, ids) for total, ids in finished]
        if is_over:
            break
    score, ids = max(ended)
    return ids[1:], score
