"""Models of equal sizes for the benchmark scripts: this package's, and others that a user may choose instead.

All have the same width, depth, heads, inner width, vocabulary and activation, tied embeddings and random weights. What
remains different is what makes them different models: BART and T5 have other positions and norms, and this
package's model has no bias in its attention projections, as in the paper. MarianMT alone is the very same function,
so that it can be given the same weights; see `convert_to_marian`.

Shapes: B  sentences, N  beams, R = B * N  rows, S  source length, T  target length, D  d_model, V  vocabulary.
"""

import copy
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

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.loss_vanilla_transformer import shift_tokens_right
from vanilla_transformer.positions_vanilla_transformer import interleaved_sinusoids

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
    return MarianMTModel(
        MarianConfig(vocab_size=size.vocab_size, forced_eos_token_id=None, **shared_settings(size)),
    )


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
    return T5ForConditionalGeneration(config)


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


def set_search(model: Any, *, ends: bool, length_penalty: float = 1.0) -> None:
    """Gives a model of the library the same settings as all others, for `generate`.

    None of this package's own rules apply then: there is no `length_penalty_type`, and whoever calls `generate` gives
    the number of new tokens.

    Args:
        model: One of `MODELS`.
        ends: Whether the end symbol ends a translation; otherwise it is a token like any other.
        length_penalty: Of beam search.
    """
    model.generation_config = GenerationConfig(
        bos_token_id=START,
        pad_token_id=PAD,
        eos_token_id=END if ends else None,
        decoder_start_token_id=START,
        length_penalty=length_penalty,
    )


