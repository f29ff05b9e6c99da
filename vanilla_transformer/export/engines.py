"""What computes translations: torch through transformers, CTranslate2, or ONNX Runtime."""

from __future__ import annotations  # the types of methods are not imported: --help does not wait for torch

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vanilla_transformer.inference.arguments import InferenceArguments
from vanilla_transformer.options import option

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MODELS = (
    "Folder or Hub name of a sequence-to-sequence model; of several, which need one tokenizer, the mean of their "
    "probabilities decides."
)


@dataclass
class EngineArguments(InferenceArguments):
    """The command-line arguments of scripts that translate and do nothing else with the model.

    Several names are one ensemble, which `load` loads; or, where `IS_ENSEMBLE` is false, models beside each other, each
    with the arguments that `divide` gives.
    """

    IS_ENSEMBLE: ClassVar[bool] = True

    model_name_or_path: str = option(MODELS, nargs="+")
    engine: Literal["transformers", "ctranslate2", "onnx"] = option(
        "What computes: transformers (default), ctranslate2, which is faster, above all on CPUs, or onnx. Both take a "
        "folder that `vanilla-transformer export` made; ctranslate2 also converts a model of this package in passing, "
        "and --dtype may then be int8, int8_float32, int8_float16, int8_bfloat16 or int16, too.",
        "transformers",
    )

    def __post_init__(self) -> None:
        names: Any = self.model_name_or_path
        self.model_names: list[str] = [names] if isinstance(names, str) else names
        self.model_name_or_path = self.model_names[0]
        super().__post_init__()
        if self.IS_ENSEMBLE and len(self.model_names) > 1 and self.engine != "transformers":
            raise ValueError(
                f"--engine {self.engine} takes one model; --model_name_or_path names {len(self.model_names)}."
            )

    def divide(self) -> list[EngineArguments]:
        """The arguments of each model by itself."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(EngineArguments)}
        return [EngineArguments(**given | {"model_name_or_path": name}) for name in self.model_names]

    def load(self) -> tuple[Any, PreTrainedTokenizerBase, dict[str, Any]]:
        """The model, its tokenizer, and the arguments of `generate` that were given or that the languages ask for."""
        from vanilla_transformer.files import check_model_name

        from .ctranslate2_model import is_exported_to_ctranslate2, load_for_ctranslate2
        from .onnx_model import is_exported_to_onnx, load_for_onnx

        exported = {"ctranslate2": ("CTranslate2", is_exported_to_ctranslate2), "onnx": ("ONNX", is_exported_to_onnx)}
        name = self.model_name_or_path
        for each in self.model_names:
            check_model_name(each)
        if self.engine != "transformers" and self.revision != "main" and Path(name).is_dir():
            raise ValueError(f"--revision {self.revision} is for models on the Hub, and {name} is a folder.")
        for engine, (label, is_exported) in exported.items():
            if engine != self.engine and is_exported(name):
                raise ValueError(f"{name} holds a model exported to {label}: it needs --engine {engine}.")
        if len(self.model_names) > 1:
            from vanilla_transformer.inference.ensembles import load_ensemble

            ensemble, tokenizer = load_ensemble(self.model_names, **self.place)
            return ensemble, tokenizer, self.collect_settings(ensemble, tokenizer)
        if self.engine == "transformers":
            return super().load()
        place: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        model: Any
        if self.engine == "onnx":
            model, tokenizer = load_for_onnx(name, **place)
        else:
            place |= {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
            model, tokenizer = load_for_ctranslate2(name, **place)
        return model, tokenizer, self.collect_settings(model, tokenizer)
