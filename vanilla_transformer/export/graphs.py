"""The model as graphs of tensor operations: what `torch.export` and the ONNX exporter trace.

Shapes: B  batch, S  source length, T  target length, P  target positions in the cache, K  source positions in the
cache (none or all: 0 or S), H  heads, D  d_model, d_k and d_v  size of one head's keys and values, V  vocabulary.
Masks are 1 at tokens and 0 at padding.
"""

import copy
from typing import Any, cast

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from transformers import DynamicCache, EncoderDecoderCache

from vanilla_transformer.conversion.errors import find_strange_weights, refuse
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.generation_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.linear_vanilla_transformer import project
from vanilla_transformer.model.positions_vanilla_transformer import (
    LearnedPositions,
    SinusoidalPositions,
    count_learned_positions,
)

# By layer, by side ("decoder" or "encoder"), by kind ("key" or "value").
Past = dict[str, dict[str, dict[str, torch.Tensor]]]
# Beam search looks at twice as many as it has beams.
MOST_CANDIDATES = 16


class DecoderGraph(nn.Module):
    """The decoder with its cache and the output layer, for the first tokens of a target as for the following ones.

    What the cache lacks of the source is computed from the encoder's output: everything at first, with K = 0, and
    nothing once K = S. So one graph does what would otherwise take two, and both hold the weights.
    """

    def __init__(self, model: VanillaTransformerForConditionalGeneration) -> None:
        super().__init__()
        self.decoder = model.model.decoder
        self.lm_head = model.lm_head

    def forward(
        self,
        input_ids: torch.Tensor,
        encoder_attention_mask: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        past_key_values: Past,
    ) -> dict[str, torch.Tensor]:
        """Decodes new target tokens (B, T), given the source's mask (B, S) and the encoder's output (B, S, D).

        The cache has, for each layer, `decoder` keys (B, H, P, d_k) and values (B, H, P, d_v) of the target, and
        `encoder` keys (B, H, K, d_k) and values (B, H, K, d_v) of the source.

        Returns `logits` (B, T, V) and, for each layer i, what the cache holds now: `present.i.decoder.key` (B, H,
        P + T, d_k), `present.i.encoder.key` (B, H, S, d_k), and the values likewise.
        """
        cache, states = EncoderDecoderCache(DynamicCache(), DynamicCache()), encoder_hidden_states
        for number, layer in enumerate(self.decoder.layers):
            target, source = past_key_values[str(number)]["decoder"], past_key_values[str(number)]["encoder"]
            cache.self_attention_cache.update(target["key"], target["value"], number)
            attention: Any = cast(Any, layer).encoder_attn
            # The source's keys and values from position K on are still missing.
            key, value = (
                torch.cat([part, attention.split_heads(project(map_, states[:, part.shape[2] :]))], dim=2)
                for part, map_ in ((source["key"], attention.k_proj), (source["value"], attention.v_proj))
            )
            cache.cross_attention_cache.update(key, value, number)
            cache.is_updated[number] = True
        encoder = {"encoder_hidden_states": states, "encoder_attention_mask": encoder_attention_mask}
        outputs = self.decoder(input_ids=input_ids, **encoder, past_key_values=cache, use_cache=True)
        present = {
            f"present.{number}.{side}.{name}": getattr(layers.layers[number], f"{name}s")
            for number in range(len(self.decoder.layers))
            for side, layers in (("decoder", cache.self_attention_cache), ("encoder", cache.cross_attention_cache))
            for name in ("key", "value")
        }
        return {"logits": self.lm_head(outputs.last_hidden_state), **present}


class CandidatesGraph(DecoderGraph):
    """The decoder, which also tells the likeliest next tokens: all of beam search that is worth a runtime's speed."""

    def forward(
        self,
        input_ids: torch.Tensor,
        encoder_attention_mask: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        past_key_values: Past,
    ) -> dict[str, torch.Tensor]:
        """As in [`DecoderGraph`], and `candidates.ids` (B, C), int32, with log-probabilities `candidates.values`."""
        outputs = super().forward(input_ids, encoder_attention_mask, encoder_hidden_states, past_key_values)
        log_probs = outputs["logits"][:, -1].log_softmax(dim=-1)
        values, ids = log_probs.topk(min(MOST_CANDIDATES, log_probs.shape[-1]))
        return outputs | {"candidates.values": values, "candidates.ids": ids.to(torch.int32)}


