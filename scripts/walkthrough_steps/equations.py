"""The equations of "Attention Is All You Need", each in the few lines that it takes: `scripts/walkthrough.py`'s hands.

Written to be read beside the paper, not to be fast. Of a model only its weights are used: `q_proj.weight` and its like
hold the matrices of all heads one below the other, transposed.

Shapes: B  batch, S  source length, T  target length, L  either, K  length of what is looked at, D  d_model, H  heads,
d_k and d_v  size of one head's keys and values, V  vocabulary. Masks are true where attention is allowed.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import nn


def positional_encoding(length: int, d_model: int) -> torch.Tensor:
    """3.5: PE(pos, 2i) = sin(pos / 10000^(2i/d_model)), PE(pos, 2i+1) = cos(the same angle); (length, D)."""
    table = torch.empty(length, d_model)
    for pos in range(length):
        for even in range(0, d_model, 2):
            angle = pos / 10000 ** (even / d_model)
            table[pos, even] = math.sin(angle)
            table[pos, even + 1] = math.cos(angle)
    return table


def project_to_head(
    attention: Any, head: int, states: torch.Tensor, looked_at: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """3.2.2: Q W_i^Q, K W_i^K and V W_i^V of one head.

    Args:
        attention: The model's `MultiHeadAttention`.
        head: i, counted from 0.
        states: What asks, (B, L, D).
        looked_at: What is asked, (B, K, D); the same in self-attention.

    Returns:
        Queries (B, L, d_k), keys (B, K, d_k) and values (B, K, d_v).
    """

    def project(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        size = linear.out_features // attention.num_heads
        matrix = linear.weight[head * size : (head + 1) * size].T  # (D, d_k)
        return x @ matrix

    query = project(attention.q_proj, states)
    key = project(attention.k_proj, looked_at)
    value = project(attention.v_proj, looked_at)
    return query, key, value


def masked_scores(query: torch.Tensor, key: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """3.2.1 and 3.2.3: Q K^T / sqrt(d_k), and -inf where looking is forbidden; (B, L, K)."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    return scores.masked_fill(~allowed, -math.inf)


class MultiHead(NamedTuple):
    """What multi-head attention computes."""

    output: torch.Tensor  # (B, L, D)
    concatenated: torch.Tensor  # (B, L, H * d_v)
    weights: torch.Tensor  # (B, H, L, K)


def multi_head_attention(
    attention: Any, states: torch.Tensor, looked_at: torch.Tensor, allowed: torch.Tensor
) -> MultiHead:
    """3.2.2: MultiHead = Concat(head_1, ..., head_h) W^O, head_i = softmax(Q K^T / sqrt(d_k)) V.

    Args:
        attention: The model's `MultiHeadAttention`.
        states: (B, L, D).
        looked_at: (B, K, D).
        allowed: Which position may look at which, (B or 1, L or 1, K).
    """
    weights, heads = [], []
    for head in range(attention.num_heads):
        query, key, value = project_to_head(attention, head, states, looked_at)
        weights.append(masked_scores(query, key, allowed).softmax(dim=-1))
        heads.append(weights[-1] @ value)
    concatenated = torch.cat(heads, dim=-1)
    return MultiHead(concatenated @ attention.out_proj.weight.T, concatenated, torch.stack(weights, dim=1))


def layer_norm(states: torch.Tensor, norm: nn.LayerNorm) -> torch.Tensor:
    """3.1: (x - mean) / sqrt(variance + epsilon) * gain + bias, for each position alone; (B, L, D)."""
    mean = states.mean(dim=-1, keepdim=True)
    variance = ((states - mean) ** 2).mean(dim=-1, keepdim=True)
    return (states - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias


def feed_forward(states: torch.Tensor, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """3.3: FFN(x) = max(0, x W1 + b1) W2 + b2; returns it (B, L, D) and the inner values (B, L, d_ff)."""
    inner = (states @ layer.fc1.weight.T + layer.fc1.bias).clamp(min=0)
    return inner @ layer.fc2.weight.T + layer.fc2.bias, inner


def encoder_layer(layer: Any, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """3.1, Figure 1 on the left: maps (B, S, D) to (B, S, D)."""
    x = layer_norm(x + multi_head_attention(layer.self_attn, x, x, allowed).output, layer.self_attn_layer_norm)
    return layer_norm(x + feed_forward(x, layer)[0], layer.final_layer_norm)


def decoder_layer(
    layer: Any, y: torch.Tensor, encoded: torch.Tensor, causal: torch.Tensor, allowed: torch.Tensor
) -> torch.Tensor:
    """3.1, Figure 1 on the right: maps (B, T, D) to (B, T, D), given the encoder's output (B, S, D).

    Args:
        layer: The model's layer.
        y: (B, T, D).
        encoded: (B, S, D).
        causal: (1, T, T), true on the diagonal and below it.
        allowed: (B, 1, S), true at the source's words.
    """
    y = layer_norm(y + multi_head_attention(layer.self_attn, y, y, causal).output, layer.self_attn_layer_norm)
    seen = multi_head_attention(layer.encoder_attn, y, encoded, allowed).output
    y = layer_norm(y + seen, layer.encoder_attn_layer_norm)
    return layer_norm(y + feed_forward(y, layer)[0], layer.final_layer_norm)


def smoothed_targets(labels: torch.Tensor, vocabulary_size: int, smoothing: float) -> torch.Tensor:
    """5.4: what is to be predicted (N, V) for labels (N,): 1 - epsilon at the label, and epsilon / V everywhere."""
    right = nn.functional.one_hot(labels, vocabulary_size)
    return right * (1 - smoothing) + smoothing / vocabulary_size


class AdamUpdate(NamedTuple):
    """The numbers of one update, each of the parameter's shape."""

    mean: torch.Tensor
    variance: torch.Tensor
    corrected_mean: torch.Tensor
    corrected_variance: torch.Tensor
    parameter: torch.Tensor


def adam_update(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    update: int,
    learning_rate: float,
    beta1: float = 0.9,
    beta2: float = 0.98,
    epsilon: float = 1e-9,
) -> AdamUpdate:
    """5.3: Adam (Kingma and Ba, 2014) with the paper's settings.

    Args:
        parameter: Before the update.
        gradient: Of the loss.
        mean: The running mean of gradients so far; zero at first.
        variance: The running mean of their squares; zero at first.
        update: Number of the update, counted from 1.
        learning_rate: Of this update.
        beta1: How much of the mean stays.
        beta2: How much of the variance stays.
        epsilon: Keeps the quotient finite.
    """
    mean = beta1 * mean + (1 - beta1) * gradient
    variance = beta2 * variance + (1 - beta2) * gradient**2
    corrected_mean = mean / (1 - beta1**update)  # both began at zero, and are too small at first
    corrected_variance = variance / (1 - beta2**update)
    change = learning_rate * corrected_mean / (corrected_variance.sqrt() + epsilon)
    return AdamUpdate(mean, variance, corrected_mean, corrected_variance, parameter - change)


def beam_score(log_probability: float, length: int, alpha: float) -> float:
    """6.1: the log-probability of a translation over its length penalty, ((5 + length) / 6)^alpha."""
    return log_probability / ((5 + length) / 6) ** alpha
