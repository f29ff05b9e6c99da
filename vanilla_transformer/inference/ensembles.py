"""Ensembles: several models that write one translation together, by the mean of their probabilities at every step.

Shapes: B sentences, N beams, R = B * N rows, S source length, T target length, V target vocabulary.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import log_softmax
from transformers import GenerationConfig, GenerationMixin, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from vanilla_transformer.data.vocabularies import get_vocabularies
from vanilla_transformer.model.generation_vanilla_transformer import (
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerGenerationMixin,
)
from vanilla_transformer.model.pipeline_vanilla_transformer import find_directions
from vanilla_transformer.model.positions_vanilla_transformer import count_learned_positions
from vanilla_transformer.model.pretrained_vanilla_transformer import VanillaTransformerPreTrainedModel

from .loading import load_model_and_tokenizer

_SAME = ("vocab_size", "target_vocab_size", "bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id")


class Ensemble(VanillaTransformerGenerationMixin, VanillaTransformerPreTrainedModel, GenerationMixin):
    """Several encoder-decoders of one tokenizer as one, whose probabilities are the mean of theirs.

    It has `generate()` with all its settings, and a forward pass whose `logits` (B, T, V) are the logarithms of the
    mean probabilities. Beam and greedy search keep a cache for each member; where they cannot (sampling, recorded
    scores, members with parts of somebody else's), whole prefixes are read again at every step. Settings of
    generation are the first member's. An ensemble is not saved: keep its members.

    Args:
        members: [`VanillaTransformerForConditionalGeneration`] models, checkpoints of one training or trainings from
            several seeds; sizes may differ. They are used as they are, not copied.

    Raises:
        ValueError: If there is no member, one is of another class, or vocabularies, special tokens or languages differ.

    Example:
        ```python
        ensemble = Ensemble([AutoModelForSeq2SeqLM.from_pretrained(f"out/seed{seed}") for seed in (1, 2, 3)])
        ensemble.generate(**tokenizer("A man rides.", return_tensors="pt"), num_beams=4)
        ```
    """

    def __init__(self, members: Sequence[VanillaTransformerForConditionalGeneration]) -> None:
        _check(members)
        # The fewest learned positions limit the output, also where the first member's settings allow more.
        super().__init__(min(members, key=lambda one: count_learned_positions(one.config) or math.inf).config)
        self.members = nn.ModuleList(members)
        self.generation_config = copy.deepcopy(members[0].generation_config)
        positions = count_learned_positions(self.config)
        for name in ("max_new_tokens", "max_length"):
            saved = getattr(self.generation_config, name)
            if None not in (positions, saved):
                setattr(self.generation_config, name, min(saved, positions))
        self.eval()

    def get_encoder(self, *args: Any, **kwargs: Any) -> nn.Module:
        """The members' encoders as one."""
        return _Encoders(self.members)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Is refused."""
        raise NotImplementedError("An ensemble is not saved: save its members.")

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Returns the logarithms of the mean probabilities as `logits`, (B, T, V), from tokens (B, S) and (B, T)."""
        sources = [None] * len(self.members) if encoder_outputs is None else self._divide(encoder_outputs)
        logits = [
            member(
                input_ids=input_ids if source is None else None,
                attention_mask=attention_mask,
                decoder_input_ids=decoder_input_ids,
                decoder_attention_mask=decoder_attention_mask,
                encoder_outputs=source,
                use_cache=False,
            ).logits
            for member, source in zip(self.members, sources, strict=True)
        ]
        return Seq2SeqLMOutput(logits=cast(torch.FloatTensor, average(logits)))

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Shifts labels (B, T) to the right, as the members do."""
        return cast(Any, self.members[0]).prepare_decoder_input_ids_from_labels(labels=labels)

    def has_own_methods(self) -> bool:
        """Whether every member's generation may do without the methods that it would call."""
        return all(cast(Any, member).has_own_methods() for member in self.members)

    def _divide(self, encoder_outputs: Any) -> list[Any]:
        """What `_Encoders` has put side by side, for each member."""
        widths = [cast(Any, member).config.d_model for member in self.members]
        return [BaseModelOutput(last_hidden_state=states) for states in encoder_outputs[0].split(widths, dim=-1)]

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> bool:
        """Makes none: each member gets its own (see `make_decoder`), or there is none."""
        if model_kwargs.get("past_key_values") is not None:
            raise ValueError("An ensemble takes no past_key_values: its members have a cache each.")
        generation_config.use_cache = model_kwargs["use_cache"] = False
        return False

    def make_decoder(self, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> Any:
        """Returns a decoder made of the members', if all have one."""
        decoders = []
        for member, source in zip(self.members, self._divide(model_kwargs["encoder_outputs"]), strict=True):
            own = model_kwargs | {"encoder_outputs": source, "use_cache": True}
            settings = copy.copy(generation_config)
            settings.use_cache = True
            model = cast(VanillaTransformerForConditionalGeneration, member)
            prompt = len(source.last_hidden_state) * settings.num_beams
            model._prepare_cache_for_generation(settings, own, None, prompt, settings.max_length)  # type: ignore[arg-type]
            decoders.append(model.make_decoder(own, settings))
        return None if None in decoders else _EnsembleDecoder(decoders)


def load_ensemble(names: Sequence[str], **place: Any) -> tuple[Ensemble, PreTrainedTokenizerBase]:
    """Loads models by name as [`load_model_and_tokenizer`] does one; they must have the same tokenizer."""
    loaded = [load_model_and_tokenizer(name, **place) for name in names]
    tokenizer: Any = loaded[0][1]
    for name, (_, other) in zip(names[1:], loaded[1:], strict=True):
        if get_vocabularies(other) != get_vocabularies(tokenizer):
            raise ValueError(f"{name} has another vocabulary than {names[0]}: the models of an ensemble share one.")
    return Ensemble([cast(Any, model) for model, _ in loaded]), tokenizer


def _check(members: Sequence[Any]) -> None:
    if not members:
        raise ValueError("An ensemble needs at least one model.")
    for number, member in enumerate(members, start=1):
        if not isinstance(member, VanillaTransformerForConditionalGeneration):
            raise ValueError(
                f"Member {number} of the ensemble is a {type(member).__name__}; it must be a "
                "VanillaTransformerForConditionalGeneration."
            )
        if member.dtype != members[0].dtype:
            raise ValueError(
                f"The members of an ensemble need weights of one type: {members[0].dtype} in the first, {member.dtype} "
                f"in number {number}. Load all with the same --dtype (dtype=)."
            )
        for name in _SAME:
            first, other = getattr(members[0].config, name), getattr(member.config, name)
            if first != other:
                raise ValueError(
                    f"The members of an ensemble need one tokenizer: {name} is {first} in the first and {other} in "
                    f"number {number}."
                )
        own, found = (find_directions(each.config) for each in (members[0], member))
        if own and found and own != found:
            told = " and ".join("/".join(map(" to ".join, pairs)) for pairs in (own, found))
            raise ValueError(f"The members of an ensemble translate the same languages, not {told} (number {number}).")


class _Encoders(nn.Module):
    """Runs all encoders on (B, S); their states stand side by side, (B, S, sum of the widths)."""

    main_input_name = "input_ids"

    def __init__(self, members: nn.ModuleList) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(cast(Any, member).get_encoder() for member in members)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> BaseModelOutput:
        states = [encoder(input_ids=input_ids, attention_mask=attention_mask)[0] for encoder in self.encoders]
        return BaseModelOutput(last_hidden_state=cast(torch.FloatTensor, torch.cat(states, dim=-1)))


class _EnsembleDecoder:
    """The members' decoders, which see the same tokens and keep a cache each."""

    def __init__(self, decoders: Sequence[Any]) -> None:
        self.decoders = decoders

    def step(self, sequences: torch.Tensor) -> torch.Tensor:
        return average([decoder.step(sequences) for decoder in self.decoders])

    def follow(self, beams: torch.Tensor) -> None:
        for decoder in self.decoders:
            decoder.follow(beams)

    def keep_sentences(self, indices: torch.Tensor) -> None:
        for decoder in self.decoders:
            decoder.keep_sentences(indices)


def average(logits: Sequence[torch.Tensor]) -> torch.Tensor:
    """The logarithm of the mean of the probabilities, (..., V), from each member's logits (..., V)."""
    log_probs = torch.stack([log_softmax(each.float().to(logits[0].device), dim=-1) for each in logits])
    return log_probs.logsumexp(dim=0) - math.log(len(logits))
