"""Subword regularisation: training texts that are cut into other tokens each time they are seen.

- BPE-dropout (Provilkov et al., 2020), of byte-pair vocabularies: each possible merge of a word is left out with
  probability p. The tokenizers library takes no seed for it: such a run is not repeatable.
- Sampling (Kudo, 2018), of unigram vocabularies: see `unigram_sampling`.

The tokens must be drawn when a batch is made, never in a `Dataset.map`, whose result is cached.
"""

import copy
import functools
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tokenizers import Encoding, models
from transformers import BatchEncoding, PreTrainedTokenizerBase

from .unigram_sampling import UnigramSampler


@functools.cache
def _drawing_thread() -> ThreadPoolExecutor:
    """A thread that draws all tokens of this process: the workers of a DataLoader would draw as their parent does."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="subwords")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drawing_thread.cache_clear)


class SubwordRegularization:
    """Turns sentence pairs into ids, with other tokens at each call.

    Works on a batch (columns of strings) and on a single example (strings). Under the Trainer, set
    `remove_unused_columns=False`, since the texts are needed until a batch is made.

    Args:
        tokenizer: A fast tokenizer such as `VanillaTransformerTokenizer`, with one vocabulary or two, each of them of
            byte pairs or unigram. It is copied, and stays as it is.
        bpe_dropout: Of byte-pair vocabularies: the probability of leaving out a merge, in [0, 1). The paper's: 0.1, and
            0.6 for Chinese and Japanese.
        unigram_alpha: Of unigram vocabularies: the exponent of the probabilities of ways to cut a text, greater than 0.
            0.1 to 0.5 are usual; the smaller, the more even.
        max_source_length, max_target_length: Tokens, `</s>` included, that texts are cut to. `None`: they never are.
        source_column, target_column: Where the texts are.

    Raises:
        ValueError: If a number is out of its range, if a vocabulary is of neither kind or lacks its number, or if a
            number has no vocabulary.

    Example:
        ```python
        draw = SubwordRegularization(tokenizer, unigram_alpha=0.2, max_source_length=256, max_target_length=256)
        train_dataset = pairs.with_transform(draw)  # a datasets.Dataset with columns "source" and "target"
        train_dataset = streamed_pairs.map(draw, remove_columns=["source", "target"])  # an IterableDataset
        ```
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        bpe_dropout: float | None = None,
        unigram_alpha: float | None = None,
        max_source_length: int | None = None,
        max_target_length: int | None = None,
        source_column: str = "source",
        target_column: str = "target",
    ) -> None:
        check_numbers(bpe_dropout, unigram_alpha)
        if bpe_dropout is None and unigram_alpha is None:
            raise ValueError("Give bpe_dropout or unigram_alpha, by the kind of the vocabulary.")
        for name, limit in (("max_source_length", max_source_length), ("max_target_length", max_target_length)):
            if limit is not None and limit < 1:
                raise ValueError(f"{name}={limit}: must be at least 1 token, or None.")
        self.max_source_length = max_source_length
        self.max_target_length = max_target_length
        self.source_column = source_column
        self.target_column = target_column
        self._tokenizer = copy.deepcopy(tokenizer)
        self._samplers = _regularize(self._tokenizer, bpe_dropout, unigram_alpha)

    def __call__(self, pairs: Mapping[str, Any]) -> dict[str, Any]:
        """Draws `input_ids`, `attention_mask` and `labels` for a batch (lists of strings) or for one pair (strings)."""
        return _drawing_thread().submit(self._draw, pairs).result()

    def _draw(self, pairs: Mapping[str, Any]) -> dict[str, Any]:
        sampler, target_sampler = self._samplers
        sources = self._encode(sampler, self.max_source_length, text=pairs[self.source_column])
        targets = self._encode(target_sampler, self.max_target_length, text_target=pairs[self.target_column])
        is_batch = not isinstance(pairs[self.source_column], str)
        mask = [[1] * len(ids) for ids in sources] if is_batch else [1] * len(sources)
        return {"input_ids": sources, "attention_mask": mask, "labels": targets}

    def _encode(self, sampler: UnigramSampler | None, limit: int | None, **texts: Any) -> list[Any]:
        # Not verbose: the library's remark about overlong texts names no text and comes once.
        if sampler is None:
            found = self._tokenizer(**texts, truncation=limit is not None, max_length=limit, verbose=False)
            return list(found["input_ids"])
        encoded: BatchEncoding = self._tokenizer(**texts, verbose=False)
        is_left = self._tokenizer.truncation_side == "left"
        drawn = [_draw_again(sampler, each, limit, is_left=is_left) for each in encoded.encodings or []]
        [text] = texts.values()
        return drawn[0] if isinstance(text, str) else drawn