def make_targets(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arguments that tell a model its target (B, T), in which -100 is padding."""
    # Given rather than left to the model: FSMT would take the source for the target's input.
    return {"decoder_input_ids": shift_tokens_right(labels, PAD, START), "labels": labels}


# The same weights elsewhere


def convert_to_marian(model: VanillaTransformerForConditionalGeneration) -> MarianMTModel:
    """Makes MarianMT the same function as a model of this package.

    The names are the same. Marian has all sines of the positions before all cosines; where the model interleaves them,
    as the paper does, the dimensions of everything between the sub-layers are put in Marian's order: the columns of
    what reads from there (embeddings, queries, keys, values, first feed-forward matrix), the rows of what writes there,
    and the norms. That changes nothing but the order.

    Args:
        model: A model with one vocabulary for everything, norms after the residual connections, sinusoids.

    Returns:
        MarianMT in evaluation mode, with the same dtype, on the same device.

    Raises:
        ValueError: If MarianMT cannot compute what the model does; lists all reasons.
    """
    config = model.config
    check_marian_can(config)
    marian = make_counterpart(config)
    order = torch.arange(config.d_model)
    if config.position_embedding_type == "sinusoidal":
        order = torch.cat([order[0::2], order[1::2]])
    weights = {name: reorder(name, tensor.cpu(), order) for name, tensor in model.state_dict().items()}
    if config.lm_head_bias:
        weights["final_logits_bias"] = weights.pop("lm_head.bias")[None]
    missing, unexpected = marian.load_state_dict(weights, strict=False)
    own = ("_proj.bias", "embed_positions.weight", "final_logits_bias")
    strange = [*unexpected, *(name for name in missing if not name.endswith(own))]
    if strange:
        raise ValueError(f"Weights that only one of the models has: {', '.join(strange)}.")
    for name, parameter in marian.named_parameters():
        if name in missing and name.endswith("_proj.bias"):
            nn.init.zeros_(parameter)
    placed: Any = marian.to(device=model.device, dtype=model.dtype)  # type: ignore[call-arg]
    return placed.eval()


def make_counterpart(config: VanillaTransformerConfig) -> MarianMTModel:
    """MarianMT with the same settings, and weights of its own."""
    names = (
        *("vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim"),
        *("encoder_attention_heads", "decoder_attention_heads", "activation_function", "scale_embedding"),
        *("max_position_embeddings", "bos_token_id", "pad_token_id", "eos_token_id", "decoder_start_token_id"),
        *("dropout", "attention_dropout", "activation_dropout"),
    )
    settings: dict[str, Any] = {name: getattr(config, name) for name in names}
    return MarianMTModel(MarianConfig(**settings, forced_eos_token_id=None))


def check_marian_can(config: VanillaTransformerConfig) -> None:
    """Refuses a configuration that MarianMT has no counterpart of.

    Raises:
        ValueError: Lists all reasons.
    """
    # With another number of heads in each stack, one given size of heads cannot be Marian's in both.
    sizes = {config.d_model // heads for heads in (config.encoder_attention_heads, config.decoder_attention_heads)}
    head_sizes = sizes if len(sizes) == 1 else ()
    wanted: dict[str, tuple[Any, ...]] = {
        "position_embedding_type": ("sinusoidal", "sinusoidal_concatenated"),
        "position_offset": (0,),
        "normalize_before": (False,),
        "normalize_embedding": (False,),
        "layer_norm_eps": (1e-5,),
        "ffn_bias": (True,),
        "share_encoder_decoder_embeddings": (True,),
        "tie_word_embeddings": (True,),
        **dict.fromkeys(("d_k", "d_v"), (None, *head_sizes)),
    }
    reasons = [f"{name} is {getattr(config, name)!r}" for name in wanted if getattr(config, name) not in wanted[name]]
    if reasons:
        raise ValueError(f"MarianMT has no counterpart of this model: {', '.join(reasons)}.")


def reorder(name: str, tensor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Puts those dimensions of a weight that stand for d_model in another order."""
    if name == "lm_head.bias":
        return tensor
    module = name.split(".")[-2]
    if module in ("q_proj", "k_proj", "v_proj", "fc1"):
        return tensor[:, order] if tensor.ndim == 2 else tensor
    if module in ("out_proj", "fc2"):
        return tensor[order]
    return tensor[..., order]  # embeddings, output layer, norms


def has_ctranslate2(device: str) -> bool:
    """Whether CTranslate2 is installed and can use the device."""
    if importlib.util.find_spec("ctranslate2") is None:
        return False
    import ctranslate2  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return not device.startswith("cuda") or bool(ctranslate2.get_cuda_device_count())


class CTranslate2Model:
    """A MarianMT model in CTranslate2, with the number of threads that torch has.

    Args:
        marian: The model.
        compute_type: `"float32"`, `"int8"` and so on.
        device: cpu or cuda.
    """

    def __init__(self, marian: MarianMTModel, compute_type: str, device: str) -> None:
        import ctranslate2
        from ctranslate2.converters.transformers import BartLoader  # type: ignore[import-not-found, import-untyped, unused-ignore]

        marian = copy.deepcopy(marian).float()
        # The loader for BART, of which Marian's is a kind: Marian's own expects the padding at the vocabulary's end.
        marian.config.normalize_before = marian.config.normalize_embedding = False
        spec = BartLoader().get_model_spec(marian)
        tokens = [str(token) for token in range(marian.config.vocab_size)]
        spec.register_source_vocabulary(tokens)
        spec.register_target_vocabulary(tokens)
        names = {"bos_token": START, "eos_token": END, "unk_token": UNKNOWN, "decoder_start_token": START}
        for name, token in names.items():
            setattr(spec.config, name, str(token))
        spec.validate()
        spec.optimize()
        with tempfile.TemporaryDirectory() as folder:
            spec.save(folder)
            self.translator = ctranslate2.Translator(
                folder,
                device=device.split(":")[0],
                compute_type=compute_type,
                intra_threads=torch.get_num_threads(),
            )

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, num_beams: int, max_new_tokens: int
    ) -> torch.Tensor:
        """Returns translations that are all of one length: (B, 1 + max_new_tokens)."""
        sources = [row[keep].tolist() for row, keep in zip(input_ids, attention_mask.bool(), strict=True)]
        found = self.translate(
            sources, num_beams=num_beams, max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens
        )
        return torch.tensor([[START, *tokens] for tokens in found])

    def translate(
        self,
        sources: list[list[int]],
        *,
        num_beams: int,
        max_new_tokens: int,
        min_new_tokens: int = 1,
        batch_size: int = 0,
        length_penalty: float = 1.0,
    ) -> list[list[int]]:
        """Translates ids to ids; with a batch size, CTranslate2 sorts the sources by length itself."""
        results = self.translator.translate_batch(
            [[str(token) for token in source] for source in sources],
            beam_size=num_beams,
            max_decoding_length=max_new_tokens,
            min_decoding_length=min_new_tokens,
            max_batch_size=batch_size,
            length_penalty=length_penalty,
        )
        return [[int(token) for token in result.hypotheses[0]] for result in results]
