"""Scores as metrics of the evaluate library, without its network: sacreBLEU's BLEU, chrF and TER, ROUGE, perplexity.

    from vanilla_transformer.inference import scores

    bleu = scores.load("bleu", tokenize="13a")
    bleu.compute(predictions=["A man rides."], references=["A man is riding."])["score"]

Training and evaluation score with these classes, too. Inputs, options and results are those of evaluate's own
"sacrebleu", "chrf", "ter" and "rouge", with sacreBLEU's `signature`; sentences may differ in their number of
references, and ROUGE has a `tokenize` and gives means where evaluate's own gives medians of drawn samples.

With `keep_in_memory=True` a metric writes nothing to evaluate's cache. In several processes, gather the translations
and compute in one of them; or give every process `num_process`, its `process_id`, an `experiment_id` that no other
evaluation has, and the same `cache_dir`, and let all add something before they compute, if only empty lists. Process 0
gets the result, the others None.
"""

import inspect
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import zip_longest
from statistics import fmean
from typing import Any

import evaluate
from datasets import Features, List, Value

from vanilla_transformer.files import explain_missing

from .loading import load_model_and_tokenizer
from .losses import score_loss

_EVALUATES_OWN = frozenset(inspect.signature(evaluate.Metric.__init__).parameters)
ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_ROUGE_TYPE = re.compile(r"rouge([1-9]|L|Lsum)")
_STEMMED_LENGTH = 4  # rouge_score leaves shorter words alone
# Scripts without spaces between words, by the beginning of their characters' names.
_ALONE = (
    *("CJK ", "IDEOGRAPHIC ", "VERTICAL IDEOGRAPHIC ", "PARENTHESIZED IDEOGRAPH", "CIRCLED IDEOGRAPH", "HANGZHOU "),
    *("HIRAGANA ", "HENTAIGANA ", "KATAKANA ", "KATAKANA-HIRAGANA ", "HALFWIDTH KATAKANA", "VERTICAL KANA ", "MASU "),
    *("BOPOMOFO ", "THAI ", "LAO ", "KHMER ", "MYANMAR ", "TAI ", "NEW TAI LUE ", "AHOM "),
)
# Half-width katakana writes the marks of voiced sounds after the letter, as characters of their own.
_HALFWIDTH_MARKS = ("HALFWIDTH KATAKANA VOICED", "HALFWIDTH KATAKANA SEMI-VOICED")


def load(name: str, **kwargs: Any) -> evaluate.Metric:
    """Loads a metric, without the network.

    Args:
        name: `"bleu"`, `"chrf"` (chrF++ with `word_order=2`), `"ter"`, `"rouge"`, `"exact_match"`, `"wer"` (of words
            in letter-to-sound conversion), `"per"` or `"perplexity"`.
        **kwargs: Arguments of `evaluate.Metric` (`num_process`, `process_id`, `experiment_id`, `cache_dir`,
            `keep_in_memory`, ...) and options of the metric, which `compute` may override and whose docstring names.
    """
    if name not in _METRICS:
        raise ValueError(f"There is no metric {name!r}; it must be one of {', '.join(_METRICS)}.")
    return _METRICS[name](**kwargs)


def import_sacrebleu() -> Any:
    """The package sacrebleu, or an error that says how to install it."""
    with explain_missing("BLEU, chrF and TER need sacrebleu", extra="train", packages="sacrebleu"):
        import sacrebleu
        import sacrebleu.significance
    return sacrebleu


def import_rouge() -> Any:
    """The package rouge_score, or an error that says how to install it."""
    with explain_missing("ROUGE needs rouge_score", extra="train", packages="rouge-score"):
        import rouge_score.rouge_scorer
    return rouge_score


def find_bleu_tokenizer(langs: Sequence[str] | None) -> str:
    """SacreBLEU's tokeniser for texts of a language: "zh" for Chinese, "ja-mecab" for Japanese, "13a" for others.

    `langs` are those of a model or corpus, the target last, such as `"zh"`, `"zh_CN"` or `"zho_Hant"`. "13a" takes a
    sentence without spaces for one word. Japanese is cut into characters ("char") unless `sacrebleu[ja]` is installed.
    """
    language = re.split("[-_]", langs[-1])[0].lower() if langs else ""
    if language in ("zh", "zho", "cmn", "yue"):
        return "zh"
    if language in ("ja", "jpn"):
        return "ja-mecab" if find_spec("MeCab") and find_spec("ipadic") else "char"
    return "13a"


