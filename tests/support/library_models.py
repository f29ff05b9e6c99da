"""Tiny models of the library with random weights, and tokenizers for them: what the tests of the pipelines share."""

from typing import Any

import torch
import transformers
from tiny_seq2seq import make_word_tokenizer

# No word is inside two others set side by side, so that a stop sequence is found where it is written.
WORDS = ["alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel", "india", "juliet", "kilo", "lima"]
WORDS += ["mike", "oscar", "papa", "quebec"]
PREFIXES = {"translation_en_to_de": "alpha bravo ", "translation_en_to_fr": "golf hotel ", "summarization": "kilo "}
TEXTS = ["alpha delta echo", "papa", "mike lima kilo juliet india", "bravo quebec"]
SIZES: dict[str, Any] = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
SIZES |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}


def make_tokenizer(**kwargs: Any) -> transformers.PreTrainedTokenizerFast:
    return make_word_tokenizer(WORDS, **kwargs)


def settle(model: Any) -> Any:
    """Gives a random model weights so large that different sources lead to different outputs."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "position" not in name:
                parameter.normal_(std=0.6)
    return model.eval()


def make_marian(**kwargs: Any) -> transformers.MarianMTModel:
    config: dict[str, Any] = {"vocab_size": len(WORDS) + 4, "pad_token_id": 1, "eos_token_id": 2}
    config["max_position_embeddings"] = 300
    config |= {"bos_token_id": 0, "decoder_start_token_id": 1, "forced_eos_token_id": None}
    return settle(transformers.MarianMTModel(transformers.MarianConfig(**{**SIZES, **config, **kwargs})))


def make_bart() -> transformers.BartForConditionalGeneration:
    sizes = {**SIZES, "vocab_size": len(WORDS) + 4, "max_position_embeddings": 300}
    config = transformers.BartConfig(**sizes, decoder_start_token_id=2)
    return settle(transformers.BartForConditionalGeneration(config))


def make_t5() -> transformers.T5ForConditionalGeneration:
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, vocab_size=len(WORDS) + 4, pad_token_id=1, eos_token_id=2)
    config.decoder_start_token_id = 1
    config.task_specific_params = {
        task: {"prefix": prefix, "max_length": 12, "num_beams": 3, "early_stopping": True, "unknown": 1}
        for task, prefix in PREFIXES.items()
    }
    model = settle(transformers.T5ForConditionalGeneration(config))
    model.generation_config.decoder_start_token_id = 1
    return model


def make_m2m100(vocab_size: int) -> transformers.M2M100ForConditionalGeneration:
    sizes = {**SIZES, "vocab_size": vocab_size, "max_position_embeddings": 300}
    config = transformers.M2M100Config(**sizes, decoder_start_token_id=2)
    return settle(transformers.M2M100ForConditionalGeneration(config))


def make_fsmt() -> transformers.FSMTForConditionalGeneration:
    sizes: dict[str, Any] = {**SIZES, "src_vocab_size": 20, "tgt_vocab_size": 20, "max_position_embeddings": 300}
    return settle(transformers.FSMTForConditionalGeneration(transformers.FSMTConfig(langs=["en", "de"], **sizes)))


MODELS: dict[str, Any] = {"marian": make_marian, "bart": make_bart, "t5": make_t5}
LANGUAGES = ["eng_Latn", "deu_Latn", "fra_Latn"]


def make_nllb_tokenizer() -> transformers.NllbTokenizer:
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    vocabulary = {piece: index for index, piece in enumerate(["<s>", "<pad>", "</s>", "<unk>", *letters])}
    return transformers.NllbTokenizer(vocab=vocabulary, merges=[], extra_special_tokens=LANGUAGES)


def generate_by_hand(model: Any, tokenizer: Any, text: str, **kwargs: Any) -> list[str]:
    """What a user without pipelines would write."""
    with torch.no_grad():
        output = model.generate(**tokenizer(text, return_tensors="pt"), **kwargs)
    return tokenizer.batch_decode(output, skip_special_tokens=True)


def texts_of(results: Any, name: str = "translation") -> list[str]:
    assert all(set(result) == {f"{name}_text"} for result in results)
    return [result[f"{name}_text"] for result in results]
