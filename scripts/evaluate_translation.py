r"""Score a model on a test set (BLEU, chrF, TER or ROUGE, exact match, loss, perplexity), or compare several models.

    python scripts/evaluate_translation.py --model_name_or_path out/my-model --test_file test.en test.de --num_beams 4
    python scripts/evaluate_translation.py --model_name_or_path out/my-model --dataset_name user/corpus \
        --source_lang en --target_lang de --output_dir out/my-model/test
    python scripts/evaluate_translation.py --model_name_or_path out/demo --builtin_corpus
    python scripts/evaluate_translation.py --model_name_or_path out/summaries --dataset_name user/articles

Prints a table; with --output_dir, also writes sources.txt, hypotheses.txt and references.txt (one text per line) and
metrics.json there. The model's task decides what is scored, ROUGE for summaries, and what is put before sources. Texts
of other tasks than translation may have several lines, which the files above join: texts.jsonl has them as they are, a
JSON object on each line with the names source, hypothesis and reference.

    python scripts/evaluate_translation.py --compare out/baseline/test out/my-model/test
    python scripts/evaluate_translation.py --compare baseline.de other.de --test_file test.en test.de
    python scripts/evaluate_translation.py --compare lead.txt out/summaries/test --task summarization

Compares translations by sacreBLEU's paired bootstrap resampling (or approximate randomization), with the first as the
baseline, and tells whether a difference in BLEU or chrF, or for summaries in ROUGE, may be the luck of the test set.
Each is a folder that --output_dir made, a text file of one translation per line, or a .jsonl file like texts.jsonl. The
task is the one that the folders were scored for, unless --task names another. With --output_dir, also writes
comparison.json there.
"""

import json
import logging
import platform
import re
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset
from transformers import AutoConfig, HfArgumentParser

from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.data.corpora import load_parallel_corpus, read_lines
from vanilla_transformer.data.vocabularies import check_text_target
from vanilla_transformer.export.ctranslate2_model import is_exported_to_ctranslate2, read_exported_config
from vanilla_transformer.export.engines import EngineArguments
from vanilla_transformer.files import digest_files, digest_weights, explain_missing_model, read_architecture
from vanilla_transformer.inference.evaluate import score_loss, score_summaries, score_translations
from vanilla_transformer.inference.metrics.comparison import (
    Comparison,
    PairedScore,
    SummaryComparison,
    compare_summaries,
    compare_translations,
)
from vanilla_transformer.inference.metrics.sacrebleu_scores import find_bleu_tokenizer
from vanilla_transformer.inference.translate import TranslationModel, one_line, translate
from vanilla_transformer.tasks import TRANSLATION, Task, find_task, get_task

# Where the texts are, by their names in the last of these files.
LINE_FILES = {"source": "sources.txt", "hypothesis": "hypotheses.txt", "reference": "references.txt"}
TEXTS_FILE = "texts.jsonl"
OUTPUT_FILES = (*LINE_FILES.values(), TEXTS_FILE, "metrics.json")
# How the table calls what metrics.json holds, and the signature that it shows beside it.
SCORES = (
    ("BLEU", "bleu", "bleu_signature"),
    ("BLEU, lowercased tokens", "bleu_lowercase", "bleu_lowercase_signature"),
    ("chrF", "chrf", "chrf_signature"),
    ("TER", "ter", "ter_signature"),
    ("ROUGE-1", "rouge1", "rouge_signature"),
    ("ROUGE-2", "rouge2", ""),
    ("ROUGE-L", "rougeL", ""),
    ("ROUGE-Lsum", "rougeLsum", ""),
)
COMPARISON_FILES = ("comparison.json",)
DISTRIBUTIONS = (
    *("vanilla-transformer", "transformers", "torch", "tokenizers", "datasets", "sacrebleu", "rouge-score"),
    "ctranslate2",
)


