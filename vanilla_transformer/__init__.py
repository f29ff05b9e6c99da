"""The original Transformer ("Attention Is All You Need", 2017) for Hugging Face transformers.

Importing this package registers the model and its tokenizer with the Auto classes, and brings the pipelines
"translation", "summarization" and "text2text-generation" back to `transformers.pipeline`.
"""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def _only_help_is_wanted() -> bool:
    """Whether this process is the command line and shows its help, which must not wait seconds for torch."""
    started_file = getattr(sys.modules["__main__"], "__file__", None)
    if started_file is not None:
        path = Path(started_file)  # on Windows vanilla-transformer.exe/__main__.py
        is_command_line = path.name == "vanilla-transformer" or path.parent.name == "vanilla-transformer.exe"
    else:  # `python -m` imports a package before it finds the package's __main__.py
        is_command_line = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)].endswith("vanilla_transformer")
    return is_command_line and (len(sys.argv) == 1 or not {"-h", "--help"}.isdisjoint(sys.argv))


if not _only_help_is_wanted():
    from .inference.glossary import TranslationPipeline
    from .model.configuration_vanilla_transformer import PRESETS, VanillaTransformerConfig
    from .model.decoder_only_vanilla_transformer import VanillaTransformerDecoderModel, VanillaTransformerForCausalLM
    from .model.encoder_only_vanilla_transformer import (
        VanillaTransformerEncoderModel,
        VanillaTransformerForQuestionAnswering,
        VanillaTransformerForSequenceClassification,
        VanillaTransformerForTokenClassification,
    )
    from .model.generation_vanilla_transformer import VanillaTransformerForConditionalGeneration
    from .model.modeling_vanilla_transformer import VanillaTransformerModel
    from .model.pipeline_vanilla_transformer import SummarizationPipeline, Text2TextGenerationPipeline
    from .model.tokenization_vanilla_transformer import VanillaTransformerTokenizer
    from .registration import register_auto_classes, register_pipeline_tasks

    register_auto_classes()
    register_pipeline_tasks(TranslationPipeline)

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
