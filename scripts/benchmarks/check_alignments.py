r"""Find the layer whose attention aligns words best: compare a model's alignments with those of IBM model 1.

    python scripts/benchmarks/check_alignments.py --model_name_or_path out/my-model --pairs val.en val.de \
        --num_pairs 500 --corpus train.en train.de

IBM model 1 (Brown et al. 1993) learns from the pairs, and from the corpus if there is one, which word goes with which,
once in each direction. Recall is the share of the links on which both directions agree that are among the model's,
precision the share of the model's that are among them. Such links are mostly right but few, and the model links every
target word, so that precision is low; neither stands in for links drawn by people.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from vanilla_transformer.commands.command_line import make_argument_parser, make_main
from vanilla_transformer.data.lines import read_lines
from vanilla_transformer.inference.arguments import InferenceArguments
from vanilla_transformer.visualization import align_lines, collect_attention, split_words

Pairs = Sequence[tuple[Sequence[str], Sequence[str]]]  # of words
Links = list[set[tuple[int, int]]]  # (source word, target word), for each pair
NOTHING = ""  # the source word of target words that come from none
ITERATIONS = 5


@dataclass
class CheckArguments(InferenceArguments):
    """Which pairs to align, and what IBM model 1 learns from."""

    pairs: list[str] = field(
        default_factory=list,
        metadata={"help": "Sentences to align and their translations: two files of UTF-8, .gz too."},
    )
    num_pairs: int | None = field(default=None, metadata={"help": "Align only so many pairs, the first. Default: all."})
    corpus: list[str] | None = field(default=None, metadata={"help": "Two more such files, for IBM model 1."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.pairs) != 2 or (self.corpus is not None and len(self.corpus) != 2):
            raise ValueError("--pairs, and --corpus if given, must name two files, sentences and their translations.")
        if self.num_pairs is not None and self.num_pairs < 1:
            raise ValueError(f"--num_pairs is {self.num_pairs}; it must be at least 1.")


def read_pairs(files: Sequence[str], count: int | None = None) -> list[tuple[str, str]]:
    """Reads the first pairs of two files, or all.

    Raises:
        ValueError: If one file has more lines than the other, or one is empty or not UTF-8.
    """
    sources, targets = map(read_lines, files)
    if len(sources) != len(targets):
        raise ValueError(f"{files[0]} has {len(sources):,} lines, but {files[1]} has {len(targets):,}.")
    return [(source.strip(), target.strip()) for source, target in zip(sources, targets, strict=True)][:count]


def learn(pairs: Pairs, iterations: int = ITERATIONS) -> dict[str, dict[str, float]]:
    """Learns t[source word][target word], at first all alike, by expectation maximization."""
    table: dict[str, dict[str, float]] = {}
    for iteration in range(iterations):
        counts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for source, target in pairs:
            for word in target:
                shares = [table[other][word] if iteration else 1.0 for other in source]
                total = sum(shares)
                for other, share in zip(source, shares, strict=True):
                    counts[other][word] += share / total
        totals = {other: sum(row.values()) for other, row in counts.items()}
        table = {other: {word: n / totals[other] for word, n in row.items()} for other, row in counts.items()}
    return table


def link(pairs: Pairs, count: int) -> Links:
    """Learns from all pairs, and links each target word of the first ones to its most probable source word, if any."""
    pairs = [([NOTHING, *source], target) for source, target in pairs]
    table = learn(pairs)
    found: Links = []
    for source, target in pairs[:count]:
        best = [max(range(len(source)), key=lambda place: table[source[place]][word]) for word in target]
        found.append({(place - 1, number) for number, place in enumerate(best) if place})
    return found


def check(arguments: CheckArguments) -> None:
    """Prints how well each layer's alignments, and those of the mean of all, agree with IBM model 1's."""
    checked = read_pairs(arguments.pairs, arguments.num_pairs)
    texts = checked + (read_pairs(arguments.corpus) if arguments.corpus else [])
    pairs = [(split_words(source.casefold()), split_words(target.casefold())) for source, target in texts]
    both = zip(link(pairs, len(checked)), link([pair[::-1] for pair in pairs], len(checked)), strict=True)
    expected = [links & {(source, target) for target, source in turned} for links, turned in both]
    num_expected = sum(map(len, expected))
    model, tokenizer, _ = arguments.load()
    options: dict[str, Any] = {"source_prefix": arguments.find_prefix(model)}
    options["max_source_length"] = arguments.max_source_length
    example = next((pair for pair in checked if all(pair)), ("", ""))
    layers = range(len(collect_attention(model, tokenizer, *example, **options).cross))
    options |= {"batch_size": arguments.batch_size, "max_batch_tokens": arguments.max_batch_tokens, "progress": False}
    print(f"IBM model 1 has {num_expected} links in {len(checked)} pairs.\nlayer  precision  recall")
    for layer in [*layers, None]:
        found = list(align_lines(model, tokenizer, checked, layer=layer, **options))
        hits = sum(len(links.intersection(alignment)) for alignment, links in zip(found, expected, strict=True))
        precision, recall = hits / max(sum(map(len, found)), 1), hits / max(num_expected, 1)
        print(f"{'mean' if layer is None else layer:<5}  {precision:9.1%}  {recall:6.1%}")


make_parser = partial(make_argument_parser, CheckArguments, __doc__)
main = make_main(make_parser, check)


if __name__ == "__main__":
    main()