@dataclass
class EvaluationArguments(EngineArguments):
    """What to score or compare, on which sentence pairs."""

    model_name_or_path: str = field(
        default="", metadata={"help": "Folder or Hub name of a sequence-to-sequence model to score."}
    )
    compare: list[str] | None = field(
        default=None,
        metadata={
            "help": "Compare these instead, baseline first: folders that --output_dir made, text or .jsonl files."
        },
    )
    compare_method: Literal["bootstrap", "approximate_randomization"] = field(
        default="bootstrap", metadata={"help": "SacreBLEU's paired test. Default: bootstrap."}
    )
    compare_samples: int | None = field(
        default=None,
        metadata={"help": "Samples of the test. Default: 1,000 (bootstrap) or 10,000 (approximate_randomization)."},
    )
    compare_seed: int = field(
        default=12345, metadata={"help": "Seed of the test, which takes the place of SACREBLEU_SEED. Default: 12345."}
    )
    builtin_corpus: bool = field(default=False, metadata={"help": "Test on generated numbers and dates, spelled out."})
    test_file: list[str] | None = field(
        default=None,
        metadata={"help": "Two aligned text files, source first, or one .tsv, .csv, .json(l) or .parquet; .gz too."},
    )
    dataset_name: str | None = field(default=None, metadata={"help": "A dataset of the Hub, or a local folder of one."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "The dataset's configuration."})
    dataset_split: str = field(
        default="test",
        metadata={"aliases": ["--split"], "help": "Split of the dataset or built-in corpus. Default: test."},
    )
    source_column: str | None = field(default=None, metadata={"help": "Column of the sources."})
    target_column: str | None = field(default=None, metadata={"help": "Column of the references."})
    max_samples: int | None = field(default=None, metadata={"help": "Score the first so many pairs only."})
    drop_empty_lines: bool = field(
        default=False, metadata={"help": "Leave out pairs that are empty on one side instead of stopping at them."}
    )
    max_target_length: int | None = field(
        default=None,
        metadata={
            "help": "For the loss, longer references are truncated to so many tokens. Default: the tokenizer's limit."
        },
    )
    lowercase: bool = field(default=False, metadata={"help": "Ignore case in BLEU and chrF."})
    ter: bool = field(default=True, metadata={"help": "Compute TER, which is slow on a large test set. Default: yes."})
    bleu_tokenize: str | None = field(
        default=None,
        metadata={
            "help": "SacreBLEU's tokeniser: 13a, intl, zh, ja-mecab, ko-mecab, char, ... Default: that of the target "
            "language, zh for Chinese, ja-mecab for Japanese (char without sacrebleu[ja]) and 13a for all others."
        },
    )
    rouge_tokenize: str = field(
        default="unicode",
        metadata={
            "help": "What ROUGE takes for words: unicode (default: those of any script) or ascii (a to z and 0 to 9 "
            "alone, as the package rouge_score has it; the same for text in ASCII)."
        },
    )
    rouge_stemmer: bool = field(default=False, metadata={"help": "Strip the endings of English words for ROUGE."})
    output_dir: str | None = field(default=None, metadata={"help": "Folder for the files named above."})
    overwrite: bool = field(default=False, metadata={"help": "Replace these files where they exist."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.model_name_or_path) == bool(self.compare):
            found = "both" if self.compare else "neither"
            raise ValueError(f"Give either --model_name_or_path or --compare; got {found}.")
        # Folders to compare bring their references along.
        if len(self.test_sets) > 1 or not (self.test_sets or self.compare):
            found = ", ".join(self.test_sets) or "none"
            raise ValueError(f"Give exactly one of --builtin_corpus, --test_file and --dataset_name; got {found}.")
        if self.max_samples is not None and self.max_samples < 1:
            raise ValueError(f"--max_samples is {self.max_samples}; it must be at least 1.")

    @property
    def test_sets(self) -> list[str]:
        """The arguments that name a test set, of those that were given."""
        return [name for name in ("builtin_corpus", "test_file", "dataset_name") if getattr(self, name)]


def make_parser() -> HfArgumentParser:
    """The command line's parser."""
    return make_argument_parser(EvaluationArguments, __doc__)


def load_pairs(arguments: EvaluationArguments, task: Task) -> Dataset:
    """The pairs of texts to score on, columns "source" and "target"."""
    if not arguments.builtin_corpus:
        return load_parallel_corpus(
            files=arguments.test_file,
            dataset_name=arguments.dataset_name,
            dataset_config_name=arguments.dataset_config_name,
            split=arguments.dataset_split,
            source_column=arguments.source_column,
            target_column=arguments.target_column,
            source_lang=arguments.source_lang,
            target_lang=arguments.target_lang,
            usual_columns=task.columns,
            max_samples=arguments.max_samples,
            empty_lines="drop" if arguments.drop_empty_lines else "error",
        )
    # Its generators are needed for nothing else.
    from vanilla_transformer.data.numbers_and_dates import numbers_and_dates

    split: Any = arguments.dataset_split
    pairs = numbers_and_dates(
        source_lang=arguments.source_lang or "en", target_lang=arguments.target_lang or "de", split=split
    )
    return pairs.select(range(min(arguments.max_samples or len(pairs), len(pairs))))


def find_scored_task(arguments: EvaluationArguments, records: list[dict[str, Any]]) -> Task:
    """The task that was given, or else that of the model or of the folders to compare; translation without either.

    Args:
        arguments: The command line's.
        records: The model's configuration, or the reports of the folders to compare.

    Raises:
        ValueError: If the folders were scored for several.
    """
    if arguments.task is not None:
        return get_task(arguments.task)
    if not arguments.compare:
        return find_task(records[0])
    tasks = sorted({report.get("task", TRANSLATION.name) for report in records})
    if len(tasks) > 1:
        raise ValueError(f"--compare: the folders were scored for different tasks, {' and '.join(tasks)}.")
    return get_task(tasks[0]) if tasks else TRANSLATION


def read_settings(arguments: EvaluationArguments) -> dict[str, Any]:
    """What the model's configuration says."""
    if is_exported_to_ctranslate2(arguments.model_name_or_path):
        return read_exported_config(arguments.model_name_or_path)
    source = {"revision": arguments.revision, "trust_remote_code": arguments.trust_remote_code}
    with explain_missing_model(arguments.model_name_or_path):
        return dict(AutoConfig.from_pretrained(arguments.model_name_or_path, **source).to_dict())


def read_reports(names: list[str]) -> list[dict[str, Any]]:
    """The metrics.json of those that are folders with one."""
    files = [path for path in (Path(name, "metrics.json") for name in names) if path.is_file()]
    return [json.loads(path.read_text(encoding="utf-8")) for path in files]


def find_tokenizer(arguments: EvaluationArguments, records: list[dict[str, Any]]) -> str:
    """SacreBLEU's tokeniser that was given, or else that of the folders to compare, or of the target language.

    Args:
        arguments: The command line's.
        records: As of [`find_scored_task`].

    Raises:
        ValueError: If the folders were scored with several.
    """
    if arguments.bleu_tokenize is not None:
        return arguments.bleu_tokenize
    if arguments.target_lang is not None:
        return find_bleu_tokenizer([arguments.target_lang])
    if arguments.compare is None:
        return find_bleu_tokenizer(records[0].get("langs"))
    signatures = [report.get("bleu_signature", "") for report in records]
    used = sorted({found[1] for found in (re.search(r"tok:([^|]+)", signature) for signature in signatures) if found})
    if len(used) > 1:
        raise ValueError(f"--compare: BLEU was scored with {' and '.join(used)}; choose one with --bleu_tokenize.")
    return used[0] if used else find_bleu_tokenizer(None)


def evaluate(arguments: EvaluationArguments, task: Task, pairs: Dataset, output_dir: Path | None) -> dict[str, Any]:
    """Translate, write the translations, and score them.

    Returns:
        What metrics.json says about the model and its translations; `seconds` are those of translating alone.

    Raises:
        ImportError: If CTranslate2 is asked for and not installed.
        OSError: If there is no such model.
        ValueError: If the model, or an argument, is none for the engine, or the tokenizer cannot encode references.
    """
    model, tokenizer, generate_kwargs = arguments.load()
    check_text_target(tokenizer)  # now rather than after translating
    source_prefix = arguments.find_prefix(model)
    sources, references = list(pairs["source"]), list(pairs["target"])
    shared: dict[str, Any] = {"max_source_length": arguments.max_source_length}
    if arguments.batch_size is not None:
        shared["batch_size"] = arguments.batch_size
    start = time.perf_counter()
    hypotheses = translate(
        model,
        tokenizer,
        sources,
        source_prefix=source_prefix,
        max_batch_tokens=arguments.max_batch_tokens,
        progress=not arguments.disable_tqdm and "translating",
        **shared,
        **generate_kwargs,
    )
    seconds = time.perf_counter() - start
    if output_dir is not None:
        write_texts(output_dir, task, {"source": sources, "hypothesis": hypotheses, "reference": references})
    scores = score(arguments, task, hypotheses, references)
    loss = score_loss(
        model,
        tokenizer,
        [source_prefix + source for source in sources],
        references,
        max_target_length=arguments.max_target_length,
        progress=not arguments.disable_tqdm and "scoring references",
        **shared,
    )
    # As the tokenizer splits the translations, </s> included: what a search found, without its discarded beams.
    output_tokens = sum(map(len, tokenizer(text_target=hypotheses, verbose=False)["input_ids"]))
    speed = measure_speed(seconds, sentences=len(sources), output_tokens=output_tokens)
    used = {"task": task.name, "source_prefix": source_prefix}
    return {**scores, **loss, **speed, **used, **describe(model, generate_kwargs)}


def write_texts(folder: Path, task: Task, columns: dict[str, list[str]]) -> None:
    """Write what was translated and scored, by the names of LINE_FILES."""
    for name, texts in columns.items():
        lines = "".join(one_line(text) + "\n" for text in texts)
        (folder / LINE_FILES[name]).write_text(lines, encoding="utf-8", newline="\n")
    (folder / TEXTS_FILE).unlink(missing_ok=True)  # which may be an earlier model's
    if task is not TRANSLATION:
        rows = [dict(zip(columns, texts, strict=True)) for texts in zip(*columns.values(), strict=True)]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / TEXTS_FILE).write_text(lines, encoding="utf-8", newline="\n")


