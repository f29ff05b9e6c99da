r"""Score a model on a test set (BLEU, chrF, TER or ROUGE, exact match, loss, perplexity), or compare several models.

    vanilla-transformer evaluate --model_name_or_path out/my-model --test_file test.en test.de --num_beams 4
    vanilla-transformer evaluate --model_name_or_path out/my-model --dataset_name user/corpus \
        --source_lang en --target_lang de --output_dir out/my-model/test
    vanilla-transformer evaluate --model_name_or_path out/demo --builtin_corpus
    vanilla-transformer evaluate --model_name_or_path out/summaries --dataset_name user/articles
    vanilla-transformer evaluate --model_name_or_path out/seed1 out/seed2 out/seed3 --test_file test.en test.de
    vanilla-transformer evaluate --model_name_or_path out/my-model --test_file test.en test.de --glossary terms.tsv

Prints a table; with --output_dir, also writes metrics.json, and sources.txt, hypotheses.txt and references.txt (one
text per line) there. The model's task decides what is scored, ROUGE for summaries, and what is put before sources.
Texts of other tasks than translation may have several lines: texts.jsonl has them as they are, as JSON objects. Under
torchrun each process takes a part of the pairs.

    vanilla-transformer evaluate --compare out/baseline/test out/my-model/test
    vanilla-transformer evaluate --compare baseline.de other.de --test_file test.en test.de
    vanilla-transformer evaluate --compare lead.txt out/summaries/test --task summarization

Compares translations with the first by sacreBLEU's paired bootstrap resampling (or approximate randomization), which
tells whether a difference in BLEU or chrF, or for summaries in ROUGE, may be the luck of the test set. Each is a folder
that --output_dir made, a text file of one translation per line, or a .jsonl file like texts.jsonl. The task is that of
the folders, unless --task names another. With --output_dir, also writes comparison.json there.
"""

from __future__ import annotations  # the types are not imported: --help does not wait for torch

import json
import logging
import platform
import re
import shlex
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from vanilla_transformer.export.engines import MODELS, EngineArguments
from vanilla_transformer.inference.arguments import GLOSSARY_NEEDS, GlossaryArguments
from vanilla_transformer.memory import keep_freed_memory
from vanilla_transformer.options import SWITCH, option, refuse_unused

from .command_line import explaining_errors, make_argument_parser, settled_bars

if TYPE_CHECKING:
    from collections.abc import Sequence

    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from vanilla_transformer.inference.processes import Processes
    from vanilla_transformer.tasks import Task

Method = Literal["bootstrap", "approximate_randomization"]
_LIBRARIES = ("transformers", "torch", "tokenizers", "datasets", "sacrebleu", "rouge-score", "ctranslate2")
# A comparison has these, too; the other options of what translates need a model.
_OF_ALL = {"model_name_or_path", "task", "source_lang", "target_lang", "disable_tqdm"}
_NEEDS = {
    **GLOSSARY_NEEDS,
    "compare": {"compare_method", "compare_samples", "compare_seed"},
    "dataset_name": {"dataset_config_name"},
    "model_name_or_path": {"glossary", "max_target_length"} | {each.name for each in fields(EngineArguments)} - _OF_ALL,
    "output_dir": {"overwrite"},
}


