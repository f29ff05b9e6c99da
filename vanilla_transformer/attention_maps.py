"""Where a model looks while it translates: attention weights with readable labels, and word alignments from them.

Works with every encoder-decoder model of transformers whose attention can return its weights.

Shapes: S source tokens, T target tokens, H heads, N layers (of the encoder, or of the decoder).
"""

import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .translation import inference

Weights = npt.NDArray[np.float32]
AttentionKind = Literal["encoder", "decoder", "cross"]

# Scripts that are written without spaces: each character counts as a word.
_NO_SPACES = ("CJK UNIFIED", "CJK COMPAT", "HIRAGANA", "KATAKANA")


@dataclass(frozen=True)
class AttentionMap:
    """The attention weights of one sentence and its translation.

    Args:
        source: The source tokens as a person reads them, S of them.
        target: The target tokens that are predicted, one for each position of the decoder, T of them.
        decoder_input: The tokens that the decoder is fed, T of them: the start symbol, and the target but its last.
        encoder: Self-attention of the encoder, (N, H, S, S), rows look at columns.
        decoder: Self-attention of the decoder, (N, H, T, T).
        cross: Attention from target to source, (N, H, T, S).
        source_words: For each source token the index of its word, or -1 (special tokens).
        target_words: The same for the target.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    decoder_input: tuple[str, ...]
    encoder: Weights
    decoder: Weights
    cross: Weights
    source_words: tuple[int, ...]
    target_words: tuple[int, ...]

    def select(self, kind: AttentionKind) -> tuple[Weights, tuple[str, ...], tuple[str, ...]]:
        """Returns weights (N, H, rows, columns), the labels of the rows, and those of the columns.

        Raises:
            ValueError: If there is no such kind.
        """
        if kind == "encoder":
            return self.encoder, self.source, self.source
        if kind == "decoder":
            return self.decoder, self.decoder_input, self.decoder_input
        if kind == "cross":
            return self.cross, self.target, self.source
        raise ValueError(f"kind is {kind!r}; it must be 'encoder', 'decoder' or 'cross'.")


def collect_attention(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    target: str | None = None,
    **generate_kwargs: Any,
) -> AttentionMap:
    """Translates a sentence, or reads a given translation, and keeps what every head looks at.

    Args:
        model: An encoder-decoder model.
        tokenizer: Its tokenizer.
        source: The source sentence.
        target: A translation to be read; `None`: the model's own.
        **generate_kwargs: Passed on to `model.generate`.

    Returns:
        The weights, with labels.

    Raises:
        ValueError: If the source or the target has no words, or the model does not return its weights.
    """
    if not source.strip() or (target is not None and not target.strip()):
        raise ValueError("Attention needs words: the source, or the target that was given, is empty.")
    inputs = tokenizer(source, return_tensors="pt").to(model.device)
    with inference(model), _weights_returned(model):
        if target is None:
            generate: Any = model.generate
            output = generate(**inputs, **generate_kwargs)
            decoder_input, labels = output[0, :-1], output[0, 1:]
        else:
            labels = torch.tensor(tokenizer(text_target=target)["input_ids"], device=model.device)
            shift: Any = model.prepare_decoder_input_ids_from_labels
            decoder_input = shift(labels=labels[None])[0]
        outputs: Any = model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            decoder_input_ids=decoder_input[None],
            output_attentions=True,
            use_cache=False,
        )
    source_ids, target_ids = inputs["input_ids"][0].tolist(), labels.tolist()
    return AttentionMap(
        source=label_tokens(tokenizer, source_ids, is_source=True),
        target=label_tokens(tokenizer, target_ids),
        decoder_input=label_tokens(tokenizer, decoder_input.tolist()),
        encoder=_stack(outputs.encoder_attentions, "encoder_attentions"),
        decoder=_stack(outputs.decoder_attentions, "decoder_attentions"),
        cross=_stack(outputs.cross_attentions, "cross_attentions"),
        source_words=find_words(tokenizer, source_ids, is_source=True),
        target_words=find_words(tokenizer, target_ids),
    )


@contextmanager
def _weights_returned(model: PreTrainedModel) -> Iterator[None]:
    """Fast attention never builds its weights, so that the plain one takes its place for a while."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _stack(layers: Sequence[torch.Tensor | None] | None, name: str) -> Weights:
    """Maps one tensor (1, H, rows, columns) per layer to (N, H, rows, columns)."""
    if not layers or any(layer is None for layer in layers):
        raise ValueError(f"The model returns no {name}: it cannot show what it looks at.")
    return np.stack([layer[0].float().cpu().numpy() for layer in layers if layer is not None])


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], is_source: bool, skip_special: bool) -> str:
    # Only tokenizers with two vocabularies need to be told which, and others would refuse the argument.
    side = {"use_source_tokenizer": True} if is_source and getattr(tokenizer, "separate_vocabs", False) else {}
    decode: Any = tokenizer.decode
    text: str = decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False, **side)
    return text


