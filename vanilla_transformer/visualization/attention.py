"""Where a model looks while it translates: attention weights with readable labels, and word alignments from them.

Works with every encoder-decoder model of transformers whose attention can return its weights.

Shapes: B sentences, S source tokens, T target tokens, H heads, N layers (of the encoder, or of the decoder). Layers and
heads are counted from 0, as in the names of a model's parameters.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from vanilla_transformer.data.lines import open_text
from vanilla_transformer.files import check_text_output, new_file
from vanilla_transformer.inference.translate import (
    DEFAULT_BATCH_TOKENS_OF_OTHERS,
    encode_texts,
    inference,
    length_limit,
    progress_bar,
)
from vanilla_transformer.model.pipeline_vanilla_transformer import (
    WINDOW_SIZE,
    count_sentences,
    is_vanilla,
    map_by_length,
)

from .labels import Words, find_words, label_tokens

Weights = npt.NDArray[np.float32]
AttentionKind = Literal["encoder", "decoder", "cross"]
KINDS: tuple[AttentionKind, ...] = ("encoder", "decoder", "cross")
Alignment = list[tuple[int, int]]
Side = TypeVar("Side")


@dataclass(frozen=True)
class AttentionMap:
    """The attention weights of one sentence and its translation.

    Tokens are as a person reads them. The words of a token are their indices in the text; special tokens have none.
    """

    source: tuple[str, ...]  # S tokens
    target: tuple[str, ...]  # T tokens that are predicted, one for each position of the decoder
    decoder_input: tuple[str, ...]  # T tokens that the decoder is fed: the start symbol, and the target but its last
    encoder: Weights  # self-attention of the encoder, (N, H, S, S), rows look at columns
    decoder: Weights  # self-attention of the decoder, (N, H, T, T)
    cross: Weights  # attention from target to source, (N, H, T, S)
    source_words: Words
    target_words: Words
    source_text: str
    target_text: str

    def select(self, kind: AttentionKind) -> tuple[Weights, tuple[str, ...], tuple[str, ...]]:
        """Weights (N, H, rows, columns), the labels of the rows, and those of the columns."""
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(KINDS)}.")
        target = self.target if kind == "cross" else self.decoder_input
        return getattr(self, kind), *pair_sides(self.source, target)[kind]


class _Pair(NamedTuple):
    """A sentence and its translation as a model reads them."""

    source_ids: list[int]
    decoder_input_ids: list[int]
    target_ids: list[int]


def collect_attention(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    target: str | None = None,
    *,
    source_prefix: str = "",
    max_source_length: int | None = None,
    split_characters: bool = True,
    **generate_kwargs: Any,
) -> AttentionMap:
    """Translates a sentence, or reads a given translation, and keeps what every head looks at.

    The weights are those of the model's plain ("eager") attention, to which the model is switched meanwhile.

    `target` is a translation to be read; `None`: the model's own, found with `generate_kwargs`. `source_prefix` is put
    before the source, for models such as T5. A source of more tokens than `max_source_length`, special ones included,
    is truncated, with a warning; `None`: the tokenizer's `model_max_length`, which is the limit of a given target too.
    `split_characters` says whether each Chinese and Japanese character is a word; see [`split_words`].

    A ValueError says that the source or the target has no words or is no text, that the model is no encoder-decoder, or
    that it does not return a number for each pair of tokens.
    """
    _check_model(model)
    if not source.strip() or (target is not None and not target.strip()):
        raise ValueError("Attention needs words: the source, or the target that was given, is empty.")
    source_ids = _encode_source(model, tokenizer, source_prefix + source, max_source_length, line_number=1)
    if target is None:
        pair = _translate(model, source_ids, generate_kwargs)
    else:
        pair = _read_target(model, tokenizer, source_ids, target, line_number=1)
    (attention,) = _read_attention(model, [pair], KINDS)
    decode: Any = tokenizer.decode
    read_source = partial(find_words, tokenizer, is_source=True, split_characters=split_characters)
    return AttentionMap(
        source=label_tokens(tokenizer, source_ids, is_source=True),
        target=label_tokens(tokenizer, pair.target_ids),
        decoder_input=label_tokens(tokenizer, pair.decoder_input_ids),
        encoder=attention["encoder"],
        decoder=attention["decoder"],
        cross=attention["cross"],
        source_words=read_source(source_ids, source_prefix + source, prefix_length=len(source_prefix)),
        target_words=find_words(tokenizer, pair.target_ids, target, split_characters=split_characters),
        source_text=source,
        target_text=decode(pair.target_ids, skip_special_tokens=True) if target is None else target,
    )


def _check_model(model: PreTrainedModel) -> None:
    if not getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is no encoder-decoder, so that no target looks at a source.")


def _encode_source(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, max_length: int | None, *, line_number: int
) -> list[int]:
    _check_characters("source", text)
    limit = _find_limit(model, tokenizer, max_length)
    return encode_texts(tokenizer, [text], limit=limit, line_numbers=[line_number])[0]


def _find_limit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_length: int | None) -> int | None:
    # Of another model's positions, `_limits_explained` tells: half of a text would show half of its attention.
    return length_limit(tokenizer, max_length, model if is_vanilla(model) else None)


def _check_characters(side: str, text: str) -> None:
    """What comes from a command line or from JSON may hold halves of characters, on which tokenizers stumble."""
    half = re.search("[\ud800-\udfff]", text)
    if half:
        raise ValueError(f"The {side} is no text: its character {half.start() + 1} is U+{ord(half.group()):04X}.")


def _translate(model: PreTrainedModel, source_ids: list[int], generate_kwargs: dict[str, Any]) -> _Pair:
    input_ids = torch.tensor([source_ids], device=model.device)
    options = {**generate_kwargs, "num_return_sequences": 1, "return_dict_in_generate": False}
    generate: Any = model.generate
    with inference(model), _limits_explained(model, len(source_ids)):
        output = generate(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), **options)[0].tolist()
    return _Pair(source_ids, output[:-1], output[1:])


def _read_target(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source_ids: list[int], target: str, *, line_number: int
) -> _Pair:
    _check_characters("target", target)
    limit = _find_limit(model, tokenizer, None)
    (target_ids,) = encode_texts(tokenizer, [target], limit=limit, line_numbers=[line_number], side="target")
    shift: Any = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None:  # M2M100 has none, and shifts its labels like most of the others
        configs = (model.generation_config, model.config)
        found = [getattr(config, "decoder_start_token_id", None) for config in configs]
        start = next((token_id for token_id in found if token_id is not None), None)
        if start is None:
            raise ValueError(f"{type(model).__name__} has no decoder_start_token_id, so it cannot read a translation.")
        return _Pair(source_ids, [start, *target_ids[:-1]], target_ids)
    return _Pair(source_ids, shift(labels=torch.tensor([target_ids], device=model.device))[0].tolist(), target_ids)


def _read_attention(
    model: PreTrainedModel, pairs: Sequence[_Pair], kinds: Sequence[AttentionKind]
) -> list[dict[AttentionKind, Weights]]:
    """The weights of each kind, (N, H, rows, columns), for each sentence, from one pass padded on the right."""
    sources = [torch.tensor(pair.source_ids) for pair in pairs]
    targets = [torch.tensor(pair.decoder_input_ids) for pair in pairs]
    source_length, target_length = max(map(len, sources)), max(map(len, targets))
    pad_id = getattr(model.config, "pad_token_id", None) or 0
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    with inference(model), _weights_returned(model), _limits_explained(model, source_length, target_length):
        outputs: Any = model(
            input_ids=pad(sources, padding_value=pad_id).to(model.device),
            attention_mask=pad([torch.ones_like(source) for source in sources]).to(model.device),
            # Padding needs no mask here, being behind all that looks back only.
            decoder_input_ids=pad(targets, padding_value=pad_id).to(model.device),
            output_attentions=True,
            return_dict=True,
            use_cache=False,
        )
    sizes = pair_sides(source_length, target_length)
    stacked = {kind: _stack(getattr(outputs, f"{kind}_attentions"), kind, sizes[kind]) for kind in kinds}
    found: list[dict[AttentionKind, Weights]] = []
    for row, pair in enumerate(pairs):
        sizes = pair_sides(len(pair.source_ids), len(pair.decoder_input_ids))
        found.append({kind: stacked[kind][row][:, :, : sizes[kind][0], : sizes[kind][1]] for kind in kinds})
        for kind, weights in found[-1].items():
            if not np.isfinite(weights).all():
                raise ValueError(
                    f"Some of the model's {kind}_attentions are not numbers (NaN): its weights are broken."
                )
    return found


def pair_sides(source: Side, target: Side) -> dict[AttentionKind, tuple[Side, Side]]:
    """What looks, and what it looks at, in each kind of attention."""
    return {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}


@contextmanager
def _weights_returned(model: PreTrainedModel) -> Iterator[None]:
    """Fast attention never builds its weights, so that the plain one takes its place for a while."""
    configs = {id(module.config): module.config for module in model.modules() if isinstance(module, PreTrainedModel)}
    before = [(config, config._attn_implementation) for config in configs.values()]
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        # Parts come behind the whole, whose setting would reach down to them.
        for config, implementation in before:
            config._attn_implementation = implementation


@contextmanager
def _limits_explained(model: PreTrainedModel, source_length: int, target_length: int | None = None) -> Iterator[None]:
    """Says what torch does not find in a table of embeddings."""
    try:
        yield
    except IndexError as error:
        if "out of range in self" not in str(error):
            raise
        positions = getattr(model.config, "max_position_embeddings", None)
        target = "" if target_length is None else f" and {target_length} target tokens"
        limit = "" if positions is None else f" (it has {positions} positions)"
        raise ValueError(f"The model cannot read {source_length} source tokens{target}{limit}: {error}.") from error


def _stack(layers: Any, kind: str, size: tuple[int, int]) -> Weights:
    """Maps one tensor (B, H, rows, columns) per layer to (B, N, H, rows, columns)."""
    if not layers or any(layer is None for layer in layers):
        raise ValueError(f"The model returns no {kind}_attentions: it cannot show what it looks at.")
    for layer in layers:
        shape = tuple(layer.shape) if isinstance(layer, torch.Tensor) else type(layer).__name__
        if len(shape) != 4 or shape[2:] != size:
            raise ValueError(f"{kind}_attentions are {shape}; they must have a weight for each pair of tokens.")
    return np.stack([layer.float().cpu().numpy() for layer in layers], axis=1)


def average_heads(weights: Weights, *, layer: int | None = None, head: int | None = None) -> Weights:
    """The mean of weights (N, H, rows, columns) over layers and heads, or of one of them: (rows, columns)."""
    for name, number, count in (("layer", layer, len(weights)), ("head", head, weights.shape[1])):
        if number is not None and not -count <= number < count:
            raise ValueError(f"{name} is {number}; it must be from 0 to {count - 1}, or from -{count} to -1.")
    kept = weights if layer is None else weights[[layer]]
    kept = kept if head is None else kept[:, [head]]
    return kept.mean(axis=(0, 1))


def align_words(attention: AttentionMap, *, layer: int | None = None, head: int | None = None) -> Alignment:
    """Aligns each target word with the source word that the decoder looks at while it predicts it.

    `layer` and `head`, negative ones counted from the last, choose among the decoder's; `None`: the mean of all.
    Returns pairs (source word, target word), counted from 0, in the order of the target. What is looked at is summed
    over the tokens of a source word, and averaged over those of a target word. Words may share tokens, and links.
    """
    weights = average_heads(attention.cross, layer=layer, head=head)
    return _align(weights, attention.source_words, attention.target_words)


def _align(weights: Weights, source_words: Words, target_words: Words) -> Alignment:
    """The links of [`align_words`] from weights (T, S)."""
    source, target = _membership(source_words), _membership(target_words)
    links: Alignment = []
    if not len(source):
        return links
    looked_at = weights @ source.T  # (T, source words)
    for word, tokens in enumerate(target):
        if tokens.any():
            best = int(looked_at[tokens].mean(axis=0).argmax())
            twins = (source == source[best]).all(axis=1)
            links += [(int(twin), word) for twin in twins.nonzero()[0]]
    return links


def _membership(words: Words) -> npt.NDArray[np.bool_]:
    """Maps the words of each token to (words, tokens)."""
    count = 1 + max((number for numbers in words for number in numbers), default=-1)
    belongs = np.zeros((count, len(words)), dtype=bool)
    for token, numbers in enumerate(words):
        belongs[list(numbers), token] = True
    return belongs


def format_pharaoh(alignment: Iterable[tuple[int, int]]) -> str:
    """Writes an alignment as Pharaoh and its successors do: "0-0 1-2 2-1", source-target, counted from 0."""
    return " ".join(f"{source}-{target}" for source, target in sorted(alignment))


def align_lines(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Iterable[tuple[str, str]],
    *,
    layer: int | None = None,
    head: int | None = None,
    split_characters: bool = True,
    window_size: int = WINDOW_SIZE,
    total: int | None = None,
    batch_size: int | None = None,
    max_batch_tokens: int | None = None,
    max_source_length: int | None = None,
    source_prefix: str = "",
    progress: bool | str = True,
) -> Iterator[Alignment]:
    """Aligns the words of sentences and their translations, as [`align_words`] does, many at a time.

    `pairs` are sources with their translations, which need not fit in memory: at most `window_size` are held at a time,
    and those of like length are read together, at most `batch_size` of them or `max_batch_tokens` (pairs times tokens
    of the longest sentence; 4096 when neither is given). `total` is their number, for the bar. The other options are
    those of [`align_words`] and [`collect_attention`]. Yields the alignments, in order.
    """
    _check_model(model)
    remaining = enumerate(pairs, start=1)
    if batch_size is None and max_batch_tokens is None:
        max_batch_tokens = DEFAULT_BATCH_TOKENS_OF_OTHERS

    def encode(number: int, source: str, target: str) -> tuple[int, tuple[_Pair, Words, Words]]:
        if not source.strip() or not target.strip():
            return 0, (_Pair([], [], []), (), ())
        text = source_prefix + source
        source_ids = _encode_source(model, tokenizer, text, max_source_length, line_number=number)
        pair = _read_target(model, tokenizer, source_ids, target, line_number=number)
        find = partial(find_words, tokenizer, split_characters=split_characters)
        source_words = find(source_ids, text, is_source=True, prefix_length=len(source_prefix))
        return max(map(len, pair)), (pair, source_words, find(pair.target_ids, target))

    def align(batch: list[tuple[_Pair, Words, Words]]) -> list[Alignment]:
        if not batch[0][0].source_ids:
            return [[] for _ in batch]
        found = _read_attention(model, [pair for pair, _, _ in batch], ["cross"])
        return [
            _align(average_heads(attention["cross"], layer=layer, head=head), *words)
            for attention, (_, *words) in zip(found, batch, strict=True)
        ]

    def read(count: int) -> list[tuple[int, tuple[_Pair, Words, Words]]]:
        return [encode(number, *pair) for number, pair in islice(remaining, count)]

    fits = partial(count_sentences, batch_size=batch_size, max_batch_tokens=max_batch_tokens)
    with progress_bar(progress, total=total) as bar:
        for alignment in map_by_length(align, read, fits=fits, window_size=window_size):
            yield alignment
            bar.update()


def align_file(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source_file: str | os.PathLike[str],
    target_file: str | os.PathLike[str],
    alignment_file: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    **options: Any,
) -> int:
    """Aligns the words of a file of sentences with those of their translations, and writes them in Pharaoh's format.

    `source_file` and `target_file` are UTF-8 text, one sentence per line; `.gz`, `.bz2` and `.xz` are decompressed.
    `alignment_file`, with a line for each sentence, is written whole or not at all; an existing one is replaced if
    `overwrite` says so.
    `options` are those of [`align_lines`]. Returns the number of sentences.
    """
    paths = [os.fspath(source_file), os.fspath(target_file)]
    check_text_output(alignment_file, inputs=paths, overwrite=overwrite)
    with open_text(paths[0]) as sources, open_text(paths[1]) as targets:
        counts = [sum(1 for _ in lines) for lines in (sources, targets)]
    if counts[0] != counts[1]:
        raise ValueError(f"{paths[0]} has {counts[0]} lines and {paths[1]} has {counts[1]}; they must be as many.")
    with (
        open_text(paths[0]) as sources,
        open_text(paths[1]) as targets,
        new_file(alignment_file, overwrite=overwrite) as partial_file,
        open(partial_file, "w", encoding="utf-8", newline="\n") as output,
    ):
        pairs = zip(*((line.rstrip("\r\n") for line in lines) for lines in (sources, targets)), strict=True)
        for alignment in align_lines(model, tokenizer, pairs, total=counts[0], **options):
            output.write(format_pharaoh(alignment) + "\n")
    return counts[0]
