"""Parallel corpora of which a model writes one side: back-translation, and the distillation of one model into another.

[`translate_file`] translates, in parts, and gives the translations to one of these when it joins them:

    translate_file(model, tokenizer, "mono.de", "pairs.tsv", make_pairs=BackTranslation(tokenizer, tag="<BT>"))
    references = find_references("train.en", "train.de")
    translate_file(teacher, tokenizer, "train.en", "pairs.tsv", n_best=4, make_pairs=Distillation(references))
"""

import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise, repeat
from operator import itemgetter
from typing import ClassVar, Literal, NamedTuple, cast

from transformers import PreTrainedTokenizerBase

from vanilla_transformer.data.detection import SPACELESS
from vanilla_transformer.data.records import EVERYTHING, Part, RecordFile, Scan, find_files, find_records

from .outputs import Piece
from .scores import Bleu, Chrf

logger = logging.getLogger(__name__)

BLANK = "<BLANK>"
# Words, and the space behind them.
_WORD = re.compile(rf"(?:([{SPACELESS}])|[^\s{SPACELESS}]+)(\s*)")

Pairs = Iterator[tuple[str, str]]


def add_noise(
    text: str,
    generator: random.Random,
    *,
    drop: float = 0.1,
    replace: float = 0.1,
    distance: int = 3,
    blank: str = BLANK,
) -> str:
    """Drops words, puts `blank` in the place of others, and shuffles them, none over more than `distance` others.

    That is the noise of Edunov et al. (2018, "Understanding Back-Translation at Scale"), with their values. At least
    one word stays. Words are what stands between spaces, and characters of scripts that put none between words.

    Args:
        text: The text.
        generator: Draws what happens to which word.
        drop: The probability that a word is dropped.
        replace: The probability that one which is not dropped is replaced.
        distance: How many places a word may move.
        blank: What replaces words.
    """
    words = [_Word(found[0].rstrip(), bool(found[1]), bool(found[2])) for found in _WORD.finditer(text)]
    words[-1:] = [words[-1]._replace(is_followed=words[-2].is_followed)] if len(words) > 1 else words
    kept = [word for word in words if generator.random() >= drop] or [generator.choice(words)]
    kept = [word._replace(text=blank) if generator.random() < replace else word for word in kept]
    places = [place + generator.uniform(0, distance + 1) for place in range(len(kept))]
    shuffled = [word for _, word in sorted(zip(places, kept, strict=True), key=itemgetter(0))]
    gaps = [one.is_followed or not (one.is_character or other.is_character) for one, other in pairwise(shuffled)]
    return "".join(word.text + " " * gap for word, gap in zip(shuffled, [*gaps, False], strict=True))


class _Word(NamedTuple):
    text: str
    is_character: bool  # of a script without spaces
    is_followed: bool  # by a space


def count_tokens(tokenizer: PreTrainedTokenizerBase, **texts: list[str]) -> list[int]:
    """The tokens of each text, special ones included; `text` or `text_target` says of which side they are."""
    return list(map(len, tokenizer(**texts, verbose=False)["input_ids"]))


def find_cut(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, source_prefix: str, max_source_length: int | None
) -> list[bool]:
    """Which texts a model has read in part only: they have more tokens than that, those of the prefix included."""
    if max_source_length is None:
        return [False] * len(texts)
    counts = count_tokens(tokenizer, text=[source_prefix + text for text in texts])
    return [count > max_source_length for count in counts]


def _report(dropped: Counter[str], kept: int) -> None:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(dropped.items()))
    logger.log(logging.INFO if kept else logging.WARNING, "%s pairs; dropped: %s", f"{kept:,}", reasons or "none")


