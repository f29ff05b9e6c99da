"""The original Transformer ("Attention Is All You Need", 2017) for Hugging Face transformers.

Importing this package registers the model and its tokenizer with the Auto classes, and brings the pipelines
"translation", "summarization" and "text2text-generation" back to `transformers.pipeline`.
"""

from importlib.metadata import PackageNotFoundError, version

from .model.configuration_vanilla_transformer import PRESETS, VanillaTransformerConfig
from .model.decoder_only_vanilla_transformer import VanillaTransformerDecoderModel, VanillaTransformerForCausalLM
from .model.encoder_only_vanilla_transformer import (
    VanillaTransformerEncoderModel,
    VanillaTransformerForQuestionAnswering,
    VanillaTransformerForSequenceClassification,
    VanillaTransformerForTokenClassification,
)
from .model.modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel
from .model.pipeline_vanilla_transformer import SummarizationPipeline, Text2TextGenerationPipeline, TranslationPipeline
from .model.tokenization_vanilla_transformer import VanillaTransformerTokenizer
from .registration import register_auto_classes, register_pipeline_tasks

try:
    __version__ = version("vanilla-transformer")
except PackageNotFoundError:  # run from its source, and not installed
    __version__ = "0+unknown"

__all__ = [
    "PRESETS",
    "SummarizationPipeline",
    "Text2TextGenerationPipeline",
    "TranslationPipeline",
    "VanillaTransformerConfig",
    "VanillaTransformerDecoderModel",
    "VanillaTransformerEncoderModel",
    "VanillaTransformerForCausalLM",
    "VanillaTransformerForConditionalGeneration",
    "VanillaTransformerForQuestionAnswering",
    "VanillaTransformerForSequenceClassification",
    "VanillaTransformerForTokenClassification",
    "VanillaTransformerModel",
    "VanillaTransformerTokenizer",
]

register_auto_classes()
register_pipeline_tasks()
