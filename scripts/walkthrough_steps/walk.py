"""What all steps of the walk share."""

import random
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM

from vanilla_transformer import VanillaTransformerConfig

from .printing import Printer
from .task import EXAMPLES, Vocabulary, make_corpus

HELD_OUT_PAIRS = 100


class Walk:
    """What all steps share: the task, the model, a batch, and what the untrained model computes of it."""

    def __init__(self, out: Printer, seed: int) -> None:
        self.out = out
        self.seed = seed
        self.corpus = make_corpus()
        self.vocabulary = Vocabulary(self.corpus)
        shuffled = [pair for pair in self.corpus if pair not in EXAMPLES]
        random.Random(seed).shuffle(shuffled)
        self.held_out, self.training = shuffled[:HELD_OUT_PAIRS], EXAMPLES + shuffled[HELD_OUT_PAIRS:]

        self.config = VanillaTransformerConfig(
            vocab_size=len(self.vocabulary),
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            dropout=0.0,
            label_smoothing=0.1,
            max_position_embeddings=32,
        )
        # "eager" attention is equation 1 as it stands, and returns its weights.
        self.model: Any = AutoModelForSeq2SeqLM.from_config(self.config, attn_implementation="eager").eval()
        self.encoder, self.decoder = self.model.model.encoder, self.model.model.decoder

        self.batch = self.vocabulary.make_batch(EXAMPLES)
        # (B, S). What is computed at padding is never read, and there the model differs from what is done by hand: it
        # does not number padding, lest padding in front of a sentence change anything.
        self.is_word = self.batch["attention_mask"].bool()
        self.source_words = [self.vocabulary.decode(ids) for ids in self.batch["input_ids"]]
        ends = [["</s>"] + ["-"] * int((labels == -100).sum()) for labels in self.batch["labels"]]
        self.label_words = [target + end for (_, target), end in zip(EXAMPLES, ends, strict=True)]
        self.decoder_input_ids = self.model.prepare_decoder_input_ids_from_labels(self.batch["labels"])  # (B, T)
        self.fed_words = [self.vocabulary.decode(ids) for ids in self.decoder_input_ids]
        with torch.no_grad():
            self.untrained = self.model(**self.batch, output_attentions=True, output_hidden_states=True)

    def first_source(self) -> dict[str, torch.Tensor]:
        """The first source sentence alone: `input_ids` and `attention_mask`, (1, S)."""
        return {name: self.batch[name][:1] for name in ("input_ids", "attention_mask")}

    def list_best(self, probabilities: torch.Tensor, count: int = 3) -> str:
        """The most probable words of (V,), with their probabilities."""
        best = probabilities.topk(count)
        words = self.vocabulary.decode(best.indices)
        return "   ".join(f"{word} {p:.3f}" for word, p in zip(words, best.values.tolist(), strict=True))
