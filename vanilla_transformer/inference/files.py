"""Translating files of any size, by one process or many, on one machine or several that share a folder.

The records are divided into parts of some thousand. Each part's translations are a file of a folder beside the output,
complete or absent, so that whatever is killed costs the parts that were in work, and none is done twice. A process
takes a part that nobody else has locked; locks end with the process that holds them. The first process joins the parts
in order. Processes meet once, at the beginning, to agree on the plan; from there on only files tell them what is done,
which outlives any of them, and lets any number of processes go on with what others have begun.
"""

import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from vanilla_transformer.data.records import Part, RecordFile, find_records
from vanilla_transformer.data.vocabularies import get_vocabularies
from vanilla_transformer.files import locked, read_architecture
from vanilla_transformer.memory import release_kept_memory
from vanilla_transformer.model.pipeline_vanilla_transformer import WINDOW_SIZE

from .loading import is_multilingual
from .outputs import MakePairs
from .parts import Output, Product, Work, find_lock, write_whole
from .processes import Processes
from .translate import TranslationModel, Translator, length_limit, progress_bar

logger = logging.getLogger(__name__)

_MOST_PARTS = 10_000
_PARTS_OF_A_PROCESS = 4  # so that all end at about the same time
_SMALL_PART = 512  # records; of fewer, batches are small, or have more padding
_POLLING_SECONDS = 0.2
_LOOKING_SECONDS = 2.0
_ALONE = Processes()


def translate_file(
    model: TranslationModel,
    tokenizer: PreTrainedTokenizerBase,
    input_file: str | os.PathLike[str],
    output_file: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    source_column: str | None = None,
    target_column: str = "translation",
    parts_dir: str | os.PathLike[str] | None = None,
    n_best: int | None = None,
    window_size: int = WINDOW_SIZE,
    progress: bool | str = True,
    processes: Processes = _ALONE,
    seed: int | None = None,
    make_pairs: MakePairs | None = None,
    **options: Any,
) -> int:
    """Translates a file, or the files of a folder, into another; an interrupted run is taken up where it stopped.

    Every record gives one translation, in order. What the output was made with (input, model, vocabulary, options) is
    kept with the finished parts, and must be the same when it is taken up, on as many processes or others.

    Args:
        model: Any sequence-to-sequence model, or one that was exported.
        tokenizer: Its tokenizer.
        input_file: A file, a folder of files or a pattern such as `corpus/*.parquet`: text (a source on each line),
            `.tsv`, `.jsonl` or `.parquet`, all but the last also compressed (`.gz`, `.bz2`, `.xz`); a path or URL of
            any file system of fsspec.
        output_file: A file of any of these kinds, whatever the input's. A path that ends with `/` is a new or empty
            folder, in which each file of the input gets one of its name.
        overwrite: Replace an existing file, and what was begun with other settings.
        source_column: Column of the sources in tables, "translation.en" for a nested one. `None`: "source" or "text",
            the only one, or the first of a `.tsv` without names.
        target_column: Column of the translations. A table of the input's kind keeps all columns.
        parts_dir: Folder for unfinished parts, shared by all processes. `None`: beside the output, where that is local.
        n_best: As [`translate_lines`] has it, for text.
        window_size: Records of a part; an interruption costs less than so many, in each process. Of more than 40
            million records, parts are larger, so that there are 10,000 of them.
        progress: Whether the first process shows a bar of what all have done; a string is its description.
        processes: Which of many processes this is; each of them has to call this function.
        seed: Seed of what is sampled (`do_sample=True` among the options): each part has its own, so that neither
            interruptions nor processes change it. `None`: whatever torch's own random state gives.
        make_pairs: Makes a parallel corpus of the translations (see [`synthetic`]), written as a table.
        **options: Those of [`translate`] and of `generate`.

    Returns:
        The number of records.

    Raises:
        FileExistsError: For an existing output without `overwrite`, or one begun with other settings.
        BlockingIOError: If another run is at work on the output.
        FileNotFoundError, ValueError: For what is wrong with the input; it names the file and the line.
    """
    if window_size < 1:
        raise ValueError(f"window_size is {window_size}; it must be at least 1 line.")
    translator = Translator(model, tokenizer, n_best=n_best, **options)
    translator.check_n_best()
    output = Output(os.fspath(output_file), target_column, n_best, overwrite, parts_dir, make_pairs)
    # What decides the translations; batches do not, unless they are sampled.
    decisive = {"max_source_length": None, "source_prefix": "", "n_best": n_best, **options}
    decisive |= {"source_column": source_column, "target_column": target_column}
    decisive |= {name: value for name, value in (("seed", seed), ("make_pairs", make_pairs)) if value is not None}
    for name in ("batch_size", "max_batch_tokens") if seed is None else ():
        decisive.pop(name, None)
    settings = describe_settings(model, tokenizer, decisive)
    with ExitStack() as stack:

        def plan() -> Work:
            stack.enter_context(locked(find_lock(output), str(output)))
            files = find_records(os.fspath(input_file), source_column)
            output.check(files)

            def read() -> Contents:
                contents = _scan(files, make_pairs)
                output.check_records(files)
                return contents

            is_exact = seed is not None  # samples depend on the parts
            return prepare(output, settings, read, window_size, processes, is_exact=is_exact)

        def translate_part(number: int, bar: Progress) -> Iterator[str]:
            part = work.parts[number]
            file = work.files[part.file]
            place: Any = {"name": file.path, "first_line": part.first + file.first_record + 1}
            found = translator.translate(file.texts(part), **place, window_size=None, bar=bar)
            with _seeded(seed, part.file, part.first, device=translator.model.device):
                yield from (json.dumps(each, ensure_ascii=False) for each in found)

        work = processes.agree(plan)
        # None goes on before all have seen the folder, which may be gone soon.
        processes.call(lambda: work.check(settings, processes))
        if not work.is_published:
            do_parts(work, translate_part, processes, progress)
        if processes.rank == 0:
            work.publish(output)
    return work.total


