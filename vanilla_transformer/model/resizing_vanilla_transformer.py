"""Resizing the vocabularies of a trained Transformer: one shared vocabulary, or a source and a target vocabulary."""

import os
from typing import Any, cast

from torch import nn
from transformers.modeling_utils import PreTrainedModel

from .configuration_vanilla_transformer import VanillaTransformerConfig


class ResizableVocabulariesMixin(PreTrainedModel):
    """Keeps both embedding tables, the output layer with its bias, and the configuration in step."""

    config: VanillaTransformerConfig

    def _has_one_vocabulary(self) -> bool:
        return self.config.decoder_vocab_size is None or self.config.share_encoder_decoder_embeddings

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resizes the source table, and with it the target's where there is one vocabulary."""
        embeddings = self._get_resized_embeddings(
            cast(nn.Embedding, self.get_input_embeddings()), new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        self.set_input_embeddings(embeddings)
        if self._has_one_vocabulary():
            self._resize_target_side(embeddings.num_embeddings, None, mean_resizing)
        return embeddings

    def resize_decoder_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resizes the target vocabulary of a model with two; `resize_token_embeddings` resizes the source's.

        Args:
            new_num_tokens: The new number of target tokens.
            pad_to_multiple_of: Round the number up to a multiple of this.
            mean_resizing: Whether new rows are drawn around the mean of the old ones.

        Returns:
            The decoder's embedding table.

        Raises:
            ValueError: If the model has one vocabulary.
        """
        if self._has_one_vocabulary():
            raise ValueError(
                "This model has one vocabulary (decoder_vocab_size=None or share_encoder_decoder_embeddings=True): "
                "use resize_token_embeddings, which resizes both sides."
            )
        embeddings = self._resize_target_side(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.tie_weights()
        return embeddings

    def _resize_target_side(
        self, new_num_tokens: int, pad_to_multiple_of: int | None, mean_resizing: bool
    ) -> nn.Embedding:
        decoder = cast(PreTrainedModel, self.get_decoder())
        output_layer = cast(nn.Linear | None, self.get_output_embeddings())
        if output_layer is not None and self.config.tie_word_embeddings:
            # A tied weight would change its size together with the table's, and leave the bias behind.
            output_layer.weight = nn.Parameter(output_layer.weight.detach(), output_layer.weight.requires_grad)
        embeddings = self._get_resized_embeddings(
            cast(nn.Embedding, decoder.get_input_embeddings()), new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        decoder.set_input_embeddings(embeddings)
        if self.config.decoder_vocab_size is not None:
            self.config.decoder_vocab_size = embeddings.num_embeddings
        if output_layer is not None:
            resized = self._get_resized_lm_head(output_layer, embeddings.num_embeddings, mean_resizing=mean_resizing)
            self.set_output_embeddings(resized.requires_grad_(output_layer.weight.requires_grad))
        return embeddings

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Saves as the library does, with `tie_word_embeddings` true in the configuration if the weights are tied.

        PEFT compares the output layer with the source table when it merges an adapter, and clears that flag where the
        target has a table of its own. Tied weights are saved once: without the flag, the output layer would be lost.
        """
        output_layer = self.get_output_embeddings()
        if output_layer is not None:
            table = cast(PreTrainedModel, self.get_decoder()).get_input_embeddings()
            if output_layer.weight is table.weight:
                self.config.tie_word_embeddings = True
        super().save_pretrained(save_directory, *args, **kwargs)
