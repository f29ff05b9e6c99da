"""What every model of this package has: how its weights are loaded, initialised and resized.

Weights are read from safetensors only. A damaged file is named, and weights that disagree with the configuration are
refused, where the library would fill the gaps with random values. `SingleStackModel` is for models of one stack.

Shapes: V vocabulary, D d_model.
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import initialization as init
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME
from transformers.utils.hub import cached_file

from .configuration_vanilla_transformer import Side, VanillaTransformerConfig, as_single_stack
from .positions_vanilla_transformer import LearnedPositions, SinusoidalPositions

# What a decoder-only model lacks of a layer.
_SOURCE_ATTENTION = re.compile(r"\.encoder_attn(?:_layer_norm)?\.")
_IN_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")


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
        own) that the file of another class lacks as a whole is new, as in fine-tuning: the library initialises it and
        says so. It is an error if a part has other weights in the file than in the model, or if a file of this class
        lacks anything, unless `ignore_mismatched_sizes=True` is given.

        With `use_safetensors=False` it reads `pytorch_model.bin`. Even the restricted reading of pickles by torch is
        only for files from somebody you trust. All other arguments, and the result, are as in the library.

        Raises:
            WeightsFileError: An `OSError`, if a file is missing or damaged, or there are only pickles.
            OSError: Also if a folder's settings for `generate` are damaged: the library would take others, silently.
            RuntimeError: If the weights disagree with the configuration; every name and shape is listed.
        """
        safe_only = use_safetensors is None or use_safetensors
        name = pretrained_model_name_or_path
        if name is not None:
            _check_generation_config(Path(name, kwargs.get("subfolder") or "", GENERATION_CONFIG_NAME))
        try:
            return super().from_pretrained(name, *model_args, use_safetensors=safe_only, **kwargs)
        except WeightsFileError:
            raise
        except (OSError, ValueError, SafetensorError) as error:
            # What these say names no file, or does not say what is wrong with it.
            if name is not None and (message := _describe_damage(_find_weights(name, kwargs))):
                raise WeightsFileError(message) from error
            if safe_only and isinstance(error, OSError) and "safetensors" in str(error):
                raise WeightsFileError(f"{error} {_PICKLES}") from error
            raise

    @classmethod
    def _load_pretrained_model(
        cls, model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
    ) -> Any:
        """The library's; only here it is known which files of an adapter will be read."""
        files = [Path(file) for file in checkpoint_files or ()] if state_dict is None else []
        for file in files:
            if load_config.use_safetensors is not False and file.suffix != ".safetensors":
                raise WeightsFileError(f"{file} is not a safetensors file. {_PICKLES}")
        try:
            return super()._load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys)
        except SafetensorError as error:
            raise WeightsFileError(_describe_damage(files)) from error

    @classmethod
    def _finalize_model_loading(cls, model: Any, load_config: Any, loading_info: Any) -> Any:
        """The library's, which initialises what was not loaded, but not before the weights are known to fit."""
        has_failed = loading_info.error_msgs or loading_info.conversion_errors  # the library tells of these
        if not load_config.ignore_mismatched_sizes and not has_failed:
            holds_more = bool(loading_info.unexpected_keys)  # before those go that are no cause for concern
            model._adjust_missing_and_unexpected_keys(loading_info)
            quantizer = load_config.hf_quantizer
            # A quantised file has names of its own, which the quantiser checks.
            has_own_names = quantizer is not None and quantizer.pre_quantized
            missing = _find_missing(model, loading_info.missing_keys)
            disagrees = not has_own_names and _names_disagree(model, missing, loading_info, holds_more)
            if loading_info.mismatched_keys or disagrees:
                loading_info.missing_keys = missing
                report = loading_info.create_loading_report().partition("\n\nNotes:")[0]
                raise WeightsDisagreeError(
                    f"The weights of {load_config.pretrained_model_name_or_path} disagree with "
                    f"{type(model.config).__name__}:\n{report}\nLoad them into {type(model).__name__} with the "
                    "configuration that they were saved with. With ignore_mismatched_sizes=True what does not fit is "
                    "left out and the gaps are filled with random values."
                )
        return super()._finalize_model_loading(model, load_config, loading_info)


class WeightsDisagreeError(RuntimeError, ValueError):
    """Weights are not those of the configuration: the library's kind of error, and one that commands explain."""


_PICKLES = (
    "Weights in a pickle (pytorch_model.bin) are not read, because a pickle can run any program. If you trust where it "
    "comes from, convert it once: load it with from_pretrained(..., use_safetensors=False), which lets torch read "
    "tensors and nothing else (weights_only=True), and call save_pretrained on the result."
)


