"""How the Transformer generates, where the paper says something of its own (section 6.1)."""

import copy
from typing import Any

import torch
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.utils import GenerationMixin

# Section 6.1: "We set the maximum output length during inference to input length + 50".
MAX_EXTRA_TOKENS = 50


class VanillaTransformerGenerationMixin(GenerationMixin):
    """The library's `generate` with the paper's length limit instead of 20 tokens, and for two vocabularies too."""

    config: Any  # the model's VanillaTransformerConfig; typed so, it would contradict GenerationMixin's own base

    def _prepare_generated_length(
        self,
        generation_config: GenerationConfig,
        has_default_max_length: bool,
        has_default_min_length: bool,
        model_input_name: str,
        input_ids_length: int,
        inputs_tensor: torch.Tensor,
    ) -> GenerationConfig:
        """Sets the longest output to the (padded) input length + 50 where neither call nor configuration sets one.

        Args:
            generation_config: What to complete.
            has_default_max_length: Whether nobody set `max_length`.
            has_default_min_length: Whether nobody set `min_length`.
            model_input_name: Name of the encoder's input.
            input_ids_length: Number of target tokens given, the start symbol included.
            inputs_tensor: The encoder's input, (batch, source length) or (batch, source length, d_model).

        Returns:
            The generation configuration with its lengths set.
        """
        if has_default_max_length and generation_config.max_new_tokens is None:
            generation_config.max_new_tokens = self._limit_new_tokens(inputs_tensor.shape[1], input_ids_length)
        # The library types `self` as what a model and the mixin are together.
        return super()._prepare_generated_length(  # type: ignore[misc]
            generation_config=generation_config,
            has_default_max_length=has_default_max_length,
            has_default_min_length=has_default_min_length,
            model_input_name=model_input_name,
            input_ids_length=input_ids_length,
            inputs_tensor=inputs_tensor,
        )

    def _as_target_side(self) -> Any:
        """Returns a view of the model for library code that reads the size of the scores from `config.vocab_size`.

        That is the source's size where there are two vocabularies. The view shares every module with the model; only
        its configuration is a copy, in which the target's size stands.
        """
        if self.config.target_vocab_size == self.config.vocab_size:
            return self
        view: Any = copy.copy(self)
        view.config = copy.copy(self.config)
        view.config.vocab_size = self.config.target_vocab_size
        return view

    def _beam_search(
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """The library's beam search, over the target's vocabulary (transformers 5.12 takes the source's size)."""
        return GenerationMixin._beam_search(
            self._as_target_side(),
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            **model_kwargs,
        )

    def compute_transition_scores(
        self,
        sequences: torch.Tensor,
        scores: tuple[torch.Tensor],
        beam_indices: torch.Tensor | None = None,
        normalize_logits: bool = False,
    ) -> torch.Tensor:
        """The library's method, over the target's vocabulary.

        Args:
            sequences: Generated tokens (batch * returned sequences, target length).
            scores: One tensor (batch * beams, target vocabulary) per step, as `generate` returns them.
            beam_indices: (batch * returned sequences, steps), as beam search returns them.
            normalize_logits: Whether to apply log-softmax to the scores.

        Returns:
            The score of each generated token, (batch * returned sequences, steps).
        """
        return GenerationMixin.compute_transition_scores(
            self._as_target_side(), sequences, scores, beam_indices=beam_indices, normalize_logits=normalize_logits
        )

    def _limit_new_tokens(self, source_length: int, target_length: int) -> int:
        limit = source_length + MAX_EXTRA_TOKENS
        if self.config.position_embedding_type == "learned":
            positions = self.config.max_position_embeddings - self.config.position_offset
            # The last token generated is never fed back, hence one more than there are positions.
            limit = max(min(limit, positions - target_length + 1), 1)
        return limit


__all__ = ["VanillaTransformerGenerationMixin"]
