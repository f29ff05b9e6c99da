r"""Byte-level byte-pair encoding for translation, in which no character is ever lost.

What happens to a text, in this order:

1. Literal special tokens such as "</s>" become their ids, as everywhere in the library. With
   `split_special_tokens=True` they stay text. Tokens from `add_tokens` are matched too, and neither eat nor add spaces.
2. The text is brought into Unicode's NFC, so that "é" is the same whether it was typed as one character or as two. This
   is the only normalisation: case, control characters, line ends and each single space stay as they are, and
   `decode(encode(text), skip_special_tokens=True) == unicodedata.normalize("NFC", text)`. The tables for it come with
   the tokenizers library (Unicode 9); characters that are newer than these stay as they are.
3. It is cut into words with the space before them, single digits, runs of punctuation and runs of spaces. Words and
   punctuation keep their combining marks (Hindi's vowel signs are marks). Digits stand alone because byte pairs cut
   "1987" and "1986" in unrelated ways, while number by digit is what a small corpus can teach.
4. The first piece gets a space in front, so that a word has the same tokens at the start of a sentence as within it.
   Decoding takes exactly that one space off again; a text's own leading spaces survive. With `add_bos_token=True`, as
   language models want it, ids that do not begin with `<s>` are taken for the rest of a text, and keep their space.
5. Each piece is written in UTF-8, one symbol a byte, and byte pairs are merged. All 256 bytes are in the vocabulary, so
   a character that no training text had is spelled in bytes rather than replaced by `<unk>`.

All of it is stored in `tokenizer.json`, so that everything that reads it with the tokenizers library gives the same
tokens. transformers.js 4.3.1 does not: it puts a space before each piece (step 4), so its ids are others; for it,
`export --format transformersjs` writes another file. Where source and target have a vocabulary each, that file is the
source's, and `target_tokenizer.json` is its like for the target. A tokenizer that was made from sentencepiece models
keeps them for other programs, unread, and saves them as `source.spm` and `target.spm`.
"""

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import transformers

# As in the configuration; a tokenizer is loaded without it.
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 12):
    raise ImportError(
        f"This tokenizer needs transformers >= 5.12, and this is {transformers.__version__}: "
        'pip install --upgrade "transformers>=5.12"'
    )

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BatchEncoding, PreTrainedTokenizerFast

