r"""Train rows of the paper's Table 3, scaled down if need be, and print the paper's figures next to the measured ones.

    python scripts/table3.py --rows base A-h1 C-N2 --scale 1/4 --layers_factor 1/2 --steps 2000 --warmup_steps 400 \
        --tokens_per_batch 4096 --vocab_size 8000 --train_file train.en train.de --validation_file val.en val.de \
        --source_lang en --target_lang de --output_dir out/table3
    python scripts/table3.py --dry_run true --builtin_corpus --scale 1/8 --vocab_size 500 --output_dir out/table3

Each row is trained by scripts/train.py in a process and folder of its own, with a tokenizer that all rows share and the
paper's recipe, then scored on the validation set with 4 beams; as in the paper's table, no checkpoints are averaged.
After each row the table so far is written to table3.md and table3.json. A run that was stopped goes on when the same
command is given again, and --rows may name other rows then.

--scale multiplies d_model, d_ff, d_k and d_v, --layers_factor the number of layers; heads, dropout, label smoothing and
kind of positions stay, so that what a row changes against base stays in proportion. "big" gets three times --steps.
"""

import fcntl
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from table3_rows import (
    PAPER,
    Measurement,
    check_rows,
    count_steps,
    describe_config,
    describe_search,
    format_markdown,
    format_text,
    make_cells,
    parse_factor,
    scale_overrides,
)
from transformers import AutoTokenizer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from vanilla_transformer.commands.command_line import OptionParser, make_argument_parser
from vanilla_transformer.data.corpora import load_parallel_corpus
from vanilla_transformer.data.tokenizer_training import train_tokenizer
from vanilla_transformer.inference.evaluate import score_translations
from vanilla_transformer.inference.loading import load_model_and_tokenizer
from vanilla_transformer.inference.scores import find_bleu_tokenizer, score_loss
from vanilla_transformer.inference.translate import one_line, translate
from vanilla_transformer.training.arguments import DataArguments, TranslationTrainingArguments
from vanilla_transformer.training.examples import load_corpora
from vanilla_transformer.training.recipe import paper_recipe
from vanilla_transformer.training.setup import parse_overrides

TRAIN_SCRIPT = Path(__file__).with_name("train.py")
SETTINGS_FILE, RESULT_FILE = "settings.json", "result.json"
HOW_TO_RESUME = "Finished rows and checkpoints are kept; the same command goes on from there."
NUM_BEAMS = 4
# May differ from one part of a run to the next: they change no figure.
FREE_SETTINGS = ("batch_size", "disable_tqdm", "dry_run", "output_dir", "rows")


