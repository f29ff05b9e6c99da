"""Parallel corpora from text files, tables and the Hub, all as one dataset of "source" and "target" strings.

A corpus misaligned by a single line trains a bad model: everything doubtful raises an error that names the line.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from datasets import Dataset, DatasetDict, Features, Value, load_dataset, load_from_disk

from .lines import OnDamage, without_surrogates
from .readers import USUAL_COLUMNS, AlignedLines, Columns, DatasetPart, Part, divide_dataset, divide_files

logger = logging.getLogger(__name__)

_SHOWN = 5

EmptyLines = Literal["error", "drop"]


def _load_saved_split(dataset_name: str, split: str) -> Dataset | None:
    """A split of a folder written by `save_to_disk`, without taking it into memory; None for anything else."""
    folder = Path(dataset_name)
    if folder.is_file():
        raise ValueError(f"dataset_name={dataset_name!r} is a file: pass it as files=[{dataset_name!r}].")
    if not (folder / "dataset_dict.json").is_file() and not (folder / "state.json").is_file():
        return None
    dataset = load_from_disk(folder)
    # A lone saved split must not pass for another one: a validation score on training data would mislead.
    splits = dataset if isinstance(dataset, DatasetDict) else {str(dataset.split or "train"): dataset}
    if split not in splits:
        raise ValueError(f"{dataset_name}: no split {split!r}; the splits are {', '.join(map(repr, splits))}.")
    return splits[split].with_format(None)  # one that was set is saved, too


@dataclass
class Tally:
    """Warns of the first few of many like events, and then whenever their number has grown tenfold."""

    count: int = 0

    def add(self, message: str) -> None:
        """Counts one."""
        self.count += 1
        if self.count <= _SHOWN or str(self.count).rstrip("0") == "1":
            logger.warning("%s (%s so far)", message, f"{self.count:,}")


def _check_texts(part: Part, number: int, source: object, target: object) -> str:
    """Makes sure that each is a text or missing; returns where they are."""
    where = f"{part.name}, {part.unit} {number}:"
    for side, value in (("source", source), ("target", target)):
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{where} the {side} is {value!r} ({type(value).__name__}), not a string.")
    return where


def read_pairs(part: Part, on_damage: OnDamage | None = None) -> Iterator[tuple[str, str]]:
    """Yields all pairs, whatever is in them; a missing text is an empty one, half a character (in JSON) is U+FFFD.

    With `on_damage`, which is told of each, a line that is no pair is a source without a target.
    """
    for number, *texts in (part if on_damage is None else part.tolerating(on_damage)).pairs():
        if not all(isinstance(text, str) for text in texts):
            try:
                _check_texts(part, number, *texts)
            except ValueError as error:
                if on_damage is None:
                    raise
                on_damage(str(error))
                texts = ["\t".join(map(str, texts)), None]
        source, target = (without_surrogates(str(text)) if text else "" for text in texts)
        yield source, target


def good_pairs(parts: Iterable[Part], *, empty_lines: EmptyLines, dropped: Tally) -> Iterator[tuple[int, str, str]]:
    """Yields the pairs that have text on both sides; the others are an error, or are counted in `dropped`."""
    for part in parts:
        for number, source, target in part.pairs():
            if isinstance(source, str) and isinstance(target, str) and source.strip() and target.strip():
                yield number, without_surrogates(source), without_surrogates(target)
                continue
            where = _check_texts(part, number, source, target)
            if empty_lines == "error":
                mend = 'Mend the corpus, or drop such pairs with empty_lines="drop" (the scripts: --drop_empty_lines).'
                raise ValueError(f"{where} empty on one side or both. {mend}")
            dropped.add(f"{where} empty on one side or both. It was dropped.")


def open_corpus(
    columns: Columns,
    files: Sequence[str | Path] | None,
    dataset_name: str | None,
    dataset_config_name: str | None,
    split: str,
    max_samples: int | None,
    empty_lines: str,
    *,
    streaming: bool,
) -> list[Part]:
    """Finds the parts of a corpus, and checks what is cheap to check."""
    if (files is None) == (dataset_name is None):
        raise ValueError(f"files={files!r} and dataset_name={dataset_name!r}: give exactly one of them.")
    if isinstance(files, str | Path):
        raise ValueError(f"files={files!r}: give a list of paths.")
    if max_samples is not None and max_samples < 1:
        raise ValueError(f"max_samples={max_samples}: must be at least 1, or None for all.")
    if empty_lines not in ("error", "drop"):
        raise ValueError(f'empty_lines={empty_lines!r}: must be "error" or "drop".')
    if files is not None:
        parts = divide_files(files, columns)
    else:
        dataset = _load_saved_split(str(dataset_name), split)
        if dataset is None:
            dataset = load_dataset(dataset_name, name=dataset_config_name, split=split, streaming=streaming)
        parts = divide_dataset(dataset, f"{dataset_name} ({split})", columns, streaming=streaming)
    if all(next(part.tolerating(lambda _: None).pairs(), None) is None for part in parts):  # damage is for who reads it
        raise ValueError(f"{dataset_name or ', '.join(map(str, files or ()))}: no pair of source and target in it.")
    return parts


def load_parallel_corpus(
    *,
    files: Sequence[str | Path] | None = None,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    split: str = "train",
    source_column: str | None = None,
    target_column: str | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    usual_columns: tuple[tuple[str, str], ...] = USUAL_COLUMNS,
    max_samples: int | None = None,
    empty_lines: EmptyLines = "error",
    streaming: bool = False,
) -> Dataset:
    r"""Loads sentence pairs from files or a dataset into one of exactly two string columns, "source" and "target".

    `files` is either two aligned text files (source first; line n translates line n) or any number of tables: their
    paths, folders of them, patterns such as `corpus/train-*.parquet`. A table is, by its suffix:

    - `.tsv`: lines split at tabs, without any quoting; `.csv`: comma-separated with quotes. The first line is a header
      only if it has the columns looked for (below); otherwise it is data, and the first two columns are the source
      and the target (an error if it looks like names of columns). All lines have the same number of columns.
    - `.json`, `.jsonl`: one JSON object on each line; `.parquet`.

    All but parquet may be compressed (`.gz`, `.bz2`, `.xz`). Text is UTF-8; lines end with "\n" or "\r\n", and with
    nothing else.

    The columns are `source_column` and `target_column` if given (nested ones as "translation.en"); else `source` and
    `target`; else columns named `source_lang` and `target_lang`; else those keys of a `translation` feature
    ({language: text}); else the only pair of `usual_columns`, those of summaries, say, that is there.

    `dataset_name`, instead of `files`, is a dataset on the Hub, a local folder of one, or a folder written by
    `save_to_disk`; `dataset_config_name` and `split` are as `datasets.load_dataset` understands them; with `streaming`,
    other splits are not prepared. `max_samples` keeps so many pairs from the beginning. Pairs that are empty (null, or
    white space only) on one side or both are an error, or with `empty_lines="drop"` left out and counted in the log.

    Raises:
        FileNotFoundError, ConnectionError: if a file, the dataset or the Hub is not there.
        ValueError: if something is wrong with the arguments or the corpus; it names the file and the line.
    """
    wanted = Columns(source_column, target_column, source_lang, target_lang, usual_columns)
    parts = open_corpus(
        wanted, files, dataset_name, dataset_config_name, split, max_samples, empty_lines, streaming=streaming
    )
    return _collect_pairs(parts, max_samples, empty_lines)


def _collect_pairs(parts: list[Part], max_samples: int | None, empty_lines: EmptyLines) -> Dataset:
    dropped = Tally()
    pairs = islice(good_pairs(parts, empty_lines=empty_lines, dropped=dropped), max_samples)
    features = Features({"source": Value("string"), "target": Value("string")})
    if len(parts) == 1 and isinstance(parts[0], DatasetPart) and isinstance(parts[0].dataset, Dataset):
        # Columns and rows are chosen without taking a memory-mapped dataset into memory.
        dataset, rows = parts[0].dataset.flatten().select_columns([*parts[0].columns]), [pair[0] - 1 for pair in pairs]
        dataset = dataset.rename_columns(dict(zip(parts[0].columns, features, strict=True)))
        dataset = (dataset.select(rows) if len(rows) < len(dataset) else dataset).cast(features)
    else:
        kept = list(pairs)
        columns = {"source": [source for _, source, _ in kept], "target": [target for _, _, target in kept]}
        dataset = Dataset.from_dict(columns, features=features)
        if max_samples is not None and isinstance(parts[0], AlignedLines):
            deque(parts[-1].pairs(), maxlen=0)  # compressed files tell only at their ends that they are misaligned
    if not len(dataset):
        raise ValueError(f"{parts[0].name}: all {dropped.count:,} pairs are empty on one side or both. None is left.")
    if dropped.count:
        logger.warning("%s: %s pairs were dropped.", parts[0].name, f"{dropped.count:,}")
    return dataset
