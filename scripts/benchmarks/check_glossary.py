r"""Check what a glossary brings and costs: do its terms appear, what becomes of BLEU, how much longer does it take?

    python scripts/benchmarks/check_glossary.py --model_name_or_path out/my-model --num_beams 5 \
        --pairs val.en.gz val.de.gz --corpus train.en.gz train.de.gz

The terms are words of the references, aligned with words of the sources by IBM model 1 in both directions, which learns
from the pairs and the corpus. Frequent source words, and words of fewer than three letters, are left out; of the rest
each pair gives up to --max_terms, drawn by --seed. Three translations are compared:

- none: without a glossary;
- own: each pair's own terms must appear, as its reference has them;
- common: one glossary of all pairs' terms, with all that they are aligned with as alternatives, found by words.

Appeared is the share of the terms that are whole words of the translation; time is that of translating, the median of
--rounds, in which the three take turns. Where a file is not there, nothing is measured, and the script says so.
"""

import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from check_alignments import link, read_pairs

from vanilla_transformer.commands.command_line import make_argument_parser, make_main
from vanilla_transformer.inference.arguments import InferenceArguments
from vanilla_transformer.inference.glossary import Glossary, cut
from vanilla_transformer.options import option

MOST_TIME, LEAST_SHARE = 1.5, 0.99  # what is aimed at
LEAST_LETTERS = 3

Terms = list[list[tuple[str, str]]]  # of each pair: words of source and reference


