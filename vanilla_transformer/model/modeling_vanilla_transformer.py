"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017), in the order of the paper's section 3.

    3.1  encoder and decoder layers, residual connections    TransformerLayer, ...EncoderLayer, ...DecoderLayer
    3.2  scaled dot-product and multi-head attention         attention_vanilla_transformer.py
    3.3  position-wise feed-forward networks                 TransformerLayer.feed_forward
    3.4  embeddings                                          TransformerStack.embed
    3.4  output layer and softmax                            generation_vanilla_transformer.py
    3.5  positional encoding                                 positions_vanilla_transformer.py
    5.4  dropout, label smoothing                            dropout_vanilla_transformer.py, loss_vanilla_transformer.py

Shapes are written as
    B  batch, S  source length, T  target length, L  either length, D  d_model, V  vocabulary.
Masks are true (or 1) where attention is allowed and false (or 0) at padding.

`project(linear, x)` is `linear(x)` by the faster matrix library, and `fold_rows` lets the beams of a sentence share its
source. By default, faster code replaces parts of this file; tests show that the results are equal: torch's SDPA
replaces equation 1 (`attn_implementation="eager"` runs ours), a chunked loss the logits in training
(`skip_logits=False` builds them), and `decoding_vanilla_transformer.py` the decoder's layers from the second generated
token on (not with eager attention).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Unpack, cast

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions, Seq2SeqModelOutput
from transformers.utils.generic import ModelOutput, TransformersKwargs, can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention_vanilla_transformer import CrossAttention, SelfAttention, fold_rows
from .configuration_vanilla_transformer import VanillaTransformerConfig
from .decoding_vanilla_transformer import SourceSharingCache, count_source_rows, match_rows
from .dropout_vanilla_transformer import Dropout
from .linear_vanilla_transformer import project
from .positions_vanilla_transformer import LearnedPositions, SinusoidalPositions, count_positions, count_tokens_before
from .pretrained_vanilla_transformer import VanillaTransformerPreTrainedModel

# 3.1  Encoder and decoder stacks


class TransformerLayer(GradientCheckpointingLayer):
    """What encoder and decoder layers share: residual connections (3.1) and the feed-forward network (3.3)."""

    def __init__(self, config: VanillaTransformerConfig, ffn_dim: int) -> None:
        super().__init__()
        self.normalize_before = config.normalize_before
        self.activation_fn = ACT2FN[config.activation_function]
        self.dropout = Dropout(config.dropout)
        self.activation_dropout = Dropout(config.activation_dropout)
        self.fc1 = nn.Linear(config.d_model, ffn_dim, bias=config.ffn_bias)
        self.fc2 = nn.Linear(ffn_dim, config.d_model, bias=config.ffn_bias)
        self.final_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def residual(
        self, hidden_states: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor], norm: nn.LayerNorm
    ) -> torch.Tensor:
        """LayerNorm(x + Sublayer(x)), the paper's order, or x + Sublayer(LayerNorm(x)); (B, L, D) to (B, L, D)."""
        if self.normalize_before:
            return hidden_states + self.dropout(sublayer(norm(hidden_states)))
        return norm(hidden_states + self.dropout(sublayer(hidden_states)))

    def feed_forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Equation 2: FFN(x) = max(0, x W1 + b1) W2 + b2; (B, L, D) to (B, L, D)."""
        return project(self.fc2, self.activation_dropout(self.activation_fn(project(self.fc1, hidden_states))))


class VanillaTransformerEncoderLayer(TransformerLayer):
    """Self-attention, then feed-forward (Figure 1, left)."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int) -> None:
        super().__init__(config, config.encoder_ffn_dim)
        self.self_attn = SelfAttention(config, config.encoder_attention_heads, layer_idx, is_causal=False)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Unpack[TransformersKwargs]
    ) -> torch.Tensor:
        """Maps (B, S, D) to (B, S, D)."""

        def self_attention(states: torch.Tensor) -> torch.Tensor:
            return self.self_attn(states, attention_mask=attention_mask, **kwargs)[0]

        hidden_states = self.residual(hidden_states, self_attention, self.self_attn_layer_norm)
        return self.residual(hidden_states, self.feed_forward, self.final_layer_norm)


class VanillaTransformerDecoderLayer(TransformerLayer):
    """Masked self-attention, attention over the encoder's output, feed-forward (Figure 1, right)."""

    def __init__(self, config: VanillaTransformerConfig, layer_idx: int) -> None:
        super().__init__(config, config.decoder_ffn_dim)
        self.self_attn = SelfAttention(config, config.decoder_attention_heads, layer_idx, is_causal=True)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.encoder_attn = CrossAttention(config, config.decoder_attention_heads, layer_idx, is_causal=False)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        encoder_hidden_states: torch.Tensor | None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> torch.Tensor:
        """Maps (B, T, D) to (B, T, D), given the encoder's output (B, S, D)."""
        past = None if past_key_values is None else past_key_values.self_attention_cache

        def self_attention(states: torch.Tensor) -> torch.Tensor:
            return self.self_attn(states, attention_mask=attention_mask, past_key_values=past, **kwargs)[0]

        def cross_attention(states: torch.Tensor) -> torch.Tensor:
            return self.encoder_attn(
                states,
                encoder_hidden_states,
                attention_mask=encoder_attention_mask,
                past_key_values=past_key_values,
                **kwargs,
            )[0]

        hidden_states = self.residual(hidden_states, self_attention, self.self_attn_layer_norm)
        hidden_states = self.residual(hidden_states, cross_attention, self.encoder_attn_layer_norm)
        return self.residual(hidden_states, self.feed_forward, self.final_layer_norm)


