"""The original Transformer ("Attention Is All You Need", 2017) for Hugging Face transformers.

Importing this package registers the model and its tokenizer with the Auto classes, and brings the pipelines
"translation", "summarization" and "text2text-generation" back to `transformers.pipeline`.
"""

from .causal_lm_vanilla_transformer import VanillaTransformerDecoderModel, VanillaTransformerForCausalLM
from .configuration_vanilla_transformer import PRESETS, VanillaTransformerConfig
from .encoder_vanilla_transformer import (
    VanillaTransformerEncoderModel,
    VanillaTransformerForQuestionAnswering,
    VanillaTransformerForSequenceClassification,
    VanillaTransformerForTokenClassification,
)
from .modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration, VanillaTransformerModel
from .pipeline_vanilla_transformer import SummarizationPipeline, Text2TextGenerationPipeline, TranslationPipeline
from .registration import register_auto_classes, register_pipeline_tasks
from .tokenization_vanilla_transformer import VanillaTransformerTokenizer

__version__ = "0.1.0"

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
