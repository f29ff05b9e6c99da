"""A tiny BART with random weights and a word-level tokenizer: to batch translation, a model like any other."""

import random
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(40)]
BROKEN_WORD = "two\nlines"
MAX_TOKENS = 24


def make_word_tokenizer(words: list[str], **kwargs: Any) -> PreTrainedTokenizerFast:
    """Splits at white space, appends </s>; four special tokens come before the words."""
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    vocabulary = {word: index for index, word in enumerate([*names.values(), *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{**names, **kwargs})


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Takes up to `MAX_TOKENS` tokens."""
    return make_word_tokenizer([*WORDS, BROKEN_WORD], model_max_length=MAX_TOKENS)


def make_model(seed: int = 0) -> BartForConditionalGeneration:
    """Weights so large that different sources get different translations; dropout so large that training mode shows."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32}
    sizes |= dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes["vocab_size"] = len(make_tokenizer())
    config = BartConfig(**sizes, dropout=0.5, init_std=0.7, forced_eos_token_id=None)
    model = BartForConditionalGeneration(config)
    model.final_logits_bias[:, -1] = -1e4  # the broken word comes only when it is forced
    model.generation_config.max_length = None
    model.generation_config.max_new_tokens = 8
    return model.eval()


def random_pairs(count: int, *, seed: int = 0) -> tuple[list[str], list[str]]:
    """Sources and targets of up to 12 words."""
    generator = random.Random(seed)
    texts = [" ".join(generator.choices(WORDS, k=generator.randint(1, 12))) for _ in range(2 * count)]
    return texts[:count], texts[count:]
