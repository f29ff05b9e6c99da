"""The model of "The Annotated Transformer" from its published equations, with its names of weights: the tests' oracle.

It is pre-LN, with biases everywhere, and its norm divides by the unbiased standard deviation plus eps. Each head is
computed alone, and nothing is shared with the package.

Shapes: B batch, L length of queries, K of keys, D d_model, V vocabulary. Masks (B or 1, 1 or L, K) are true where
attention is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class Norm(nn.Module):
    """a (x - mean) / (s + eps) + b, where s^2 = sum (x - mean)^2 / (D - 1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(width))
        self.b_2 = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        deviation = (centred.square().sum(dim=-1, keepdim=True) / (x.shape[-1] - 1)).sqrt()
        return self.a_2 * centred / (deviation + 1e-6) + self.b_2


class Attention(nn.Module):
    """h heads, each a slice of the four matrices' rows."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.h = heads
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = self.linears[0](x), self.linears[1](memory), self.linears[2](memory)
        size = x.shape[-1] // self.h
        contexts = []
        for head in range(self.h):
            columns = slice(head * size, (head + 1) * size)
            scores = query[..., columns] @ key[..., columns].transpose(1, 2) / math.sqrt(size)
            weights = scores.masked_fill(~mask, -1e9).softmax(dim=-1)
            contexts.append(weights @ value[..., columns])
        return self.linears[3](torch.cat(contexts, dim=-1))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w_1 = nn.Linear(width, inner)
        self.w_2 = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w_2(self.w_1(x).clamp(min=0))


class Sublayer(nn.Module):
    """Holds one norm, under the name that it has in the original."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)


class Layer(nn.Module):
    def __init__(self, heads: int, width: int, inner: int, is_decoder: bool) -> None:
        super().__init__()
        self.self_attn = Attention(heads, width)
        self.src_attn = Attention(heads, width) if is_decoder else None
        self.feed_forward = FeedForward(width, inner)
        self.sublayer = nn.ModuleList(Sublayer(width) for _ in range(3 if is_decoder else 2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, *memory_and_mask: torch.Tensor) -> torch.Tensor:
        norms: list[Any] = [sublayer.norm for sublayer in self.sublayer]
        normal = norms[0](x)
        x = x + self.self_attn(normal, normal, mask)
        if self.src_attn is not None:
            x = x + self.src_attn(norms[1](x), *memory_and_mask)
        return x + self.feed_forward(norms[-1](x))


class Stack(nn.Module):
    def __init__(self, layers: int, heads: int, width: int, inner: int, is_decoder: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(heads, width, inner, is_decoder) for _ in range(layers))
        self.norm = Norm(width)

    def forward(self, x: torch.Tensor, *masks_and_memory: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *masks_and_memory)
        return self.norm(x)


class Embeddings(nn.Module):
    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.lut = nn.Embedding(vocab_size, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lut(tokens) * math.sqrt(self.lut.embedding_dim)


class Positions(nn.Module):
    """Sinusoids, whose angles the original computes in float32."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        frequencies = torch.exp(torch.arange(0, width, 2) * -(math.log(10000.0) / width))
        angles = torch.arange(rows)[:, None] * frequencies
        table = torch.zeros(rows, width)
        table[:, 0::2], table[:, 1::2] = angles.sin(), angles.cos()
        self.register_buffer("pe", table[None])
        self.pe: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.pe[:, : x.shape[1]]


class Generator(nn.Module):
    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, vocab_size)


class NaiveAnnotated(nn.Module):
    """The whole model, whose call gives the decoder's states (B, T, D), not yet logits."""

    def __init__(
        self, vocabularies: Sequence[int], layers: int = 2, width: int = 16, inner: int = 24, heads: int = 4
    ) -> None:
        super().__init__()
        (source, target), rows = vocabularies, 50
        self.encoder = Stack(layers, heads, width, inner, is_decoder=False)
        self.decoder = Stack(layers, heads, width, inner, is_decoder=True)
        self.src_embed = nn.Sequential(Embeddings(source, width), Positions(width, rows))
        self.tgt_embed = nn.Sequential(Embeddings(target, width), Positions(width, rows))
        self.generator = Generator(width, target)

    def forward(
        self, src: torch.Tensor, tgt: torch.Tensor, src_mask: torch.Tensor, tgt_mask: torch.Tensor
    ) -> torch.Tensor:
        memory = self.encoder(self.src_embed(src), src_mask)
        return self.decoder(self.tgt_embed(tgt), tgt_mask, memory, src_mask)
