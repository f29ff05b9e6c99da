r"""The strict key renamer: every weight is renamed, known to be needless, or reported.

A table of rules says what becomes of each name:

    RULES = (
        Rule(r"encoder\.layers\.(\d+)\.self_attn\.in_proj_weight", IN_PROJECTION),       # one tensor becomes three
        Rule(r"(encoder|decoder)\.norm\.(weight|bias)", r"model.\1.layer_norm.\2"),      # renamed
        Rule(r"(encoder|decoder)\.version", ()),                                         # known, and not needed
    )

Names are matched whole, and the first rule that matches counts. What no rule matches, what the model needs and nothing
gave, and what has another shape than the model's is reported together, so that one run tells everything.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .errors import ConversionError

MOST_NAMES = 12  # listed of each kind


@dataclass(frozen=True)
class Rule:
    r"""What becomes of the weights whose names match a pattern.

    Args:
        pattern: A regular expression that matches whole names.
        targets: The new name, in which `\1` stands for the pattern's first group; several names, among which the tensor
            is divided evenly along its first dimension; or none, for what the model does not need.
        change: What is done to the tensor first, such as transposing it.
        check: Says what is wrong with a tensor (before `change`), or returns `None`: for tables that are not needed
            because the model computes them, and must be what it computes.
    """

    pattern: str
    targets: str | Sequence[str]
    change: Callable[[torch.Tensor], torch.Tensor] | None = None
    check: Callable[[torch.Tensor], str | None] | None = None

    def apply(self, match: re.Match[str], tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the tensors that a tensor becomes, by their new names."""
        templates = (self.targets,) if isinstance(self.targets, str) else self.targets
        names = [match.expand(template) for template in templates]
        if not names:
            return {}
        changed = tensor if self.change is None else self.change(tensor)
        if len(names) == 1:
            return {names[0]: changed}
        if changed.ndim == 0 or changed.shape[0] % len(names):
            raise ValueError(f"has the shape {tuple(changed.shape)}, which cannot be divided by {len(names)}")
        return dict(zip(names, changed.chunk(len(names)), strict=True))


def rename_weights(
    weights: Mapping[str, torch.Tensor],
    rules: Iterable[Rule],
    shapes: Mapping[str, torch.Size],
    *,
    source: str,
    ties: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor]:
    """Gives weights the names of this package's model.

    Args:
        weights: The weights of the other system, by their names there.
        rules: What becomes of each name; the first that matches counts.
        shapes: The names that the model has, with their shapes.
        source: What is converted, for messages.
        ties: Names of weights that are others', as {name: the other's name}; of each such pair one is enough, and where
            both are there they must be equal.

    Returns:
        The weights by the model's names, all of `shapes`.

    Raises:
        ConversionError: Lists the weights that no rule knows, that two weights become, that are missing, wrongly
            shaped, not what they must be, or differ from those they are tied to.
    """
    rules = tuple(rules)
    renamed: dict[str, torch.Tensor] = {}
    unknown, wrong = [], []
    for name, tensor in weights.items():
        found = next(((rule, match) for rule in rules if (match := re.fullmatch(rule.pattern, name))), None)
        if found is None:
            unknown.append(f"{name} {tuple(tensor.shape)}")
            continue
        rule, match = found
        problem = None if rule.check is None else rule.check(tensor)
        if problem is not None:
            wrong.append(f"{name} {problem}")
        try:
            new = rule.apply(match, tensor)
        except ValueError as error:
            wrong.append(f"{name} {error}")
            continue
        wrong += [f"{name} becomes {twice}, which another weight became already" for twice in new if twice in renamed]
        renamed |= new
    wrong += _share(renamed, ties or {})
    unknown += [f"{name} {tuple(renamed[name].shape)} (after renaming)" for name in renamed if name not in shapes]
    missing = [f"{name} {tuple(shape)}" for name, shape in shapes.items() if name not in renamed]
    wrong += [
        f"{name} has the shape {tuple(renamed[name].shape)} instead of {tuple(shape)}"
        for name, shape in shapes.items()
        if name in renamed and renamed[name].shape != shape
    ]
    _report(source, {"weights that the model has no place for": unknown, "missing": missing, "wrong": wrong})
    return renamed


def _share(renamed: dict[str, torch.Tensor], ties: Mapping[str, str]) -> list[str]:
    """Gives tied weights to those that lack them; returns which differ."""
    problems = []
    for source in dict.fromkeys(ties.values()):
        group = [source, *(name for name, other in ties.items() if other == source)]
        present = [name for name in group if name in renamed]
        problems += [
            f"{name} differs from {present[0]}, which it must equal"
            for name in present[1:]
            if not torch.equal(renamed[name], renamed[present[0]])
        ]
        renamed |= {name: renamed[present[0]] for name in group if present and name not in renamed}
    return problems


def _report(source: str, kinds: Mapping[str, Sequence[str]]) -> None:
    lines = []
    for kind, names in kinds.items():
        if names:
            rest = [f"    ... and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
            lines += [f"  {kind}:", *(f"    {name}" for name in names[:MOST_NAMES]), *rest]
    if lines:
        raise ConversionError("\n".join([f"The weights of {source} do not fit the model:", *lines]))