def score(
    arguments: EvaluationArguments, task: Task, hypotheses: list[str], references: list[str], *, ter: bool | None = None
) -> dict[str, Any]:
    """The scores of a task; `ter` takes the place of the argument."""
    if "rouge1" in task.scores:
        options: dict[str, Any] = {"tokenize": arguments.rouge_tokenize, "use_stemmer": arguments.rouge_stemmer}
        return dict(score_summaries(hypotheses, references, **options))
    options = {"lowercase": arguments.lowercase, "tokenize": arguments.bleu_tokenize}
    return dict(score_translations(hypotheses, references, ter=arguments.ter if ter is None else ter, **options))


def measure_speed(seconds: float, *, sentences: int, output_tokens: int) -> dict[str, float]:
    """How much was translated, and how fast."""
    return {
        "sentences": sentences,
        "output_tokens": output_tokens,
        "seconds": seconds,
        "sentences_per_second": sentences / seconds,
        "output_tokens_per_second": output_tokens / seconds,
    }


def describe(model: TranslationModel, generate_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The model's size and place, and the generation config in force: its own, with what the command line changes."""
    search = model.generation_config.to_diff_dict() | generate_kwargs
    return {
        "parameters": model.num_parameters(),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_beams": search.get("num_beams") or 1,
        "generation_config": search,
    }


def surroundings(argv: list[str] | None) -> dict[str, Any]:
    """What another machine needs to know to repeat the run."""
    versions = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    words = ["scripts/evaluate_translation.py", *(sys.argv[1:] if argv is None else argv)]
    return {"command": shlex.join(["python", *words]), "versions": versions, "machine": platform.platform()}


def make_table(metrics: dict[str, Any]) -> str:
    """The scores, one per line, with the signatures that make them comparable."""
    search = "greedy" if metrics["num_beams"] == 1 else f"{metrics['num_beams']} beams"
    rows = [
        *(
            (label, f"{metrics[name]:.2f}", metrics.get(signature, ""))
            for label, name, signature in SCORES
            if name in metrics
        ),
        ("exact match", f"{metrics['exact_match']:.2f}", "% of sentences"),
        ("loss", f"{metrics['loss']:.4f}", f"nats per target token, {metrics['tokens']:,} tokens with </s>"),
        ("perplexity", f"{metrics['perplexity']:.3f}", "per target token"),
        ("sentences", f"{metrics['sentences']:,}", search),
        ("seconds", f"{metrics['seconds']:.1f}", f"on {metrics['device']} in {metrics['dtype']}"),
        ("sentences/s", f"{metrics['sentences_per_second']:.1f}", ""),
        ("output tokens/s", f"{metrics['output_tokens_per_second']:,.0f}", ""),
    ]
    return "\n".join(f"{name:<24}{value:>10}  {note}".rstrip() for name, value, note in rows)


def read_rows(path: Path) -> tuple[list[str], list[str] | None]:
    """The texts of a file like texts.jsonl, and their references if it has them.

    Raises:
        ValueError: If a line is no JSON object with a text named hypothesis, or the file is empty or not UTF-8.
    """
    rows = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("hypothesis"), str):
            raise ValueError(f"{path}, line {number} must be a JSON object with a text named hypothesis.")
        rows.append(row)
    references = [row.get("reference") for row in rows]
    known = [reference for reference in references if isinstance(reference, str)]
    return [row["hypothesis"] for row in rows], known if len(known) == len(rows) else None


