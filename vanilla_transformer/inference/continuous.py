"""Continuous batching: sentences join a batch and leave it while others are being translated. It is for servers.

Shapes: B  places in the batch, N  beams, R = B * N  rows, H  heads, E  entries of the histories, S  source length,
D  d_model, d  size of a head's keys or values, V  target vocabulary, n  sentences that join.
"""

from collections.abc import Hashable, Mapping
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn
from torch.nn.functional import pad as pad_sides
from transformers.generation.configuration_utils import GenerationConfig
from transformers.generation.utils import GenerationMixin

from vanilla_transformer.model.decoding_vanilla_transformer import (
    IMPOSSIBLE,
    SharedHistoryDecoder,
    follow_beams,
    make_additive,
    step_fast,
)
from vanilla_transformer.model.linear_vanilla_transformer import project
from vanilla_transformer.model.pipeline_vanilla_transformer import is_vanilla
from vanilla_transformer.model.search_vanilla_transformer import BeamSearch
from vanilla_transformer.model.static_decoding_vanilla_transformer import KeysAndValues

from .translate import Translation, Translator

Key = TypeVar("Key", bound=Hashable)


def _take_places(states: torch.Tensor, staying: torch.Tensor, num_new: int) -> torch.Tensor:
    """Returns these places of (B, ...), and behind them new ones, filled with zeros."""
    return pad_sides(states[staying], (0, 0) * (states.ndim - 1) + (0, num_new))


class History:
    """One layer's keys and values of all places, (B, H, E, d): entries are added at the end, and leave at the start."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._memory = (keys, values)  # with room behind the last entry
        self._first, self._end = 0, keys.shape[2]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds entries (B, H, N, d); returns all."""
        if self._end + keys.shape[2] > self._memory[0].shape[2]:
            self._end -= self._first
            first, second = (
                pad_sides(states[:, :, self._first :], (0, 0, 0, self._end + keys.shape[2])) for states in self._memory
            )
            self._memory, self._first = (first, second), 0
        start, self._end = self._end, self._end + keys.shape[2]
        for states, new in zip(self._memory, (keys, values), strict=True):
            states[:, :, start : self._end] = new
        held_keys, held_values = (states[:, :, self._first : self._end] for states in self._memory)
        return held_keys, held_values

    def drop(self, entries: int) -> None:
        """Forgets the first entries."""
        self._first += entries

    def take_places(self, staying: torch.Tensor, num_new: int) -> None:
        """Goes on with these places, and new ones behind them."""
        first, second = (_take_places(states[:, :, self._first :], staying, num_new) for states in self._memory)
        self._memory = (first, second)
        self._first, self._end = 0, self._end - self._first


