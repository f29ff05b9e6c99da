"""One step of a search: the caches, in which beams share what they have in common, the decoder over them, forced words.

Shapes: B  sentences, N  beams (or sampled sequences) of a sentence, R = B * N  rows that are decoded, the beams of a
sentence side by side, H  heads, S  source length, D  d_model, d  size of a head's keys or values, V  target vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, cast

import torch
from torch import nn
from torch.nn.functional import pad as pad_sides
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache
from transformers.generation.configuration_utils import GenerationConfig
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutput

from .dropout_vanilla_transformer import Dropout
from .linear_vanilla_transformer import is_watched, linear

IMPOSSIBLE = -1.0e9  # the library's score for what must not be chosen
MANY_WORDS = 1_000_000  # more than a sentence lacks

# Caches


class SourceSharingCache(EncoderDecoderCache):
    """An `EncoderDecoderCache` whose source side, (B, H, S, d), may serve N target rows for each of its own.

    When a search reorders its rows, it stays as it is while each N rows still belong to the same sentence.
    """

    @classmethod
    def adopt(cls, cache: EncoderDecoderCache) -> Self:
        """Returns a cache of this kind that shares its state with the given one: a change in one is seen in both."""
        if isinstance(cache, cls):
            return cache
        shared = cls(cache.self_attention_cache, cache.cross_attention_cache)
        shared.__dict__ = cache.__dict__
        return shared

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Makes row i the continuation of row `beam_idx[i]`; (R,)."""
        self._select(beam_idx, self.self_attention_cache.reorder_cache)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Makes `repeats` rows of each."""
        self.check_dynamic_cache("batch_repeat_interleave")
        self.self_attention_cache.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices`, (rows to keep,)."""
        self.check_dynamic_cache("batch_select_indices")
        self._select(indices, self.self_attention_cache.batch_select_indices)

    def _select(self, indices: torch.Tensor, select_targets: Callable[[Any], Any]) -> None:
        target_rows, source_rows = _count_rows(self.self_attention_cache), _count_rows(self.cross_attention_cache)
        select_targets(indices)
        if source_rows == 0:
            return
        sentences = indices // max(target_rows // source_rows, 1)
        if len(sentences) % source_rows == 0:
            unchanged = torch.arange(source_rows, device=sentences.device)
            if torch.equal(sentences, unchanged.repeat_interleave(len(sentences) // source_rows)):
                return
        self.cross_attention_cache.reorder_cache(cast(torch.LongTensor, sentences))


def _count_rows(cache: Cache) -> int:
    layers: list[Any] = cache.layers
    return layers[0].keys.shape[0] if layers and layers[0].get_seq_length() > 0 else 0


def count_source_rows(cache: EncoderDecoderCache | None, encoder_hidden_states: torch.Tensor) -> int:
    """Returns how many rows the source side has: in the cache, once it is there, or else (B, S, D)."""
    if cache is not None and cache.is_updated.get(0):
        cached: Any = cache.cross_attention_cache.layers[0]
        return cached.keys.shape[0]
    return encoder_hidden_states.shape[0]


def match_rows(states: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """Brings a tensor with a row for each sentence, or for each beam, to `rows` rows, as the cache has them."""
    if states is None or states.shape[0] in (rows, 1):
        return states
    if states.shape[0] % rows == 0:
        return states[:: states.shape[0] // rows]
    if rows % states.shape[0]:
        raise ValueError(f"{states.shape[0]} rows of the source or its mask do not fit {rows} rows of its keys.")
    return states.repeat_interleave(rows // states.shape[0], dim=0)


class SharedHistoryLayer(DynamicLayer):
    """One layer's keys and values of all beams of a sentence in one row, (B, H, entries, d), in order of appearance.

    When other beams go on, no history is copied: the entries stay, and a mask says which of them belong to a beam.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.length = 0  # number of target positions, each with an entry of each beam
        self._memory: tuple[torch.Tensor, torch.Tensor]  # keys and values, with room for further entries behind them

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values (B or R, H, L, d); returns all entries, (B, H, entries, d)."""
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.keys, self.values = self._memory = key_states[:, :, :0], value_states[:, :, :0]
            self.is_initialized = True
        sentences, length = self.keys.shape[0], key_states.shape[2]
        keys, values = (
            states.unflatten(0, (sentences, -1)).transpose(1, 2).flatten(2, 3) for states in (key_states, value_states)
        )
        return self.append(keys, values, length)

    def append(self, keys: torch.Tensor, values: torch.Tensor, length: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends entries (B, H, new entries, d), which make each beam `length` longer; returns all of them."""
        start, end = self.keys.shape[2], self.keys.shape[2] + keys.shape[2]
        if end > self._memory[0].shape[2]:
            self._memory = (_enlarge(self.keys, 2 * end), _enlarge(self.values, 2 * end))
        for memory, new in zip(self._memory, (keys, values), strict=True):
            memory[:, :, start:end] = new
        self.keys, self.values = (memory[:, :, :end] for memory in self._memory)
        self.length += length
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Returns the number of target positions."""
        return self.length

    def keep_sentences(self, indices: torch.Tensor) -> None:
        """Forgets all sentences but these, (sentences to keep,)."""
        end = self.keys.shape[2]
        self._memory = (self._memory[0][indices], self._memory[1][indices])
        self.keys, self.values = (memory[:, :, :end] for memory in self._memory)


def _enlarge(states: torch.Tensor, capacity: int) -> torch.Tensor:
    larger = states.new_empty(*states.shape[:2], capacity, states.shape[3])
    larger[:, :, : states.shape[2]] = states
    return larger


# The decoder's layers without their modules


def can_step_fast(model: Any) -> bool:
    """Whether `step_fast` does what the model would: nothing is hooked, replaced, quantised or in training mode."""
    if model.config._attn_implementation != "sdpa":
        return False
    decoder = model.model.decoder
    maps, norms, dropouts = [model.lm_head], [], []
    for layer in decoder.layers:
        for attention in (layer.self_attn, layer.encoder_attn):
            maps += [attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj]
        maps += [layer.fc1, layer.fc2]
        norms += [layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm]
        dropouts += [layer.dropout, layer.activation_dropout]
    modules = [model, model.model, *decoder.modules(), *model.lm_head.modules()]
    return (
        not any(module.training or is_watched(module) for module in modules)
        and all(type(module) is nn.Linear for module in maps)
        and all(type(module) is nn.LayerNorm for module in norms)
        and all(type(module) in (Dropout, nn.Dropout) for module in dropouts)
    )


def step_fast(
    model: Any,
    hidden_states: torch.Tensor,
    histories: Sequence[Any],
    sources: Sequence[Any],
    mask: torch.Tensor | None,
    source_mask: torch.Tensor | None,
) -> torch.Tensor:
    """Decodes one more token of each row without calling modules; returns the next tokens' logits (R, V).

    With one sentence, calling the modules of modeling_vanilla_transformer.py takes as long as their arithmetic.

    `hidden_states` (R, D) are the new tokens' embeddings with positions. Each layer has a history, whose `append` takes
    new keys and values (B, H, R / B, d) and returns all, and `keys` and `values` (B, H, S, d) of the source. The masks
    (B, 1, R / B, entries) and (B, 1, 1, S) are added to their scores; booleans in the second say what is seen.
    """
    decoder = model.model.decoder
    if source_mask is not None and source_mask.dtype is torch.bool:
        source_mask = to_scores(source_mask, hidden_states.dtype)  # or each layer would
    for layer, history, source in zip(decoder.layers, histories, sources, strict=True):
        hidden_states = _step_layer(layer, hidden_states, history, source, mask, source_mask)
    return _apply(model.lm_head, decoder.layer_norm(hidden_states))


def _step_layer(
    layer: Any,
    hidden_states: torch.Tensor,
    history: Any,
    source: Any,
    mask: torch.Tensor | None,
    source_mask: torch.Tensor | None,
) -> torch.Tensor:
    norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
    for index, norm in enumerate(norms):
        inputs = _normalize(norm, hidden_states) if layer.normalize_before else hidden_states
        if index == 0:
            attention, sentences = layer.self_attn, len(source.keys)
            maps = (attention.k_proj, attention.v_proj)
            keys, values = history.append(*(_project(map_, inputs, sentences, attention.num_heads) for map_ in maps))
            outputs = _attend(attention, inputs, keys, values, mask)
        elif index == 1:
            outputs = _attend(layer.encoder_attn, inputs, source.keys, source.values, source_mask)
        else:
            outputs = _apply(layer.fc2, layer.activation_fn(_apply(layer.fc1, inputs)))
        hidden_states = hidden_states + outputs
        if not layer.normalize_before:
            hidden_states = _normalize(norm, hidden_states)
    return hidden_states


def _attend(
    attention: Any, inputs: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    queries = _project(attention.q_proj, inputs, len(keys), attention.num_heads)
    context = nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=attention.scaling)
    return _apply(attention.out_proj, context.transpose(1, 2).reshape(inputs.shape[0], -1))


def _project(layer: nn.Linear, inputs: torch.Tensor, sentences: int, heads: int) -> torch.Tensor:
    """Projects (R, D) to queries, keys or values, (B, H, R / B, d)."""
    return _apply(layer, inputs).view(sentences, -1, heads, layer.weight.shape[0] // heads).transpose(1, 2)


def _apply(layer: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    return linear(inputs, layer.weight, layer.bias)


def _normalize(norm: nn.LayerNorm, inputs: torch.Tensor) -> torch.Tensor:
    return torch.layer_norm(inputs, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


# The model, step by step


def to_scores(visible: torch.Tensor, dtype: torch.dtype, hidden: float = -torch.inf) -> torch.Tensor:
    """Maps true to 0 and false to `hidden`, which is added to the scores of what is not to be seen; any shape."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, hidden)


def make_additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores (B, 1, N, entries) so that beams see only their entries, (B, N, entries)."""
    return to_scores(visible, dtype, torch.finfo(dtype).min)[:, None]


def follow_beams(visible: torch.Tensor, beams: torch.Tensor) -> torch.Tensor:
    """What the continuations of `beams` (B, N) see of the entries (B, N, entries), and of their own N new ones."""
    history = visible.gather(1, beams[:, :, None].expand(-1, -1, visible.shape[2]))
    own = torch.eye(beams.shape[1], dtype=torch.bool, device=beams.device).expand(len(beams), -1, -1)
    return torch.cat([history, own], dim=2)


class SharedHistoryDecoder:
    """Runs the model over beams whose histories lie in one place, so that a change of beams copies nothing.

    `model_kwargs`: `encoder_outputs` (B, S, D), masks (B, S) and (R, prompt length) or `None`, an empty dynamic cache.
    """

    def __init__(self, model: Any, model_kwargs: dict[str, Any], num_beams: int) -> None:
        self.model = model
        self.num_beams = num_beams
        self.layers = [SharedHistoryLayer() for _ in model.model.decoder.layers]
        self.cache = SourceSharingCache(
            Cache(layers=[*self.layers]), model_kwargs["past_key_values"].cross_attention_cache
        )
        self.encoder_hidden_states = states = model_kwargs["encoder_outputs"][0]
        # Made once for all steps. Its rows for the queries are all alike, so one row serves any number of queries.
        self.source_mask: Any = create_bidirectional_mask(
            config=model.config,
            inputs_embeds=states[:, :1],
            attention_mask=model_kwargs.get("attention_mask"),
            encoder_hidden_states=states,
        )
        prompt_mask = model_kwargs.get("decoder_attention_mask")
        self.prompt_mask = None if prompt_mask is None else prompt_mask[::num_beams]
        # (B, N, entries): which entries of the shared history belong to a beam. A single beam without padding sees all.
        self.visible: torch.Tensor | None = None
        self.is_fast = can_step_fast(model)

    def step(self, sequences: torch.Tensor) -> torch.Tensor:
        """Feeds what is new of the tokens (B, N, length); returns the next logits, (B, V) at first, then (R, V)."""
        if self.layers[0].length == 0:
            if self.prompt_mask is not None:
                self.visible = self.prompt_mask[:, None].bool().expand(-1, self.num_beams, -1)
            elif self.num_beams > 1:
                self.visible = torch.ones_like(sequences, dtype=torch.bool)
            return self._call_model(sequences[:, 0], self.prompt_mask)
        rows, mask = sequences[:, :, -1:].flatten(0, 1), None
        if self.visible is not None:
            mask = make_additive(self.visible, self.model.dtype)
        return self._step_fast(rows[:, 0], mask) if self.is_fast else self._call_model(rows, mask)

    def _call_model(self, rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        outputs = self.model(
            decoder_input_ids=rows,
            decoder_attention_mask=mask,
            encoder_outputs=BaseModelOutput(last_hidden_state=self.encoder_hidden_states),
            attention_mask=self.source_mask,
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
        )
        return outputs.logits[:, -1]

    def _step_fast(self, tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        decoder, length = self.model.model.decoder, self.layers[0].length
        if self.prompt_mask is None:
            positions = torch.full((1, 1), length, device=self.encoder_hidden_states.device)
        else:
            positions = cast(torch.Tensor, self.visible).sum(dim=2).view(-1, 1) - 1
        hidden_states = decoder.embed(decoder.embed_tokens(tokens)[:, None], positions, length + 1)[:, 0]
        sources = self.cache.cross_attention_cache.layers[: len(self.layers)]
        return step_fast(self.model, hidden_states, self.layers, sources, mask, self.source_mask)

    def follow(self, beams: torch.Tensor) -> None:
        """Makes beam n of a sentence the continuation of beam `beams[:, n]`, (B, N)."""
        if self.visible is not None:
            self.visible = follow_beams(self.visible, beams)

    def keep_sentences(self, indices: torch.Tensor) -> None:
        """Goes on with these sentences only."""
        for layer in self.layers:
            layer.keep_sentences(indices)
        self.cache.cross_attention_cache.reorder_cache(cast(torch.LongTensor, indices))
        self.encoder_hidden_states = self.encoder_hidden_states[indices]
        if self.visible is not None:
            self.visible = self.visible[indices]
        if self.source_mask is not None:
            self.source_mask = self.source_mask[indices]


class ReorderingDecoder:
    """Runs the model over whatever cache and attention were asked for, copying histories as the library does."""

    def __init__(self, model: Any, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> None:
        self.model = model
        self.model_kwargs = model_kwargs
        self.generation_config = generation_config
        self.outputs: Any = None  # the model's, of the last step

    def step(self, sequences: torch.Tensor) -> Any:
        """Feeds what is new of the tokens (B, N, length); returns the logits of the next token, (R, V)."""
        sequences = sequences.flatten(0, 1)
        if self.outputs is None:
            outputs = self.model._prefill(sequences, self.generation_config, self.model_kwargs)
        else:
            new = 1 if self.model_kwargs["use_cache"] else None
            inputs = self.model.prepare_inputs_for_generation(sequences, next_sequence_length=new, **self.model_kwargs)
            outputs = self.model(**inputs, return_dict=True)
        self.outputs = outputs
        self.model_kwargs = self.model._update_model_kwargs_for_generation(
            outputs, self.model_kwargs, is_encoder_decoder=True
        )
        logits = outputs.logits[:, -1]
        outputs.logits = None  # which may be large, and is not needed beside the next one
        return logits

    @property
    def cache(self) -> EncoderDecoderCache | None:
        """The cache, if there is one."""
        return self.model_kwargs.get("past_key_values")

    def follow(self, beams: torch.Tensor) -> None:
        """Makes beam n of a sentence the continuation of beam `beams[:, n]`, (B, N)."""
        if self.cache is None:
            return
        sentences = torch.arange(beams.shape[0], device=beams.device)[:, None]
        rows = cast(torch.LongTensor, (sentences * beams.shape[1] + beams).flatten())
        if hasattr(self.model, "_reorder_cache"):  # a subclass's, which the library asks too
            self.model_kwargs["past_key_values"] = self.model._reorder_cache(self.cache, rows)
        else:
            self.cache.reorder_cache(rows)


# Words that must appear


@dataclass(frozen=True, eq=False)
class TokenSet:
    """Some tokens of the target vocabulary; two objects are two sets, whatever is in them."""

    members: torch.Tensor  # (V,): true where a token is one of them


class Phrase(NamedTuple):
    """A word or phrase that must appear: its tokens and, where not all may, which may stand before and behind them.

    At a translation's start nothing need stand before. Behind must be a token: where the length limit cuts a
    translation off right behind the phrase, whether its last word is whole is open, and the phrase counts as missing.
    Narrow beams find every word only if an alternative of each may stand behind any token.
    """

    tokens: tuple[int, ...]
    before: TokenSet | None = None
    after: TokenSet | None = None


Words = Sequence[Sequence[Phrase]]  # constraints of a sentence: alternatives of each
_NOTHING = -1  # fills up places behind a phrase
_LIKELY = 3  # tokens of a constraint's alternatives that a beam tries, besides the one that brings its end nearest
_NEARER = 1000.0  # a token nearer to the end goes before any probability
_FIRST_SET = -2  # what stands for the first set of tokens; -3 for the second, and so on


class ForcedWords:
    """What beams have of the words that must appear: dynamic beam allocation (Post & Vilar, 2018), vectorised.

    Each step also looks at the tokens that begin or continue a phrase. Candidates are divided into banks by the number
    of tokens that they lack, and take turns in the beam: the best of each bank, the second best of each, and so on (Hu
    et al., 2019). Each phrase is looked for by itself (the Shift-And algorithm), so that different ones may overlap. A
    token behind a phrase, where only some may stand, is its last place, but may begin a phrase again.

    Shapes: K constraints of a sentence, A alternatives of one, P places of the longest alternative, n sets of tokens, C
    candidates.
    """

    def __init__(self, words: Sequence[Words], num_beams: int, device: torch.device) -> None:
        """Takes the constraints of B sentences; one that is given twice must appear twice, without overlap."""
        counts = [Counter(map(frozenset, sentence)) for sentence in words]
        phrases = [phrase for sentence in counts for constraint in sentence for phrase in constraint]
        sets = list(dict.fromkeys(each for phrase in phrases for each in phrase[1:] if each is not None))
        sizes = (max(map(len, counts)), max(len(constraint) for sentence in counts for constraint in sentence))
        longest = max(len(phrase.tokens) + (phrase.after is not None) for phrase in phrases)
        self.phrases = torch.full((len(words), 1, *sizes, longest), _NOTHING)  # (B, 1, K, A, P)
        self.before = torch.full((len(words), 1, *sizes), len(sets))  # (B, 1, K, A): number of a set, n where all may
        needed = torch.zeros((len(words), 1, sizes[0]), dtype=torch.long)
        for row, sentence in enumerate(counts):
            for column, (constraint, count) in enumerate(sentence.items()):
                needed[row, 0, column] = count
                for place, (tokens, before, after) in enumerate(constraint):
                    behind = [] if after is None else [_FIRST_SET - sets.index(after)]
                    self.phrases[row, 0, column, place, : len(tokens) + len(behind)] = torch.tensor([*tokens, *behind])
                    if before is not None:
                        self.before[row, 0, column, place] = sets.index(before)
        self.phrases, self.before = self.phrases.to(device), self.before.to(device)
        self.members = torch.stack([each.members for each in sets], dim=1).to(device) if sets else None  # (V, n)
        self.needed = needed.to(device).expand(-1, num_beams, -1)  # (B, N, K): how many times each must still appear
        # (B, N, K, A, P): whether a beam ends with the first tokens of a phrase, up to this one.
        self.progress = torch.zeros_like(self.phrases, dtype=torch.bool).expand(-1, num_beams, -1, -1, -1)
        # (B, N, n + 2): whether a beam's last token is in a set, in any, and in none.
        self.last = torch.ones((len(words), num_beams, len(sets) + 2), dtype=torch.bool, device=device)
        self._measure()

    def _measure(self) -> None:
        left = (self.phrases != _NOTHING).flip(-1).cumsum(-1).flip(-1) - 1  # places of a phrase behind each of its own
        self.is_last = left == 0
        self.is_set = self.phrases <= _FIRST_SET
        # (B, 1, K): the places of the shortest alternative that may begin anywhere, if there is one.
        bound = (self.before < self.last.shape[2] - 2) * MANY_WORDS
        lengths = left[..., 0].masked_fill(left[..., 0] < 0, 2 * MANY_WORDS) + 1
        self.shortest = (lengths + bound).amin(dim=-1) % MANY_WORDS
        # How much nearer a beam is to all words by what it has of a phrase.
        self.gains = (self.shortest[..., None, None] - left).clamp(min=0) * (left >= 0)

    def _continue(self, progress: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Returns which places (B, n, K, A, P) may come next, given what beams have and their last tokens' sets."""
        begins = last.gather(2, self.before.flatten(2).expand(-1, last.shape[1], -1)).unflatten(
            2, self.before.shape[2:]
        )
        return torch.cat([begins[..., None], progress[..., :-1]], dim=4)

    def propose(self, likeliest: torch.Tensor, log_probs: torch.Tensor) -> torch.Tensor:
        """Returns tokens to look at (B, N, n): the likeliest ones (B, N), and those that begin or continue phrases.

        Of each constraint's, these are the one that brings its end nearest, and the likeliest by `log_probs` (R, V).
        """
        is_next = self._continue(self.progress, self.last) & (self.needed > 0)[..., None, None]
        is_next &= self.phrases != _NOTHING
        tokens = torch.where(is_next & (self.phrases >= 0), self.phrases, likeliest[:, :, None, None, None])
        for number, members in enumerate(() if self.members is None else self.members.T):
            is_behind = is_next & (self.phrases == _FIRST_SET - number)
            rows = is_behind.flatten(2).any(dim=2).flatten().nonzero()[:, 0]
            if len(rows):
                found = likeliest.flatten().clone()
                found[rows] = log_probs[rows].masked_fill(~members, -torch.inf).argmax(dim=1)
                tokens = torch.where(is_behind, found.view(*likeliest.shape, 1, 1, 1), tokens)
        # With many alternatives, all of their tokens would take longer than the model.
        values = log_probs.view(*likeliest.shape, -1).gather(2, tokens.flatten(2)).view(is_next.shape)
        values = values.masked_fill(~is_next, -torch.inf)
        values, nearest, tokens = (each.flatten(3) for each in (values, values + self.gains * _NEARER, tokens))
        likely = values.topk(min(_LIKELY, values.shape[3]), dim=3)
        chosen = torch.cat([likely.indices, nearest.argmax(dim=3, keepdim=True)], dim=3)
        is_void = values.gather(3, chosen).isneginf()
        tokens = tokens.gather(3, chosen).masked_fill(is_void, -1).flatten(2)
        tokens = torch.where(tokens < 0, likeliest[:, :, None], tokens)
        return torch.cat([tokens, likeliest[:, :, None]], dim=2)

    def arrange(self, beams: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Remembers what candidates (B, C) have; returns the order (B, C) in which they may enter the beam."""
        progress, last = self._match(beams, tokens)
        is_met = (progress & self.is_last).flatten(3).any(dim=3)
        is_whole = (progress & self.is_last & ~self.is_set).flatten(3).any(dim=3)
        progress[..., 1:] &= ~is_met[..., None, None]
        progress[..., 0] &= ~is_whole[..., None]
        needed = (gather_beams(self.needed, beams) - is_met.long()).clamp(min=0)
        gains = (progress * self.gains * (needed > 0)[..., None, None]).flatten(2).amax(dim=2)
        lacking = (needed * self.shortest).sum(dim=2) - gains
        order = scores.argsort(dim=1, descending=True, stable=True)
        order = order.gather(1, lacking.gather(1, order).argsort(dim=1, stable=True))
        banks = lacking.gather(1, order)
        places = torch.arange(banks.shape[1], device=banks.device).expand_as(banks)
        is_first = pad_sides(banks[:, 1:] != banks[:, :-1], (1, 0), value=True)
        turns = places - (places * is_first).cummax(dim=1).values
        turns = turns.masked_fill(scores.gather(1, order) <= IMPOSSIBLE / 2, banks.shape[1])
        order = order.gather(1, turns.argsort(dim=1, stable=True))
        self.candidates = tuple(gather_beams(values, order) for values in (needed, progress, last))
        return order

    def _match(self, beams: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what candidates (B, C) have of phrases, (B, C, K, A, P), and their tokens' sets, (B, C, n + 2)."""
        progress = self._continue(gather_beams(self.progress, beams), gather_beams(self.last, beams))
        matches = self.phrases == tokens[:, :, None, None, None]
        if self.members is None:
            return progress & matches, gather_beams(self.last, beams)
        last = pad_sides(pad_sides(self.members[tokens], (0, 1), value=True), (0, 1), value=False)
        sets = torch.where(self.is_set, _FIRST_SET - self.phrases, last.shape[2] - 1).flatten(2)
        matches |= last.gather(2, sets.expand(-1, tokens.shape[1], -1)).view_as(matches)
        return progress & matches, last

    def count_unmet(self) -> torch.Tensor:
        """Returns how many words the candidates, as `arrange` has ordered them, lack, (B, C)."""
        return self.candidates[0].sum(dim=2)

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Lets candidates, as `arrange` has ordered them, enter the beam; returns which, the best first, (B, N)."""
        chosen = (scores <= IMPOSSIBLE / 2).long().argsort(dim=1, stable=True)[:, : self.needed.shape[1]]
        chosen = chosen.gather(1, scores.gather(1, chosen).argsort(dim=1, descending=True, stable=True))
        self.needed, self.progress, self.last = (gather_beams(values, chosen) for values in self.candidates)
        return chosen

    def keep_sentences(self, stay: torch.Tensor) -> None:
        """Goes on with these sentences only."""
        for name in ("phrases", "before", "needed", "progress", "last"):
            setattr(self, name, getattr(self, name)[stay])
        self._measure()


def gather_beams(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Picks beams or candidates (B, n) of each sentence from values (B, N, ...)."""
    if values.ndim > 2:
        indices = indices.view(*indices.shape, *(1,) * (values.ndim - 2)).expand(-1, -1, *values.shape[2:])
    return values.gather(1, indices)
