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

from vanilla_transformer.conversion.errors import refuse
from vanilla_transformer.model.linear_vanilla_transformer import project
from vanilla_transformer.model.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.positions_vanilla_transformer import LearnedPositions, SinusoidalPositions

# Sizes of what is traced. Any will do but 0 and 1, which tracing takes for constants.
BATCH_SIZE, SOURCE_LENGTH, TARGET_LENGTH, PAST_LENGTH, CACHED_SOURCE_LENGTH = 2, 4, 2, 3, 2

# By layer, by side ("decoder" or "encoder"), by kind ("key" or "value").
Past = dict[str, dict[str, dict[str, torch.Tensor]]]


class EncoderGraph(nn.Module):
    """The encoder with nothing but tensors around it.

    Args:
        model: The whole model, from [`copy_for_tracing`].
    """

    def __init__(self, model: VanillaTransformerForConditionalGeneration) -> None:
        super().__init__()
        self.encoder = model.model.encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Maps source tokens and their mask, both (B, S), to `last_hidden_state` (B, S, D)."""
        outputs = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        return {"last_hidden_state": outputs.last_hidden_state}


class DecoderGraph(nn.Module):
    """The decoder with its cache and the output layer, for the first tokens of a target as for the following ones.

    What the cache lacks of the source is computed from the encoder's output: everything at first, with K = 0, and
    nothing once K = S. So one graph does what would otherwise take two, and both hold the weights.

    Args:
        model: The whole model, from [`copy_for_tracing`].
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
        """Decodes.

        Args:
            input_ids: Target tokens that are new, (B, T).
            encoder_attention_mask: The source's mask (B, S).
            encoder_hidden_states: The encoder's output (B, S, D).
            past_key_values: For each layer, `decoder` keys (B, H, P, d_k) and values (B, H, P, d_v) of the target, and
                `encoder` keys (B, H, K, d_k) and values (B, H, K, d_v) of the source.

        Returns:
            `logits` (B, T, V) and, for each layer i, what the cache holds now: `present.i.decoder.key` (B, H, P + T,
            d_k), `present.i.encoder.key` (B, H, S, d_k), and the values likewise.
        """
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        for number, layer in enumerate(self.decoder.layers):
            target, source = past_key_values[str(number)]["decoder"], past_key_values[str(number)]["encoder"]
            cache.self_attention_cache.update(target["key"], target["value"], number)
            attention: Any = cast(Any, layer).encoder_attn
            key, value = (
                self._complete(source[name], attention, projection, encoder_hidden_states)
                for name, projection in (("key", attention.k_proj), ("value", attention.v_proj))
            )
            cache.cross_attention_cache.update(key, value, number)
            cache.is_updated[number] = True
        outputs = self.decoder(
            input_ids=input_ids,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=cache,
            use_cache=True,
        )
        present = {
            f"present.{number}.{side}.{name}": states
            for number in range(len(self.decoder.layers))
            for side, layers in (("decoder", cache.self_attention_cache), ("encoder", cache.cross_attention_cache))
            for name, states in _keys_and_values(layers.layers[number]).items()
        }
        return {"logits": self.lm_head(outputs.last_hidden_state), **present}

    def _complete(
        self, known: torch.Tensor, attention: Any, projection: nn.Linear, encoder_hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """Adds to a source's keys or values (B, H, K, d) those of the positions from K on: (B, H, S, d)."""
        missing = project(projection, encoder_hidden_states[:, known.shape[2] :])
        return torch.cat([known, attention.split_heads(missing)], dim=2)


class WholeGraph(nn.Module):
    """Source and target to logits.

    Args:
        model: The whole model, from [`copy_for_tracing`].
    """

    def __init__(self, model: VanillaTransformerForConditionalGeneration) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, decoder_input_ids: torch.Tensor
    ) -> torch.Tensor:
        """Maps source tokens and their mask, both (B, S), and target tokens (B, T) to logits (B, T, V)."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            use_cache=False,
        )
        return cast(torch.Tensor, outputs.logits)


class UncheckedPositions(nn.Embedding):
    """Learned positions that leave it to the runtime to refuse what lies beyond the table.

    A check of lengths, which traces like any other branch, would tie them to the table's even where the tokens beyond
    are padding.

    Args:
        positions: The model's.
    """

    def __init__(self, positions: LearnedPositions) -> None:
        super().__init__(positions.num_embeddings, positions.embedding_dim, _weight=positions.weight)
        self.offset = positions.offset

    def forward(self, token_indices: torch.Tensor, upper_bound: int) -> torch.Tensor:  # type: ignore[override]
        """Maps indices of tokens (B or 1, L) to (B or 1, L, D)."""
        return super().forward(token_indices + self.offset)


def copy_for_tracing(model: VanillaTransformerForConditionalGeneration) -> VanillaTransformerForConditionalGeneration:
    """Copies a model so that its graph has no limit that the model has not.

    Args:
        model: The model; it stays as it is.

    Returns:
        A copy on the CPU, in float32 and evaluation mode. Its sinusoids are computed at every length: the table they
        are otherwise read from would become part of the graph, and its end the end of every sequence.

    Raises:
        ConversionError: If it is not this package's model, or its weights are quantized.
    """
    reasons = []
    if not isinstance(model, VanillaTransformerForConditionalGeneration):
        reasons.append(
            f"it is a {type(model).__name__} (can be: a VanillaTransformerForConditionalGeneration; merge adapters "
            "first)"
        )
    elif getattr(model, "hf_quantizer", None) is not None:
        reasons.append("its weights are quantized (load it without quantization)")
    refuse("This model cannot be exported", reasons)
    copied = copy.deepcopy(model).to(device="cpu", dtype=torch.float32).eval()  # type: ignore[call-arg]
    copied.set_attn_implementation("sdpa")
    for stack in (copied.model.encoder, copied.model.decoder):
        if isinstance(stack.embed_positions, SinusoidalPositions):
            stack.embed_positions.weight = stack.embed_positions.weight[:0].clone()
        else:
            stack.embed_positions = UncheckedPositions(stack.embed_positions)
    return copied


def export_program(model: VanillaTransformerForConditionalGeneration) -> ExportedProgram:
    """Exports the whole model with `torch.export`, for any batch size and lengths.

    The program needs neither this package nor transformers: `torch.export.save` writes it to a file, from which
    `torch.export.load(file).module()` makes a module that takes `input_ids` (B, S), `attention_mask` (B, S) and
    `decoder_input_ids` (B, T), by these names, and returns logits (B, T, V).

    Args:
        model: The model; it stays as it is.

    Returns:
        The program, in float32. With learned positions it refuses sequences that are longer than their table, padding
        included; with sinusoids there is no limit.

    Raises:
        ConversionError: See [`copy_for_tracing`].
    """
    copied = copy_for_tracing(model)
    longest = longest_sequence(model)
    batch, source = Dim("batch_size"), Dim("source_length", max=longest)
    target = Dim("target_length", max=longest)
    inputs = {
        "input_ids": torch.full((BATCH_SIZE, SOURCE_LENGTH), 0),
        "attention_mask": torch.ones(BATCH_SIZE, SOURCE_LENGTH, dtype=torch.long),
        "decoder_input_ids": torch.full((BATCH_SIZE, TARGET_LENGTH), 0),
    }
    shapes = {
        "input_ids": {0: batch, 1: source},
        "attention_mask": {0: batch, 1: source},
        "decoder_input_ids": {0: batch, 1: target},
    }
    with torch.no_grad():
        return torch.export.export(WholeGraph(copied), (), inputs, dynamic_shapes=shapes)


def longest_sequence(model: VanillaTransformerForConditionalGeneration) -> int | None:
    """Returns how many tokens a sequence may have: as many as there are learned positions, or `None` for any number."""
    config = model.config
    if config.position_embedding_type != "learned":
        return None
    return int(config.max_position_embeddings - config.position_offset)


def _keys_and_values(layer: Any) -> dict[str, torch.Tensor]:
    return {"key": layer.keys, "value": layer.values}
