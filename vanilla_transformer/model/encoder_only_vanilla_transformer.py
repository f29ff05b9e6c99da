"""The encoder alone: states for each token of a text, and heads that classify the text, its tokens or a span of it.

Parameters have the names that they have in the encoder-decoder, so that the encoder of a translation model can be taken
over: `VanillaTransformerForSequenceClassification.from_pretrained("a-translation-model", num_labels=2)`.

Every `forward` takes tokens `input_ids` (B, S), or `inputs_embeds` (B, S, D), not yet scaled, in their place, and
`attention_mask` (B, S), 1 at tokens and 0 at padding on either side, `None` where nothing is padding. It also takes
`output_attentions`, `output_hidden_states`, `return_dict`, and what the attention implementation takes.

Shapes: B batch, S length, D d_model, N number of labels.
"""

from typing import TYPE_CHECKING, Any, Unpack, cast

import torch
from torch import nn
from transformers.modeling_outputs import (
    BaseModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import TransformersKwargs, can_return_tuple

from .configuration_vanilla_transformer import VanillaTransformerConfig
from .loss_vanilla_transformer import IGNORED_LABEL
from .modeling_vanilla_transformer import VanillaTransformerEncoder
from .pretrained_vanilla_transformer import SingleStackModel

if TYPE_CHECKING:  # see generation_vanilla_transformer.py: the files that only other files import
    from .attention_vanilla_transformer import SelfAttention as SelfAttention
    from .decoding_vanilla_transformer import match_rows as match_rows
    from .dropout_vanilla_transformer import Dropout as Dropout
    from .linear_vanilla_transformer import linear as linear
    from .positions_vanilla_transformer import SinusoidalPositions as SinusoidalPositions


class VanillaTransformerEncoderModel(SingleStackModel):
    """The encoder of the Transformer (3.1): (B, S) tokens to (B, S, D) states."""

    side = "encoder"
    _tied_weights_keys = {"encoder.embed_tokens.weight": "shared.weight"}
    _keys_to_ignore_on_load_unexpected = [r"^(model\.)?decoder\.", r"^lm_head\."]

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.make_shared_table()
        self.encoder = VanillaTransformerEncoder(self.config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutput:
        """Encodes texts (B, S) to `last_hidden_state` (B, S, D).

        Positions follow from the mask: it is an error to set `past_key_values`, `use_cache` or `position_ids`.
        """
        given = cast(dict[str, Any], kwargs)
        others = {name: given.pop(name, None) for name in ("past_key_values", "use_cache", "position_ids")}
        if useless := [name for name, value in others.items() if value is not None and value is not False]:
            raise ValueError(f"An encoder has no use for {', '.join(useless)}.")
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)


def check_padding_mask(attention_mask: torch.Tensor | None) -> None:
    """Refuses a mask of which tokens attend to which: heads need one (B, S) that says which tokens are padding."""
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask must be (B, S) for this head, 1 at tokens and 0 at padding, not {attention_mask.ndim}-D."
        )


class EncoderWithHead(SingleStackModel):
    """What the heads below share: the encoder, as `model`."""

    side = "encoder"
    _tied_weights_keys = {"model.encoder.embed_tokens.weight": "model.shared.weight"}
    _keys_to_ignore_on_load_unexpected = VanillaTransformerEncoderModel._keys_to_ignore_on_load_unexpected

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.num_labels: int = self.config.num_labels  # type: ignore[assignment]
        self.model = VanillaTransformerEncoderModel(self.config)
        self.dropout = nn.Dropout(self.config.dropout)


class VanillaTransformerForSequenceClassification(EncoderWithHead):
    """A linear map of the last token's state, which is that of `</s>`, to labels: (B, S) tokens to (B, N) logits."""

    # The loss is a mean over texts, so the Trainer has to divide it by the number of batches that it accumulates.
    accepts_loss_kwargs = False

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.score = nn.Linear(self.config.d_model, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SequenceClassifierOutput:
        """Classifies texts: `logits` (B, N), and with labels `loss`, the mean over the batch.

        Labels (B,) are classes in [0, N), or numbers for regression (`problem_type`, or N = 1); labels (B, N) are 0 or
        1 for each of several labels. Everything else is as for the encoder.
        """
        check_padding_mask(attention_mask)
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        states = outputs.last_hidden_state
        last = states[:, -1]
        if attention_mask is not None:
            rows, places = (torch.arange(size, device=states.device) for size in states.shape[:2])
            last = states[rows, (attention_mask.to(states.device).bool() * places).argmax(dim=-1)]
        logits = self.score(self.dropout(last))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=None, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class VanillaTransformerForTokenClassification(EncoderWithHead):
    """A linear map of each token's state to labels: (B, S) tokens to (B, S, N) logits."""

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.score = nn.Linear(self.config.d_model, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> TokenClassifierOutput:
        """Classifies tokens: `logits` (B, S, N), and with labels `loss`, the mean over those that count.

        Labels (B, S) are classes in [0, N), and -100 where the loss shall not count; `num_items_in_batch` is a number
        of labels to divide by instead. Everything else is as for the encoder.
        """
        count = kwargs.pop("num_items_in_batch", None)
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.score(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config, num_items_in_batch=count)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


def _ignore_padding(positions: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
    """Replaces positions, (B,) or (B, 1), that are padding (B, S) or in no text by the label that does not count."""
    positions = positions.reshape(-1, 1).to(padding.device)
    length = padding.shape[1]
    is_outside = (positions < 0) | (positions >= length)
    is_outside |= padding.gather(1, positions.clamp(0, length - 1))
    return positions.masked_fill(is_outside, IGNORED_LABEL).squeeze(1)


def _mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean of -log p(label) over a batch, from scores (B, S); unlike torch's it is 0 if no label counts."""
    total = nn.functional.cross_entropy(logits.float(), labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return total / (labels != IGNORED_LABEL).sum().clamp(min=1)


class VanillaTransformerForQuestionAnswering(EncoderWithHead):
    """A linear map of each token's state to how well an answer starts and ends there: twice (B, S) logits."""

    accepts_loss_kwargs = False  # a mean over texts, as above

    def __init__(self, config: VanillaTransformerConfig) -> None:
        super().__init__(config)
        self.qa_outputs = nn.Linear(self.config.d_model, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> QuestionAnsweringModelOutput:
        """Finds where answers start and end: `start_logits` and `end_logits` (B, S), the least of numbers at padding.

        With positions (B,), the indices of the answers' first and last tokens, also `loss`, the mean over the batch and
        both ends. Those at padding or outside do not count; it is 0 if none count. The rest is as for the encoder.
        """
        check_padding_mask(attention_mask)
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        logits = list(self.qa_outputs(outputs.last_hidden_state).unbind(dim=-1))
        padding = torch.zeros_like(logits[0], dtype=torch.bool)
        if attention_mask is not None:
            padding = attention_mask.to(padding.device) == 0
            logits = [each.masked_fill(padding, torch.finfo(each.dtype).min) for each in logits]
        loss = None
        if start_positions is not None and end_positions is not None:
            starts, ends = (_ignore_padding(each, padding) for each in (start_positions, end_positions))
            loss = (_mean_loss(logits[0], starts) + _mean_loss(logits[1], ends)) / 2
        states = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        return QuestionAnsweringModelOutput(loss=loss, start_logits=logits[0], end_logits=logits[1], **states)
