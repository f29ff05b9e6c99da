"""SacreBLEU's BLEU for evaluate, without the network."""

from vanilla_transformer.inference.metrics import base, sacrebleu_scores


class MtBleu(base.SacrebleuMetric):
    """BLEU; inputs, options and results are those of evaluate's "sacrebleu", plus the signature."""

    documentation = {
        "description": (
            "BLEU as sacreBLEU computes it: matching n-grams of words, up to four, with a penalty for brevity; from 0 "
            "to 100, more is better. The text is detokenised; sacreBLEU tokenises it alike for everybody."
        ),
        "citation": (
            "Matt Post. 2018. A Call for Clarity in Reporting BLEU Scores. In Proceedings of the Third Conference on "
            "Machine Translation: Research Papers, pages 186-191."
        ),
        "inputs_description": """
Inputs:
    predictions: translations, a list of strings.
    references: for each of them a string or a list of strings.
Options:
    smooth_method: "exp" (default), "floor", "add-k" or "none".
    smooth_value: what "floor" (default: 0.1) and "add-k" (default: 1) add.
    force: do not warn of text that looks tokenised.
    lowercase: ignore case.
    tokenize: "13a" (default), "intl", "zh", "char", "ja-mecab", "ko-mecab", ...
    use_effective_order: leave out n-gram orders that are longer than the text: for single sentences.
Returns:
    score: from 0 to 100.
    counts, totals: matching and all n-grams, by order.
    precisions: their ratios in percent.
    bp: the penalty for brevity.
    sys_len, ref_len: tokens of the translations and of the references closest in length.
    signature: what makes the score comparable; report it.
""",
        "reference_urls": ["https://aclanthology.org/W18-6319"],
    }
    make_scorer = staticmethod(sacrebleu_scores.make_bleu)
    details = ("counts", "totals", "precisions", "bp", "sys_len", "ref_len")
