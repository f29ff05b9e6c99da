"""Loading weights: safetensors only, and errors that say what is wrong with a file, or where it and the config differ.

A damaged file is found by the reader, and explained here from its first bytes. Parameters that do not fit are found in
what the library reports of a load, before it fills the gaps with new random values.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from transformers.utils.hub import cached_file, has_file

# The longest header that the format allows.
_MAX_HEADER_BYTES = 100_000_000
# The part of a decoder that one without a source lacks, with its norms.
_SOURCE_ATTENTION = re.compile(r"\.encoder_attn(?:_layer_norm)?\.")
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)|(?<=^layers\.)\d+(?=\.)")
# Which field of the configuration each dimension of a parameter shows.
_SIZES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(?:shared|encoder\.embed_tokens)\.weight$", ("vocab_size", "d_model")),
    (r"(?:decoder\.embed_tokens|lm_head)\.weight$", ("decoder_vocab_size", "d_model")),
    (r"embed_positions\.weight$", ("max_position_embeddings", "d_model")),
    (r"encoder\.layers\.\d+\.fc1\.(?:weight|bias)$", ("encoder_ffn_dim", "d_model")),
    (r"decoder\.layers\.\d+\.fc1\.(?:weight|bias)$", ("decoder_ffn_dim", "d_model")),
)


class WeightsFileError(OSError):
    """A file of weights is missing, damaged, or of a kind that is not read."""


class SafeLoadingMixin(PreTrainedModel):
    """Reads weights from safetensors only, and refuses those that are damaged or disagree with the configuration."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *model_args: Any,
        use_safetensors: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Loads a model as the library does, but no pickle unless it is asked for.

        A part of the model (encoder, decoder, the decoder's attention over the source, output layer, a head of your
        own) that is wholly absent from the file of another class is new, as in fine-tuning: the library initialises it
        and says so. A part that the file holds
        otherwise than the configuration has it, or a file of this class that lacks anything, is an error, unless
        `ignore_mismatched_sizes=True` is given.

        Args:
            pretrained_model_name_or_path: A folder or an id on the Hub.
            *model_args: As in the library.
            use_safetensors: `False` reads `pytorch_model.bin`. Even the restricted reading of pickles by torch is only
                for files from somebody you trust.
            **kwargs: As in the library.

        Returns:
            The model, in evaluation mode; with `output_loading_info=True`, that and a dict.

        Raises:
            WeightsFileError: An `OSError`, if a file is missing or damaged, or there are only pickles.
            RuntimeError: If the weights disagree with the configuration; every name and shape is listed.
        """
        safe_only = use_safetensors is None or use_safetensors
        try:
            return super().from_pretrained(
                pretrained_model_name_or_path, *model_args, use_safetensors=safe_only, **kwargs
            )
        except WeightsFileError:
            raise
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            # What the library says of these names no file (safetensors), or not what is wrong with it (an index).
            explanation = None
            if pretrained_model_name_or_path is not None and kwargs.get("gguf_file") is None:
                explanation = _explain_failure(pretrained_model_name_or_path, safe_only, kwargs, error)
            if explanation is None:
                raise
            raise WeightsFileError(explanation) from error

    @classmethod
    def _load_pretrained_model(
        cls, model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
    ) -> Any:
        """The library's; here it is known which files will be read, of the model as of an adapter."""
        files = [Path(file) for file in checkpoint_files or ()] if state_dict is None else []
        pickles = [file for file in files if file.suffix != ".safetensors"]
        if pickles and load_config.use_safetensors is not False:
            raise WeightsFileError(_refuse_pickle(str(load_config.pretrained_model_name_or_path), pickles[0].name))
        try:
            return super()._load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys)
        except (SafetensorError, FileNotFoundError) as error:
            if message := _describe_damage(files):
                raise WeightsFileError(message) from error
            raise

    @classmethod
    def _finalize_model_loading(cls, model: Any, load_config: Any, loading_info: Any) -> Any:
        """The library's; it initialises what was not loaded."""
        has_failed = loading_info.error_msgs or loading_info.conversion_errors  # of which the library tells
        if not load_config.ignore_mismatched_sizes and not has_failed:
            holds_more = bool(loading_info.unexpected_keys)  # before those are taken out which are no cause for concern
            model._adjust_missing_and_unexpected_keys(loading_info)
            quantizer = load_config.hf_quantizer
            # A quantised file has names of its own, which are the quantiser's affair.
            check_names = quantizer is None or not quantizer.pre_quantized
            if message := _describe_disagreement(model, load_config, loading_info, check_names, holds_more):
                raise RuntimeError(message)
        return super()._finalize_model_loading(model, load_config, loading_info)