class WholeGraph(nn.Module):
    """Source and target to logits, by a model from [`copy_for_tracing`]."""

    def __init__(self, model: VanillaTransformerForConditionalGeneration) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> torch.Tensor:
        """Maps source tokens and their mask, both (B, S), and target tokens (B, T) to logits (B, T, V)."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "decoder_input_ids": decoder_input_ids}
        return cast(torch.Tensor, self.model(**inputs, use_cache=False).logits)


class UncheckedPositions(nn.Embedding):
    """Learned positions without a check of lengths, which would be traced; the runtime refuses what lies beyond."""

    def __init__(self, positions: LearnedPositions) -> None:
        super().__init__(positions.num_embeddings, positions.embedding_dim, _weight=positions.weight)
        self.offset = positions.offset

    def forward(self, token_indices: torch.Tensor, upper_bound: int) -> torch.Tensor:  # type: ignore[override]
        """Maps indices of tokens (B or 1, L) to (B or 1, L, D)."""
        return super().forward(token_indices + self.offset)


class ComputedSinusoids(nn.Module):
    """Sinusoids of any position, in float32 alone: browsers have no float64, and a table would end.

    Angles are counted in turns, of which whole ones do not matter. Frequencies are sums of three parts. The first two
    have so few bits that their products with positions below 65,536 are exact.
    """

    def __init__(self, positions: SinusoidalPositions) -> None:
        super().__init__()
        self.offset = positions.offset
        at_zero, at_one = positions.encode(torch.tensor([0, 1]))
        is_cosine = at_zero > 0.5
        turns = torch.empty_like(at_one)
        # In all arrangements the sines have the order of the cosines.
        turns[is_cosine] = turns[~is_cosine] = torch.atan2(at_one[~is_cosine], at_one[is_cosine]) / (2 * torch.pi)
        first = (turns * 2**8).round() / 2**8
        second = ((turns - first) * 2**16).round() / 2**16
        parts = torch.stack([first, second, turns - first - second, is_cosine / 4])
        self.register_buffer("parts", parts.float(), persistent=False)
        self.parts: torch.Tensor

    def forward(self, token_indices: torch.Tensor, upper_bound: int) -> torch.Tensor:
        """Maps indices of tokens (B or 1, L) to (B or 1, L, D)."""
        first, second, third, quarter = self.parts
        positions = (token_indices + self.offset).float()[..., None]
        exact = _center(_center(positions * first) + _center(positions * second) + quarter)
        return (2 * torch.pi * (exact + positions * third)).sin()


def _center(turns: torch.Tensor) -> torch.Tensor:
    """Leaves the whole turns out: from -1/2 to 1/2."""
    return turns - (turns + 0.5).floor()


def copy_for_tracing(model: VanillaTransformerForConditionalGeneration) -> VanillaTransformerForConditionalGeneration:
    """Copies a model to the CPU, in float32 and evaluation mode, with positions that can be traced."""
    reasons = []
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        kind = VanillaTransformerForConditionalGeneration.__name__
        is_own = isinstance(getattr(model, "config", None), VanillaTransformerConfig)
        advice = "merge adapters first" if is_own else "`vanilla-transformer convert` makes one of MarianMT and FSMT"
        reasons.append(f"it is a {type(model).__name__} (can be: a {kind}; {advice})")
    elif getattr(model, "hf_quantizer", None) is not None:
        reasons.append("its weights are quantized (load it without quantization)")
    else:
        reasons = find_strange_weights(model)
    refuse("This model cannot be exported", reasons)
    copied = copy.deepcopy(model).to(device="cpu", dtype=torch.float32).eval()  # type: ignore[call-arg]
    copied.set_attn_implementation("sdpa")
    for stack in (copied.model.encoder, copied.model.decoder):
        positions = stack.embed_positions
        is_sinusoidal = isinstance(positions, SinusoidalPositions)
        stack.embed_positions = ComputedSinusoids(positions) if is_sinusoidal else UncheckedPositions(positions)
    return copied


def export_program(model: VanillaTransformerForConditionalGeneration) -> ExportedProgram:
    """Exports the whole model, which stays as it is, with `torch.export`, for any batch size and lengths.

    The program needs neither this package nor transformers: `torch.export.save` writes it to a file, from which
    `torch.export.load(file).module()` makes a module that takes `input_ids` (B, S), `attention_mask` (B, S) and
    `decoder_input_ids` (B, T), by these names, and returns logits (B, T, V), in float32. A `ConversionError` if it is
    not this package's model, or its weights are quantized.
    """
    copied = copy_for_tracing(model)
    longest = count_learned_positions(model.config)
    batch, source, target = Dim("batch_size"), Dim("source_length", max=longest), Dim("target_length", max=longest)
    # Tracing takes sizes of 0 and 1 for constants.
    sources, targets = torch.ones(2, 4, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)
    inputs = {"input_ids": sources, "attention_mask": sources.clone(), "decoder_input_ids": targets}
    names = {"input_ids": source, "attention_mask": source, "decoder_input_ids": target}
    shapes = {name: {0: batch, 1: length} for name, length in names.items()}
    with torch.no_grad():
        return torch.export.export(WholeGraph(copied), (), inputs, dynamic_shapes=shapes)