class GrowingDecoder:
    """Runs the model over places for sentences; a place may be given to another sentence after any token.

    As in `SharedHistoryDecoder`, the beams of a sentence share a history, and a mask says who sees what. A token has N
    entries in it, at the same position for all places. A sentence sees nothing of those before it came.
    """

    def __init__(self, model: Any, num_beams: int) -> None:
        self.model = model
        self.num_beams = num_beams
        self.histories: list[History] = []
        self.sources: list[KeysAndValues] = []  # (B, H, S, d)
        for layer in model.model.decoder.layers:
            heads = layer.encoder_attn.num_heads
            maps: list[nn.Linear] = [layer.encoder_attn.k_proj, layer.encoder_attn.v_proj]
            empty = [map_.weight.new_empty(0, heads, 0, map_.weight.shape[0] // heads) for map_ in maps]
            self.sources.append(KeysAndValues(*empty))
            self.histories.append(History(*empty))
        self.source_mask = torch.zeros(0, 1, 1, 0, dtype=torch.bool, device=model.device)  # (B, 1, 1, S)
        # (B, N, E + N): which entries a beam sees, those of the next token included.
        self.visible = torch.zeros(0, num_beams, num_beams, dtype=torch.bool, device=model.device)

    def step(self, sequences: torch.Tensor) -> torch.Tensor:
        """Feeds the last of the tokens (B, N, length); returns the logits of the next ones, (R, V)."""
        decoder = self.model.model.decoder
        positions = self.visible.sum(dim=2).view(-1, 1) - 1
        embeddings = decoder.embed_tokens(sequences[:, :, -1:].flatten(0, 1))
        hidden_states = decoder.embed(embeddings, positions, int(positions.max()) + 1)[:, 0]
        mask = make_additive(self.visible, hidden_states.dtype)
        return step_fast(self.model, hidden_states, self.histories, self.sources, mask, self.source_mask)

    def follow(self, beams: torch.Tensor) -> None:
        """Makes beam n of a sentence the continuation of beam `beams[:, n]`, (B, N)."""
        self.visible = follow_beams(self.visible, beams)

    def take_places(self, staying: torch.Tensor, num_new: int) -> None:
        """Goes on with these places, and new ones behind them."""
        self.visible = _take_places(self.visible, staying, num_new)
        self.source_mask = _take_places(self.source_mask, staying, num_new)
        for history in self.histories:
            history.take_places(staying, num_new)
        self.sources = [
            KeysAndValues(*(_take_places(states, staying, num_new) for states in source)) for source in self.sources
        ]

    def drop_columns(self, columns: int, places: list[int]) -> None:
        """Forgets the first tokens of all places, and what is longer than the sources at these places."""
        self.visible = self.visible[:, :, columns * self.num_beams :]
        for history in self.histories:
            history.drop(columns * self.num_beams)
        used = self.source_mask[places].any(dim=0).nonzero()
        longest = int(used[-1, -1]) + 1 if len(used) else 0
        self.source_mask = self.source_mask[..., :longest]
        self.sources = [KeysAndValues(keys[:, :, :longest], values[:, :, :longest]) for keys, values in self.sources]

    def empty(self, places: torch.Tensor) -> None:
        """Lets these places (true in a mask (B,), or by number) see nothing but what they add themselves."""
        own = torch.eye(self.num_beams, dtype=torch.bool, device=places.device)
        self.visible[places] = pad_sides(own, (self.visible.shape[2] - self.num_beams, 0))

    def give_places(self, places: torch.Tensor, states: torch.Tensor, attention_mask: torch.Tensor) -> None:
        """Gives places (n,) to sentences, of which these are the encoder's states (n, S, D) and mask (n, S)."""
        length = states.shape[1]
        missing = max(0, length - self.source_mask.shape[3])
        self.source_mask = pad_sides(self.source_mask, (0, missing))
        self.source_mask[places] = pad_sides(attention_mask.bool(), (0, self.source_mask.shape[3] - length))[
            :, None, None
        ]
        for index, layer in enumerate(self.model.model.decoder.layers):
            attention = layer.encoder_attn
            if missing:
                wider = (pad_sides(each, (0, 0, 0, missing)) for each in self.sources[index])
                self.sources[index] = KeysAndValues(*wider)
            for map_, held in zip((attention.k_proj, attention.v_proj), self.sources[index], strict=True):
                held[places, :, :length] = attention.split_heads(project(map_, states))
        self.empty(places)


class ContinuousSearch(BeamSearch):
    """A beam search that sentences may join after any token; with one beam it is greedy search.

    The last tokens of all sentences stand in one column. Before a sentence that joined later, columns mean nothing.
    """

    decoder: Any  # a GrowingDecoder, once the search has begun
    is_limited_by_source: bool
    start_token_id: int

    @classmethod
    def begin(
        cls, model: Any, input_ids: torch.Tensor, *, generation_config: GenerationConfig, **rules: Any
    ) -> "ContinuousSearch":
        """What `generate` calls, as `custom_generate`, in place of a search; returns one with no sentence in it.

        Raises:
            ValueError: If the settings ask for something that looks at whole columns, or counts them.
        """
        if generation_config.num_beams == 1:
            generation_config.early_stopping = True  # the first end is the end
        names = ("logits_processor", "stopping_criteria", "synced_gpus")
        given = {name: rules.pop(name) for name in names if name in rules}
        search = cls(model, input_ids, generation_config=generation_config, model_kwargs=rules, **given)
        sharing: Any = search.decoder
        if (
            not search.sentences_may_leave
            or not isinstance(sharing, SharedHistoryDecoder)
            or not sharing.is_fast
            or sharing.prompt_mask is not None
            or search.prompt_length != 1
            or search.logits_processor
            or search.rules.others
            or search.recorded
            or search.words
        ):
            raise ValueError("Continuous batching is not for these settings of generation, or not for this model.")
        search.is_limited_by_source = getattr(generation_config, "_is_limited_by_source", False)
        search.start_token_id = int(input_ids[0, 0])
        search.decoder = GrowingDecoder(model, search.num_beams)
        search.joined_at = search.rules.limits = search.sentences  # one each; no sentence is left
        search.take_places([])
        return search

    def advance(self) -> None:
        """Makes every beam a token longer; where nothing is translated any more, there is but one."""
        self.decoder.empty(self.is_done)
        super().advance()

    def take_places(self, staying: list[int], num_new: int = 0) -> None:
        """Goes on with these places, and new ones behind them."""
        rows = torch.tensor(staying, dtype=torch.long, device=self.device)

        def take(states: torch.Tensor) -> torch.Tensor:
            return _take_places(states, rows, num_new)

        self.open, self.ended = self.open.apply(take), self.ended.apply(take)
        self.joined_at, self.is_done, limits = map(take, (self.joined_at, self.is_done, self.rules.limits))
        self.rules.limits = limits
        self.sentences = torch.arange(len(self.is_done), device=self.device)
        self.decoder.take_places(rows, num_new)

    def drop_columns(self, places: list[int]) -> None:
        """Forgets the columns that the sentences at these places do not need: those before and behind them."""
        columns = min([self.length - self.prompt_length, *self.joined_at[places].tolist()])
        end = max([self.length, *(self.joined_at + cast(torch.Tensor, self.rules.limits))[places].tolist()])
        for hypotheses in (self.open, self.ended):
            hypotheses.tokens = hypotheses.tokens[:, :, columns:end]
        self.joined_at = self.joined_at - columns
        self.length -= columns
        self.decoder.drop_columns(columns, places)

    def give_places(self, places: list[int], input_ids: torch.Tensor, attention_mask: torch.Tensor) -> None:
        """Begins to translate sentences (n, S), whose mask is (n, S), at places where nothing is translated."""
        rows = torch.tensor(places, dtype=torch.long, device=self.device)
        states = self.model.get_encoder()(input_ids, attention_mask=attention_mask, return_dict=True)[0]
        self.decoder.give_places(rows, states, attention_mask)
        limits = [self._find_limit(length) for length in attention_mask.sum(dim=1).tolist()]
        cast(torch.Tensor, self.rules.limits)[rows] = torch.tensor(limits, device=self.device)
        missing = max(0, self.length - self.prompt_length + max(limits) - self.open.tokens.shape[2])
        for hypotheses in (self.open, self.ended):
            hypotheses.tokens = pad_sides(hypotheses.tokens, (0, missing))
            hypotheses.scores[rows] = IMPOSSIBLE
            hypotheses.lengths[rows] = 0
        self.open.tokens[rows, :, self.length - 1] = self.start_token_id
        self.open.scores[rows, 0] = 0.0
        self.is_done[rows] = False
        self.joined_at[rows] = self.length - self.prompt_length

    def _find_limit(self, source_length: int) -> int:
        """The longest output, prompt included."""
        if self.is_limited_by_source:
            return self.prompt_length + int(self.model.find_longest_output(source_length, self.prompt_length))
        return self.rules.max_length

    def read(self, place: int) -> list[tuple[list[int], float]]:
        """The best translations of a sentence that is done, each as token ids with its score."""
        start = self.prompt_length + int(self.joined_at[place])
        rows = (self.ended.tokens[place], self.ended.lengths[place].tolist(), self.ended.scores[place].tolist())
        found = [(tokens[start : start + length].tolist(), score) for tokens, length, score in zip(*rows, strict=True)]
        return found[: self.num_wanted]


class ContinuousBatch(Generic[Key]):
    """Sentences that are being translated, each with a key; others may be added at any time.

    Raises:
        ValueError: If this is not for the translator's model or settings; `Translator.run` is for all.
    """

    def __init__(self, translator: Translator) -> None:
        self.translator = translator
        self.model: Any = translator.model
        if not is_vanilla(self.model) or not isinstance(self.model, GenerationMixin) or translator.glossary is not None:
            raise ValueError("Continuous batching is for models of this package in PyTorch, without a glossary.")
        self.clear()

    @torch.inference_mode()
    def clear(self) -> None:
        """Forgets all sentences."""
        source = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        settings = {**self.translator.generate_kwargs, "return_dict_in_generate": False}
        self._search: ContinuousSearch = self.model.generate(
            source, attention_mask=torch.ones_like(source), **settings, custom_generate=ContinuousSearch.begin
        )
        self._places: list[Key | None] = []  # of the search; None where nothing is translated

    @property
    def keys(self) -> list[Key]:
        """The keys of the sentences that are being translated."""
        return [key for key in self._places if key is not None]

    def __len__(self) -> int:
        """How many sentences are being translated."""
        return len(self.keys)

    def _find_used(self) -> list[int]:
        return [place for place, key in enumerate(self._places) if key is not None]

    @torch.inference_mode()
    def add(self, sources: Mapping[Key, list[int]]) -> None:
        """Begins to translate sources, given by their token ids."""
        self._search.drop_columns(self._find_used())
        num_missing = max(0, len(sources) - self._places.count(None))
        if num_missing:
            self._search.take_places(list(range(len(self._places))), num_missing)
            self._places += [None] * num_missing
        free = [place for place, key in enumerate(self._places) if key is None][: len(sources)]
        padded = {"input_ids": list(sources.values())}
        inputs = self.translator.tokenizer.pad(padded, return_attention_mask=True, return_tensors="pt")
        inputs = inputs.to(self.model.device)
        self._search.give_places(free, inputs["input_ids"], inputs["attention_mask"])
        for place, key in zip(free, sources, strict=True):
            self._places[place] = key

    @torch.inference_mode()
    def step(self) -> dict[Key, list[Translation]]:
        """Finds one more token of each sentence; returns the translations of those that are done with it."""
        self._search.advance()
        found = {}
        for place, (key, is_done) in enumerate(zip(self._places, self._search.is_done.tolist(), strict=True)):
            if is_done and key is not None:
                found[key] = self._decode(self._search.read(place))
                self._places[place] = None
        used = self._find_used()
        if 2 * len(used) < len(self._places):  # a few free places wait for others
            self._search.take_places(used)
            self._places = [self._places[place] for place in used]
        return found

    def _decode(self, found: list[tuple[list[int], float]]) -> list[Translation]:
        texts = self.translator.tokenizer.batch_decode([ids for ids, _ in found], skip_special_tokens=True)
        scores = [score if self.translator.has_scores else None for _, score in found]
        return list(map(Translation, texts, scores))