@dataclass(frozen=True)
class BackTranslation:
    """Makes pairs of translations, which become the sources, and the texts that were translated, which are the targets.

    Args:
        tokenizer: That of the model which translates; it counts tokens.
        tag: A token at the head of each source (Caswell et al., 2019, "Tagged Back-Translation"). The tokenizer of the
            model that will be trained must keep it whole: `train_tokenizer(..., added_tokens=[tag])`.
        noise: Whether to add the noise of [`add_noise`] to sources, and `blank` what it puts in the place of words.
        seed: Seed of the noise. That of a pair depends on this and on its place in the corpus only.
        max_length: A pair is dropped if a side has more tokens, those that end a text included.
        source_prefix: What the model reads before each text.
        max_source_length: A pair is dropped whose text the model has read in part only ([`find_cut`]).
        max_length_ratio: A pair is dropped if the translation has more than so many times the tokens of its text.

    Raises:
        ValueError: For a tag or blank with white space in it, or a limit that leaves nothing.
    """

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    tag: str | None = None
    noise: bool = False
    blank: str = BLANK
    seed: int = 0
    max_length: int = 250
    max_length_ratio: float = 2.0
    source_prefix: str = field(default="", repr=False)
    max_source_length: int | None = None

    def __post_init__(self) -> None:
        for name, token in (("tag", self.tag), ("blank", self.blank)):
            if token is not None and len(token.split()) != 1:
                raise ValueError(f"{name} is {token!r}; it must be one word, such as <BT>.")
        if self.max_length < 1 or self.max_length_ratio < 1:
            limits = f"max_length is {self.max_length} and max_length_ratio is {self.max_length_ratio}"
            raise ValueError(f"{limits}; each must be at least 1.")

    references: ClassVar[None] = None

    def check(self, files: list[RecordFile], scans: list[Scan]) -> None:
        """Nothing is needed besides the texts."""

    def __call__(self, pieces: Iterable[Piece]) -> Pairs:
        """Returns the source and the target of each pair that is not dropped."""
        dropped: Counter[str] = Counter()
        kept = 0
        for file, part, translations in pieces:
            targets, sources = list(file.texts(part)), [best.text for best, *_ in translations]
            lengths = [count_tokens(self.tokenizer, **side) for side in ({"text_target": sources}, {"text": targets})]
            cut = find_cut(targets, self.tokenizer, self.source_prefix, self.max_source_length)
            rows = zip(sources, targets, *lengths, cut, strict=True)
            for number, (source, target, source_length, target_length, is_cut) in enumerate(rows, start=part.first):
                if not source.strip() or not target.strip():
                    dropped["empty"] += 1
                elif is_cut or max(source_length, target_length) > self.max_length:
                    dropped["too long"] += 1
                elif source_length > self.max_length_ratio * target_length:
                    dropped["too long for their text"] += 1
                else:
                    kept += 1
                    if self.noise:
                        generator = random.Random(f"{self.seed} {part.file} {number}")
                        source = add_noise(source, generator, blank=self.blank)
                    yield source if self.tag is None else f"{self.tag} {source}", target
        _report(dropped, kept)


def find_references(
    input_file: str, reference_file: str | None = None, column: str | None = None, *, source_column: str | None = None
) -> list[RecordFile]:
    """The files of references: those named, aligned with the input's line by line, or another column of the input.

    Without a `column`, it is "target", the only one of a file of references, or the second of a `.tsv` without names.
    `source_column` is the input's, if it was named.
    """
    if column is not None and reference_file is not None:
        return find_records(reference_file, column)
    if reference_file is not None:
        return [_choose_references(RecordFile(path), is_input=False) for path in find_files(reference_file)]
    files = [RecordFile(path, column or source_column) for path in find_files(input_file)]
    if texts := [file.path for file in files if file.kind == "text"]:
        raise ValueError(f"{texts[0]} has no references: name a file of them (--reference_file), or give a table.")
    if column is not None:
        return files
    return [_choose_references(file, is_input=True) for file in files]


def _choose_references(file: RecordFile, *, is_input: bool) -> RecordFile:
    if not is_input and (file.kind == "text" or len(file.columns) == 1):
        return file
    if file.kind != "tsv" or file.header is not None:
        return RecordFile(file.path, "target")
    first = next(file.lines(Part(0, 0, 1)), "")
    return file if "\t" not in first and not is_input else RecordFile(file.path, None, 1)


