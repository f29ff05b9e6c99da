"""One step of a search over static memory, which a CUDA GPU records once and then repeats.

Python starts the hundreds of small operations of a step more slowly than a GPU does them. A CUDA graph starts them all
at once; but its sizes and the places in memory that it reads and writes are those of the recording. Sizes that change
from batch to batch and from step to step are therefore rounded up, and what is left over is masked: the number of
sentences to a power of two, the source length and the number of positions there is room for to 64, 128, 256 and so on.
Such a combination, with the number of beams, is a bucket. Everything that a step reads and changes stays in its place
from step to step, and from one call of `generate` to the next.

Shapes: B  sentences of the search or of the bucket, N  beams, R = B * N  rows, E  entries of a history: N for each
position, S  source length, H  heads, D  d_model, d  size of a head's keys or values, V  target vocabulary.
"""

import math
import threading
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import DynamicLayer, StaticLayer
from transformers.generation.configuration_utils import GenerationConfig

from .decoding_vanilla_transformer import (
    SharedHistoryDecoder,
    SourceSharingCache,
    can_step_fast,
    make_additive,
    step_fast,
    to_scores,
)
from .linear_vanilla_transformer import project
from .positions_vanilla_transformer import LearnedPositions

_SMALLEST_LENGTH = 64
_WORTH_MOVING = 4  # how many times fewer sentences are worth a smaller bucket, which is another graph
_RECORDING = threading.Lock()  # one thread records at a time


class Bucket(NamedTuple):
    """The sizes that a step is recorded for."""

    sentences: int
    beams: int
    positions: int
    source_length: int


def round_up(number: int, smallest: int = 1) -> int:
    """Returns the least of `smallest`, twice `smallest`, four times and so on that is no less than the number."""
    while smallest < number:
        smallest *= 2
    return smallest


class KeysAndValues(NamedTuple):
    """Of one layer, (B, H, E or S, d) each."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class StepState:
    """What `decode_step` reads and changes."""

    tokens: torch.Tensor  # (B, N): the new ones
    origins: torch.Tensor  # (B, N): which of the sentence's beams each of them continues
    is_token: torch.Tensor  # (B, 1): false at padding of a prompt, and where there is no sentence
    start: torch.Tensor  # (1,): where the new entries go
    visible: torch.Tensor  # (B, N, E): which entries of its sentence's history belong to a beam
    source_mask: torch.Tensor  # (B, 1, S): what is added to the scores of the source's positions
    histories: list[KeysAndValues]
    sources: list[KeysAndValues]
    bound: int  # of all positions


class StaticHistory(NamedTuple):
    """One layer's keys and values of all beams of a sentence in one row, and where the next ones go, (N,)."""

    held: KeysAndValues
    slots: torch.Tensor

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> KeysAndValues:
        """Writes new entries (B, H, N, d); returns all."""
        self.held.keys.index_copy_(2, self.slots, keys)
        self.held.values.index_copy_(2, self.slots, values)
        return self.held


def decode_step(model: Any, state: StepState) -> torch.Tensor:
    """Feeds one more token of each beam; returns the logits of the next ones, (R, V)."""
    num_sentences, num_beams, num_entries = state.visible.shape
    slots = state.start + torch.arange(num_beams, device=state.start.device)
    own = torch.eye(num_beams, dtype=torch.bool, device=slots.device).expand(num_sentences, -1, -1)
    history = state.visible.gather(1, state.origins[:, :, None].expand(-1, -1, num_entries))
    is_token = state.is_token[:, :, None]
    state.visible.copy_(history.index_copy(2, slots, own & is_token))
    # Nobody sees padding; but padding that has nothing before it must see itself.
    seen_now = history.index_copy(2, slots, own & (is_token | ~history.any(dim=2, keepdim=True)))

    decoder = model.model.decoder
    token_indices = (state.visible.sum(dim=2) - 1).clamp(min=0).view(-1, 1)
    embeddings = decoder.embed_tokens(state.tokens.view(-1, 1))
    hidden_states = decoder.embed(embeddings, token_indices, state.bound)[:, 0]
    mask = make_additive(seen_now, hidden_states.dtype)
    histories = [StaticHistory(held, slots) for held in state.histories]
    logits = step_fast(model, hidden_states, histories, state.sources, mask, state.source_mask[:, None])
    state.start.add_(num_beams)
    return logits