def _find_damage(file: Path) -> str | None:
    if not file.is_file():
        return "is missing"
    try:
        with safe_open(file, framework="pt"):
            return None
    except SafetensorError as error:
        if file.read_bytes()[:8] == b"version ":
            return "is a pointer of git-lfs and not the weights: run `git lfs pull` in the folder"
        return f"is cut off or damaged ({error})"


def _describe_damage(files: Iterable[Path]) -> str | None:
    problems = [f"{file} {damage}." for file in files if (damage := _find_damage(file))]
    if not problems:
        return None
    return "\n".join(
        ["Weights cannot be loaded:", *problems, "Copy or download them again; from the Hub with force_download=True."]
    )


def _refuse_pickle(name: str, file: str) -> str:
    return (
        f"{name} has its weights in a pickle ({file}), which is not read, because a pickle can run any program. If you "
        "trust where it comes from, convert it once: load it with from_pretrained(..., use_safetensors=False), which "
        "lets torch read tensors and nothing else (weights_only=True), and call save_pretrained on the result."
    )


def _explain_failure(
    name: str | os.PathLike[str], safe_only: bool, kwargs: dict[str, Any], error: Exception
) -> str | None:
    """Why a folder's or a repository's weights could not be loaded, if it is one of the reasons known here."""
    variant = kwargs.get("variant")
    index_name, *names = (
        _add_variant(each, variant)
        for each in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
    )
    folder = _find_folder(name, kwargs)
    if folder is None:
        return None
    if (folder / names[0]).is_file():
        return _describe_damage([folder / names[0]])
    if (folder / index_name).is_file():
        return _explain_index(folder / index_name, error, is_local=os.path.isdir(name))
    if safe_only and isinstance(error, OSError):
        where = {key: kwargs.get(key) for key in ("revision", "proxies", "token", "cache_dir")}
        offline = kwargs.get("local_files_only", False)
        for pickle_name in names[1:]:
            path = os.path.join(kwargs.get("subfolder") or "", pickle_name)
            if has_file(name, path, local_files_only=offline, **where):
                return _refuse_pickle(str(name), pickle_name)
    return None


def _explain_index(path: Path, error: Exception, *, is_local: bool) -> str | None:
    try:
        index = json.loads(path.read_bytes())
        shards = sorted({path.parent / shard for shard in index["weight_map"].values()})
        if not isinstance(index["metadata"], dict):
            raise TypeError("metadata is not an object")
    except (ValueError, LookupError, TypeError, AttributeError):
        return (
            f"{path} is damaged: it is not JSON with metadata and a weight_map of names to files ({error}). Copy or "
            "download it again, with `git lfs pull` if it is a pointer of git-lfs; from the Hub with "
            "force_download=True."
        )
    # Of a repository on the Hub only some may have been fetched, and the library says why.
    return _describe_damage(shard for shard in shards if is_local or shard.is_file())


def _add_variant(file: str, variant: str | None) -> str:
    stem, _, suffix = file.rpartition(".")
    return file if variant is None else f"{stem}.{variant}.{suffix}"


