r"""What text in the target language brings: 20,000 pairs alone, and with 100,000 sentences translated back.

    python scripts/benchmarks/check_backtranslation.py --data data/tatoeba --output_dir out/back
    python scripts/benchmarks/check_backtranslation.py --data data/tatoeba --output_dir out/back \
        --methods tagged noised --dropout 0.2 --use_cpu

DATA holds train.en-de.tsv.gz, val.en-de.tsv.gz and test.en-de.tsv.gz: a sentence, a tab, its translation. The first
--pairs of the shuffled training pairs are kept; of the others only the targets are, those that are in no pair and in no
other set. A model of the other direction, trained on the pairs, translates them back by each of --methods. All models
have one tokenizer, made of the pairs and the text, and train for --steps updates of the same number of tokens; with
back-translated text, as many pairs of each kind are seen (--weights). The best checkpoint is chosen on val. The test
set is scored once per model, and compared with the model of the pairs alone by a paired bootstrap.

What else is given is for the trainings. The commands are printed as they run; what is finished is not done again, and
what was interrupted goes on. Where a file of DATA is missing, nothing is run, and the script says so.
"""

import argparse
import gzip
import json
import random
import shlex
import subprocess
import sys
from pathlib import Path

METHODS = {
    "beam": [],
    "tagged": ["--tag", "<BT>"],
    "sampling": ["--method", "sampling"],
    "noised": ["--method", "noised"],
}
_MAY_CHANGE = ("data", "output_dir", "methods")  # when a command is given again
LEAST_GAIN, MOST_CHANCE = 2.0, 0.05  # what is aimed at, in BLEU, and the p-value of the test

Pairs = list[tuple[str, str]]


def read_pairs(path: Path) -> Pairs:
    """The pairs of a compressed table without names."""
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    return [(source, target) for source, target in rows]


def divide(train: Pairs, others: Pairs, *, pairs: int, texts: int, seed: int) -> tuple[Pairs, list[str]]:
    """So many pairs, and so many targets of other pairs, which are in none of those nor in `others`."""
    train = random.Random(seed).sample(train, len(train))
    known = {target for _, target in (*train[:pairs], *others)}
    rest = list(dict.fromkeys(target for _, target in train[pairs:] if target not in known))
    return train[:pairs], rest[:texts]


