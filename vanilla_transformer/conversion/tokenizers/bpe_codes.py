"""fairseq's dictionaries, and the tokenizers made of them.

A dictionary is a text file with a line "token count" for each token. Their ids begin behind those of four special
tokens that the file does not name: `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer

from .vocabularies import check_vocabularies

BOS, PAD, EOS, UNK = SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
_OVERWRITE = " #fairseq:overwrite"
_JOINERS = {"@@": str.endswith, "▁": str.startswith}
_SHARE_JOINED = 0.01  # of the tokens, at the least, where words are cut
_END = "</w>"  # what byte-pair encoding writes at the end of a word


def read_dictionary(path: str | os.PathLike[str]) -> list[str]:
    """Returns all tokens of a `dict.<language>.txt` in the order of their ids, special ones first.

    What is left at the old id of a token that the file overwrites is named after it; special tokens keep theirs.
    """
    path = Path(path)
    tokens = list(SPECIAL_TOKENS)
    ids = {token: index for index, token in enumerate(tokens)}
    for number, line in enumerate(_read_lines(path), start=1):
        entry = line.rstrip()
        overwrites = entry.endswith(_OVERWRITE)
        token, _, count = entry.removesuffix(_OVERWRITE).rpartition(" ")
        if not token or not count.removeprefix("-").isdecimal():
            raise ConversionError(f"{path}, line {number}, must be 'token count', not {entry!r}.")
        if token in ids and not overwrites:
            raise ConversionError(f"{path}, line {number}: {token!r} is in the dictionary already.")
        if token in ids:
            spare = f"{token}#{len(tokens)}"
            if token in SPECIAL_TOKENS:
                token = spare
            else:
                tokens[ids[token]] = spare
        ids[token] = len(tokens)
        tokens.append(token)
    return tokens


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConversionError(f"{path} is no text in UTF-8: {error}.") from error


def find_joiner(tokens: Sequence[str]) -> str | None:
    """Finds out how a vocabulary marks the pieces of words, "@@" or "▁"; `None` where tokens are words."""
    counts = {joiner: sum(test(token, joiner) for token in tokens) for joiner, test in _JOINERS.items()}
    joiner = max(counts, key=lambda name: counts[name])
    return joiner if counts[joiner] >= _SHARE_JOINED * len(tokens) else None


def make_bpe_tokenizer(
    codes: str | os.PathLike[str],
    tokens: Sequence[str],
    *,
    target_codes: str | os.PathLike[str] | None = None,
    target_tokens: Sequence[str] | None = None,
) -> VanillaTransformerTokenizer:
    """Makes a tokenizer that cuts words by byte-pair encoding, as subword-nmt and fastBPE do.

    Tokens are written as in the file of codes: "a" for the dictionary's "a@@", "b</w>" for its "b". What the codes
    merge and the dictionary lacks has ids behind the dictionary's, whose embeddings must be that of `<unk>`.
    """
    merges = read_codes(codes)
    target_merges = merges if target_codes is None else read_codes(target_codes)
    if target_tokens is None and target_merges != merges:
        raise ConversionError(f"{codes} and {target_codes} differ, and a dictionary for both sides can have but one.")
    settings: dict[str, Any] = {"bos_token": BOS, "pad_token": PAD, "eos_token": EOS, "unk_token": UNK}
    if target_tokens is not None:
        settings["target_tokenizer_object"] = _make_bpe(target_tokens, target_merges)
    return VanillaTransformerTokenizer(tokenizer_object=_make_bpe(tokens, merges), **settings)


def _make_bpe(tokens: Sequence[str], merges: list[tuple[str, str]]) -> Tokenizer:
    pieces = [token if token in SPECIAL_TOKENS else _to_piece(token) for token in tokens]
    check_vocabularies(pieces, None, SPECIAL_TOKENS)
    vocab = {piece: index for index, piece in enumerate(pieces)}
    for first, second in merges:
        for piece in (first, second, first + second):
            vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=UNK, end_of_word_suffix=_END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.BPEDecoder(suffix=_END)
    return tokenizer


def _to_piece(token: str) -> str:
    return token.removesuffix("@@") if token.endswith("@@") and token != "@@" else token + _END


def read_codes(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """Returns the pairs to merge, most urgent first, of a file of subword-nmt (version 0.2) or fastBPE."""
    path = Path(path)
    lines = _read_lines(path)
    has_header = lines[0].startswith("#version:")
    if has_header and lines[0].split() != ["#version:", "0.2"]:
        raise ConversionError(f"{path} is of a version of the format that cannot be read (can be: 0.2): {lines[0]!r}.")
    columns = 2 if has_header else 3
    pairs = [line.strip("\r ").split(" ") for line in lines[has_header:]]
    wrong = next((number for number, pair in enumerate(pairs, start=1 + has_header) if len(pair) != columns), None)
    if wrong is not None:
        formats = "subword-nmt's version 0.2 (two pieces a line) nor of fastBPE's (two pieces and a number)"
        raise ConversionError(f"{path}, line {wrong}, is neither of {formats}: {lines[wrong - 1]!r}.")
    return list(dict.fromkeys((pair[0], pair[1]) for pair in pairs))
