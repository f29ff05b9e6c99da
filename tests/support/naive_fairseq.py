"""fairseq's `transformer`, written naively from its documentation, and checkpoints in its layout: the tests' oracle.

One sentence at a time, without padding, in float64, from weights by the names that fairseq gives them.

Shapes: S and T are the lengths of a sentence's sides, D the width, V the target vocabulary.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from sister_systems import RandomWeights, Stack, linear, norm, sinusoids
from torch import Tensor

PAD, EOS, UNK = 1, 2, 3
NUM_SPECIAL = 4

SETTINGS: dict[str, Any] = {
    **{f"{side}_{name}": False for side in ("encoder", "decoder") for name in ("normalize_before", "learned_pos")},
    **dict.fromkeys(("share_all_embeddings", "share_decoder_input_output_embed"), False),
    **dict.fromkeys(("no_scale_embedding", "layernorm_embedding"), False),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), 20),
}
SETTINGS |= {"arch": "transformer", "task": "translation", "source_lang": "de", "target_lang": "en"}
SETTINGS |= {"encoder_embed_dim": 8, "encoder_ffn_embed_dim": 12, "encoder_layers": 2, "encoder_attention_heads": 2}
SETTINGS |= {"decoder_embed_dim": 8, "decoder_ffn_embed_dim": 10, "decoder_layers": 1, "decoder_attention_heads": 4}
SETTINGS |= {"activation_fn": "relu", "dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.3}
WORDS = ["ein", "au@@", "to", "fä@@", "hrt", "das", ".", "sch@@", "nell", "er"]
TARGET_WORDS = ["a", "car", "dri@@", "ves", "fast@@", "er", "the", ".", "madeupword0000"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_accurate": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "tanh": torch.tanh,
    "linear": lambda x: x,
    "relu_squared": lambda x: x.clamp(min=0) ** 2,
}


def make_stacks(settings: Mapping[str, Any], weights: Any) -> dict[str, Stack]:
    """Encoder and decoder; there is a norm at their end where the checkpoint has one, and in new ones with pre-norm."""
    projections, activation = ("q_proj", "k_proj", "v_proj", "out_proj"), ACTIVATIONS.get(settings["activation_fn"])
    same: dict[str, Any] = {"projections": projections, "feed_forward": ("fc1", "fc2"), "activation": activation}
    stacks = {}
    for side, attentions in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "encoder_attn"])):
        names: dict[str, Any] = {"norms": [f"{name}_layer_norm" for name in (*attentions, "final")]}
        names |= {"attentions": attentions, "pre_norm": settings["encoder_normalize_before"]}
        is_last = f"{side}.layer_norm.weight" in weights if weights else names["pre_norm"]
        names["last_norm"] = f"{side}.layer_norm" if is_last else None
        names |= {"layers": settings[f"{side}_layers"], "heads": settings[f"{side}_attention_heads"]}
        stacks[side] = Stack(weights, f"{side}.layers", **names, **same)
    return stacks


def make_weights(settings: Mapping[str, Any], source_size: int, target_size: int, seed: int = 0) -> dict[str, Tensor]:
    width = settings["encoder_embed_dim"]
    weights = RandomWeights(width, seed)
    for side, stack in make_stacks(settings, weights).items():
        stack.draw(settings[f"{side}_ffn_embed_dim"])
        weights[f"{side}.embed_tokens.weight"] = weights.draw(source_size if side == "encoder" else target_size, width)
        if settings["encoder_learned_pos"]:
            rows = settings["max_source_positions"] + PAD + 1
            weights[f"{side}.embed_positions.weight"] = weights.draw(rows, width)
        if settings["layernorm_embedding"]:
            weights.add_norms(f"{side}.layernorm_embedding")
    weights["decoder.output_projection.weight"] = weights.draw(target_size, width)
    if settings["share_all_embeddings"]:
        weights["decoder.embed_tokens.weight"] = weights["encoder.embed_tokens.weight"]
    if settings["share_all_embeddings"] or settings["share_decoder_input_output_embed"]:
        weights["decoder.output_projection.weight"] = weights["decoder.embed_tokens.weight"]
    buffers = [f"{side}.version" for side in ("encoder", "decoder")]
    if not settings["encoder_learned_pos"]:
        buffers += [f"{side}.embed_positions._float_tensor" for side in ("encoder", "decoder")]
    return {**weights, **{name: torch.full((1,), 3.0) for name in buffers}}


class NaiveFairseq:
    """Computes what fairseq computes from weights and settings."""

    def __init__(self, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        self.settings, self.weights = settings, weights
        self.stacks = make_stacks(settings, weights)

    def logits(self, source: list[int], target: list[int]) -> Tensor:
        """Scores (T, V) of the token behind each one of the target's."""
        return self.decode(target, self.encode(source))

    def encode(self, source: list[int]) -> Tensor:
        return self.stacks["encoder"].run(self.embed("encoder", source))

    def decode(self, target: list[int], memory: Tensor) -> Tensor:
        """Scores (T, V), given the encoder's output (S, D)."""
        states = self.stacks["decoder"].run(self.embed("decoder", target), memory)
        return linear(self.weights, "decoder.output_projection", states)

    def embed(self, side: str, tokens: list[int]) -> Tensor:
        """Embeddings times sqrt(D), plus positions that are counted from the padding's index + 1."""
        width = self.settings["encoder_embed_dim"]
        scale = 1.0 if self.settings["no_scale_embedding"] else math.sqrt(width)
        first, last = PAD + 1, PAD + 1 + len(tokens)
        if self.settings["encoder_learned_pos"]:
            positions = self.weights[f"{side}.embed_positions.weight"][first:last]
        else:
            positions = sinusoids("sinusoidal_tensor2tensor", last, width)[first:]
        x = scale * self.weights[f"{side}.embed_tokens.weight"][tokens].double() + positions
        name = f"{side}.layernorm_embedding"
        return norm(self.weights, name, x, eps=1e-5) if self.settings["layernorm_embedding"] else x

    def translate(self, source: list[int], beam: int, lenpen: float, longest: int) -> list[int]:
        """Searches as fairseq does: a translation is done when as many have ended as there are beams."""
        memory = self.encode(source)
        beams: list[tuple[list[int], float]] = [([EOS], 0.0)]
        ended: list[tuple[float, list[int]]] = []
        for length in range(1, longest + 2):
            candidates = []
            for tokens, score in beams:
                log_probs = self.decode(tokens, memory)[-1].log_softmax(dim=-1)
                for token, log_prob in enumerate(log_probs.tolist()):
                    is_legal = token != PAD and (token == EOS if length > longest else length > 1 or token != EOS)
                    candidates += [([*tokens, token], score + log_prob)] if is_legal else []
            candidates.sort(key=lambda candidate: -candidate[1])
            for tokens, score in candidates[:beam]:
                if tokens[-1] == EOS and len(ended) < beam:
                    ended.append((score / length**lenpen, tokens[1:]))
            beams = [candidate for candidate in candidates[: 2 * beam] if candidate[0][-1] != EOS][:beam]
            if len(ended) == beam or not beams:
                break
        return max(ended)[1]


