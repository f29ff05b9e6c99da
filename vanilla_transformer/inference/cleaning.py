"""Cleaning parallel corpora of any size, by one process or many; what is killed goes on with what it had not finished.

As translations, pairs are divided into parts, each of which is a file beside the output, complete or absent (see
[`files`]): what rules say of its pairs, and their texts. In the end the first process follows the rules that compare
all pairs, reading the parts one by one, and writes what stays, what was removed and a report. It holds a byte for each
pair, and what those rules need: see [`duplicates`].
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from vanilla_transformer.data import readers
from vanilla_transformer.data.cleaning import RULES, Outcome, Rules, apply_rules, decide, tell_rules
from vanilla_transformer.data.corpora import Tally, open_corpus, read_pairs
from vanilla_transformer.data.duplicates import RemoveDuplicates
from vanilla_transformer.data.lines import REPORT_SUFFIX
from vanilla_transformer.data.records import Part, find_kind
from vanilla_transformer.files import check_new_file, locked, new_file
from vanilla_transformer.model.pipeline_vanilla_transformer import WINDOW_SIZE

from .cross_entropy import DualCrossEntropyFilter
from .files import Contents, Progress, do_parts, prepare
from .outputs import open_table
from .parts import Work, find_lock
from .processes import Processes
from .translate import progress_bar

ALL_RULES = RULES | {"DualCrossEntropyFilter": DualCrossEntropyFilter}
_ALONE = Processes()
_EXAMPLES = 5
_LONGEST_EXAMPLE = 200  # characters of a text


class Corpus:
    """The pairs of a corpus by their places; after those that were read last, the next ones need no new beginning."""

    def __init__(self, parts: list[readers.Part]) -> None:
        self.parts = parts
        self._next = (-1, 0)
        self._pairs: Iterator[tuple[str, str]] = iter(())

    def read(self, part: Part) -> list[tuple[str, str]]:
        """The pairs of a part; `file` is one of what the corpus was divided into."""
        file, position = self._next
        if file != part.file or position > part.first:
            self._pairs, position = read_pairs(self.parts[part.file], on_damage=lambda _: None), 0
        found = list(islice(self._pairs, part.first - position, part.first - position + part.count))
        self._next = (part.file, part.first + part.count)
        if len(found) < part.count:
            raise ValueError(f"{self.parts[part.file].name} has changed while it is in use.")
        return found

    def scan(self, progress: bool | str) -> Contents:
        """Reads it once, for its digest and the number of its pairs; warns of lines that are damaged."""
        digest, counts, damaged = hashlib.sha256(), [0] * len(self.parts), Tally()
        with progress_bar(progress and "reading", total=None, unit="pair") as bar:
            for file, part in enumerate(self.parts):
                for source, target in read_pairs(part, damaged.add):
                    digest.update(f"{len(source)} {len(target)} {source}{target}".encode())
                    counts[file] += 1
                bar.update(counts[file])

        def divide(size: int) -> Iterator[Part]:
            for file, count in enumerate(counts):
                for first in range(0, count, size):
                    yield Part(file, first, min(size, count - first))

        return Contents([digest.hexdigest(), *counts], [], divide, sum(counts))


@dataclass(frozen=True)
class CleanedCorpus:
    """What is written: the pairs that stay, the others, and a report."""

    outputs: list[Path]
    removed: Path | None
    report: Path
    rules: Rules
    overwrite: bool
    progress: bool | str

    def __str__(self) -> str:
        return " and ".join(map(str, self.outputs))

    @property
    def place(self) -> Path:
        """What stands beside the unfinished parts."""
        return self.outputs[0]

    @cached_property
    def paths(self) -> list[Path]:
        """All files that are written."""
        return [*self.outputs, *([] if self.removed is None else [self.removed]), self.report]

    def check(self, inputs: Iterable[str]) -> None:
        """Makes sure that files are of kinds that can be written, and are different from each other and the input."""
        for path in self.paths:
            if re.match("[a-z][a-z0-9+]+:/", str(path)):
                raise ValueError(f"{path}: cleaned corpora are written to the local file system only.")
        kinds = [find_kind(str(path)) for path in self.outputs]
        is_text = kinds == ["text", "text"]
        if not is_text and (len(kinds) != 1 or kinds == ["text"]):
            raise ValueError(f"{self}: give two text files, the source's first, or one .tsv, .jsonl or .parquet.")
        if self.removed is not None and find_kind(str(self.removed)) == "text":
            raise ValueError(f"{self.removed}: removed pairs are written to a .tsv, .jsonl or .parquet.")
        places = [os.path.realpath(path) for path in self.paths]
        if len(set(places)) < len(places):
            raise ValueError(f"{self}: all files that are written need names of their own.")
        compared = [path for rule in self.rules if isinstance(rule, RemoveDuplicates) for path in rule.overlap or ()]
        for kind, read in (("the input file", inputs), ("read by RemoveDuplicates", compared)):
            if found := set(places) & set(map(os.path.realpath, read)):
                raise ValueError(f"{found.pop()}: the output file is {kind}.")

    def check_new(self) -> None:
        """Makes sure that nothing is overwritten unasked."""
        for path in self.paths:
            check_new_file(path, overwrite=self.overwrite)

    def exists(self) -> bool:
        """Whether all are there."""
        return all(path.exists() for path in self.paths)

    def put(self, joined: Path) -> None:
        """Moves each file to its place, unless that was done before."""
        for number, path in enumerate(self.paths):
            source = joined / f"{number}-{path.name}"
            if not source.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                source.replace(path)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                with new_file(path, overwrite=True) as unfinished:
                    shutil.copyfile(source, unfinished)
                source.unlink()

    def write(self, work: Work, folder: Path) -> Path:
        """Writes all files from the parts."""
        paths = [folder / f"{number}-{path.name}" for number, path in enumerate(self.paths)]
        numbers = range(len(work.parts))
        verdicts = decide(self.rules, lambda: (_read_head(work.path(number)) for number in numbers))
        report = _Report(self.rules, verdicts)
        start = 0
        with ExitStack() as stack, progress_bar(self.progress and "writing", total=work.total, unit="pair") as bar:
            write_kept = stack.enter_context(open_table(paths[: len(self.outputs)], ("source", "target")))
            write_removed = None
            if self.removed is not None:
                write_removed = stack.enter_context(open_table([paths[-2]], ("source", "target", "rule")))
            for number in numbers:
                outcome = _read_part(work.path(number))
                own = verdicts[start : start + len(outcome.pairs)].tolist()
                write_kept([pair for pair, rule in zip(outcome.pairs, own, strict=True) if rule == len(self.rules)])
                found = zip(outcome.pairs, own, strict=True)
                removed = [(*pair, str(self.rules[rule])) for pair, rule in found if rule < len(self.rules)]
                if write_removed is not None:
                    write_removed(removed)
                report.add(outcome, own)
                start += len(own)
                bar.update(len(own))
        paths[-1].write_text(json.dumps(report.describe(), ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        return folder


class _Report:
    """Counts and examples of what rules have done."""

    def __init__(self, rules: Rules, verdicts: Any) -> None:
        self.rules = rules
        self.counts = np.bincount(verdicts, minlength=len(rules) + 1).tolist()
        self.changed = [0] * len(rules)
        self.examples: list[list[dict[str, str]]] = [[] for _ in rules]

    def add(self, outcome: Outcome, verdicts: list[int]) -> None:
        """Looks at the pairs of a part, and which rule has removed each."""
        for number, rows in outcome.changed.items():
            self.changed[number] += sum(verdicts[row] > number for row in rows)
            for row, source, target in outcome.before[number]:
                if verdicts[row] > number:
                    self._show(number, source=source, target=target)
        for pair, number in zip(outcome.pairs, verdicts, strict=True):
            if number < len(self.rules):
                self._show(number, source=pair[0], target=pair[1])

    def _show(self, number: int, **texts: str) -> None:
        if len(self.examples[number]) < _EXAMPLES:
            self.examples[number].append({side: text[:_LONGEST_EXAMPLE] for side, text in texts.items()})

    def describe(self) -> dict[str, Any]:
        """Returns the report."""
        total, kept = sum(self.counts), self.counts[-1]
        rules = []
        for number, rule in enumerate(self.rules):
            counts = {"seen": total - sum(self.counts[:number]), "removed": self.counts[number]}
            described = {"name": str(rule), "rule": type(rule).__name__, "parameters": rule.parameters, **counts}
            rules.append(described | {"changed": self.changed[number], "examples": self.examples[number]})
        return {"pairs": total, "kept": kept, "removed": total - kept, "rules": rules}


def _write_part(outcome: Outcome) -> Iterator[str]:
    """The lines of a part: first what is needed to decide, then a pair on each."""
    head = {name: value for name, value in asdict(outcome).items() if name != "pairs"}
    yield json.dumps(head)
    for pair in outcome.pairs:
        yield json.dumps(pair, ensure_ascii=False)


def _read_head(path: Path) -> Outcome:
    with path.open(encoding="utf-8") as file:
        return _parse_head(file.readline())


def _read_part(path: Path) -> Outcome:
    with path.open(encoding="utf-8") as file:
        outcome = _parse_head(file.readline())
        outcome.pairs = [(source, target) for source, target in map(json.loads, file)]
        return outcome


def _parse_head(line: str) -> Outcome:
    head = json.loads(line)
    by_rule = {
        name: {int(number): value for number, value in head[name].items()} for name in ("values", "changed", "before")
    }
    return Outcome([], head["verdicts"], **by_rule)


def clean_corpus(
    rules: Rules,
    output_files: Sequence[str | os.PathLike[str]],
    *,
    files: Sequence[str | Path] | None = None,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    split: str = "train",
    source_column: str | None = None,
    target_column: str | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    removed_file: str | os.PathLike[str] | None = None,
    report_file: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    window_size: int = WINDOW_SIZE,
    progress: bool | str = True,
    processes: Processes = _ALONE,
) -> dict[str, Any]:
    """Writes the pairs that rules leave of a corpus of any size; an interrupted run is taken up where it stopped.

    Args:
        rules: As [`data.cleaning.make_rules`] makes them, with `ALL_RULES` as the known ones.
        output_files: Two text files, the source's first, or one `.tsv`, `.jsonl` or `.parquet` with the columns
            "source" and "target"; all but the last also compressed (`.gz`, `.bz2`, `.xz`).
        files: The corpus: two text files or tables, as [`data.corpora.load_parallel_corpus`] reads them. Damage is no
            error, but left to the rules: bytes that are not UTF-8 are U+FFFD, missing texts are empty, and a line of a
            table that is no pair is a source without a target. A warning names the first such lines.
        dataset_name: A dataset instead, of the Hub or a local folder.
        dataset_config_name: Its configuration.
        split: Its split.
        source_column: Column of the sources in a table.
        target_column: Column of the targets.
        source_lang: What a column or key of sources may be called; rules have languages of their own.
        target_lang: The same for targets.
        removed_file: A table for the pairs that were removed, as they were then, with the rule's name.
        report_file: For the report, in JSON. `None`: the first output's name and `.report.json`.
        overwrite: Replace existing files, and what was begun with other settings.
        window_size: The most pairs of a part; an interruption costs less than so many, in each process. Of more than
            40 million pairs, parts are larger.
        progress: Whether the first process shows bars.
        processes: Which of many processes this is; each of them has to call this function.

    Returns:
        The report, in the first process: `pairs`, `kept`, `removed`, and for each of `rules` what it is, how many pairs
        it has `seen`, `removed` and `changed`, and `examples` of these, as they were before.

    Raises:
        FileExistsError: For an existing output without `overwrite`, or one begun with other settings.
        BlockingIOError: If another run is at work on the output.
        FileNotFoundError, ValueError: For what is wrong with the corpus or the rules.
    """
    if window_size < 1:
        raise ValueError(f"window_size is {window_size}; it must be at least 1 pair.")
    columns = readers.Columns(source_column, target_column, source_lang, target_lang)
    tell_rules(rules, columns)
    outputs = [Path(path) for path in output_files]
    report = Path(f"{outputs[0]}{REPORT_SUFFIX}" if report_file is None else report_file)
    removed = None if removed_file is None else Path(removed_file)
    product = CleanedCorpus(outputs, removed, report, rules, overwrite, progress)
    product.check(readers.expand_files(files or ()))
    source: Any = (columns, files, dataset_name, dataset_config_name, split, None, "drop")
    corpus = Corpus(open_corpus(*source, streaming=True))
    settings = {
        "rules": [json.dumps([str(rule), type(rule).__name__, rule.identify()], default=str) for rule in rules],
        "files": list(map(str, product.paths)),
    }

    def clean_part(number: int, bar: Progress) -> Iterator[str]:
        yield from _write_part(apply_rules(rules, corpus.read(work.parts[number]), examples=_EXAMPLES))

    with ExitStack() as stack:

        def plan() -> Work:
            stack.enter_context(locked(find_lock(product), str(product)))
            return prepare(product, settings, lambda: corpus.scan(progress), window_size, processes, "pair")

        work = processes.agree(plan)
        processes.call(lambda: work.check(settings, processes))
        if not work.is_published:
            do_parts(work, clean_part, processes, progress, "pair")
        if processes.rank > 0:
            return {}
        work.publish(product)
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found
