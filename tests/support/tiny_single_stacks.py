"""Tiny encoders and decoders with random weights, and the naive Transformer's stack of each: what their tests share."""

from __future__ import annotations

from typing import Any, cast

import torch
import transformers
from naive_transformer import Array, NaiveTransformer
from tiny_vanilla import SHARING, make_config, randomize
from transformers.utils.generic import ModelOutput

import vanilla_transformer as package

# By which Auto class each single-stack model is found.
SINGLE_STACKS: dict[str, Any] = {
    "VanillaTransformerEncoderModel": transformers.AutoModelForTextEncoding,
    "VanillaTransformerForSequenceClassification": transformers.AutoModelForSequenceClassification,
    "VanillaTransformerForTokenClassification": transformers.AutoModelForTokenClassification,
    "VanillaTransformerForQuestionAnswering": transformers.AutoModelForQuestionAnswering,
    "VanillaTransformerDecoderModel": transformers.AutoModel,
    "VanillaTransformerForCausalLM": transformers.AutoModelForCausalLM,
}
DECODERS = ("VanillaTransformerDecoderModel", "VanillaTransformerForCausalLM")
ENCODERS = tuple(name for name in SINGLE_STACKS if name not in DECODERS)
TRAINABLE = tuple(name for name in SINGLE_STACKS if name.startswith("VanillaTransformerFor"))


def make_single_stack(name: str, attention: str = "sdpa", seed: int = 0, **changes: Any) -> Any:
    """A single-stack model in evaluation mode, every parameter of which is random."""
    model = getattr(package, name)._from_config(make_config(**changes), attn_implementation=attention)
    randomize(model, seed)
    return model.eval()


def run(model: Any, **inputs: Any) -> Any:
    with torch.no_grad():
        return model(**inputs)


def main_output(outputs: ModelOutput) -> torch.Tensor:
    """The logits, or the states where there is no head."""
    return cast(torch.Tensor, next(value for name, value in outputs.items() if name != "loss"))


class NaiveStack(NaiveTransformer):
    """The naive Transformer without one of its sides."""

    def __init__(self, model: Any) -> None:
        state: dict[str, torch.Tensor] = {}
        for name, tensor in model.state_dict().items():
            state[name if name.startswith(("model.", "lm_head.")) else f"model.{name}"] = tensor
        table = model.get_input_embeddings().weight
        # The side that is not there has no table either.
        absent = {f"model.{side}.embed_tokens.weight": table for side in ("encoder", "decoder")}
        super().__init__(model.config, {"lm_head.weight": table, **absent, **state})

    def next_token_logits(self, tokens: list[int]) -> Array:
        """Scores (length, vocabulary) of what follows each token."""
        return self.project(self.decode(tokens, None))


# What the naive Transformer is compared with, from the paper's setting to others'.
OPTIONS: dict[str, dict[str, Any]] = {
    "paper": {},
    "pre-LN": {"normalize_before": True, "d_k": 6, "d_v": 3, **SHARING["separate-untied"], "lm_head_bias": True},
    "marian": {"position_embedding_type": "sinusoidal_concatenated", "activation_function": "silu", "ffn_bias": False},
}
OPTIONS["learned"] = {"position_embedding_type": "learned", "position_offset": 2, "normalize_embedding": True}
OPTIONS["learned"] |= {"attention_bias": True, **SHARING["shared-untied"]}