class BpeDropout(SubwordRegularization):
    """`SubwordRegularization` of byte pairs alone, with the probability `p` of leaving out a merge."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        p: float,
        max_source_length: int | None = None,
        max_target_length: int | None = None,
        **columns: Any,
    ) -> None:
        limits: dict[str, Any] = {"max_source_length": max_source_length, "max_target_length": max_target_length}
        super().__init__(tokenizer, bpe_dropout=p, **limits, **columns)
        self.p = p


def check_numbers(bpe_dropout: float | None, unigram_alpha: float | None) -> None:
    """Refuses numbers out of their ranges by a `ValueError`; `None` is not there."""
    if bpe_dropout is not None and not 0 <= bpe_dropout < 1:
        raise ValueError(
            f"bpe_dropout={bpe_dropout}: must be at least 0 and less than 1, as the probability of leaving out a merge."
        )
    if unigram_alpha is not None and not 0 < unigram_alpha < math.inf:
        raise ValueError(f"unigram_alpha={unigram_alpha}: must be greater than 0, and finite.")


def measure_length_growth(
    tokenizer: PreTrainedTokenizerBase,
    p: float | None,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    unigram_alpha: float | None = None,
) -> tuple[float, float]:
    """Measures tokens with regularisation per token without, for sources and targets; a thousand texts or so suffice.

    To plan batches, multiply the lengths by these factors (on Multi30k, with 8000 tokens and p = 0.1, 1.14 and 1.15).
    """
    draw = SubwordRegularization(tokenizer, bpe_dropout=p, unigram_alpha=unigram_alpha)
    drawn = draw({"source": list(sources), "target": list(targets)})
    plain = tokenizer(list(sources), text_target=list(targets), verbose=False)
    source, target = (sum(map(len, drawn[name])) / sum(map(len, plain[name])) for name in ("input_ids", "labels"))
    return source, target


def _regularize(
    tokenizer: PreTrainedTokenizerBase, bpe_dropout: float | None, unigram_alpha: float | None
) -> tuple[UnigramSampler | None, UnigramSampler | None]:
    """Has the byte-pair vocabularies of a tokenizer leave out merges; returns samplers for the others."""
    sides = [getattr(tokenizer, name, tokenizer) for name in ("source_tokenizer", "target_tokenizer")]
    backends: list[Any] = [getattr(side, "backend_tokenizer", None) for side in sides]
    samplers: dict[int, UnigramSampler | None] = {}
    for backend in backends:
        model = getattr(backend, "model", None)
        if isinstance(model, models.BPE) and bpe_dropout is not None:
            model.dropout = bpe_dropout or None
            samplers[id(backend)] = None
        elif isinstance(model, models.Unigram) and unigram_alpha is not None:
            samplers[id(backend)] = UnigramSampler(backend, unigram_alpha)
        else:
            needs = [] if bpe_dropout is None else ["BPE-dropout needs byte-pair merges"]
            needs += [] if unigram_alpha is None else ["unigram_alpha needs a unigram vocabulary"]
            kind = type(model).__name__
            advice = {"BPE": ": give bpe_dropout", "Unigram": ": give unigram_alpha"}.get(kind, "")
            found = "no fast tokenizer" if model is None else f"a {kind} model"
            raise ValueError(f"{' and '.join(needs)}, but {type(tokenizer).__name__} is {found}{advice}.")
    if bpe_dropout is not None and None not in samplers.values():
        raise ValueError(f"bpe_dropout={bpe_dropout}, but no vocabulary of {type(tokenizer).__name__} has merges.")
    if unigram_alpha is not None and not any(samplers.values()):
        raise ValueError(f"unigram_alpha={unigram_alpha}, but no vocabulary of {type(tokenizer).__name__} is unigram.")
    return samplers[id(backends[0])], samplers[id(backends[1])]


def _draw_again(sampler: UnigramSampler, encoding: Encoding, limit: int | None, *, is_left: bool) -> list[int]:
    """Draws pieces anew, between the special tokens that were added to a text, and cuts off what is too much."""
    ids, added = encoding.ids, encoding.special_tokens_mask
    begin = next((place for place, is_added in enumerate(added) if not is_added), len(ids))
    end = next((place for place in range(len(ids), begin, -1) if not added[place - 1]), begin)
    drawn = sampler.draw(ids[begin:end], encoding.word_ids[begin:end])
    excess = max(len(drawn) + len(ids) - (end - begin) - limit, 0) if limit is not None else 0
    drawn = drawn[excess:] if is_left else drawn[: len(drawn) - excess]
    return [*ids[:begin], *drawn, *ids[end:]]
