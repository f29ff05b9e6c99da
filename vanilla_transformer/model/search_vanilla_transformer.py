"""Beam and greedy search that read each source once, whatever the number of beams, and let finished sentences leave.

They find what the library's `_beam_search` and `_sample` find, token for token, and take their arguments. What differs
is the work: the source side exists once per sentence, no beam's history is copied (decoding_vanilla_transformer.py),
the best tokens are looked for within each beam, and a sentence whose translations can no longer change leaves.

Shapes: B  sentences still in the batch, N  beams, R = B * N  rows, V  target vocabulary, C  candidates per sentence and
step, M  longest output.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.functional import pad as pad_sides
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as stopping
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

from .decoding_vanilla_transformer import IMPOSSIBLE, MANY_WORDS, ForcedWords, ReorderingDecoder, Words, gather_beams
from .static_decoding_vanilla_transformer import SharingDecoder

_MANY_VALUES, _PART = 100_000, 64
_SLOW_AT_TOPK = ("cpu", "cuda")
_WORTH_LEAVING = 1 / 8  # share of the sentences that must be finished before the rest is copied without them

# When sentences end


class SourceLengthCriteria(stopping.StoppingCriteria):
    """Ends each translation at the length of its own source + 50 (6.1), whatever it is batched with."""

    def __init__(self, limits: torch.Tensor) -> None:
        self.limits = limits  # (B,): the largest number of target tokens of each sentence, prompt included

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        """Says which rows (a multiple of B) have come to their end."""
        return cast(torch.BoolTensor, _limits_of_rows(self.limits, input_ids) <= input_ids.shape[1])


class SourceLengthForcedEOS(processors.LogitsProcessor):
    """`forced_eos_token_id` at each sentence's own limit: the library's processor knows the batch's longest only."""

    def __init__(self, limits: torch.Tensor, eos_token_id: torch.Tensor) -> None:
        """Takes the limits of [`SourceLengthCriteria`], and the tokens that are forced."""
        self.limits, self.eos_token_id = limits, eos_token_id

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Makes these tokens the only ones in rows (a multiple of B) that have room for one more."""
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.eos_token_id] = 0.0
        is_last = _limits_of_rows(self.limits, input_ids) == input_ids.shape[1] + 1
        return cast(torch.FloatTensor, torch.where(is_last[:, None], forced, scores))


def _limits_of_rows(limits: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    return limits.repeat_interleave(input_ids.shape[0] // limits.shape[0])


# What looks at the tokens of one row only, so that other rows may leave the batch.
_ROW_BY_ROW = (
    *(processors.ForcedBOSTokenLogitsProcessor, processors.ForcedEOSTokenLogitsProcessor),
    *(processors.InfNanRemoveLogitsProcessor, processors.LogitNormalization, processors.MinLengthLogitsProcessor),
    *(processors.MinNewTokensLengthLogitsProcessor, processors.NoBadWordsLogitsProcessor),
    *(processors.NoRepeatNGramLogitsProcessor, processors.RepetitionPenaltyLogitsProcessor),
    *(processors.SequenceBiasLogitsProcessor, processors.SuppressTokensAtBeginLogitsProcessor),
    *(processors.SuppressTokensLogitsProcessor, stopping.MaxTimeCriteria, stopping.StopStringCriteria),
    *(EosTokenCriteria, MaxLengthCriteria, SourceLengthCriteria),
)


def judges_rows_alone(*lists: Iterable[Any]) -> bool:
    """Whether each of these looks at its own row only (see `_ROW_BY_ROW`)."""
    return all(
        # The penalty on repetitions knows the padding of every row of the prompt, if there is any.
        type(item) in _ROW_BY_ROW and not isinstance(getattr(item, "prompt_ignore_length", None), torch.Tensor)
        for items in lists
        for item in items
    )


def find_staying(is_done: torch.Tensor, num_done: int) -> torch.Tensor | None:
    """Returns which sentences (B,) to continue; `None` if the batch stays whole: few are finished, or all."""
    if num_done == len(is_done) or num_done < max(1, len(is_done) * _WORTH_LEAVING):
        return None
    return (~is_done).nonzero()[:, 0]


class StoppingRules:
    """Stopping criteria, most of which need not see whole sentences; `max_length` is the longest output with prompt."""

    def __init__(self, criteria: Iterable[Any], max_length: int, device: torch.device) -> None:
        self.max_length = max_length
        self.has_eos = False
        self.limits: torch.Tensor | None = None  # of each sentence
        self.others = StoppingCriteriaList()  # which also takes a criterion that answers with one bool for all rows
        eos_token_ids: list[int] = []
        for criterion in criteria:
            self.has_eos = self.has_eos or hasattr(criterion, "eos_token_id")
            if type(criterion) is EosTokenCriteria:
                eos_token_ids += criterion.eos_token_id.tolist()
            elif type(criterion) is MaxLengthCriteria:
                self.max_length = min(self.max_length, criterion.max_length)
            elif type(criterion) is SourceLengthCriteria:
                self.limits = criterion.limits.to(device)
            else:
                self.others.append(criterion)
        self._eos_token_ids = torch.tensor(eos_token_ids, dtype=torch.long, device=device)

    def find_limits(self, sentences: torch.Tensor) -> int | torch.Tensor:
        """Returns the longest output, prompt included: of each of these sentences, or of all."""
        return self.max_length if self.limits is None else self.limits[sentences]

    def find_ends(
        self,
        tokens: torch.Tensor,
        length: int | torch.Tensor,
        sentences: torch.Tensor,
        write_out: Callable[[], torch.Tensor],
        scores: Any,
    ) -> torch.Tensor:
        """Returns (B, C): true where a candidate ends with its new token; `write_out` makes (B * C, length) of them.

        The length with that token is the same for all sentences, or a tensor (B,); then they have limits of their own.
        """
        if isinstance(length, int) and length >= self.max_length:
            return torch.ones_like(tokens, dtype=torch.bool)
        ends = (tokens[..., None] == self._eos_token_ids).any(dim=-1)
        if self.limits is not None:
            ends |= (self.limits[sentences] <= length)[:, None]
        if self.others:
            sequences = write_out()
            ends |= self.others(sequences, scores).view(ends.shape)
        return ends


# Greedy search


class GreedySearch:
    """One call of greedy search from the prompts (B, prompt length), with the library's processors and criteria."""

    def __init__(
        self,
        decoder: SharingDecoder,
        input_ids: torch.Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
    ) -> None:
        self.decoder = decoder
        self.logits_processor = logits_processor
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
        while (num_done := int(self.is_done.sum())) < len(self.is_done):
            if self.may_leave and (staying := find_staying(self.is_done, num_done)) is not None:
                self._keep(staying)
            self._step(self.decoder.step(self.tokens[:, None, : self.length]))
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