@dataclass
class CheckArguments(InferenceArguments):
    """What to translate, and which terms."""

    pairs: list[str] = field(
        default_factory=list, metadata={"help": "Sentences and their references: two files of UTF-8, .gz too."}
    )
    corpus: list[str] | None = option("Two more such files, for IBM model 1.", None, nargs="+")
    num_pairs: int | None = option("Only so many pairs, the first. Default: all.", None)
    max_terms: int = option("The most terms of a pair.", 2)
    skip_frequent: int = option("So many source words, the most frequent ones, are no terms.", 100)
    rounds: int = option("How often each translation is timed.", 3)
    seed: int = option("Which terms are drawn.", 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("pairs", "corpus"):
            if (files := getattr(self, name)) is not None and len(files) != 2:
                raise ValueError(f"--{name} must name two files, sentences and their translations.")
        for name, least in (("num_pairs", 1), ("max_terms", 1), ("skip_frequent", 0), ("rounds", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ValueError(f"--{name} is {value}; it must be at least {least}.")


class OwnTerms(Glossary):
    """What each source's own translation must have, whatever other sources with these words have."""

    def __init__(self, sources: Sequence[str], terms: Terms) -> None:
        super().__init__({other: other for found in terms for _, other in found})
        self.own: dict[str, list[tuple[str, ...]]] = {
            source: [(other,) for _, other in found] for source, found in zip(sources, terms, strict=True)
        }

    def find(self, text: str) -> list[tuple[str, ...]]:
        """The terms of one of the sources."""
        return self.own[text]


def choose_terms(
    pairs: Sequence[tuple[str, str]], corpus: Sequence[tuple[str, str]], *, skip: int, most: int, seed: int
) -> Terms:
    """Returns words of each source and reference that IBM model 1 links in both directions, in their order."""
    words = [(cut(source), cut(target)) for source, target in [*pairs, *corpus]]
    folded = [([word.casefold() for word in source], [word.casefold() for word in target]) for source, target in words]
    turned = link([pair[::-1] for pair in folded], len(pairs))
    frequent = {word for word, _ in Counter(word for source, _ in folded for word in source).most_common(skip)}
    generator = random.Random(seed)
    terms: Terms = []
    for (source, target), links, others in zip(words, link(folded, len(pairs)), turned, strict=False):
        found = [
            (source[place], target[number])
            for place, number in sorted(links & {(place, number) for number, place in others})
            if all(word.isalpha() and len(word) >= LEAST_LETTERS for word in (source[place], target[number]))
            and source[place].casefold() not in frequent
        ]
        kept = sorted(generator.sample(range(len(found)), min(most, len(found))))
        terms.append([found[number] for number in kept])
    return terms


def collect(terms: Terms) -> dict[str, list[str]]:
    """One glossary of all terms."""
    found: dict[str, dict[str, None]] = {}
    for source, target in (term for each in terms for term in each):
        found.setdefault(source.casefold(), {})[target] = None
    return {source: list(targets) for source, targets in found.items()}


def count_appeared(wanted: Sequence[Sequence[Sequence[str]]], translations: Sequence[str]) -> tuple[int, int]:
    """Returns how many terms, each with alternatives, are whole words of their translations, and how many there are."""
    count = appeared = 0
    for terms, text in zip(wanted, translations, strict=True):
        for kind in {frozenset(alternatives) for alternatives in terms}:
            needed = sum(frozenset(alternatives) == kind for alternatives in terms)
            either = "|".join(map(re.escape, sorted(kind, key=len, reverse=True)))
            appeared += min(needed, len(re.findall(rf"(?<![^\W_])(?:{either})(?![^\W_])", text)))
            count += needed
    return appeared, count


def check(arguments: CheckArguments) -> None:
    """Translates with and without, and prints a row of each."""
    import sacrebleu

    from vanilla_transformer.inference.translate import translate

    absent = [name for name in (*arguments.pairs, *(arguments.corpus or ())) if not Path(name).is_file()]
    if absent:
        print(f"Skipped, since there is no {' and no '.join(absent)}.")
        return
    # The first of those with the same source, whose terms are found by it.
    first = {pair[0]: pair for pair in reversed(read_pairs(arguments.pairs, arguments.num_pairs))}
    pairs = [*reversed(first.values())]
    corpus = read_pairs(arguments.corpus) if arguments.corpus else []
    choice: dict[str, int] = {"skip": arguments.skip_frequent, "most": arguments.max_terms, "seed": arguments.seed}
    terms = choose_terms(pairs, corpus, **choice)
    sources, references = [source for source, _ in pairs], [target for _, target in pairs]
    model, tokenizer, options = arguments.load()
    options |= {name: getattr(arguments, name) for name in ("batch_size", "max_batch_tokens", "max_source_length")}
    options |= {"source_prefix": arguments.find_prefix(model), "progress": False}
    glossaries: dict[str, Glossary | None] = {"none": None, "own": OwnTerms(sources, terms)}
    glossaries["common"] = Glossary(collect(terms))
    seconds: dict[str, list[float]] = {name: [] for name in glossaries}
    texts: dict[str, list[str]] = {}
    for _ in range(arguments.rounds):
        for name, glossary in glossaries.items():
            start = time.perf_counter()
            texts[name] = translate(model, tokenizer, sources, glossary=glossary, **options)
            seconds[name].append(time.perf_counter() - start)
    wanted = {name: [glossary.find(source) for source in sources] for name, glossary in glossaries.items() if glossary}
    print(f"{len(pairs)} pairs, {sum(map(len, terms))} terms of their own")
    print("glossary  terms  appeared  without   BLEU  time")
    median = {name: statistics.median(values) for name, values in seconds.items()}
    scores = {name: sacrebleu.corpus_bleu(found, [references]).score for name, found in texts.items()}
    print(f"{'none':<8}  {'':5}  {'':8}  {'':7}  {scores['none']:5.2f}  {median['none']:.1f} s")
    for name, needed in wanted.items():
        (with_it, count), (without, _) = (count_appeared(needed, texts[each]) for each in (name, "none"))
        ratio = median[name] / median["none"]
        shares = f"{with_it / max(count, 1):8.2%}  {without / max(count, 1):7.2%}"
        print(f"{name:<8}  {count:5}  {shares}  {scores[name]:5.2f}  {ratio:.2f} times")
        bars = [
            ("share", with_it >= LEAST_SHARE * count),
            ("BLEU", scores[name] >= scores["none"]),
            ("time", ratio <= MOST_TIME),
        ]
        missed = [bar for bar, is_reached in bars if not is_reached]
        print(f"{'':8}  {'what is aimed at' if not missed else 'misses what is aimed at in ' + ', '.join(missed)}")


make_parser = partial(make_argument_parser, CheckArguments, __doc__)
main = make_main(make_parser, check)


if __name__ == "__main__":
    main()
