"""Caches in which the beams of a sentence share what they have in common.

Shapes: B  sentences, N  beams (or sampled sequences) of a sentence, R = B * N  rows that are decoded, the beams of a
sentence side by side, H  heads, S  source length, d  size of a head's keys or values.
"""

from typing import Any, Self, cast

import torch
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache


class SourceSharingCache(EncoderDecoderCache):
    """An `EncoderDecoderCache` whose source side, (B, H, S, d), may serve N target rows for each of its own.

    The decoder folds the rows of a sentence into the length of its queries (see `CrossAttention`), so the source's
    keys and values are stored, read and computed once per sentence. Whatever a search does with its rows, the source
    side follows: it is left alone as long as each group of N rows still belongs to the same sentence, and is indexed
    like the target side where that is no longer so.
    """

    @classmethod
    def adopt(cls, cache: EncoderDecoderCache) -> Self:
        """Returns a cache of this kind that is one with the given one: what changes in either changes in both."""
        if isinstance(cache, cls):
            return cache
        shared = cls(cache.self_attention_cache, cache.cross_attention_cache)
        shared.__dict__ = cache.__dict__
        return shared

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Makes row i the continuation of row `beam_idx[i]`; (R,)."""
        target_rows = _count_rows(self.self_attention_cache)
        self.self_attention_cache.reorder_cache(beam_idx)
        self._select_sources(beam_idx, target_rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Makes `repeats` rows of each."""
        self.check_dynamic_cache("batch_repeat_interleave")
        self.self_attention_cache.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices`, (rows to keep,)."""
        self.check_dynamic_cache("batch_select_indices")
        target_rows = _count_rows(self.self_attention_cache)
        self.self_attention_cache.batch_select_indices(indices)
        self._select_sources(indices, target_rows)

    def _select_sources(self, indices: torch.Tensor, target_rows: int) -> None:
        source_rows = _count_rows(self.cross_attention_cache)
        if source_rows == 0:
            return
        sentences = indices // max(target_rows // source_rows, 1)
        if len(sentences) % source_rows == 0:
            unchanged = torch.arange(source_rows, device=sentences.device)
            if torch.equal(sentences, unchanged.repeat_interleave(len(sentences) // source_rows)):
                return
        self.cross_attention_cache.reorder_cache(cast(torch.LongTensor, sentences))


def count_source_rows(cache: EncoderDecoderCache | None, encoder_hidden_states: torch.Tensor) -> int:
    """Returns how many rows the source side has: in the cache, once it is there, or else (B, S, D)."""
    if cache is not None and cache.is_updated.get(0):
        cached: Any = cache.cross_attention_cache.layers[0]
        return cached.keys.shape[0]
    return encoder_hidden_states.shape[0]


def match_rows(states: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """Brings something with a row for each sentence, or for each beam, to `rows` rows.

    Code that repeats the source for each beam on its own meets a cache that did not, and the other way round.

    Raises:
        ValueError: If one number is not a multiple of the other.
    """
    if states is None or states.shape[0] in (rows, 1):
        return states
    if states.shape[0] % rows == 0:
        return states[:: states.shape[0] // rows]
    if rows % states.shape[0]:
        raise ValueError(f"{states.shape[0]} rows of the source or its mask do not fit {rows} rows of its keys.")
    return states.repeat_interleave(rows // states.shape[0], dim=0)


def _count_rows(cache: Cache) -> int:
    layers: list[Any] = cache.layers
    return layers[0].keys.shape[0] if layers and layers[0].get_seq_length() > 0 else 0


class SharedHistoryLayer(DynamicLayer):
    """One layer's keys and values of all beams of a sentence in one row, (B, H, entries, d), in order of appearance.

    Beam search makes other beams go on at every step. Instead of copying their histories, the entries stay where they
    are, and the search's mask says which of them are a beam's own. The first update has one row for each sentence, the
    next ones may have several.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.num_entries = 0
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes room for as many sentences as there are rows."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            states.new_empty(*states.shape[:2], 0, states.shape[3]) for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values (B or R, H, L, d); returns all entries, (B, H, entries, d)."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        sentences, length = self.keys.shape[0], key_states.shape[2]
        keys, values = (
            states.unflatten(0, (sentences, -1)).transpose(1, 2).flatten(2, 3) for states in (key_states, value_states)
        )
        return self.append(keys, values, length)

    def append(self, keys: torch.Tensor, values: torch.Tensor, length: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends entries (B, H, new entries, d), which make each beam `length` longer; returns all of them."""
        start, end = self.num_entries, self.num_entries + keys.shape[2]
        if end > self.keys.shape[2]:
            self.keys, self.values = (_enlarge(states, 2 * end, start) for states in (self.keys, self.values))
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values
        self.num_entries = end
        self.length += length
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        """Returns the number of target positions, which one beam has entries of."""
        return self.length

    def keep_sentences(self, indices: torch.Tensor) -> None:
        """Forgets all sentences but these, (sentences to keep,)."""
        self.keys, self.values = self.keys[indices], self.values[indices]


def _enlarge(states: torch.Tensor, capacity: int, used: int) -> torch.Tensor:
    larger = states.new_empty(*states.shape[:2], capacity, states.shape[3])
    larger[:, :, :used] = states[:, :, :used]
    return larger
