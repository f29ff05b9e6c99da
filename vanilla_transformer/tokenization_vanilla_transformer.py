r"""Byte-level byte-pair encoding for translation, in which no character is ever lost.

What happens to a text, in this order:

1. Literal special tokens such as "</s>" become their ids, as everywhere in the library. With
   `split_special_tokens=True` they stay text. Tokens from `add_tokens` are matched too, and neither eat nor add spaces.
2. The text is brought into Unicode's NFC, so that "é" is the same whether it was typed as one character or as two. This
   is the only normalisation: case, control characters, line ends and each single space stay as they are, and
   `decode(encode(text), skip_special_tokens=True) == unicodedata.normalize("NFC", text)`. The tables for it come with
   the tokenizers library (Unicode 9); characters that are newer than these stay as they are.
3. It is cut into words with the space before them, single digits, runs of punctuation and runs of spaces. A word keeps
   its combining marks (Hindi's vowel signs are marks). Digits stand alone because byte pairs cut "1987" and "1986" in
   unrelated ways, while number by digit is what a small corpus can teach.
4. The first piece gets a space in front, so that a word has the same tokens at the start of a sentence as within it.
   Decoding takes exactly that one space off again; a text's own leading spaces survive.
5. Each piece is written in UTF-8, one symbol a byte, and byte pairs are merged. All 256 bytes are in the vocabulary, so
   a character that no training text had is spelled in bytes rather than replaced by `<unk>`.

All of it is stored in `tokenizer.json`, so that any reader of that file gives the same tokens.
"""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

# English contractions ('s, 'll), words, digits, punctuation, spaces before a space, spaces.
_PIECES = (
    r"(?i:['’](?:[sdmt]|ll|ve|re)(?![\p{L}\p{M}]))"  # noqa: RUF001
    r"| ?[\p{L}\p{M}]+| ?\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s+(?!\S)|\s+"
)
_SPACE = "Ġ"  # how a byte-level vocabulary writes the space


def _spell(text: str) -> str:
    """Writes each byte of `text` in UTF-8 as the one character that stands for it in a byte-level vocabulary."""
    speller = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in speller.pre_tokenize_str(text))


def _byte_level_bpe(vocab: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    missing = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocab.keys())
    if missing:
        raise ValueError(
            f"vocab lacks {len(missing)} of the 256 symbols of a byte-level vocabulary, first {missing[:5]}: text with "
            "these bytes would be lost. Train a vocabulary with tokenizer_training.train_tokenizer."
        )
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    # Only Metaspace can prepend to a text's start alone: a normalizer and ByteLevel's own prefix put a space behind
    # every added token too. Spelled text has no " ", so the first Metaspace, which prepends unless the text starts
    # with its replacement, always prepends; the second one spells that space.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern=Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            pre_tokenizers.Metaspace(replacement=" ", prepend_scheme="first", split=False),
            pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="never", split=False),
        ]
    )
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(content=" ", left=1, right=0)])
    return tokenizer