@dataclass
class EvaluationArguments(GlossaryArguments, EngineArguments):
    """What to score or compare, on which sentence pairs."""

    model_name_or_path: str = option(MODELS, "", nargs="+")
    compare: list[str] | None = option("Compare these, baseline first: folders, text or .jsonl files.", None)
    compare_method: Method = option("SacreBLEU's paired test. Default: bootstrap.", "bootstrap")
    compare_samples: int | None = option("Default: 1,000, or 10,000 with approximate_randomization.", None)
    compare_seed: int = option("Seed of the test, which takes the place of SACREBLEU_SEED. Default: 12345.", 12345)
    builtin_corpus: bool = option("Test on generated numbers and dates, spelled out.", False)
    test_file: list[str] | None = option(
        "Two aligned text files, source first, or one .tsv, .csv, .json(l) or .parquet; .gz, .bz2 and .xz too.", None
    )
    dataset_name: str | None = option("A dataset of the Hub, or a local folder of one.", None)
    dataset_config_name: str | None = option("The dataset's configuration.", None)
    dataset_split: str = option("Split of the dataset or built-in corpus. Default: test.", "test", aliases=["--split"])
    source_column: str | None = option("Column of the sources.", None)
    target_column: str | None = option("Column of the references.", None)
    max_samples: int | None = option("Score the first so many pairs only.", None)
    drop_empty_lines: bool = option("Leave out pairs that are empty on one side instead of stopping at them.", False)
    max_target_length: int | None = option(
        "For the loss, longer references are truncated to so many tokens. Default: the tokenizer's limit.", None
    )
    lowercase: bool | None = option("Ignore case in BLEU and chrF. Default: no.", None, **SWITCH)
    ter: bool = option("Compute TER, which is slow on a large test set. Default: yes.", True)
    bleu_tokenize: str | None = option(
        "SacreBLEU's tokeniser: 13a, intl, zh, ja-mecab, char, ... Default: that of the target language.", None
    )
    remove_bpe: str | None = option(
        'Join words that were cut before training, as "pul@@ ley" with @@, before they are scored.', None
    )
    rouge_tokenize: str | None = option(
        "What ROUGE takes for words: unicode (default: those of any script) or ascii (a to z, 0 to 9).", None
    )
    rouge_stemmer: bool | None = option("Strip the endings of English words for ROUGE. Default: no.", None, **SWITCH)
    output_dir: str | None = option("Folder for the files named above.", None)
    overwrite: bool = option("Replace these files where they exist.", False)

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
        if self.dataset_split != "test" and not (self.builtin_corpus or self.dataset_name):
            raise ValueError("--dataset_split needs --dataset_name or --builtin_corpus.")
        of_pairs = {"drop_empty_lines", "max_samples", "source_column", "target_column"}
        refuse_unused(self, _NEEDS | ({} if self.test_sets else {"test_file": of_pairs}))

    @property
    def test_sets(self) -> list[str]:
        """The arguments that name a test set, of those that were given."""
        return [name for name in ("builtin_corpus", "test_file", "dataset_name") if getattr(self, name)]

    def score(self, task: Task, hypotheses: list[str], references: list[str], *, ter: bool) -> dict[str, Any]:
        """The scores of a task."""
        from vanilla_transformer.inference.evaluate import score_summaries, score_translations

        if "rouge1" in task.scores:
            return score_summaries(hypotheses, references, **self.get_options(task))
        options = self.get_options(task) | {"ter": ter, "error_rates": "wer" in task.scores}
        return score_translations(hypotheses, references, **options)

    def get_options(self, task: Task) -> dict[str, Any]:
        """The options of a task's scores."""
        if "rouge1" in task.scores:
            return {"tokenize": self.rouge_tokenize, "use_stemmer": self.rouge_stemmer}
        return {"tokenize": self.bleu_tokenize, "lowercase": self.lowercase}


make_parser = partial(make_argument_parser, EvaluationArguments, __doc__)


def load_pairs(arguments: EvaluationArguments, task: Task, langs: Sequence[str] | None = None) -> Dataset:
    """The pairs of texts to score on, columns "source" and "target"; `langs` are the model's."""
    if arguments.builtin_corpus:
        from vanilla_transformer.data.numbers_and_dates import numbers_and_dates

        source, target = langs if langs and len(langs) == 2 else ("en", "de")
        options: Any = {"source_lang": arguments.source_lang or source}
        options["target_lang"] = arguments.target_lang or target
        pairs = numbers_and_dates(**options, split=cast(Any, arguments.dataset_split))
        return pairs.select(range(min(arguments.max_samples or len(pairs), len(pairs))))
    from vanilla_transformer.data.corpora import load_parallel_corpus

    same = ("dataset_name", "dataset_config_name", "source_column", "target_column", "source_lang", "target_lang")
    return load_parallel_corpus(
        files=arguments.test_file,
        split=arguments.dataset_split,
        usual_columns=task.columns,
        max_samples=arguments.max_samples,
        empty_lines="drop" if arguments.drop_empty_lines else "error",
        **{name: getattr(arguments, name) for name in same},
    )


