"""Tokenizers over plain lists of tokens, which is all that several systems keep of how their texts were cut.

They read texts in which a space ends each token, and write them joined again.
"""

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from vanilla_transformer.conversion.errors import ConversionError
from vanilla_transformer.model.tokenization_vanilla_transformer import VanillaTransformerTokenizer


def make_word_tokenizer(
    tokens: Sequence[str],
    *,
    target_tokens: Sequence[str] | None = None,
    bos: str,
    pad: str,
    eos: str,
    unk: str,
    joiner: str | None = None,
    end_source: bool = True,
) -> VanillaTransformerTokenizer:
    """Makes the tokenizer of a vocabulary: white space ends each token, and every token is looked up as it is.

    `tokens` are in the order of their ids; `target_tokens` are the target's, if it has its own. `joiner` is how pieces
    of words are marked, which decoding puts together: "@@" ends all but a word's last (subword-nmt), "▁" begins a
    word's first (sentencepiece), "￭" joins a piece to its neighbour (OpenNMT's tokenizer). Without `end_source` only
    the target ends with `eos`, and so each side has a vocabulary.
    """
    settings: dict[str, Any] = {"bos_token": bos, "pad_token": pad, "eos_token": eos, "unk_token": unk}
    check_vocabularies(tokens, target_tokens, tuple(settings.values()))
    if target_tokens is None and not end_source:
        target_tokens = tokens
    if target_tokens is not None:
        settings["target_tokenizer_object"] = _make_backend(target_tokens, unk, joiner, eos)
    source = _make_backend(tokens, unk, joiner, eos if end_source else None)
    return VanillaTransformerTokenizer(tokenizer_object=source, **settings)


def check_vocabularies(tokens: Sequence[str], target_tokens: Sequence[str] | None, specials: Sequence[str]) -> None:
    """Refuses vocabularies that have a token twice, lack a special one, or give one of these different ids."""
    sides = {"source": list(tokens)} | ({} if target_tokens is None else {"target": list(target_tokens)})
    problems = []
    for side, vocabulary in sides.items():
        ids = {token: index for index, token in reversed(list(enumerate(vocabulary)))}
        twice = [token for index, token in enumerate(vocabulary) if ids[token] != index]
        if twice:
            problems.append(f"the {side} vocabulary has {len(twice)} tokens twice, first {twice[0]!r}")
        problems += [f"the {side} vocabulary lacks {token!r}" for token in specials if token not in ids]
    if not problems:
        ids_of = {token: {vocabulary.index(token) for vocabulary in sides.values()} for token in specials}
        problems = [
            f"{token!r} has the ids {' and '.join(map(str, sorted(ids)))} in the two vocabularies, which a model cannot"
            for token, ids in ids_of.items()
            if len(ids) > 1
        ]
    if problems:
        raise ConversionError(f"The vocabulary cannot be taken over: {'; '.join(problems)}.")


def align_special_tokens(tokens: Sequence[str], target_tokens: Sequence[str], specials: Sequence[str]) -> list[int]:
    """Finds an order of the target's tokens in which the special ones have the ids that they have in the source's.

    Returns for each new id the present one, so that `weight[order]` picks the rows. Tokens that need not move stay.
    """
    order = list(range(len(target_tokens)))
    for token in specials:
        if token in tokens and token in target_tokens and tokens.index(token) < len(order):
            new, now = tokens.index(token), order.index(target_tokens.index(token))
            order[new], order[now] = order[now], order[new]
    return order


def _make_backend(tokens: Sequence[str], unk: str, joiner: str | None, end: str | None) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocab, unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if joiner is not None:
        tokenizer.decoder = _make_decoder(joiner)
    # Written out even where nothing is added: a tokenizer without a post-processor is given one.
    single, pair, ends = (
        ("$A", "$A $B", []) if end is None else (f"$A {end}", f"$A {end} $B {end}", [(end, vocab[end])])
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ends)
    return tokenizer


def _make_decoder(joiner: str) -> Any:
    if joiner == "▁":
        return decoders.Metaspace(replacement=joiner, prepend_scheme="always")
    mark = re.escape(joiner)
    joints = f" ?{mark} ?" if joiner == "￭" else f"{mark} "
    # Decoders see one token at a time: each gets the space behind it that a joint, or the end, then takes away.
    space, joint, end = (Regex(pattern) for pattern in (r"\z", joints, r" \z"))
    # Not by Strip for the last one, which crashes on an empty text.
    steps = [decoders.Replace(space, " "), decoders.Fuse(), decoders.Replace(joint, ""), decoders.Replace(end, "")]
    return decoders.Sequence(steps)
