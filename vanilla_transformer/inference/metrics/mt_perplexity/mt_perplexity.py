"""Perplexity of a sequence-to-sequence model on reference translations, for evaluate, without the network."""

from dataclasses import dataclass
from typing import Any

from datasets import Features, Value
from evaluate import EvaluationModuleInfo
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer.inference import evaluate as evaluation
from vanilla_transformer.inference import translate as translation
from vanilla_transformer.inference.metrics import base


@dataclass(frozen=True)
class _Options:
    """The options of [`MtPerplexity`], described there."""

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    model_id: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    batch_size: int = 32
    max_source_length: int | None = None
    max_target_length: int | None = None
    progress: bool | str = False

    def __post_init__(self) -> None:
        if (self.model is None) != (self.tokenizer is None):
            missing = "model" if self.model is None else "tokenizer"
            raise ValueError(f"model and tokenizer belong together; {missing} is missing.")
        if self.model is not None and self.model_id is not None:
            raise ValueError(f"Give model_id (here {self.model_id!r}), or model and tokenizer, but not both.")
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1 sentence pair.")

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        if self.model is not None and self.tokenizer is not None:
            return self.model, self.tokenizer
        if self.model_id is None:
            raise ValueError("There is no model: give model_id, or model and tokenizer, to load or to compute.")
        return translation.load_model_and_tokenizer(
            self.model_id, device=self.device, dtype=self.dtype, trust_remote_code=self.trust_remote_code
        )


class MtPerplexity(base.MetricWithOptions):
    """Perplexity per target token, by [`score_loss`]; in several processes, process 0 alone runs the model."""

    def _info(self) -> EvaluationModuleInfo:
        return EvaluationModuleInfo(
            description=(
                "Perplexity of a sequence-to-sequence model on reference translations: the exponential of the mean "
                "negative log-likelihood of a target token. It depends on the tokenizer: compare only models that "
                "share one."
            ),
            citation="",
            inputs_description="""
Inputs:
    sources: source sentences, a list of strings.
    references: their translations, a list of strings.
Options:
    model, tokenizer: a sequence-to-sequence model, wherever it is, and its tokenizer; or
    model_id: a folder or Hub name to load both from, on
    device: "auto" (default: cuda, mps or cpu) or one such as "cuda:1", in
    dtype: "auto" (default: as saved), "float32", "bfloat16" or "float16".
    trust_remote_code: let code from the checkpoint run.
    batch_size: sentence pairs per forward pass (default: 32).
    max_source_length, max_target_length: limits in tokens; longer texts are truncated with a warning.
    progress: show a bar on stderr (default: no).
Returns:
    loss: nats per target token, without label smoothing.
    perplexity: exp(loss).
    tokens: target tokens, the end token included.
""",
            features=Features({"sources": Value("string"), "references": Value("string")}),
        )

    def _check_options(self, options: dict[str, Any], *, complete: bool) -> None:
        chosen = _Options(**options)
        if complete and chosen.model is None and chosen.model_id is None:
            raise ValueError("There is no model: give model_id, or model and tokenizer.")

    def _compute(self, *, sources: list[str], references: list[str], **options: Any) -> dict[str, Any]:
        chosen = _Options(**self._options | options)
        model, tokenizer = chosen.load()
        return {
            **evaluation.score_loss(
                model,
                tokenizer,
                sources,
                references,
                batch_size=chosen.batch_size,
                max_source_length=chosen.max_source_length,
                max_target_length=chosen.max_target_length,
                progress=chosen.progress,
            )
        }