class _MetricWithOptions(evaluate.Metric):
    """A metric that takes its options when it is loaded, too; its docstring is the help that evaluate shows."""

    inputs: Features
    help_on_inputs: str
    source = ""  # the publication

    def __init__(self, **arguments: Any) -> None:
        self.options = {name: value for name, value in arguments.items() if name not in _EVALUATES_OWN}
        self.check_options(**self.options)
        super().__init__(**{name: value for name, value in arguments.items() if name in _EVALUATES_OWN})

    def check_options(self) -> None:
        """Raises a TypeError or ValueError for wrong options; here there are none."""

    def _info(self) -> evaluate.EvaluationModuleInfo:
        text = f"\n{inspect.cleandoc(self.__doc__ or '')}\n{self.help_on_inputs}\n"
        return evaluate.EvaluationModuleInfo(
            description=text.strip(), citation=self.source, inputs_description=text, features=self.inputs
        )

    def compute(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> dict[str, Any] | None:
        """Scores what was added together with what is given here; the result is None in all processes but the first."""
        inputs = {name: value for name, value in kwargs.items() if name in self.inputs}
        options = self.options | {name: value for name, value in kwargs.items() if name not in self.inputs}
        self.check_options(**options)  # before what was added is read, and with that lost
        return super().compute(predictions=predictions, references=references, **inputs, **options)

    def _build_data_dir(self) -> str:
        # evaluate makes a folder even for a metric that writes nothing.
        return self._data_dir_root if self.keep_in_memory else super()._build_data_dir()


class _TextMetric(_MetricWithOptions):
    """A metric of texts and their references, one or several each."""

    inputs = Features({"predictions": Value("string"), "references": List(Value("string"))})
    help_on_inputs = "Inputs: predictions, a list of strings, and references, for each a string or a list of strings."

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Adds a list of texts, and for each of them its reference or a list of them; there may be no text."""
        for name, texts in (("predictions", predictions), ("references", references)):
            if texts is None or isinstance(texts, str):
                raise TypeError(f"{name} is {texts!r}; it must be a list of strings.")
        if not all(isinstance(prediction, str) for prediction in predictions):
            raise TypeError("A prediction is no string.")
        listed = [_list_references(reference) for reference in references]
        super().add_batch(predictions=list(predictions), references=listed, **kwargs)

    score: Callable[..., dict[str, Any]]  # of texts and as many lists of references

    def _compute(self, *, predictions: list[str], references: list[list[str]], **options: Any) -> dict[str, Any]:
        if not predictions:
            raise ValueError("There are 0 predictions and 0 references; there must be at least one of each.")
        return self.score(predictions, references, **options)

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """Adds one text and its reference or references."""
        self.add_batch(predictions=[prediction], references=[reference], **kwargs)


def _list_references(reference: Any) -> list[str]:
    """A text's reference, or references, as a list."""
    listed = [reference] if isinstance(reference, str) else reference
    if not isinstance(listed, Sequence) or not all(isinstance(text, str) for text in listed):
        raise TypeError(f"A reference is {reference!r}; it must be a string or a list of strings.")
    if not listed:
        raise ValueError("A prediction has an empty list of references; each must have at least one.")
    return list(listed)


class _SacrebleuMetric(_TextMetric):
    """One of sacreBLEU's metrics; `details` of its score go into the result."""

    scorer: str
    new_names: dict[str, str] = {}  # sacreBLEU's, of options that evaluate calls otherwise
    details: tuple[str, ...]

    @classmethod
    def make_scorer(cls, **options: Any) -> Any:
        """SacreBLEU's metric."""
        make = getattr(import_sacrebleu().metrics, cls.scorer)
        try:
            return make(**{cls.new_names.get(name, name): value for name, value in options.items()})
        except RuntimeError as error:  # of a tokeniser whose package is missing
            raise ImportError(" ".join(str(error).split())) from error

    def check_options(self, **options: Any) -> None:
        """Raises a TypeError or ValueError for wrong options."""
        self.make_scorer(**options)

    def score(self, predictions: list[str], references: list[list[str]], **options: Any) -> dict[str, Any]:
        """SacreBLEU's score of the corpus, with its signature."""
        scorer = self.make_scorer(**options)
        # SacreBLEU wants the first reference of every sentence, then the second of each, and None where there is none.
        score = scorer.corpus_score(predictions, [list(stream) for stream in zip_longest(*references)])
        details = {name: getattr(score, name) for name in self.details}
        return {"score": score.score, **details, "signature": str(scorer.get_signature())}


class Bleu(_SacrebleuMetric):
    """BLEU of detokenised text, which sacreBLEU tokenises alike for everybody.

    Options:
        smooth_method: "exp" (default), "floor", "add-k" or "none"; smooth_value: what "floor" and "add-k" add.
        tokenize: "13a" (default), "intl", "zh", "char", "ja-mecab", "ko-mecab", ...; lowercase: ignore case.
        force: do not warn of text that looks tokenised.
        use_effective_order: leave out n-gram orders that are longer than the text: for single sentences.
    Results:
        score: from 0 to 100, more is better; signature: what makes it comparable; report it.
        counts, totals: matching and all n-grams, by order; precisions: their ratios in percent.
        bp: the penalty for brevity; sys_len, ref_len: tokens of the translations and of the nearest references.
    """

    source = "Post, 2018, A Call for Clarity in Reporting BLEU Scores. https://aclanthology.org/W18-6319"
    scorer = "BLEU"
    new_names = {"use_effective_order": "effective_order"}
    details = ("counts", "totals", "precisions", "bp", "sys_len", "ref_len")

    @classmethod
    def make_scorer(cls, **options: Any) -> Any:
        """SacreBLEU's BLEU."""
        metric = import_sacrebleu().metrics.BLEU
        for name, legal in (("smooth_method", metric.SMOOTH_DEFAULTS), ("tokenize", metric.TOKENIZERS)):
            value = options.get(name)
            if value is not None and value not in legal:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(legal)}.")
        return super().make_scorer(**options)


