"""When sentences end, and which code of the library judges each of them by itself.

Shapes: B  sentences, C  candidates of each.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from transformers.generation.logits_process import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StopStringCriteria,
)

_WORTH_LEAVING = 1 / 8  # share of the sentences that must be finished before the rest is copied without them


class SourceLengthCriteria(StoppingCriteria):
    """Ends each translation at the length of its own source + 50 (6.1), whatever it is batched with."""

    def __init__(self, limits: torch.Tensor) -> None:
        """Takes the largest number of target tokens, prompt included, of each sentence: (B,)."""
        self.limits = limits

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        """Says which rows (a multiple of B) have come to their end."""
        limits = self.limits.repeat_interleave(input_ids.shape[0] // self.limits.shape[0])
        return cast(torch.BoolTensor, limits <= input_ids.shape[1])


_ROW_BY_ROW = (
    *(ForcedBOSTokenLogitsProcessor, ForcedEOSTokenLogitsProcessor, InfNanRemoveLogitsProcessor, LogitNormalization),
    *(MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor, NoBadWordsLogitsProcessor),
    *(NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor),
    *(SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor),
    *(TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper),
    *(EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, SourceLengthCriteria, StopStringCriteria),
)


def judges_rows_alone(*lists: Iterable[Any]) -> bool:
    """Whether these processors and criteria look at the tokens of one row only, so that rows may leave the batch."""
    return all(
        # The penalty on repetitions knows the padding of every row of the prompt, if there is any.
        type(item) in _ROW_BY_ROW and not isinstance(getattr(item, "prompt_ignore_length", None), torch.Tensor)
        for items in lists
        for item in items
    )


def find_staying(is_done: torch.Tensor) -> torch.Tensor | None:
    """Returns which sentences to go on with, or `None` while too few are finished, or nothing else is left.

    Args:
        is_done: Which of the sentences in the batch are finished, (B,).

    Returns:
        The indices of the others.
    """
    num_done = int(is_done.sum())
    if num_done == len(is_done) or num_done < max(1, len(is_done) * _WORTH_LEAVING):
        return None
    return (~is_done).nonzero()[:, 0]


class StoppingRules:
    """Stopping criteria, most of which need not see whole sentences.

    Args:
        criteria: The library's or anybody's.
        max_length: The longest output, prompt included.
        device: Where the tokens are.
    """

    def __init__(self, criteria: Iterable[Any], max_length: int, device: torch.device) -> None:
        self.max_length = max_length
        self.has_eos = False
        self._limits: torch.Tensor | None = None  # of each sentence
        self._others = []
        eos_token_ids: list[int] = []
        for criterion in criteria:
            self.has_eos = self.has_eos or hasattr(criterion, "eos_token_id")
            if type(criterion) is EosTokenCriteria:
                eos_token_ids += criterion.eos_token_id.tolist()
            elif type(criterion) is MaxLengthCriteria:
                self.max_length = min(self.max_length, criterion.max_length)
            elif type(criterion) is SourceLengthCriteria:
                self._limits = criterion.limits.to(device)
            else:
                self._others.append(criterion)
        self._eos_token_ids = torch.tensor(eos_token_ids, dtype=torch.long, device=device)

    def find_limits(self, sentences: torch.Tensor) -> int | torch.Tensor:
        """Returns the longest output, prompt included: of each of these sentences, or of all."""
        return self.max_length if self._limits is None else self._limits[sentences]

    def find_ends(
        self,
        tokens: torch.Tensor,
        length: int,
        sentences: torch.Tensor,
        write_out: Callable[[], torch.Tensor],
        scores: Any,
    ) -> torch.Tensor:
        """Says which candidates end with their new token.

        Args:
            tokens: The new tokens (B, C).
            length: Number of tokens with the new one.
            sentences: Which sentences the rows of `tokens` are, (B,).
            write_out: Returns whole candidates, (B * C, length); called only if a criterion wants to see them.
            scores: What the library gives to criteria besides.

        Returns:
            (B, C), true at the end.
        """
        if length >= self.max_length:
            return torch.ones_like(tokens, dtype=torch.bool)
        ends = torch.isin(tokens, self._eos_token_ids)
        if self._limits is not None:
            ends |= (self._limits[sentences] <= length)[:, None]
        if self._others:
            sequences = write_out()
            for criterion in self._others:
                ends |= criterion(sequences, scores).view(ends.shape)
        return ends
