"""How the Transformer generates, where the paper says something of its own (section 6.1)."""

import copy
import threading
from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.utils import GenerationMixin

from .attention_vanilla_transformer import check_cache_implementation
from .decoding_vanilla_transformer import SourceSharingCache
from .search_vanilla_transformer import LENGTH_PENALTIES, BeamSearch, GreedySearch, SourceLengthCriteria
from .static_decoding_vanilla_transformer import make_sharing_decoder

# Section 6.1: "We set the maximum output length during inference to input length + 50".
MAX_EXTRA_TOKENS = 50

# Held while older versions of the library put a cache where other threads would take it.
_PREPARING_CACHE = threading.Lock()


class VanillaTransformerGenerationMixin(GenerationMixin):
    """The library's `generate` with the paper's length limit instead of 20 tokens, and with `BeamSearch`.

    `length_penalty_type`, a setting of `generate` or of the generation config, says what divides the log-probabilities
    of beam search: `"gnmt"` is the paper's ((5 + length) / 6) ** length_penalty, `"transformers"`, which is also what
    is meant where there is none, the library's length ** length_penalty.

    With `cache_implementation="static"` greedy search and beam search compile their step where the library compiles its
    own: on CUDA, unless `disable_compile` is set (see `StaticDecoder`).
    """

    config: Any  # the model's VanillaTransformerConfig; typed so, it would contradict GenerationMixin's own base

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Lets `length_penalty_type` be given to `generate` like the settings that the library knows."""
        length_penalty_type = kwargs.pop("length_penalty_type", None)
        settings, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)  # type: ignore[misc]
        if length_penalty_type is not None:
            # Not by `update`, which would warn of the model's length penalty where the call asks for greedy search.
            vars(settings)["length_penalty_type"] = length_penalty_type
        length_penalty_type = getattr(settings, "length_penalty_type", None)
        if length_penalty_type not in (None, *LENGTH_PENALTIES):
            raise ValueError(
                f"length_penalty_type must be one of {', '.join(LENGTH_PENALTIES)}, not {length_penalty_type!r}."
            )
        check_cache_implementation(self.config._attn_implementation, settings.cache_implementation)
        if settings.decoder_start_token_id is None:  # as where the settings came from an encoder-only model
            settings.decoder_start_token_id = self.config.decoder_start_token_id
        return settings, model_kwargs

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

        `input_ids_length` counts the target tokens given, the start symbol included; `inputs_tensor` is the encoder's
        input, (batch, source length) or (batch, source length, d_model).
        """
        if has_default_max_length and generation_config.max_new_tokens is None:
            limit = inputs_tensor.shape[1] + MAX_EXTRA_TOKENS
            if self.config.position_embedding_type == "learned":
                positions = self.config.max_position_embeddings - self.config.position_offset
                # The last token generated is never fed back, hence one more than there are positions.
                limit = max(min(limit, positions - input_ids_length + 1), 1)
            generation_config.max_new_tokens = limit
            vars(generation_config)["_is_limited_by_source"] = True  # `update` would warn as above
        # The library types `self` as what a model and the mixin are together.
        return super()._prepare_generated_length(  # type: ignore[misc]
            generation_config,
            has_default_max_length,
            has_default_min_length,
            model_input_name,
            input_ids_length,
            inputs_tensor,
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

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: torch.LongTensor | None = None,
        **model_kwargs: Any,
    ) -> tuple[torch.LongTensor, dict[str, Any]]:
        """Repeats the target's side for beams or samples, and leaves the source's as it is: they share it."""
        source: dict[str, Any] = {
            name: model_kwargs.pop(name) for name in ("encoder_outputs", "attention_mask") if name in model_kwargs
        }
        # Not as an encoder-decoder, of which the library would repeat the source too.
        input_ids, model_kwargs = super()._expand_inputs_for_generation(  # type: ignore[misc]
            expand_size=expand_size, is_encoder_decoder=False, input_ids=input_ids, **model_kwargs
        )
        return input_ids, {**model_kwargs, **source}

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """Makes the library's cache one in which beams may share their source."""
        given = model_kwargs.get("past_key_values")
        with _PREPARING_CACHE:
            result = super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            # Older versions of the library keep a static cache for the next call, in which beams may share the sources
            # of fewer sentences, and which cannot be asked for its size if nothing was written to it.
            self.__dict__.pop("_cache", None)
        if given is not None:
            given._is_user_defined = True  # as newer versions of the library say
        cache = model_kwargs.get("past_key_values")
        if isinstance(cache, EncoderDecoderCache):
            model_kwargs["past_key_values"] = SourceSharingCache.adopt(cache)
        return result

    def _limit_by_source(
        self,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        prompt_length: int,
    ) -> StoppingCriteriaList:
        """Adds each sentence's own limit where `_prepare_generated_length` has set the batch's."""
        attention_mask = model_kwargs.get("attention_mask")
        if attention_mask is None or not getattr(generation_config, "_is_limited_by_source", False):
            return stopping_criteria
        limits = prompt_length + attention_mask.sum(dim=1) + MAX_EXTRA_TOKENS
        limits = limits.clamp(max=generation_config.max_length)
        return StoppingCriteriaList([*stopping_criteria, SourceLengthCriteria(limits)])

    def _sample(
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """The library's greedy search and sampling, with each sentence's own limit; `GreedySearch` where it suits."""
        common: dict[str, Any] = {
            "logits_processor": logits_processor,
            "stopping_criteria": self._limit_by_source(
                stopping_criteria, generation_config, model_kwargs, input_ids.shape[1]
            ),
            "generation_config": generation_config,
        }
        needs_library = (
            generation_config.do_sample
            or generation_config.return_dict_in_generate
            or generation_config.prefill_chunk_size is not None
            or synced_gpus
            or streamer is not None
        )
        decoder = None if needs_library else make_sharing_decoder(self, model_kwargs, generation_config)
        if decoder is not None:
            return GreedySearch(decoder, input_ids, **common).run()
        return super()._sample(  # type: ignore[misc]
            input_ids, synced_gpus=synced_gpus, streamer=streamer, **common, **model_kwargs
        )

    def _beam_search(
        self,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Beam search as `BeamSearch` does it, with each sentence's own limit."""
        criteria = self._limit_by_source(stopping_criteria, generation_config, model_kwargs, input_ids.shape[1])
        return BeamSearch(
            self,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=criteria,
            generation_config=generation_config,
            model_kwargs=model_kwargs,
            synced_gpus=synced_gpus,
        ).run()

    def compute_transition_scores(
        self,
        sequences: torch.Tensor,
        scores: tuple[torch.Tensor],
        beam_indices: torch.Tensor | None = None,
        normalize_logits: bool = False,
    ) -> torch.Tensor:
        """The library's method, over the target's vocabulary: a score of each token, (returned sequences, steps)."""
        return GenerationMixin.compute_transition_scores(
            self._as_target_side(), sequences, scores, beam_indices=beam_indices, normalize_logits=normalize_logits
        )