class Chrf(_SacrebleuMetric):
    """chrF, the F-score of matching character n-grams; with word_order=2 chrF++, which counts words and pairs, too.

    Options:
        char_order, word_order: longest n-grams of characters (default: 6) and of words (default: 0; chrF++: 2).
        beta: recall counts so many times as much as precision (default: 2).
        lowercase: ignore case; whitespace: count white space as characters; eps_smoothing: smooth as chrF++.py does.
    Results:
        score: from 0 to 100, more is better; signature: what makes it comparable; report it.
        char_order, word_order, beta: as given.
    """

    source = "Popović, 2015, chrF: character n-gram F-score. https://aclanthology.org/W15-3049"
    scorer = "CHRF"
    details = ("char_order", "word_order", "beta")


class Ter(_SacrebleuMetric):
    """The translation edit rate: insertions, deletions, substitutions and shifts of words, per 100 reference words.

    Options:
        normalized: split off punctuation and resolve XML entities first; ignore_punct: leave out punctuation.
        support_zh_ja_chars: let these two treat Chinese and Japanese characters too; case_sensitive: heed case.
    Results:
        score: edits per 100 reference words; less is better, and 100 is no limit; signature: report it with the score.
        num_edits: edits; ref_length: words of the references, averaged over the references of each sentence.
    """

    source = "Snover et al., 2006, A Study of Translation Edit Rate. https://aclanthology.org/2006.amta-papers.25"
    scorer = "TER"
    new_names = {"ignore_punct": "no_punct", "support_zh_ja_chars": "asian_support"}
    details = ("num_edits", "ref_length")


class ExactMatch(_TextMetric):
    """How many texts equal one of their references, but for white space at the ends.

    Results:
        score: percentage of the texts.
    """

    def score(self, predictions: list[str], references: list[list[str]]) -> dict[str, Any]:
        """The percentage."""
        pairs = zip(predictions, references, strict=True)
        exact = [prediction.strip() in map(str.strip, group) for prediction, group in pairs]
        return {"score": 100 * sum(exact) / len(exact)}