# The stacks of Figure 1


class TransformerStack(VanillaTransformerPreTrainedModel):
    """What encoder and decoder share: embeddings with positions (3.4, 3.5), layers, and often one last norm."""

    def __init__(self, config: VanillaTransformerConfig, vocab_size: int, layers: Sequence[TransformerLayer]) -> None:
        super().__init__(config)
        learned = config.position_embedding_type == "learned"
        self.embed_tokens = nn.Embedding(vocab_size, config.d_model, padding_idx=config.pad_token_id)
        self.embed_positions = LearnedPositions(config) if learned else SinusoidalPositions(config)
        self.embed_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.layernorm_embedding = self._norm_if(config.normalize_embedding)
        self.layers = nn.ModuleList(layers)
        self.layer_norm = self._norm_if(config.has_final_layer_norm)
        self.dropout = Dropout(config.dropout)
        self.gradient_checkpointing = False
        self.post_init()

    def _norm_if(self, wanted: bool) -> nn.Module:
        return nn.LayerNorm(self.config.d_model, eps=self.config.layer_norm_eps) if wanted else nn.Identity()

    def look_up(
        self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, prefix: str = ""
    ) -> torch.Tensor:
        """Returns the unscaled embeddings (B, L, D) of ids (B, L), or those given."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(f"Give exactly one of {prefix}input_ids and {prefix}inputs_embeds.")
        return self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds

    def embed(self, inputs_embeds: torch.Tensor, token_indices: torch.Tensor, upper_bound: int) -> torch.Tensor:
        """Scales embeddings by sqrt(d_model) (3.4), adds positions (3.5), applies dropout (5.4); (B, L, D)."""
        positions = self.embed_positions(token_indices, upper_bound).to(inputs_embeds)
        return self.dropout(self.layernorm_embedding(inputs_embeds * self.embed_scale + positions))


class VanillaTransformerEncoder(TransformerStack):
    """A stack of N identical layers that maps the source to a sequence of continuous representations."""

    _no_split_modules = ["VanillaTransformerEncoderLayer"]
    _can_record_outputs = {"hidden_states": VanillaTransformerEncoderLayer, "attentions": SelfAttention}

    def __init__(self, config: VanillaTransformerConfig) -> None:
        layers = [VanillaTransformerEncoderLayer(config, layer_idx) for layer_idx in range(config.encoder_layers)]
        super().__init__(config, config.vocab_size, layers)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encodes source tokens (B, S), with a mask (B, S), 1 at tokens and 0 at padding, to states (B, S, D)."""
        if input_ids is not None and not torch._C._are_functorch_transforms_active():  # vmap cannot look at values
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        embeddings = self.look_up(input_ids, inputs_embeds)
        length = embeddings.shape[1]
        padding_mask = attention_mask if attention_mask is not None and attention_mask.ndim == 2 else None
        token_indices = count_tokens_before(padding_mask, length, 0, embeddings.device)
        hidden_states = self.embed(embeddings, token_indices, length)
        layer_mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=embeddings, attention_mask=attention_mask
        )
        for layer in self.layers:
            hidden_states = layer(hidden_states, layer_mask, **kwargs)
        return BaseModelOutput(last_hidden_state=self.layer_norm(hidden_states))


class VanillaTransformerDecoder(TransformerStack):
    """A stack of N identical layers that maps the target so far, and the encoder's output, to the next symbols."""

    _no_split_modules = ["VanillaTransformerDecoderLayer"]
    _can_record_outputs = {
        "hidden_states": VanillaTransformerDecoderLayer,
        "attentions": OutputRecorder(SelfAttention, index=1),
        "cross_attentions": OutputRecorder(CrossAttention, index=1),
    }

    def __init__(self, config: VanillaTransformerConfig) -> None:
        layers = [VanillaTransformerDecoderLayer(config, layer_idx) for layer_idx in range(config.decoder_layers)]
        super().__init__(config, config.target_vocab_size, layers)

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.FloatTensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """Decodes target tokens (B, T), given the encoder's output (B, S, D) and the source's mask (B, S): (B, T, D).

        The target's mask is (B, past + T). Padding at the end needs none, since no token looks ahead.
        """
        embeddings = self.look_up(input_ids, inputs_embeds, prefix="decoder_")
        if encoder_hidden_states is None:
            raise ValueError("The decoder attends to the source: encoder_hidden_states must be given.")
        if past_key_values is not None and not isinstance(past_key_values, EncoderDecoderCache):
            raise ValueError(f"past_key_values must be an EncoderDecoderCache, not {type(past_key_values).__name__}.")
        if use_cache and past_key_values is None:
            past_key_values = SourceSharingCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        self_cache = None if past_key_values is None else past_key_values.self_attention_cache

        length = embeddings.shape[1]
        past_length, upper_bound = count_positions(self_cache, length)
        token_indices = count_tokens_before(attention_mask, length, past_length, embeddings.device)
        # A mask over a history that beams share has one row for all beams of a sentence.
        hidden_states = self.embed(embeddings, token_indices.reshape(-1, length), upper_bound)

        layer_mask = create_causal_mask(
            config=self.config, inputs_embeds=embeddings, attention_mask=attention_mask, past_key_values=self_cache
        )
        source_rows = count_source_rows(past_key_values, encoder_hidden_states)
        encoder_layer_mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=fold_rows(embeddings, source_rows),
            attention_mask=match_rows(encoder_attention_mask, source_rows),
            encoder_hidden_states=match_rows(encoder_hidden_states, source_rows),
        )
        for layer in self.layers:
            # What needs a gradient goes by position: reentrant checkpointing sees no keyword arguments.
            hidden_states = layer(
                hidden_states,
                layer_mask,
                encoder_hidden_states,
                encoder_attention_mask=encoder_layer_mask,
                past_key_values=past_key_values,
                **kwargs,
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=self.layer_norm(hidden_states), past_key_values=past_key_values
        )


