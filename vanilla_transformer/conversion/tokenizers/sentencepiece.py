r"""Makes sentencepiece models fast tokenizers that give the same ids.

The tokenizers library has the same algorithms (unigram language models, byte-pair encoding), but does not read such
files, and differs in details. The ids are equal because

- text is normalised by the model's own rules (see `sentencepiece_normalizer`);
- only what sentencepiece cuts text into can come out: other entries of the vocabulary, such as `</s>`, have scores
  below that of any other way to cut their text, and unknown characters become another unknown one first;
- user-defined symbols are part of the model, so that what is around them is normalised as one text.

The ids are those of the sentencepiece package (0.2.3), except that

- special tokens that a text spells out ("</s>") become their ids, as everywhere in the library; with
  `split_special_tokens=True` they are text, as sentencepiece has it;
- where two ways to cut a text have exactly the same score under a unigram model (of "aaa": "aa a" and "a aa"), either
  may be chosen, since sentencepiece adds scores up in float32 and the library in float64;
- a text of which normalisation leaves nothing (control characters) gives no ids even where sentencepiece gives that of
  the added space;
- an accent behind a composed letter, a ligature or a user-defined symbol, and the parts of a Korean syllable behind a
  shorter one are composed too, and the parts of letters newer than Unicode 9 without pieces are not;
- in byte-pair encoding a special token between two user-defined symbols, or at the end behind one, stays special;
- U+FFF0 and U+FFF2, which Unicode keeps free, are ignored or unknown.

`decode(ids, skip_special_tokens=True)` gives sentencepiece's text, except that unknown tokens are left out instead of
written as " ⁇ ", and that each byte is a "�" wherever a row of bytes is not wholly valid.
"""

import importlib
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from vanilla_transformer.conversion.errors import ConversionError, refuse
from vanilla_transformer.files import explain_missing
from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer

from .sentencepiece_normalizer import SPACE, STRANGE, Spacing, convert_rules, write_class
from .vocabularies import check_vocabularies

_KINDS = {1: "unigram", 2: "bpe", 4: "char"}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # types of pieces in the file
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def convert_sentencepiece(
    model_file: str | os.PathLike[str],
    *,
    target_model_file: str | os.PathLike[str] | None = None,
    vocabulary: Sequence[str] | None = None,
    target_vocabulary: Sequence[str] | None = None,
    append_absent: bool = False,
    bos_token: str | None = None,
    eos_token: str | None = None,
    pad_token: str | None = None,
    unk_token: str | None = None,
    model_max_length: int = 1024,
) -> VanillaTransformerTokenizer:
    """Makes a sentencepiece model, or one for each side, a fast tokenizer that gives the same ids and `</s>` behind.

    Where ids or decoded texts may differ is told at the top of this module. `target_model_file` and `target_vocabulary`
    are the target's; `None`: the source's. The tokenizer keeps the files, and saves them as `source.spm` and
    `target.spm`, as MarianMT has them.

    `vocabulary` has all tokens by their ids, special ones included; `None`: the model's own ids, and behind them those
    of `<s>`, `</s>` and `<pad>` that it lacks. What is no piece of the model is never produced, unless it is a row of
    characters that the model does not know, which sentencepiece hands on as one piece. Pieces that `vocabulary` lacks
    are refused, or with `append_absent` get ids behind it, in the model's order. The embeddings of such ids must be
    copies of the unknown token's.

    `bos_token` and the others are what special tokens are called in `vocabulary`; `None`: as the model calls them. All
    but `bos_token` must be there. Beyond `model_max_length` tokens the tokenizer warns, and `truncation=True` cuts.

    Raises:
        ConversionError: If a file is no sentencepiece model, or it cannot be converted with equal ids.
        ImportError: If sentencepiece or protobuf is missing.
    """
    if target_vocabulary is not None and vocabulary is None:
        raise ConversionError("A target vocabulary was given without the source's: give both, or the source's alone.")
    sides = [_read_model(model_file)]
    if target_model_file is not None or target_vocabulary is not None:
        sides.append(sides[0] if target_model_file is None else _read_model(target_model_file))
    given = dict(zip(_SPECIAL_TOKENS, (bos_token, eos_token, pad_token, unk_token), strict=True))
    specials: dict[str, Any] = {name: given[name] or sides[0].specials[name] for name in _SPECIAL_TOKENS}
    if vocabulary is None:
        vocabularies = _list_own_tokens(sides, list(specials.values()))
    else:
        both = [list(vocabulary), list(vocabulary if target_vocabulary is None else target_vocabulary)]
        vocabularies = both[: len(sides)]
        if any(specials["bos_token"] not in tokens for tokens in vocabularies):
            specials["bos_token"] = None
    named = [token for token in specials.values() if token is not None]
    check_vocabularies(vocabularies[0], vocabularies[1] if len(sides) > 1 else None, named)
    backends = [
        _make_backend(model, _append_absent(model, tokens, append_absent), named, specials["unk_token"])
        for model, tokens in zip(sides, vocabularies, strict=True)
    ]
    specials["target_tokenizer_object"] = backends[1] if len(backends) > 1 else None
    specials |= dict(zip(("source_spm", "target_spm"), (str(model.path) for model in sides), strict=False))
    return VanillaTransformerTokenizer(tokenizer_object=backends[0], model_max_length=model_max_length, **specials)


