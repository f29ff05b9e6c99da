"""Scores of translations (BLEU, chrF, TER, exact match), of summaries (ROUGE), and of a model's loss and perplexity.

BLEU, chrF, ROUGE and exact match run from 0 to 100; TER counts edits per 100 words. They compare detokenised text, as
sacreBLEU wants it. The modules for evaluate in `metrics` give the same scores (ROUGE from 0 to 1, as evaluate's own).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import EvalPrediction, PreTrainedTokenizerBase

from vanilla_transformer.model.loss_vanilla_transformer import IGNORED_LABEL
from vanilla_transformer.tasks import TRANSLATION, Task

from .metrics.rouge_scores import corpus_rouge, import_rouge, make_rouge, rouge_signature
from .metrics.sacrebleu_scores import corpus_score, import_sacrebleu, make_bleu, make_chrf, make_ter
from .translate import TranslationModel, encode_texts, inference, length_limit, progress_bar


class TranslationScores(TypedDict):
    """What [`score_translations`] returns; every score but TER from 0 to 100."""

    bleu: float
    bleu_signature: str
    bleu_lowercase: float
    bleu_lowercase_signature: str
    chrf: float
    chrf_signature: str
    exact_match: float
    ter: NotRequired[float]
    ter_signature: NotRequired[str]


class SummaryScores(TypedDict):
    """What [`score_summaries`] returns; every score from 0 to 100."""

    rouge1: float
    rouge2: float
    rougeL: float
    rougeLsum: float
    rouge_signature: str
    exact_match: float


class LossScores(TypedDict):
    """What [`score_loss`] returns."""

    loss: float
    perplexity: float
    tokens: int


def score_translations(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: str = "13a",
    ter: bool = False,
) -> TranslationScores:
    """Compares translations with one reference each.

    Args:
        hypotheses: Translations, detokenised.
        references: Reference translations, in the same order.
        lowercase: Ignore case in `bleu` and `chrf` (`bleu_lowercase` always does, `exact_match` never).
        tokenize: SacreBLEU's tokeniser, for both BLEU scores (`"13a"`, `"intl"`, `"zh"`, `"char"`, ...).
        ter: Compute the translation edit rate too, which takes many times longer than the others.

    Returns:
        `bleu` and `chrf` (chrF2) of the corpus with their sacreBLEU signatures; `bleu_lowercase`, BLEU over lowercased
        tokens, the number that much of the literature on small corpora reports; `exact_match`, the percentage of
        translations equal to their reference but for white space at the ends; with `ter`, TER and its signature. TER
        ignores case whatever `lowercase` says: that is its definition.

    Raises:
        ImportError: If sacrebleu is not installed.
        TypeError: If one of them is a single string.
        ValueError: If there is nothing to compare, the two differ in number, or sacreBLEU has no such tokeniser.
    """
    _check_texts(hypotheses, references)
    bleu, bleu_signature = corpus_score(make_bleu(lowercase=lowercase, tokenize=tokenize), hypotheses, references)
    lowercased, lowercased_signature = corpus_score(
        make_bleu(lowercase=True, tokenize=tokenize), hypotheses, references
    )
    chrf, chrf_signature = corpus_score(make_chrf(lowercase=lowercase), hypotheses, references)
    scores: TranslationScores = {
        "bleu": bleu.score,
        "bleu_signature": bleu_signature,
        "bleu_lowercase": lowercased.score,
        "bleu_lowercase_signature": lowercased_signature,
        "chrf": chrf.score,
        "chrf_signature": chrf_signature,
        "exact_match": _exact_match(hypotheses, references),
    }
    if ter:
        rate, scores["ter_signature"] = corpus_score(make_ter(), hypotheses, references)
        scores["ter"] = rate.score
    return scores


def _check_texts(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if isinstance(hypotheses, str) or isinstance(references, str):
        raise TypeError("hypotheses and references are lists of strings, one of them is a single string.")
    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(
            f"{len(hypotheses)} hypotheses and {len(references)} references; there must be as many of "
            "one as of the other, and at least one."
        )


def _exact_match(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    pairs = zip(hypotheses, references, strict=True)
    exact = sum(hypothesis.strip() == reference.strip() for hypothesis, reference in pairs)
    return 100 * exact / len(references)


def score_summaries(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "unicode", use_stemmer: bool = False
) -> SummaryScores:
    """Compares summaries with one reference each.

    Args:
        hypotheses: Summaries.
        references: Reference summaries, in the same order.
        tokenize: What ROUGE takes for words: `"unicode"`, those of any script, or `"ascii"`, runs of a to z and 0 to 9
            as in the package rouge_score, which is the same for text in ASCII.
        use_stemmer: Strip the endings of English words for ROUGE.

    Returns:
        `rouge1`, `rouge2`, `rougeL` and `rougeLsum` (whose sentences are lines), F1 averaged over the summaries, with
        the signature of all four; `exact_match` as in [`score_translations`].

    Raises:
        ImportError: If rouge_score is not installed.
        TypeError: If one of them is a single string.
        ValueError: If there is nothing to compare, the two differ in number, or there is no such tokeniser.
    """
    _check_texts(hypotheses, references)
    scorer = make_rouge(tokenize=tokenize, use_stemmer=use_stemmer)
    means = {name: 100 * mean for name, mean in corpus_rouge(scorer, hypotheses, references).items()}
    signature = rouge_signature(tokenize=tokenize, use_stemmer=use_stemmer)
    exact_match = _exact_match(hypotheses, references)
    return cast(SummaryScores, {**means, "rouge_signature": signature, "exact_match": exact_match})


def score_loss(
    model: TranslationModel,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    batch_size: int = 32,
    max_source_length: int | None = None,
    max_target_length: int | None = None,
    progress: bool | str = True,
) -> LossScores:
    """Mean negative log-likelihood of the reference translations, per target token.

    The sum over all tokens is divided once, so batches do not matter, and it is plain: no label smoothing.

    Args:
        model: Any sequence-to-sequence model, or a `CTranslate2Model`; the inputs are moved to its device.
        tokenizer: Its tokenizer.
        sources: Source sentences.
        targets: Their translations.
        batch_size: Sentence pairs per forward pass.
        max_source_length: Tokens, special ones included; longer sources are truncated with a warning that names the
            line, counted from 1. `None`: the tokenizer's `model_max_length`.
        max_target_length: The same for targets.
        progress: Whether to show a bar on stderr; a string is its description.

    Returns:
        `loss` in nats per token, `perplexity` = exp(loss), and `tokens`, the number of target tokens, `</s>` included.
        They depend on the tokenizer: compare only models that share one.

    Raises:
        ValueError: If there is no pair, sources and targets differ in number, or a size is too small.
    """
    if len(sources) != len(targets) or not targets:
        raise ValueError(
            f"{len(sources)} sources and {len(targets)} targets; there must be as many of one as of the "
            "other, and at least one."
        )
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1 sentence pair.")
    lines = range(1, len(sources) + 1)
    source_ids = encode_texts(tokenizer, sources, limit=length_limit(tokenizer, max_source_length), line_numbers=lines)
    target_ids = encode_texts(
        tokenizer, targets, limit=length_limit(tokenizer, max_target_length), line_numbers=lines, side="target"
    )
    lengths = [(len(source), len(target)) for source, target in zip(source_ids, target_ids, strict=True)]
    longest_first = sorted(range(len(targets)), key=lambda index: lengths[index], reverse=True)
    total = 0.0
    with inference(model), progress_bar(progress, total=len(targets)) as bar:
        for start in range(0, len(targets), batch_size):
            batch = longest_first[start : start + batch_size]
            inputs = tokenizer.pad(
                {"input_ids": [source_ids[index] for index in batch]}, return_attention_mask=True, return_tensors="pt"
            )
            labels = pad_sequence(
                [torch.tensor(target_ids[index], dtype=torch.long) for index in batch],
                batch_first=True,
                padding_value=IGNORED_LABEL,
            )
            total += _sum_of_losses(model, inputs.to(model.device), labels.to(model.device))
            bar.update(len(batch))
    tokens = sum(target_length for _, target_length in lengths)
    loss = total / tokens
    return {"loss": loss, "perplexity": to_perplexity(loss), "tokens": tokens}


def to_perplexity(loss: float) -> float:
    """The exponential of a loss in nats per token; infinite where `math.exp` would overflow."""
    return torch.tensor(loss, dtype=torch.float64).exp().item()


def _sum_of_losses(model: TranslationModel, inputs: Any, labels: torch.Tensor) -> float:
    """Negative log-likelihood of `labels` (batch, target_length), summed over its tokens; -100 marks padding."""
    own: Any = getattr(model, "sum_losses", None)
    if own is not None:  # CTranslate2 gives no logits
        return float(own(**inputs, labels=labels))
    # The model's own loss may be smoothed or a mean over its batch: only its logits are used. Models without this
    # method shift the labels in their forward pass.
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is not None:
        inputs["decoder_input_ids"] = shift(labels=labels)
    else:
        inputs["labels"] = labels
    inputs["decoder_attention_mask"] = (labels != IGNORED_LABEL).long()
    forward: Any = model
    logits = forward(**inputs, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return float(losses.cpu().double().sum())


def make_compute_metrics(
    tokenizer: PreTrainedTokenizerBase, task: Task = TRANSLATION, *, bleu_tokenize: str = "13a"
) -> Callable[[EvalPrediction], dict[str, float]]:
    """Makes a `compute_metrics` for `Seq2SeqTrainer` with `predict_with_generate=True`.

    The Trainer gathers the predictions of all processes and calls it in each of them, for all need the result (the
    best checkpoint, early stopping). So it scores the texts directly: modules of evaluate would only have every process
    copy them into a cache. TER is left out, being slow.

    Args:
        tokenizer: Decodes predictions and labels. References are thus the decoded labels: where tokenization loses
            something, or labels are truncated, [`score_translations`] on the original references is what to report.
        task: Whose scores to compute.
        bleu_tokenize: SacreBLEU's tokeniser, for tasks with BLEU (see `metrics.sacrebleu_scores.find_bleu_tokenizer`).

    Returns:
        A function from predictions and labels, both (examples, length) token ids padded with the pad token or -100, to
        the task's scores, such as `bleu`, `chrf` and `exact_match`, from 0 to 100, and `gen_len`, the mean length of
        the predictions without padding, in tokens (start and end tokens included, as in transformers' own examples).

    Raises:
        ImportError: If the library that computes them is not installed: now rather than at the first evaluation.
    """
    scores_summaries = "rouge1" in task.scores
    (import_rouge if scores_summaries else import_sacrebleu)()
    score: Callable[..., Any] = (
        score_summaries if scores_summaries else partial(score_translations, tokenize=bleu_tokenize)
    )
    pad_token_id = tokenizer.pad_token_id

    def decode(token_ids: np.ndarray) -> list[str]:
        return tokenizer.batch_decode(token_ids, skip_special_tokens=True)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        generated = prediction.predictions
        if isinstance(generated, tuple):
            generated = generated[0]
        generated = np.where(generated == IGNORED_LABEL, pad_token_id, generated)
        labels = np.where(prediction.label_ids == IGNORED_LABEL, pad_token_id, prediction.label_ids)
        scores = score(decode(generated), decode(labels))
        return {
            **{name: scores[name] for name in task.scores},
            "gen_len": float(np.mean(np.count_nonzero(generated != pad_token_id, axis=1))),
        }

    return compute_metrics
