"""Runs the decoder step by step for beam search: over shared histories, or over any cache as the library does.

Shapes: B  sentences, N  beams, R = B * N  rows, S  source length, D  d_model, V  target vocabulary.
"""

from typing import Any, cast

import torch
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache
from transformers.generation.configuration_utils import GenerationConfig
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput

from .cache_vanilla_transformer import SharedHistoryLayer, SourceSharingCache
from .fast_step_vanilla_transformer import can_step_fast, step_fast
from .linear_vanilla_transformer import is_watched


class SharedHistoryDecoder:
    """Runs the model over beams whose histories lie in one place, so that a change of beams copies nothing.

    Args:
        model: The model, with eager or SDPA attention.
        model_kwargs: `encoder_outputs` (B, S, D) and `attention_mask` (B, S) or `None`; `decoder_attention_mask` (R,
            prompt length) or `None`; an empty dynamic cache as `past_key_values`.
        num_beams: N.
    """

    @staticmethod
    def suits(model: Any, model_kwargs: dict[str, Any]) -> bool:
        """Says whether the model can be run in this way with these inputs."""
        cache = model_kwargs.get("past_key_values")
        if not isinstance(cache, SourceSharingCache) or getattr(cache, "_is_user_defined", False):
            return False
        if model.config._attn_implementation not in ("eager", "sdpa"):
            return False  # others do not take the mask over the shared history
        layers: list[Any] = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
        return all(type(layer) is DynamicLayer and layer.get_seq_length() == 0 for layer in layers)

    def __init__(self, model: Any, model_kwargs: dict[str, Any], num_beams: int) -> None:
        self.model = model
        self.num_beams = num_beams
        self.layers = [SharedHistoryLayer() for _ in range(model.config.decoder_layers)]
        self.cache = SourceSharingCache(
            Cache(layers=[*self.layers]), model_kwargs["past_key_values"].cross_attention_cache
        )
        self.encoder_hidden_states = states = model_kwargs["encoder_outputs"][0]
        # Once for all steps. Its rows of queries are all alike, so that one serves any number.
        self.source_mask: Any = create_bidirectional_mask(
            config=model.config,
            inputs_embeds=states[:, :1],
            attention_mask=model_kwargs.get("attention_mask"),
            encoder_hidden_states=states,
        )
        prompt_mask = model_kwargs.get("decoder_attention_mask")
        self.prompt_mask = None if prompt_mask is None else prompt_mask[::num_beams]
        # (B, N, entries): which entries of the shared history are a beam's own. A single beam without padding sees all.
        self.visible: torch.Tensor | None = None
        self.sees_all = num_beams == 1 and prompt_mask is None
        self.is_fused = not is_watched(model) and can_step_fast(model)

    def step(self, sequences: torch.Tensor) -> torch.Tensor:
        """Feeds the tokens that are new.

        Args:
            sequences: All tokens so far, (B, N, length).

        Returns:
            Logits of the next token: at first (B, V), since all beams are the same, then (R, V).
        """
        if self.layers[0].length == 0:
            return self._call_model(sequences[:, 0], self.prompt_mask)
        rows, mask = sequences[:, :, -1:].flatten(0, 1), None
        if self.visible is not None:
            mask = torch.zeros(self.visible.shape, dtype=self.model.dtype, device=self.visible.device)
            mask = mask.masked_fill_(~self.visible, torch.finfo(mask.dtype).min)[:, None]
        return self._call_fused(rows[:, 0], mask) if self.is_fused else self._call_model(rows, mask)

    def _call_model(self, rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        outputs = self.model(
            decoder_input_ids=rows,
            decoder_attention_mask=mask,
            encoder_outputs=BaseModelOutput(last_hidden_state=self.encoder_hidden_states),
            attention_mask=self.source_mask,
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
        )
        return outputs.logits[:, -1]

    def _call_fused(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Does what the model does, without the cost of calling its modules."""
        decoder = self.model.model.decoder
        embeddings = decoder.embed_tokens(tokens)[:, None]
        hidden_states = decoder.embed(embeddings, self._positions(), self.layers[0].length + 1)[:, 0]
        sources = self.cache.cross_attention_cache.layers
        return step_fast(self.model, hidden_states, self.layers, sources, mask, self.source_mask)

    def _positions(self) -> torch.Tensor:
        if self.prompt_mask is None:
            return torch.full((1, 1), self.layers[0].length, device=self.encoder_hidden_states.device)
        return cast(torch.Tensor, self.visible).sum(dim=2).view(-1, 1) - 1

    def follow(self, beams: torch.Tensor) -> None:
        """Makes beam n of a sentence the continuation of beam `beams[:, n]`, (B, N)."""
        if self.sees_all:
            return
        num_sentences, num_beams = beams.shape
        if self.visible is None:
            shape = (num_sentences, 1, self.layers[0].num_entries)
            prompt = torch.ones(shape, dtype=torch.bool, device=beams.device)
            if self.prompt_mask is not None:
                prompt = self.prompt_mask[:, None].bool()
            history = prompt.expand(-1, num_beams, -1)
        else:
            history = self.visible.gather(1, beams[:, :, None].expand(-1, -1, self.visible.shape[2]))
        own = torch.eye(num_beams, dtype=torch.bool, device=beams.device).expand(num_sentences, -1, -1)
        self.visible = torch.cat([history, own], dim=2)

    def keep_sentences(self, indices: torch.Tensor) -> None:
        """Goes on with these sentences only."""
        for layer in self.layers:
            layer.keep_sentences(indices)
        self.cache.cross_attention_cache.reorder_cache(cast(torch.LongTensor, indices))
        self.encoder_hidden_states = self.encoder_hidden_states[indices]
        if self.visible is not None:
            self.visible = self.visible[indices]
        if self.source_mask is not None:
            self.source_mask = self.source_mask[indices]


class ReorderingDecoder:
    """Runs the model over whatever cache and attention were asked for, copying histories as the library does."""

    def __init__(self, model: Any, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> None:
        self.model = model
        self.model_kwargs = model_kwargs
        self.generation_config = generation_config
        self.outputs: Any = None  # the model's, of the last step

    def step(self, sequences: torch.Tensor) -> Any:
        """Feeds the tokens (B, N, length so far) that are new."""
        sequences = sequences.flatten(0, 1)
        if self.outputs is None:
            outputs = self.model._prefill(sequences, self.generation_config, self.model_kwargs)
        else:
            new = 1 if self.model_kwargs["use_cache"] else None
            inputs = self.model.prepare_inputs_for_generation(sequences, next_sequence_length=new, **self.model_kwargs)
            outputs = self.model(**inputs, return_dict=True)
        self.outputs = outputs
        self.model_kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self.model_kwargs, is_encoder_decoder=True
        )
        logits = outputs.logits[:, -1]
        outputs.logits = None  # which may be large, and is not needed beside the next one
        return logits

    @property
    def cache(self) -> EncoderDecoderCache | None:
        """The cache, if there is one."""
        return self.model_kwargs.get("past_key_values")

    def follow(self, beams: torch.Tensor) -> None:
        """Makes beam n of a sentence the continuation of beam `beams[:, n]`, (B, N)."""
        if self.cache is not None:
            sentences = torch.arange(beams.shape[0], device=beams.device)[:, None]
            rows = (sentences * beams.shape[1] + beams).flatten()
            self.cache.reorder_cache(cast(torch.LongTensor, rows))
