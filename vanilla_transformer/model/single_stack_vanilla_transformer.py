"""What models of one stack of the Transformer share, be it the encoder or the decoder."""

import copy
from typing import Any, Literal, cast

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .modeling_vanilla_transformer import VanillaTransformerPreTrainedModel

Side = Literal["encoder", "decoder"]


def as_single_stack(config: VanillaTransformerConfig, side: Side) -> VanillaTransformerConfig:
    """Returns the configuration of one stack alone: a copy of the whole's, or what is given if that is one already.

    Such a configuration has one vocabulary and says `is_encoder_decoder=False`. Both sides' sizes in it are those of
    the stack, since the library knows one name for either (`num_hidden_layers`) and asks for it to build a cache. The
    texts of a decoder alone begin with what the whole's decoder starts with, for which the library's name is then
    `bos_token_id`.
    """
    fields: dict[str, Any] = {"is_encoder_decoder": False, "is_decoder": side == "decoder", "decoder_vocab_size": None}
    if config.is_encoder_decoder and side == "decoder":
        fields["vocab_size"] = config.target_vocab_size
        if config.decoder_start_token_id is not None:
            fields["bos_token_id"] = config.decoder_start_token_id
    for size in ("layers", "attention_heads", "ffn_dim"):
        fields |= {f"{each}_{size}": getattr(config, f"{side}_{size}") for each in ("encoder", "decoder")}
    if all(getattr(config, name) == value for name, value in fields.items()):
        return config
    single = copy.deepcopy(config)
    for name, value in fields.items():
        setattr(single, name, value)
    if config.is_encoder_decoder:
        for name in ("auto_map", "custom_pipelines"):  # of the folder that the whole was loaded from
            vars(single).pop(name, None)
    return single


class SingleStackModel(VanillaTransformerPreTrainedModel):
    """One stack of the Transformer, whose parameters have the names that they have in the whole.

    The whole keeps the table of embeddings that both sides share beside the stacks, as `shared`; so does a half of it.
    Its configuration is a copy of the whole's, made by [`as_single_stack`].
    """

    side: Side

    def __init__(self, config: VanillaTransformerConfig) -> None:
        config.require_stack(type(self).__name__, is_decoder=self.side == "decoder")
        if getattr(config, "add_cross_attention", False):
            raise ValueError(
                f"{type(self).__name__} attends to no source, so add_cross_attention must not be True: "
                "VanillaTransformerForConditionalGeneration is a decoder that does, with its encoder."
            )
        super().__init__(as_single_stack(config, self.side))

    @property
    def inner(self) -> PreTrainedModel:
        """The stack, or around it the model without a head."""
        return cast(PreTrainedModel, getattr(self, self.base_model_prefix, None) or getattr(self, self.side))

    def make_shared_table(self) -> None:
        """Makes `shared`, if the whole has it."""
        if self.config.share_encoder_decoder_embeddings:
            self.shared = nn.Embedding(
                self.config.vocab_size, self.config.d_model, padding_idx=self.config.pad_token_id
            )

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Returns {target: source} of tied weights; unlike the library's, sharing does not hang on the other flag."""
        if all_submodels:  # this one and those inside it are asked one by one
            return cast(dict[str, str], super().get_expanded_tied_weights_keys(all_submodels=True))
        return dict(self._tied_weights_keys or {}) if self.config.share_encoder_decoder_embeddings else {}

    def get_input_embeddings(self) -> nn.Embedding:
        """Returns the embedding table, (V, D)."""
        return cast(nn.Embedding, self.inner.get_input_embeddings())

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the embedding table."""
        self.inner.set_input_embeddings(value)
        if "shared" in self._modules:
            self.shared = cast(nn.Embedding, value)
