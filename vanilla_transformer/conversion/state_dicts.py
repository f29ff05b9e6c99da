"""What converters share whose originals are code that people copy and change: a state dict, and little is certain.

Such a state dict tells sizes and what is tied. It does not tell what the code around the weights does, which the user
has to say.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.positions_vanilla_transformer import SINUSOIDS

from .errors import ConversionError, refuse
from .reading import check_weights, read_checkpoint
from .weights import Rule

StateDict = Mapping[str, torch.Tensor]


def read_state_dict(original: StateDict | str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Reads weights by name, without the `_orig_mod.` that torch.compile puts into names.

    Args:
        original: The state dict; or a file that holds one, alone or as the only one among other entries (the
            optimizer's state, the number of the epoch).

    Returns:
        The weights.

    Raises:
        ConversionError: If the file cannot be read (see `read_checkpoint`), holds something else, or several.
    """
    if isinstance(original, Mapping):
        weights = check_weights(original, "What was given")
    else:
        content = read_checkpoint(original)
        entries = [name for name in content if _is_state_dict(content[name])] if isinstance(content, Mapping) else []
        if len(entries) > 1:
            raise ConversionError(
                f"{original} holds several state dicts, {', '.join(map(repr, entries))}: read the file with torch.load "
                "and give the one that is meant."
            )
        place = f"its entry {entries[0]!r}" if entries else ""
        weights = check_weights(content[entries[0]] if entries else content, original, place)
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in weights.items()}


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(item, torch.Tensor) for item in value.values())


def make_config(source: str, **fields: Any) -> VanillaTransformerConfig:
    """Makes a configuration from what was found and what the user said.

    Args:
        source: What is converted, for messages.
        **fields: Fields of the configuration.

    Returns:
        The configuration.

    Raises:
        ConversionError: If it is not legal, such as a number of heads that does not divide the width.
    """
    try:
        return VanillaTransformerConfig(**fields)
    except StrictDataclassError as error:
        raise ConversionError(f"What was found in {source}, and said of it, does not fit together: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The names of the embeddings and of the output layer's weight in a state dict.

    Args:
        source: The source's embeddings (V, D).
        target: The target's; the same name, or equal weights: there is one table for both.
        output: The output layer's weight (V, D). `None`, or equal weights: it is the target's table.
    """

    source: str
    target: str
    output: str | None

    @property
    def output_bias(self) -> str:
        """The name that the output layer's bias (V,) has, if there is one; empty without an output layer."""
        return "" if self.output is None else self.output.removesuffix("weight") + "bias"

    def describe(self, weights: StateDict) -> dict[str, Any]:
        """Returns the fields of the configuration that the tables tell."""
        source, target = weights[self.source], weights[self.target]
        shared = torch.equal(source, target)
        return {
            "vocab_size": source.shape[0],
            "decoder_vocab_size": None if shared else target.shape[0],
            "share_encoder_decoder_embeddings": shared,
            "tie_word_embeddings": self.output is None or torch.equal(target, weights[self.output]),
            "lm_head_bias": self.output_bias in weights,
        }

    def make_rules(self, weights: StateDict) -> list[Rule]:
        """Returns what becomes of the tables."""
        names = {self.source: "model.encoder.embed_tokens.weight"}
        # A name that stands for both tables is the encoder's here; to the renamer the two are tied.
        names = {self.target: "model.decoder.embed_tokens.weight"} | names
        if self.output is not None:
            names = {self.output: "lm_head.weight", self.output_bias: "lm_head.bias"} | names
        return [Rule(re.escape(theirs), ours) for theirs, ours in names.items() if theirs in weights]


def make_sinusoids_rule(name: str, kind: str, offset: int) -> Rule:
    """Makes the rule for a table of sinusoids, which the model computes: it must be what the model computes.

    Args:
        name: The table's name.
        kind: The configuration's `position_embedding_type`.
        offset: Its `position_offset`.

    Returns:
        The rule.
    """
    return Rule(re.escape(name), (), check=partial(check_sinusoids, kind=kind, offset=offset))


def check_sinusoids(table: torch.Tensor, *, kind: str, offset: int = 0) -> str | None:
    """Says in what a table differs from sinusoids.

    Args:
        table: (N, D), (N, 1, D) or (1, N, D): the rows of positions from 0, or from `offset`.
        kind: A name of `SINUSOIDS`.
        offset: The position of a sentence's first token.

    Returns:
        What is wrong, or `None`. Errors of float32 angles, which grow with the position, are not.
    """
    rows = as_rows(table)
    if rows is None or rows.shape[1] % 2 or rows.shape[1] < 4:
        return f"has the shape {tuple(table.shape)}, which is no table of at least four, and evenly many, columns"
    problems = [_compare_sinusoids(rows, SINUSOIDS[kind], start) for start in dict.fromkeys((0, offset))]
    return None if None in problems else f"is not the table of {kind!r} positions: {problems[-1]}"


def _compare_sinusoids(
    rows: torch.Tensor, sinusoids: Callable[[torch.Tensor, int], torch.Tensor], start: int
) -> str | None:
    positions = torch.arange(start, start + rows.shape[0], dtype=torch.float64)
    errors = (rows.double().cpu() - sinusoids(positions, rows.shape[1])).abs().amax(dim=1)
    allowed = 1e-6 * (1 + positions) + torch.finfo(rows.dtype).eps
    wrong = (~(errors <= allowed)).nonzero().flatten().tolist()
    return f"position {start + wrong[0]} differs by {errors[wrong[0]]:.1e}" if wrong else None


def as_rows(table: torch.Tensor) -> torch.Tensor | None:
    """Returns a table (N, D) that may have a dimension of one more, (N, 1, D) or (1, N, D); or `None`."""
    if table.ndim == 3 and 1 in table.shape[:2]:
        return table.flatten(0, 1)
    return table if table.ndim == 2 and table.is_floating_point() else None


def check_entries(source: str, weights: StateDict, names: Mapping[str, int]) -> None:
    """Refuses a state dict that lacks what the sizes are read from.

    Args:
        source: What is converted, for messages.
        weights: The state dict.
        names: Weights that must be there, with their numbers of dimensions.

    Raises:
        ConversionError: Names all that are missing or have another number of dimensions.
    """
    refuse(
        f"The sizes of {source} cannot be read from its weights",
        [
            f"{name} is missing" if name not in weights else f"{name} has the shape {tuple(weights[name].shape)}"
            for name, dimensions in names.items()
            if name not in weights or weights[name].ndim != dimensions
        ],
    )


def count_layers(weights: StateDict, prefix: str) -> int:
    """Returns the number of layers whose weights begin with `prefix` and a number from 0."""
    found = (re.match(re.escape(prefix) + r"(\d+)\.", name) for name in weights)
    return 1 + max((int(match[1]) for match in found if match), default=-1)
