"""Tiny models with random weights, sentences with padding, and caches: what the tests of model and generation share."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForSeq2SeqLM, DynamicCache, EncoderDecoderCache, StaticCache

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration

# Which of the three tables (source, target, output layer) are one.
SHARING: dict[str, dict[str, Any]] = {
    "shared-tied": {"share_encoder_decoder_embeddings": True, "tie_word_embeddings": True},
    "shared-untied": {"share_encoder_decoder_embeddings": True, "tie_word_embeddings": False},
    "separate-tied": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": True},
    "separate-untied": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
}
TWO_VOCABULARIES: dict[str, dict[str, Any]] = {
    "two-vocabularies-tied": {**SHARING["separate-tied"], "decoder_vocab_size": 13},
    "two-vocabularies-untied": {**SHARING["separate-untied"], "decoder_vocab_size": 19},
}
ALL_SHARING = {**SHARING, **TWO_VOCABULARIES}
INPUTS = {"input_ids": torch.tensor([[4, 5, 6, 2]]), "decoder_input_ids": torch.tensor([[0, 7, 8]])}


def make_config(**changes: Any) -> VanillaTransformerConfig:
    """A configuration whose sizes are all different where they may be."""
    sizes: dict[str, Any] = {"vocab_size": 17, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "dropout": 0.0}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "max_position_embeddings": 24}
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 20}
    return VanillaTransformerConfig(**{**sizes, **changes})


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0, scale: float = 0.4) -> None:
    """Fills every parameter with noise: initial zeros and ones would hide a bias or a norm left out."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        is_gain = "norm" in name and name.endswith("weight")
        parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) + float(is_gain))


def make_model(
    attention: str = "sdpa", seed: int = 0, scale: float = 0.4, **changes: Any
) -> VanillaTransformerForConditionalGeneration:
    """A model in evaluation mode, every parameter of which is random; `changes` are fields of the configuration."""
    model = AutoModelForSeq2SeqLM.from_config(make_config(**changes), attn_implementation=attention)
    assert isinstance(model, VanillaTransformerForConditionalGeneration)
    randomize(model, seed, scale)
    return model.eval()


def make_loud_model(config: VanillaTransformerConfig) -> VanillaTransformerForConditionalGeneration:
    """A model in evaluation mode whose initial weights are disturbed, so that sources and beams matter."""
    model = VanillaTransformerForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter + 0.1 * torch.randn_like(parameter))
    model.generation_config.max_new_tokens = 12
    return model.eval()


def make_sentences(lengths: list[int], vocab_size: int = 13, seed: int = 0) -> list[list[int]]:
    """Sentences of these lengths without special tokens."""
    chooser = random.Random(seed)
    return [[chooser.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


def pad(sentences: list[list[int]], side: str = "right", junk: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids (B, L) and mask (B, L); whatever `junk` is, the mask alone says what is padding."""
    longest = max(map(len, sentences))
    ids = torch.full((len(sentences), longest), junk)
    mask = torch.zeros_like(ids)
    for row, sentence in enumerate(sentences):
        columns = slice(longest - len(sentence), longest) if side == "left" else slice(0, len(sentence))
        ids[row, columns] = torch.tensor(sentence)
        mask[row, columns] = 1
    return ids, mask


def make_cache(
    model: VanillaTransformerForConditionalGeneration, kind: str, source_length: int, max_cache_len: int
) -> EncoderDecoderCache:
    """An empty cache, "dynamic" or "static"."""
    config = model.config.get_text_config(decoder=True)
    if kind == "dynamic":
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    return EncoderDecoderCache(
        StaticCache(config=config, max_cache_len=max_cache_len), StaticCache(config=config, max_cache_len=source_length)
    )


def logits_of(model: VanillaTransformerForConditionalGeneration, **inputs: Any) -> torch.Tensor:
    """Logits (B, T, V), without a graph behind them."""
    with torch.no_grad():
        return cast(torch.Tensor, model(**inputs).logits)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Compares relative to the largest value, since rounding errors grow with it."""
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual, expected, atol=tolerance * scale, rtol=0.0)


def loss_and_gradients(model: nn.Module, **inputs: Any) -> dict[str, torch.Tensor]:
    """One backward pass of the model: the loss and the gradient of every parameter that has one."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), **{name: grad.clone() for name, grad in found.items() if grad is not None}}


def largest_allocation(step: Callable[[], Any]) -> int:
    """The most bytes that one operation takes on the CPU."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()
    return max(event.self_cpu_memory_usage for event in profile.events())
