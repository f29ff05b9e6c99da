"""Greedy search that lets finished sentences go.

It finds what the library's `_sample` finds without sampling, token for token, and takes its arguments.

Shapes: B  sentences still in the batch, V  target vocabulary, M  longest output.
"""

from typing import Any, cast

import torch
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from .static_decoding_vanilla_transformer import can_share, make_sharing_decoder
from .stopping_vanilla_transformer import StoppingRules, find_staying, judges_rows_alone


class GreedySearch:
    """One call of greedy search.

    Args:
        model: The model.
        input_ids: The prompts, (B, prompt length).
        logits_processor: Changes logits, as in the library.
        stopping_criteria: Say which sentences end, as in the library.
        generation_config: The settings.
        model_kwargs: `encoder_outputs` and `attention_mask`, and what else the model takes.
    """

    @staticmethod
    def suits(model: Any, generation_config: GenerationConfig, model_kwargs: dict[str, Any], **others: Any) -> bool:
        """Says whether this is asked for, and nothing that needs the library's own loop: its cache, say, or a streamer.

        Args:
            model: The model.
            generation_config: The settings.
            model_kwargs: As above.
            **others: Further arguments of the library's, all of which must be unset.

        Returns:
            True if this class may be used.
        """
        return not (
            generation_config.do_sample
            or generation_config.return_dict_in_generate
            or generation_config.prefill_chunk_size is not None
            or any(others.values())
        ) and can_share(model, model_kwargs, generation_config)

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.logits_processor = logits_processor
        self.decoder = make_sharing_decoder(model, model_kwargs, generation_config)
        self.rules = StoppingRules(stopping_criteria, generation_config.max_length, input_ids.device)
        pad: Any = getattr(generation_config, "_pad_token_tensor", None)
        # As in the library, finished sentences go on beside the others if there is no end-of-sentence token.
        self.pad_token_id = int(pad) if self.rules.has_eos and pad is not None else None
        self.may_leave = self.pad_token_id is not None and judges_rows_alone(logits_processor, stopping_criteria)
        self.length = input_ids.shape[1]
        num_sentences = input_ids.shape[0]
        self.tokens = input_ids.new_zeros((num_sentences, generation_config.max_length))  # of those in the batch
        self.tokens[:, : self.length] = input_ids
        self.results = torch.full_like(self.tokens, self.pad_token_id or 0)
        self.sentences = torch.arange(num_sentences, device=input_ids.device)
        self.is_done = torch.zeros(num_sentences, dtype=torch.bool, device=input_ids.device)

    def run(self) -> torch.Tensor:
        """Returns the prompts with what follows, (B, longest output)."""
        while not self.is_done.all():
            self._step(self.decoder.step(self.tokens[:, None, : self.length]))
            if self.may_leave and (staying := find_staying(self.is_done)) is not None:
                self._keep(staying)
        self.results[self.sentences] = self.tokens
        return self.results[:, : self.length]

    def _step(self, logits: torch.Tensor) -> None:
        scores = logits.to(device=self.tokens.device, dtype=torch.float32)
        known = cast(torch.LongTensor, self.tokens[:, : self.length])
        tokens = self.logits_processor(known, cast(torch.FloatTensor, scores)).argmax(dim=-1)
        if self.pad_token_id is not None:
            tokens = tokens.masked_fill(self.is_done, self.pad_token_id)
        self.tokens[:, self.length] = tokens
        self.length += 1
        ends = self.rules.find_ends(
            tokens[:, None], self.length, self.sentences, lambda: self.tokens[:, : self.length], None
        )
        self.is_done |= ends[:, 0]
        self.decoder.follow(torch.zeros_like(tokens)[:, None])

    def _keep(self, stay: torch.Tensor) -> None:
        """Goes on with these sentences; the rows of the others among the results are padding behind their end."""
        done = self.is_done.nonzero()[:, 0]
        self.results[self.sentences[done], : self.length] = self.tokens[done, : self.length]
        self.tokens, self.sentences, self.is_done = self.tokens[stay], self.sentences[stay], self.is_done[stay]
        self.decoder.keep_sentences(stay)
