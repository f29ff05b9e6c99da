"""A model brought from another system: what every converter returns, how it is checked and saved."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from vanilla_transformer.configuration_vanilla_transformer import VanillaTransformerConfig
from vanilla_transformer.folders import new_folder
from vanilla_transformer.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration

from .errors import ConversionError
from .renaming import Rule, rename_weights

TOLERANCE = 1e-5  # of logits in float32, relative to the largest


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
    """

    source: str
    model: VanillaTransformerForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase | None = None
    compare: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None
    notes: tuple[str, ...] = ()

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
        difference = float((expected - actual).abs().max() / expected.abs().max())
        if not difference <= TOLERANCE:
            raise ConversionError(
                f"The converted model computes something else than {self.source}: logits differ by {difference:.1e} of"
                f" the largest, and may by {TOLERANCE:.0e}. This is an error of the converter, or the original has a"
                " feature that it does not know of."
            )
        return difference

    def save(self, folder: str | os.PathLike[str], *, max_shard_size: int | str = "50GB") -> Path:
        """Saves model, generation config and tokenizer as this package does; the folder is complete or absent.

        Args:
            folder: Where to: a folder that is not there yet, or an empty one.
            max_shard_size: The most bytes of a weights file, as in `save_pretrained`.

        Returns:
            The folder.

        Raises:
            FileExistsError: If there is something already.
        """
        with new_folder(folder) as partial:
            self.model.save_pretrained(partial, max_shard_size=max_shard_size)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(partial)
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
    model = VanillaTransformerForConditionalGeneration(config)
    model.to(dtype=next(iter(renamed.values())).dtype)  # type: ignore[call-arg]
    model.load_state_dict(renamed)
    if generation_config is not None:
        model.generation_config = generation_config
    return model.eval()
