"""The model's equations once more, one value after the other: each has a name, and a note of what it was computed from.

`RecordingEncoder` and `RecordingDecoder` compute with the model's own modules, in the order of the paper's section 3.
What they return are all values between tokens and logits, by names such as `decoder.0.cross.weights`. Their `steps` say
of each name by which operation, from which values and weights it came: the page explains numbers with nothing else, so
that it knows nothing of pre-LN, biases or widths.

Shapes: B  prefixes, S  source length, T  target length, L  either, D  d_model, H  heads, K  number of keys.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from vanilla_transformer.model.generation_vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.model.positions_vanilla_transformer import count_tokens_before

# operation: one of OPERATIONS; of: names of values; and what else the operation needs to know.
Step = dict[str, Any]
OPERATIONS = ("embedding", "positions", "sum", "linear", "scores", "softmax", "context", "norm", "activation")


class Recorder:
    """Computes values from values that it has computed before, all of them known by their names.

    Modules go by their paths within the model, since whoever traces it may put others in their place.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values: dict[str, torch.Tensor] = {}
        self.steps: dict[str, Step] = {}

    def keep(self, name: str, value: torch.Tensor, operation: str, *of: str, **details: Any) -> str:
        """Remembers a value and where it is from, and returns its name."""
        self.values[name] = value
        self.steps[name] = {"operation": operation, "of": list(of), **details}
        return name

    def add(self, name: str, *of: str) -> str:
        """Adds two values of one shape."""
        return self.keep(name, self.values[of[0]] + self.values[of[1]], "sum", *of)

    def apply(self, name: str, operation: str, of: str, path: str, **details: Any) -> str:
        """Applies a module that may have a bias: a linear map or a norm."""
        module = self.model.get_submodule(path)
        bias = None if getattr(module, "bias", None) is None else f"{path}.bias"
        value = module(self.values[of])
        return self.keep(name, value, operation, of, weight=f"{path}.weight", bias=bias, **details)

    def linear(self, name: str, of: str, path: str) -> str:
        """(B, L, D) times a matrix, plus the bias where there is one."""
        return self.apply(name, "linear", of, path)

    def norm(self, name: str, of: str, path: str) -> str:
        """(B, L, D) normalised; where the model has no norm, the value that is there already."""
        module: Any = self.model.get_submodule(path)
        return of if isinstance(module, nn.Identity) else self.apply(name, "norm", of, path, eps=module.eps)

    def attend(self, name: str, states: str, source: str, path: str, allowed: torch.Tensor, mask: str) -> str:
        """Multi-head attention (3.2) from states to a source; `allowed` (1, 1, 1 or L, K) is true where it may look."""
        module: Any = self.model.get_submodule(path)
        heads, scale = module.num_heads, module.scaling
        query = self.linear(f"{name}.query", states, f"{path}.q_proj")
        key = self.linear(f"{name}.key", source, f"{path}.k_proj")
        value = self.linear(f"{name}.value", source, f"{path}.v_proj")
        q, k, v = (self.values[each].unflatten(-1, (heads, -1)).transpose(1, 2) for each in (query, key, value))
        products = torch.matmul(q, k.transpose(2, 3)) * scale
        scores = self.keep(f"{name}.scores", products, "scores", query, key, heads=heads, scale=scale)
        weights = products.masked_fill(~allowed, torch.finfo(products.dtype).min).softmax(dim=-1)
        kept = self.keep(f"{name}.weights", weights, "softmax", scores, mask=mask)
        context = torch.matmul(weights, v).transpose(1, 2).flatten(2)
        joined = self.keep(f"{name}.context", context, "context", kept, value, heads=heads)
        return self.linear(f"{name}.output", joined, f"{path}.out_proj")

    def feed_forward(self, name: str, states: str, path: str, function: str) -> str:
        """Equation 2 (3.3)."""
        inner = self.linear(f"{name}.inner", states, f"{path}.fc1")
        activated = cast(Any, self.model.get_submodule(path)).activation_fn(self.values[inner])
        hidden = self.keep(f"{name}.hidden", activated, "activation", inner, function=function)
        return self.linear(f"{name}.output", hidden, f"{path}.fc2")


