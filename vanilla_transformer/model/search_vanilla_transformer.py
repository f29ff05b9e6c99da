"""Beam search (6.1) that reads each source once, whatever the number of beams, and lets finished sentences go.

It finds what the library's `_beam_search` finds, token for token, when asked for the library's scores, and takes its
arguments. What differs is the work:

- the source side exists once per sentence, and the beams' histories are not copied when beams change places
  (cache_vanilla_transformer.py);
- the best tokens are looked for within each beam, and only those are put together with the scores so far;
- a sentence whose translations can no longer change leaves the batch.

Shapes: B  sentences still in the batch, N  beams, R = B * N  rows, V  target vocabulary, C  candidates per sentence and
step, M  longest output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.utils import GenerateBeamEncoderDecoderOutput

from .decoding_vanilla_transformer import ReorderingDecoder
from .static_decoding_vanilla_transformer import SharingDecoder, can_share, make_sharing_decoder
from .stopping_vanilla_transformer import StoppingRules, find_staying, judges_rows_alone

_IMPOSSIBLE = -1.0e9  # the library's score for what must not be chosen
_MANY_VALUES, _PART = 100_000, 64


def gnmt_length_penalty(length: int | torch.Tensor, alpha: float) -> Any:
    """Equation 14 of Wu et al. (2016), by which the paper divides log-probabilities: ((5 + length) / 6) ** alpha."""
    return ((5 + length) / 6) ** alpha


def transformers_length_penalty(length: int | torch.Tensor, alpha: float) -> Any:
    """What transformers divides by."""
    return length**alpha


def find_largest(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the k largest of each row (rows, V), largest first, as `topk` does: values and indices.

    On a CPU `topk` takes longer for a whole vocabulary than the largest values of its parts take to find: the k largest
    ones are in the k parts with the largest maxima.
    """
    size = values.shape[1]
    if values.device.type != "cpu" or values.numel() < _MANY_VALUES or size < _PART * k:
        return values.topk(k)
    num_parts = size // _PART
    parts = values[:, : num_parts * _PART].unflatten(1, (num_parts, _PART))
    best = parts.amax(dim=2).topk(min(k, num_parts)).indices
    found = parts.gather(1, best[:, :, None].expand(-1, -1, _PART)).flatten(1)
    indices = (best[:, :, None] * _PART + torch.arange(_PART)).flatten(1)
    rest = torch.arange(num_parts * _PART, size).expand(values.shape[0], -1)
    found, indices = torch.cat([found, values[:, num_parts * _PART :]], dim=1), torch.cat([indices, rest], dim=1)
    largest = found.topk(k)
    return largest.values, indices.gather(1, largest.indices)


LENGTH_PENALTIES: dict[str, Callable[[int | torch.Tensor, float], Any]] = {
    "gnmt": gnmt_length_penalty,
    "transformers": transformers_length_penalty,
}


@dataclass
class Hypotheses:
    """N translations for each of B sentences, begun or ended."""

    tokens: torch.Tensor  # (B, N, M), filled up with padding
    scores: torch.Tensor  # (B, N)
    beam_indices: torch.Tensor | None  # (B, N, M - prompt): which row each token came from; -1 behind the end

    def gather(self, indices: torch.Tensor) -> "Hypotheses":
        """Picks hypotheses of each sentence, (B, n)."""

        def pick(values: torch.Tensor) -> torch.Tensor:
            return values.gather(1, indices[:, :, None].expand(-1, -1, values.shape[2]))

        return Hypotheses(
            pick(self.tokens),
            self.scores.gather(1, indices),
            None if self.beam_indices is None else pick(self.beam_indices),
        )

    def join(self, other: "Hypotheses") -> "Hypotheses":
        """Lays the hypotheses of two side by side."""
        origins = None
        if self.beam_indices is not None and other.beam_indices is not None:
            origins = torch.cat([self.beam_indices, other.beam_indices], dim=1)
        return Hypotheses(
            torch.cat([self.tokens, other.tokens], dim=1), torch.cat([self.scores, other.scores], dim=1), origins
        )

    def select(self, sentences: torch.Tensor) -> "Hypotheses":
        """Picks sentences."""
        origins = None if self.beam_indices is None else self.beam_indices[sentences]
        return Hypotheses(self.tokens[sentences], self.scores[sentences], origins)

    def put(self, sentences: torch.Tensor, other: "Hypotheses") -> None:
        """Replaces sentences, in place."""
        self.tokens[sentences], self.scores[sentences] = other.tokens, other.scores
        if self.beam_indices is not None and other.beam_indices is not None:
            self.beam_indices[sentences] = other.beam_indices


