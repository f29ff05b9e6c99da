r"""From two text files to a served model: 20,000 noisy pairs of Tatoeba, English to German, and what each step gains.

    python scripts/recipes/tatoeba_en_de.py    # about eight hours on one CPU core; again, to go on
    PAIRS=500 TEXTS=500 STEPS=8 PRESET=tiny RATIO=99 SIMILARITY=0 OUT=out/trial \
        python scripts/recipes/tatoeba_en_de.py    # a trial, of models that learn nothing

COMMANDS below run in OUT; one whose output is there is not run again. Other settings need another OUT. DATA holds
train.en-de.tsv.gz, val.en-de.tsv.gz and test.en-de.tsv.gz: a sentence, a tab, its translation. The first PAIRS of the
shuffled training pairs are kept, and noise is put among them; of the others only TEXTS targets are, which are in no
other set. For text of your own, put train.en, train.de, val.en, val.de, test.en, test.de and mono.de into OUT: DATA is
not needed then. The page about it: scripts/from_text_to_server.md.
"""

import gzip
import json
import os
import random
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from steps import read_steps, run_once


def count(name: str, default: int, least: int = 1) -> int:
    """The whole number that a variable of the environment has, or the default."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < least:
        raise SystemExit(f"{name} is {text!r}; it must be a whole number of at least {least}.")
    return int(text)


# Settings; each may be given as a variable of the environment.
DATA = Path(os.environ.get("DATA", "data/tatoeba")).absolute()
OUT = Path(os.environ.get("OUT", "out/tatoeba_en_de"))
PAIRS = count("PAIRS", 20_000)  # that are right
NOISE = count("NOISE", 30, least=0)  # percent of the lines of train.en and train.de; below 100
TEXTS = count("TEXTS", 100_000)  # in German alone
SIZES = {"PAIRS": PAIRS, "NOISE": NOISE, "TEXTS": TEXTS}
VOCABULARY = count("VOCABULARY", 6000)  # tokens
STEPS = count("STEPS", 3600)  # updates of 2,048 source and 2,048 target tokens, padding included
PRESET = os.environ.get("PRESET", "small")  # 3 + 3 layers, d_model 256
STUDENT = "encoder_layers=6,d_model=128,encoder_ffn_dim=512,decoder_ffn_dim=512,"  # and 2 decoder layers
STUDENT += "encoder_attention_heads=4,decoder_attention_heads=4,initializer_gain=0.5"
RATIO = count("RATIO", 2)  # of tokens, at most, of a back-translation and its text
SIMILARITY = count("SIMILARITY", 30, least=0)  # to the references, in chrF, of what the student learns
BEAMS = count("BEAMS", 1)  # of the tests and of the server

FILES = [*(f"{part}.{language}" for part in ("train", "val", "test") for language in ("en", "de")), "mono.de"]

EVERY = max(STEPS // 8, 1)
TRAIN = rf"""vanilla-transformer train --tokenizer_name tokenizer --max_source_tokens 2048 \
    --learning_rate 8e-4 --lr_scheduler_type cosine --warmup_steps {STEPS // 10} --seed 1 \
    --eval_strategy steps --eval_steps {EVERY} --save_strategy steps --save_steps {EVERY} --save_total_limit 2"""
EN_DE = "--source_lang en --target_lang de --validation_file val.en val.de"
MODEL = f"--preset {PRESET} --config_overrides dropout=0.3,initializer_gain=0.5"
TEACHER = f"{MODEL} --max_steps {STEPS}"

# Before each command: the row of the table that its time counts for, what is there once it has ended, and what it does.
COMMANDS = rf"""
# cleaned -> corpora/clean.tsv: what is no translation is removed, by rules.
vanilla-transformer clean --source_lang en --target_lang de --files train.en train.de \
    --output_files corpora/clean.tsv --removed_file removed.tsv --report_file clean.json

# cleaned -> tokenizer/tokenizer.json: one vocabulary for both languages and all models.
vanilla-transformer train-tokenizer --files corpora/clean.tsv mono.de --vocab_size {VOCABULARY} --output_dir tokenizer

# as it is -> noisy/metrics.json: what there was to improve.
{TRAIN} \
    {EN_DE} \
    {TEACHER} \
    --train_file train.en train.de --output_dir noisy

# cleaned -> cleaned/metrics.json: the same training on what is left.
{TRAIN} \
    {EN_DE} \
    {TEACHER} \
    --train_file corpora/clean.tsv --output_dir cleaned

# back-translated -> reverse/metrics.json: a model of the other direction, trained for half as long.
{TRAIN} \
    --source_lang de --target_lang en --validation_file val.de val.en \
    {MODEL} --max_steps {max(STEPS // 2, 1)} \
    --train_file corpora/clean.tsv --source_column target --target_column source --output_dir reverse

# back-translated -> corpora/back.tsv: it translates the German text into English.
vanilla-transformer backtranslate --model_name_or_path reverse --num_beams 4 --max_length_ratio {RATIO} \
    --input_file mono.de --output_file corpora/back.tsv

# back-translated -> teacher/metrics.json: the same training on both; one pair in three was translated by a person.
{TRAIN} \
    {EN_DE} \
    {TEACHER} \
    --train_file corpora/clean.tsv --train_file corpora/back.tsv --dataset_weights 1 2 --output_dir teacher

# student -> distilled.tsv: the teacher translates all sources.
vanilla-transformer distill --model_name_or_path teacher --num_beams 4 --n_best 4 --min_similarity {SIMILARITY} \
    --input_file "corpora/*.tsv" --output_file distilled.tsv

# student -> student/metrics.json: a small model learns its translations and its probabilities.
{TRAIN} \
    {EN_DE} \
    --preset student --config_overrides {STUDENT} --max_steps {STEPS * 3 // 2} \
    --train_file distilled.tsv --teacher_model teacher --output_dir student

# in 8 bits -> student/ctranslate2/model.bin: for CTranslate2, in the student's folder.
vanilla-transformer export --model_name_or_path student --format ctranslate2 --quantization int8
"""
# The models of the table's rows. Each translates the test set once, and is compared with the one before.
MODELS = {
    "as it is": "noisy",
    "cleaned": "cleaned",
    "back-translated": "teacher",
    "student": "student",
    "in 8 bits": "student/ctranslate2",
}
SCORE = rf"""
# {{row}} -> {{model}}/test/metrics.json: in torch, or what the export is for.
vanilla-transformer evaluate --model_name_or_path {{model}} --engine {{engine}} --num_beams {BEAMS} --ter false \
    --test_file test.en test.de --output_dir {{model}}/test --overwrite
"""
COMPARE = r"""
# {row} -> {model}/test/comparison.json: a paired bootstrap.
vanilla-transformer evaluate --compare {before}/test {model}/test --output_dir {model}/test --overwrite
"""
SERVE = f"""vanilla-transformer serve --model_name_or_path student --num_beams {BEAMS}
curl -d q="Good morning!" -d source=en -d target=de 127.0.0.1:5000/translate    # in another terminal"""


class Step(NamedTuple):
    """A command, the row of the table that its time counts for, and the file that is there once it has ended."""

    row: str
    output: str
    command: str


def list_steps() -> list[Step]:
    """All commands in their order."""
    text = COMMANDS
    for (row, model), before in zip(MODELS.items(), [None, *MODELS.values()], strict=False):
        engine = "ctranslate2" if model.endswith("ctranslate2") else "transformers"
        text += SCORE.format(row=row, model=model, engine=engine)
        text += COMPARE.format(row=row, model=model, before=before) if before else ""
    return [Step(*found) for found in re.findall(r"^# (.+) -> (\S+): .+\n((?:.+\n)+)", text, flags=re.MULTILINE)]


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


def add_noise(pairs: Pairs, *, noise: float, seed: int) -> Pairs:
    """The pairs among others that are wrong, a share of `noise`: the target of another, half of it, or the source."""
    generator = random.Random(seed)
    wrong: Pairs = []
    for number in range(round(len(pairs) * noise / (1 - noise))):
        (source, target), (_, other) = generator.choice(pairs), generator.choice(pairs)
        words = target.split()
        half = " ".join(words[: max(len(words) // 2, 1)])
        wrong.append((source, (other, half, source)[number % 3]))
    return generator.sample([*pairs, *wrong], len(pairs) + len(wrong))


def find_missing() -> list[str]:
    """Those of FILES that must still be made of Tatoeba; data.json says of what size they are.

    Raises:
        SystemExit: If some were put here, but not all, or if they are of other sizes.
    """
    missing = [name for name in FILES if not (OUT / name).is_file()]
    record = OUT / "data.json"
    if not record.is_file():
        if 0 < len(missing) < len(FILES):
            raise SystemExit(f"{OUT} holds some files of text, but no {' and no '.join(missing)}.")
    elif (made := json.loads(record.read_text(encoding="utf-8"))) != SIZES:
        raise SystemExit(f"{OUT} holds data of {made}, not of {SIZES}: give another OUT.")
    return missing


def write_data() -> None:
    """Writes FILES here; each has all its lines or is not there."""
    train, val, test = (read_pairs(DATA / f"{part}.en-de.tsv.gz") for part in ("train", "val", "test"))
    kept, mono = divide(train, [*val, *test], pairs=PAIRS, texts=TEXTS, seed=1)
    if len(kept) < PAIRS or len(mono) < TEXTS:
        raise SystemExit(
            f"{DATA} has {len(kept):,} pairs and {len(mono):,} other texts; {PAIRS:,} and {TEXTS:,} are asked for."
        )
    parts = {"train": add_noise(kept, noise=NOISE / 100, seed=1), "val": val, "test": test}
    texts = {
        f"{part}.{name}": [pair[side] for pair in rows]
        for part, rows in parts.items()
        for side, name in enumerate(("en", "de"))
    }
    Path("data.json").write_text(json.dumps(SIZES), encoding="utf-8")
    for name, lines in (texts | {"mono.de": mono}).items():
        part = Path(f"{name}.part")
        part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        part.replace(name)
    print(
        f"{len(parts['train']):,} noisy pairs, {len(mono):,} German texts, {len(val):,} and {len(test):,} other pairs"
    )


def read_minutes() -> dict[str, float]:
    """How long each row's steps took; a training counts all its parts."""
    minutes: dict[str, float] = dict.fromkeys(MODELS, 0)
    steps = read_steps(Path())
    for step in list_steps():
        spent = steps.get(step.output, {}).get("seconds", 0)
        if Path(step.output).name == "metrics.json":
            spent = max(spent, json.loads(Path(step.output).read_text(encoding="utf-8")).get("runtime_seconds") or 0)
        minutes[step.row] += spent / 60
    return minutes


def make_table() -> str:
    """The rows in Markdown; a gain is over the row before, and p the chance of it by the luck of the test set."""
    lines = ["| step | BLEU | chrF | gain in BLEU | sentences/s | minutes |", "|---|---|---|---|---|---|"]
    minutes = read_minutes()
    for row, model in MODELS.items():
        folder = f"{model}/test"
        metrics = json.loads(Path(folder, "metrics.json").read_text(encoding="utf-8"))
        gain = ""
        if (path := Path(folder, "comparison.json")).is_file():
            before, own = (system["bleu"] for system in json.loads(path.read_text(encoding="utf-8"))["systems"])
            gain = f"{own['score'] - before['score']:+.2f} (p = {own['p_value']:.3f})"
        scores = f"{metrics['bleu']:.2f} | {metrics['chrf']:.2f} | {gain}"
        speed = f"{metrics['sentences_per_second']:.1f}"
        lines.append(f"| {row} | {scores} | {speed} | {minutes[row]:.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Does every step that is not done, and prints the table and how to serve the model."""
    if NOISE > 99:
        raise SystemExit(f"NOISE is {NOISE}; it must be below 100.")
    missing = find_missing()
    sources = [DATA / f"{part}.en-de.tsv.gz" for part in ("train", "val", "test")]
    if missing and (absent := [str(path) for path in sources if not path.is_file()]):
        raise SystemExit(
            f"There is no {' and no '.join(absent)}. For text of your own, put it into {OUT}: see the docstring."
        )
    (OUT / "corpora").mkdir(parents=True, exist_ok=True)
    print(f"cd {shlex.quote(str(OUT))}")
    os.chdir(OUT)
    if missing:
        write_data()
    for step in list_steps():
        run_once(Path(), Path(step.output), *shlex.split(step.command.replace("\\\n", " "))[1:])
    print(f"{make_table()}\n\n{SERVE}")


if __name__ == "__main__":
    main()