def _check_generation_config(file: Path) -> None:
    if not file.is_file():
        return
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise OSError(f"{file} is cut off or damaged ({error}). Copy or download it again, or delete it.") from error
    if not isinstance(content, dict):
        raise OSError(f"{file} must be a JSON object, and is a {type(content).__name__}. Copy or download it again.")


def _find_weights(name: str | os.PathLike[str], kwargs: dict[str, Any]) -> list[Path]:
    """The files of weights of a folder, or of a repository as the cache has it."""
    subfolder = kwargs.get("subfolder") or ""
    if os.path.isdir(name):
        folder = Path(name, subfolder)
    else:
        where = {key: kwargs.get(key) for key in ("cache_dir", "revision", "token")}
        try:
            config = cached_file(str(name), CONFIG_NAME, subfolder=subfolder, local_files_only=True, **where)
        except (OSError, ValueError):
            return []
        folder = Path(cast(str, config)).parent
    return [*sorted(folder.glob("*.safetensors")), *folder.glob(SAFE_WEIGHTS_INDEX_NAME)]


def _describe_damage(files: Iterable[Path]) -> str | None:
    problems = [f"{file} {damage}." for file in files if (damage := _find_damage(file))]
    if not problems:
        return None
    advice = "Copy or download them again; from the Hub with force_download=True."
    return "\n".join(["Weights cannot be loaded:", *problems, advice])


def _find_damage(file: Path) -> str | None:
    try:
        if file.suffix == ".json":
            json.loads(file.read_bytes())
        else:
            with safe_open(file, framework="pt"):
                pass
    except (SafetensorError, ValueError) as error:
        if file.read_bytes()[:8] == b"version ":
            return "is a pointer of git-lfs and not the weights: run `git lfs pull` in the folder"
        return f"is cut off or damaged ({error})"
    return None


def _find_missing(model: Any, missing: set[str]) -> set[str]:
    """Those of the missing weights that no tie brings: one name of a tied weight is enough, whichever it is."""
    tied: dict[str, str] = model.all_tied_weights_keys
    through_tie = {source for target, source in tied.items() if target not in missing}
    return missing - tied.keys() - through_tie


def _names_disagree(model: Any, missing: set[str], info: Any, holds_more: bool) -> bool:
    """Whether the file lacks some of a part that it has, or has more of one than the model; or has none of them."""
    unexpected: set[str] = set(info.unexpected_keys)
    expected = set(model.state_dict()) - (model.all_tied_weights_keys.keys() & info.missing_keys)
    loaded = expected - missing
    if not loaded and unexpected:
        return True
    in_layers = {name for name in expected if _IN_LAYER.search(name)}
    if in_layers and in_layers <= missing and (loaded or holds_more):  # of an encoder, say, for a decoder
        return True
    if missing and type(model).__name__ in (model.config.architectures or ()):  # saved from this very class
        return True
    prefix = f"{model.base_model_prefix}."

    def parts(names: Iterable[str]) -> set[str]:
        return {
            "encoder_attn" if _SOURCE_ATTENTION.search(name) else name.removeprefix(prefix).partition(".")[0]
            for name in names
        }

    return bool(parts(missing | unexpected) & parts(expected) & parts(loaded | unexpected))


