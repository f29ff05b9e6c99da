r"""From letters to sounds in 15 languages with one model: task 1 of SIGMORPHON 2020, from files to scores.

    python scripts/recipes/g2p.py --data data/g2p --output_dir out/g2p --seeds 1 2 3 4 5

DATA holds the task's fre_train.tsv, fre_dev.tsv, fre_test.tsv and so on (github.com/sigmorphon/2020): a word, a tab,
its sounds. A source is the language and the letters, `<fre> a b a n d o n n e r`; letters are cut into what Unicode
composes them of, above all Korean ones (NFD). One model a seed is trained by g2p.yaml beside this file and scored on
each language's test set; then all seeds write one answer together. The commands are printed as they run. What is
finished is not done again.

The errors are percentages: WER of words that are not right in full, PER of sounds. Published averages of the 15 WERs:
17.5 of the task's Transformer baseline, one a language, 13.8 of the best system, an ensemble (Gorman et al., 2020).
"""

import json
import statistics
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from steps import describe, format_table, make_parser, run_once

RECIPE = Path(__file__).with_suffix(".yaml")


def find_languages(data: Path) -> list[str]:
    """The languages with training, development and test files."""
    languages = sorted(path.name.removesuffix("_train.tsv") for path in data.glob("*_train.tsv"))
    if not languages:
        raise SystemExit(f"--data {data} holds no LANGUAGE_train.tsv.")
    wanted = [data / f"{language}_{part}.tsv" for language in languages for part in ("dev", "test")]
    if missing := [str(path) for path in wanted if not path.is_file()]:
        raise SystemExit(f"{', '.join(missing)} missing.")
    return languages


def read_pairs(path: Path, language: str) -> list[str]:
    """The lines of a file as training takes them: tokens with spaces between them on both sides of the tab."""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        word, tab, sounds = line.partition("\t")
        if not (word and tab and sounds) or "\t" in sounds:
            raise SystemExit(f"{path}, line {number}: must be a word, a tab and its sounds.")
        letters = unicodedata.normalize("NFD", word).replace(" ", "_")
        pairs.append(f"<{language}> {' '.join(letters)}\t{sounds}")
    return pairs


def write_data(data: Path, folder: Path) -> list[str]:
    """Writes train.tsv, dev.tsv and, for each language, test.LANGUAGE.tsv; returns the languages."""
    languages = find_languages(data)
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("train", "dev"):
        lines = [line for language in languages for line in read_pairs(data / f"{language}_{part}.tsv", language)]
        (folder / f"{part}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for language in languages:
        lines = read_pairs(data / f"{language}_test.tsv", language)
        (folder / f"test.{language}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return languages


def score(models: Sequence[Path], languages: Sequence[str], out: Path, folder: Path) -> dict[str, tuple[float, float]]:
    """WER and PER of each language; several models answer together. `folder`, a folder of `out`, gets the answers."""
    scores = {}
    for language in languages:
        metrics = folder / language / "metrics.json"
        test: list[str | Path] = ["--test_file", out / "data" / f"test.{language}.tsv", "--num_beams", "5"]
        test += ["--output_dir", metrics.parent, "--overwrite"]
        run_once(out, metrics, "evaluate", "--model_name_or_path", *models, *test)
        values = json.loads(metrics.read_text(encoding="utf-8"))
        scores[language] = values["wer"], values["per"]
    return scores


def make_table(languages: Sequence[str], runs: Sequence[dict[str, tuple[float, float]]], together: bool) -> str:
    """A row a language: WER and PER, the means of the single models and, where there are several, the ensemble's."""
    singles = runs[:-1] if together else runs
    columns = [("one model", singles), *([(f"{len(singles)} together", runs[-1:])] if together else [])]
    heads = [f"{kind}, {name}" for name, _ in columns for kind in ("WER", "PER")]
    rows = [["", *heads]]
    for language in [*languages, "macro average"]:
        cells = []
        for _, scores in columns:
            for kind in range(2):
                chosen = languages if language == "macro average" else [language]
                values = [statistics.fmean(each[code][kind] for code in chosen) for each in scores]
                cells.append(describe(values, 1))
        rows.append([language, *cells])
    return format_table(rows)


def main(argv: list[str] | None = None) -> None:
    """Trains, scores and prints the table, also into results.md of the output folder."""
    parser = make_parser(__doc__, seeds="")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the task's files")
    arguments, options = parser.parse_known_args(argv)
    out = arguments.output_dir
    languages = write_data(arguments.data, out / "data")
    models = []
    for seed in arguments.seeds:
        models.append(out / f"seed{seed}")
        files = ["--train_file", out / "data" / "train.tsv", "--validation_file", out / "data" / "dev.tsv"]
        words = ["--seed", str(seed), "--output_dir", models[-1], *files, *options]
        run_once(out, models[-1] / "metrics.json", "train", RECIPE, *words)
    runs = [score([model], languages, out, model / "test") for model in models]
    if together := len(models) > 1:
        name = "-".join(["together", *map(str, arguments.seeds)])
        runs.append(score(models, languages, out, out / name))
    table = make_table(languages, runs, together)
    (out / "results.md").write_text(table + "\n", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
