r"""Check what `clean` removes: put noise into pairs of Tatoeba, and print precision and recall by rule and by noise.

    python scripts/benchmarks/check_cleaning.py --folder data/tatoeba --num_pairs 20000

Of the noisy corpus, --noise is noise, as much of each kind: targets of other pairs (shuffled), an English sentence or a
Chinese one for a target (other language, other script), the source for a target (copied), the first half of a target
(truncated), and pairs that are there already, in capital letters (repeated). A rule's precision is the share of noise
among what it removed; a kind's recall is the share of it that was removed, by any rule.

With models, trained on the noisy corpus say, a share of what the rules leave is kept by their scores (--keep_share):

    python scripts/benchmarks/check_cleaning.py --model_name_or_path out/noisy --reverse_model_name_or_path out/reverse

With --output_dir, the training sets clean.tsv (without the noise), noisy.tsv and cleaned.tsv are written. The same
training of each says what cleaning is worth in BLEU (for --reverse_model..., swap the columns and the languages):

    for name in clean noisy cleaned; do
        vanilla-transformer train --train_file out/cleaning/$name.tsv --output_dir out/cleaning/$name --preset small \
            --validation_file data/tatoeba/val.en-de.tsv.gz --source_lang en --target_lang de \
            --vocab_size 8000 --max_source_tokens 4096 --max_steps 10000 --warmup_steps 1000 --seed 1
        vanilla-transformer evaluate --model_name_or_path out/cleaning/$name --num_beams 4 \
            --test_file data/tatoeba/test.en-de.tsv.gz --output_dir out/cleaning/$name/test
    done
    vanilla-transformer evaluate --compare out/cleaning/noisy/test out/cleaning/cleaned/test

Where the folder is not there, nothing is measured, and the script says so.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vanilla_transformer.commands.command_line import make_argument_parser, make_main
from vanilla_transformer.options import option

KINDS = ("shuffled", "other language", "other script", "copied", "truncated", "repeated")
LEAST_WORDS = 4  # of a target that is cut
FILES = ("train.en-de.tsv.gz", "train.en-zh.tsv.gz")


class Noisy(NamedTuple):
    """A pair, and what is wrong with it ("" if nothing)."""

    source: str
    target: str
    kind: str


@dataclass
class CheckArguments:
    """Which pairs, how much noise, and what judges them beside the rules."""

    folder: str = option("Of Tatoeba's files.", "data/tatoeba")
    num_pairs: int = option("Pairs of the noisy corpus.", 20000)
    noise: float = option("The share of noise.", 0.3)
    seed: int = option("Of the choice of pairs and noise.", 0)
    output_dir: str | None = option("Folder for the three training sets. Default: they are not written.", None)
    model_name_or_path: str | None = option("A model from English to German.", None)
    reverse_model_name_or_path: str | None = option("One from German to English.", None)
    keep_share: float = option("What models leave of what rules have left.", 0.88)

    def __post_init__(self) -> None:
        if not 0 <= self.noise < 1 or self.num_pairs < 10:
            raise ValueError("--noise must be at least 0 and less than 1, and --num_pairs at least 10.")


def add_noise(
    pairs: Sequence[tuple[str, str]], others: Sequence[str], *, count: int, noise: float, seed: int
) -> list[Noisy]:
    """Draws `count` pairs, and spoils a share of them; `others` are texts in another script."""
    generator = random.Random(seed)
    chosen = generator.sample(list(pairs), count)
    kinds = [KINDS[number % len(KINDS)] for number in range(round(noise * count))]
    found: list[Noisy] = [Noisy(*pair, "") for pair in chosen[len(kinds) :]]
    for (source, target), kind in zip(chosen, kinds, strict=False):
        other = generator.choice(pairs)
        words = target.split()
        if kind == "truncated" and len(words) < LEAST_WORDS:
            source, target = next(pair for pair in iter(lambda: generator.choice(pairs), None) if is_long(pair[1]))
            words = target.split()
        spoiled = {
            "shuffled": (source, other[1]),
            "other language": (source, other[0]),
            "other script": (source, generator.choice(others)),
            "copied": (source, source),
            "truncated": (source, " ".join(words[: len(words) // 2])),
            "repeated": tuple(text.upper() for text in generator.choice(found)[:2]),
        }
        one, two = spoiled[kind]
        found.append(Noisy(one, two, kind))
    # What is repeated must come after what it repeats, so that a rule can know which of them is the noise.
    repeated = [each for each in found if each.kind == "repeated"]
    rest = [each for each in found if each.kind != "repeated"]
    generator.shuffle(rest)
    return rest + repeated


def is_long(target: str) -> bool:
    """Whether a half of it is not the whole."""
    return len(target.split()) >= LEAST_WORDS


def describe(corpus: Sequence[Noisy], removed_by: Sequence[str | None]) -> str:
    """The table of what rules have removed; `removed_by` are their names, or None for the pairs that stay."""
    columns = ("clean", *KINDS)
    totals = Counter(each.kind or "clean" for each in corpus)
    counts = Counter((rule, each.kind or "clean") for each, rule in zip(corpus, removed_by, strict=True))
    rules = [rule for rule in dict.fromkeys(removed_by) if rule is not None]
    width = max(map(len, [*rules, "recall, all rules"]))
    lines = [f"{'rule':<{width}}  {'removed':>7}  precision  " + "  ".join(f"{name:>14}" for name in columns)]
    for rule in sorted(rules, key=lambda rule: -sum(counts[rule, name] for name in columns)):
        lines.append(_row(rule, [counts[rule, name] for name in columns], width))
    sums = [sum(counts[rule, name] for rule in rules) for name in columns]
    lines.append(_row("all rules", sums, width))
    lines.append(f"{'pairs':<{width}}  {'':7}  {'':9}  " + "  ".join(f"{totals[name]:>14,}" for name in columns))
    shares = (f"{count / max(totals[name], 1):>14.1%}" for name, count in zip(columns, sums, strict=True))
    lines.append(f"{'removed':<{width}}  {'':7}  {'':9}  " + "  ".join(shares))
    recall = sum(sums[1:]) / max(len(corpus) - totals["clean"], 1)
    return "\n".join([*lines, f"precision {sum(sums[1:]) / max(sum(sums), 1):.1%}, recall {recall:.1%}"])


def _row(name: str, counts: list[int], width: int) -> str:
    precision = f"{sum(counts[1:]) / max(sum(counts), 1):>9.1%}"
    return f"{name:<{width}}  {sum(counts):>7,}  {precision}  " + "  ".join(f"{count:>14,}" for count in counts)


def check(arguments: CheckArguments) -> None:
    """Makes noise, cleans, and prints the table."""
    from vanilla_transformer.data.cleaning import clean_pairs, default_rules, make_rule, make_rules
    from vanilla_transformer.data.corpora import load_parallel_corpus
    from vanilla_transformer.inference.cleaning import ALL_RULES
    from vanilla_transformer.inference.outputs import open_table

    folder = Path(arguments.folder)
    if absent := [name for name in FILES if not (folder / name).is_file()]:
        print(f"Skipped, since {folder} has no {' and no '.join(absent)}.")
        return
    german, chinese = (load_parallel_corpus(files=[folder / name]) for name in FILES)
    pairs = list(zip(german["source"], german["target"], strict=True))
    if arguments.num_pairs > len(pairs):
        raise ValueError(f"--num_pairs is {arguments.num_pairs}; there are {len(pairs)}.")
    options: dict[str, Any] = {"count": arguments.num_pairs, "noise": arguments.noise, "seed": arguments.seed}
    corpus = add_noise(pairs, list(chinese["target"]), **options)
    rules = make_rules(default_rules("en", "de"))
    if arguments.model_name_or_path is not None:
        models = {"model": arguments.model_name_or_path, "reverse_model": arguments.reverse_model_name_or_path}
        rules.append(make_rule("DualCrossEntropyFilter", models | {"share": arguments.keep_share}, ALL_RULES))
    kept, verdicts = clean_pairs(rules, [(each.source, each.target) for each in corpus])
    names = [str(rule) for rule in rules]
    print(describe(corpus, [names[verdict] if verdict < len(names) else None for verdict in verdicts]))
    if arguments.output_dir is not None:
        output = Path(arguments.output_dir)
        output.mkdir(parents=True, exist_ok=True)
        sets = {"clean": [each[:2] for each in corpus if not each.kind], "noisy": [each[:2] for each in corpus]}
        for name, rows in (sets | {"cleaned": kept}).items():
            with open_table([output / f"{name}.tsv"], ("source", "target")) as write:
                write(rows)


make_parser = partial(make_argument_parser, CheckArguments, __doc__)
main = make_main(make_parser, check)


if __name__ == "__main__":
    main()