class ResizableVocabulariesMixin(PreTrainedModel):
    """Keeps both embedding tables, the output layer with its bias, and the configuration in step."""

    config: VanillaTransformerConfig

    def _has_one_vocabulary(self) -> bool:
        return self.config.decoder_vocab_size is None or self.config.share_encoder_decoder_embeddings

    def _resize_token_embeddings(
        self, new_num_tokens: int | None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resizes the source table, and with it the target's where there is one vocabulary."""
        embeddings = self._get_resized_embeddings(
            cast(nn.Embedding, self.get_input_embeddings()), new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        self.set_input_embeddings(embeddings)
        if self._has_one_vocabulary():
            self._resize_target_side(embeddings.num_embeddings, None, mean_resizing)
        return embeddings

    def resize_decoder_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Resizes the target vocabulary of a model with two, as `resize_token_embeddings` does the source's."""
        if self._has_one_vocabulary():
            raise ValueError(
                "This model has one vocabulary (decoder_vocab_size=None or share_encoder_decoder_embeddings=True): "
                "use resize_token_embeddings, which resizes both sides."
            )
        embeddings = self._resize_target_side(new_num_tokens, pad_to_multiple_of, mean_resizing)
        self.tie_weights()
        return embeddings

    def _resize_target_side(
        self, new_num_tokens: int, pad_to_multiple_of: int | None, mean_resizing: bool
    ) -> nn.Embedding:
        decoder = cast(PreTrainedModel, self.get_decoder())
        output_layer = cast(nn.Linear | None, self.get_output_embeddings())
        if output_layer is not None and self.config.tie_word_embeddings:
            # A tied weight would change its size together with the table's, and leave the bias behind.
            output_layer.weight = nn.Parameter(output_layer.weight.detach(), output_layer.weight.requires_grad)
        embeddings = self._get_resized_embeddings(
            cast(nn.Embedding, decoder.get_input_embeddings()), new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        decoder.set_input_embeddings(embeddings)
        if self.config.decoder_vocab_size is not None:
            self.config.decoder_vocab_size = embeddings.num_embeddings
        if output_layer is not None:
            resized = self._get_resized_lm_head(output_layer, embeddings.num_embeddings, mean_resizing=mean_resizing)
            self.set_output_embeddings(resized.requires_grad_(output_layer.weight.requires_grad))
        return embeddings

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Gives position tables so many rows (`max_position_embeddings`); new rows of a learned table are random."""
        least = self.config.position_offset + 1
        if new_num_position_embeddings < least:
            raise ValueError(
                f"new_num_position_embeddings must be at least {least} (position_offset={self.config.position_offset}),"
                f" not {new_num_position_embeddings}."
            )
        for module in self.modules():
            if isinstance(module, LearnedPositions | SinusoidalPositions):
                module.resize(new_num_position_embeddings)
        self.config.max_position_embeddings = new_num_position_embeddings

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Saves as the library does, with `tie_word_embeddings` true if weights are tied: PEFT clears it on merging."""
        output_layer = self.get_output_embeddings()
        if output_layer is not None:
            table = cast(PreTrainedModel, self.get_decoder()).get_input_embeddings()
            if output_layer.weight is table.weight:
                self.config.tie_word_embeddings = True
        super().save_pretrained(save_directory, *args, **kwargs)


class VanillaTransformerPreTrainedModel(SafeLoadingMixin, ResizableVocabulariesMixin, PreTrainedModel):
    """What the library needs to know of every model."""

    config: VanillaTransformerConfig
    config_class = VanillaTransformerConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        # The library guesses this from the text of this file; older versions look for their own name of equation 1.
        return True

    def post_init(self) -> None:
        """The library's, with the ties of this configuration only in the attribute that tools read."""
        self._tied_weights_keys = self.get_expanded_tied_weights_keys()
        super().post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Sets every initial value.

        | module                        | initial value                                                       |
        |-------------------------------|---------------------------------------------------------------------|
        | projections, feed-forward     | Xavier uniform, times `initializer_gain`; biases zero               |
        | embeddings, learned positions | normal, standard deviation d_model^-0.5; the padding row zero       |
        | untied output layer           | as the embeddings it stands for                                     |
        | sinusoids                     | their formula                                                       |
        | layer norms                   | gain one, bias zero                                                 |
        """
        std = self.config.d_model**-0.5
        if isinstance(module, SinusoidalPositions):
            init.copy_(module.weight, module.make_table(len(module.weight)))
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=std)
            # The flag of loaded weights is on the parameter, and a row of it has none.
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.Linear):
            if module is self.get_output_embeddings():
                init.normal_(module.weight, mean=0.0, std=std)
            else:
                init.xavier_uniform_(module.weight, gain=self.config.initializer_gain)
            if module.bias is not None:
                init.zeros_(module.bias)
        else:
            super()._init_weights(module)


class SingleStackModel(VanillaTransformerPreTrainedModel):
    """One stack of the Transformer, whose parameters, `shared` too, have the same names as in the encoder-decoder."""

    side: Side

    def __init__(self, config: VanillaTransformerConfig) -> None:
        config.require_stacks(type(self).__name__, self.side)
        if getattr(config, "add_cross_attention", False):
            raise ValueError(f"{type(self).__name__} attends to no source: add_cross_attention must not be True.")
        super().__init__(as_single_stack(config, self.side))

    @property
    def inner(self) -> PreTrainedModel:
        """The stack, or the model without a head that holds it."""
        return cast(PreTrainedModel, getattr(self, self.base_model_prefix, None) or getattr(self, self.side))

    def make_shared_table(self) -> None:
        """Makes `shared`, if the encoder-decoder has it."""
        config = self.config
        if config.share_encoder_decoder_embeddings:
            self.shared = nn.Embedding(config.vocab_size, config.d_model, padding_idx=config.pad_token_id)

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Returns {target: source} of tied weights. Sharing does not depend on `tie_word_embeddings` here."""
        if all_submodels:  # this one and those inside it are asked one by one
            return cast(dict[str, str], super().get_expanded_tied_weights_keys(all_submodels=True))
        return dict(self._tied_weights_keys or {}) if self.config.share_encoder_decoder_embeddings else {}

    def get_input_embeddings(self) -> nn.Embedding:
        """Returns the embedding table, (V, D)."""
        return cast(nn.Embedding, self.inner.get_input_embeddings())

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the embedding table."""
        self.inner.set_input_embeddings(value)
        if "shared" in self._modules:
            self.shared = cast(nn.Embedding, value)
