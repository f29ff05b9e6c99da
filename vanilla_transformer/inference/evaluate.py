"""What translations or summaries are worth: the scores of a task, in a training, in files and in a table.

BLEU, chrF, ROUGE and exact match run from 0 to 100; TER counts edits per 100 words. They compare detokenised text, as
sacreBLEU wants it. All are computed by the metrics of [`scores`].
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from evaluate import Metric
from transformers import EvalPrediction, PreTrainedTokenizerBase

from vanilla_transformer.model.loss_vanilla_transformer import IGNORED_LABEL
from vanilla_transformer.tasks import TRANSLATION, Task

from .scores import (
    Bleu,
    Chrf,
    ExactMatch,
    PhoneErrorRate,
    Rouge,
    Ter,
    WordErrorRate,
    import_rouge,
)
from .translate import one_line

# Where texts are kept: line by line, by what they are, and as JSON, which has their own line breaks too.
LINE_FILES = {"source": "sources.txt", "hypothesis": "hypotheses.txt", "reference": "references.txt"}
TEXTS_FILE = "texts.jsonl"
# How tables call scores, and the signature beside each.
SCORES = (
    ("BLEU", "bleu", "bleu_signature"),
    ("BLEU, lowercased tokens", "bleu_lowercase", "bleu_lowercase_signature"),
    ("chrF", "chrf", "chrf_signature"),
    ("TER", "ter", "ter_signature"),
    ("WER", "wer", ""),
    ("PER", "per", ""),
    ("ROUGE-1", "rouge1", "rouge_signature"),
    ("ROUGE-2", "rouge2", ""),
    ("ROUGE-L", "rougeL", ""),
    ("ROUGE-Lsum", "rougeLsum", ""),
)


def score_translations(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    lowercase: bool = False,
    tokenize: str = "13a",
    ter: bool = False,
    error_rates: bool = False,
) -> dict[str, Any]:
    """Compares translations with one reference each, detokenised; `tokenize` is sacreBLEU's tokeniser.

    `lowercase` ignores case in `bleu` and `chrf`. Returns `bleu` and `chrf` (chrF2) of the corpus with signatures;
    `bleu_lowercase`, over lowercased tokens, which much of the literature on small corpora reports; `exact_match`, the
    percentage of translations equal to their reference but for white space at the ends; and if asked for `ter`, which
    takes many times longer than the others, and by its definition ignores case. `error_rates` adds `wer` and `per` of
    words that are spelled or spoken ([`scores.WordErrorRate`], [`scores.PhoneErrorRate`]).
    """
    metrics: dict[str, Any] = {
        "bleu": partial(Bleu, lowercase=lowercase, tokenize=tokenize),
        "bleu_lowercase": partial(Bleu, lowercase=True, tokenize=tokenize),
        "chrf": partial(Chrf, lowercase=lowercase),
        **({"ter": Ter} if ter else {}),
    }
    scores: dict[str, Any] = {}
    for name, metric in metrics.items():
        found = metric(keep_in_memory=True).compute(predictions=hypotheses, references=references)
        scores |= {name: found["score"], f"{name}_signature": found["signature"]}
    if error_rates:
        scores |= {
            "wer": _compute(WordErrorRate, hypotheses, references),
            "per": _compute(PhoneErrorRate, hypotheses, references),
        }
    return {**scores, "exact_match": _compute(ExactMatch, hypotheses, references)}


def _compute(metric: type[Metric], hypotheses: Sequence[str], references: Sequence[str]) -> float:
    found: Any = metric(keep_in_memory=True).compute(predictions=hypotheses, references=references)
    return float(found["score"])


def score_summaries(
    hypotheses: Sequence[str], references: Sequence[str], *, tokenize: str = "unicode", use_stemmer: bool = False
) -> dict[str, Any]:
    """Compares summaries with one reference each; `tokenize` and `use_stemmer` are the options of [`scores.Rouge`].

    Returns `rouge1`, `rouge2`, `rougeL` and `rougeLsum` (whose sentences are lines), F1 averaged over the summaries,
    with the signature of all four, and `exact_match` as [`score_translations`] has it.
    """
    rouge = Rouge(keep_in_memory=True, tokenize=tokenize, use_stemmer=use_stemmer)
    found: Any = rouge.compute(predictions=hypotheses, references=references)
    signature = found.pop("signature")
    scores = {name: 100 * mean for name, mean in found.items()}
    return {**scores, "rouge_signature": signature, "exact_match": _compute(ExactMatch, hypotheses, references)}


def join_pieces(texts: Iterable[str], mark: str) -> list[str]:
    """Joins words that were cut before training, as "pul@@ ley" with the mark "@@", the one of subword-nmt."""
    return [f"{text} ".replace(f"{mark} ", "").removesuffix(" ") for text in texts]


def make_compute_metrics(
    tokenizer: PreTrainedTokenizerBase,
    task: Task = TRANSLATION,
    *,
    bleu_tokenize: str = "13a",
    remove_bpe: str | None = None,
) -> Callable[[EvalPrediction], dict[str, float]]:
    """Makes a `compute_metrics` for `Seq2SeqTrainer` with `predict_with_generate=True`; TER, being slow, is left out.

    It maps predictions and labels, (examples, length) token ids padded with the pad token or -100, to the task's scores
    and `gen_len`, the mean length of the predictions without padding, in tokens (start and end tokens included, as in
    transformers' own examples). References are the decoded labels: where tokenization loses something, or labels are
    truncated, [`score_translations`] on the original references is what to report. With `remove_bpe` both are joined by
    [`join_pieces`] before they are scored.
    """
    score: Callable[..., dict[str, Any]]
    # A missing library, or an unknown tokeniser, is found here rather than at the first evaluation.
    if "rouge1" in task.scores:
        import_rouge()
        score = score_summaries
    else:
        Bleu.make_scorer(tokenize=bleu_tokenize)
        score = partial(score_translations, tokenize=bleu_tokenize, error_rates="wer" in task.scores)
    pad_token_id = tokenizer.pad_token_id

    def decode(token_ids: np.ndarray) -> list[str]:
        texts = tokenizer.batch_decode(token_ids, skip_special_tokens=True)
        return texts if remove_bpe is None else join_pieces(texts, remove_bpe)

    def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
        generated = prediction.predictions
        generated = generated[0] if isinstance(generated, tuple) else generated
        generated = np.where(generated == IGNORED_LABEL, pad_token_id, generated)
        labels = np.where(prediction.label_ids == IGNORED_LABEL, pad_token_id, prediction.label_ids)
        scores = score(decode(generated), decode(labels))
        length = float(np.mean(np.count_nonzero(generated != pad_token_id, axis=1)))
        return {**{name: scores[name] for name in task.scores}, "gen_len": length}

    return compute_metrics


def write_texts(folder: Path, columns: dict[str, list[str]], *, keep_line_breaks: bool) -> None:
    """Writes what was translated and scored, by the names of `LINE_FILES`; as JSON too, which keeps line breaks."""
    for name, texts in columns.items():
        lines = "".join(one_line(text) + "\n" for text in texts)
        (folder / LINE_FILES[name]).write_text(lines, encoding="utf-8", newline="\n")
    (folder / TEXTS_FILE).unlink(missing_ok=True)  # which may be an earlier model's
    if keep_line_breaks:
        rows = [dict(zip(columns, texts, strict=True)) for texts in zip(*columns.values(), strict=True)]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / TEXTS_FILE).write_text(lines, encoding="utf-8", newline="\n")


def make_table(metrics: dict[str, Any]) -> str:
    """The scores, one per line, with the signatures that make them comparable."""
    search = "greedy" if metrics["num_beams"] == 1 else f"{metrics['num_beams']} beams"
    known = [score for score in SCORES if score[1] in metrics]
    rows = [
        *((label, f"{metrics[name]:.2f}", metrics.get(signature, "")) for label, name, signature in known),
        ("exact match", f"{metrics['exact_match']:.2f}", "% of sentences"),
        ("loss", f"{metrics['loss']:.4f}", f"nats per target token, {metrics['tokens']:,} tokens with </s>"),
        ("perplexity", f"{metrics['perplexity']:.3f}", "per target token"),
        ("sentences", f"{metrics['sentences']:,}", search),
        ("seconds", f"{metrics['seconds']:.1f}", f"on {metrics['device']} in {metrics['dtype']}"),
        ("sentences/s", f"{metrics['sentences_per_second']:.1f}", ""),
        ("output tokens/s", f"{metrics['output_tokens_per_second']:,.0f}", ""),
    ]
    return "\n".join(f"{name:<24}{value:>10}  {note}".rstrip() for name, value, note in rows)