@dataclass(frozen=True)
class Distillation:
    """Makes pairs of sources and their translations that are most like the reference, or the best.

    That is sequence-level knowledge distillation (Kim & Rush, 2016), or with references its interpolation.

    Args:
        references: For each file of the input, one with as many records; `None` if `select` is `"best"`.
        select: What decides: `"chrf"` or `"bleu"` of a sentence against its reference, from 0 to 100, by sacreBLEU;
            `"best"`: the first translations. Of equal ones the first is taken.
        min_similarity: A pair is dropped whose translation has less (by chrF with `"best"`).
        tokenize: How BLEU cuts words.
        tokenizer, source_prefix, max_source_length: A pair is dropped whose source the model has read in part only
            ([`find_cut`]); without a tokenizer it is not looked at.
        keep: The most translations of a source, no text twice.
        swap: Whether the translations become the sources, and what was translated the targets (back-translation).
    """

    references: Sequence[RecordFile] | None
    select: Literal["chrf", "bleu", "best"] = "chrf"
    min_similarity: float = 0.0
    tokenize: str = "13a"
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False)
    source_prefix: str = field(default="", repr=False)
    max_source_length: int | None = None
    keep: int = 1
    swap: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.min_similarity <= 100:
            raise ValueError(f"min_similarity is {self.min_similarity}; it must be from 0 to 100.")
        if self.keep < 1:
            raise ValueError(f"keep is {self.keep}; it must be at least 1.")
        if self.references is None and (self.select != "best" or self.min_similarity):
            raise ValueError(f"Without references select must be best, and is {self.select}; min_similarity must be 0.")

    @cached_property
    def measure(self) -> Callable[[str, str], float]:
        """How like a reference a translation is."""
        bleu = {"use_effective_order": True, "tokenize": self.tokenize}
        metric = Bleu.make_scorer(**bleu) if self.select == "bleu" else Chrf.make_scorer()
        return lambda text, reference: cast(float, metric.sentence_score(text, [reference]).score)

    def check(self, files: list[RecordFile], scans: list[Scan]) -> None:
        """Makes sure that there is a reference for each source, and that the two can be compared."""
        if self.references is None:
            return
        self.measure("a", "a")
        if len(files) != len(self.references):
            raise ValueError(f"There are {len(files)} files of sources and {len(self.references)} of references.")
        for file, scan, reference in zip(files, scans, self.references, strict=True):
            count = sum(1 for _ in reference.texts(EVERYTHING))
            if count != scan.count:
                raise ValueError(f"{file.path} has {scan.count:,} records, and {reference.path} has {count:,}.")

    def __call__(self, pieces: Iterable[Piece]) -> Pairs:
        """Returns the source and the target of each pair that is not dropped."""
        dropped: Counter[str] = Counter()
        kept = 0
        for number, own in groupby(pieces, key=lambda piece: piece.part.file):
            references: Iterator[str | None]
            references = repeat(None) if self.references is None else self.references[number].texts(EVERYTHING)
            for file, part, translations in own:
                sources = list(file.texts(part))
                # The sources come first: they end with their part, and no reference is lost.
                rows = zip(sources, self._find_cut(sources), references, translations, strict=False)
                for source, is_cut, reference, found in rows:
                    texts = list(dict.fromkeys(each.text for each in found if each.text.strip()))
                    if not (texts and source.strip()) or (reference is not None and not reference.strip()):
                        dropped["empty"] += 1
                    elif is_cut:
                        dropped["too long"] += 1
                    else:
                        chosen = self._choose(texts, reference)
                        unlike = min(self.keep, len(texts)) - len(chosen)
                        dropped += Counter({f"less like their reference than {self.min_similarity:g}": unlike})
                        kept += len(chosen)
                        yield from zip(chosen, repeat(source)) if self.swap else zip(repeat(source), chosen)
        _report(dropped, kept)

    def _find_cut(self, sources: list[str]) -> list[bool]:
        if self.tokenizer is None:
            return [False] * len(sources)
        return find_cut(sources, self.tokenizer, self.source_prefix, self.max_source_length)

    def _choose(self, texts: list[str], reference: str | None) -> list[str]:
        texts = texts[: self.keep] if self.select == "best" else texts
        if reference is None or (self.select == "best" and not self.min_similarity):
            return texts
        scores = {text: self.measure(text, reference) for text in texts}
        likest = sorted(texts, key=scores.__getitem__, reverse=True)[: self.keep]
        return [text for text in likest if scores[text] >= self.min_similarity]
