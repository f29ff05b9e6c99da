"""A model and its tokenizer, loaded to translate with, and the languages of a multilingual tokenizer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer.data.vocabularies import load_needed_tokenizer
from vanilla_transformer.files import explain_missing_model
from vanilla_transformer.model.pipeline_vanilla_transformer import is_language_token

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def select_device(name: str = "auto") -> torch.device:
    """The device called `name`; `"auto"` takes the first of CUDA, MPS and CPU that this machine has.

    Of several processes on a machine that torchrun or the like has started, each gets a CUDA device of its own.
    """
    if name != "auto":
        with _explaining(name):
            return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda", find_own_device(torch.cuda.device_count()))
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


@contextmanager
def _explaining(device: str) -> Iterator[None]:
    """Torch has errors of several kinds for names that it does not know, and for devices that are not here."""
    try:
        yield
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"device is {device!r}: {' '.join(str(error).split())}") from error


def find_own_device(count: int) -> int:
    """Which of so many devices of this machine is this process's, by the number that its launcher has given it."""
    return int(os.environ.get("LOCAL_RANK") or 0) % max(count, 1)


def load_model_and_tokenizer(
    model_name_or_path: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str = "main",
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A sequence-to-sequence model, in evaluation mode and on its device, and its tokenizer.

    `dtype` is `"auto"` (as saved), `"float32"`, `"bfloat16"` or `"float16"`, `device` as [`select_device`] takes it.
    """
    if dtype != "auto" and dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {['auto', *_DTYPES]}.")
    place = select_device(device)
    with _explaining(device):
        torch.empty(0, device=place)  # found out now, and not when the model is loaded
    source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    with explain_missing_model(model_name_or_path):
        model = AutoModelForSeq2SeqLM.from_pretrained(model_name_or_path, dtype=_DTYPES.get(dtype, "auto"), **source)
        tokenizer = load_needed_tokenizer(model_name_or_path, **source)
    return model.to(place).eval(), tokenizer


def is_multilingual(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer marks source and target with a language's token."""
    return hasattr(tokenizer, "set_src_lang_special_tokens")


def set_languages(tokenizer: PreTrainedTokenizerBase, *, source_lang: str, target_lang: str) -> dict[str, int]:
    """Sets the languages of a multilingual tokenizer (NLLB, M2M100, mBART-50), spelled as the tokenizer spells them.

    Returns the argument with which `generate` writes the target language: `{"forced_bos_token_id": ...}`.
    """
    if not is_multilingual(tokenizer):
        raise ValueError(
            f"{type(tokenizer).__name__} translates one fixed pair of languages; got source_lang={source_lang!r} and "
            f"target_lang={target_lang!r}, which must be left out."
        )
    find_id: Any = getattr(tokenizer, "get_lang_id", tokenizer.convert_tokens_to_ids)
    for side, language in (("source_lang", source_lang), ("target_lang", target_lang)):
        try:
            token_id = find_id(language)
        except KeyError:
            token_id = None
        if not is_language_token(tokenizer, token_id):
            raise ValueError(f"{side} is {language!r}, which {type(tokenizer).__name__} does not know.")
    tokenizer.src_lang = source_lang
    tokenizer.tgt_lang = target_lang
    return {"forced_bos_token_id": token_id}
