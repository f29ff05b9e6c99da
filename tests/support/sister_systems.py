"""The Transformers of other systems, for tests that write down what such a system computes.

One sentence at a time, without padding, in float64. Weights are looked up by the names that the system gives them.

Shapes: L  length of the queries, K  of the memory, D  d_model.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from naive_transformer import position_encoding

Weights = Mapping[str, torch.Tensor]


class RandomWeights(dict[str, torch.Tensor]):
    """Weights by name, all drawn from one generator."""

    def __init__(self, width: int, seed: int = 0) -> None:
        self.width, self.generator = width, torch.Generator().manual_seed(seed)

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


@dataclass
class Stack:
    """An encoder or a decoder: how its parts are called, and what it computes.

    `projections` are those of queries, keys, values and output; each sublayer has one of the `norms`.
    """

    weights: Any
    name: str
    layers: int
    heads: int
    attentions: Sequence[str]
    projections: Sequence[str]
    feed_forward: Sequence[str]
    norms: Sequence[str]
    last_norm: str | None
    pre_norm: bool
    eps: float = 1e-5
    activation: Callable[[torch.Tensor], torch.Tensor] = torch.relu
    norm: Callable[..., torch.Tensor] = norm

    def draw(self, inner: int, *, bias: bool = True) -> None:
        """Fills `weights`, which are `RandomWeights`."""
        width, (first, second) = self.weights.width, self.feed_forward
        for layer in (f"{self.name}.{index}" for index in range(self.layers)):
            for name in (f"{layer}.{attention}.{part}" for attention in self.attentions for part in self.projections):
                self.weights.add_linear(name, width, width, bias=bias)
            self.weights.add_linear(f"{layer}.{first}", inner, width, bias=bias)
            self.weights.add_linear(f"{layer}.{second}", width, inner, bias=bias)
            self.weights.add_norms(*(f"{layer}.{each}" for each in self.norms))
        self.weights.add_norms(*filter(None, [self.last_norm]))

    def run(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """The output (L, D) for embeddings (L, D), and of a decoder for the encoder's output (K, D) too."""
        for layer in (f"{self.name}.{index}" for index in range(self.layers)):
            functions = [partial(self.attend, f"{layer}.{self.attentions[0]}", None, causal=memory is not None)]
            if memory is not None:
                functions.append(partial(self.attend, f"{layer}.{self.attentions[1]}", memory))
            functions.append(partial(self.transform, layer))
            for function, name in zip(functions, self.norms, strict=True):
                normalize = partial(self.norm, self.weights, f"{layer}.{name}", eps=self.eps)
                x = x + function(normalize(x)) if self.pre_norm else normalize(x + function(x))
        return x if self.last_norm is None else self.norm(self.weights, self.last_norm, x, self.eps)

    def attend(self, name: str, memory: torch.Tensor | None, x: torch.Tensor, causal: bool = False) -> torch.Tensor:
        """Multi-head attention of x (L, D) to memory (K, D), or to itself, one head after the other."""
        names = [f"{name}.{projection}" for projection in self.projections]
        memory = x if memory is None else memory
        queries, keys, values = (
            linear(self.weights, each, states) for each, states in zip(names[:3], (x, memory, memory), strict=True)
        )
        contexts = []
        for parts in zip(*(states.chunk(self.heads, -1) for states in (queries, keys, values)), strict=True):
            q, k, v = parts
            scores = q @ k.T / math.sqrt(q.shape[1])
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            contexts.append(scores.softmax(dim=-1) @ v)
        return linear(self.weights, names[3], torch.cat(contexts, dim=-1))

    def transform(self, layer: str, x: torch.Tensor) -> torch.Tensor:
        """The feed-forward network, position by position."""
        first, second = (f"{layer}.{name}" for name in self.feed_forward)
        return linear(self.weights, second, self.activation(linear(self.weights, first, x)))


def sinusoids(kind: str, length: int, d_model: int) -> torch.Tensor:
    """The table (length, D) of a kind that `VanillaTransformerConfig` names."""
    return torch.tensor(np.stack([position_encoding(kind, position, d_model) for position in range(length)]))
