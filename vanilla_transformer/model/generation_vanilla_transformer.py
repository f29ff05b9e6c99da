"""The Transformer with its output layer (section 3.4), and how it generates (section 6.1).

`modeling_vanilla_transformer.py` has all before it. The two are apart so that an encoder or a decoder alone, which
imports the layers, does not bring the code of the searches and the pipelines along when it is saved.
"""

import copy
import threading
from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.logits_process import ForcedEOSTokenLogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils.generic import TransformersKwargs, can_return_tuple

from .attention_vanilla_transformer import CrossAttention, SelfAttention, check_cache_implementation
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .decoding_vanilla_transformer import Phrase, SourceSharingCache, match_rows
from .loss_vanilla_transformer import compute_logits_and_loss, shift_tokens_right, should_skip_logits
from .modeling_vanilla_transformer import (
    VanillaTransformerDecoder,
    VanillaTransformerDecoderLayer,
    VanillaTransformerModel,
    is_checkpointing,
)
from .positions_vanilla_transformer import count_learned_positions
from .pretrained_vanilla_transformer import VanillaTransformerPreTrainedModel
from .search_vanilla_transformer import (
    LENGTH_PENALTIES,
    BeamSearch,
    GreedySearch,
    SourceLengthCriteria,
    SourceLengthForcedEOS,
)
from .static_decoding_vanilla_transformer import SharingDecoder, make_sharing_decoder

if TYPE_CHECKING:
    # Never executed. Saving a model copies the files that import lines name, and a process without this package finds
    # there the pipelines that config.json names. The other three are named for models of the Hub: the library copies
    # the files that this one names wherever one is missing, but what those import only together with them.
    from .dropout_vanilla_transformer import Dropout as Dropout
    from .linear_vanilla_transformer import linear as linear
    from .pipeline_vanilla_transformer import TranslationPipeline as TranslationPipeline
    from .positions_vanilla_transformer import SinusoidalPositions as SinusoidalPositions

# Section 6.1: "We set the maximum output length during inference to input length + 50".
MAX_EXTRA_TOKENS = 50

