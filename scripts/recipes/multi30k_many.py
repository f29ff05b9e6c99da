r"""Multi30k in English, German and French: one model for all six directions beside a model for each of them.

    python scripts/recipes/multi30k_many.py --data data/multi30k --output_dir out/multi30k_many --seeds 1 2 3

DATA holds train, val and test_2016_flickr of each language, such as train.en.gz. The model of all is trained on English
with German and with French, both ways, but not on German with French, which is zero-shot; each of the others on its one
direction, with three eighths of the updates. All have the same size, and the settings of multi30k_many.yaml beside
this file. The commands are printed as they run. What is finished is not done again. Scores are BLEU on
test_2016_flickr (sacreBLEU, 13a).
"""

import json
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

from steps import describe, format_table, make_parser, run_once

RECIPE = Path(__file__).with_suffix(".yaml")
LANGUAGES = ("en", "de", "fr")
ZERO_SHOT = (("de", "fr"), ("fr", "de"))
MANY = "many"
UPDATES_OF_ONE = 1500  # the model of all learns each of its four directions in 1,000 of its 4,000


def find_files(data: Path, part: str, pair: Sequence[str]) -> list[Path]:
    """The two files of a part of the corpus."""
    return [data / f"{part}.{language}.gz" for language in pair]


def train(
    data: Path, out: Path, folder: Path, seed: int, pairs: Sequence[Sequence[str]], options: Sequence[str]
) -> None:
    """Trains on these pairs of languages, several of them both ways, into a folder of `out`."""
    files: list[str | Path] = []
    for option, part in (("--train_file", "train"), ("--validation_file", "val")):
        for pair in pairs:
            files += [option, *find_files(data, part, pair)]
    is_many = len(pairs) > 1
    languages = ["--lang_pairs", *("-".join(pair) for pair in pairs), "--both_directions", str(is_many).lower()]
    length = [] if is_many else ["--max_steps", str(UPDATES_OF_ONE)]
    words = ["--seed", str(seed), "--output_dir", folder, *languages, *files, *length, *options]
    run_once(out, folder / "metrics.json", "train", RECIPE, *words)


def score(data: Path, out: Path, model: Path, pair: Sequence[str]) -> float:
    """BLEU of a direction, in percent."""
    metrics = model / f"test.{'-'.join(pair)}" / "metrics.json"
    test: list[str | Path] = ["--test_file", *find_files(data, "test_2016_flickr", pair)]
    test += ["--source_lang", pair[0], "--target_lang", pair[1], "--output_dir", metrics.parent, "--overwrite"]
    run_once(out, metrics, "evaluate", "--model_name_or_path", model, *test)
    return float(json.loads(metrics.read_text(encoding="utf-8"))["bleu"])


def make_table(scores: dict[tuple[str, str], dict[str, list[float]]]) -> str:
    """A row a direction: the mean and the standard deviation of the seeds."""
    rows = [["", "one model", "one a direction"]]
    for pair, found in scores.items():
        name = f"{' to '.join(pair)}{' (zero-shot)' if pair in ZERO_SHOT else ''}"
        rows.append([name, describe(found[MANY], 2), describe(found["single"], 2)])
    return format_table(rows)


def main(argv: list[str] | None = None) -> None:
    """Trains, scores and prints the table, also into results.md of the output folder."""
    parser = make_parser(__doc__, seeds=" of seven models")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the corpus")
    arguments, options = parser.parse_known_args(argv)
    data, out = arguments.data, arguments.output_dir
    directions = list(permutations(LANGUAGES, 2))
    parts = ("train", "val", "test_2016_flickr")
    files = [path for part in parts for path in find_files(data, part, LANGUAGES)]
    if missing := [str(path) for path in files if not path.is_file()]:
        raise SystemExit(f"{', '.join(missing)} missing.")
    scores: dict[tuple[str, str], dict[str, list[float]]] = {pair: {MANY: [], "single": []} for pair in directions}
    for seed in arguments.seeds:
        many = out / MANY / f"seed{seed}"
        train(data, out, many, seed, [("en", "de"), ("en", "fr")], options)
        for pair, found in scores.items():
            single = out / "-".join(pair) / f"seed{seed}"
            train(data, out, single, seed, [pair], options)
            found[MANY].append(score(data, out, many, pair))
            found["single"].append(score(data, out, single, pair))
    table = make_table(scores)
    (out / "results.md").write_text(table + "\n", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
