"""The parts that Transformers of other systems are made of, for tests that write down what such a system computes.

One sentence at a time, without padding, in float64. Weights are looked up by the names that the system gives them.

Shapes: L  length of the queries, K  of the memory, D  d_model.
"""

import math
from collections.abc import Mapping

import torch

Weights = Mapping[str, torch.Tensor]


class RandomWeights(dict[str, torch.Tensor]):
    """Weights by name, all drawn from one generator."""

    def __init__(self, width: int) -> None:
        self.width, self.generator = width, torch.Generator().manual_seed(0)

    def draw(self, *shape: int) -> torch.Tensor:
        """Weights that are large enough for every part of the model to show in its logits."""
        return torch.randn(*shape, generator=self.generator) * 0.4

    def add_linear(self, name: str, rows: int, columns: int, *, bias: bool = True) -> None:
        self[f"{name}.weight"] = self.draw(rows, columns)
        if bias:
            self[f"{name}.bias"] = self.draw(rows)

    def add_norms(self, *names: str) -> None:
        for name in names:
            self[f"{name}.weight"], self[f"{name}.bias"] = 1 + self.draw(self.width), self.draw(self.width)


def linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    result = x @ weights[f"{name}.weight"].double().T
    return result + weights[f"{name}.bias"].double() if f"{name}.bias" in weights else result


def norm(weights: Weights, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    deviation = (centred.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return centred / deviation * weights[f"{name}.weight"].double() + weights[f"{name}.bias"].double()


def attend(
    weights: Weights,
    names: tuple[str, str, str, str],
    x: torch.Tensor,
    memory: torch.Tensor,
    *,
    heads: int,
    causal: bool = False,
) -> torch.Tensor:
    """Multi-head attention of x (L, D) to memory (K, D); `names` are those of queries, keys, values and output."""
    queries, keys, values = linear(weights, names[0], x), *(linear(weights, name, memory) for name in names[1:3])
    contexts = []
    for q, k, v in zip(queries.chunk(heads, -1), keys.chunk(heads, -1), values.chunk(heads, -1), strict=True):
        scores = q @ k.T / math.sqrt(q.shape[1])
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        contexts.append(scores.softmax(dim=-1) @ v)
    return linear(weights, names[3], torch.cat(contexts, dim=-1))


def interleaved_sinusoids(length: int, d_model: int) -> torch.Tensor:
    table = torch.zeros(length, d_model, dtype=torch.float64)
    for position in range(length):
        for i in range(d_model // 2):
            angle = position / 10000 ** (2 * i / d_model)
            table[position, 2 * i], table[position, 2 * i + 1] = math.sin(angle), math.cos(angle)
    return table


def tensor2tensor_sinusoids(length: int, d_model: int) -> torch.Tensor:
    half = d_model // 2
    table = torch.zeros(length, d_model, dtype=torch.float64)
    for position in range(length):
        for i in range(half):
            angle = position / 10000 ** (i / (half - 1))
            table[position, i], table[position, half + i] = math.sin(angle), math.cos(angle)
    return table
