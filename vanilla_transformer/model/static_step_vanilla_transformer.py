"""One step of decoding over tensors of few shapes, which `torch.compile` can therefore make into few graphs.

Sizes that change from batch to batch and from step to step are rounded up, and what is left over is masked:

| size                         | becomes                                  |
|------------------------------|------------------------------------------|
| sentences                    | a power of two                           |
| positions there is room for  | 64, 128, 256 and so on, growing by need  |
| source length                | 64, 128, 256 and so on                   |

Such a combination, with the number of beams, is a bucket. Everything a step reads and changes stays where it is in
memory from step to step, and from one call of `generate` to the next, as recorded CUDA graphs demand.

Shapes: B  sentences of the bucket, N  beams, R = B * N  rows, E  entries of a history: N for each position, S  source
length of the bucket, H  heads, d  size of a head's keys or values, V  vocabulary.
"""

import copy
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.generation.configuration_utils import CompileConfig

from .fast_step_vanilla_transformer import step_fast

SMALLEST_LENGTH = 64

Step = Callable[[Any, "StepState"], torch.Tensor]


class Bucket(NamedTuple):
    """The sizes that a step is compiled for."""

    sentences: int
    beams: int
    positions: int
    source_length: int

    @classmethod
    def around(cls, sentences: int, beams: int, positions: int, source_length: int) -> "Bucket":
        """Returns the smallest one with as much room."""
        return cls(
            round_up(sentences), beams, round_up(positions, SMALLEST_LENGTH), round_up(source_length, SMALLEST_LENGTH)
        )


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
    visible: torch.Tensor  # (B, N, E): which entries of its sentence's history are a beam's own
    is_padding: torch.Tensor  # (B, 1, S): of the source
    histories: list[KeysAndValues]
    sources: list[KeysAndValues]
    bound: int  # of all positions


class StaticHistory:
    """One layer's keys and values of all beams of a sentence in one row, in a place of fixed size."""

    def __init__(self, held: KeysAndValues, slots: torch.Tensor) -> None:
        """Takes the place, and where in it the next entries go, (N,)."""
        self.held = held
        self.slots = slots

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
    # Nobody sees padding, but where there has been nothing else it must itself see something.
    seen_now = history.index_copy(2, slots, own & (is_token | ~history.any(dim=2, keepdim=True)))

    decoder = model.model.decoder
    token_indices = (state.visible.sum(dim=2) - 1).clamp(min=0).view(-1, 1)
    embeddings = decoder.embed_tokens(state.tokens.view(-1, 1))
    hidden_states = decoder.embed(embeddings, token_indices, state.bound)[:, 0]
    mask = torch.zeros(seen_now.shape, dtype=hidden_states.dtype, device=slots.device)
    mask = mask.masked_fill(~seen_now, torch.finfo(mask.dtype).min)[:, None]
    histories = [StaticHistory(held, slots) for held in state.histories]
    logits = step_fast(model, hidden_states, histories, state.sources, mask, ~state.is_padding[:, None])
    state.start.add_(num_beams)
    return logits


class Workspace:
    """Memory for the state of one search at a time: each tensor of any bucket begins where it did before."""

    def __init__(self) -> None:
        self._storages: dict[str, torch.Tensor] = {}

    def arrange(self, state: StepState, bucket: Bucket, rows: torch.Tensor | None = None) -> StepState:
        """Lays a state out for a bucket.

        Args:
            state: Tensors whose sizes are no larger than the bucket's.
            bucket: The sizes.
            rows: Which sentences to take, `None` for all. They may lie in this workspace only if they are named.

        Returns:
            The state in this workspace, with zeros behind what was there.
        """
        entries = bucket.positions * bucket.beams

        def place(name: str, tensor: torch.Tensor, length: int | None = None) -> torch.Tensor:
            contents = tensor if rows is None else tensor[rows]
            shape = [bucket.sentences, *contents.shape[1:]]
            if length is not None:
                shape[2] = length
            return self._place(name, contents, shape)

        def place_all(name: str, layers: list[KeysAndValues], length: int) -> list[KeysAndValues]:
            return [
                KeysAndValues(
                    place(f"{name}.{index}.keys", layer.keys, length),
                    place(f"{name}.{index}.values", layer.values, length),
                )
                for index, layer in enumerate(layers)
            ]

        return StepState(
            tokens=place("tokens", state.tokens),
            origins=place("origins", state.origins),
            is_token=place("is_token", state.is_token),
            start=self._place("start", state.start.clone(), [1]),
            visible=place("visible", state.visible, entries),
            is_padding=place("is_padding", state.is_padding, bucket.source_length),
            histories=place_all("histories", state.histories, entries),
            sources=place_all("sources", state.sources, bucket.source_length),
            bound=state.bound,
        )

    def _place(self, name: str, contents: torch.Tensor, shape: list[int]) -> torch.Tensor:
        """Returns zeros with `contents` in their first corner."""
        size = math.prod(shape)
        storage = self._storages.get(name)
        # Ordinary tensors even in inference mode: a later call, outside of it, changes them too.
        with torch.inference_mode(False), torch.no_grad():
            if (
                storage is None
                or storage.numel() < size
                or (storage.dtype, storage.device) != (contents.dtype, contents.device)
            ):
                storage = torch.empty(size, dtype=contents.dtype, device=contents.device)
                self._storages[name] = storage
            view = storage[:size].view(shape)
            # Not as a view: a compiled graph would have to know the whole storage.
            placed = view.new_empty(0).set_(view.untyped_storage(), 0, view.shape, view.stride())
        placed.zero_()
        placed[tuple(map(slice, contents.shape))] = contents
        return placed


def mark_static(state: StepState) -> None:
    """Tells CUDA graphs that these tensors stay where they are, so that none of them is copied before each step."""
    tensors = [state.tokens, state.origins, state.is_token, state.start, state.visible, state.is_padding]
    for layer in (*state.histories, *state.sources):
        tensors += layer
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)


class KeptSteps:
    """What a model keeps from one search for the next: memory, and compiled steps."""

    _of_models: "weakref.WeakKeyDictionary[nn.Module, KeptSteps]" = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self._idle: list[Workspace] = []
        self._compile_config: CompileConfig | None = None
        self._compiled: dict[Bucket | None, Step] = {}

    @classmethod
    def of(cls, model: nn.Module) -> "KeptSteps":
        """Returns those of a model, which go when it goes."""
        return cls._of_models.setdefault(model, cls())

    def lend_workspace(self, borrower: object) -> Workspace:
        """Returns memory that nobody else uses until the borrower is gone; threads may search at the same time."""
        try:
            workspace = self._idle.pop()
        except IndexError:
            workspace = Workspace()
        weakref.finalize(borrower, self._idle.append, workspace)
        return workspace

    def find_step(self, bucket: Bucket, compile_config: CompileConfig) -> Step:
        """Returns the compiled `decode_step` of a bucket, or one for all of them if the shapes are to be dynamic."""
        if compile_config != self._compile_config:
            self._compile_config = copy.copy(compile_config)
            self._compiled = {}
        key = None if compile_config.dynamic else bucket
        if key not in self._compiled:
            arguments = compile_config.to_dict()
            arguments["dynamic"] = bool(arguments["dynamic"])
            # Torch allows few graphs of the same code, and looks through all of them at each call.
            function = FunctionType(decode_step.__code__.replace(), decode_step.__globals__, decode_step.__name__)
            self._compiled[key] = torch.compile(function, **arguments)
        return self._compiled[key]