def read_records(arguments: EvaluationArguments) -> list[dict[str, Any]]:
    """The model's configuration, or the metrics.json of the folders to compare, of those that have one."""
    from transformers import AutoConfig

    from vanilla_transformer.export.ctranslate2_model import is_exported_to_ctranslate2, read_exported_config
    from vanilla_transformer.files import explain_missing_model, read_json

    if arguments.compare:
        files = [path for path in (Path(name, "metrics.json") for name in arguments.compare) if path.is_file()]
        records = [read_json(path) for path in files]
        if broken := [str(path) for path, record in zip(files, records, strict=True) if not isinstance(record, dict)]:
            raise ValueError(f"--compare: {', '.join(broken)} is damaged: delete it, or evaluate again.")
        return records
    if is_exported_to_ctranslate2(arguments.model_name_or_path):
        return [read_exported_config(arguments.model_name_or_path)]
    source = {"revision": arguments.revision, "trust_remote_code": arguments.trust_remote_code}
    with explain_missing_model(arguments.model_name_or_path):
        return [AutoConfig.from_pretrained(arguments.model_name_or_path, **source).to_dict()]


def find_scored_task(arguments: EvaluationArguments, records: list[dict[str, Any]]) -> Task:
    """The task that was given, or else that of the model or of the folders to compare; translation without either."""
    from vanilla_transformer.tasks import TRANSLATION, find_task, get_task

    if arguments.task is not None:
        return get_task(arguments.task)
    if not arguments.compare:
        return find_task(records[0])
    tasks = sorted({report.get("task", TRANSLATION.name) for report in records})
    if len(tasks) > 1:
        raise ValueError(f"--compare: the folders were scored for different tasks, {' and '.join(tasks)}.")
    return get_task(tasks[0]) if tasks else TRANSLATION


def check_scores(arguments: EvaluationArguments, task: Task) -> None:
    """Refuses options of scores that the task does not have."""
    other = {"bleu_tokenize", "lowercase"} if "rouge1" in task.scores else {"rouge_stemmer", "rouge_tokenize"}
    if given := sorted(name for name in other if getattr(arguments, name) is not None):
        raise ValueError(f"--{' and --'.join(given)}: the task {task.name} has no such score.")


def settle_scores(arguments: EvaluationArguments, records: list[dict[str, Any]]) -> None:
    """Sets how texts are scored where that was not given: as the folders to compare were, or by the target language."""
    from vanilla_transformer.inference.scores import find_bleu_tokenizer

    def find(name: str, option: str, given: str | None, score: str = "bleu") -> str | None:
        signatures = "\n".join(record.get(f"{score}_signature", "") for record in records)
        # SacreBLEU adds MeCab's version to the names of its two tokenisers with MeCab.
        used = sorted(set(re.findall(rf"(?:^|\|){name}:((?:ja|ko)-mecab|[^|\n]+)", signatures, re.MULTILINE)))
        if given is not None or not used:
            return given
        if len(used) > 1:
            found = " and ".join(f"{name}:{value}" for value in used)
            raise ValueError(f"--compare: {score.upper()} was scored with {found}; choose one with --{option}.")
        return used[0]

    words = arguments.bleu_tokenize
    if words is None and arguments.target_lang is not None:
        words = find_bleu_tokenizer([arguments.target_lang])
    langs = None if arguments.compare else records[0].get("langs")
    arguments.bleu_tokenize = find("tok", "bleu_tokenize", words) or find_bleu_tokenizer(langs)
    case = {None: None, True: "lc", False: "mixed"}[arguments.lowercase]
    stem = {None: None, True: "yes", False: "no"}[arguments.rouge_stemmer]
    arguments.lowercase = find("case", "lowercase", case) == "lc"
    arguments.rouge_tokenize = find("tok", "rouge_tokenize", arguments.rouge_tokenize, "rouge") or "unicode"
    arguments.rouge_stemmer = find("stem", "rouge_stemmer", stem, "rouge") == "yes"


def find_output_dir(arguments: EvaluationArguments) -> Path | None:
    """The output folder, if one is wanted; results that are in it already may not be overwritten unasked."""
    from vanilla_transformer.inference.evaluate import LINE_FILES, TEXTS_FILE

    if arguments.output_dir is None:
        return None
    output_dir = Path(arguments.output_dir)
    names = ["comparison.json"] if arguments.compare else [*LINE_FILES.values(), TEXTS_FILE, "metrics.json"]
    existing = [name for name in names if (output_dir / name).exists()]
    if existing and not arguments.overwrite:
        raise FileExistsError(f"{output_dir} holds {', '.join(existing)}; choose another folder or give --overwrite.")
    return output_dir