def _find_folder(name: str | os.PathLike[str], kwargs: dict[str, Any]) -> Path | None:
    """The local folder, or where the files of a repository on the Hub were stored; nothing is fetched."""
    if os.path.isdir(name):
        return Path(name, kwargs.get("subfolder") or "")
    quiet = {f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")}
    where = {key: kwargs.get(key) for key in ("cache_dir", "revision", "token")}
    try:
        config = cached_file(
            str(name), CONFIG_NAME, subfolder=kwargs.get("subfolder") or "", local_files_only=True, **where, **quiet
        )
    except (OSError, ValueError):
        return None
    return None if config is None else Path(config).parent


def _describe_disagreement(model: Any, load_config: Any, info: Any, check_names: bool, holds_more: bool) -> str | None:
    """Lists every difference between weights and configuration, if there is one that fine-tuning does not explain."""
    tied: dict[str, str] = model.all_tied_weights_keys
    # One name of a tied weight is enough, whichever it is.
    through_tie = {source for target, source in tied.items() if target not in info.missing_keys}
    missing: set[str] = info.missing_keys - tied.keys() - through_tie
    unexpected: set[str] = set(info.unexpected_keys)
    expected = set(model.state_dict()) - (tied.keys() & info.missing_keys)
    wrong = [(name, f"{list(found)}, {list(wanted)}") for name, found, wanted in sorted(info.mismatched_keys)]
    disagrees = check_names and _names_disagree(model, expected, missing, unexpected, holds_more)
    if not wrong and not disagrees:
        return None
    weight_map = (load_config.sharded_metadata or {}).get("weight_map", {})
    promised = [name for name in missing if {name, name.removeprefix(f"{model.base_model_prefix}.")} & set(weight_map)]
    sections = (
        ("Of other shapes (in the file, by the configuration):", wrong),
        ("In the model, and not in the file:", [(name, "") for name in missing]),
        ("In the file, and not in the model:", [(name, "") for name in unexpected]),
        ("Promised by the index, which therefore belongs to other files:", [(name, "") for name in promised]),
    )
    lines = [f"The weights of {load_config.pretrained_model_name_or_path} disagree with {type(model.config).__name__}."]
    for title, rows in sections:
        if rows:
            lines += [title, *(f"    {line}" for line in _merge_layers(rows))]
    if fits := suggest_fields(model.config, info.mismatched_keys, missing, unexpected):
        lines.append(f"The weights fit {', '.join(fits)}.")
    lines.append(
        f"Load them into {type(model).__name__} with the configuration that they were saved with. "
        "With ignore_mismatched_sizes=True what does not fit is left out and the gaps are filled with random values."
    )
    return "\n".join(lines)


def _names_disagree(model: Any, expected: set[str], missing: set[str], unexpected: set[str], holds_more: bool) -> bool:
    """Whether the file lacks some of a part that it has, or has more of one than the model; or has none of them."""

    def parts(names: Iterable[str]) -> set[str]:
        prefix = f"{model.base_model_prefix}."
        return {
            "encoder_attn" if _SOURCE_ATTENTION.search(name) else name.removeprefix(prefix).partition(".")[0]
            for name in names
        }

    loaded = expected - missing
    if not loaded and unexpected:
        return True
    layers = {name for name in expected if _LAYER.search(name)}
    if layers and layers <= missing and (loaded or holds_more):  # of an encoder, say, for a decoder
        return True
    if missing and type(model).__name__ in (model.config.architectures or ()):  # saved from this very class
        return True
    return bool(parts(missing | unexpected) & parts(expected) & parts(loaded | unexpected))


def _merge_layers(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Writes (name, detail) as lines, of which those that differ in the number of the layer only become one."""
    merged: dict[tuple[str, str], list[int]] = {}
    for name, detail in sorted(rows):
        numbers = merged.setdefault((_LAYER.sub("*", name), detail), [])
        numbers += [int(number) for number in _LAYER.findall(name)]
    for (pattern, detail), numbers in merged.items():
        name = pattern.replace("*", _write_numbers(sorted(numbers)))
        yield f"{name}: {detail}" if detail else name


def _write_numbers(numbers: Sequence[int]) -> str:
    if len(numbers) > 1 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{{{numbers[0]}-{numbers[-1]}}}"
    text = ",".join(map(str, numbers))
    return f"{{{text}}}" if len(numbers) > 1 else text


def suggest_fields(
    config: PreTrainedConfig, mismatched: Iterable[tuple[str, Any, Any]], missing: set[str], unexpected: set[str]
) -> list[str]:
    """Finds the fields of a configuration that would fit weights, as far as shapes and numbers of layers show them.

    Args:
        config: The configuration that does not fit.
        mismatched: Name, shape in the file and shape in the model of each weight whose shapes differ.
        missing: The names of the weights that the file lacks.
        unexpected: Those that the model lacks.

    Returns:
        The fields in words, each with the value that would fit and the one that it has.
    """
    found: dict[str, int] = {}
    for name, shape, _ in mismatched:
        for pattern, fields in _SIZES:
            if re.search(pattern, name):
                found |= zip(fields, shape, strict=False)  # a bias has the first dimension only
    if "decoder_vocab_size" in found and getattr(config, "decoder_vocab_size", None) is None:
        found["vocab_size"] = found.pop("decoder_vocab_size")
    for side in ("encoder", "decoder"):
        layer = re.compile(rf"(?:^|\.){side}\.layers\.(\d+)\.")
        more, less = ([int(hit[1]) for name in names if (hit := layer.search(name))] for names in (unexpected, missing))
        field = f"{side}_layers"
        if more and max(more) >= getattr(config, field, 0):
            found[field] = max(more) + 1
        elif less and min(less) > 0:
            found[field] = min(less)
    differing = {field: (value, getattr(config, field, None)) for field, value in found.items()}
    return [f"{field}={value} (not {own})" for field, (value, own) in sorted(differing.items()) if value != own]
