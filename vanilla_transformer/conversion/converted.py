"""A model brought from another system: what every converter returns, how it is compared, checked and saved.

Shapes: B  sentences, S  source length, T  target length, V  target vocabulary.
"""

import copy
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from vanilla_transformer.files import new_folder
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.generation_vanilla_transformer import VanillaTransformerForConditionalGeneration

from .errors import ConversionError
from .weights import Rule, StateDict, rename_weights

CONVERSION_NAME = "conversion.json"
TOLERANCE = 1e-5  # of logits in float32, relative to the largest
_LENGTHS, _TARGET_LENGTH = (12, 7, 1), 9  # of the compared sentences; less where the positions end before

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a converted model comes from: what `conversion.json` says beside it."""

    system: str  # a key of `SOURCES`
    name: str  # on the Hub; of a file or folder the last part of the path
    revision: str | None = None  # branch, tag or commit on the Hub


@dataclass(frozen=True, kw_only=True)
class ConvertedModel:
    """A model of another system in this package's form."""

    source: str  # what it was, for messages: "the MarianMT model opus/en-de"
    model: VanillaTransformerForConditionalGeneration  # in evaluation mode, with its generation config
    tokenizer: PreTrainedTokenizerBase | None = None
    # Gives the same batch to the original, where it can run here, and to the model; returns both logits (B, T, V).
    compare: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None
    notes: tuple[str, ...] = ()  # what the user should know: what could not be taken over, or checked
    origin: Origin | None = None

    def check(self) -> float | None:
        """Returns the largest difference of logits, as a fraction of the largest, or `None`; refuses more than 1e-5."""
        if self.compare is None:
            return None
        return check_logits(*self.compare(), f"The converted model computes something else than {self.source}")

    def save(self, folder: str | os.PathLike[str], *, difference: float | None = None) -> Path:
        """Saves model, generation config, tokenizer and origin as this package does; the folder is complete or absent.

        Where there is something already, it is a `FileExistsError`. `difference`, what `check` found, is saved with the
        origin.
        """
        with new_folder(folder) as partial:
            self.model.save_pretrained(partial)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(partial)
            if self.origin is not None:
                record = {**asdict(self.origin), "largest_difference_of_logits": difference}
                (partial / CONVERSION_NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        return Path(folder)


def build_model(
    config: VanillaTransformerConfig,
    weights: StateDict,
    rules: Iterable[Rule],
    *,
    source: str,
    generation_config: GenerationConfig | None = None,
) -> VanillaTransformerForConditionalGeneration:
    """Makes a model in evaluation mode with the weights of another system, in their type; lists what does not fit."""
    with torch.device("meta"):
        empty = VanillaTransformerForConditionalGeneration(config)
    shapes = {name: tensor.shape for name, tensor in empty.state_dict().items()}
    ties = empty.get_expanded_tied_weights_keys(all_submodels=True)
    renamed = rename_weights(weights, rules, shapes, source=source, ties=ties)
    dtypes = sorted({str(tensor.dtype) for tensor in renamed.values()})
    if len(dtypes) != 1 or not all(tensor.is_floating_point() for tensor in renamed.values()):
        raise ConversionError(f"The weights of {source} must be of one floating-point type, not {', '.join(dtypes)}.")
    # Made in its type from the start: in float32 it might not fit into memory.
    dtype = next(iter(renamed.values())).dtype
    model = VanillaTransformerForConditionalGeneration._from_config(config, dtype=dtype)
    model.load_state_dict(renamed)
    if generation_config is not None:
        model.generation_config = generation_config
    return model.eval()


def draw_batch(config: VanillaTransformerConfig) -> Batch:
    """Draws sources (B, S), padded on the right, and targets (B, T), without special tokens but the start symbol."""
    generator = torch.Generator().manual_seed(0)
    most = max(config.max_position_embeddings - config.position_offset, 1)
    lengths = [min(length, most) for length in _LENGTHS]
    if config.pad_token_id is None:  # then some systems have no other mask
        lengths = [max(lengths)] * len(lengths)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    special = {config.pad_token_id, config.bos_token_id, *ends, config.decoder_start_token_id}

    def draw(vocab_size: int, length: int) -> torch.Tensor:
        legal = torch.tensor([token for token in range(vocab_size) if token not in special])
        return legal[torch.randint(len(legal), (len(_LENGTHS), length), generator=generator)]

    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    sources = draw(config.vocab_size, max(lengths)).masked_fill(~mask, config.pad_token_id or 0)
    targets = draw(config.target_vocab_size, min(_TARGET_LENGTH, most))
    targets[:, 0] = config.decoder_start_token_id or 0
    return {"input_ids": sources, "attention_mask": mask.long(), "decoder_input_ids": targets}


def compare_with(
    compute: Callable[[Batch], torch.Tensor], model: VanillaTransformerForConditionalGeneration
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the logits (B, T, V) of `compute`, which is the original in float32, and the model's, of one batch."""
    batch = draw_batch(model.config)
    with torch.no_grad():
        expected = compute(batch)  # with a copy in float32 that is gone before the next is made
        return expected, as_float32(model)(**batch, use_cache=False).logits


def check_logits(expected: torch.Tensor, actual: torch.Tensor, subject: str) -> float:
    """Returns the largest difference of logits (B, T, V), as a fraction of the largest; refuses more than allowed."""
    difference = float((expected - actual).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:
        found = f"logits differ by {difference:.1e} of the largest, and may by {TOLERANCE:.0e}"
        cause = "This is an error of the converter, or the original has a feature that it does not know of"
        raise ConversionError(f"{subject}: {found}. {cause}.")
    return difference


def check_counterpart(
    compute: Callable[[Batch], torch.Tensor], model: VanillaTransformerForConditionalGeneration, name: str
) -> float:
    """Makes sure that what was made of a model computes, on its device and in float32, the same logits (B, T, V)."""
    batch = {name: tensor.to(model.device) for name, tensor in draw_batch(model.config).items()}
    was_training = model.training
    try:
        with torch.no_grad():
            expected = as_float32(model.eval())(**batch, use_cache=False).logits
            return check_logits(expected, compute(batch), f"{name} computes something else than this model")
    finally:
        model.train(was_training)


def as_float32(model: Any) -> Any:
    """Returns a model, or a copy of it if it is not in float32."""
    if all(tensor.dtype == torch.float32 for tensor in model.parameters()):
        return model
    copied = copy.deepcopy(model).float()
    # Sinusoids are computed anew with the type; the other side of a comparison has those that are rounded.
    for name, buffer in model.named_buffers():
        copied.get_buffer(name).copy_(buffer)
    return copied