def compare(arguments: EvaluationArguments, task: Task) -> dict[str, Any]:
    """Compares saved texts with the first of them."""
    from vanilla_transformer.inference import compare as comparing
    from vanilla_transformer.inference.evaluate import join_pieces
    from vanilla_transformer.inference.translate import one_line

    systems, saved = comparing.read_systems(arguments.compare or [])
    if arguments.test_sets:
        references = list(load_pairs(arguments, task)["target"])
        if task.name == "translation":  # as they are where hypotheses.txt is written
            references = list(map(one_line, references))
    else:
        references = comparing.find_references(saved)
    if arguments.remove_bpe is not None:
        systems = {name: join_pieces(lines, arguments.remove_bpe) for name, lines in systems.items()}
        references = join_pieces(references, arguments.remove_bpe)
    function = comparing.compare_summaries if "rouge1" in task.scores else comparing.compare_translations
    test = {name: getattr(arguments, f"compare_{name}") for name in ("method", "samples", "seed")}
    return function(systems, references, **test, **arguments.get_options(task))


def score_model(
    arguments: EvaluationArguments, task: Task, pairs: Dataset, output_dir: Path | None, processes: Processes
) -> dict[str, Any]:
    """Translates, writes the translations, and scores them; returns what metrics.json says.

    Each of several processes does so for its part of the pairs, and the first writes and scores what all have found.
    The others return nothing.
    """
    from vanilla_transformer.data.vocabularies import check_text_target
    from vanilla_transformer.inference.evaluate import join_pieces, write_texts
    from vanilla_transformer.inference.translate import length_limit

    # So that nobody takes the scores for those of the same folder after more training.
    scored = {} if output_dir is None else describe_model(Path(arguments.model_name_or_path))
    if len(arguments.model_names) > 1:
        described = [{"model_name_or_path": name, **describe_model(Path(name))} for name in arguments.model_names]
        scored = {"ensemble": described}
    model, tokenizer, generate_kwargs = arguments.load()
    # Now rather than after translating.
    check_text_target(tokenizer)
    length_limit(tokenizer, arguments.max_target_length)
    sources, references = list(pairs["source"]), list(pairs["target"])
    hypotheses, seconds = translate_share(arguments, model, tokenizer, sources, processes, **generate_kwargs)
    texts = {"source": sources, "hypothesis": hypotheses, "reference": references}
    if arguments.remove_bpe is not None:
        texts = {name: join_pieces(lines, arguments.remove_bpe) for name, lines in texts.items()}
    if output_dir is not None and processes.rank == 0:
        (output_dir / "metrics.json").unlink(missing_ok=True)  # of earlier texts
        write_texts(output_dir, texts, keep_line_breaks=task.name != "translation")
    loss = score_share(arguments, model, tokenizer, sources, references, processes)
    if processes.rank > 0:
        return {}
    scores = arguments.score(task, texts["hypothesis"], texts["reference"], ter=arguments.ter)
    # As the tokenizer splits the translations, </s> included: what a search found, without its discarded beams.
    output_tokens = sum(map(len, tokenizer(text_target=hypotheses, verbose=False)["input_ids"]))
    search = model.generation_config.to_diff_dict() | generate_kwargs
    return {
        **scores,
        **loss,
        "sentences": len(sources),
        "output_tokens": output_tokens,
        "seconds": seconds,  # those of translating alone
        "sentences_per_second": len(sources) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "task": task.name,
        "source_prefix": arguments.find_prefix(model),
        "parameters": model.num_parameters(),
        "processes": processes.count,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_beams": search.get("num_beams") or 1,
        "generation_config": search,
        **scored,
    }


def get_limits(arguments: EvaluationArguments, own: range, processes: Processes, bar: str) -> dict[str, Any]:
    """What translating and scoring a process's part of the pairs have in common."""
    limits: dict[str, Any] = {"max_source_length": arguments.max_source_length, "first_line": own.start + 1}
    if arguments.batch_size is not None:
        limits["batch_size"] = arguments.batch_size
    return limits | {"progress": bar if processes.rank == 0 and not arguments.disable_tqdm else False}


