"""The tokenizers saved with models, and their vocabularies, of which they have one or two."""

import os
from typing import Any, cast

from transformers import AutoTokenizer, FSMTTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

# One of these is beside every tokenizer.
_TOKENIZER_FILES = (
    *("tokenizer_config.json", "tokenizer.json", "vocab.json", "vocab.txt", "vocab-src.json"),
    *("spiece.model", "sentencepiece.bpe.model"),
)


def load_tokenizer(
    model_name_or_path: str | os.PathLike[str], *, revision: str = "main", trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Loads a model's tokenizer, or `None` if none was saved with it: there `AutoTokenizer` may make one of bytes."""
    options: dict[str, Any] = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    if all(cached_file(model_name_or_path, name, **options) is None for name in _TOKENIZER_FILES):
        return None
    tokenizer: Any = AutoTokenizer.from_pretrained(
        model_name_or_path, trust_remote_code=trust_remote_code, revision=revision
    )
    return cast(PreTrainedTokenizerBase, tokenizer)


def load_needed_tokenizer(model_name_or_path: str | os.PathLike[str], **options: Any) -> PreTrainedTokenizerBase:
    """As `load_tokenizer`, but a `ValueError` if no tokenizer was saved with the model."""
    tokenizer = load_tokenizer(model_name_or_path, **options)
    if tokenizer is None:
        save = "save one beside the model (tokenizer.save_pretrained)"
        raise ValueError(f"{model_name_or_path} has no tokenizer, so no text can be read or written: {save}.")
    return tokenizer


def get_vocabularies(tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, int], dict[str, int]]:
    """The ids of the source's and the target's tokens: the same object unless the tokenizer has two vocabularies."""
    source = tokenizer.get_vocab()
    if isinstance(tokenizer, FSMTTokenizer):
        # By ids, since that is how FSMT reads its target's vocabulary.
        added = {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
        return source, {token: token_id for token_id, token in {**tokenizer.decoder, **added}.items()}
    if not getattr(tokenizer, "separate_vocabs", False):
        return source, source
    if hasattr(tokenizer, "target_tokenizer"):
        return source, cast(dict[str, int], tokenizer.target_tokenizer.get_vocab())
    return source, {**tokenizer.target_encoder, **tokenizer.added_tokens_encoder}  # MarianTokenizer


def check_text_target(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses FSMT's tokenizer, which encodes `text_target=` with its source's vocabulary, by a `ValueError`."""
    if isinstance(tokenizer, FSMTTokenizer):
        raise ValueError(
            "FSMTTokenizer cannot encode target texts: it uses the source's vocabulary for them. To score translations "
            "write them with `vanilla-transformer translate`, and give the file to `evaluate --compare`."
        )