def write_dictionaries(folder: Path, source: list[str] = WORDS, target: list[str] | None = None) -> None:
    """`dict.de.txt` and `dict.en.txt`, the second one like the first unless told otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    for language, words in (("de", source), ("en", source if target is None else target)):
        lines = [f"{word} {100 - index}" for index, word in enumerate(words)]
        (folder / f"dict.{language}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_checkpoint(
    folder: Path, changes: Mapping[str, Any] | None = None, *, seed: int = 0, generation: Any = None
) -> tuple[Path, NaiveFairseq]:
    """A checkpoint of today's form with its dictionaries, and what it computes."""
    settings = {**SETTINGS, **(changes or {})}
    target = None if settings["share_all_embeddings"] else TARGET_WORDS
    write_dictionaries(folder, target=target)
    weights = make_weights(settings, NUM_SPECIAL + len(WORDS), NUM_SPECIAL + len(target or WORDS), seed)
    task = {"_name": "translation", "source_lang": "de", "target_lang": "en"}
    state = {
        "args": None,
        "cfg": {"model": Namespace(**settings), "task": task, "generation": {"_name": None, **(generation or {})}},
        "model": weights,
        "extra_state": {"val_loss": torch.tensor(2.5)},
    }
    torch.save(state, folder / "checkpoint_best.pt")
    return folder / "checkpoint_best.pt", NaiveFairseq(settings, weights)
