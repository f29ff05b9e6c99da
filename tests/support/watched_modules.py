"""What the modules of a model give and are given, seen through forward hooks: the oracle of the explainer."""

from typing import Any

import torch
from torch import nn

# What a module's result, or the result of what it was given, is called by the explainer.
LAYER = {
    "self_attn.q_proj": "self.query",
    "self_attn.k_proj": "self.key",
    "self_attn.v_proj": "self.value",
    "self_attn.out_proj": "self.output",
    "self_attn_layer_norm": "self.norm",
    "encoder_attn.q_proj": "cross.query",
    "encoder_attn.k_proj": "cross.key",
    "encoder_attn.v_proj": "cross.value",
    "encoder_attn.out_proj": "cross.output",
    "encoder_attn_layer_norm": "cross.norm",
    "fc1": "ffn.inner",
    "fc2": "ffn.output",
    "final_layer_norm": "ffn.norm",
}
# What enters a module.
INPUTS = {"self_attn.out_proj": "self.context", "encoder_attn.out_proj": "cross.context", "fc2": "ffn.hidden"}


def watch(model: Any, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
    """Runs a model, and returns what its modules gave and were given, by the explainer's names."""
    seen: dict[str, torch.Tensor] = {}
    hooks = []

    def listen(module: nn.Module, result: str, given: str | None) -> None:
        def keep(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
            seen[result] = output
            if given:
                seen[given] = arguments[0]

        hooks.append(module.register_forward_hook(keep))

    for side in ("encoder", "decoder"):
        stack = model.get_submodule(f"model.{side}")
        for number, layer in enumerate(stack.layers):
            for path, name in LAYER.items():
                if side == "decoder" or not path.startswith("encoder_attn"):
                    given = INPUTS.get(path)
                    if path.endswith("layer_norm") and not model.config.normalize_before:
                        given = name.replace("norm", "sum")
                    listen(layer.get_submodule(path), f"{side}.{number}.{name}", given and f"{side}.{number}.{given}")
        listen(stack.embed_tokens, f"{side}.embedding", None)
        listen(stack.embed_positions, f"{side}.positions", None)
        is_normed = not isinstance(stack.layernorm_embedding, nn.Identity)
        listen(stack.layernorm_embedding, f"{side}.{'embedding_norm' if is_normed else 'sum'}", f"{side}.sum")
        if not isinstance(stack.layer_norm, nn.Identity):
            listen(stack.layer_norm, f"{side}.norm", None)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True, use_cache=False)
    for hook in hooks:
        hook.remove()
    for name, kind in (("encoder_attentions", "encoder.{}.self"), ("decoder_attentions", "decoder.{}.self")):
        seen |= {f"{kind.format(number)}.weights": each for number, each in enumerate(outputs[name])}
    seen |= {f"decoder.{number}.cross.weights": each for number, each in enumerate(outputs.cross_attentions)}
    for name in [name for name in seen if name.endswith(".weights")]:
        q, k = (seen[name.replace("weights", each)] for each in ("query", "key"))
        q, k = (each.unflatten(-1, (seen[name].shape[1], -1)).transpose(1, 2) for each in (q, k))
        seen[name.replace("weights", "scores")] = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    for side in ("encoder", "decoder"):
        seen[f"{side}.embedding"] *= model.get_submodule(f"model.{side}").embed_scale
    return seen | {"logits": outputs.logits}