class RecordedStep:
    """`decode_step` of one state as a CUDA graph, which repeats it on what is in that state's places by then."""

    def __init__(self, model: Any, state: StepState, pool: Any) -> None:
        stream = torch.cuda.Stream(state.start.device)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with _RECORDING, torch.cuda.device(stream.device):
            with torch.cuda.stream(stream):
                # Once without recording: libraries get ready at their first call. What it changes is put back.
                before = state.start.clone(), state.visible.clone()
                decode_step(model, state)
                state.start.copy_(before[0])
                state.visible.copy_(before[1])
            self._graph = torch.cuda.CUDAGraph()
            # Other threads may go on using the GPU.
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._logits = decode_step(model, state)
        torch.cuda.current_stream(stream.device).wait_stream(stream)

    def __call__(self) -> torch.Tensor:
        """Returns the logits (R, V), in memory that the next step of any graph of the same pool writes to."""
        self._graph.replay()
        return self._logits


class Workspace:
    """Memory for the state of one search at a time: each tensor of any bucket begins where it did before."""

    def __init__(self) -> None:
        self._storages: dict[str, torch.Tensor] = {}
        self._recorded: dict[tuple[Bucket, int], RecordedStep] = {}
        self._addresses: list[int] = []  # of the weights that these steps read
        self._pool: Any = None  # of the memory that they share

    def record(self, model: Any, state: StepState, bucket: Bucket) -> RecordedStep:
        """Returns the recorded step of a state that lies here."""
        key = (bucket, state.bound)
        if key not in self._recorded:
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._recorded[key] = RecordedStep(model, state, self._pool)
        return self._recorded[key]

    def check_weights(self, model: Any) -> None:
        """Forgets what was recorded with weights in other places; new values in the old places do no harm."""
        parts = (model.model.decoder, model.lm_head)
        tensors = [tensor for part in parts for own in (part.parameters, part.buffers) for tensor in own()]
        addresses = [tensor.data_ptr() for tensor in tensors]
        if addresses != self._addresses:
            self._recorded.clear()
            self._addresses = addresses

    def arrange(self, state: StepState, bucket: Bucket, rows: torch.Tensor | None = None) -> StepState:
        """Copies a state, or these rows of it, here, with zeros behind; one that lies here already needs `rows`."""

        def place(name: str, tensor: torch.Tensor, length: int | None = None) -> torch.Tensor:
            contents = tensor if rows is None else tensor[rows]
            shape = [bucket.sentences, *contents.shape[1:]]
            if length is not None:
                shape[2] = length
            return self._place(name, contents, shape)

        def place_all(name: str, layers: list[KeysAndValues], length: int) -> list[KeysAndValues]:
            return [
                KeysAndValues(*(place(f"{name}.{index}.{part}", tensor, length) for part, tensor in enumerate(layer)))
                for index, layer in enumerate(layers)
            ]

        entries = bucket.positions * bucket.beams
        return StepState(
            tokens=place("tokens", state.tokens),
            origins=place("origins", state.origins),
            is_token=place("is_token", state.is_token),
            start=self._place("start", state.start.clone(), [1]),
            visible=place("visible", state.visible, entries),
            source_mask=place("source_mask", state.source_mask, bucket.source_length),
            histories=place_all("histories", state.histories, entries),
            sources=place_all("sources", state.sources, bucket.source_length),
            bound=state.bound,
        )

    def _place(self, name: str, contents: torch.Tensor, shape: list[int]) -> torch.Tensor:
        """Returns zeros with `contents` in their first corner."""
        size = math.prod(shape)
        storage = self._storages.get(name)
        is_kept = storage is not None and (storage.dtype, storage.device) == (contents.dtype, contents.device)
        # Ordinary tensors even in inference mode: a later call, outside of it, changes them too.
        with torch.inference_mode(False), torch.no_grad():
            if storage is None or not is_kept or storage.numel() < size:
                storage = self._storages[name] = torch.empty(size, dtype=contents.dtype, device=contents.device)
                self._recorded.clear()
            view = storage[:size].view(shape)
            view.zero_()
            view[tuple(map(slice, contents.shape))] = contents
        return view


