"""A model around torch.nn.Transformer as PyTorch's tutorial on translation builds it, and how models are compared."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tiny_vanilla import assert_close, logits_of, make_sentences, pad, randomize
from torch import nn

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.conversion.systems.torch_module import TorchTransformer

PAD = 1


class Tokens(nn.Module):
    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)


class Positions(nn.Module):
    """The paper's sinusoids from angles in float32, as (N, 1, D)."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        angles = torch.arange(rows)[:, None] * torch.exp(-torch.arange(0, width, 2) * math.log(10000) / width)
        table = torch.zeros(rows, width)
        table[:, 0::2], table[:, 1::2] = torch.sin(angles), torch.cos(angles)
        self.register_buffer("pos_embedding", table[:, None])
        self.pos_embedding: torch.Tensor


class Tutorial(nn.Module):
    """What PyTorch's tutorial on translation builds, under its names; lengths come before the batch."""

    def __init__(self, vocabularies: tuple[int, int] = (23, 19), width: int = 16, **transformer: Any) -> None:
        super().__init__()
        sizes = {"nhead": 8, "num_encoder_layers": 2, "num_decoder_layers": 1, "dim_feedforward": 24, "dropout": 0.2}
        self.transformer = nn.Transformer(d_model=width, **{**sizes, **transformer})
        self.generator = nn.Linear(width, vocabularies[1])
        self.src_tok_emb = Tokens(vocabularies[0], width)
        self.tgt_tok_emb = Tokens(vocabularies[1], width)
        self.positional_encoding = Positions(width, rows=60)

    def forward(self, src: torch.Tensor, tgt: torch.Tensor) -> torch.Tensor:
        """Ids (B, S) and (B, T), padded at the end, to logits (B, T, V)."""
        table = self.positional_encoding.pos_embedding
        embedded = [self.src_tok_emb(src.T) + table[: src.shape[1]], self.tgt_tok_emb(tgt.T) + table[: tgt.shape[1]]]
        batch_first = self.transformer.batch_first
        states = self.transformer(
            *[states.transpose(0, 1) if batch_first else states for states in embedded],
            tgt_mask=torch.full((tgt.shape[1],) * 2, -math.inf).triu(diagonal=1),
            src_key_padding_mask=torch.zeros(src.shape).masked_fill(src == PAD, -math.inf),
            tgt_key_padding_mask=torch.zeros(tgt.shape).masked_fill(tgt == PAD, -math.inf),
            memory_key_padding_mask=torch.zeros(src.shape).masked_fill(src == PAD, -math.inf),
        )
        return self.generator(states if batch_first else states.transpose(0, 1))


def make_tutorial(seed: int = 0, **changes: Any) -> Tutorial:
    """A random one in evaluation mode."""
    with warnings.catch_warnings():
        # torch tells that it leaves out padding by other means than in the fastest case.
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        model = Tutorial(**changes)
    # With larger weights three layers without a last norm make more of a rounding error than is allowed.
    randomize(model, seed, scale=0.2)
    return model.eval()


def make_batch(lengths: list[int], vocab_size: int) -> torch.Tensor:
    """Sentences of unequal lengths, padded at the end, in which no token is padding."""
    return pad([[t + 1 for t in s] for s in make_sentences(lengths, vocab_size - 1, lengths[0])], junk=PAD)[0]


@torch.no_grad()
def assert_same(forward: Callable[..., torch.Tensor], model: VanillaTransformerForConditionalGeneration) -> None:
    """Compares logits of a padded batch at its real positions."""
    source = make_batch([6, 1, 4], model.config.vocab_size)
    target = make_batch([3, 5, 1], model.config.target_vocab_size)
    masks = (source == PAD, target == PAD) if isinstance(forward, TorchTransformer) else ()
    expected = forward(source, target, *masks)
    mask = (source != PAD).long()
    actual = logits_of(model, input_ids=source, attention_mask=mask, decoder_input_ids=target, use_cache=False)
    assert_close(actual[target != PAD], expected[target != PAD])
