"""The decoder alone, as a language model: the layers of Figure 1's right side without attention over a source.

Parameters have the names that they have in the encoder-decoder, so that the decoder of a translation model can be taken
over: `VanillaTransformerForCausalLM.from_pretrained("a-translation-model")`.

Shapes: B batch, T length, K keys (cached ones included), D d_model, V vocabulary.
"""

from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import logging
from transformers.utils.generic import TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention_vanilla_transformer import SelfAttention, check_cache_implementation
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .linear_vanilla_transformer import project
from .loss_vanilla_transformer import IGNORED_LABEL, compute_logits_and_loss, should_skip_logits
from .modeling_vanilla_transformer import (
    TransformerLayer,
    TransformerStack,
    VanillaTransformerEncoderLayer,
    is_checkpointing,
)
from .positions_vanilla_transformer import count_positions, count_tokens_before
from .pretrained_vanilla_transformer import SingleStackModel

if TYPE_CHECKING:  # see generation_vanilla_transformer.py: the files that only other files import
    from .decoding_vanilla_transformer import match_rows as match_rows
    from .dropout_vanilla_transformer import Dropout as Dropout

logger = logging.get_logger(__name__)


class VanillaTransformerCausalLayer(VanillaTransformerEncoderLayer):
    """Masked self-attention, feed-forward: without a source, all that differs from an encoder layer is the mask."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int) -> None:
        TransformerLayer.__init__(self, config, config.decoder_ffn_dim)
        self.self_attn = SelfAttention(config, config.decoder_attention_heads, layer_idx, is_causal=True)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)


class VanillaTransformerCausalDecoder(TransformerStack):
    """A stack of N identical layers that maps the tokens so far to the next."""

    _no_split_modules = ["VanillaTransformerCausalLayer"]
    _can_record_outputs = {
        "hidden_states": VanillaTransformerCausalLayer,
        "attentions": OutputRecorder(SelfAttention, index=1),
    }

    def __init__(self, config: VanillaTransformerConfig) -> None:
        layers = [VanillaTransformerCausalLayer(config, layer_idx) for layer_idx in range(config.decoder_layers)]
        super().__init__(config, config.vocab_size, layers)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Decodes tokens to states (B, T, D); the arguments are those of `VanillaTransformerDecoderModel.forward`."""
        position_ids = kwargs.pop("position_ids", None)
        embeddings = self.look_up(input_ids, inputs_embeds)
        length = embeddings.shape[1]
        past_length, upper_bound = count_positions(past_key_values, length)
        if position_ids is None:
            token_indices = count_tokens_before(attention_mask, length, past_length, embeddings.device)
        else:
            token_indices = position_ids.to(embeddings.device)
            if not torch.compiler.is_compiling():  # a graph cannot look at them; no text is longer than all together
                upper_bound = int(token_indices.max()) + 1
        hidden_states = self.embed(embeddings, token_indices.reshape(-1, length), upper_bound)
        layer_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        if use_cache and past_key_values is None:  # after the mask, which the library packs only where there is none
            past_key_values = DynamicCache(config=self.config)
        for layer in self.layers:
            hidden_states = layer(hidden_states, layer_mask, past_key_values=past_key_values, **kwargs)
        return BaseModelOutputWithPast(
            last_hidden_state=self.layer_norm(hidden_states), past_key_values=past_key_values
        )


class VanillaTransformerDecoderModel(SingleStackModel):
    """The decoder alone, which attends to no source: (B, T) tokens to (B, T, D) states."""

    side = "decoder"
    _tied_weights_keys = {"decoder.embed_tokens.weight": "shared.weight"}
    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?encoder\.", r"\.encoder_attn(_layer_norm)?\.", r"^lm_head\."]

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.make_shared_table()
        self.decoder = VanillaTransformerCausalDecoder(self.config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """Decodes tokens (B, T) with a mask (B, past + T), 1 at tokens and 0 at padding, to states (B, T, D).

        Positions follow from mask and cache. `position_ids` (B, T) replace them and, without a mask and a cache, say
        where packed texts begin: at each that is not the last one plus 1. It is an error to give a source.
        """
        given = cast(dict[str, Any], kwargs)
        others = ("encoder_hidden_states", "encoder_attention_mask")
        if useless := [name for name in others if given.pop(name, None) is not None]:
            raise ValueError(f"A decoder alone has no use for {', '.join(useless)}.")
        return self.decoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )


class VanillaTransformerForCausalLM(SingleStackModel, GenerationMixin):
    """A language model: the decoder, and the linear map whose softmax predicts the next token (3.4).

    Texts begin with the token that starts the decoder of a translation model, `<s>`, and end with `</s>`; prompts do
    not end. A tokenizer of this package that was loaded with `add_bos_token=True, add_eos_token=False` serves both:
    `tokenizer(prompt)`, and in training `tokenizer(text + tokenizer.eos_token)`.
    """

    side = "decoder"
    _tied_weights_keys = {
        "lm_head.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
    }
    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?encoder\.", r"\.encoder_attn(_layer_norm)?\."]

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.is_taken_over = config.is_encoder_decoder
        self.generation_config.decoder_start_token_id = None  # the library starts a decoder alone with bos_token_id
        self.model = VanillaTransformerDecoderModel(self.config)
        self.lm_head = nn.Linear(self.config.d_model, self.config.vocab_size, bias=self.config.lm_head_bias)
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Returns {target: source} of tied weights from the two independent flags of the configuration."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        tied = super().get_expanded_tied_weights_keys()
        tied.pop("lm_head.weight", None)
        if self.config.tie_word_embeddings:
            one_table = self.config.share_encoder_decoder_embeddings
            tied["lm_head.weight"] = "model.shared.weight" if one_table else "model.decoder.embed_tokens.weight"
        return tied

    def adjust_generation_fn(self, generation_config: GenerationConfig | None, *args: Any, **kwargs: Any) -> None:
        """Loads the settings of `generate`, but not those of a translation model, whose search knows a source."""
        if generation_config is not None or not self.is_taken_over:
            super().adjust_generation_fn(generation_config, *args, **kwargs)  # type: ignore[misc]

    def generate(self, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Goes on with prompts (B, T), padded on the left, as in the library, and warns of prompts that have ended."""
        prompts = kwargs.get("input_ids") if inputs is None else inputs
        if prompts is not None and self._find_ended(prompts):
            logger.warning_once(
                f"A prompt ends with eos_token_id={self.config.eos_token_id}, as whole texts do, so that nothing is to "
                "be expected after it. Load the tokenizer for prompts with add_bos_token=True, add_eos_token=False."
            )
        return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        settings, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)  # type: ignore[misc]
        check_cache_implementation(self.config._attn_implementation, settings.cache_implementation)
        return settings, model_kwargs

    def _prepare_cache_for_generation(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        if is_checkpointing(self):
            generation_config.use_cache = False
        return super()._prepare_cache_for_generation(generation_config, *args, **kwargs)  # type: ignore[misc]

    def _find_ended(self, prompts: torch.Tensor) -> bool:
        """Whether some prompt (B, T) has tokens and then `</s>`, which without any may be what begins a text."""
        ends = self.config.eos_token_id
        if ends is None or prompts.shape[-1] == 0:
            return False
        ends = ends if isinstance(ends, list) else [ends]
        others = [each for each in (self.config.bos_token_id, self.config.pad_token_id) if each is not None]
        ended = torch.isin(prompts[:, -1], prompts.new_tensor(ends))
        has_tokens = torch.isin(prompts[:, :-1], prompts.new_tensor(ends + others), invert=True).any(dim=-1)
        return bool((ended & has_tokens).any())

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        skip_logits: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """Predicts the next token at each position.

        Arguments are those of the decoder, and

        - `labels`: the tokens again (B, T), not shifted; -100 where the loss shall not count.
        - `shift_labels`: (B, T), what shall follow each token, from collators that shift labels themselves.
        - `logits_to_keep`: number of last positions to return logits for, 0 for all; or their indices.
        - `skip_logits`: whether to return `logits=None` with the loss, which takes much less memory. Unlike an
          encoder-decoder it does not by default, since trainers for language models read the logits.
        - `num_items_in_batch`: the number of tokens to divide the loss by.

        Returns:
            `CausalLMOutputWithPast` with `logits` (B, T, V), unless skipped, and with labels `loss`, in nats per token:
            smoothed in training mode, the plain negative log-likelihood in evaluation mode.
        """
        skip_logits = should_skip_logits(skip_logits, labels, self.training)
        num_items_in_batch = kwargs.pop("num_items_in_batch", None)
        shifted: torch.Tensor | None = kwargs.pop("shift_labels", None)  # type: ignore[typeddict-item]
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=False if labels is not None else use_cache,
            **kwargs,
        )
        states = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = None, None
        if labels is None:
            logits = project(self.lm_head, states[:, kept])
        else:
            # What follows each token; nothing is known to follow the last.
            following = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL) if shifted is None else shifted
            smoothing = self.config.label_smoothing if self.training else 0.0
            logits, loss = compute_logits_and_loss(
                self.lm_head, states, following, smoothing, num_items_in_batch, skip_logits
            )
            logits = None if logits is None else logits[:, kept]
        others: dict[str, Any] = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return CausalLMOutputWithPast(
            loss=cast(torch.FloatTensor | None, loss), logits=cast(torch.FloatTensor | None, logits), **others
        )