# English contractions, words, digits, punctuation, spaces before a space, spaces. Punctuation keeps its marks, since
# NFC makes both of one character at times (U+2ADC), and step 4 would put a space before each piece of the first.
_PIECES = (
    r"(?i:['’](?:[sdmt]|ll|ve|re)(?![\p{L}\p{M}]))"  # noqa: RUF001
    r"| ?[\p{L}\p{M}]+| ?\p{N}| ?[^\s\p{L}\p{M}\p{N}]+\p{M}*|\s+(?!\S)|\s+"
)
_SPACE = "Ġ"  # how a byte-level vocabulary writes the space
_TARGET_FILE = "target_tokenizer.json"
_SPM_FILES = {"source_spm": "source.spm", "target_spm": "target.spm"}  # as MarianTokenizer has them


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
    """Fast byte-level BPE tokenizer that ends source and target with `</s>`; see the module's text for the details.

    Special tokens of a trained vocabulary: `<s>` 0 (starts the decoder, is not added to texts), `<pad>` 1, `</s>` 2,
    `<unk>` 3 (never produced from text). A pair is encoded as `A </s> B </s>`. Offsets count characters of the text as
    given and leave a token's own spaces out; combining marks that NFC merges are in no token's span.

    Source and target share one vocabulary, or have one each (`separate_vocabs`). With two of them:

    - `tokenizer(text)`, `encode`, `tokenize`, `get_vocab`, `len`, `vocab_size` and the conversions between tokens and
      ids are the source's; `tokenizer(text_target=...)`, `decode` and `batch_decode` are the target's, since what is
      decoded is mostly what a model wrote. `decode(ids, use_source_tokenizer=True)` reads source ids.
    - `source_tokenizer` and `target_tokenizer` are each side as a tokenizer of one vocabulary, for everything else:
      give `tokenizer.target_tokenizer` to whatever looks up target tokens, such as `generate(stop_strings=...)`.
    - Both give the named special tokens the same ids, since a model knows one `pad_token_id` and so on.
    - `add_tokens` and `add_special_tokens` add to both, at each one's end, and return the larger number of new tokens.
      Resize the model by `len(tokenizer)` and `target_vocab_size`.
    - `train_new_from_iterator` is refused: train each side, or use `tokenizer_training.train_separate_tokenizer`.

    Args:
        vocab: Maps each token to its id; must hold the 256 byte symbols. Without it, the vocabulary is the special
            tokens and the bytes, from which `train_new_from_iterator` can start.
        merges: The pairs of tokens to merge, most urgent first; belongs to `vocab`.
        bos_token, pad_token, eos_token, unk_token: The special tokens, as above.
        tokenizer_object, tokenizer_file: A ready `tokenizers.Tokenizer` of any kind, or the path of a `tokenizer.json`,
            used as it is; `</s>` is added if it has no post-processor of its own.
        target_tokenizer_object, target_tokenizer_file: The target's, if it has a vocabulary of its own.
        separate_vocabs: Saved by a tokenizer with two vocabularies. Without it, a target's file is not read: another
            tokenizer may have left it in the folder.
        source_spm, target_spm: Files of the sentencepiece models that the vocabularies were made from
            (`convert_sentencepiece`); they are kept and saved for other programs.
        has_spm: Saved by a tokenizer that has such files, likewise.
        kwargs: Whatever `PreTrainedTokenizerFast` takes. Whether `<s>` begins and `</s>` ends a text (`add_bos_token`,
            `add_eos_token`) is saved; either can be given anew without the other.

    Raises:
        ValueError: If `vocab` comes without `merges` or the other way round, or lacks a byte, if `separate_vocabs`
            comes without a target vocabulary, or if the two vocabularies give a special token different ids.

    Example:
        >>> tokenizer = train_tokenizer(texts, vocab_size=8000)
        >>> batch = tokenizer(["Ein Mann."], text_target=["A man."], padding=True, return_tensors="pt")
    """

    vocab_files_names = {
        "tokenizer_file": "tokenizer.json",
        "target_tokenizer_file": _TARGET_FILE,
        **_SPM_FILES,
    }
    model_input_names = ["input_ids", "attention_mask"]
    _target_backend: Tokenizer | None = None
    _spm_models: tuple[bytes | None, bytes | None] = (None, None)

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
        target_tokenizer_object: Tokenizer | None = None,
        target_tokenizer_file: str | None = None,
        separate_vocabs: bool = False,
        source_spm: str | None = None,
        target_spm: str | None = None,
        has_spm: bool = False,
        **kwargs: Any,
    ) -> None:
        if (vocab is None) != (merges is None):
            given, absent = ("merges", "vocab") if vocab is None else ("vocab", "merges")
            raise ValueError(f"{given} was given without {absent}: a byte-pair encoding needs both or neither.")
        special_tokens: dict[str, Any] = {"bos_token": bos_token, "pad_token": pad_token}
        special_tokens |= {"eos_token": eos_token, "unk_token": unk_token}
        if tokenizer_object is None and tokenizer_file is not None:
            tokenizer_object = Tokenizer.from_file(tokenizer_file)
        if tokenizer_object is None:
            symbols = [*map(str, special_tokens.values()), *sorted(pre_tokenizers.ByteLevel.alphabet())]
            untrained = {symbol: index for index, symbol in enumerate(symbols)}
            tokenizer_object = _byte_level_bpe(vocab=vocab or untrained, merges=merges or [])
        if target_tokenizer_object is None and target_tokenizer_file is not None:
            target_tokenizer_object = Tokenizer.from_file(target_tokenizer_file)
        if separate_vocabs and target_tokenizer_object is None:
            raise ValueError(f"separate_vocabs=True, but there is no target vocabulary: {_TARGET_FILE} is missing.")
        target = None
        if target_tokenizer_object is not None:
            # Tokens that were added to the source alone stay there.
            target_kwargs = {key: value for key, value in kwargs.items() if key != "added_tokens_decoder"}
            target = VanillaTransformerTokenizer(
                tokenizer_object=target_tokenizer_object, **special_tokens, **target_kwargs
            )
        if tokenizer_object.post_processor is None:
            kwargs = {"add_bos_token": False, "add_eos_token": True} | kwargs
        elif {"add_bos_token", "add_eos_token"} & kwargs.keys():
            # Of the one that is not given the saved post-processor knows.
            tokens = tokenizer_object.encode("").tokens
            kwargs = {"add_bos_token": str(bos_token) in tokens, "add_eos_token": str(eos_token) in tokens} | kwargs
        super().__init__(tokenizer_object=tokenizer_object, **special_tokens, **kwargs)
        # The saved post-processor knows which tokens are added; the library forgets it.
        added = self.backend_tokenizer.encode("").ids
        self._add_bos_token, self._add_eos_token = self.bos_token_id in added, self.eos_token_id in added
        # Where a tokenizer was loaded from is not part of it: saving it again must give the same files.
        for key in ("is_local", "local_files_only"):
            self.init_kwargs.pop(key, None)
        if target is not None:
            self._check_special_tokens(self.backend_tokenizer, target.backend_tokenizer)
            self._target_backend = target.backend_tokenizer
            self.init_kwargs["separate_vocabs"] = True
        source, other = (None if file is None else Path(file).read_bytes() for file in (source_spm, target_spm))
        self._spm_models = source, other
        if source is not None:
            self.init_kwargs["has_spm"] = True

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: Any) -> dict[str, Any]:
        """Leaves `tokenizer.json` whole: the library would keep its vocabulary only, if `__init__` can take one."""
        # Another tokenizer, saved to this folder before, may have left these files.
        strange = set() if kwargs.get("separate_vocabs") else {"target_tokenizer_file", "target_spm"}
        if not kwargs.get("has_spm"):
            strange |= _SPM_FILES.keys()
        return {key: value for key, value in kwargs.items() if key not in strange}

    @property
    def separate_vocabs(self) -> bool:
        """Whether source and target have a vocabulary each."""
        return self._target_backend is not None

    @property
    def source_tokenizer(self) -> Self:
        """The source's side, as a tokenizer of one vocabulary. What is added to it is added to that one alone."""
        return self if self._target_backend is None else self._one_side(self.backend_tokenizer, self._spm_models[0])

    @property
    def target_tokenizer(self) -> Self:
        """The target's side, as a tokenizer of one vocabulary. What is added to it is added to that one alone."""
        return self if self._target_backend is None else self._one_side(self._target_backend, self._spm_models[1])

    @property
    def target_vocab_size(self) -> int:
        """Number of target tokens, added ones included: `len(target_tokenizer)`, the model's `decoder_vocab_size`."""
        return len(self.target_tokenizer)

    @property
    def sentencepiece_model(self) -> bytes | None:
        """The content of the sentencepiece model that the source's vocabulary was made from, if it was."""
        return self._spm_models[0]

    def _one_side(self, backend: Tokenizer, spm_model: bytes | None = None) -> Self:
        side = copy.copy(self)
        side._tokenizer, side._target_backend = backend, None
        side._spm_models = spm_model, None
        strange = {"separate_vocabs"} if spm_model is not None else {"separate_vocabs", "has_spm"}
        side.init_kwargs = {key: value for key, value in self.init_kwargs.items() if key not in strange}
        side._special_tokens_map = dict(self._special_tokens_map)
        side._extra_special_tokens = list(self._extra_special_tokens)
        return side

    def _check_special_tokens(self, source: Tokenizer, target: Tokenizer) -> None:
        ids = {
            f"{name} {str(token)!r}": (source.token_to_id(str(token)), target.token_to_id(str(token)))
            for name, token in self._special_tokens_map.items()
            if token is not None
        }
        differing = [f"{name} is {one} and {other}" for name, (one, other) in ids.items() if one != other]
        if differing:
            raise ValueError(
                "Source and target vocabulary must give a special token the same id, since a model knows one for both "
                f"sides; in theirs, {', '.join(differing)}."
            )

    def __call__(
        self,
        text: Any = None,
        text_pair: Any = None,
        text_target: Any = None,
        text_pair_target: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> BatchEncoding:
        """Tokenizes source texts (`text`), target texts (`text_target`), or both, the targets' ids being `labels`."""
        if self._target_backend is None or text_target is None:
            return super().__call__(text, text_pair, text_target, text_pair_target, *args, **kwargs)
        # Unlike the library's own way, which is to switch the tokenizer over for a while, this is safe with threads.
        targets = self.target_tokenizer(None, None, text_target, text_pair_target, *args, **kwargs)
        if text is None:
            return targets
        encodings = super().__call__(text, text_pair, None, None, *args, **kwargs)
        encodings["labels"] = targets["input_ids"]
        return encodings

    @property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in repr(self.backend_tokenizer.decoder)

    def update_post_processor(self) -> None:
        """Makes the post-processor follow `add_bos_token` and `add_eos_token`, and trims spaces off the offsets.

        Where the target adds other tokens than the source, it follows only the flag that has changed.
        """
        before = self.backend_tokenizer.encode("").ids
        super().update_post_processor()
        if self._is_byte_level:
            # add_prefix_space tells it that the first token's space is not in the text, so that none is trimmed.
            trim = processors.ByteLevel(add_prefix_space=True, trim_offsets=True, use_regex=False)
            self.backend_tokenizer.post_processor = processors.Sequence([trim, self.backend_tokenizer.post_processor])
        if self._target_backend is not None:
            target = self.target_tokenizer
            own = self._target_backend.encode("").ids
            for flag, token in (("_add_bos_token", self.bos_token_id), ("_add_eos_token", self.eos_token_id)):
                has_changed = getattr(self, flag) != (token in before)
                setattr(target, flag, getattr(self, flag) if has_changed else token in own)
            target.update_post_processor()

    def train_new_from_iterator(self, *args: Any, **kwargs: Any) -> Self:
        """Trains a tokenizer of one vocabulary, with this one's settings, on other texts, as in the library."""
        if self._target_backend is not None:
            raise ValueError(
                "train_new_from_iterator trains one vocabulary, and this tokenizer has two (separate_vocabs=True): call"
                " it on source_tokenizer and target_tokenizer, or use tokenizer_training.train_separate_tokenizer."
            )
        return super().train_new_from_iterator(*args, **kwargs)

    def add_special_tokens(self, special_tokens_dict: dict[str, Any], replace_extra_special_tokens: bool = True) -> int:
        """Adds special tokens as the library does, but changes none where one of them cannot be added."""
        before = dict(self._special_tokens_map), list(self._extra_special_tokens)
        try:
            return super().add_special_tokens(special_tokens_dict, replace_extra_special_tokens)
        except ValueError:
            self._special_tokens_map, self._extra_special_tokens = before
            raise

    def _add_tokens(self, new_tokens: Sequence[str | AddedToken], special_tokens: bool = False) -> int:
        if self._target_backend is not None:
            # To copies, so that tokens which one side refuses leave the other as it was.
            backends = (self.backend_tokenizer, self._target_backend)
            sides = [self._one_side(copy.deepcopy(backend)) for backend in backends]
            added = max([side._add_tokens(new_tokens, special_tokens) for side in sides])
            source, target = (side.backend_tokenizer for side in sides)
            self._check_special_tokens(source, target)
            self._tokenizer, self._target_backend = source, target
            return added
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
        use_source_tokenizer = kwargs.pop("use_source_tokenizer", False)
        if self._target_backend is not None:
            side = self.source_tokenizer if use_source_tokenizer else self.target_tokenizer
            return side._decode(token_ids, skip_special_tokens, clean_up_tokenization_spaces, **kwargs)
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        space = self._find_lost_space(ids, skip_special_tokens)
        added = self.added_tokens_decoder if self._is_byte_level else {}
        if not any(index in added and not added[index].content.isascii() for index in ids):
            return space + super()._decode(ids, skip_special_tokens, clean_up_tokenization_spaces, **kwargs)
        # The byte-level decoder would take "ü" in an added token for the byte 0xFC, so such tokens are spelled first.
        tokens = [
            _spell(added[index].content) if index in added else self.backend_tokenizer.id_to_token(index)
            for index in ids
            if not (skip_special_tokens and index in added and added[index].special)
        ]
        return space + self.backend_tokenizer.decoder.decode([token for token in tokens if token is not None])

    def _find_lost_space(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The space that decoding takes off, if it is between words: where texts begin with `<s>`, and these do not."""
        if not (self._is_byte_level and self.add_bos_token):
            return ""
        first = next((index for index in ids if index != self.pad_token_id), None)
        if first == self.bos_token_id:
            return ""
        skipped = self.all_special_ids if skip_special_tokens else ()
        kept = next((index for index in ids if index not in skipped), None)
        piece = None if kept is None else self.backend_tokenizer.id_to_token(kept)
        return " " if piece is not None and piece.startswith(_SPACE) else ""

    def _save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        file_names: tuple[str, ...],
        legacy_format: bool | None = None,
        filename_prefix: str | None = None,
    ) -> tuple[str, ...]:
        for side in (self.source_tokenizer, self.target_tokenizer):
            # The last call's padding and truncation would be written into the file, and be on when it is loaded.
            side.backend_tokenizer.no_padding()
            side.backend_tokenizer.no_truncation()
        file_names = super()._save_pretrained(save_directory, file_names, legacy_format, filename_prefix)
        start = os.path.join(save_directory, filename_prefix + "-" if filename_prefix else "")
        if self._target_backend is not None:
            self._target_backend.save(start + _TARGET_FILE)
            file_names = (*file_names, start + _TARGET_FILE)
        for name, content in zip(_SPM_FILES.values(), self._spm_models, strict=True):
            if content is not None:
                Path(start + name).write_bytes(content)
                file_names = (*file_names, start + name)
        return file_names