class Contents(NamedTuple):
    """What one reading of the input finds: what tells it from another, its files, how to cut it, and its length."""

    identity: Any
    files: list[tuple[str, str | None]]
    divide: Callable[[int], Iterable[Part]]  # into parts of about so many records
    total: int


def _scan(files: list[RecordFile], make_pairs: MakePairs | None) -> Contents:
    scans = [file.scan() for file in files]
    if make_pairs is not None:
        make_pairs.check(files, scans)

    def divide(size: int) -> Iterable[Part]:
        each = enumerate(zip(files, scans, strict=True))
        return chain.from_iterable(file.divide(scan, size, file=number) for number, (file, scan) in each)

    found = [(file.path, file.column) for file in files]
    return Contents([scan.sha256 for scan in scans], found, divide, sum(scan.count for scan in scans))


def prepare(
    product: Product,
    settings: dict[str, Any],
    read: Callable[[], Contents],
    window_size: int,
    processes: Processes,
    unit: str = "line",
    *,
    is_exact: bool = False,
) -> Work:
    """Finds what an interrupted run has left, or makes a new plan; called with the product's lock, by one process.

    Parts have `window_size` records, or fewer where there would be too few for the processes, unless `is_exact`.
    """
    folder = product.place.parent.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    beginning = f"{product.place.name}.parts-"
    found = sorted(path for path in folder.iterdir() if path.name.startswith(beginning) and path.is_dir())
    left = [path for path in found if Work.owns(path)]
    if not left:
        product.check_new()  # before a corpus is read
    contents = read()
    settings = {"input": contents.identity, **settings}
    for path in left:
        work = Work.load(path)
        if _can_go_on(work, product, settings):
            done = sum(work.parts[number].count for number in work.find_finished())
            logger.info("%s: %d of %d %ss are done, going on", product, done, work.total, unit)
            work.inputs = contents.files  # what was read now; where it was then, there may be something else
            return work
        work.discard()
    product.check_new()
    size = max(window_size, -(-contents.total // _MOST_PARTS))
    if processes.count > 1 and not is_exact:
        share = -(-contents.total // processes.count)
        size = min(size, max(1, min(share, _SMALL_PART), -(-share // _PARTS_OF_A_PROCESS)))
    place = Path(tempfile.mkdtemp(prefix=beginning, dir=folder))
    work = Work(place, contents.files, list(contents.divide(size)), settings)
    work.save()
    return work


def _can_go_on(work: Work, product: Product, settings: dict[str, Any]) -> bool:
    """Whether an interrupted run is taken up; one that is neither that nor to be replaced is an error."""
    if not work.settings:
        return False
    is_over = work.is_published and not work.joined.exists()
    if is_over and not product.exists():  # somebody has taken it away since
        return False
    changed = sorted(name for name in settings if settings[name] != work.settings.get(name))
    if changed and not is_over and not product.overwrite and work.find_finished():
        raise FileExistsError(
            f"{work.folder} was begun with other settings ({', '.join(changed)}); delete it or give --overwrite "
            "(overwrite=True)."
        )
    if not changed and not work.is_published:
        product.check_new()
    return not changed


class Progress:
    """Moves a bar by what all processes have done: by batches in this one, by parts in the others."""

    def __init__(self, work: Work, bar: Any) -> None:
        self.work, self.bar = work, bar
        self.own = self.shown = 0
        self.looked = -math.inf

    def update(self, count: int) -> None:
        """Adds so many records of the part that this process is at."""
        self.own += count
        self.show()

    def end_part(self) -> None:
        """Says that the part is finished."""
        self.own = 0
        self.looked = -math.inf
        self.show()

    def show(self) -> None:
        """Moves the bar, at most once in a while."""
        if time.monotonic() - self.looked > _LOOKING_SECONDS:
            self.looked = time.monotonic()
            done = self.own + sum(self.work.parts[number].count for number in self.work.find_finished())
            self.bar.update(max(0, done - self.shown))
            self.shown = max(self.shown, done)


# Makes the lines of a part, of which it is given the number, and says how far it is.
DoPart = Callable[[int, Progress], Iterable[str]]


def do_parts(work: Work, do: DoPart, processes: Processes, progress: bool | str, unit: str = "line") -> None:
    """Does parts until none is left that nobody has; the first process waits until all are there."""
    share = processes.share(len(work.parts)).start
    order = [*range(share, len(work.parts)), *range(share)]
    with progress_bar(progress if processes.rank == 0 else False, total=work.total, unit=unit) as bar:
        found = Progress(work, bar)
        while work.is_open:
            finished = work.find_finished()
            order = [number for number in order if number not in finished]
            found.show()
            taken = sum(_do_part(work, number, do, found) for number in order)
            if not order or (processes.rank > 0 and not taken):
                return
            if not taken:
                time.sleep(_POLLING_SECONDS)


def _do_part(work: Work, number: int, do: DoPart, bar: Progress) -> bool:
    """Does a part, unless another process has it or has finished it; returns whether it did."""
    if work.path(number).exists() or not work.is_open:
        return False
    lock = FileLock(work.folder / f"{number:06d}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    try:
        if work.path(number).exists() or not work.is_open:
            return False
        write_whole(work.path(number), do(number, bar))
        bar.end_part()
        release_kept_memory()
        return True
    finally:
        lock.release()


@contextmanager
def _seeded(seed: int | None, *place: int, device: torch.device) -> Iterator[None]:
    """Draws what is sampled by a seed and a place; what is drawn afterwards is as if nothing had been drawn."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(hashlib.sha256(repr((seed, *place)).encode()).digest()[:8]))
        yield


def describe_settings(
    model: TranslationModel, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]
) -> dict[str, Any]:
    """What translations are made with, but for the sources."""
    # The head of every tensor tells a model from the same one trained on, and costs less than reading it whole.
    weights = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        weights.update(name.encode())
        if not tensor.is_meta:
            weights.update(tensor.flatten()[:256].to("cpu", torch.float32).numpy().tobytes())
    source_vocabulary, target_vocabulary = get_vocabularies(tokenizer)
    vocabulary: list[Any] = []
    if target_vocabulary is not source_vocabulary:
        vocabulary.append(sorted(target_vocabulary.items()))
    if tokenizer.is_fast:  # the source's is in what it does; how it pads and truncates changes with every call
        own = json.loads(cast(Any, tokenizer).backend_tokenizer.to_str())
        vocabulary.append({name: own[name] for name in sorted(own) if name not in ("padding", "truncation")})
    else:
        vocabulary.append(sorted(source_vocabulary.items()))
    config = cast(Any, model).config
    languages = [tokenizer.src_lang, tokenizer.tgt_lang] if is_multilingual(tokenizer) else None
    return {
        "model": weights.hexdigest(),
        "architecture": json.dumps(read_architecture(config.to_dict()), sort_keys=True, default=str),
        "limit": length_limit(tokenizer, options.get("max_source_length"), model),
        "dtype": str(cast(Any, model).dtype),
        "vocabulary": hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest(),
        "generation_config": cast(Any, model).generation_config.to_json_string(),
        "options": {name: str(value) for name, value in sorted(options.items())},
        **({} if languages is None else {"languages": languages}),
    }