@dataclass(frozen=True, kw_only=True)
class _Model:
    """What is in a sentencepiece model."""

    path: Path
    kind: str  # "unigram", "bpe" or "char"
    tokens: list[str]  # all pieces by their ids, special ones included
    pieces: dict[str, float]  # what text is cut into, and the score of each
    symbols: list[str]  # those of the pieces that the user defined
    controls: list[str]  # special pieces, which text is never cut into
    specials: dict[str, str]  # what the special tokens are called
    bytes: list[str]  # pieces for bytes that unknown characters are spelled in; without them they are unknown
    rules: list[normalizers.Normalizer]  # the normalisation but for spaces
    spacing: Spacing

    @property
    def known(self) -> set[str]:
        """The characters that are pieces."""
        return {piece for piece in self.pieces if len(piece) == 1}

    @property
    def unknown(self) -> str:
        """A regular expression for one character that is no piece, unless it is part of a user-defined symbol."""
        known = self.known
        inside = [
            (f"(?<={re.escape(symbol[:start])})" if start else "") + re.escape(symbol[start:])
            for symbol in self.symbols
            for start, character in enumerate(symbol)
            if character not in known
        ]
        return (f"(?!{'|'.join(inside)})" if inside else "") + f"[^{write_class(known)}]"


def _read_proto(path: Path) -> Any:
    """Returns the file's content, which sentencepiece itself must be able to read."""
    needed = "Sentencepiece models need sentencepiece 0.2.3 or newer, and protobuf"
    with explain_missing(needed, extra="convert", packages="sentencepiece protobuf"):
        sentencepiece = importlib.import_module("sentencepiece")
        protocol = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "no file"
        raise ConversionError(f"{path} is {kind}: name the .model file of a sentencepiece model.")
    content, proto = path.read_bytes(), protocol.ModelProto()
    subject = f"{path} ({len(content):,} bytes) is no sentencepiece model, or it is truncated"
    try:
        proto.ParseFromString(content)
        sentencepiece.SentencePieceProcessor(model_proto=content)
    except Exception as error:  # protobuf's own, whose class moves about, or sentencepiece's RuntimeError
        raise ConversionError(f"{subject} or damaged: {error}") from error
    if not proto.pieces or not proto.HasField("trainer_spec") or not proto.HasField("normalizer_spec"):
        raise ConversionError(f"{subject}: it lacks pieces, or how they were trained, or the normalisation.")
    return proto


def _read_model(model_file: str | os.PathLike[str]) -> _Model:
    path = Path(model_file)
    proto = _read_proto(path)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    by_type = {kind: [piece for piece in proto.pieces if piece.type == kind] for kind in range(1, 7)}
    pieces = {piece.piece: piece.score for piece in by_type[_NORMAL]}
    symbols = [piece.piece for piece in by_type[_USER_DEFINED]]
    # The score that sentencepiece gives to user-defined symbols, so that they are always taken.
    pieces |= {symbol: 0.1 * (len(symbol.encode()) - 1) for symbol in symbols}
    refuse(f"{path} cannot be converted", _find_obstacles(proto, by_type, pieces))
    return _Model(
        path=path,
        kind=_KINDS[trainer.model_type],
        tokens=[piece.piece for piece in proto.pieces],
        pieces=pieces,
        symbols=symbols,
        controls=[piece.piece for piece in by_type[_CONTROL]],
        specials={
            "bos_token": trainer.bos_piece or "<s>",
            "eos_token": trainer.eos_piece or "</s>",
            "pad_token": trainer.pad_piece or "<pad>",
            "unk_token": by_type[_UNKNOWN][0].piece,
        },
        bytes=[piece.piece for piece in by_type[_BYTE]],
        rules=_convert_rules(path, normalizer, pieces, symbols),
        spacing=Spacing(
            remove_extra=normalizer.remove_extra_whitespaces,
            add_dummy=normalizer.add_dummy_prefix,
            dummy_at_end=trainer.treat_whitespace_as_suffix,
        ),
    )


