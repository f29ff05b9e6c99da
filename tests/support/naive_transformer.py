"""The Transformer of "Attention Is All You Need", written naively from the paper's equations: the tests' oracle.

Nothing here is fast and nothing is shared with the model: one sentence at a time, one head at a time, one position at a
time, in float64. What the model does with masks and position ids does not exist here: a padded token is simply not
there, and a decoder position looks at the positions up to its own because the loop ends there.

Shapes: a sentence is a list of token ids without padding; `x` and `memory` are (length, d_model) arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]


def softmax(scores: list[float]) -> list[float]:
    """exp(s_i) / sum_j exp(s_j), shifted by the largest score so that nothing overflows."""
    largest = max(scores)
    exponentials = [math.exp(score - largest) for score in scores]
    total = sum(exponentials)
    return [exponential / total for exponential in exponentials]


def scaled_dot_product_attention(query: Array, keys: list[Array], values: list[Array]) -> tuple[Array, list[float]]:
    """Equation 1 for one query (3.2.1): its context (d_v,), and the keys' weights, softmax(q . k_j / sqrt(d_k))."""
    weights = softmax([float(query @ key) / math.sqrt(len(query)) for key in keys])
    context = np.zeros(len(values[0]))
    for weight, value in zip(weights, values, strict=True):
        context += weight * value
    return context, weights