def translate_share(
    arguments: EvaluationArguments,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[str],
    processes: Processes,
    **generate_kwargs: Any,
) -> tuple[list[str], float]:
    """Translates this process's part of the sources; returns the translations of all, and the longest time in s."""
    from vanilla_transformer.inference.translate import translate

    own = processes.share(len(sources))
    options = get_limits(arguments, own, processes, "translating") | generate_kwargs
    options |= arguments.find_glossary(model, arguments.source_lang)
    options |= {"source_prefix": arguments.find_prefix(model), "max_batch_tokens": arguments.max_batch_tokens}
    start = time.perf_counter()
    hypotheses = translate(model, tokenizer, sources[own.start : own.stop], **options)
    found = processes.gather((hypotheses, time.perf_counter() - start))
    return [text for texts, _ in found for text in texts], max(seconds for _, seconds in found)


def score_share(
    arguments: EvaluationArguments,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    sources: list[str],
    references: list[str],
    processes: Processes,
) -> dict[str, float]:
    """Scores this process's part of the references; returns the loss of all."""
    from vanilla_transformer.inference.losses import join_losses, score_loss

    own, prefix = processes.share(len(sources)), arguments.find_prefix(model)
    options = get_limits(arguments, own, processes, "scoring references")
    options["max_target_length"] = arguments.max_target_length
    texts = [prefix + source for source in sources[own.start : own.stop]], references[own.start : own.stop]
    loss = score_loss(model, tokenizer, *texts, **options) if own else None
    return join_losses([each for each in processes.gather(loss) if each is not None])


def describe_model(folder: Path) -> dict[str, Any]:
    """What tells the model in a folder from the one that the folder will hold later; empty for one of the Hub."""
    from vanilla_transformer.export.ctranslate2_model import is_exported_to_ctranslate2, read_exported_config
    from vanilla_transformer.files import digest_files, digest_weights, read_architecture, read_json

    if is_exported_to_ctranslate2(folder):
        weights, settings = digest_files([folder / "model.bin"]), read_exported_config(folder)
    else:
        weights, settings = digest_weights(folder), read_json(folder / "config.json") or {}
    return {"weights_sha256": weights, "architecture": read_architecture(settings)}


def write_report(path: Path, results: dict[str, Any], arguments: EvaluationArguments, argv: list[str] | None) -> None:
    """Writes the results as JSON, with what another machine needs to know to repeat the run."""
    from vanilla_transformer.files import new_file

    versions = {"python": platform.python_version()}
    for name in ("vanilla-transformer", *_LIBRARIES):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    command = shlex.join(["vanilla-transformer", "evaluate", *(sys.argv[1:] if argv is None else argv)])
    surroundings = {"command": command, "versions": versions, "machine": platform.platform()}
    report = results | {"arguments": asdict(arguments)} | surroundings
    with new_file(path, overwrite=True) as partial_file:
        partial_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def run(arguments: EvaluationArguments, argv: list[str] | None) -> None:
    """Scores the model or compares texts, and reports."""
    from vanilla_transformer.inference.compare import make_comparison_table
    from vanilla_transformer.inference.evaluate import make_table
    from vanilla_transformer.inference.processes import Processes

    logging.getLogger("vanilla_transformer").setLevel(logging.INFO)
    processes = Processes.from_environment()
    records = read_records(arguments)
    task = find_scored_task(arguments, records)
    check_scores(arguments, task)
    settle_scores(arguments, records)
    # A wrong tokeniser or a missing library is found now rather than after an hour of translating.
    arguments.score(task, ["a"], ["a"], ter=False)
    output_dir = find_output_dir(arguments)
    if arguments.compare and processes.rank > 0:
        return
    # No folder is made for arguments that are wrong.
    results = compare(arguments, task) if arguments.compare else {}
    pairs = None if arguments.compare else load_pairs(arguments, task, records[0].get("langs"))
    if output_dir is not None:
        output_dir.mkdir(parents=True, exist_ok=True)
    if pairs is not None:
        results = score_model(arguments, task, pairs, output_dir, processes)
    if processes.rank > 0:
        return
    print(make_comparison_table(results) if arguments.compare else make_table(results))
    if output_dir is not None:
        name = "comparison.json" if arguments.compare else "metrics.json"
        write_report(output_dir / name, results, arguments, argv)


def main(argv: list[str] | None = None) -> None:
    """Parses the arguments (`argv`, else the command line's), scores the model or compares texts, and reports."""
    parser = make_parser()
    keep_freed_memory()
    with explaining_errors(parser, divides_work=True):
        (arguments,) = parser.parse_args_into_dataclasses(argv)
        with settled_bars(arguments, reads_datasets=True):
            run(arguments, argv)