# No user of a translation model sets all of these. `Seq2SeqTrainer` does: after each batch that it generates for, it
# writes all the library's defaults into the model's generation config, and its limit of 20 tokens (`max_length`).
_TRAINERS_DEFAULTS = ("encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "min_length", "typical_p")

# The arguments with words that must appear; the last was transformers 4's, and is refused.
_FORCED_WORDS = ("force_words_ids", "force_words_ids_per_sentence", "constraints")

# Held while older versions of the library put a cache where other threads would take it.
_PREPARING_CACHE = threading.Lock()


class VanillaTransformerGenerationMixin(GenerationMixin):
    """The library's `generate` with the paper's length limit instead of 20 tokens, and with `BeamSearch`.

    `length_penalty_type`, a setting like others, says what divides the log-probabilities of beam search: `"gnmt"` is
    the paper's ((5 + length) / 6) ** length_penalty, `"transformers"`, or none, the library's length ** length_penalty.

    Words that must appear (lexical constraints), for beam search:

    - `force_words_ids`: token ids, one list for each word or phrase, `[[5], [7, 8]]`; a list of such lists has
      alternatives, one of which must appear, `[[[5], [6]], [[7, 8]]]`. They count for every sentence. What is given
      twice must appear twice. The prompt does not count. A `Phrase` in place of a list of token ids also says which
      tokens may stand before and behind it.
    - `force_words_ids_per_sentence`: one such list, or an empty one, for each source sentence, besides the above.

    If no translation within the length limit has them all, the best of those with the fewest missing is returned.

    With `cache_implementation="static"` greedy search and beam search record their step as a CUDA graph, on a GPU,
    unless `disable_compile` is set; with a `compile_config` the library compiles (see `StaticDecoder`).
    """

    config: Any  # the model's VanillaTransformerConfig; typed so, it would contradict GenerationMixin's own base

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Lets `length_penalty_type` be given to `generate` like the settings that the library knows."""
        configs = (self.generation_config, generation_config or self.generation_config)
        for each in configs:
            _remove_trainers_limit(each)
        has_no_limit = kwargs.get("max_length") is None and all(each.max_length is None for each in configs)
        length_penalty_type = kwargs.pop("length_penalty_type", None)
        forced = {name: kwargs.pop(name, None) for name in _FORCED_WORDS}
        settings, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)  # type: ignore[misc]
        if length_penalty_type is not None:
            # Not by `update`, which would warn of the model's length penalty where the call asks for greedy search.
            vars(settings)["length_penalty_type"] = length_penalty_type
        vars(settings)["_has_no_limit"] = has_no_limit
        length_penalty_type = getattr(settings, "length_penalty_type", None)
        if length_penalty_type not in (None, *LENGTH_PENALTIES):
            raise ValueError(
                f"length_penalty_type must be one of {', '.join(LENGTH_PENALTIES)}, not {length_penalty_type!r}."
            )
        if model_kwargs.get("decoder_inputs_embeds") is not None:
            raise ValueError("generate() goes on with tokens: give decoder_input_ids instead of decoder_inputs_embeds.")
        if isinstance(outputs := model_kwargs.get("encoder_outputs"), tuple):
            model_kwargs["encoder_outputs"] = BaseModelOutput(*outputs[:3])  # the library reads lengths from no tuple
        self._set_forced_words(settings, forced)
        check_cache_implementation(self.config._attn_implementation, settings.cache_implementation)
        if settings.decoder_start_token_id is None:  # as where the settings came from an encoder-only model
            settings.decoder_start_token_id = self.config.decoder_start_token_id
        return settings, model_kwargs

    def _set_forced_words(self, settings: GenerationConfig, forced: dict[str, Any]) -> None:
        """Checks words that must appear, and hides them from the library, which would send us away."""
        for name in _FORCED_WORDS:
            if forced[name] is None:
                forced[name] = getattr(settings, name, None)
            vars(settings)[name] = None
        if not any(value is not None for value in forced.values()):
            return
        if forced["constraints"] is not None:
            raise ValueError("constraints were objects of transformers 4: give their token ids as force_words_ids.")
        ends = settings.eos_token_id
        ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        size = self.config.target_vocab_size
        common = _read_words(_FORCED_WORDS[0], forced[_FORCED_WORDS[0]], size, ends)
        name = _FORCED_WORDS[1]
        own = forced[name]
        if own is not None and not isinstance(own, list | tuple):
            raise ValueError(f"{name} must have one list for each source sentence; it is {own!r}.")
        if own is not None:
            own = [_read_words(f"{name}[{number}]", words, size, ends) for number, words in enumerate(own)]
        if (common or any(own or [])) and ((settings.num_beams or 1) < 2 or settings.do_sample):
            raise ValueError(
                "Words that must appear need beam search: set num_beams to 2 or more (5 or more is better) and "
                f"do_sample=False; here are num_beams={settings.num_beams} and do_sample={settings.do_sample}."
            )
        vars(settings)["_forced_words"] = (common, own)

    def _prepare_generated_length(
        self,
        generation_config: GenerationConfig,
        has_default_max_length: bool,
        has_default_min_length: bool,
        model_input_name: str,
        input_ids_length: int,
        inputs_tensor: torch.Tensor,
    ) -> GenerationConfig:
        """Sets the longest output to the (padded) input length + 50 where neither call nor configuration sets one."""
        # The library has looked at the limit before it was removed.
        has_default_max_length = has_default_max_length or getattr(generation_config, "_has_no_limit", False)
        if has_default_max_length and generation_config.max_new_tokens is None:
            generation_config.max_new_tokens = self.find_longest_output(inputs_tensor.shape[1], input_ids_length)
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

    def find_longest_output(self, source_length: int, prompt_length: int) -> int:
        """Returns how many tokens may come behind the prompt where neither call nor configuration sets a limit."""
        limit = source_length + MAX_EXTRA_TOKENS
        if (positions := count_learned_positions(self.config)) is not None:
            # The last token generated is never fed back, hence one more than there are positions.
            limit = max(min(limit, positions - prompt_length + 1), 1)
        return limit

    def _as_target_side(self) -> Any:
        """Returns the same modules with the target's size as `config.vocab_size`, where the library looks for it."""
        if self.config.target_vocab_size == self.config.vocab_size:
            return self
        view: Any = copy.copy(self)
        view.config = copy.copy(self.config)
        view.config.vocab_size = self.config.target_vocab_size
        return view

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        """The library's rules, over the target's vocabulary: watermarks divide it."""
        return GenerationMixin._get_logits_processor(self._as_target_side(), *args, **kwargs)

    def _get_candidate_generator(self, *args: Any, **kwargs: Any) -> Any:
        """The library's drafts, over the target's vocabulary: prompt lookup asks the rules what is allowed."""
        return GenerationMixin._get_candidate_generator(self._as_target_side(), *args, **kwargs)

    def _expand_inputs_for_generation(
        self,
        expand_size: int = 1,
        is_encoder_decoder: bool = False,
        input_ids: torch.LongTensor | None = None,
        **model_kwargs: Any,
    ) -> tuple[torch.LongTensor, dict[str, Any]]:
        """Repeats the target's side for beams or samples; the source's only for methods that somebody else wrote."""
        if is_encoder_decoder and not self.has_own_methods():
            return super()._expand_inputs_for_generation(  # type: ignore[misc]
                expand_size=expand_size, is_encoder_decoder=True, input_ids=input_ids, **model_kwargs
            )
        source: dict[str, Any] = {
            name: model_kwargs.pop(name) for name in ("encoder_outputs", "attention_mask") if name in model_kwargs
        }
        # `is_encoder_decoder=False`, or the library would repeat the source too.
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
        if is_checkpointing(self):
            generation_config.use_cache = False
        with _PREPARING_CACHE:
            result = super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
            # Older versions of the library keep a static cache for the next call, which may be of another batch.
            self.__dict__.pop("_cache", None)
        if given is not None:
            given._is_user_defined = True  # as newer versions of the library say
        cache = model_kwargs.get("past_key_values")
        if isinstance(cache, EncoderDecoderCache):
            model_kwargs["past_key_values"] = SourceSharingCache.adopt(cache)
        return result

    def _limit_by_source(
        self,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        input_ids: torch.Tensor,
    ) -> dict[str, Any]:
        """Adds each sentence's own limit where `_prepare_generated_length` has set the batch's."""
        attention_mask = match_rows(model_kwargs.get("attention_mask"), len(input_ids) // generation_config.num_beams)
        has_limit = getattr(generation_config, "_is_limited_by_source", False)
        if has_limit and attention_mask is not None and attention_mask.ndim == 2:
            limits = input_ids.shape[1] + attention_mask.sum(dim=1) + MAX_EXTRA_TOKENS
            limits = limits.clamp(max=generation_config.max_length)
            stopping_criteria = StoppingCriteriaList([*stopping_criteria, SourceLengthCriteria(limits)])
            logits_processor = LogitsProcessorList(
                SourceLengthForcedEOS(limits, each.eos_token_id)
                if type(each) is ForcedEOSTokenLogitsProcessor
                else each
                for each in logits_processor
            )
        return {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}

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
        common = self._limit_by_source(logits_processor, stopping_criteria, generation_config, model_kwargs, input_ids)
        common["generation_config"] = generation_config
        needs_library = (
            generation_config.do_sample
            or generation_config.return_dict_in_generate
            or generation_config.prefill_chunk_size is not None
            or synced_gpus
            or streamer is not None
        )
        decoder = None if needs_library else self.make_decoder(model_kwargs, generation_config)
        if decoder is not None:
            return GreedySearch(decoder, input_ids, **common).run()
        common |= {"synced_gpus": synced_gpus, "streamer": streamer}
        return super()._sample(input_ids, **common, **model_kwargs)  # type: ignore[misc]

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
        rules = self._limit_by_source(logits_processor, stopping_criteria, generation_config, model_kwargs, input_ids)
        rules |= {"generation_config": generation_config, "model_kwargs": model_kwargs, "synced_gpus": synced_gpus}
        num_sentences = len(input_ids) // generation_config.num_beams
        common, own = getattr(generation_config, "_forced_words", ([], None))
        if own is not None and len(own) != num_sentences:
            raise ValueError(f"{_FORCED_WORDS[1]} has {len(own)} lists for {num_sentences} source sentences.")
        rules["words"] = [common + each for each in own or [[]] * num_sentences]
        return BeamSearch(self, input_ids, **rules).run()

    def make_decoder(self, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> SharingDecoder | None:
        """Returns what runs the model step by step in a search whose beams share memory, if that suits the inputs."""
        return make_sharing_decoder(self, model_kwargs, generation_config)

    def has_own_methods(self) -> bool:
        """Whether nobody has replaced the methods that generation does without, by a subclass or (peft) an assignment.

        Hooks and modules in place of torch's are another matter: see `can_step_fast`.
        """
        parts: Any = self
        layers = parts.model.decoder.layers
        attentions = [attention for layer in layers for attention in (layer.self_attn, layer.encoder_attn)]
        modules = [self, parts.model, parts.model.decoder, *layers, *attentions]
        return all(map(_is_unchanged, modules)) and vars(self).keys().isdisjoint(_GENERATION_METHODS)

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


class VanillaTransformerForConditionalGeneration(
    VanillaTransformerGenerationMixin, VanillaTransformerPreTrainedModel, GenerationMixin
):
    """The Transformer: encoder, decoder, and the linear map whose softmax predicts the next token (3.4)."""

    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        # From the class's name the library would take a loss that shifts labels, and count one target too few.
        self.loss_type = None  # type: ignore[assignment]
        self.model = VanillaTransformerModel(config)
        self.lm_head = nn.Linear(config.d_model, config.target_vocab_size, bias=config.lm_head_bias)
        # Or the library forgets `length_penalty_type`, a setting it does not know, when it loads a saved model.
        self.generation_config._from_model_config = False
        self.post_init()

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Saves as the library does, without the settings that `Seq2SeqTrainer` makes, such as a limit of 20 tokens."""
        remove_trainers_defaults(self.generation_config)
        super().save_pretrained(*args, **kwargs)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Returns {target: source} of tied weights from the two independent flags of the configuration."""
        shared = self.model.get_expanded_tied_weights_keys() if all_submodels else {}
        tied = {f"model.{target}": f"model.{source}" for target, source in shared.items()}
        if self.config.tie_word_embeddings:
            one_table = self.config.share_encoder_decoder_embeddings
            tied["lm_head.weight"] = "model.shared.weight" if one_table else "model.decoder.embed_tokens.weight"
        return tied

    def get_input_embeddings(self) -> nn.Embedding:
        """Returns the source embedding table, (V, D)."""
        return self.model.get_input_embeddings()

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns the decoder's input (B, T) for labels (B, T); used by `DataCollatorForSeq2Seq`."""
        pad_token_id, start_token_id = self.config.pad_token_id, self.config.decoder_start_token_id
        if pad_token_id is None or start_token_id is None:
            raise ValueError(
                "Labels become decoder inputs by means of pad_token_id and decoder_start_token_id, but these are "
                f"{pad_token_id} and {start_token_id} in the configuration."
            )
        return shift_tokens_right(labels, pad_token_id, start_token_id)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.LongTensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[torch.FloatTensor, ...] | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        decoder_inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        skip_logits: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqLMOutput:
        """Predicts the next token at each position of the target.

        Arguments are those of [`VanillaTransformerModel`], and

        - `labels`: target tokens (B, T), not shifted; -100 where the loss shall not count. `decoder_input_ids` are made
          from them if not given.
        - `skip_logits`: whether to return `logits=None`; by default in training mode with labels, whose loss then needs
          no logits (see `fused_cross_entropy`).
        - `num_items_in_batch`: the number of tokens to divide the loss by (see `label_smoothed_cross_entropy`).

        Returns:
            `Seq2SeqLMOutput` with `logits` (B, T, V), unless skipped, and with labels `loss`, in nats per token:
            smoothed in training mode, the plain negative log-likelihood (log of the perplexity) in evaluation mode.
        """
        skip_logits = should_skip_logits(skip_logits, labels, self.training)
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        if labels is not None:
            use_cache = False
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = cast(torch.LongTensor, self.prepare_decoder_input_ids_from_labels(labels))
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        smoothing = self.config.label_smoothing if self.training else 0.0
        logits, loss = compute_logits_and_loss(
            self.lm_head, outputs.last_hidden_state, labels, smoothing, num_items_in_batch, skip_logits
        )
        others: dict[str, Any] = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return Seq2SeqLMOutput(
            loss=cast(torch.FloatTensor | None, loss), logits=cast(torch.FloatTensor | None, logits), **others
        )


def _has_trainers_defaults(config: GenerationConfig) -> bool:
    return all(getattr(config, name, None) is not None for name in _TRAINERS_DEFAULTS)


def _remove_trainers_limit(config: GenerationConfig) -> None:
    if config.max_length == 20 and _has_trainers_defaults(config):
        config.max_length = None


def remove_trainers_defaults(config: GenerationConfig) -> None:
    """Takes from a model's own settings what `Seq2SeqTrainer` has put among them (see `_TRAINERS_DEFAULTS`)."""
    if _has_trainers_defaults(config):
        for name, value in GenerationConfig._get_default_generation_params().items():
            if getattr(config, name, None) == value:
                setattr(config, name, None)


def _read_words(name: str, words: Any, vocab_size: int, ends: list[int]) -> list[list[Phrase]]:
    """Returns constraints, each as a list of alternatives."""

    def read_phrase(phrase: Any, place: str) -> Phrase:
        if isinstance(phrase, Phrase):
            return phrase._replace(tokens=read_phrase(list(phrase.tokens), place).tokens)
        if not isinstance(phrase, list | tuple) or not phrase:
            raise ValueError(f"{place} must be a list of token ids that is not empty; it is {phrase!r}.")
        for token in phrase:
            if type(token) is not int or not 0 <= token < vocab_size or token in ends:
                raise ValueError(
                    f"{place} has {token!r}; it must have token ids: integers from 0 to {vocab_size - 1}, but not the "
                    f"end-of-sentence token {' or '.join(map(str, ends))}."
                )
        return Phrase(tuple(phrase))

    if words is None:
        return []
    if not isinstance(words, list | tuple):
        raise ValueError(f"{name} must be a list of lists of token ids, as [[5], [7, 8]]; it is {words!r}.")
    constraints = []
    for number, word in enumerate(words):
        place = f"{name}[{number}]"
        is_list = isinstance(word, list | tuple) and not isinstance(word, Phrase)
        phrases = word if is_list and word and isinstance(word[0], list | tuple) else [word]
        constraints.append([read_phrase(each, place) for each in phrases])
    return constraints


# The methods that a fast step takes the place of, as they are here.
_GENERATION_METHODS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_reorder_cache")
_OWN_METHODS: dict[type, dict[str, Any]] = {
    kind: {name: getattr(kind, name, None) for name in names}
    for kind, names in (
        (VanillaTransformerForConditionalGeneration, ("forward", *_GENERATION_METHODS)),
        (VanillaTransformerModel, ("forward",)),
        (VanillaTransformerDecoder, ("forward", "embed")),
        (VanillaTransformerDecoderLayer, ("forward", "residual", "feed_forward")),
        (SelfAttention, ("forward", "attend", "split_heads")),
        (CrossAttention, ("forward", "attend", "split_heads")),
    )
}


def _is_unchanged(module: nn.Module) -> bool:
    own = next((methods for kind, methods in _OWN_METHODS.items() if isinstance(module, kind)), None)
    return own is not None and all(getattr(type(module), name, None) is method for name, method in own.items())