def layer_norm(vector: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Normalise one position to mean 0 and (biased) variance 1, then scale and shift."""
    mean = sum(vector) / len(vector)
    variance = sum((component - mean) ** 2 for component in vector) / len(vector)
    return (vector - mean) / math.sqrt(variance + eps) * weight + bias


def position_encoding(kind: str, position: int, d_model: int) -> Array:
    """One row of a sinusoidal table, element by element (section 3.5 and the two published variants)."""
    half = d_model // 2
    row = np.zeros(d_model)
    for i in range(half):
        if kind == "sinusoidal":
            angle = position / 10000 ** (2 * i / d_model)
            row[2 * i], row[2 * i + 1] = math.sin(angle), math.cos(angle)
        elif kind == "sinusoidal_concatenated":
            angle = position / 10000 ** (2 * i / d_model)
            row[i], row[half + i] = math.sin(angle), math.cos(angle)
        elif kind == "sinusoidal_tensor2tensor":
            angle = position * math.exp(-i * math.log(10000) / (half - 1))
            row[i], row[half + i] = math.sin(angle), math.cos(angle)
        else:
            raise ValueError(f"kind is {kind!r}, which is not a sinusoidal table")
    return row


ACTIVATIONS: dict[str, Callable[[float], float]] = {
    "relu": lambda value: max(0.0, value),
    "gelu": lambda value: value * 0.5 * (1.0 + math.erf(value / math.sqrt(2.0))),
    "silu": lambda value: value / (1.0 + math.exp(-value)),
}


class NaiveTransformer:
    """Evaluates a model from its configuration and its state dict (BART's parameter names).

    Tied matrices are looked up under one name only, by what the configuration says is tied, so weights that are tied
    in name alone give other logits.
    """

    def __init__(self, config: Any, state: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self.state: dict[str, Array] = {
            name: tensor.detach().to(dtype=torch.float64, device="cpu").numpy() for name, tensor in state.items()
        }
        self.d_model: int = config.d_model
        shared = config.share_encoder_decoder_embeddings
        self.embeddings: dict[str, Array] = {
            stack: self.state["model.shared.weight" if shared else f"model.{stack}.embed_tokens.weight"]
            for stack in ("encoder", "decoder")
        }
        self.output_matrix = self.embeddings["decoder"] if config.tie_word_embeddings else self.state["lm_head.weight"]
        # (layer, head) -> one list of weights per target position, of the last sentence decoded.
        self.cross_attention: dict[tuple[int, int], list[list[float]]] = {}

    def logits(self, source: list[int], target: list[int]) -> Array:
        """Next-token scores at every target position, shape (target_length, target vocabulary)."""
        return self.project(self.decode(target, self.encode(source)))

    def encode(self, source: list[int]) -> Array:
        """The encoder's output for one sentence, shape (source_length, d_model)."""
        x = self.embed(source, "encoder")
        for name in (f"model.encoder.layers.{layer}" for layer in range(self.config.encoder_layers)):
            x = self.residual(x, partial(self.attend, f"{name}.self_attn"), f"{name}.self_attn_layer_norm")
            x = self.residual(x, partial(self.feed_forward, name), f"{name}.final_layer_norm")
        return self.normalize_last(x, "encoder")

    def decode(self, target: list[int], memory: Array | None) -> Array:
        """The decoder's output for one sentence, shape (target_length, d_model), `memory` being None for one alone."""
        x = self.embed(target, "decoder")
        for name in (f"model.decoder.layers.{layer}" for layer in range(self.config.decoder_layers)):
            x = self.residual(x, partial(self.attend, f"{name}.self_attn"), f"{name}.self_attn_layer_norm")
            if memory is not None:
                cross_attention = partial(self.attend, f"{name}.encoder_attn", memory=memory)
                x = self.residual(x, cross_attention, f"{name}.encoder_attn_layer_norm")
            x = self.residual(x, partial(self.feed_forward, name), f"{name}.final_layer_norm")
        return self.normalize_last(x, "decoder")

    def attend(self, name: str, x: Array, memory: Array | None = None) -> Array:
        """One attention of a layer, over `x` itself unless there is a memory."""
        _, stack, _, layer, _ = name.split(".")
        heads = getattr(self.config, f"{stack}_attention_heads")
        if memory is None:
            return self.multi_head(x, x, name, heads, causal=stack == "decoder")[0]
        output, weights = self.multi_head(x, memory, name, heads, causal=False)
        self.cross_attention |= {(int(layer), head): rows for head, rows in enumerate(weights)}
        return output

    def project(self, x: Array) -> Array:
        """The output layer (section 3.4), before its softmax."""
        logits = x @ self.output_matrix.T
        return logits + self.state["lm_head.bias"] if self.config.lm_head_bias else logits

    def embed(self, tokens: list[int], stack: str) -> Array:
        """Embeddings times sqrt(d_model) plus positions (sections 3.4 and 3.5)."""
        scale = math.sqrt(self.d_model) if self.config.scale_embedding else 1.0
        table = self.embeddings[stack]
        x = np.stack([scale * table[token] + self.position(index, stack) for index, token in enumerate(tokens)])
        return self.normalize(x, f"model.{stack}.layernorm_embedding") if self.config.normalize_embedding else x

    def position(self, index: int, stack: str) -> Array:
        """What is added to the `index`-th token of a sentence, counted from 0."""
        position = index + self.config.position_offset
        if self.config.position_embedding_type == "learned":
            return self.state[f"model.{stack}.embed_positions.weight"][position]
        return position_encoding(self.config.position_embedding_type, position, self.d_model)

    def residual(self, x: Array, sublayer: Callable[[Array], Array], norm: str) -> Array:
        """LayerNorm(x + Sublayer(x)) as in section 3.1, or x + Sublayer(LayerNorm(x)) with `normalize_before`."""
        if self.config.normalize_before:
            return x + sublayer(self.normalize(x, norm))
        return self.normalize(x + sublayer(x), norm)

    def normalize_last(self, x: Array, stack: str) -> Array:
        """The norm at the end of a stack: with pre-LN unless told otherwise, else only if asked for."""
        wanted = self.config.add_final_layer_norm
        if wanted is None:
            wanted = self.config.normalize_before
        return self.normalize(x, f"model.{stack}.layer_norm") if wanted else x

    def normalize(self, x: Array, name: str) -> Array:
        """Layer normalisation of every position."""
        weight, bias = self.state[f"{name}.weight"], self.state[f"{name}.bias"]
        return np.stack([layer_norm(vector, weight, bias, self.config.layer_norm_eps) for vector in x])

    def linear(self, vector: Array, name: str) -> Array:
        """W x + b for one position; b is absent where the configuration says so."""
        output: Array = self.state[f"{name}.weight"] @ vector
        has_bias = self.config.ffn_bias if name.endswith((".fc1", ".fc2")) else self.config.attention_bias
        return output + self.state[f"{name}.bias"] if has_bias else output

    def multi_head(
        self, x: Array, memory: Array, name: str, heads: int, causal: bool
    ) -> tuple[Array, list[list[list[float]]]]:
        """Section 3.2.2: Concat(head_1, ..., head_h) W_O with head_i = Attention(x W_Q_i, memory W_K_i, memory W_V_i).

        The output is (length of x, d_model), the weights are by head, query and key.
        """
        d_k = self.config.d_k if self.config.d_k is not None else self.d_model // heads
        d_v = self.config.d_v if self.config.d_v is not None else self.d_model // heads
        queries = [self.linear(vector, f"{name}.q_proj") for vector in x]
        keys = [self.linear(vector, f"{name}.k_proj") for vector in memory]
        values = [self.linear(vector, f"{name}.v_proj") for vector in memory]
        weights: list[list[list[float]]] = [[] for _ in range(heads)]
        outputs = []
        for position, query in enumerate(queries):
            visible = position + 1 if causal else len(memory)
            contexts = []
            for head in range(heads):
                of_keys = slice(head * d_k, (head + 1) * d_k)
                of_values = slice(head * d_v, (head + 1) * d_v)
                context, row = scaled_dot_product_attention(
                    query=query[of_keys],
                    keys=[key[of_keys] for key in keys[:visible]],
                    values=[value[of_values] for value in values[:visible]],
                )
                contexts.append(context)
                weights[head].append(row)
            outputs.append(self.linear(np.concatenate(contexts), f"{name}.out_proj"))
        return np.stack(outputs), weights

    def feed_forward(self, name: str, x: Array) -> Array:
        """Equation 2, position by position: max(0, x W1 + b1) W2 + b2, or another activation in the place of max."""
        activation = ACTIVATIONS[self.config.activation_function]
        outputs = []
        for vector in x:
            inner = np.array([activation(float(value)) for value in self.linear(vector, f"{name}.fc1")])
            outputs.append(self.linear(inner, f"{name}.fc2"))
        return np.stack(outputs)
