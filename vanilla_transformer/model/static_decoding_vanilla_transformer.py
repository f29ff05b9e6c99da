"""Runs the decoder of a search over static memory, compiled where the library compiles.

Shapes: B  sentences of the search, N  beams, R = B * N  rows, S  source length, D  d_model, V  target vocabulary.
"""

from typing import Any

import torch
from transformers.cache_utils import StaticLayer
from transformers.generation.configuration_utils import CompileConfig, GenerationConfig

from .cache_vanilla_transformer import SourceSharingCache
from .decoding_vanilla_transformer import SharedHistoryDecoder
from .fast_step_vanilla_transformer import can_step_fast
from .linear_vanilla_transformer import is_watched, project
from .positions_vanilla_transformer import LearnedPositions
from .static_step_vanilla_transformer import (
    Bucket,
    KeptSteps,
    KeysAndValues,
    Step,
    StepState,
    decode_step,
    mark_static,
    round_up,
)

# By how much fewer the sentences must have become to be worth another graph.
_WORTH_MOVING = 4


class StaticDecoder:
    """Runs the model over beams whose histories share memory that stays where it is (`cache_implementation="static"`).

    Sentences have places in this memory. One that leaves the search leaves its place empty, until so many are empty
    that the others move into a smaller bucket. Prompts are fed a token at a time, so that there is one step for all.

    The step is compiled where the library's criteria say so: on CUDA and its like, unless `disable_compile` is set. A
    graph serves all steps of a bucket, in this search and in later ones; `CompileConfig(dynamic=True)` asks for graphs
    that serve many buckets.

    Args:
        model: The model, with SDPA attention.
        model_kwargs: `encoder_outputs` (B, S, D) and `attention_mask` (B, S) or `None`; `decoder_attention_mask` (R,
            prompt length) or `None`; an empty static cache as `past_key_values`, which stays empty.
        generation_config: `num_beams`, and of static caches `max_cache_len`, `compile_config`, `disable_compile`.
    """

    @staticmethod
    def suits(model: Any, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> bool:
        """Says whether this is asked for, and the model can be run in this way with these inputs."""
        cache, attention_mask = (model_kwargs.get(name) for name in ("past_key_values", "attention_mask"))
        if generation_config.cache_implementation != "static" or not isinstance(cache, SourceSharingCache):
            return False
        if getattr(cache, "_is_user_defined", False) or (attention_mask is not None and attention_mask.ndim != 2):
            return False
        layers = [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
        return all(type(layer) is StaticLayer for layer in layers) and not is_watched(model) and can_step_fast(model)

    def __init__(self, model: Any, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> None:
        self.model = model
        self.compile_config: CompileConfig | None = None
        if model._valid_auto_compile_criteria(model_kwargs, generation_config):
            default = getattr(model, "_default_compile_config", CompileConfig)
            self.compile_config = generation_config.compile_config or default()
        prompt_mask = model_kwargs.get("decoder_attention_mask")
        self.prompt_mask = None if prompt_mask is None else prompt_mask[:: generation_config.num_beams].bool()
        self.length = 0  # number of tokens fed
        self.kept = KeptSteps.of(model)
        self.workspace = self.kept.lend_workspace(self)
        states: torch.Tensor = model_kwargs["encoder_outputs"][0]
        known_length = getattr(generation_config, "max_cache_len", None)  # which older versions of the library lack
        self.bucket = Bucket.around(states.shape[0], generation_config.num_beams, known_length or 1, states.shape[1])
        self.state = self._begin(states, model_kwargs.get("attention_mask"))
        self.places = torch.arange(states.shape[0], device=states.device)  # of the sentences, in order
        self.run: Step = decode_step
        self._move(self.bucket, None)

    def _begin(self, states: torch.Tensor, attention_mask: torch.Tensor | None) -> StepState:
        """Returns a state without a history, in which B and S are not rounded up yet."""
        shape, device = (states.shape[0], self.bucket.beams), states.device
        attentions = [layer.encoder_attn for layer in self.model.model.decoder.layers]
        sources = [
            KeysAndValues(
                *(attention.split_heads(project(map_, states)) for map_ in (attention.k_proj, attention.v_proj))
            )
            for attention in attentions
        ]
        is_padding = torch.ones(states.shape[0], 1, self.bucket.source_length, dtype=torch.bool, device=device)
        is_padding[:, 0, : states.shape[1]] = False if attention_mask is None else attention_mask.to(device) == 0
        return StepState(
            tokens=torch.zeros(shape, dtype=torch.long, device=device),
            origins=torch.arange(shape[1], device=device).repeat(shape[0], 1),
            is_token=torch.ones(shape[0], 1, dtype=torch.bool, device=device),
            start=torch.zeros(1, dtype=torch.long, device=device),
            visible=torch.zeros(*shape, 0, dtype=torch.bool, device=device),
            is_padding=is_padding,
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
        if self.compile_config is not None:
            mark_static(self.state)
            self.run = self.kept.find_step(bucket, self.compile_config)

    def step(self, sequences: torch.Tensor) -> torch.Tensor:
        """Feeds the tokens that are new.

        Args:
            sequences: All tokens so far, (B, N, length).

        Returns:
            Logits of the next token, (R, V).
        """
        while self.length < sequences.shape[2] - 1:
            self._feed(sequences[:, :, self.length])
        logits = self._feed(sequences[:, :, -1]).unflatten(0, self.state.tokens.shape)
        # A copy: the next step of a recorded graph writes to where this one did.
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
        if self.compile_config is not None:
            torch.compiler.cudagraph_mark_step_begin()
        logits = self.run(self.model, state)
        self.length += 1
        return logits

    def _bound_positions(self) -> int:
        """Returns a bound of all positions, the next one included, that changes at most once within a bucket.

        Raises:
            ValueError: If the next position is beyond those that were learned.
        """
        table = self.model.model.decoder.embed_positions
        limit = table.weight.shape[0] - table.offset
        if self.length < limit:
            return min(self.bucket.positions, limit)
        if not isinstance(table, LearnedPositions):
            return self.bucket.positions
        # Perhaps some of these are padding. If not, the table itself says so.
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


SharingDecoder = SharedHistoryDecoder | StaticDecoder


def can_share(model: Any, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> bool:
    """Says whether there is a decoder in which the beams of a sentence share what they have in common."""
    return SharedHistoryDecoder.suits(model, model_kwargs) or StaticDecoder.suits(
        model, model_kwargs, generation_config
    )


def make_sharing_decoder(
    model: Any, model_kwargs: dict[str, Any], generation_config: GenerationConfig
) -> SharingDecoder:
    """Returns the decoder that `can_share` found."""
    if SharedHistoryDecoder.suits(model, model_kwargs):
        return SharedHistoryDecoder(model, model_kwargs, generation_config.num_beams)
    return StaticDecoder(model, model_kwargs, generation_config)