class IdleWorkspaces:
    """What a model's searches leave for its next ones: memory, and the steps that were recorded over it."""

    _of_models: "weakref.WeakKeyDictionary[nn.Module, IdleWorkspaces]" = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._idle: list[Workspace] = []

    @classmethod
    def of(cls, model: nn.Module) -> "IdleWorkspaces":
        """Returns those of a model; they are deleted with it."""
        return cls._of_models.setdefault(model, cls())

    def lend(self, borrower: object) -> Workspace:
        """Returns memory that nobody else uses until the borrower is deleted; threads may search at the same time."""
        try:
            workspace = self._idle.pop()
        except IndexError:
            workspace = Workspace()
        weakref.finalize(borrower, self._idle.append, workspace)
        return workspace


class StaticDecoder:
    """Runs the model over beams whose histories share memory that stays where it is (`cache_implementation="static"`).

    A sentence that leaves the search leaves its place empty, until so many are empty that the others move into a
    smaller bucket. Prompts are fed a token at a time, so that one step serves all. It is recorded on a CUDA GPU, unless
    `disable_compile` is set or autocast is on, which has copies of the weights that come and go. `model_kwargs` are
    those of `SharedHistoryDecoder`, with an empty static cache, which stays empty.
    """

    def __init__(self, model: Any, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> None:
        self.model = model
        num_beams = generation_config.num_beams
        prompt_mask = model_kwargs.get("decoder_attention_mask")
        self.prompt_mask = None if prompt_mask is None else prompt_mask[::num_beams].bool()
        self.length = 0  # number of tokens fed
        self.workspace = IdleWorkspaces.of(model).lend(self)
        states: torch.Tensor = model_kwargs["encoder_outputs"][0]
        self.is_recorded = can_record(states.device, generation_config)
        if self.is_recorded:
            self.workspace.check_weights(model)
        known_length = getattr(generation_config, "max_cache_len", None)  # which older versions of the library lack
        lengths = (round_up(length, _SMALLEST_LENGTH) for length in (known_length or 1, states.shape[1]))
        self.bucket = Bucket(round_up(states.shape[0]), num_beams, *lengths)
        self.state = self._begin(states, model_kwargs.get("attention_mask"))
        self.places = torch.arange(states.shape[0], device=states.device)  # of the sentences, in order
        self._move(self.bucket, None)

    def _begin(self, states: torch.Tensor, attention_mask: torch.Tensor | None) -> StepState:
        """Returns a state without a history, in which B and S are not rounded up yet."""
        shape, device = (states.shape[0], self.bucket.beams), states.device
        sources = []
        for layer in self.model.model.decoder.layers:
            attention = layer.encoder_attn
            maps = (attention.k_proj, attention.v_proj)
            sources.append(KeysAndValues(*(attention.split_heads(project(map_, states)) for map_ in maps)))
        is_source = torch.zeros(states.shape[0], 1, self.bucket.source_length, dtype=torch.bool, device=device)
        is_source[:, 0, : states.shape[1]] = True if attention_mask is None else attention_mask.to(device) != 0
        return StepState(
            tokens=torch.zeros(shape, dtype=torch.long, device=device),
            origins=torch.arange(shape[1], device=device).repeat(shape[0], 1),
            is_token=torch.ones(shape[0], 1, dtype=torch.bool, device=device),
            start=torch.zeros(1, dtype=torch.long, device=device),
            visible=torch.zeros(*shape, 0, dtype=torch.bool, device=device),
            source_mask=to_scores(is_source, states.dtype),
            # Self- and cross-attention have heads of the same sizes.
            histories=[KeysAndValues(keys[:, :, :0], values[:, :, :0]) for keys, values in sources],
            sources=sources,
            bound=0,
        )

    def _move(self, bucket: Bucket, places: torch.Tensor | None) -> None:
        """Goes on in another bucket, with the sentences at these places."""
        self.bucket = bucket
        self.state = self.workspace.arrange(self.state, bucket, places)
        self.places = torch.arange(len(self.places), device=self.places.device)

    def step(self, sequences: torch.Tensor) -> torch.Tensor:
        """Feeds what is new of the tokens (B, N, length); returns the logits of the next token, (R, V)."""
        while self.length < sequences.shape[2] - 1:
            self._feed(sequences[:, :, self.length])
        logits = self._feed(sequences[:, :, -1]).unflatten(0, self.state.tokens.shape)
        # A copy: the next recorded step writes to where this one did.
        return logits.index_select(0, self.places).flatten(0, 1)

    def _feed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Feeds one token of each beam (B, N); returns the logits of all rows of the bucket."""
        if self.length == self.bucket.positions:
            self._move(self.bucket._replace(positions=2 * self.length), self.places)
        state = self.state
        if self.prompt_mask is not None and self.length < self.prompt_mask.shape[1]:
            state.is_token.index_copy_(0, self.places, self.prompt_mask[:, self.length, None])
        elif self.prompt_mask is not None and self.length == self.prompt_mask.shape[1]:
            state.is_token.index_fill_(0, self.places, True)
        state.tokens.index_copy_(0, self.places, tokens)
        state.bound = self._bound_positions()
        self.length += 1
        if self.is_recorded:
            return self.workspace.record(self.model, state, self.bucket)()
        return decode_step(self.model, state)

    def _bound_positions(self) -> int:
        """Returns an upper bound of all positions with the next one. It changes at most once within a bucket."""
        table = self.model.model.decoder.embed_positions
        limit = table.weight.shape[0] - table.offset
        if self.length < limit:
            return min(self.bucket.positions, limit)
        if not isinstance(table, LearnedPositions):
            return self.bucket.positions
        # Perhaps some of these are padding. If not, the table raises an error.
        table(self.state.visible[self.places].sum(dim=2), self.length + 1)
        return limit

    def follow(self, beams: torch.Tensor) -> None:
        """Makes beam n of a sentence the continuation of beam `beams[:, n]`, (B, N)."""
        self.state.origins.index_copy_(0, self.places, beams)

    def keep_sentences(self, indices: torch.Tensor) -> None:
        """Goes on with these sentences only."""
        self.places = self.places[indices]
        num_places = round_up(len(indices))
        if num_places * _WORTH_MOVING <= self.bucket.sentences:
            self._move(self.bucket._replace(sentences=num_places), self.places)
        else:
            self.state.is_token.zero_().index_fill_(0, self.places, True)


def can_record(device: torch.device, generation_config: GenerationConfig) -> bool:
    """Whether steps on this device can be recorded, and nothing speaks against it."""
    return device.type == "cuda" and not generation_config.disable_compile and not torch.is_autocast_enabled("cuda")


SharingDecoder = SharedHistoryDecoder | StaticDecoder


def make_sharing_decoder(
    model: Any, model_kwargs: dict[str, Any], generation_config: GenerationConfig
) -> SharingDecoder | None:
    """Returns a decoder in which the beams of a sentence share what they have in common, if one suits the inputs."""
    cache, attention_mask = (model_kwargs.get(name) for name in ("past_key_values", "attention_mask"))
    if not isinstance(cache, SourceSharingCache) or getattr(cache, "_is_user_defined", False):
        return None
    if not model.has_own_methods():
        return None
    layers: list[Any] = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    if all(type(layer) is DynamicLayer and layer.get_seq_length() == 0 for layer in layers):
        # Other kinds of attention do not take the mask over the shared history.
        takes_mask = model.config._attn_implementation in ("eager", "sdpa")
        return SharedHistoryDecoder(model, model_kwargs, generation_config.num_beams) if takes_mask else None
    is_static = generation_config.cache_implementation == "static" and all(type(item) is StaticLayer for item in layers)
    # Who wants the library to compile gets what the library compiles.
    is_static = is_static and generation_config.compile_config is None
    if not is_static or (attention_mask is not None and attention_mask.ndim != 2) or not can_step_fast(model):
        return None
    return StaticDecoder(model, model_kwargs, generation_config)
