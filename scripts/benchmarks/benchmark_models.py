"""Models of equal sizes for the benchmark scripts: this package's, and others that a user may choose instead.

All have the same width, depth, heads, inner width, vocabulary and activation, tied embeddings and random weights. What
remains different is what makes them different models: BART and T5 have other positions and norms, and this
package's model has no bias in its attention projections, as in the paper. MarianMT alone is the very same function,
so that it can be given the same weights; see `vanilla_transformer.conversion.systems.marian.to_marian`.

Shapes: B  sentences, N  beams, R = B * N  rows, S  source length, T  target length, D  d_model, V  vocabulary.
"""

import importlib.util
import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    FSMTConfig,
    FSMTForConditionalGeneration,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import Seq2SeqLMOutput
from transformers.models.t5.modeling_t5 import T5Attention, T5DenseActDense

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.export.ctranslate2 import export_ctranslate2
from vanilla_transformer.export.ctranslate2_model import CTranslate2Model
from vanilla_transformer.model.loss_vanilla_transformer import shift_tokens_right
from vanilla_transformer.model.positions_vanilla_transformer import interleaved_sinusoids

START, PAD, END, UNKNOWN = 0, 1, 2, 3
SPECIAL_TOKENS = 4
MAX_POSITIONS = 1024


@dataclass(frozen=True)
class Size:
    """The size of a model; encoder and decoder have as many layers each."""

    d_model: int
    ffn_dim: int
    layers: int
    heads: int
    vocab_size: int
    dropout: float = 0.1


SIZES = {
    "tiny": Size(d_model=32, ffn_dim=64, layers=2, heads=4, vocab_size=320),
    "small": Size(d_model=256, ffn_dim=1024, layers=3, heads=4, vocab_size=8000),
    "base": Size(d_model=512, ffn_dim=2048, layers=6, heads=8, vocab_size=37000),
    "big": Size(d_model=1024, ffn_dim=4096, layers=6, heads=16, vocab_size=37000),
}


def shared_settings(size: Size) -> dict[str, Any]:
    """The configuration in the names that all of the library's models but T5 share."""
    stacks = ("encoder", "decoder")
    return {
        "d_model": size.d_model,
        **{f"{stack}_layers": size.layers for stack in stacks},
        **{f"{stack}_attention_heads": size.heads for stack in stacks},
        **{f"{stack}_ffn_dim": size.ffn_dim for stack in stacks},
        "dropout": size.dropout,
        "max_position_embeddings": MAX_POSITIONS,
        "scale_embedding": True,
        "tie_word_embeddings": True,
        "activation_function": "relu",
        "bos_token_id": START,
        "pad_token_id": PAD,
        "eos_token_id": END,
        "decoder_start_token_id": START,
    }


def make_ours(size: Size) -> Any:
    """This package's model, as its configuration makes it by default."""
    config = VanillaTransformerConfig(vocab_size=size.vocab_size, **shared_settings(size))
    return VanillaTransformerForConditionalGeneration(config)


def make_marian(size: Size) -> Any:
    """MarianMT, with weights of its own."""
    return MarianMTModel(MarianConfig(vocab_size=size.vocab_size, forced_eos_token_id=None, **shared_settings(size)))


def make_fsmt(size: Size) -> Any:
    """FSMT, which has two vocabularies of the same size."""
    vocabularies: dict[str, Any] = {"src_vocab_size": size.vocab_size, "tgt_vocab_size": size.vocab_size}
    return FSMTForConditionalGeneration(
        FSMTConfig(langs=["en", "de"], forced_eos_token_id=None, **vocabularies, **shared_settings(size))
    )


def make_bart(size: Size) -> Any:
    """BART's architecture: learned positions and normalised embeddings."""
    return BartForConditionalGeneration(
        BartConfig(vocab_size=size.vocab_size, forced_eos_token_id=None, **shared_settings(size))
    )


def make_t5(size: Size) -> Any:
    """T5's architecture: relative positions and norms before the sub-layers."""
    config = T5Config(
        vocab_size=size.vocab_size,
        d_model=size.d_model,
        d_kv=size.d_model // size.heads,
        d_ff=size.ffn_dim,
        num_layers=size.layers,
        num_decoder_layers=size.layers,
        num_heads=size.heads,
        dropout_rate=size.dropout,
        feed_forward_proj="relu",
        pad_token_id=PAD,
        eos_token_id=END,
    )
    config.decoder_start_token_id = START
    return drop_outputs_only(T5ForConditionalGeneration(config))


