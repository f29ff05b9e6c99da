"""ROUGE for evaluate, without the network."""

from typing import Any

from vanilla_transformer.inference.metrics import base, rouge_scores


class MtRouge(base.TextMetric):
    """ROUGE; inputs and results are those of evaluate's "rouge", plus the signature."""

    documentation = {
        "description": (
            "ROUGE as Google's rouge_score computes it: how much of the words, of the pairs of words, and of the order "
            "of words a summary has in common with a reference; F1 from 0 to 1, more is better. Case and punctuation "
            "are ignored."
        ),
        "citation": (
            "Chin-Yew Lin. 2004. ROUGE: A Package for Automatic Evaluation of Summaries. In Text Summarization "
            "Branches Out, pages 74-81."
        ),
        "inputs_description": """
Inputs:
    predictions: summaries, a list of strings.
    references: for each of them a string or a list of strings, the nearest of which counts.
Options:
    rouge_types: a list of "rouge1" to "rouge9", "rougeL", "rougeLsum" (default: rouge1, rouge2, rougeL, rougeLsum).
    use_aggregator: give means (default), or lists with the score of each summary.
    use_stemmer: strip the endings of English words (default: no).
    tokenize: "unicode" (default), words of any script, or "ascii", runs of a to z and 0 to 9 as in rouge_score, which
        is the same for text in ASCII.
Returns:
    rouge1, rouge2: F1 over words and over pairs of words.
    rougeL: F1 over the longest common subsequence of words.
    rougeLsum: the same line by line: put each sentence of a summary on a line of its own.
    signature: what makes the scores comparable; report it.
""",
        "reference_urls": ["https://aclanthology.org/W04-1013"],
    }
    codebase = "https://github.com/google-research/google-research/tree/master/rouge"

    def _check_options(self, options: dict[str, Any], *, complete: bool) -> None:
        self._make_scorer(**options)

    def _make_scorer(self, *, use_aggregator: bool = True, **options: Any) -> Any:
        return rouge_scores.make_rouge(**options)

    def _compute(self, *, predictions: list[str], references: list[list[str]], **options: Any) -> dict[str, Any]:
        options = {"tokenize": "unicode", "use_stemmer": False, **self._options, **options}
        score = rouge_scores.corpus_rouge if options.get("use_aggregator", True) else rouge_scores.score_each
        signature = rouge_scores.rouge_signature(tokenize=options["tokenize"], use_stemmer=options["use_stemmer"])
        return {**score(self._make_scorer(**options), predictions, references), "signature": signature}
