"""Runs what `export_onnx` wrote, with ONNX Runtime in the place of PyTorch's computations.

Shapes: B  sentences, R  rows of the target (a multiple of B: beams or samples), S  source length, T  target length,
D  d_model, V  target vocabulary. Masks are 1 at tokens and 0 at padding.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from vanilla_transformer.data.vocabularies import load_needed_tokenizer
from vanilla_transformer.files import check_runs_here, digest_files, explain_missing
from vanilla_transformer.model import generation_vanilla_transformer as generation
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.loss_vanilla_transformer import shift_tokens_right

ENCODER_FILE = "encoder_model.onnx"
DECODER_FILE = "decoder_model_merged.onnx"


def import_onnxruntime() -> ModuleType:
    """The package onnxruntime."""
    with explain_missing("ONNX Runtime is not installed", extra="export", packages="onnxruntime"):
        import onnxruntime
    return cast(ModuleType, onnxruntime)


def is_exported_to_onnx(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a model that `export_onnx` wrote."""
    return all((Path(folder) / name).is_file() for name in (ENCODER_FILE, DECODER_FILE))


class SourceKeepingCache(EncoderDecoderCache):
    """A cache whose source side stays where it is when beams change places: those of a sentence have the same one."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Makes row i the continuation of row `beam_idx[i]`, which belongs to the same sentence; (R,)."""
        self.self_attention_cache.reorder_cache(beam_idx)


class OnnxEncoder(nn.Module):
    """The encoder: a session of `encoder_model.onnx`."""

    main_input_name = "input_ids"

    def __init__(self, session: Any) -> None:
        super().__init__()
        self.session = session

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput:
        """Encodes the source, (B, S) with a mask (B, S), to `last_hidden_state` (B, S, D), and nothing else."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        outputs = _run(self.session, {"input_ids": input_ids, "attention_mask": mask.long()})
        return BaseModelOutput(last_hidden_state=cast(torch.FloatTensor, outputs["last_hidden_state"]))


class OnnxModel(generation.VanillaTransformerGenerationMixin, PreTrainedModel, GenerationMixin):
    """An exported model that is called, and generates, as the original does: greedily, with beams, or sampling.

    `translate` and the functions like it take it. It computes in float32 on ONNX Runtime's devices, while searching is
    done on the CPU. It cannot be trained, and does not tell attention weights or hidden states.

    Args:
        folder: What `export_onnx` wrote.
        providers: Where ONNX Runtime shall compute, by its own names: first what it shall prefer.
        session_options: An `onnxruntime.SessionOptions`. `None`: as many threads as torch has.
    """

    config: VanillaTransformerConfig
    config_class = VanillaTransformerConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        session_options: Any = None,
    ) -> None:
        onnxruntime: Any = import_onnxruntime()
        path = Path(folder)
        check_runs_here(path)
        if not is_exported_to_onnx(path):
            raise FileNotFoundError(
                f"{path} holds no model exported to ONNX by this package ({ENCODER_FILE} and {DECODER_FILE}). Make one:"
                " vanilla-transformer export --format onnx --model_name_or_path ... --output_dir ..."
            )
        super().__init__(VanillaTransformerConfig.from_pretrained(path))
        self.generation_config = GenerationConfig.from_pretrained(path)
        if session_options is None:
            session_options = onnxruntime.SessionOptions()
            session_options.intra_op_num_threads = torch.get_num_threads()
        encoder, self.decoder_session = (
            onnxruntime.InferenceSession(path / name, session_options, providers=list(providers))
            for name in (ENCODER_FILE, DECODER_FILE)
        )
        self.encoder = OnnxEncoder(encoder)
        # (heads, size of one head) of each input of the cache.
        self.past_shapes: dict[str, tuple[int, int]] = {
            value.name: (value.shape[1], value.shape[3])
            for value in self.decoder_session.get_inputs()
            if value.name.startswith("past_key_values.")
        }
        # So that the state tells one model from another, as that of a model with parameters does.
        digest = hashlib.sha256(str(digest_files(sorted(path.glob("*.onnx*")))).encode()).digest()
        self.register_buffer("digest", torch.tensor(list(digest), dtype=torch.uint8))

    @property
    def device(self) -> torch.device:
        """Where inputs are taken and logits given."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The type of logits."""
        return torch.float32

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Returns the number of parameters of the model that was exported; see the library's method."""
        with torch.device("meta"):
            original = generation.VanillaTransformerForConditionalGeneration(self.config)
        return int(original.num_parameters(only_trainable, exclude_embeddings))

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Refuses: what is exported is a folder already."""
        raise NotImplementedError("An exported model is saved already: copy its folder.")

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Returns the decoder's input (B, T) for labels (B, T), as the original does."""
        config: Any = self.config
        return shift_tokens_right(labels, config.pad_token_id, config.decoder_start_token_id)

    def has_own_methods(self) -> bool:
        """Returns `False`: the original's decoder, which may be called without `forward`, is not there."""
        return False

    def get_encoder(self, modality: str | None = None) -> nn.Module:
        """Returns the encoder."""
        return self.encoder

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | None = None,
        encoder_outputs: Sequence[torch.Tensor] | BaseModelOutput | None = None,
        past_key_values: EncoderDecoderCache | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
    ) -> Seq2SeqLMOutput:
        """Maps what the cache lacks of the target (R, T) to `logits` (R, T, V), and adds to the cache.

        The mask and `encoder_outputs` are those of the source, (B, S) and (B, S, D), or once for each row, (R, S) and
        (R, S, D). The graph has no place for `decoder_attention_mask`, (R, T or more); padding at the end needs none.
        """
        if decoder_input_ids is None or (input_ids is None and encoder_outputs is None):
            raise ValueError("Give decoder_input_ids, and either input_ids or encoder_outputs.")
        if decoder_attention_mask is not None and (decoder_attention_mask.diff(dim=1) > 0).any():
            raise ValueError("decoder_attention_mask has padding before tokens; targets must be padded on the right.")
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask=attention_mask)
        states = encoder_outputs[0]
        if attention_mask is None:
            attention_mask = torch.ones(states.shape[:2], dtype=torch.long)
        cache = past_key_values if past_key_values is not None else _new_cache()
        rows = decoder_input_ids.shape[0]
        encoder = {"encoder_attention_mask": _repeat(attention_mask.long(), rows)}
        encoder["encoder_hidden_states"] = _repeat(states, rows)
        inputs = {"input_ids": decoder_input_ids, **encoder, **self._read_cache(cache, rows)}
        outputs = _run(self.decoder_session, inputs)
        if use_cache is not False:
            self._write_cache(cache, outputs)
        return Seq2SeqLMOutput(
            logits=cast(torch.FloatTensor, outputs["logits"]),
            past_key_values=cache if use_cache is not False else None,
            encoder_last_hidden_state=cast(torch.FloatTensor, states),
        )

    def _read_cache(self, cache: EncoderDecoderCache, rows: int) -> dict[str, torch.Tensor]:
        found = {}
        for name, (heads, size) in self.past_shapes.items():
            _, number, side, kind = name.split(".")
            layer = _find_layer(cache, side, int(number))
            empty = layer is None or layer.get_seq_length() == 0
            found[name] = torch.zeros(rows, heads, 0, size) if empty else getattr(layer, f"{kind}s")
        return found

    def _write_cache(self, cache: EncoderDecoderCache, outputs: Mapping[str, torch.Tensor]) -> None:
        for number in range(self.config.decoder_layers):
            for side, part in (("decoder", cache.self_attention_cache), ("encoder", cache.cross_attention_cache)):
                key, value = (outputs[f"present.{number}.{side}.{kind}"] for kind in ("key", "value"))
                layer = _find_layer(cache, side, number)
                if layer is None or not layer.is_initialized:
                    part.update(key, value, number)
                else:
                    # What is there already is part of the new tensors.
                    layer.keys, layer.values = key, value
            cache.is_updated[number] = True

    def _prepare_cache_for_generation(self, generation_config: GenerationConfig, model_kwargs: Any, *args: Any) -> Any:
        """Makes a cache of the library's kind, not one in which beams share their source: each row needs its own."""
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(f"cache_implementation is {kind!r}; an ONNX model has a dynamic cache only.")
        if generation_config.use_cache is not False and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = _new_cache()

    def _expand_inputs_for_generation(self, *args: Any, **kwargs: Any) -> tuple[torch.LongTensor, dict[str, Any]]:
        """Repeats the target's side as the original does, and the encoder's output, once for all steps."""
        input_ids, model_kwargs = super()._expand_inputs_for_generation(*args, **kwargs)
        states = _repeat(model_kwargs["encoder_outputs"][0], input_ids.shape[0])
        model_kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=cast(torch.FloatTensor, states))
        return input_ids, model_kwargs