class VanillaTransformerTokenizer(PreTrainedTokenizerFast):
    r"""Fast byte-level BPE tokenizer that ends source and target with `</s>`; see the module's text for the details.

    Special tokens of a trained vocabulary: `<s>` 0 (starts the decoder, is not added to texts), `<pad>` 1, `</s>` 2,
    `<unk>` 3 (never produced from text). A pair is encoded as `A </s> B </s>`.

    Offsets count characters of the text as given and leave a token's own spaces out; combining marks that NFC merges
    into the character before them are in no token's span.

    Args:
        vocab: Maps each token to its id; must hold the 256 byte symbols. Without it, the vocabulary is the special
            tokens and the bytes, from which `train_new_from_iterator` can start.
        merges: The pairs of tokens to merge, most urgent first; belongs to `vocab`.
        bos_token: Starts the decoder's input.
        pad_token: Fills the shorter sequences of a batch (`padding_side="right"` unless told otherwise).
        eos_token: Ends every sequence.
        unk_token: What `convert_tokens_to_ids` makes of a string that is no token.
        tokenizer_object: A ready `tokenizers.Tokenizer` of any kind, used as it is; `</s>` is added if it has no
            post-processor of its own.
        tokenizer_file: Path of a `tokenizer.json`, treated likewise.
        kwargs: Whatever `PreTrainedTokenizerFast` takes, such as `model_max_length`, `padding_side`, `add_bos_token`,
            `add_eos_token` and `split_special_tokens`.

    Raises:
        ValueError: If `vocab` comes without `merges` or the other way round, or lacks a byte.

    Example:
        ```python
        tokenizer = train_tokenizer(texts, vocab_size=8000)
        batch = tokenizer(["Ein Mann."], text_target=["A man."], padding=True, return_tensors="pt")
        ```
    """

    vocab_files_names = {"tokenizer_file": "tokenizer.json"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(
        self,
        vocab: dict[str, int] | None = None,
        merges: list[tuple[str, str]] | None = None,
        *,
        bos_token: str | AddedToken = "<s>",
        pad_token: str | AddedToken = "<pad>",
        eos_token: str | AddedToken = "</s>",
        unk_token: str | AddedToken = "<unk>",
        tokenizer_object: Tokenizer | None = None,
        tokenizer_file: str | None = None,
        **kwargs: Any,
    ) -> None:
        if (vocab is None) != (merges is None):
            given, absent = ("merges", "vocab") if vocab is None else ("vocab", "merges")
            raise ValueError(f"{given} was given without {absent}: a byte-pair encoding needs both or neither.")
        if tokenizer_object is None:
            if tokenizer_file is not None:
                tokenizer_object = Tokenizer.from_file(tokenizer_file)
            else:
                symbols = [*map(str, (bos_token, pad_token, eos_token, unk_token))]
                symbols += sorted(pre_tokenizers.ByteLevel.alphabet())
                untrained = {symbol: index for index, symbol in enumerate(symbols)}
                tokenizer_object = _byte_level_bpe(vocab=vocab or untrained, merges=merges or [])
        if tokenizer_object.post_processor is None or {"add_bos_token", "add_eos_token"} & kwargs.keys():
            kwargs = {"add_bos_token": False, "add_eos_token": True} | kwargs
        super().__init__(
            bos_token=bos_token,
            pad_token=pad_token,
            eos_token=eos_token,
            unk_token=unk_token,
            tokenizer_object=tokenizer_object,
            **kwargs,
        )
        # The saved post-processor knows which tokens are added; the library forgets it when it loads a tokenizer.
        added = self.backend_tokenizer.encode("").ids
        self._add_bos_token, self._add_eos_token = self.bos_token_id in added, self.eos_token_id in added
        # Where a tokenizer was loaded from is not part of it: saving it again must give the same files.
        for key in ("is_local", "local_files_only"):
            self.init_kwargs.pop(key, None)

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Leaves `tokenizer.json` whole: the library would keep its vocabulary only, if `__init__` can take one."""
        return kwargs

    @property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in repr(self.backend_tokenizer.decoder)

    def update_post_processor(self) -> None:
        """Makes the post-processor follow `add_bos_token` and `add_eos_token`, and trims spaces off the offsets."""
        super().update_post_processor()
        if self._is_byte_level:
            # add_prefix_space tells it that the first token's space is not in the text, so that none is trimmed.
            trim = processors.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=False)
            self.backend_tokenizer.post_processor = processors.Sequence([trim, self.backend_tokenizer.post_processor])

    def _add_tokens(self, new_tokens: Sequence[str | AddedToken], special_tokens: bool = False) -> int:
        if self._is_byte_level:
            known = self.added_tokens_encoder
            vocab = self.backend_tokenizer.get_vocab(with_added_tokens=False)
            for token in map(str, new_tokens):
                if not token.isascii() and token in vocab and token not in known:
                    raise ValueError(
                        f"Cannot add the token {token!r}: in the byte-level vocabulary it stands for other bytes "
                        f"({decoders.ByteLevel().decode([token])!r}), which the text {token!r} would turn into."
                    )
        return super()._add_tokens(list(new_tokens), special_tokens=special_tokens)

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **kwargs: Any,
    ) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        added = self.added_tokens_decoder if self._is_byte_level else {}
        if not any(index in added and not added[index].content.isascii() for index in ids):
            return super()._decode(ids, skip_special_tokens, clean_up_tokenization_spaces, **kwargs)
        # The byte-level decoder would take "ü" in an added token for the byte 0xFC, so such tokens are spelled first.
        tokens = [
            _spell(added[index].content) if index in added else self.backend_tokenizer.id_to_token(index)
            for index in ids
            if not (skip_special_tokens and index in added and added[index].special)
        ]
        return self.backend_tokenizer.decoder.decode([token for token in tokens if token is not None])

    def _save_pretrained(self, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        # The last call's padding and truncation would be written into tokenizer.json, and be on when it is loaded.
        self.backend_tokenizer.no_padding()
        self.backend_tokenizer.no_truncation()
        return super()._save_pretrained(*args, **kwargs)


__all__ = ["VanillaTransformerTokenizer"]
