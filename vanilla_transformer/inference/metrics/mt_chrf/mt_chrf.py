"""SacreBLEU's chrF and chrF++ for evaluate, without the network."""

from vanilla_transformer.inference.metrics import base, sacrebleu_scores


class MtChrf(base.SacrebleuMetric):
    """The chrF score; inputs, options and results are those of evaluate's "chrf", plus the signature."""

    documentation = {
        "description": (
            "chrF as sacreBLEU computes it: the F-score of matching character n-grams; from 0 to 100, more is better. "
            "With word_order=2 it is chrF++, which counts single words and pairs of words too."
        ),
        "citation": (
            "Maja Popović. 2015. chrF: character n-gram F-score for automatic MT evaluation. In Proceedings of the "
            "Tenth Workshop on Statistical Machine Translation, pages 392-395."
        ),
        "inputs_description": """
Inputs:
    predictions: translations, a list of strings.
    references: for each of them a string or a list of strings.
Options:
    char_order: longest character n-grams (default: 6).
    word_order: longest word n-grams (default: 0; chrF++: 2).
    beta: recall counts so many times as much as precision (default: 2).
    lowercase: ignore case.
    whitespace: count white space as characters.
    eps_smoothing: smooth as chrF++.py, NLTK and Moses do.
Returns:
    score: from 0 to 100.
    char_order, word_order, beta: as given.
    signature: what makes the score comparable; report it.
""",
        "reference_urls": ["https://aclanthology.org/W15-3049", "https://aclanthology.org/W17-4770"],
    }
    make_scorer = staticmethod(sacrebleu_scores.make_chrf)
    details = ("char_order", "word_order", "beta")