def load_for_onnx(
    folder: str, *, device: str = "auto", dtype: str = "auto"
) -> tuple[OnnxModel, PreTrainedTokenizerBase]:
    """Loads model and tokenizer from a folder that `export_onnx` wrote; `"auto"` is CUDA where it can be used."""
    available = import_onnxruntime().get_available_providers()
    has_cuda = "CUDAExecutionProvider" in available and torch.cuda.is_available()
    devices = {"auto": has_cuda, "cpu": False, "cuda": True}
    if device not in devices or (device == "cuda" and not has_cuda):
        legal = f"one of {list(devices)}. This ONNX Runtime has {available}"
        raise ValueError(f"device is {device!r}; for ONNX it must be {legal}.")
    if dtype not in ("auto", "float32"):
        raise ValueError(f"dtype is {dtype!r}; for ONNX it must be one of ['auto', 'float32'].")
    providers = ["CUDAExecutionProvider"] * devices[device] + ["CPUExecutionProvider"]
    return OnnxModel(folder, providers=providers), load_needed_tokenizer(folder)


def _run(session: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = [value.name for value in session.get_outputs()]
    arrays = session.run(names, {name: np.ascontiguousarray(value.numpy()) for name, value in inputs.items()})
    return {name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)}


def _repeat(states: torch.Tensor, rows: int) -> torch.Tensor:
    """Gives each of `rows` rows what its sentence has, (B, ...)."""
    return states if states.shape[0] == rows else states.repeat_interleave(rows // states.shape[0], dim=0)


def _new_cache() -> SourceKeepingCache:
    return SourceKeepingCache(DynamicCache(), DynamicCache())


def _find_layer(cache: EncoderDecoderCache, side: str, number: int) -> Any:
    part: Cache = cache.self_attention_cache if side == "decoder" else cache.cross_attention_cache
    return part.layers[number] if number < len(part.layers) else None