def label_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, is_source: bool = False) -> tuple[str, ...]:
    """Writes tokens as a person reads them.

    Args:
        tokenizer: The tokenizer.
        ids: The tokens, L of them.
        is_source: Whether they are of the source's vocabulary, where there are two.

    Returns:
        L labels: the text that each token adds to those before it, with "_" for a leading space within a text; the
        name of a special token; and for a part of a character, which is no text, the token's own name.
    """
    labels, special = [], set(tokenizer.all_special_ids)
    ends = _text_ends(tokenizer, ids, is_source)
    text = _decode(tokenizer, ids, is_source, skip_special=True)
    side: Any = tokenizer
    if not is_source and getattr(tokenizer, "separate_vocabs", False):
        side = side.target_tokenizer
    for index, token_id in enumerate(ids):
        start, end = ends[index], ends[index + 1]
        piece = text[start:end]
        if token_id in special or not piece:
            labels.append(str(side.convert_ids_to_tokens(token_id)))
        else:
            labels.append(("_" if piece[0].isspace() and start > 0 else "") + piece.strip() or "_")
    return tuple(labels)


def _text_ends(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], is_source: bool) -> list[int]:
    """For each prefix of the tokens, how much of the whole text it surely has, in characters; L + 1 numbers."""
    whole = _decode(tokenizer, ids, is_source, skip_special=True)
    ends = [0]
    for length in range(1, len(ids) + 1):
        prefix = _decode(tokenizer, ids[:length], is_source, skip_special=True)
        common = next(
            (i for i, (a, b) in enumerate(zip(prefix, whole, strict=False)) if a != b), min(len(prefix), len(whole))
        )
        ends.append(max(common, ends[-1]))
    ends[-1] = len(whole)
    return ends


def find_words(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, is_source: bool = False) -> tuple[int, ...]:
    """Finds the word that each token belongs to.

    Words are what spaces divide; each character of Chinese and Japanese, which have none, is a word.

    Args:
        tokenizer: The tokenizer.
        ids: The tokens, L of them.
        is_source: Whether they are of the source's vocabulary, where there are two.

    Returns:
        L indices of words, counted from 0; -1 for special tokens and spaces.
    """
    text = _decode(tokenizer, ids, is_source, skip_special=True)
    ends = _text_ends(tokenizer, ids, is_source)
    words = _number_words(text)
    special, found = set(tokenizer.all_special_ids), []
    for index, token_id in enumerate(ids):
        # A part of a character belongs to the character that it completes, or helps to.
        start, end = ends[index], max(ends[index + 1], ends[index] + 1)
        inside = [word for word in words[start:end] if word >= 0]
        found.append(inside[-1] if inside and token_id not in special else -1)
    return tuple(found)


def _number_words(text: str) -> list[int]:
    """For each character the index of its word, -1 for spaces."""
    numbers, word, is_open = [], -1, False
    for character in text:
        alone = unicodedata.name(character, "").startswith(_NO_SPACES)
        if character.isspace():
            numbers.append(-1)
        else:
            word += alone or not is_open
            numbers.append(word)
        is_open = not (alone or character.isspace())
    return numbers


def align_words(attention: AttentionMap, *, layer: int | None = None, head: int | None = None) -> list[tuple[int, int]]:
    """Aligns each target word with the source word that the decoder looks at while it predicts it.

    Args:
        attention: The weights of a sentence and its translation.
        layer: The decoder's layer, counted from 0 (negative: from the last); `None`: the mean of all.
        head: The head, counted from 0; `None`: the mean of all.

    Returns:
        (source word, target word) pairs, counted from 0, in the order of the target. What is looked at is summed over
        the tokens of a source word, and averaged over those of a target word.
    """
    weights = attention.cross if layer is None else attention.cross[[layer]]
    weights = weights if head is None else weights[:, [head]]
    mean = weights.mean(axis=(0, 1))  # (T, S)
    source_words, target_words = np.array(attention.source_words), np.array(attention.target_words)
    if source_words.max(initial=-1) < 0:
        return []
    looked_at = np.stack([mean[:, source_words == word].sum(axis=1) for word in range(source_words.max() + 1)], axis=1)
    return [
        (int(looked_at[target_words == word].mean(axis=0).argmax()), word)
        for word in range(target_words.max(initial=-1) + 1)
        if (target_words == word).any()
    ]


def format_pharaoh(alignment: Sequence[tuple[int, int]]) -> str:
    """Writes an alignment as Pharaoh and its successors do: "0-0 2-1 1-2", source-target, counted from 0."""
    return " ".join(f"{source}-{target}" for source, target in sorted(alignment))
