"""What computes translations: torch through transformers, CTranslate2, or ONNX Runtime."""

from __future__ import annotations  # the types of methods are not imported: --help does not wait for torch

import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from vanilla_transformer.inference.arguments import InferenceArguments
from vanilla_transformer.options import option

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

LABELS = {"ctranslate2": "CTranslate2", "onnx": "ONNX"}
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
    dtype: str = option(
        "auto (default: as saved), float32, bfloat16 or float16; of CTranslate2 also int8, int8_float32, int8_float16, "
        "int8_bfloat16 and int16.",
        "auto",
    )
    engine: Literal["auto", "transformers", "ctranslate2", "onnx"] = option(
        "What computes: transformers; ctranslate2, which is faster, above all on CPUs; onnx. The last two take a "
        "folder that `vanilla-transformer export` made; ctranslate2 also converts a model of this package in passing. "
        "auto (default): an exported folder's own engine; ctranslate2 where the model's folder holds an export of the "
        "same weights, unless something is asked that it cannot do, and for --dtype int8 and the like; else "
        "transformers.",
        "auto",
    )

    def __post_init__(self) -> None:
        names: Any = self.model_name_or_path
        self.model_names: list[str] = [names] if isinstance(names, str) else names
        self.model_name_or_path = self.model_names[0]
        # What is asked besides that needs torch: see GlossaryArguments.
        self.needs_torch = "--glossary needs torch" if getattr(self, "glossary", None) is not None else None
        super().__post_init__()
        if self.IS_ENSEMBLE and len(self.model_names) > 1 and self.engine not in ("auto", "transformers"):
            raise ValueError(
                f"--engine {self.engine} takes one model; --model_name_or_path names {len(self.model_names)}."
            )

    def divide(self) -> list[EngineArguments]:
        """The arguments of each model by itself."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(EngineArguments)}
        divided = [EngineArguments(**given | {"model_name_or_path": name}) for name in self.model_names]
        for each in divided:
            each.needs_torch = self.needs_torch
        return divided

    def load(self) -> tuple[Any, PreTrainedTokenizerBase, dict[str, Any]]:
        """The model, its tokenizer, and the arguments of `generate` that were given or that the languages ask for.

        Where `engine` is auto, it is afterwards what was taken, and the log says why.
        """
        from vanilla_transformer.files import check_model_name, check_revision

        from .ctranslate2 import QUANTIZATIONS

        for each in self.model_names:
            check_model_name(each)
            check_revision(each, self.revision)
        if self.dtype not in ("auto", *QUANTIZATIONS):
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(['auto', *QUANTIZATIONS])}.")
        reason = self.needs_torch or ("--engine is transformers" if self.engine == "transformers" else None)
        if reason and self.dtype in _integer_types():
            raise ValueError(f"torch does not compute in {self.dtype}, and {reason}: leave out --dtype {self.dtype}.")
        if len(self.model_names) > 1:
            return self._load_ensemble()
        name, own = self.model_name_or_path, find_engine_of(self.model_name_or_path)
        if own is not None and self.engine not in ("auto", own):
            raise ValueError(f"{name} holds a model exported to {LABELS[own]}: it needs --engine {own}.")
        if self.engine != "auto":
            return self._load_with(self.engine)
        self.engine, reason, level, found = self._choose(own)
        loaded = self._load_with(self.engine, found)
        could_be_torch = self.engine == "ctranslate2" and own is None and self.dtype not in _integer_types()
        if could_be_torch and (refused := loaded[0].find_refused(loaded[2])):
            self.engine, reason = "transformers", f"CTranslate2 cannot generate as asked: {'; '.join(refused)}"
            loaded = self._load_with(self.engine)
        if int(os.environ.get("RANK") or 0) == 0:
            message = "The engine for %s is %s, since %s. Choose another with --engine."
            logger.log(level, message, name, self.engine, reason)
        return loaded

    def _load_ensemble(self) -> tuple[Any, PreTrainedTokenizerBase, dict[str, Any]]:
        from vanilla_transformer.inference.ensembles import load_ensemble

        for each in self.model_names:
            if (own := find_engine_of(each)) is not None:
                raise ValueError(
                    f"{each} holds a model exported to {LABELS[own]}, and only torch takes several models."
                )
        self.engine = "transformers"
        ensemble, tokenizer = load_ensemble(self.model_names, **self.place)
        return ensemble, tokenizer, self.collect_settings(ensemble, tokenizer)

    def _choose(self, own: str | None) -> tuple[Any, str, int, tuple[Path, str | None] | None]:
        """What `auto` stands for, why, the level at which the log says so, and the export where one was looked for.

        `own` is the engine of the folder.
        """
        from .ctranslate2_model import find_export, find_reason_against, is_exported_to_ctranslate2

        if own is not None:
            return own, f"it was exported to {LABELS[own]}", logging.INFO, None
        if self.dtype in _integer_types():
            return "ctranslate2", f"--dtype is {self.dtype}", logging.INFO, None
        reason = self.needs_torch or find_reason_against(self.device, self.dtype)
        if reason is not None:
            return "transformers", reason, logging.INFO, None
        path, reason = found = find_export(self.model_name_or_path, dtype=self.dtype)
        if reason is None:
            return "ctranslate2", f"{path} has the same weights", logging.INFO, found
        return "transformers", reason, logging.WARNING if is_exported_to_ctranslate2(path) else logging.INFO, None

    def _load_with(
        self, engine: str, found: tuple[Path, str | None] | None = None
    ) -> tuple[Any, PreTrainedTokenizerBase, dict[str, Any]]:
        name = self.model_name_or_path
        if engine == "transformers":
            return super().load()
        place: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        model: Any
        if engine == "onnx":
            from .onnx_model import load_for_onnx

            model, tokenizer = load_for_onnx(name, **place)
        else:
            from .ctranslate2_model import load_for_ctranslate2

            place |= {"revision": self.revision, "trust_remote_code": self.trust_remote_code}
            model, tokenizer = load_for_ctranslate2(name, **place, found=found)
        return model, tokenizer, self.collect_settings(model, tokenizer)


def find_engine_of(folder: str) -> str | None:
    """The engine that a folder was exported for, if it was."""
    from .ctranslate2_model import is_exported_to_ctranslate2
    from .onnx_model import is_exported_to_onnx

    if is_exported_to_ctranslate2(folder):
        return "ctranslate2"
    return "onnx" if is_exported_to_onnx(folder) else None


def check_not_exported(folder: str) -> None:
    """Makes sure that it is no export: only an engine can do something with that."""
    if engine := find_engine_of(folder):
        raise ValueError(f"{folder} was exported to {LABELS[engine]}: name the folder of the model that was exported.")


def _integer_types() -> list[str]:
    """The types that torch does not compute in, and CTranslate2 does."""
    from .ctranslate2 import QUANTIZATIONS

    return [name for name in QUANTIZATIONS if name.startswith("int")]