class Recorder:
    """Collects what `return_dict_in_generate` returns of every step."""

    def __init__(self, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
        returns = bool(config.return_dict_in_generate)
        self.encoder_outputs = model_kwargs["encoder_outputs"]
        self.scores: tuple[torch.Tensor, ...] | None = () if returns and config.output_scores else None
        self.steps: dict[str, tuple[Any, ...]] = {}
        if returns and config.output_logits:
            self.steps["logits"] = ()
        if returns and config.output_attentions:
            self.steps |= {"decoder_attentions": (), "cross_attentions": ()}
        if returns and config.output_hidden_states:
            self.steps["decoder_hidden_states"] = ()

    @property
    def is_on(self) -> bool:
        """Whether anything is collected, for which every row must be there at every step."""
        return self.scores is not None or bool(self.steps)

    def add(self, logits: torch.Tensor, log_probs: torch.Tensor, outputs: Any) -> None:
        """Adds a step."""
        if self.scores is not None:
            self.scores += (log_probs,)
        for name in self.steps:
            self.steps[name] += (logits if name == "logits" else getattr(outputs, name),)

    def outputs(self) -> dict[str, Any]:
        """Returns all of it by the names of `GenerateBeamEncoderDecoderOutput`."""
        encoder = {}
        if "decoder_attentions" in self.steps:
            encoder["encoder_attentions"] = self.encoder_outputs.get("attentions")
        if "decoder_hidden_states" in self.steps:
            encoder["encoder_hidden_states"] = self.encoder_outputs.get("hidden_states")
        return {"scores": self.scores, **self.steps, **encoder}


class BeamSearch:
    """One call of beam search.

    Args:
        model: The model.
        input_ids: The prompts, (R, prompt length); at the least, the start symbol.
        logits_processor: Changes log-probabilities, as in the library.
        stopping_criteria: Say which candidates end, as in the library.
        generation_config: `num_beams`, `num_return_sequences`, `length_penalty`, `early_stopping` and so on, with the
            library's meanings. With `length_penalty_type="gnmt"` a translation's score is its log-probability divided
            by ((5 + length) / 6) ** length_penalty, and unless `early_stopping=True` a sentence is searched until none
            of its open beams can become one of the translations to return.
        model_kwargs: `encoder_outputs` and `attention_mask` with B rows, and what else the model takes.
        synced_gpus: Whether to go on until all processes are done.
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
        self.recorder = Recorder(generation_config, model_kwargs)
        shares_history = not self.recorder.is_on and can_share(model, model_kwargs, generation_config)
        self.decoder: SharingDecoder | ReorderingDecoder = (
            make_sharing_decoder(model, model_kwargs, generation_config)
            if shares_history
            else ReorderingDecoder(model, model_kwargs, generation_config)
        )
        self.sentences_may_leave = (
            shares_history
            and not synced_gpus
            and not generation_config.do_sample  # or a seed would draw other tokens than in the library
            and judges_rows_alone(logits_processor, stopping_criteria)
        )
        self.rules = StoppingRules(stopping_criteria, generation_config.max_length, self.device)
        self._start(input_ids)

    def _start(self, input_ids: torch.Tensor) -> None:
        """Makes N beams for each sentence, and places for the N best translations."""
        num_sentences = input_ids.shape[0] // self.num_beams
        places = (num_sentences, self.num_beams)
        eos, pad = (getattr(self.config, name, None) for name in ("_eos_token_tensor", "_pad_token_tensor"))
        fill = -1 if eos is None else int(eos[0] if pad is None else pad)
        # Enough that all may end at once and as many remain.
        self.num_candidates = max(2, 1 + (0 if eos is None else len(eos))) * self.num_beams
        tokens = torch.full((*places, self.config.max_length), fill, dtype=torch.long, device=self.device)
        tokens[:, :, : self.length] = input_ids.view(*places, -1)
        origins = None
        if self.config.return_dict_in_generate:
            shape = (*places, self.config.max_length - self.length)
            origins = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        scores = torch.full(places, _IMPOSSIBLE, device=self.device)
        self.ended = Hypotheses(tokens.clone(), scores.clone(), None if origins is None else origins.clone())
        self.ended_lengths = torch.zeros(places, dtype=torch.long, device=self.device)
        self.any_ended = False
        # All beams are the same at first: only the first of them may be continued.
        scores[:, 0] = 0.0
        self.open = Hypotheses(tokens, scores, origins)
        # Which sentences the batch still has, and which of those only wait for others.
        self.sentences = torch.arange(num_sentences, device=self.device)
        self.is_done = torch.zeros(num_sentences, dtype=torch.bool, device=self.device)
        self.results = self.ended.select(self.sentences)
        self.result_lengths = self.ended_lengths.clone()

    def run(self) -> Any:
        """Returns the best translations, as the library's `_beam_search` does."""
        is_done = False
        while self.model._has_unfinished_sequences(is_done, self.synced_gpus, device=self.device):
            if is_done:
                # To keep other processes company.
                prompts = self.open.tokens[:, :, : self.prompt_length].flatten(0, 1)
                self.model(decoder_input_ids=prompts, use_cache=False, **self.sources)
                continue
            logits = self.decoder.step(self.open.tokens[:, :, : self.length])
            self._step(logits.to(device=self.device, dtype=torch.float32))
            is_done = bool(self.is_done.all())
            if self.sentences_may_leave and (staying := find_staying(self.is_done)) is not None:
                self._keep(staying)
        return self._finish()

    def _step(self, logits: torch.Tensor) -> None:
        """Makes every beam a token longer, given the logits of that token, (R, V), or (B, V) for the first one."""
        beams, tokens, scores = self._find_candidates(logits)
        self.length += 1

        def write_out() -> torch.Tensor:
            return self._continue(beams, tokens, scores).tokens[:, :, : self.length].flatten(0, 1)

        ends = self.rules.find_ends(tokens, self.length, self.sentences, write_out, self.recorder.scores)
        # Of what has ended nothing goes on, unless a criterion ends all.
        open_scores, chosen = (scores + ends * _IMPOSSIBLE).topk(self.num_beams)
        if ends.any():
            best = slice(self.num_beams)  # only these may end
            candidates = self._continue(beams[:, best], tokens[:, best], scores[:, best])
            self._add_ended(candidates, ends[:, best])
            self.is_done |= ends.all(dim=1)
        beams = beams.gather(1, chosen)
        self.open = self._continue(beams, tokens.gather(1, chosen), open_scores)
        self.decoder.follow(beams)
        if self.any_ended:
            self.is_done |= ~self._can_improve()

    def _find_candidates(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the best continuations of each sentence, best first: beams, tokens and scores, each (B, C)."""
        num_sentences, vocab_size = len(self.sentences), logits.shape[1]
        beams = logits.shape[0] // num_sentences
        if beams < self.num_beams and (
            self.logits_processor or self.config.do_sample or vocab_size < self.num_candidates
        ):
            # The first token's logits are the same for all beams; these cases need them for each.
            logits, beams = logits.repeat_interleave(self.num_beams, dim=0), self.num_beams
        scores = self.open.scores[:, :beams].reshape(-1, 1)
        log_probs = logits.log_softmax(dim=-1)
        if self.logits_processor:
            rows = self.open.tokens[:, :beams, : self.length].flatten(0, 1)
            log_probs = self.logits_processor(cast(torch.LongTensor, rows), cast(torch.FloatTensor, log_probs))
        if self.recorder.is_on:
            self.recorder.add(logits, log_probs, cast(ReorderingDecoder, self.decoder).outputs)
        if self.config.do_sample:
            return self._sample_candidates((log_probs + scores).view(num_sentences, -1), vocab_size)
        values, tokens = find_largest(log_probs, min(self.num_candidates, vocab_size))
        values = values + scores
        best, indices = values.view(num_sentences, -1).topk(self.num_candidates)
        return indices // values.shape[1], tokens.view(num_sentences, -1).gather(1, indices), best

    def _sample_candidates(
        self, log_probs: torch.Tensor, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draws continuations of each sentence without replacement from (B, N * V)."""
        indices = torch.multinomial(log_probs.softmax(dim=-1), num_samples=self.num_candidates)
        return indices // vocab_size, indices % vocab_size, log_probs.gather(1, indices)

    def _continue(self, beams: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor) -> "Hypotheses":
        """Returns open beams (B, n) with one more token each, already counted in `length`."""
        longer = self.open.gather(beams)
        longer.scores = scores
        longer.tokens[:, :, self.length - 1] = tokens
        if longer.beam_indices is not None:
            rows = beams + self.sentences[:, None] * self.num_beams
            longer.beam_indices[:, :, self.length - 1 - self.prompt_length] = rows.int()
        return longer

    def _add_ended(self, candidates: "Hypotheses", ends: torch.Tensor) -> None:
        """Keeps the N best of all translations that have ended so far, given which candidates have now, (B, N)."""
        num_tokens = self.length - self.prompt_length
        scores = candidates.scores / self.penalize(num_tokens, self.config.length_penalty)
        candidates.scores = scores + (~ends | self.is_done[:, None]) * _IMPOSSIBLE
        both = self.ended.join(candidates)
        chosen = both.scores.topk(self.num_beams).indices
        self.ended = both.gather(chosen)
        self.ended_lengths = torch.cat([self.ended_lengths, num_tokens * ends], dim=1).gather(1, chosen)
        self.any_ended = True

    def _can_improve(self) -> torch.Tensor:
        """Says for which sentences an open beam may still take the place of a translation that has ended, (B,)."""
        alpha, early_stopping = self.config.length_penalty, self.config.early_stopping
        is_ended = self.ended_lengths > 0
        # Log-probabilities only fall, so the most that may come of a beam is its own of now at the best length.
        length: Any = self.length - self.prompt_length
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
        self.open, self.ended = self.open.select(stay), self.ended.select(stay)
        self.ended_lengths, self.is_done = self.ended_lengths[stay], self.is_done[stay]
        self.sentences = self.sentences[stay]

    def _store(self) -> None:
        """Writes what has been found for the sentences of the batch to their places among the results."""
        self.results.put(self.sentences, self.ended)
        self.result_lengths[self.sentences] = self.ended_lengths

    def _finish(self) -> Any:
        self._store()
        longest = int(self.result_lengths[:, : self.num_wanted].max())
        sequences = self.results.tokens[:, : self.num_wanted, : self.prompt_length + longest].flatten(0, 1)
        if not self.config.return_dict_in_generate:
            return sequences
        beam_indices = cast(torch.Tensor, self.results.beam_indices)[:, : self.num_wanted, :longest].flatten(0, 1)
        return GenerateBeamEncoderDecoderOutput(
            sequences=cast(torch.LongTensor, sequences),
            sequences_scores=cast(torch.FloatTensor, self.results.scores[:, : self.num_wanted].flatten()),
            beam_indices=cast(torch.LongTensor, beam_indices),
            past_key_values=self.decoder.cache if isinstance(self.decoder, ReorderingDecoder) else None,
            **self.recorder.outputs(),
        )
