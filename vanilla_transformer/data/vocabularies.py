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
    """Loads a model's tokenizer, if it has one: where there is none, `AutoTokenizer` may make one of bytes.

    Args:
        model_name_or_path: A folder or a name on the Hub.
        revision: Branch, tag or commit on the Hub.
        trust_remote_code: Whether code from the checkpoint may run.

    Returns:
        The tokenizer; `None` if none was saved with the model.

    Raises:
        OSError: If there is no such model, or the Hub cannot be asked.
    """
    source = {"revision": revision}
    files = (
        cached_file(model_name_or_path, name, _raise_exceptions_for_missing_entries=False, **source)
        for name in _TOKENIZER_FILES
    )
    if all(file is None for file in files):
        return None
    tokenizer: Any = AutoTokenizer.from_pretrained(model_name_or_path, trust_remote_code=trust_remote_code, **source)
    return cast(PreTrainedTokenizerBase, tokenizer)


def load_needed_tokenizer(
    model_name_or_path: str | os.PathLike[str], *, revision: str = "main", trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Loads a model's tokenizer, as [`load_tokenizer`] does.

    Args:
        model_name_or_path: See [`load_tokenizer`].
        revision: See [`load_tokenizer`].
        trust_remote_code: See [`load_tokenizer`].

    Raises:
        OSError: If there is no such model, or the Hub cannot be asked.
        ValueError: If none was saved with the model.
    """
    tokenizer = load_tokenizer(model_name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    if tokenizer is None:
        raise ValueError(
            f"{model_name_or_path} has no tokenizer, without which no text can be read or written: save one beside the "
            "model (tokenizer.save_pretrained)."
        )
    return tokenizer


def get_vocabularies(tokenizer: PreTrainedTokenizerBase) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the source's and the target's vocabulary, which are one (the same object) unless the tokenizer has two.

    Args:
        tokenizer: This package's, or one of the library.

    Returns:
        The id of each token, for either side, the tokens added to the vocabulary included.
    """
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
    """Makes sure that `text_target=` encodes with the target's vocabulary.

    Args:
        tokenizer: Any tokenizer.

    Raises:
        ValueError: If it is FSMT's, which takes its source's vocabulary and language for both sides.
    """
    if isinstance(tokenizer, FSMTTokenizer):
        raise ValueError(
            "FSMTTokenizer cannot encode target texts: the library has it take the source's vocabulary for them, so "
            "that neither a loss can be computed nor a model be trained with it. Translating works; to score "
            "translations, write them with scripts/translate.py and give the file to scripts/evaluate_translation.py "
            "--compare."
        )