class RecordingStack(nn.Module):
    """What both stacks share: embeddings (3.4), positions (3.5), and residual connections (3.1)."""

    side: str

    def __init__(self, model: VanillaTransformerForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        self.path = f"model.{self.side}"
        self.stack: Any = model.get_submodule(self.path)
        self.positions = _describe_positions(self.stack.embed_positions, f"{self.path}.embed_positions")
        self.steps: dict[str, Step] = {}

    def begin(self, input_ids: torch.Tensor, token_indices: torch.Tensor) -> tuple[Recorder, str]:
        """The sum of embeddings and positions of ids (B, L), in a new recorder."""
        recorder, side, stack = Recorder(self.model), self.side, cast(Any, self.model.get_submodule(self.path))
        embedded = stack.embed_tokens(input_ids) * stack.embed_scale
        details = {"weight": f"{self.path}.embed_tokens.weight", "scale": stack.embed_scale}
        found = recorder.keep(f"{side}.embedding", embedded, "embedding", **details)
        # Each sentence has its own row, also of what is the same for all.
        positions = stack.embed_positions(token_indices, input_ids.shape[1]) + torch.zeros_like(embedded)
        encoded = recorder.keep(f"{side}.positions", positions, "positions", **self.positions)
        summed = recorder.add(f"{side}.sum", found, encoded)
        return recorder, recorder.norm(f"{side}.embedding_norm", summed, f"{self.path}.layernorm_embedding")

    def residual(
        self, recorder: Recorder, name: str, states: str, sublayer: Callable[[str, str], str], path: str
    ) -> str:
        """LayerNorm(x + Sublayer(x)), or x + Sublayer(LayerNorm(x)); the sublayer gets its name and its input's."""
        if self.model.config.normalize_before:
            return recorder.add(f"{name}.sum", states, sublayer(name, recorder.norm(f"{name}.norm", states, path)))
        return recorder.norm(f"{name}.norm", recorder.add(f"{name}.sum", states, sublayer(name, states)), path)

    def attention(
        self, recorder: Recorder, name: str, states: str, path: str, allowed: torch.Tensor, mask: str, source: str = ""
    ) -> str:
        """Attention with its residual connection; to the states themselves, unless a source is named."""

        def attend(name: str, of: str) -> str:
            return recorder.attend(name, of, source or of, path, allowed, mask)

        return self.residual(recorder, name, states, attend, f"{path}_layer_norm")

    def feed_forward(self, recorder: Recorder, name: str, states: str, path: str) -> str:
        """The feed-forward network with its residual connection."""

        def feed_forward(name: str, of: str) -> str:
            return recorder.feed_forward(name, of, path, self.model.config.activation_function)

        return self.residual(recorder, name, states, feed_forward, f"{path}.final_layer_norm")

    def end(self, recorder: Recorder, states: str) -> str:
        """The stack's last norm, where there is one."""
        self.steps = recorder.steps
        return recorder.norm(f"{self.side}.norm", states, f"{self.path}.layer_norm")


class RecordingEncoder(RecordingStack):
    """The encoder: ids (1, S) and their mask to all its values. The decoder reads the last one, named `output`."""

    side = "encoder"
    output: str

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Maps ids and mask, both (1, S), 1 at tokens and 0 where nobody may look, to values (1, S, ...)."""
        indices = count_tokens_before(attention_mask, input_ids.shape[1], 0, input_ids.device)
        recorder, states = self.begin(input_ids, indices)
        allowed = attention_mask.bool()[:, None, None]
        for number in range(self.model.config.encoder_layers):
            name, path = f"encoder.{number}", f"{self.path}.layers.{number}"
            states = self.attention(recorder, f"{name}.self", states, f"{path}.self_attn", allowed, "source")
            states = self.feed_forward(recorder, f"{name}.ffn", states, path)
        self.output = self.end(recorder, states)
        return recorder.values


class RecordingDecoder(RecordingStack):
    """The decoder with the output layer: whole prefixes (B, T) of one sentence to all their values, and `logits`."""

    side = "decoder"

    def __init__(self, model: VanillaTransformerForConditionalGeneration, encoder_output: str) -> None:
        super().__init__(model)
        self.encoder_output = encoder_output

    def forward(
        self, input_ids: torch.Tensor, encoder_attention_mask: torch.Tensor, encoder_hidden_states: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Maps ids (B, T), the source's mask (1, S) and the encoder's output (1, S, D) to values (B, T, ...)."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        recorder, states = self.begin(input_ids, places[None])
        source = self.encoder_output
        recorder.values[source] = encoder_hidden_states
        causal = (places[None] <= places[:, None])[None, None]
        allowed = encoder_attention_mask.bool()[:, None, None]
        for number in range(self.model.config.decoder_layers):
            name, path = f"decoder.{number}", f"{self.path}.layers.{number}"
            states = self.attention(recorder, f"{name}.self", states, f"{path}.self_attn", causal, "causal")
            cross = f"{path}.encoder_attn"
            states = self.attention(recorder, f"{name}.cross", states, cross, allowed, "source", source)
            states = self.feed_forward(recorder, f"{name}.ffn", states, path)
        recorder.linear("logits", self.end(recorder, states), "lm_head")
        del recorder.values[source]
        return recorder.values


def _describe_positions(module: Any, path: str) -> Step:
    """Learned vectors by the name of their table; sinusoids by what each dimension turns by from token to token."""
    if isinstance(module, nn.Embedding):
        return {"weight": f"{path}.weight", "offset": cast(Any, module).offset}
    first, second, third, quarter = module.parts.double()
    rates = 2 * torch.pi * (first + second + third)
    return {"offset": module.offset, "rates": rates.tolist(), "is_cosine": (quarter > 0).tolist()}