def _convert_rules(
    path: Path, normalizer: Any, pieces: Iterable[str], symbols: Iterable[str]
) -> list[normalizers.Normalizer]:
    if not normalizer.precompiled_charsmap:
        return []
    processor = importlib.import_module("sentencepiece").SentencePieceNormalizer(normalizer_spec=normalizer)
    known = {piece for piece in pieces if len(piece) == 1}
    steps = convert_rules(dict(processor.Decompile()), normalizer.precompiled_charsmap, known)
    changed = [symbol for symbol in symbols if normalizers.Sequence(steps).normalize_str(symbol) != symbol]
    reasons = [f"its user-defined symbol {symbol!r} is something that it normalises" for symbol in changed]
    refuse(f"{path} cannot be converted", reasons)
    return steps


def _find_obstacles(proto: Any, by_type: Mapping[int, Sequence[Any]], pieces: Mapping[str, float]) -> Iterator[str]:
    """Yields why a model cannot be converted, as far as the file alone shows it."""
    if proto.trainer_spec.model_type not in _KINDS:
        yield "it is a word model (can be: unigram, bpe, char), which makes several unknown words in a row one token"
    if not proto.normalizer_spec.escape_whitespaces:
        yield 'its pieces write spaces as spaces (can be: as "▁")'
    if by_type[_UNUSED]:
        unused = [piece.piece for piece in by_type[_UNUSED]]
        yield f"{len(unused):,} pieces are marked as unused, first {unused[0]!r}"
    if proto.denormalizer_spec.precompiled_charsmap:
        yield "it has rules for what is done to a text after decoding"
    if len({piece.piece for piece in proto.pieces}) < len(proto.pieces):
        yield "two of its pieces are the same"
    normal = [piece.piece for piece in by_type[_NORMAL]]
    lacking = sorted({character for piece in normal for character in piece} - set(pieces))
    if lacking:
        yield f"{len(lacking):,} characters are parts of pieces but no pieces themselves, first {lacking[0]!r}"


def _list_own_tokens(sides: Sequence[_Model], specials: Sequence[str]) -> list[list[str]]:
    """Lists the tokens of each side by their ids, and behind them, at the same ids, the special ones that both lack."""
    absent = [token for token in specials if not any(token in model.tokens for model in sides)]
    longest = max(len(model.tokens) for model in sides) if absent else 0
    fillers = [[f"<filler {index}>" for index in range(longest - len(model.tokens))] for model in sides]
    return [[*model.tokens, *filler, *absent] for model, filler in zip(sides, fillers, strict=True)]


def _append_absent(model: _Model, tokens: Sequence[str], append_absent: bool) -> list[str]:
    lacking = {*model.pieces, *model.bytes}.difference(tokens)
    absent = [token for token in model.tokens if token in lacking]
    if absent and not append_absent:
        number, first = len(model.pieces) + len(model.bytes), ", ".join(map(repr, absent[:5]))
        raise ConversionError(
            f"The vocabulary lacks {len(absent):,} of the {number:,} pieces of {model.path}, first {first}. With"
            " append_absent=True they get ids behind it, whose embeddings must be copies of the unknown token's."
        )
    return [*tokens, *absent]


def _make_backend(model: _Model, tokens: list[str], specials: Sequence[str], unk: str) -> Tokenizer:
    strangers = _find_strangers(model, tokens, specials)
    is_unigram = model.kind == "unigram"
    backend = Tokenizer(_make_unigram(model, tokens, unk) if is_unigram else _make_bpe(model, tokens, specials, unk))
    steps = [*model.rules, *model.spacing.normalizers(), *_hide_unknown(model, tokens, strangers)]
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    splits = list(_make_splits(model, strangers))
    if splits:
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = _make_decoder(model)
    controls = [token for token in model.controls if token in set(tokens).difference(specials)]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in controls])
    return backend


def _find_strangers(model: _Model, tokens: Sequence[str], specials: Sequence[str]) -> list[str]:
    """Finds the tokens that are rows of characters which the model does not know: sentencepiece hands these on."""
    known, no_text = model.known, {*model.controls, *model.bytes, *specials}
    strangers = [
        token
        for token in tokens
        if token and token not in no_text and token not in model.pieces and not any(part in known for part in token)
    ]
    reasons = []
    single = [token for token in strangers if len(token) == 1]
    if model.bytes and single:
        reasons.append(f"it has {single[0]!r}, a character that the model spells in bytes")
    if strangers and any(part not in known for symbol in model.symbols for part in symbol):
        reasons.append(f"it has {strangers[0]!r}, and a user-defined symbol has unknown characters too")
    refuse(f"The vocabulary cannot be used with {model.path}", reasons)
    if model.kind != "unigram" and len(single) < len(strangers):
        longer = next(token for token in strangers if len(token) > 1)
        warnings.warn(
            f"{len(strangers) - len(single):,} tokens of the vocabulary, first {longer!r}, are several characters that "
            f"{model.path} does not know: they are never produced, and their text is unknown.",
            stacklevel=4,
        )
        return single
    return strangers


