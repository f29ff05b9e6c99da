"""The model of "The Annotated Transformer" from its published equations, with its names of weights: the tests' oracle.

It is pre-LN, with biases everywhere, and its norm divides by the unbiased standard deviation plus eps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from sister_systems import RandomWeights, Stack, Weights, linear

EPS, ROWS = 1e-6, 50


def unbiased_norm(weights: Weights, name: str, x: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """Computes a (x - mean) / (s + eps) + b, where s^2 = sum (x - mean)^2 / (D - 1)."""
    centred = x - x.mean(dim=-1, keepdim=True)
    deviation = (centred.square().sum(dim=-1, keepdim=True) / (x.shape[-1] - 1)).sqrt()
    return weights[f"{name}.a_2"].double() * centred / (deviation + eps) + weights[f"{name}.b_2"].double()


class NaiveAnnotated(RandomWeights):
    """Random weights, and what the whole model computes from them."""

    def __init__(
        self, *vocabularies: int, layers: int = 2, width: int = 16, inner: int = 24, heads: int = 4, seed: int = 0
    ) -> None:
        super().__init__(width, seed)
        same: dict[str, Any] = {"pre_norm": True, "eps": EPS, "norm": unbiased_norm}
        same |= {"projections": [f"linears.{number}" for number in range(4)]}
        same |= {"feed_forward": ("feed_forward.w_1", "feed_forward.w_2")}
        self.stacks = {}
        for side, attentions in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "src_attn"])):
            norms = [f"sublayer.{number}.norm" for number in range(len(attentions) + 1)]
            names: dict[str, Any] = {"attentions": attentions, "norms": norms, "last_norm": f"{side}.norm"}
            self.stacks[side] = Stack(self, f"{side}.layers", layers, heads, **names, **same)
            self.stacks[side].draw(inner)
        # The original computes its angles in float32.
        frequencies = torch.exp(torch.arange(0, width, 2) * -(math.log(10000.0) / width))
        angles = torch.arange(ROWS)[:, None] * frequencies
        table = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        for side, size in zip(("src", "tgt"), vocabularies or (23, 19), strict=True):
            self[f"{side}_embed.0.lut.weight"], self[f"{side}_embed.1.pe"] = self.draw(size, width), table[None]
        self.add_linear("generator.proj", (vocabularies or (23, 19))[1], width)

    def draw(self, *shape: int) -> torch.Tensor:
        """Xavier's scale for matrices, as in the original, and noise where it begins with zeros and ones."""
        scale = math.sqrt(2 / sum(shape)) if len(shape) == 2 else 0.2
        return torch.randn(*shape, generator=self.generator) * scale

    def add_norms(self, *names: str) -> None:
        for name in names:
            self[f"{name}.a_2"], self[f"{name}.b_2"] = 1 + self.draw(self.width), self.draw(self.width)

    def embed(self, side: str, tokens: list[int]) -> torch.Tensor:
        rows = self[f"{side}_embed.0.lut.weight"][tokens].double() * math.sqrt(self.width)
        return rows + self[f"{side}_embed.1.pe"][0, : len(tokens)]

    def logits(self, source: list[int], target: list[int]) -> torch.Tensor:
        memory = self.stacks["encoder"].run(self.embed("src", source))
        return linear(self, "generator.proj", self.stacks["decoder"].run(self.embed("tgt", target), memory))