# Both stacks; generation_vanilla_transformer.py adds 3.4's output layer


_NO_TARGET = (
    "Give exactly one of decoder_input_ids and decoder_inputs_embeds. For states of the source alone, as "
    "pipeline('feature-extraction') and sentence-transformers need, load the encoder by "
    "AutoModelForTextEncoding.from_pretrained(...). Give this model, or save it with the tokenizer in a folder of its "
    "own and give that: AutoModel finds the encoder there."
)


class VanillaTransformerModel(VanillaTransformerPreTrainedModel):
    """Encoder and decoder without the output layer; (B, S) and (B, T) tokens to (B, T, D) states."""

    _tied_weights_keys = {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }

    def __init__(self, config: VanillaTransformerConfig) -> None:
        config.require_stacks(type(self).__name__)
        super().__init__(config)
        if config.share_encoder_decoder_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.d_model, padding_idx=config.pad_token_id)
        self.encoder = VanillaTransformerEncoder(config)
        self.decoder = VanillaTransformerDecoder(config)
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Returns {target: source} of tied weights. Sharing does not depend on `tie_word_embeddings` here."""
        return dict(self._tied_weights_keys) if self.config.share_encoder_decoder_embeddings else {}

    def get_input_embeddings(self) -> nn.Embedding:
        """Returns the source embedding table, (V, D): the module that is called, so that hooks on it run."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the source embedding table, and the target's where they are one."""
        self.encoder.set_input_embeddings(value)
        if self.config.share_encoder_decoder_embeddings:
            self.shared = cast(nn.Embedding, value)
            self.decoder.set_input_embeddings(value)

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
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Seq2SeqModelOutput:
        """Encodes the source, unless `encoder_outputs` is given, and decodes the target to states (B, T, D).

        Each side's tokens are given once, as ids or as embeddings that are not yet scaled; else it is a ValueError.

        Args:
            input_ids: Source tokens (B, S).
            attention_mask: (B, S), 1 at tokens and 0 at padding; `None`: nothing is padding.
            decoder_input_ids: Target tokens (B, T), shifted right by one.
            decoder_attention_mask: (B, past + T), needed only where the target is padded on the left.
            encoder_outputs: What the encoder returned for this source.
            past_key_values: An `EncoderDecoderCache` of the positions already decoded.
            inputs_embeds: Embeddings of the source (B, S, D).
            decoder_inputs_embeds: Embeddings of the target (B, T, D).
            use_cache: Whether to return a cache.
            **kwargs: `output_attentions`, `output_hidden_states`, `return_dict`, and arguments of the attention.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError(_NO_TARGET)
        if encoder_outputs is None:
            encoded: BaseModelOutput = self.encoder(
                input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs
            )
        elif isinstance(encoder_outputs, BaseModelOutput):
            encoded = encoder_outputs
        else:
            names = ("last_hidden_state", "hidden_states", "attentions")
            fields: Any = zip(names, encoder_outputs, strict=False)
            if isinstance(encoder_outputs, ModelOutput):  # of another model's encoder, whose fields are others too
                fields = ((name, encoder_outputs.get(name)) for name in names)
            encoded = BaseModelOutput(**dict(fields))
        decoder_outputs = self.decoder(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        return Seq2SeqModelOutput(
            last_hidden_state=decoder_outputs.last_hidden_state,
            past_key_values=decoder_outputs.past_key_values,
            decoder_hidden_states=decoder_outputs.hidden_states,
            decoder_attentions=decoder_outputs.attentions,
            cross_attentions=decoder_outputs.cross_attentions,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
        )


def is_checkpointing(model: Any) -> bool:
    """Whether a decoder's layers are computed again in the backward pass: they keep no keys and values of tokens."""
    modules = model.get_decoder().modules() if model.training else []
    return any(getattr(each, "gradient_checkpointing", False) for each in modules)