def write_data(data: Path, folder: Path, *, languages: tuple[str, str], pairs: int, texts: int, seed: int) -> None:
    """Writes pairs.tsv, reverse.tsv, val.tsv, val.reverse.tsv and test.tsv, and mono.txt, the targets."""
    name = "-".join(languages)
    train, val, test = (read_pairs(data / f"{part}.{name}.tsv.gz") for part in ("train", "val", "test"))
    kept, mono = divide(train, [*val, *test], pairs=pairs, texts=texts, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    turned = {"reverse": kept, "val.reverse": val}
    tables = {"pairs": kept, "val": val, "test": test}
    tables |= {key: [(target, source) for source, target in rows] for key, rows in turned.items()}
    for key, rows in tables.items():
        lines = [f"{source}\t{target}\n" for source, target in [("source", "target"), *rows]]
        (folder / f"{key}.tsv").write_text("".join(lines), encoding="utf-8")
    (folder / "mono.txt").write_text("".join(f"{text}\n" for text in mono), encoding="utf-8")
    print(f"{len(kept):,} pairs, {len(mono):,} texts, {len(val):,} to validate on, {len(test):,} to test on")


def call(*words: str | Path) -> None:
    """Runs a command of the package, and shows it."""
    command = [str(word) for word in words]
    print("vanilla-transformer", shlex.join(command), flush=True)
    status = subprocess.run([sys.executable, "-m", "vanilla_transformer", *command], check=False).returncode
    if status:
        raise SystemExit(f"That ended with status {status}. What is finished stays: the same command goes on.")


class Runs:
    """The trainings in a folder."""

    def __init__(self, arguments: argparse.Namespace, options: list[str]) -> None:
        self.out: Path = arguments.output_dir
        self.data, self.tokenizer = self.out / "data", self.out / "tokenizer"
        self.arguments, self.options = arguments, options

    def train(self, name: str, languages: tuple[str, str], *corpora: Path, val: str) -> Path:
        """A model of these corpora, trained as all others are."""
        arguments, model = self.arguments, self.out / name
        if (model / "metrics.json").is_file():
            return model
        words: list[str | Path] = ["--tokenizer_name", self.tokenizer, "--validation_file", self.data / val]
        for path in corpora:
            words += ["--train_file", path]
        if len(corpora) > 1:
            words += ["--dataset_weights", *map(str, arguments.weights)]
        settings = {"preset": arguments.preset, "config_overrides": f"dropout={arguments.dropout}"}
        settings |= {"source_lang": languages[0], "target_lang": languages[1], "seed": arguments.seed}
        settings |= {"max_steps": arguments.steps, "max_source_tokens": arguments.tokens, "eval_strategy": "steps"}
        settings |= {"eval_steps": arguments.eval_steps, "save_strategy": "steps", "save_steps": arguments.eval_steps}
        settings |= {"learning_rate": arguments.learning_rate, "warmup_steps": arguments.warmup_steps}
        words += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        call("train", *words, "--output_dir", model, *self.options)
        return model

    def score(self, model: Path) -> Path:
        """The folder of a model's translations of the test set."""
        if not (model / "test" / "metrics.json").is_file():
            test = ["--test_file", self.data / "test.tsv", "--num_beams", "4", "--output_dir", model / "test"]
            call("evaluate", "--model_name_or_path", model, *test, *self.device, "--overwrite")
        return model / "test"

    @property
    def device(self) -> list[str]:
        """Where to translate, if the trainings were told."""
        return ["--device", "cpu"] if "--use_cpu" in self.options else []

    def check_settings(self) -> None:
        """Refuses a folder whose trainings are others, which could not be compared."""
        own = {name: value for name, value in vars(self.arguments).items() if name not in _MAY_CHANGE}
        path, text = self.out / "settings.json", json.dumps(own | {"options": self.options}, indent=2)
        if path.is_file() and path.read_text(encoding="utf-8") != text:
            raise SystemExit(f"{path} has other settings: give those, or another --output_dir.")
        self.out.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def run(self) -> None:
        """Trains, translates, scores and compares."""
        self.check_settings()
        arguments, there = self.arguments, tuple(self.arguments.languages)
        if not (self.data / "mono.txt").is_file():
            size = {"pairs": arguments.pairs, "texts": arguments.texts, "seed": arguments.seed}
            write_data(arguments.data, self.data, languages=there, **size)
        if not (self.tokenizer / "tokenizer.json").is_file():
            files = ["--files", self.data / "pairs.tsv", self.data / "mono.txt"]
            added = ["--added_tokens", "<BT>", "<BLANK>", "--vocab_size", str(arguments.vocab_size)]
            call("train-tokenizer", *files, *added, "--output_dir", self.tokenizer)
        baseline = self.train("pairs", there, self.data / "pairs.tsv", val="val.tsv")
        reverse = self.train("reverse", there[::-1], self.data / "reverse.tsv", val="val.reverse.tsv")
        models = {"pairs": baseline}
        for method in arguments.methods:
            made = self.data / f"{method}.tsv"
            if not made.is_file():
                files = ["--input_file", self.data / "mono.txt", "--output_file", made]
                call("backtranslate", "--model_name_or_path", reverse, *files, *METHODS[method], *self.device)
            models[method] = self.train(method, there, self.data / "pairs.tsv", made, val="val.tsv")
        folders = [self.score(model) for model in models.values()]
        call("evaluate", "--compare", *folders, "--output_dir", self.out, "--overwrite")
        systems = json.loads((self.out / "comparison.json").read_text(encoding="utf-8"))["systems"]
        first = systems[0]["bleu"]["score"]
        for method, system in zip(arguments.methods, systems[1:], strict=True):
            bleu = system["bleu"]
            gain = bleu["score"] - first
            is_reached = gain >= LEAST_GAIN and bleu["p_value"] < MOST_CHANCE
            aim = "what is aimed at" if is_reached else f"less than the {LEAST_GAIN} aimed at, or by chance"
            print(f"{method}: {gain:+.2f} BLEU (p = {bleu['p_value']:.4f}), {aim}")


def main(argv: list[str] | None = None) -> None:
    """Does what its name says, unless the data are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the corpus")
    parser.add_argument("--output_dir", type=Path, required=True, help="where everything is written")
    parser.add_argument("--languages", nargs=2, default=["en", "de"], help="source and target, as files are named")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="all, unless given")
    parser.add_argument("--pairs", type=int, default=20_000, help="pairs that are kept")
    parser.add_argument("--texts", type=int, default=100_000, help="targets that are translated back")
    parser.add_argument("--weights", type=float, nargs=2, default=[1, 1], help="of pairs and back-translated text")
    parser.add_argument("--vocab_size", type=int, default=8000, help="of the tokenizer")
    parser.add_argument("--preset", default="small", help="of all models")
    parser.add_argument("--dropout", type=float, default=0.3, help="of all models")
    parser.add_argument("--steps", type=int, default=8000, help="updates of each training")
    parser.add_argument("--eval_steps", type=int, default=500, help="updates between validations")
    parser.add_argument("--tokens", type=int, default=4096, help="source and target tokens of a batch")
    parser.add_argument("--learning_rate", type=float, default=1e-3, help="the peak")
    parser.add_argument("--warmup_steps", type=int, default=1000, help="updates until there")
    parser.add_argument("--seed", type=int, default=1, help="of data and trainings")
    arguments, options = parser.parse_known_args(argv)
    name = "-".join(arguments.languages)
    files = [arguments.data / f"{part}.{name}.tsv.gz" for part in ("train", "val", "test")]
    if absent := [str(path) for path in files if not path.is_file()]:
        print(f"Skipped, since there is no {' and no '.join(absent)}.")
        return
    Runs(arguments, options).run()


if __name__ == "__main__":
    main()
