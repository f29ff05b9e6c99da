"""Makes this package known to transformers."""

import functools
from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
    pipelines,
)
from transformers.pipelines.base import PipelineRegistry

from .model.configuration_vanilla_transformer import VanillaTransformerConfig
from .model.decoder_only_vanilla_transformer import VanillaTransformerDecoderModel, VanillaTransformerForCausalLM
from .model.encoder_only_vanilla_transformer import (
    VanillaTransformerEncoderModel,
    VanillaTransformerForQuestionAnswering,
    VanillaTransformerForSequenceClassification,
    VanillaTransformerForTokenClassification,
)
from .model.generation_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .model.modeling_vanilla_transformer import VanillaTransformerModel
from .model.pipeline_vanilla_transformer import (
    SummarizationPipeline,
    Text2TextGenerationPipeline,
    TranslationPipeline,
    parse_language_pair,
)
from .model.tokenization_vanilla_transformer import VanillaTransformerTokenizer

# The models that transformers 4 took when none was named: (name, revision).
_T5 = ("google-t5/t5-base", "a9723ea")
_DISTILBART = ("sshleifer/distilbart-cnn-12-6", "a4f8f3e")


class _ModelWithoutHead:
    """What AutoModel finds: it loads the encoder-decoder, encoder or decoder that a configuration describes.

    The library chooses by the class that a configuration was saved with, which may be none, or have a head.
    """

    config_class = VanillaTransformerConfig

    @classmethod
    def from_pretrained(cls, *args: Any, config: VanillaTransformerConfig, **kwargs: Any) -> Any:
        """Loads the model."""
        return cls._choose(config).from_pretrained(*args, config=config, **kwargs)

    @classmethod
    def _from_config(cls, config: VanillaTransformerConfig, **kwargs: Any) -> Any:
        return cls._choose(config)._from_config(config, **kwargs)

    @staticmethod
    def _choose(config: VanillaTransformerConfig) -> type[PreTrainedModel]:
        if config.is_encoder_decoder:
            return VanillaTransformerModel
        return VanillaTransformerDecoderModel if config.is_decoder else VanillaTransformerEncoderModel


# The classes of each task.
_MODELS: dict[Any, tuple[type[PreTrainedModel], ...]] = {
    AutoModel: (VanillaTransformerModel, VanillaTransformerDecoderModel, VanillaTransformerEncoderModel),
    AutoModelForCausalLM: (VanillaTransformerForCausalLM,),
    AutoModelForQuestionAnswering: (VanillaTransformerForQuestionAnswering,),
    AutoModelForSeq2SeqLM: (VanillaTransformerForConditionalGeneration,),
    AutoModelForSequenceClassification: (VanillaTransformerForSequenceClassification,),
    AutoModelForTextEncoding: (VanillaTransformerEncoderModel,),
    AutoModelForTokenClassification: (VanillaTransformerForTokenClassification,),
}


def register_auto_classes() -> None:
    """Makes the Auto classes know this package's, and lets saved folders name the code that travels with them."""
    AutoConfig.register(VanillaTransformerConfig.model_type, VanillaTransformerConfig)
    AutoTokenizer.register(VanillaTransformerConfig, fast_tokenizer_class=VanillaTransformerTokenizer)
    VanillaTransformerConfig.register_for_auto_class()
    VanillaTransformerTokenizer.register_for_auto_class()
    for auto_class, model_classes in _MODELS.items():
        found = model_classes[0] if len(model_classes) == 1 else _ModelWithoutHead
        auto_class.register(VanillaTransformerConfig, found)
        for model_class in model_classes:
            if model_class._auto_class is None:  # the first name counts, AutoModel for the encoder
                model_class.register_for_auto_class(auto_class.__name__)


def register_pipeline_tasks(translation: type[TranslationPipeline] = TranslationPipeline) -> None:
    """Brings back the `pipeline()` tasks translation, translation_xx_to_yy, summarization and text2text-generation.

    They serve every encoder-decoder model of the library. A task that works already is left alone, so that calling this
    again changes nothing. Without a model the tasks load what transformers 4 loaded. `translation` is the class of the
    translation tasks: this package has one that can do more than the one that travels with models.
    """
    registry = pipelines.PIPELINE_REGISTRY
    classes: dict[str, tuple[type[Text2TextGenerationPipeline], dict[Any, Any]]] = {
        "text2text-generation": (Text2TextGenerationPipeline, {"model": _T5}),
        "summarization": (SummarizationPipeline, {"model": _DISTILBART}),
        "translation": (translation, {("en", target): {"model": _T5} for target in ("de", "fr", "ro")}),
    }
    for task, (pipeline_class, default) in classes.items():
        # Newer versions refuse the names in this table before they ask the registry (older ones have no such table).
        getattr(pipelines, "REMOVED_TASKS", {}).pop(task, None)
        if task not in registry.supported_tasks:  # an alias goes first anyway
            # Not through register_pipeline(): it cannot hold defaults by language pair, and it marks the class as one
            # whose code travels with a model, so that a saved Marian pipeline would ask for trust_remote_code.
            entry = {"impl": pipeline_class, "pt": (AutoModelForSeq2SeqLM,), "default": default, "type": "text"}
            registry.supported_tasks[task] = entry
    _register_language_pairs(registry)


def _register_language_pairs(registry: PipelineRegistry) -> None:
    """Makes `translation_xx_to_yy` lead to `translation`, unless it does so, by wrapping the look-up of names."""
    try:
        registry.check_task("translation_xx_to_yy")
    except KeyError:
        pass
    else:
        return
    check_task = registry.check_task

    @functools.wraps(check_task)
    def check_task_or_language_pair(task: str) -> tuple[str, dict[str, Any], Any]:
        try:
            return check_task(task)
        except KeyError:
            if not task.startswith("translation_"):
                raise
        pair = parse_language_pair(task)
        if pair is None:
            raise KeyError(f"Unknown task {task}: translation tasks have the form 'translation_XX_to_YY'")
        name, entry, _ = check_task("translation")
        return name, entry, pair

    # On the one registry that pipeline() asks, not on its class.
    registry.check_task = check_task_or_language_pair  # type: ignore[method-assign]
