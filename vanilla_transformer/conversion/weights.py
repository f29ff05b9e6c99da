r"""Weights of other systems: read without running code, and renamed strictly by a table of rules.

    RULES = (
        Rule(r"encoder\.layers\.(\d+)\.self_attn\.in_proj_weight", IN_PROJECTION),  # one tensor becomes three
        *module_rules({r"(encoder|decoder)\.norm": r"model.\1.layer_norm"}),         # renamed, weight and bias
        Rule(r"(encoder|decoder)\.version", ()),                                    # known, and not needed
    )

What does not fit is reported together. Shapes: D  d_model, N  number of positions, V  vocabulary.
"""

import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file

from vanilla_transformer.files import LFS_POINTER, is_lfs_pointer
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.positions_vanilla_transformer import SINUSOIDS

from .errors import ConversionError, find_non_finite, refuse

StateDict = Mapping[str, torch.Tensor]

CODE_IN_PICKLE = re.compile(r"GLOBAL ([\w.]+)")  # what torch says of a pickle that names more than tensors
MOST_NAMES = 12  # listed of each kind


def read_checkpoint(path: str | os.PathLike[str], *, allowed: Sequence[Any] = ()) -> Any:
    """Reads what `torch.save` wrote, or a safetensors file, to the CPU; refuses what would have to be run.

    `allowed` may be named in the pickle besides tensors and containers, as in `torch.serialization.safe_globals`.
    """
    path = Path(path)
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "no file"
        raise ConversionError(f"{path} is {kind}: name the file of the checkpoint.")
    if is_lfs_pointer(path):
        raise ConversionError(f"{path} {LFS_POINTER}.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with torch.serialization.safe_globals(list(allowed)), warnings.catch_warnings():
            # The error, if there is one, says that torch.save did not write the pickle.
            warnings.filterwarnings("ignore", message="Detected pickle protocol")
            return torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise ConversionError(f"{path} is not a whole safetensors file: {error}") from error
    except pickle.UnpicklingError as error:
        raise ConversionError(_explain_refusal(path, str(error))) from error
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # the bytes of a damaged pickle can raise anything
        raise ConversionError(f"{path} ({path.stat().st_size:,} bytes) is truncated or damaged: {error}") from error


def _explain_refusal(path: Path, message: str) -> str:
    found = CODE_IN_PICKLE.search(message)
    if found is None:
        return f"{path} is no checkpoint that torch.save wrote, or it is damaged: {message.splitlines()[0]}"
    return (
        f"{path} holds more than weights: it needs {found[1]}, and reading that would run code of the file. Save its "
        "weights alone (with torch.save, or as safetensors) in the system that made it."
    )


def scan_pickles(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields name and argument of each legible operation in a file of `torch.save`, and does none of them."""
    with path.open("rb") as file:
        try:
            if zipfile.is_zipfile(file):
                archive = zipfile.ZipFile(file)
                names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                pickles: list[IO[bytes]] = [archive.open(name) for name in names]
            else:
                file.seek(0)
                pickles = [file] * 4  # torch's old format: its number, its version, the machine, the content
            for stream in pickles:
                yield from ((opcode.name, argument) for opcode, argument, _ in pickletools.genops(stream))
        except Exception:  # the bytes of a damaged pickle can raise anything; the next reader tells what is wrong
            return


def check_weights(content: Any, path: str | os.PathLike[str], place: str = "") -> dict[str, torch.Tensor]:
    """Returns what was read at `place` ("its entry 'model'") of a file if it is a dictionary of tensors."""
    where = f"{path}, {place}," if place else f"{path}"
    if not isinstance(content, Mapping) or not content:
        raise ConversionError(f"{where} is no state dict (a dictionary of weights) but {type(content).__name__}.")
    strange = [name for name, value in content.items() if not isinstance(value, torch.Tensor)]
    if strange:
        raise ConversionError(f"{where} holds more than weights: {', '.join(map(repr, strange[:8]))}.")
    return dict(content)


def read_state_dict(original: StateDict | str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Returns a state dict, or the only one in a file, without the `_orig_mod.` that torch.compile puts into names."""
    if isinstance(original, Mapping):
        weights = check_weights(original, "What was given")
    else:
        content = read_checkpoint(original)
        entries = [name for name in content if _is_state_dict(content[name])] if isinstance(content, Mapping) else []
        if len(entries) > 1:
            advice = "read the file with torch.load and give the one that is meant"
            raise ConversionError(f"{original} holds several state dicts, {', '.join(map(repr, entries))}: {advice}.")
        place = f"its entry {entries[0]!r}" if entries else ""
        weights = check_weights(content[entries[0]] if entries else content, original, place)
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in weights.items()}


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(item, torch.Tensor) for item in value.values())