class WordErrorRate(ExactMatch):
    """How many texts differ from all of their references: in letter-to-sound conversion a text is a word.

    Results:
        score: percentage of the texts; less is better.
    """

    source = "Gorman et al., 2020, The SIGMORPHON 2020 Shared Task. https://aclanthology.org/2020.sigmorphon-1.2"

    def score(self, predictions: list[str], references: list[list[str]]) -> dict[str, Any]:
        """The percentage."""
        return {"score": 100 - super().score(predictions, references)["score"]}


class PhoneErrorRate(_TextMetric):
    """Insertions, deletions and substitutions per 100 tokens of the references; tokens stand between white space.

    In letter-to-sound conversion a token is a phone. (Where texts are sentences, speech recognition calls the same
    number its word error rate.) Of several references the nearest counts.

    Results:
        score: edits per 100 reference tokens; less is better, and 100 is no limit.
    """

    source = WordErrorRate.source

    def score(self, predictions: list[str], references: list[list[str]]) -> dict[str, Any]:
        """The edits of all texts by the tokens of all references."""
        edits = tokens = 0
        for prediction, group in zip(predictions, references, strict=True):
            found = ((count_edits(prediction.split(), words), len(words)) for words in map(str.split, group))
            nearest, length = min(found)
            edits, tokens = edits + nearest, tokens + length
        return {"score": 100 * edits / max(tokens, 1)}


def count_edits(tokens: Sequence[str], reference: Sequence[str]) -> int:
    """Levenshtein's distance: the fewest insertions, deletions and substitutions that make one of the other."""
    distances = list(range(len(reference) + 1))
    for row, token in enumerate(tokens, start=1):
        diagonal, distances[0] = distances[0], row
        for column, other in enumerate(reference, start=1):
            substituted = diagonal + (token != other)
            diagonal = distances[column]
            distances[column] = min(substituted, diagonal + 1, distances[column - 1] + 1)
    return distances[-1]


class Rouge(_TextMetric):
    """ROUGE as Google's rouge_score computes it: what a summary has in common with a reference, F1 from 0 to 1.

    Of several references the nearest counts.

    Options:
        rouge_types: a list of "rouge1" to "rouge9", "rougeL", "rougeLsum" (default: rouge1, rouge2, rougeL, rougeLsum).
        use_aggregator: give means (default), or lists with the score of each summary.
        use_stemmer: strip the endings of English words of more than three letters (default: no).
        tokenize: "unicode" (default), words of any script, or "ascii", runs of a to z and 0 to 9 as in rouge_score.
    Results:
        rouge1, rouge2: F1 over words and over pairs of words; signature: what makes the scores comparable.
        rougeL: F1 over the longest common subsequence of words; rougeLsum: the same line by line, a sentence each.
    """

    source = "Lin, 2004, ROUGE: A Package for Automatic Evaluation of Summaries. https://aclanthology.org/W04-1013"

    def check_options(self, *, use_aggregator: bool = True, **options: Any) -> None:
        """Raises a TypeError or ValueError for wrong options."""
        self.make_scorer(**options)

    @staticmethod
    def make_scorer(
        *, rouge_types: Sequence[str] = ROUGE_TYPES, tokenize: str = "unicode", use_stemmer: bool = False
    ) -> Any:
        """A `rouge_score.rouge_scorer.RougeScorer`."""
        if isinstance(rouge_types, str):
            raise TypeError(f"rouge_types is {rouge_types!r}; it must be a list of names.")
        if not rouge_types or not all(map(_ROUGE_TYPE.fullmatch, rouge_types)):
            raise ValueError(f"rouge_types is {rouge_types!r}; legal names are rouge1 to rouge9, rougeL and rougeLsum.")
        if tokenize not in ("unicode", "ascii"):
            raise ValueError(f"tokenize is {tokenize!r}; it must be unicode or ascii.")
        package = import_rouge()
        stem = package.tokenizers.porter.PorterStemmer().stem if use_stemmer else None
        tokenizer = _UnicodeTokenizer(stem) if tokenize == "unicode" else None
        return package.rouge_scorer.RougeScorer(list(rouge_types), use_stemmer, tokenizer=tokenizer)

    def score(
        self, predictions: list[str], references: list[list[str]], *, use_aggregator: bool = True, **options: Any
    ) -> dict[str, Any]:
        """Means over the summaries (rouge_score's own aggregator draws samples), or the scores of each."""
        scorer = self.make_scorer(**options)
        found: dict[str, list[float]] = {name: [] for name in scorer.rouge_types}
        for prediction, group in zip(predictions, references, strict=True):
            for name, score in scorer.score_multi(group, prediction).items():
                found[name].append(float(score.fmeasure))
        scores = {name: fmean(each) for name, each in found.items()} if use_aggregator else found
        words, stemmer = options.get("tokenize", "unicode"), "yes" if options.get("use_stemmer") else "no"
        signature = f"tok:{words}|stem:{stemmer}|score:F1|mean:plain|rouge_score:{version('rouge_score')}"
        return {**scores, "signature": signature}


