"""What the halves are for: by its config.json, which of them a folder holds, and the task it is used for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from .model.configuration_vanilla_transformer import VanillaTransformerConfig


@dataclass(frozen=True)
class SingleStack:
    """A kind of model that is one stack of the Transformer.

    Attributes:
        name: A short name.
        side: Which stack.
        class_name: What the name of its class ends with.
        pipeline: Its task, as the Hub calls it, and `pipeline()` where that knows it.
        auto_class: What loads it.
        has_labels: Whether it has a head that knows labels.
        writes: Whether it writes texts.
    """

    name: str
    side: Literal["encoder", "decoder"]
    class_name: str
    pipeline: str
    auto_class: str
    has_labels: bool = False
    writes: bool = False


SINGLE_STACKS = (
    SingleStack("encoder", "encoder", "EncoderModel", "feature-extraction", "AutoModelForTextEncoding"),
    SingleStack(
        "text classifier",
        "encoder",
        "ForSequenceClassification",
        "text-classification",
        "AutoModelForSequenceClassification",
        has_labels=True,
    ),
    SingleStack(
        "token classifier",
        "encoder",
        "ForTokenClassification",
        "token-classification",
        "AutoModelForTokenClassification",
        has_labels=True,
    ),
    SingleStack("reader", "encoder", "ForQuestionAnswering", "question-answering", "AutoModelForQuestionAnswering"),
    SingleStack("decoder", "decoder", "DecoderModel", "feature-extraction", "AutoModel"),
    SingleStack("language model", "decoder", "ForCausalLM", "text-generation", "AutoModelForCausalLM", writes=True),
)


def find_single_stack(settings: Mapping[str, Any]) -> SingleStack | None:
    """Which half a configuration describes.

    Args:
        settings: What config.json holds.

    Returns:
        The half that `architectures` names, the stack without a head if that names none; `None` for a whole
        Transformer and for the library's own models.
    """
    is_own = settings.get("model_type") == VanillaTransformerConfig.model_type
    if not is_own or settings.get("is_encoder_decoder", True):
        return None
    side = "decoder" if settings.get("is_decoder") else "encoder"
    plain, *others = (half for half in SINGLE_STACKS if half.side == side)
    names = settings.get("architectures")
    named = str(names[0]) if isinstance(names, list) and names else ""
    return next((half for half in others if named.endswith(half.class_name)), plain)
