"""A model brought from another system: what every converter returns, how it is checked and saved."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from vanilla_transformer.files import new_folder
from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.model.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

from .comparing import check_logits
from .errors import ConversionError
from .weights import Rule, rename_weights

CONVERSION_NAME = "conversion.json"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a converted model comes from: what `conversion.json` says beside it.

    Args:
        system: A key of `SOURCES`.
        name: Its name on the Hub; of a file or folder the last part of the path.
        revision: Branch, tag or commit on the Hub; `None` for a file or folder.
    """

    system: str
    name: str
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class ConvertedModel:
    """A model of another system in this package's form.

    Args:
        source: What it was, for messages: "the MarianMT model opus/en-de".
        model: The model, in evaluation mode, with its generation config.
        tokenizer: Its tokenizer; `None` if there was none to convert.
        compare: Gives the same random batch to the original and to the model, and returns both logits (B, T, V), in
            float32 and without padding; `None` where the original cannot run here.
        notes: What the user should know: what could not be taken over, or checked.
        origin: Where it comes from, if that is to be saved with the model.
    """

    source: str
    model: VanillaTransformerForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase | None = None
    compare: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None
    notes: tuple[str, ...] = ()
    origin: Origin | None = None

    def check(self) -> float | None:
        """Compares the model's logits with those of the original.

        Returns:
            The largest difference as a fraction of the largest logit; `None` where the original cannot run here.

        Raises:
            ConversionError: If it is above 1e-5 (`TOLERANCE`), or a logit is not a number.
        """
        if self.compare is None:
            return None
        expected, actual = self.compare()
        return check_logits(expected, actual, f"The converted model computes something else than {self.source}")

    def save(
        self, folder: str | os.PathLike[str], *, max_shard_size: int | str = "50GB", difference: float | None = None
    ) -> Path:
        """Saves model, generation config, tokenizer and origin as this package does; the folder is complete or absent.

        Args:
            folder: Where to: a folder that is not there yet, or an empty one.
            max_shard_size: The most bytes of a weights file, as in `save_pretrained`.
            difference: What `check` found, to be saved with the origin.

        Returns:
            The folder.

        Raises:
            FileExistsError: If there is something already.
        """
        with new_folder(folder) as partial:
            self.model.save_pretrained(partial, max_shard_size=max_shard_size)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(partial)
            if self.origin is not None:
                record = {**asdict(self.origin), "largest_difference_of_logits": difference}
                (partial / CONVERSION_NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        return Path(folder)


def build_model(
    config: VanillaTransformerConfig,
    weights: Mapping[str, torch.Tensor],
    rules: Iterable[Rule],
    *,
    source: str,
    generation_config: GenerationConfig | None = None,
) -> VanillaTransformerForConditionalGeneration:
    """Makes a model with the weights of another system.

    Args:
        config: The configuration that computes what the other system does.
        weights: The other system's weights, by their names there; the model has their floating-point type.
        rules: What becomes of each name.
        source: What is converted, for messages.
        generation_config: How the model generates by default; `None`: as its configuration says.

    Returns:
        The model in evaluation mode, with memory of its own.

    Raises:
        ConversionError: If names or shapes do not fit (see `rename_weights`), or there are weights of several types.
    """
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