# Beam search


def _as_column(number: Any) -> Any:
    return number[:, None] if isinstance(number, torch.Tensor) else number


def gnmt_length_penalty(length: int | torch.Tensor, alpha: float) -> Any:
    """Equation 14 of Wu et al. (2016), by which the paper divides log-probabilities: ((5 + length) / 6) ** alpha."""
    return ((5 + length) / 6) ** alpha


# What log-probabilities are divided by, given a length and `length_penalty`.
LENGTH_PENALTIES: dict[str, Callable[[int | torch.Tensor, float], Any]] = {
    "gnmt": gnmt_length_penalty,
    "transformers": pow,
}


def find_largest(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the k largest of each row (rows, V) as `topk` does, which is slower than `amax` over parts of it.

    The k largest values lie in the k parts with the largest maxima.
    """
    size = values.shape[1]
    if values.device.type not in _SLOW_AT_TOPK or values.numel() < _MANY_VALUES or size < _PART * k:
        return values.topk(k)
    num_parts = size // _PART
    parts = values[:, : num_parts * _PART].unflatten(1, (num_parts, _PART))
    best = parts.amax(dim=2).topk(min(k, num_parts)).indices
    found = parts.gather(1, best[:, :, None].expand(-1, -1, _PART)).flatten(1)
    indices = (best[:, :, None] * _PART + torch.arange(_PART, device=values.device)).flatten(1)
    rest = torch.arange(num_parts * _PART, size, device=values.device).expand(values.shape[0], -1)
    found, indices = torch.cat([found, values[:, num_parts * _PART :]], dim=1), torch.cat([indices, rest], dim=1)
    largest = found.topk(k)
    return largest.values, indices.gather(1, largest.indices)


@dataclass
class Hypotheses:
    """N translations for each of B sentences, begun or ended."""

    tokens: torch.Tensor  # (B, N, M), filled up with padding
    scores: torch.Tensor  # (B, N)
    lengths: torch.Tensor  # (B, N): number of new tokens, 0 where no translation has ended
    beam_indices: torch.Tensor | None  # (B, N, M - prompt): which row each token came from; -1 behind the end
    unmet: torch.Tensor | None = None  # (B, N): how many of the words that must appear do not

    def apply(self, function: Callable[..., torch.Tensor], *others: "Hypotheses") -> "Hypotheses":
        """Returns what a function makes of each tensor, together with those of others."""
        columns = zip(*(vars(hypotheses).values() for hypotheses in (self, *others)), strict=True)
        results: list[Any] = [None if tensors[0] is None else function(*tensors) for tensors in columns]
        return Hypotheses(*results)


def _find_what_to_record(config: GenerationConfig) -> dict[str, tuple[Any, ...]]:
    """Returns room for what `return_dict_in_generate` is to return of every step, by the library's names."""
    asked = {
        "scores": config.output_scores,
        "logits": config.output_logits,
        "decoder_attentions": config.output_attentions,
        "cross_attentions": config.output_attentions,
        "decoder_hidden_states": config.output_hidden_states,
    }
    return {name: () for name, is_on in asked.items() if config.return_dict_in_generate and is_on}


class BeamSearch:
    """One call of beam search from the prompts (R, prompt length), with the library's processors and criteria.

    The settings mean what they mean in the library. With `length_penalty_type="gnmt"` a sentence is searched, unless
    `early_stopping=True`, until none of its open beams can become one of the translations to return.

    `model_kwargs` has `encoder_outputs` and `attention_mask` with B rows, `words` what must appear (see `ForcedWords`).
    A sentence is searched until all of its words appear, or to its end; fewer lacking words go before better scores.
    """

    def __init__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        *,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        synced_gpus: bool = False,
        words: Sequence[Words] | None = None,
    ) -> None:
        self.model = model
        self.sources = {name: model_kwargs.get(name) for name in ("encoder_outputs", "attention_mask")}
        self.config = generation_config
        self.synced_gpus = synced_gpus
        self.device = input_ids.device
        self.num_beams: int = generation_config.num_beams
        self.num_wanted: int = generation_config.num_return_sequences or 1
        self.prompt_length = self.length = input_ids.shape[1]
        self.penalize = LENGTH_PENALTIES[getattr(generation_config, "length_penalty_type", None) or "transformers"]
        self.logits_processor = logits_processor
        self.recorded = _find_what_to_record(generation_config)
        # What is recorded of a step has every row.
        make_decoder = None if self.recorded else getattr(model, "make_decoder", None)  # other models have none
        sharing = make_decoder and make_decoder(model_kwargs, generation_config)
        self.decoder = sharing or ReorderingDecoder(model, model_kwargs, generation_config)
        self.sentences_may_leave = (
            sharing is not None
            and not synced_gpus
            and not generation_config.do_sample  # or a seed would draw other tokens than in the library
            and judges_rows_alone(logits_processor, stopping_criteria)
        )
        self.rules = StoppingRules(stopping_criteria, generation_config.max_length, self.device)
        self.words = ForcedWords(words, self.num_beams, self.device) if words and any(words) else None
        self._start(input_ids)

    def _start(self, input_ids: torch.Tensor) -> None:
        """Makes N beams for each sentence, and places for the N best translations."""
        num_sentences = input_ids.shape[0] // self.num_beams
        places = (num_sentences, self.num_beams)
        eos, pad = (getattr(self.config, name, None) for name in ("_eos_token_tensor", "_pad_token_tensor"))
        fill = next((int(each.flatten()[0]) for each in (pad, eos) if each is not None), -1)
        # Enough that all may end at once and as many remain.
        self.num_candidates = max(2, 1 + (0 if eos is None else len(eos))) * self.num_beams
        tokens = torch.full((*places, self.config.max_length), fill, dtype=torch.long, device=self.device)
        tokens[:, :, : self.length] = input_ids.view(*places, -1)
        origins = None
        if self.config.return_dict_in_generate:
            shape = (*places, self.config.max_length - self.length)
            origins = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        scores = torch.full(places, IMPOSSIBLE, dtype=torch.float32, device=self.device)
        lengths = tokens.new_zeros(places)
        unmet = None if self.words is None else torch.full_like(lengths, MANY_WORDS)
        self.open = Hypotheses(tokens, scores, lengths, origins, unmet)
        self.ended, self.results = self.open.apply(torch.clone), self.open.apply(torch.clone)
        self.any_ended = False
        # All beams are the same at first: only the first of them may be continued.
        scores[:, 0] = 0.0
        # How many tokens the batch had when a sentence joined it (see inference/continuous.py): 0, or (B,).
        self.joined_at: Any = 0
        # Which sentences the batch still has, and which of those only wait for others.
        self.sentences = torch.arange(num_sentences, device=self.device)
        self.is_done = torch.zeros(num_sentences, dtype=torch.bool, device=self.device)

    def run(self) -> Any:
        """Returns the best translations, as the library's `_beam_search` does."""
        is_done = False
        while self.model._has_unfinished_sequences(is_done, self.synced_gpus, device=self.device):
            if is_done:
                # To keep other processes company.
                prompts = self.open.tokens[:, :, : self.prompt_length].flatten(0, 1)
                self.model(decoder_input_ids=prompts, use_cache=False, **self.sources)
                continue
            self.advance()
            # Asking waits for a GPU to come to the end of its work.
            num_done = int(self.is_done.sum()) if self.any_ended else 0
            is_done = num_done == len(self.is_done)
            if self.sentences_may_leave and (staying := find_staying(self.is_done, num_done)) is not None:
                self._keep(staying)
        return self._finish()

    def advance(self) -> None:
        """Makes every beam a token longer."""
        logits = self.decoder.step(self.open.tokens[:, :, : self.length])  # (R, V), or (B, V) for the first token
        self._step(logits.to(device=self.device, dtype=torch.float32))

    def _count_new(self) -> Any:
        """Returns how many tokens open beams have behind the prompt: all as many, or each its own, (B,)."""
        return self.length - self.prompt_length - self.joined_at

    def _step(self, logits: torch.Tensor) -> None:
        beams, tokens, scores = self._find_candidates(logits)
        if self.logits_processor:
            self._end_stuck(scores)
        self.length += 1

        def write_out() -> torch.Tensor:
            return self._continue(beams, tokens, scores).tokens[:, :, : self.length].flatten(0, 1)

        length = self.prompt_length + self._count_new()
        ends = self.rules.find_ends(tokens, length, self.sentences, write_out, self.recorded.get("scores"))
        unmet = None if self.words is None else self.words.count_unmet()
        # Ended candidates are not continued, except if a criterion ends all.
        remaining = scores + ends * IMPOSSIBLE
        chosen = remaining.topk(self.num_beams).indices if self.words is None else self.words.choose(remaining)
        following = beams.gather(1, chosen)
        continued = self._continue(following, tokens.gather(1, chosen), remaining.gather(1, chosen))
        continued.unmet = None if unmet is None else unmet.gather(1, chosen)
        self.decoder.follow(following)
        # What asks comes last: it waits for a GPU to come to the end of its work.
        if ends.any():
            all_end, may_end, best = ends.all(dim=1), ends, slice(self.num_beams)  # only the best may end
            if self.words and all_end.any():  # at the limit any, as there may be more banks than turns
                best = slice(None)
                may_end = ends & (all_end[:, None] | (torch.arange(ends.shape[1], device=self.device) < self.num_beams))
            candidates = self._continue(beams[:, best], tokens[:, best], scores[:, best])
            candidates.unmet = None if unmet is None else unmet[:, best]
            self._add_ended(candidates, may_end[:, best])
            self.is_done |= all_end
        self.open = continued
        if self.any_ended:
            self.is_done |= ~self._can_improve()

    def _find_candidates(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the best continuations of each sentence, best first: beams, tokens and scores, each (B, C)."""
        num_sentences, vocab_size = len(self.sentences), logits.shape[1]
        beams = logits.shape[0] // num_sentences
        if beams < self.num_beams and (
            self.logits_processor or self.words or self.config.do_sample or vocab_size < self.num_candidates
        ):
            # The first token's logits are the same for all beams; these cases need them for each.
            logits, beams = logits.repeat_interleave(self.num_beams, dim=0), self.num_beams
        scores = self.open.scores[:, :beams].reshape(-1, 1)
        log_probs = logits.log_softmax(dim=-1)
        if self.logits_processor:
            rows = self.open.tokens[:, :beams, : self.length].flatten(0, 1)
            log_probs = self.logits_processor(cast(torch.LongTensor, rows), cast(torch.FloatTensor, log_probs))
        for name in self.recorded:
            computed = {"scores": log_probs, "logits": logits}.get(name)
            outputs = cast(ReorderingDecoder, self.decoder).outputs
            self.recorded[name] += (getattr(outputs, name) if computed is None else computed,)
        if self.config.do_sample:
            # Without replacement.
            totals = (log_probs + scores).view(num_sentences, -1)
            indices = torch.multinomial(totals.softmax(dim=-1), num_samples=self.num_candidates)
            return indices // vocab_size, indices % vocab_size, totals.gather(1, indices)
        values, tokens = find_largest(log_probs, min(self.num_candidates, vocab_size))
        values = values + scores
        best, indices = values.view(num_sentences, -1).topk(self.num_candidates)
        found = indices // values.shape[1], tokens.view(num_sentences, -1).gather(1, indices), best
        if self.words is None:
            return found
        return self._add_words(found[0] * vocab_size + found[1], tokens[:, 0].view(num_sentences, -1), log_probs)

    def _add_words(
        self, found: torch.Tensor, likeliest: torch.Tensor, log_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns candidates in the order of their turns, given beam * V + token (B, C) and likeliest tokens (B, N)."""
        words, vocab_size = cast(ForcedWords, self.words), log_probs.shape[1]
        first = torch.arange(0, self.num_beams * vocab_size, vocab_size, device=self.device)[:, None]
        indices = torch.cat([found, (words.propose(likeliest, log_probs) + first).flatten(1)], dim=1).sort(dim=1).values
        beams, tokens = indices // vocab_size, indices % vocab_size
        scores = log_probs.view(len(found), -1).gather(1, indices) + self.open.scores.gather(1, beams)
        scores = scores.masked_fill(pad_sides(indices[:, 1:] == indices[:, :-1], (1, 0)), -torch.inf)  # the repeated
        order = words.arrange(beams, tokens, scores)
        return beams.gather(1, order), tokens.gather(1, order), scores.gather(1, order)

    def _continue(self, beams: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor) -> Hypotheses:
        """Returns open beams (B, n) with one more token each, already counted in `length`."""
        sequences = gather_beams(self.open.tokens, beams)
        sequences[:, :, self.length - 1] = tokens
        lengths = torch.zeros_like(beams) + _as_column(self._count_new())
        origins = None
        if self.open.beam_indices is not None:
            origins = gather_beams(self.open.beam_indices, beams)
            origins[:, :, self.length - self.prompt_length - 1] = (
                beams + self.sentences[:, None] * self.num_beams
            ).int()
        return Hypotheses(sequences, scores, lengths, origins)

    def _add_ended(self, candidates: Hypotheses, ends: torch.Tensor) -> None:
        """Keeps the N best of all translations that have ended so far, given which candidates have now, (B, N)."""
        scores = candidates.scores / self.penalize(_as_column(self._count_new()), self.config.length_penalty)
        is_void = ~ends | self.is_done[:, None]
        if candidates.unmet is not None:
            is_worse = is_void | (candidates.scores <= IMPOSSIBLE / 2)
            candidates.unmet = candidates.unmet.masked_fill(is_worse, MANY_WORDS)
        candidates.scores = scores + is_void * IMPOSSIBLE
        candidates.lengths *= ends
        both = self.ended.apply(lambda *tensors: torch.cat(tensors, dim=1), candidates)
        chosen = both.scores.topk(self.num_beams if both.unmet is None else both.scores.shape[1]).indices
        if both.unmet is not None:
            chosen = chosen.gather(1, both.unmet.gather(1, chosen).argsort(dim=1, stable=True))[:, : self.num_beams]
        self.ended = both.apply(lambda tensor: gather_beams(tensor, chosen))
        self.any_ended = True

    def _end_stuck(self, scores: torch.Tensor) -> None:
        """Ends sentences as they are where a constraint forbids every token, given the candidates' scores (B, C)."""
        is_stuck = ~self.is_done & scores.isneginf().all(dim=1)
        if is_stuck.any():
            self._add_ended(self.open.apply(torch.clone), is_stuck[:, None].expand(-1, self.num_beams))
            self.is_done |= is_stuck

    def _can_improve(self) -> torch.Tensor:
        """Says for which sentences an open beam may still take the place of a translation that has ended, (B,)."""
        alpha, early_stopping = self.config.length_penalty, self.config.early_stopping
        is_ended = self.ended.lengths > 0 if self.ended.unmet is None else self.ended.unmet == 0
        # Log-probabilities only fall: a beam can reach at most its present one, divided for the best length.
        length = self._count_new()
        longest: Any = self.rules.find_limits(self.sentences) - self.prompt_length
        best_open = self.open.scores[:, 0]
        if self.penalize is gnmt_length_penalty:
            possible = best_open / self.penalize(longest if alpha > 0 else length + 1, alpha)
            worst = self.ended.scores[:, self.num_wanted - 1]
            is_enough = is_ended[:, self.num_wanted - 1]
        else:
            # What the library takes for the best length is exact with "never" only.
            possible = best_open / self.penalize(longest if early_stopping == "never" and alpha > 0 else length, alpha)
            worst = self.ended.scores[:, -1]
            is_enough = is_ended.all(dim=1)
        can_improve = ~is_enough | (possible > worst)
        return can_improve & ~is_ended.all(dim=1) if early_stopping is True else can_improve

    def _keep(self, stay: torch.Tensor) -> None:
        """Goes on with these sentences; the translations of the others can no longer change."""
        self._store()
        cast(SharingDecoder, self.decoder).keep_sentences(stay)
        if self.words is not None:
            self.words.keep_sentences(stay)
        self.open, self.ended = (found.apply(lambda tensor: tensor[stay]) for found in (self.open, self.ended))
        self.is_done, self.sentences = self.is_done[stay], self.sentences[stay]

    def _store(self) -> None:
        """Writes what has been found for the sentences of the batch to their places among the results."""
        self.results.apply(lambda result, found: result.index_copy_(0, self.sentences, found), self.ended)

    def _finish(self) -> Any:
        self._store()
        best = self.results.apply(lambda tensor: tensor[:, : self.num_wanted].flatten(0, 1))
        longest = int(best.lengths.max())
        sequences = best.tokens[:, : self.prompt_length + longest]
        if not self.config.return_dict_in_generate:
            return sequences
        encoder_outputs: Any = self.sources["encoder_outputs"]
        kinds = [name for name in ("attentions", "hidden_states") if f"decoder_{name}" in self.recorded]
        return GenerateBeamEncoderDecoderOutput(
            sequences=cast(torch.LongTensor, sequences),
            sequences_scores=cast(torch.FloatTensor, best.scores),
            beam_indices=cast(torch.LongTensor, cast(torch.Tensor, best.beam_indices)[:, :longest]),
            past_key_values=self.decoder.cache if isinstance(self.decoder, ReorderingDecoder) else None,
            **self.recorded,
            **{f"encoder_{name}": encoder_outputs.get(name) for name in kinds},
        )