@dataclass(frozen=True)
class Rule:
    r"""What becomes of the weights whose whole names match the regular expression `pattern`.

    `targets` is the new name, in which `\1` stands for the pattern's first group; several names, among which the tensor
    is divided evenly along its first dimension; or none, for what the model does not need. `change` is done to the
    tensor first. `check` says what is wrong with a tensor before that, or returns `None`: for tables that are not
    needed because the model computes them, and must be what it computes.
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
        if changed.ndim == 0 or changed.shape[0] % len(names):
            raise ValueError(f"has the shape {tuple(changed.shape)}, which cannot be divided by {len(names)}")
        return dict(zip(names, changed.chunk(len(names)) if len(names) > 1 else [changed], strict=True))


def module_rules(names: Mapping[str, str], *, theirs: str = "", ours: str = "") -> list[Rule]:
    """Makes a rule for each module, whose weight and bias keep these names; `theirs` and `ours` are put in front."""
    return [
        Rule(rf"{theirs}{their_name}\.(?P<kind>weight|bias)", rf"{ours}{our_name}.\g<kind>")
        for their_name, our_name in names.items()
    ]


def rename_weights(
    weights: StateDict,
    rules: Iterable[Rule],
    shapes: Mapping[str, torch.Size],
    *,
    source: str,
    ties: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor]:
    """Returns the weights by the names of another model, which are those of `shapes`; the first matching rule counts.

    `ties` maps names of weights to the names of those that they are: one of each pair is enough, and both must be
    equal. What no rule knows, what two weights become, what is missing, wrongly shaped, not finite or not what it must
    be is listed in a `ConversionError`.
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
        if rule.check is not None and (problem := rule.check(tensor)) is not None:
            wrong.append(f"{name} {problem}")
        try:
            new = rule.apply(match, tensor)
        except ValueError as error:
            wrong.append(f"{name} {error}")
            continue
        wrong += find_non_finite({name: tensor} if new else {})
        wrong += [f"{name} becomes {twice}, which another weight became already" for twice in new if twice in renamed]
        renamed |= new
    wrong += _share(renamed, ties or {})
    unknown += [f"{name} {tuple(renamed[name].shape)} (after renaming)" for name in renamed if name not in shapes]
    missing = [f"{name} {tuple(shape)}" for name, shape in shapes.items() if name not in renamed]
    for name, shape in shapes.items():
        if name in renamed and renamed[name].shape != shape:
            wrong.append(f"{name} has the shape {tuple(renamed[name].shape)} instead of {tuple(shape)}")
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


def make_config(source: str, reasons: Sequence[str] = (), /, **fields: Any) -> VanillaTransformerConfig:
    """Makes the configuration; refuses values that are not legal, together with other reasons to refuse the source."""
    subject = f"This package has no counterpart of {source}"
    try:
        config = VanillaTransformerConfig(**fields)
    except StrictDataclassError as error:
        refuse(subject, [*reasons, " ".join(str(error).split())])
        raise
    refuse(subject, reasons)
    return config


def check_entries(source: str, weights: StateDict, dimensions: Mapping[str, int]) -> None:
    """Refuses a state dict that lacks weights from which sizes are read, or has them with other `dimensions`."""
    reasons = [f"{name} is missing" for name in dimensions if name not in weights]
    shapes = {name: tuple(weights[name].shape) for name in dimensions if name in weights}
    reasons += [f"{name} has the shape {shape}" for name, shape in shapes.items() if len(shape) != dimensions[name]]
    refuse(f"The sizes of {source} cannot be read from its weights", reasons)


def count_layers(weights: StateDict, prefix: str) -> int:
    """Returns the number of layers whose weights begin with `prefix` and a number from 0."""
    found = (re.match(re.escape(prefix) + r"(\d+)\.", name) for name in weights)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def describe_tables(weights: StateDict, source: str, target: str, output: str) -> dict[str, Any]:
    """Returns what the tables (V, D) of embeddings and output layer tell the configuration; equal tables are one."""
    shared = torch.equal(weights[source], weights[target])
    return {
        "vocab_size": weights[source].shape[0],
        "decoder_vocab_size": None if shared else weights[target].shape[0],
        "share_encoder_decoder_embeddings": shared,
        "tie_word_embeddings": output not in weights or torch.equal(weights[target], weights[output]),
        "lm_head_bias": output.removesuffix("weight") + "bias" in weights,
    }


def check_sinusoids(table: torch.Tensor, *, kind: str, starts: Iterable[int] = (0,), skip: int = 0) -> str | None:
    """Says in what a table (N, D), (N, 1, D) or (1, N, D) differs from sinusoids of a kind; `None` if in nothing.

    The first row may be of any of the positions `starts`; no token gets the first `skip` rows.
    """
    rows = as_rows(table)
    if rows is None or rows.shape[1] % 2 or rows.shape[1] < 4:
        return f"has the shape {tuple(table.shape)}, which is no table of at least four, and evenly many, columns"
    problem = None
    for start in starts:
        positions = torch.arange(start, start + rows.shape[0], dtype=torch.float64)
        errors = (rows.double().cpu() - SINUSOIDS[kind](positions, rows.shape[1])).abs().amax(dim=1)[skip:]
        # The angles may be of float32, which errs by more at later positions.
        allowed = 1e-6 * (1 + positions[skip:]) + torch.finfo(rows.dtype).eps
        wrong = (~(errors <= allowed)).nonzero().flatten().tolist()
        if not wrong:
            return None
        problem = f"position {start + skip + wrong[0]} differs by {errors[wrong[0]]:.1e}"
    return f"is not the table of {kind!r} positions: {problem}"


def as_rows(table: torch.Tensor) -> torch.Tensor | None:
    """Returns a table (N, D) that may have a dimension of one more, (N, 1, D) or (1, N, D); or `None`."""
    if table.ndim == 3 and 1 in table.shape[:2]:
        return table.flatten(0, 1)
    return table if table.ndim == 2 and table.is_floating_point() else None
