"""What models of one stack of the Transformer share, be it the encoder or the decoder."""

import copy
from typing import cast

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .modeling_vanilla_transformer import TransformerStack, VanillaTransformerPreTrainedModel


def as_single_stack(config: VanillaTransformerConfig, vocab_size: int) -> VanillaTransformerConfig:
    """Returns the configuration of one stack: a copy with one vocabulary that is no encoder and decoder."""
    if not config.is_encoder_decoder:
        return config
    single = copy.deepcopy(config)
    single.is_encoder_decoder = False
    single.vocab_size, single.decoder_vocab_size = vocab_size, None
    return single


class HalfModel(VanillaTransformerPreTrainedModel):
    """One stack of the Transformer, whose parameters have the names that they have in the whole.

    The whole keeps the table of embeddings that both sides share beside the stacks, as `shared`; so does a half of it.
    Its configuration is a copy of the given one in which `is_encoder_decoder` is false.
    """

    stack_name: str

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(as_single_stack(config, config.vocab_size))

    @property
    def stack(self) -> PreTrainedModel:
        """The stack, or the model around it."""
        return cast(PreTrainedModel, getattr(self, self.stack_name))

    def make_shared_table(self) -> None:
        """Makes `shared`, if the whole has it."""
        if self.config.share_encoder_decoder_embeddings:
            self.shared = nn.Embedding(
                self.config.vocab_size, self.config.d_model, padding_idx=self.config.pad_token_id
            )

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Returns {target: source} of tied weights; unlike the library's, sharing does not hang on the other flag."""
        if isinstance(self.stack, TransformerStack):
            return dict(self._tied_weights_keys or {}) if self.config.share_encoder_decoder_embeddings else {}
        tied = self.stack.get_expanded_tied_weights_keys()
        return {f"{self.stack_name}.{target}": f"{self.stack_name}.{source}" for target, source in tied.items()}

    def get_input_embeddings(self) -> nn.Embedding:
        """Returns the embedding table, (V, D)."""
        return cast(nn.Embedding, self.stack.get_input_embeddings())

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the embedding table."""
        self.stack.set_input_embeddings(value)
        if "shared" in self._modules:
            self.shared = cast(nn.Embedding, value)

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resizes the one vocabulary as the library does."""
        resize = PreTrainedModel._resize_token_embeddings
        return cast(nn.Embedding, resize(self, new_num_tokens, pad_to_multiple_of, mean_resizing))


__all__ = ["HalfModel", "as_single_stack"]
