"""SacreBLEU's TER for evaluate, without the network."""

from vanilla_transformer.inference.metrics import base, sacrebleu_scores


class MtTer(base.SacrebleuMetric):
    """The translation edit rate; inputs, options and results are those of evaluate's "ter", plus the signature."""

    documentation = {
        "description": (
            "The translation edit rate as sacreBLEU computes it: insertions, deletions, substitutions and shifts of "
            "words that turn the translation into its closest reference, per 100 reference words. Less is better."
        ),
        "citation": (
            "Matthew Snover, Bonnie Dorr, Rich Schwartz, Linnea Micciulla, and John Makhoul. 2006. A Study of "
            "Translation Edit Rate with Targeted Human Annotation. In Proceedings of the 7th Conference of the "
            "Association for Machine Translation in the Americas, pages 223-231."
        ),
        "inputs_description": """
Inputs:
    predictions: translations, a list of strings.
    references: for each of them a string or a list of strings.
Options:
    normalized: split off punctuation and resolve XML entities first.
    ignore_punct: leave out punctuation.
    support_zh_ja_chars: let these two treat Chinese and Japanese characters too.
    case_sensitive: do not ignore case.
Returns:
    score: edits per 100 reference words.
    num_edits: edits.
    ref_length: words of the references, averaged over the references of each sentence.
    signature: what makes the score comparable; report it.
""",
        "reference_urls": ["https://aclanthology.org/2006.amta-papers.25"],
    }
    make_scorer = staticmethod(sacrebleu_scores.make_ter)
    details = ("num_edits", "ref_length")
