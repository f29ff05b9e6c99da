"""How likely a model finds given translations: their loss per token, and its exponential, the perplexity."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.model.loss_vanilla_transformer import IGNORED_LABEL

from .translate import TranslationModel, encode_texts, inference, length_limit, progress_bar


def score_loss(
    model: TranslationModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    batch_size: int = 32,
    max_source_length: int | None = None,
    max_target_length: int | None = None,
    first_line: int = 1,
    progress: bool | str = True,
) -> dict[str, float]:
    """Mean negative log-likelihood of the reference translations per target token, without label smoothing.

    Batches do not matter, since the sum over all tokens is divided once. Texts longer than the limits, the tokenizer's
    own or learned positions are truncated with a warning that names the line; the first is `first_line`. Returns
    `loss` in nats per token, `perplexity` = exp(loss), and `tokens`, the number of target tokens, `</s>` included. They
    depend on the tokenizer.
    """
    if len(sources) != len(targets) or not targets:
        raise ValueError(f"{len(sources)} sources and {len(targets)} targets; there must be as many, and at least one.")
    limits = {"max_source_length": max_source_length, "max_target_length": max_target_length}
    total, tokens = 0.0, 0
    with inference(model), progress_bar(progress, total=len(targets)) as bar:
        for batch, inputs, labels in _make_batches(
            model, tokenizer, sources, targets, batch_size=batch_size, first_line=first_line, **limits
        ):
            total += _sum_losses(model, inputs, labels)
            tokens += int((labels != IGNORED_LABEL).sum())
            bar.update(len(batch))
    return {"loss": total / tokens, "perplexity": to_perplexity(total / tokens), "tokens": tokens}


def score_pairs(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    batch_size: int = 32,
) -> list[float]:
    """The cross-entropy of each target given its source, in nats per target token, `</s>` included.

    Truncates as [`score_loss`] does. The model is one of the library, and not an exported one.
    """
    losses = [0.0] * len(targets)
    with inference(model):
        options: dict[str, Any] = {"batch_size": batch_size, "first_line": None}
        for batch, inputs, labels in _make_batches(model, tokenizer, sources, targets, **options):
            sums = _find_losses(model, inputs, labels).sum(dim=1).tolist()
            counts = (labels != IGNORED_LABEL).sum(dim=1).tolist()
            for index, loss, count in zip(batch, sums, counts, strict=True):
                losses[index] = loss / count
    return losses


def _make_batches(
    model: TranslationModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    batch_size: int,
    max_source_length: int | None = None,
    max_target_length: int | None = None,
    first_line: int | None = 1,
) -> Iterator[tuple[list[int], Any, torch.Tensor]]:
    """Yields the indices of pairs, longest first, with the model's inputs and their labels (batch, target_length)."""
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1 sentence pair.")
    lines = None if first_line is None else range(first_line, first_line + len(sources))
    wanted = (max_source_length, max_target_length)
    limits = [length_limit(tokenizer, each, model) for each in wanted]
    source_ids = encode_texts(tokenizer, sources, limit=limits[0], line_numbers=lines)
    target_ids = encode_texts(tokenizer, targets, limit=limits[1], line_numbers=lines, side="target")
    order = range(len(sources))
    longest_first = sorted(order, key=lambda index: (len(source_ids[index]), len(target_ids[index])), reverse=True)
    for start in range(0, len(targets), batch_size):
        batch = longest_first[start : start + batch_size]
        ids = {"input_ids": [source_ids[index] for index in batch]}
        inputs = tokenizer.pad(ids, return_attention_mask=True, return_tensors="pt")
        rows = [torch.tensor(target_ids[index], dtype=torch.long) for index in batch]
        labels = pad_sequence(rows, batch_first=True, padding_value=IGNORED_LABEL)
        yield batch, inputs.to(model.device), labels.to(model.device)


def join_losses(losses: Sequence[dict[str, float]]) -> dict[str, float]:
    """What [`score_loss`] would return for all sentences, from what it has returned for each of their parts."""
    if len(losses) == 1:
        return losses[0]
    tokens = sum(each["tokens"] for each in losses)
    loss = math.fsum(each["loss"] * each["tokens"] for each in losses) / tokens
    return {"loss": loss, "perplexity": to_perplexity(loss), "tokens": tokens}


def to_perplexity(loss: float) -> float:
    """The exponential of a loss in nats per token; infinite where `math.exp` would overflow."""
    return torch.tensor(loss, dtype=torch.float64).exp().item()


def _sum_losses(model: Any, inputs: Any, labels: torch.Tensor) -> float:
    """Negative log-likelihood of `labels` (batch, target_length), summed over its tokens; -100 marks padding."""
    if hasattr(model, "sum_losses"):  # CTranslate2 gives no logits
        return float(model.sum_losses(**inputs, labels=labels))
    return float(_find_losses(model, inputs, labels).sum())


def _find_losses(model: Any, inputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of each of the `labels` (batch, target_length), 0 where -100 marks padding."""
    # The model's own loss may be smoothed or a mean over its batch: only its logits are used. Models without this
    # method shift the labels in their forward pass.
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    inputs |= {"labels": labels} if shift is None else {"decoder_input_ids": shift(labels=labels)}
    inputs["decoder_attention_mask"] = (labels != IGNORED_LABEL).long()
    logits = model(**inputs, use_cache=False).logits.float().flatten(0, 1)
    losses = cross_entropy(logits, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none")
    return losses.cpu().double().view(labels.shape)