@dataclass
class Table3Arguments:
    """Which rows, how large, and for how long."""

    output_dir: str = field(metadata={"help": "Folder of the table, the tokenizer, and a folder for each row."})
    rows: list[str] = field(
        default_factory=lambda: ["base"], metadata={"help": f"Rows to train, in this order: {', '.join(PAPER)}."}
    )
    scale: str = field(
        default="1", metadata={"help": "Factor of the widths d_model, d_ff, d_k, d_v, as in 0.25 or 1/4."}
    )
    layers_factor: str = field(default="1", metadata={"help": "Factor of the number of layers, as in 0.5 or 1/2."})
    steps: int = field(default=100_000, metadata={"help": "Updates; big gets three times as many, as in the paper."})
    warmup_steps: int = field(default=4000, metadata={"help": "Updates in which the learning rate grows."})
    learning_rate_factor: float = field(
        default=1.0,
        metadata={
            "help": "Factor of the paper's learning rate. Small batches and a short warm-up, for which the formula "
            "gives a high peak, need one below 1."
        },
    )
    tokens_per_batch: int = field(
        default=25_000, metadata={"help": "Source tokens, and as many target tokens, in an update, padding included."}
    )
    tokens_per_device: int | None = field(
        default=None, metadata={"help": "How many of them fit into a forward pass. Default: 4096."}
    )
    vocab_size: int = field(default=37_000, metadata={"help": "Size of the vocabulary that all rows share."})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "A tokenizer (path or id) to use instead of training one."}
    )
    test_file: list[str] | None = field(
        default=None, metadata={"help": "A test set to score too: two aligned files, source first, or one table."}
    )
    seed: int = field(default=42, metadata={"help": "Seed of every row."})
    save_steps: int | None = field(
        default=None,
        metadata={
            "help": "Updates from one checkpoint and validation to the next. Default: a tenth of steps, or 1500."
        },
    )
    training_overrides: str | None = field(
        default=None, metadata={"help": "Further arguments of scripts/train.py, as in bf16=true,logging_steps=10."}
    )
    num_processes: int = field(default=1, metadata={"help": "Processes (GPUs) that train a row together, by torchrun."})
    use_cpu: bool = field(default=False, metadata={"help": "Train and score on the CPU although there is a GPU."})
    batch_size: int = field(default=32, metadata={"help": "Sentences that are translated together."})
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bars."})
    dry_run: bool = field(
        default=False, metadata={"help": "Show configurations, parameters and commands, and do nothing else."}
    )

    def __post_init__(self) -> None:
        check_rows(self.rows)
        for name in ("steps", "warmup_steps", "num_processes", "batch_size"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value}: must be at least 1.")
        if self.save_steps is None:
            self.save_steps = min(max(self.steps // 10, 1), 1500)
        elif self.save_steps < 1:
            raise ValueError(f"save_steps={self.save_steps}: must be at least 1.")
        if self.learning_rate_factor <= 0:
            raise ValueError(f"learning_rate_factor={self.learning_rate_factor}: must be positive.")
        legal = {item.name for item in fields(TranslationTrainingArguments) if item.init}
        if unknown := sorted(set(parse_overrides(self.training_overrides)) - legal):
            raise ValueError(f"training_overrides: {', '.join(unknown)} not among the arguments of scripts/train.py.")

    @property
    def factors(self) -> dict[str, Fraction]:
        """The two factors by which the models are scaled."""
        return {name: parse_factor(name, getattr(self, name)) for name in ("scale", "layers_factor")}


@dataclass(frozen=True)
class Job:
    """A row and how it is trained."""

    row: str
    folder: Path
    overrides: dict[str, int]
    steps: int
    command: list[str]

    def config(self, vocab_size: int) -> VanillaTransformerConfig:
        """The model's configuration with a vocabulary of this size."""
        return VanillaTransformerConfig.from_preset(self.row, vocab_size=vocab_size, **self.overrides)

    def is_trained(self) -> bool:
        """Whether the training has come to its end; its last file says so."""
        try:
            state = TrainerState.load_from_json(str(self.folder / TRAINER_STATE_NAME))
        except (FileNotFoundError, ValueError):
            return False
        return state.global_step >= self.steps


def make_parser() -> OptionParser:
    """Returns the parser of the command line."""
    argument_classes: Any = (Table3Arguments, DataArguments)
    return make_argument_parser(argument_classes, __doc__)


def check_data(arguments: Table3Arguments, data: DataArguments) -> None:
    """Makes sure that there is something to score on."""
    if data.streaming:
        raise ValueError("streaming: the rows of the table share a corpus that is read once, without --streaming.")
    if data.num_corpora > 1:
        raise ValueError(f"There are {data.num_corpora} corpora; the rows of the table share one.")
    if not (data.builtin_corpus or data.validation_file or (data.dataset_name and data.validation_split)):
        raise ValueError("validation_file is missing: the table's figures are those of a validation set.")


def command_words(settings: dict[str, Any]) -> list[str]:
    """A command line of names and values; what is None is left out."""
    words: list[str] = []
    for name, value in settings.items():
        if value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def changed_fields(arguments: DataArguments) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    defaults = {item.name: item.default for item in fields(arguments) if item.default is not MISSING}
    return {name: value for name, value in asdict(arguments).items() if value != defaults[name]}


def training_settings(arguments: Table3Arguments, row: str, d_model: int) -> dict[str, Any]:
    """The paper's recipe as scripts/train.py takes it, with what this table asks for."""
    settings = paper_recipe(
        row,
        tokens_per_batch=arguments.tokens_per_batch,
        tokens_per_device=arguments.tokens_per_device,
        num_devices=arguments.num_processes,
        use_cpu=arguments.use_cpu,
    )
    settings |= {
        "max_steps": count_steps(row, arguments.steps),
        "warmup_steps": arguments.warmup_steps,
        "average_checkpoints": 0,
        "save_steps": arguments.save_steps,
        "save_total_limit": 2,
        "eval_steps": arguments.save_steps,
        # Translating is left to the end.
        "predict_with_generate": False,
        "logging_steps": min(max(arguments.steps // 20, 1), 100),
        "seed": arguments.seed,
        "disable_tqdm": arguments.disable_tqdm,
    }
    if arguments.learning_rate_factor != 1:
        peak = (d_model * arguments.warmup_steps) ** -0.5
        settings["learning_rate"] = arguments.learning_rate_factor * peak
    return settings | parse_overrides(arguments.training_overrides)


def make_job(arguments: Table3Arguments, data: DataArguments, row: str) -> Job:
    """Plans a row."""
    overrides = scale_overrides(row, **arguments.factors)
    d_model = VanillaTransformerConfig.from_preset(row, **overrides).d_model
    folder = Path(arguments.output_dir) / row
    settings = {
        "preset": row,
        "config_overrides": ",".join(f"{name}={value}" for name, value in overrides.items()) or None,
        "tokenizer_name": tokenizer_name(arguments),
        **changed_fields(data),
        "output_dir": folder,
        **training_settings(arguments, row, d_model),
    }
    launcher = [sys.executable]
    if arguments.num_processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={arguments.num_processes}"]
    command = [*launcher, str(TRAIN_SCRIPT), *command_words(settings)]
    return Job(row, folder, overrides, settings["max_steps"], command)


def tokenizer_name(arguments: Table3Arguments) -> str:
    """The tokenizer of all rows."""
    return arguments.tokenizer_name or str(Path(arguments.output_dir) / "tokenizer")


def count_parameters(config: VanillaTransformerConfig) -> int:
    """The number of parameters, without making them."""
    with torch.device("meta"):
        return VanillaTransformerForConditionalGeneration(config).num_parameters()


def show_plan(jobs: list[Job], vocab_size: int) -> None:
    """Prints configurations, parameters and commands."""
    rows: list[dict[str, str]] = []
    for job in jobs:
        config = job.config(vocab_size)
        columns = {name: f"{value:g}" for name, value in describe_config(config).items()}
        rows.append({"row": job.row, **columns, "steps": f"{job.steps:,}", "params": f"{count_parameters(config):,}"})
    print(format_text([list(rows[0]), *(list(row.values()) for row in rows)]))
    for job in jobs:
        print(shlex.join(job.command) + "\n")


def write_json(path: Path, content: Any) -> None:
    """Writes a file that is whole or not there."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file that is whole or not there."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


@contextmanager
def claim(folder: Path, settings: dict[str, Any]) -> Iterator[int]:
    """Keeps the folder for this run, and makes sure that an earlier part of it had the same settings.

    Yields:
        The descriptor of a lock. A training process inherits it, so that the folder stays locked for as long as one is
        at work, even if this script was killed.
    """
    found = json.loads(path.read_text("utf-8")) if (path := folder / SETTINGS_FILE).is_file() else None
    if found is None and folder.exists() and any(entry.name != ".lock" for entry in folder.iterdir()):
        raise ValueError(
            f"{folder} is not empty and has no {SETTINGS_FILE} of an earlier run. Give another output_dir."
        )
    differences = [
        f"{name}: {(found or {}).get(name)!r} there, {value!r} now"
        for name, value in settings.items()
        if found is not None and found.get(name) != value
    ]
    if differences:
        raise ValueError(
            f"{folder} holds rows with other settings ({'; '.join(differences)}). Give the same ones to go on, or "
            "another output_dir."
        )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is in use: another run, or the training that it started, is at work.") from None
        write_json(folder / SETTINGS_FILE, settings)
        yield lock.fileno()


def train(job: Job, lock: int) -> None:
    """Trains a row in a process of its own, which does not outlive this one's being stopped."""
    process = subprocess.Popen(job.command, pass_fds=[lock])
    try:
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if status:
        raise subprocess.CalledProcessError(status, job.command)


class Scorer:
    """Scores trained rows; loads the sentence pairs once."""

    def __init__(self, arguments: Table3Arguments, data: DataArguments) -> None:
        self.arguments = arguments
        corpora = load_corpora(data)
        self.train_pairs: Dataset = corpora["train"]
        self.pairs: dict[str, Dataset] = {"validation": corpora["validation"]}
        if arguments.test_file:
            self.pairs["test"] = load_parallel_corpus(
                files=arguments.test_file,
                source_column=data.source_column,
                target_column=data.target_column,
                source_lang=data.source_lang,
                target_lang=data.target_lang,
                empty_lines="drop" if data.drop_empty_lines else "error",
            )

    def ensure_tokenizer(self) -> None:
        """Trains the tokenizer of all rows, unless there is one."""
        folder = Path(tokenizer_name(self.arguments))
        if self.arguments.tokenizer_name is None and not folder.is_dir():
            texts = (text for column in ("source", "target") for text in self.train_pairs[column])
            tokenizer = train_tokenizer(texts, vocab_size=self.arguments.vocab_size, length=2 * len(self.train_pairs))
            partial = folder.with_name(folder.name + ".partial")
            tokenizer.save_pretrained(partial)
            partial.rename(folder)

    def score(self, job: Job) -> dict[str, Any]:
        """Returns a trained row's figures, and keeps its translations."""
        model, tokenizer = load_model_and_tokenizer(str(job.folder), device="cpu" if self.arguments.use_cpu else "auto")
        shared: dict[str, Any] = {"batch_size": self.arguments.batch_size}
        details: dict[str, Any] = {}
        for name, pairs in self.pairs.items():
            sources, references = list(pairs["source"]), list(pairs["target"])
            show = not self.arguments.disable_tqdm
            hypotheses = translate(
                model,
                tokenizer,
                sources,
                progress=show and f"{job.row}: translating {name}",
                num_beams=NUM_BEAMS,
                **shared,
            )
            write_text(job.folder / f"{name}.txt", "".join(one_line(text) + "\n" for text in hypotheses))
            loss = score_loss(
                model, tokenizer, sources, references, progress=show and f"{job.row}: scoring {name}", **shared
            )
            bleu_tokenize = find_bleu_tokenizer(model.config.langs)
            details[name] = {**score_translations(hypotheses, references, tokenize=bleu_tokenize), **loss}
        test = details.get("test", {})
        measurement = Measurement(
            row=job.row,
            config=describe_config(VanillaTransformerConfig.from_pretrained(job.folder)),
            steps=job.steps,
            parameters=model.num_parameters(),
            perplexity=details["validation"]["perplexity"],
            bleu=details["validation"]["bleu"],
            test_perplexity=test.get("perplexity"),
            test_bleu=test.get("bleu"),
        )
        search = model.generation_config.to_diff_dict() | {"num_beams": NUM_BEAMS}
        return {
            "measurement": asdict(measurement),
            "scores": details,
            "generation_config": search,
            "vocab_size": len(tokenizer),
            "command": shlex.join(job.command),
        }


def describe_run(arguments: Table3Arguments, data: DataArguments, result: dict[str, Any]) -> str:
    """What the measured figures are figures of."""
    files = data.train_file or [data.dataset_name or "the built-in corpus"]
    corpus = ", ".join(Path(file).name for file in files)
    return (
        f"Measured: {corpus}; vocabulary of {result['vocab_size']:,}; widths * {arguments.scale}, layers * "
        f"{arguments.layers_factor}; updates of {arguments.tokens_per_batch:,} source and as many target tokens, "
        f"padding included; warm-up of {arguments.warmup_steps:,}, the paper's learning rate * "
        f"{arguments.learning_rate_factor:g}; seed {arguments.seed}; perplexity per target token and BLEU "
        f"({result['scores']['validation']['bleu_signature']}) of the validation set; "
        f"{describe_search(result['generation_config'])}; no averaging of checkpoints.\n"
        "Paper: newstest2013 English-German, vocabulary of about 37,000, updates of about 25,000 + 25,000 tokens, no "
        "averaging of checkpoints.\n"
    )


def write_table(arguments: Table3Arguments, data: DataArguments) -> str | None:
    """Writes table3.md and table3.json of all finished rows, and returns the table as text; None if there is none."""
    folder = Path(arguments.output_dir)
    paths = [path for row in PAPER if (path := folder / row / RESULT_FILE).is_file()]
    if not paths:
        return None
    results = [json.loads(path.read_text("utf-8")) for path in paths]
    cells = make_cells([Measurement(**result["measurement"]) for result in results])
    notes = describe_run(arguments, data, results[0])
    paragraphs = notes.replace("*", r"\*").replace("\n", "\n\n").rstrip("\n")
    write_text(folder / "table3.md", f"{format_markdown(cells)}\n{paragraphs}\n")
    rows = [{**result, "paper": PAPER[result["measurement"]["row"]]._asdict()} for result in results]
    versions = {name: version(name) for name in ("vanilla-transformer", "transformers", "torch")}
    settings = json.loads((folder / SETTINGS_FILE).read_text("utf-8"))
    write_json(folder / "table3.json", {"rows": rows, "settings": settings, "versions": versions})
    return f"{format_text(cells)}\n{notes}"


def run_rows(arguments: Table3Arguments, data: DataArguments, jobs: list[Job], lock: int) -> None:
    """Trains and scores what is not finished, writing the table after each row."""
    unfinished = [job for job in jobs if not (job.folder / RESULT_FILE).is_file()]
    for job in jobs:
        if job not in unfinished:
            print(f"{job.row} is finished: {job.folder / RESULT_FILE}", flush=True)
    table = write_table(arguments, data)
    if unfinished:
        scorer = Scorer(arguments, data)
        scorer.ensure_tokenizer()
    for number, job in enumerate(unfinished, start=1):
        print(f"\nRow {number} of {len(unfinished)}: {job.row}, {job.steps:,} updates", flush=True)
        start = time.monotonic()
        if not job.is_trained():
            train(job, lock)
        write_json(job.folder / RESULT_FILE, scorer.score(job))
        table = write_table(arguments, data)
        print(f"\nThis row took {(time.monotonic() - start) / 60:.1f} minutes.\n\n{table}", flush=True)
    if not unfinished:
        print(f"\n{table}", flush=True)


def main(argv: list[str] | None = None) -> None:
    """Trains the rows that are not finished, and prints the table."""
    parser = make_parser()
    argv = sys.argv[1:] if argv is None else argv
    try:
        arguments, data = parser.parse_args_into_dataclasses(args=argv)
        check_data(arguments, data)
        jobs = [make_job(arguments, data, row) for row in arguments.rows]
        if arguments.dry_run:
            name = tokenizer_name(arguments)
            exists = arguments.tokenizer_name is not None or Path(name).is_dir()
            show_plan(jobs, len(AutoTokenizer.from_pretrained(name)) if exists else arguments.vocab_size)
            return
        chosen = {**asdict(arguments), **asdict(data)}
        settings = {name: value for name, value in chosen.items() if name not in FREE_SETTINGS}
        with claim(Path(arguments.output_dir), settings) as lock:
            run_rows(arguments, data, jobs, lock)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"{shlex.join(error.cmd)}\nended with status {error.returncode}; its message is above. {HOW_TO_RESUME}"
        )
    except KeyboardInterrupt:
        command = shlex.join(["python", "scripts/table3.py", *argv])
        print(f"\nStopped. {HOW_TO_RESUME}\n  {command}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    # Told to end, the script ends its training process as it does after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