def read_system(path: Path) -> tuple[list[str], list[str] | None]:
    """The texts of a system, and their references if they are beside them.

    Args:
        path: A folder with a texts.jsonl or hypotheses.txt, a .jsonl file, or a text file.

    Raises:
        ValueError: If the folder has neither, or a file is empty, not UTF-8, or not what its name says.
    """
    if path.is_dir() and (path / TEXTS_FILE).exists():
        return read_rows(path / TEXTS_FILE)
    if path.suffix == ".jsonl":
        return read_rows(path)
    if not path.is_dir():
        return read_lines(path), None
    if not (path / "hypotheses.txt").exists():
        raise ValueError(f"--compare: {path} holds no hypotheses.txt; score the model with --output_dir {path} first.")
    references = path / "references.txt"
    return read_lines(path / "hypotheses.txt"), read_lines(references) if references.exists() else None


def find_systems(names: list[str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Reads what to compare.

    Args:
        names: As `read_system` takes them.

    Returns:
        The texts by name, and the references of those that bring them along.

    Raises:
        ValueError: If a name is given twice, or a system cannot be read.
    """
    texts: dict[str, list[str]] = {}
    references: dict[str, list[str]] = {}
    for name in names:
        if name in texts:
            raise ValueError(f"--compare: {name} is given twice.")
        texts[name], found = read_system(Path(name))
        if found is not None:
            references[name] = found
    return texts, references


def compare(arguments: EvaluationArguments, task: Task) -> Comparison | SummaryComparison:
    """Compare saved texts with the first of them.

    Raises:
        ImportError: If the library that computes the task's scores is not installed.
        ValueError: If there are no references, the folders' differ, or the numbers of texts do.
    """
    systems, saved = find_systems(arguments.compare or [])
    if arguments.test_sets:
        references = list(load_pairs(arguments, task)["target"])
        if task is TRANSLATION:  # as they are where hypotheses.txt is written
            references = list(map(one_line, references))
    elif not saved:
        raise ValueError("--compare: no folder has a references.txt; give the test set too, such as --test_file.")
    else:
        (first, references), *others = saved.items()
        for name, texts in others:
            if texts != references:
                raise ValueError(f"--compare: {first} and {name} were scored on different references.")
    test: Any = {
        "method": arguments.compare_method,
        "samples": arguments.compare_samples,
        "seed": arguments.compare_seed,
    }
    if "rouge1" in task.scores:
        words: Any = {"tokenize": arguments.rouge_tokenize, "use_stemmer": arguments.rouge_stemmer}
        return compare_summaries(systems, references, **test, **words)
    words = {"lowercase": arguments.lowercase, "tokenize": arguments.bleu_tokenize}
    return compare_translations(systems, references, **test, **words)


def make_comparison_table(comparison: Comparison | SummaryComparison) -> str:
    """The systems, one per line: each score, the bootstrap's mean and 95% interval, and the p-value."""

    def cells(score: PairedScore) -> str:
        interval = "" if score["mean"] is None else f"({score['mean']:.2f} ± {score['ci']:.2f})"
        p_value = "" if score["p_value"] is None else f"{score['p_value']:.4f}{'*' if score['p_value'] < 0.05 else ''}"
        return f"{score['score']:>8.2f} {interval:<16}{p_value:<8}"

    report: Any = comparison
    systems = report["systems"]
    names = [("" if index else "baseline: ") + system["system"] for index, system in enumerate(systems)]
    width = max(map(len, names))
    interval = "(mean ± 95% CI)" if report["method"] == "bootstrap" else ""
    scores = [(label, name) for label, name, _ in SCORES if name in systems[0]]
    lines = []
    for start in range(0, len(scores), 2):  # more side by side would be too wide
        pair = scores[start : start + 2]
        lines.append(" " * width + "".join(f"{label:>8} {interval:<16}{'p':<8}" for label, _ in pair))
        for name, system in zip(names, systems, strict=True):
            lines.append(f"{name:<{width}}{''.join(cells(system[score]) for _, score in pair)}")
    test, unit = report["method"].replace("_", " "), "summaries" if "rouge1" in systems[0] else "sentences"
    lines += [
        f"Paired {test} over {report['sentences']:,} {unit}, {report['samples']:,} samples, seed {report['seed']}",
        "p: how often chance alone would make as large a difference to the baseline; * below 0.05",
        *(f"{label.partition('-')[0]} {report[name]}" for label, _, name in SCORES if name in report),
    ]
    return "\n".join(line.rstrip() for line in lines)


def find_output_dir(arguments: EvaluationArguments) -> Path | None:
    """The output folder, if one is wanted.

    Raises:
        FileExistsError: If results are in it already, which may not be overwritten.
    """
    if arguments.output_dir is None:
        return None
    output_dir = Path(arguments.output_dir)
    names = COMPARISON_FILES if arguments.compare else OUTPUT_FILES
    existing = [name for name in names if (output_dir / name).exists()]
    if existing and not arguments.overwrite:
        raise FileExistsError(f"{output_dir} holds {', '.join(existing)}; choose another folder or give --overwrite.")
    return output_dir


def write_report(path: Path, results: dict[str, Any], arguments: EvaluationArguments, argv: list[str] | None) -> None:
    """Write the results as JSON, with what it takes to repeat them."""
    report = results | {"arguments": asdict(arguments)} | surroundings(argv)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def describe_model(folder: Path) -> dict[str, Any]:
    """What tells the model in a folder from the one that the folder will hold later; empty for one of the Hub."""
    if is_exported_to_ctranslate2(folder):
        weights, settings = digest_files([folder / "model.bin"]), read_exported_config(folder)
    else:
        config = folder / "config.json"
        settings = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        weights = digest_weights(folder)
    return {"weights_sha256": weights, "architecture": read_architecture(settings)}


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments (`argv`, else the command line's), score the model or compare translations, and report."""
    parser = make_parser()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        (arguments,) = parser.parse_args_into_dataclasses(args=argv)
        records = read_reports(arguments.compare) if arguments.compare else [read_settings(arguments)]
        task = find_scored_task(arguments, records)
        arguments.bleu_tokenize = find_tokenizer(arguments, records)
        # A wrong tokeniser or a missing library is found now rather than after an hour of translating.
        score(arguments, task, ["a"], ["a"], ter=False)
        output_dir = find_output_dir(arguments)
        if arguments.compare:
            comparison = compare(arguments, task)
        else:
            pairs = load_pairs(arguments, task)
        if output_dir is not None:
            output_dir.mkdir(parents=True, exist_ok=True)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    if arguments.compare:
        print(make_comparison_table(comparison))
        if output_dir is not None:
            write_report(output_dir / "comparison.json", dict(comparison), arguments, argv)
        return
    # So that nobody takes the scores for those of the same folder after more training.
    scored = {} if output_dir is None else describe_model(Path(arguments.model_name_or_path))
    try:
        metrics = evaluate(arguments, task, pairs, output_dir)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    print(make_table(metrics))
    if output_dir is not None:
        write_report(output_dir / "metrics.json", {**metrics, **scored}, arguments, argv)


if __name__ == "__main__":
    main()