def _make_unigram(model: _Model, tokens: Sequence[str], unk: str) -> models.Unigram:
    lowest = min([*model.pieces.values(), 0.0])
    others = [token for token in tokens if token not in model.pieces]
    # Any way to cut the text of such a token into characters is better than the token.
    never = lowest * (max(map(len, others)) + 1) - 1
    vocab = [(token, model.pieces.get(token, never)) for token in tokens]
    return models.Unigram(vocab, unk_id=tokens.index(unk), byte_fallback=bool(model.bytes))


def _make_bpe(model: _Model, tokens: Sequence[str], specials: Sequence[str], unk: str) -> models.BPE:
    normal = {piece: score for piece, score in model.pieces.items() if piece not in model.symbols}
    urgent_first = sorted(normal, key=lambda piece: -normal[piece]) if model.kind == "bpe" else []
    cuts = [(piece[:cut], piece[cut:]) for piece in urgent_first for cut in range(1, len(piece))]
    merges = [(first, second) for first, second in cuts if first in normal and second in normal]

    def build(**settings: Any) -> models.BPE:
        vocab = {token: index for index, token in enumerate(tokens)}
        settings |= {"fuse_unk": True, "byte_fallback": bool(model.bytes)}
        return models.BPE(vocab=vocab, merges=merges, unk_token=unk, **settings)

    if not model.symbols:
        return build()
    # User-defined symbols are words of their own, and words that are tokens stay whole.
    plain = build()
    broken = [piece for piece in normal if len(plain.tokenize(piece)) > 1]
    no_text = {*model.tokens, *specials}
    others = [token for token in tokens if token not in no_text and all(part in model.known for part in token)]
    reasons = [f"its piece {piece!r} cannot be merged from its characters" for piece in broken[:8]]
    reasons += [f"the vocabulary has {token!r}, which is no piece" for token in others[:8]]
    refuse(f"{model.path} cannot be converted, since it has user-defined symbols, and", reasons)
    return build(ignore_merges=True)


def _hide_unknown(model: _Model, tokens: Sequence[str], strangers: Sequence[str]) -> list[normalizers.Normalizer]:
    """Makes every row of unknown characters that is no token itself one character that no token has."""
    single = any(len(token) == 1 and token not in model.pieces for token in tokens)
    if model.bytes or not (model.kind == "unigram" or single or model.symbols):
        return []
    row = f"(?:{model.unknown})+"
    if strangers:
        longest_first = sorted(strangers, key=len, reverse=True)
        row = f"(?<!{model.unknown})(?!(?:{'|'.join(map(re.escape, longest_first))})(?!{model.unknown})){row}"
    return [normalizers.Replace(Regex(row), STRANGE)]


def _make_splits(model: _Model, strangers: Sequence[str]) -> Iterator[pre_tokenizers.PreTokenizer]:
    """Yields where text can be cut before the model sees it without making a difference to the model."""
    if model.kind != "unigram" and model.symbols:
        longest_first = sorted(model.symbols, key=len, reverse=True)
        yield pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
    if model.kind == "unigram" and model.bytes:
        yield pre_tokenizers.Split(Regex(model.unknown), "isolated")
    elif model.kind == "unigram" and strangers:
        yield pre_tokenizers.Split(Regex(f"(?:{model.unknown})+"), "isolated")
    # Words are quicker than sentences, since the library remembers them.
    if SPACE in model.pieces and not any(SPACE in piece[1:] for piece in model.pieces):
        yield pre_tokenizers.Split(SPACE, "merged_with_next")


def _make_decoder(model: _Model) -> Any:
    steps = [decoders.Replace(SPACE, " "), *([decoders.ByteFallback()] if model.bytes else []), decoders.Fuse()]
    if model.spacing.add_dummy or model.spacing.remove_extra:
        # Without extra spaces a text begins with none; otherwise the one that was added is taken off.
        steps.append(decoders.Strip(content=" ", left=1_000_000 if model.spacing.remove_extra else 1, right=0))
    return decoders.Sequence(steps)
