r"""What each change to a recipe is worth: rows of changes, trained with several seeds and scored on validation data.

    python scripts/recipes/ablation.py --recipe scripts/recipes/multi30k_en_de.yaml \
        --changes scripts/recipes/ablations/multi30k_table3.yaml --output_dir out/table3 --seeds 1 2 3

RECIPE is a file of arguments for `vanilla-transformer train`. CHANGES has the rows by name: `options`, which take the
place of the recipe's (of `config_overrides` those that are named), and `columns`, which stand beside what is measured,
such as published figures. `--rows` chooses some of them. All seeds of the first number are trained before the second.
The commands are printed as they run, the table after each of them. What is finished is not done again, and a training
that was interrupted goes on.

Perplexity and BLEU are those of the recipe's validation data, which also chose when to end: they compare rows, not
systems. Minutes are those of a training, in all its parts.
"""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from steps import describe, format_table, make_parser, run_once

from vanilla_transformer.commands.train import parse_given

NUM_BEAMS = 4
_PASSED_ON = ("bleu_tokenize", "remove_bpe", "source_lang", "target_lang", "source_column", "target_column")


def read_changes(path: Path, names: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """The rows of a file, or those of these names."""
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(rows, dict) or not all(isinstance(row, dict | None) for row in rows.values()):
        raise SystemExit(f"{path} must hold rows by name, each with `options`, `columns` or nothing.")
    for name, row in rows.items():
        if unknown := set(row or {}) - {"options", "columns"}:
            raise SystemExit(f"{path}, row {name}: {', '.join(sorted(unknown))} is neither `options` nor `columns`.")
    if unknown := set(names or ()) - rows.keys():
        raise SystemExit(f"--rows {' '.join(sorted(unknown))}: the rows of {path} are {', '.join(rows)}.")
    return {name: rows[name] or {} for name in names or rows}


def merge_options(*all_options: Mapping[str, Any]) -> dict[str, Any]:
    """Later ones take the place of earlier ones; fields of the configuration that they do not name stay."""
    merged = {name: value for options in all_options for name, value in options.items()}
    if overrides := [options["config_overrides"] for options in all_options if options.get("config_overrides")]:
        merged["config_overrides"] = ",".join(overrides)  # of a field that is named twice, `train` takes the last value
    return merged


def parse_options(words: list[str]) -> dict[str, Any]:
    """What a command line says to `train`; of an option that may be given several times, its only value."""

    def is_one(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 1 and isinstance(value[0], list)

    return {name: value[0] if is_one(value) else value for name, value in parse_given(words).items()}


def spell_options(options: Mapping[str, Any]) -> list[str]:
    """As words of a command line."""
    words = []
    for name, value in options.items():
        several = value if isinstance(value, list) else [value]
        for each in several if any(isinstance(one, list) for one in several) else [several]:
            words += [f"--{name}", *(json.dumps(one) if isinstance(one, bool) else str(one) for one in each)]
    return words


def measure(
    arguments: Namespace, recipe: Mapping[str, Any], row: Mapping[str, Any], folder: Path, seed: int
) -> dict[str, float]:
    """Trains and scores, as far as it is not done; returns what the table tells."""
    settings = merge_options(recipe, arguments.options, row.get("options", {}))
    changed = {name: value for name, value in settings.items() if value != recipe.get(name)}
    words = ["train", str(arguments.recipe), *spell_options(changed), "--seed", str(seed), "--output_dir", str(folder)]
    run_once(arguments.output_dir, folder / "metrics.json", *words)
    metrics = folder / "validation" / "metrics.json"
    words = ["evaluate", "--model_name_or_path", str(folder), "--test_file", *settings["validation_file"]]
    words += spell_options({name: settings[name] for name in _PASSED_ON if settings.get(name)})
    words += ["--num_beams", str(NUM_BEAMS), "--output_dir", str(metrics.parent), "--overwrite"]
    run_once(arguments.output_dir, metrics, *words)
    scores, costs = (json.loads(path.read_text(encoding="utf-8")) for path in (metrics, folder / "metrics.json"))
    return {
        "perplexity": scores["perplexity"],
        "BLEU": scores["bleu"],
        "parameters, millions": costs["parameters"] / 1e6,
        "updates": costs["steps"],
        "minutes": (costs["runtime_seconds"] or float("nan")) / 60,
    }


def make_table(rows: Mapping[str, Mapping[str, Any]], results: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """A row each, of those that have results."""
    columns = list(dict.fromkeys(name for row in rows.values() for name in row.get("columns", {})))
    digits = {"perplexity": 2, "BLEU": 2, "parameters, millions": 2, "updates": 0, "minutes": 0}
    table = [["", *columns, *digits, "seeds"]]
    for name, found in results.items():
        told = [str(rows[name].get("columns", {}).get(column, "")) for column in columns]
        measured = [describe([result[column] for result in found], places) for column, places in digits.items()]
        table.append([name, *told, *measured, str(len(found))])
    return format_table(table)


def main(argv: list[str] | None = None) -> None:
    """Trains, scores, and writes the table so far into results.md of the output folder."""
    parser = make_parser(__doc__, seeds=" of each row")
    parser.add_argument("--recipe", type=Path, required=True, help="a YAML file of arguments of `train`")
    parser.add_argument("--changes", type=Path, required=True, help="a YAML file of rows")
    parser.add_argument("--rows", nargs="+", help="names of rows, in this order (default: all)")
    arguments, options = parser.parse_known_args(argv)
    arguments.options = parse_options(options)
    rows = read_changes(arguments.changes, arguments.rows)
    recipe = yaml.safe_load(arguments.recipe.read_text(encoding="utf-8"))
    for name, row in {"": {}, **rows}.items():
        settings = merge_options(recipe, arguments.options, row.get("options", {}))
        files = settings.get("validation_file")
        is_one = files and not settings.get("lang_pairs") and not any(isinstance(each, list) for each in files)
        if not is_one or settings.get("task", "translation") != "translation":
            where = f"{arguments.changes}, row {name}," if name else str(arguments.recipe)
            raise SystemExit(f"{where} must be of a translation, with one validation_file to compare on.")
    results: dict[str, list[dict[str, float]]] = {}
    for seed in arguments.seeds:
        for name, row in rows.items():
            folder = arguments.output_dir / name / f"seed{seed}"
            results.setdefault(name, []).append(measure(arguments, recipe, row, folder, seed))
            table = make_table(rows, results)
            (arguments.output_dir / "results.md").write_text(table + "\n", encoding="utf-8")
            print(table, flush=True)


if __name__ == "__main__":
    main()