def drop_outputs_only(model: Any) -> Any:
    """Takes dropout from attention weights and from within feed-forward networks, where the other models have none."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention | T5Attention):
            module.dropout = 0.0
        elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer | T5DenseActDense):
            module.dropout.p = 0.0
    return model


class TorchTransformer(nn.Module):
    """`torch.nn.Transformer` with the least that a translator needs besides: embeddings, positions and a search.

    It has no cache, so each step decodes the whole target so far, as those do who use it; the source is encoded once.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocab_size, size.d_model)
        nn.init.normal_(self.embed_tokens.weight, std=size.d_model**-0.5)
        positions = torch.arange(MAX_POSITIONS, dtype=torch.float64)
        self.register_buffer("positions", interleaved_sinusoids(positions, size.d_model).float())
        self.positions: torch.Tensor
        self.dropout = nn.Dropout(size.dropout)
        self.transformer = nn.Transformer(
            d_model=size.d_model,
            nhead=size.heads,
            num_encoder_layers=size.layers,
            num_decoder_layers=size.layers,
            dim_feedforward=size.ffn_dim,
            dropout=size.dropout,
            batch_first=True,
        )
        drop_outputs_only(self.transformer)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Maps (rows, L) to (rows, L, D)."""
        scale = math.sqrt(self.embed_tokens.embedding_dim)
        return self.dropout(self.embed_tokens(ids) * scale + self.positions[: ids.shape[1]])

    def encode(self, input_ids: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
        """Maps (B, S) to (B, S, D)."""
        with warnings.catch_warnings():
            # In evaluation mode torch leaves out the padding, and says that how it does so may change.
            warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
            return self.transformer.encoder(self.embed(input_ids), src_key_padding_mask=is_padding)

    def decode(self, ids: torch.Tensor, encoded: torch.Tensor, is_padding: torch.Tensor) -> torch.Tensor:
        """Maps targets (rows, T) and encoded sources (rows, S, D) to hidden states (rows, T, D)."""
        future = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(diagonal=1)
        return self.transformer.decoder(
            self.embed(ids), encoded, tgt_mask=future, tgt_is_causal=True, memory_key_padding_mask=is_padding
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        decoder_input_ids: torch.Tensor,
        labels: torch.Tensor,
    ) -> Seq2SeqLMOutput:
        """Returns logits (B, T, V) and the loss over the labels (B, T) other than -100, as the library's models do."""
        is_padding = attention_mask == 0
        states = self.decode(decoder_input_ids, self.encode(input_ids, is_padding), is_padding)
        logits: Any = nn.functional.linear(states, self.embed_tokens.weight)
        loss: Any = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Seq2SeqLMOutput(loss=loss, logits=logits)

    @torch.no_grad()
    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, num_beams: int, max_new_tokens: int
    ) -> torch.Tensor:
        """Returns the most probable sequence that beam search finds, all of one length: (B, 1 + max_new_tokens)."""
        num_sentences = input_ids.shape[0]
        is_padding = attention_mask == 0
        encoded = self.encode(input_ids, is_padding).repeat_interleave(num_beams, dim=0)
        is_padding = is_padding.repeat_interleave(num_beams, dim=0)
        ids = torch.full((num_sentences * num_beams, 1), START, device=input_ids.device)
        scores = torch.full((num_sentences, num_beams), -1e9, device=input_ids.device)
        scores[:, 0] = 0.0  # all beams are the same at first
        first_rows = torch.arange(0, len(ids), num_beams, device=input_ids.device)[:, None]
        for _ in range(max_new_tokens):
            states = self.decode(ids, encoded, is_padding)[:, -1]
            logits = nn.functional.linear(states, self.embed_tokens.weight).float()
            total = scores.view(-1, 1) + logits.log_softmax(dim=-1)
            scores, best = total.view(num_sentences, -1).topk(num_beams)
            rows = (first_rows + best // logits.shape[1]).flatten()
            ids = torch.cat([ids[rows], (best % logits.shape[1]).view(-1, 1)], dim=1)
        return ids[::num_beams]


MODELS: dict[str, Callable[[Size], Any]] = {
    "ours": make_ours,
    "MarianMT": make_marian,
    "FSMT": make_fsmt,
    "BART": make_bart,
    "T5": make_t5,
    "torch.nn.Transformer": TorchTransformer,
}


def set_search(model: Any, *, ends: bool, length_penalty: float = 1.0, is_static: bool = False) -> None:
    """Gives a model of the library the same settings as all others, for `generate`.

    None of this package's own rules apply then: there is no `length_penalty_type`, and whoever calls `generate` gives
    the number of new tokens.

    Args:
        model: One of `MODELS`, or another encoder-decoder; the special tokens are its own.
        ends: Whether the end symbol ends a translation; otherwise it is a token like any other.
        length_penalty: Of beam search.
        is_static: Whether the search keeps its state in static memory.
    """
    config = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.decoder_start_token_id,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id if ends else None,
        decoder_start_token_id=config.decoder_start_token_id,
        length_penalty=length_penalty,
        cache_implementation="static" if is_static else None,
    )


def make_targets(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arguments that tell a model its target (B, T), in which -100 is padding."""
    # Given rather than left to the model: FSMT would take the source for the target's input.
    return {"decoder_input_ids": shift_tokens_right(labels, PAD, START), "labels": labels}


# The same weights elsewhere (for MarianMT see `to_marian` in vanilla_transformer/conversion/systems/marian.py)


def list_compute_types(device: str) -> set[str]:
    """What CTranslate2 can compute in on a device; nothing if it is not installed or cannot use it."""
    if importlib.util.find_spec("ctranslate2") is None:
        return set()
    import ctranslate2  # type: ignore[import-not-found, import-untyped, unused-ignore]

    kind = device.partition(":")[0]
    if kind == "cuda" and not ctranslate2.get_cuda_device_count():
        return set()
    return set(ctranslate2.get_supported_compute_types(kind))


def make_for_ctranslate2(ours: VanillaTransformerForConditionalGeneration, compute_type: str, device: str) -> Any:
    """The same model in CTranslate2, as `--engine ctranslate2` has it compute, with as many threads as torch.

    Args:
        ours: The model.
        compute_type: `"float32"`, `"int8"` and so on.
        device: cpu or cuda.

    Returns:
        A `CTranslate2Model`.
    """
    with tempfile.TemporaryDirectory() as folder:
        export_ctranslate2(ours, folder)
        return CTranslate2Model(folder, device=device, compute_type=compute_type)