@dataclass
class _UnicodeTokenizer:
    """What rouge_score asks for words."""

    stem: Callable[[str], str] | None

    def tokenize(self, text: str) -> list[str]:
        words = split_words(text)
        if self.stem is None:
            return words
        return [self.stem(word) if len(word) >= _STEMMED_LENGTH and word.isascii() else word for word in words]


def split_words(text: str) -> list[str]:
    """The lowercase words of a text in any script, without punctuation; without spaces, each character is a word."""
    words: list[str] = []
    is_open = False  # whether the next letter goes on with the last word
    for character in unicodedata.normalize("NFC", text).lower():
        place = _find_place(character)
        if words and (place == "mark" or (place == "part" and is_open)):
            words[-1] += character
        elif place in ("part", "alone"):
            words.append(character)
        is_open = place == "part" or (place == "mark" and is_open)
    return words


@lru_cache(maxsize=65536)
def _find_place(character: str) -> str:
    """What a character is to words: "part" of one, a word "alone", a "mark" on the one before it, or a "gap"."""
    category = unicodedata.category(character)
    name = unicodedata.name(character, "")
    if category[0] == "M" or name.startswith(_HALFWIDTH_MARKS):
        return "mark"
    if category[0] not in "LN":
        return "gap"
    return "alone" if name.startswith(_ALONE) else "part"


class Perplexity(_MetricWithOptions):
    """Perplexity of a sequence-to-sequence model on reference translations; it depends on the model's tokenizer.

    Options:
        model, tokenizer: a sequence-to-sequence model, wherever it is, and its tokenizer; or
        model_id: a folder or Hub name to load both from, with
        device, dtype, trust_remote_code and the options of [`score_loss`].
    Results:
        loss: nats per target token, without label smoothing; perplexity: exp(loss).
        tokens: target tokens, the end token included.
    """

    inputs = Features({"sources": Value("string"), "references": Value("string")})
    help_on_inputs = "Inputs: sources and references, their translations, lists of strings."

    def check_options(self, *, model: Any = None, tokenizer: Any = None, model_id: Any = None, **others: Any) -> None:
        """Raises a ValueError for a model without its tokenizer, or beside another one."""
        if (model is None) != (tokenizer is None):
            missing = "model" if model is None else "tokenizer"
            raise ValueError(f"model and tokenizer belong together; {missing} is missing.")
        if model is not None and model_id is not None:
            raise ValueError(f"Give model_id (here {model_id!r}), or model and tokenizer, but not both.")

    def _compute(self, *, sources: list[str], references: list[str], **options: Any) -> dict[str, Any]:
        model, tokenizer, model_id = (options.pop(name, None) for name in ("model", "tokenizer", "model_id"))
        place = {name: options.pop(name) for name in ("device", "dtype", "trust_remote_code") if name in options}
        if model_id is not None:
            model, tokenizer = load_model_and_tokenizer(model_id, **place)
        elif model is None:
            raise ValueError("There is no model: give model_id, or model and tokenizer, to load or to compute.")
        return score_loss(model, tokenizer, sources, references, **{"progress": False, **options})


_METRICS: dict[str, type[_MetricWithOptions]] = {"bleu": Bleu, "chrf": Chrf, "ter": Ter, "rouge": Rouge}
_METRICS |= {"exact_match": ExactMatch, "wer": WordErrorRate, "per": PhoneErrorRate, "perplexity": Perplexity}
