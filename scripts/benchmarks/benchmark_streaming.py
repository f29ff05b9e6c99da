r"""Measures how fast a corpus larger than memory becomes batches, in how much memory, and how reading it resumes.

    python scripts/benchmarks/benchmark_streaming.py --data_dir out/streaming --output_file out/streaming.json
    python scripts/benchmarks/benchmark_streaming.py --data_dir out/streaming --batches 500

Writes made-up sentence pairs to parquet files, 5 million unless told otherwise; files that are there already are used
again. Then a process of its own reads one pass over them as training does: reads, tokenises on the fly, puts pairs of
like length together in a window, fills batches to a budget of tokens, and pads them. It notes its peak memory at 10%,
50% and 100% of the way. At 10%, 50% and 95% the position is kept; another process then starts from each of these, and
must get the very batch that followed.
"""

import hashlib
import json
import logging
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow  # type: ignore[import-untyped]
import pyarrow.compute  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
from benchmark_tools import check_at_least_one
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

import vanilla_transformer  # noqa: F401 (registers the tokenizer with AutoTokenizer)
from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.data.stream_batches import StreamingTokenBatches
from vanilla_transformer.data.streams import sample_pairs, stream_parallel_corpus, tokenize_stream
from vanilla_transformer.data.tokenizer_training import train_tokenizer

DISTRIBUTIONS = ("vanilla-transformer", "datasets", "pyarrow", "tokenizers", "torch", "transformers")
MEMORY_AT = (0.1, 0.5, 1.0)
RESUME_AT = (0.1, 0.5, 0.95)
PAIRS_OF_A_FILE = 100_000
PAIRS_OF_A_ROW_GROUP = 5000
TOKENIZER_SAMPLE = 20_000
WORDS = 30_000
MEAN_WORDS = 20
MAX_WORDS = 100
STATUS = Path("/proc/self/status")

Results = dict[str, Any]


@dataclass
class BenchmarkArguments:
    """What to read, and how much of it."""

    data_dir: str = field(metadata={"help": "Folder for the corpus and its tokenizer, used again if it has them."})
    pairs: int = field(default=5_000_000, metadata={"help": "Sentence pairs in the corpus. Default: 5000000."})
    batches: int | None = field(default=None, metadata={"help": "Batches to read. Default: a whole pass."})
    max_source_tokens: int = field(default=25_000, metadata={"help": "Source tokens of a batch. Default: 25000."})
    max_target_tokens: int = field(default=25_000, metadata={"help": "Target tokens of a batch. Default: 25000."})
    window: int = field(default=20_000, metadata={"help": "Pairs that are read ahead. Default: 20000."})
    vocab_size: int = field(default=8000, metadata={"help": "Size of the vocabulary. Default: 8000."})
    seed: int = field(default=0, metadata={"help": "Seed of the corpus and of the shuffling. Default: 0."})
    output_file: str | None = field(default=None, metadata={"help": "JSON file for the figures."})
    disable_tqdm: bool = field(default=False, metadata={"help": "Show no progress bars."})

    def __post_init__(self) -> None:
        check_at_least_one(self, ("pairs", "batches"))
        for name in ("max_source_tokens", "max_target_tokens"):
            if getattr(self, name) < MAX_WORDS:
                raise ValueError(f"--{name} is {getattr(self, name)}; it must be at least {MAX_WORDS}.")
        if not STATUS.exists():
            raise ValueError(f"{STATUS}, where Linux tells the peak memory of a process, is missing.")


make_parser = partial(make_argument_parser, BenchmarkArguments, __doc__)


# The corpus


def make_words(seed: int, syllables: list[str]) -> pyarrow.Array:
    """Made-up words, all different, the shorter ones first as in a language."""
    rng = np.random.default_rng(seed)
    words: dict[str, None] = {}
    while len(words) < WORDS:
        length = 1 + len(words).bit_length() // 5 + int(rng.integers(2))
        words["".join(rng.choice(syllables, size=length))] = None
    return pyarrow.array(list(words))


def make_sentences(rng: np.random.Generator, words: pyarrow.Array, lengths: np.ndarray[Any, Any]) -> pyarrow.Array:
    """Sentences of so many words, drawn as often as words are: the n-th about 1 / n times as often as the first."""
    frequencies = 1 / np.arange(3, WORDS + 3)
    # 2 ** 16 places, shared out by frequency: looking one up is faster than drawing from the distribution.
    places = np.searchsorted(np.cumsum(frequencies) / frequencies.sum(), (np.arange(2**16) + 0.5) / 2**16)
    drawn = places[rng.integers(2**16, size=lengths.sum(), dtype=np.uint16)]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    sentences = pyarrow.ListArray.from_arrays(offsets, words.take(pyarrow.array(drawn)))
    return pyarrow.compute.binary_join(sentences, " ")


def write_file(path: Path, pairs: int, seed: tuple[int, int], languages: list[pyarrow.Array]) -> None:
    """Writes one file of the corpus, in whole or not at all."""
    rng = np.random.default_rng(seed)
    # Sentence lengths are close to lognormal; a translation is about as long as its source.
    source = rng.lognormal(np.log(MEAN_WORDS) - 0.18, 0.6, size=pairs)
    target = source * rng.lognormal(0.0, 0.15, size=pairs)
    columns = {
        side: make_sentences(rng, words, np.clip(np.rint(lengths), 1, MAX_WORDS).astype(np.int64))
        for side, words, lengths in zip(("source", "target"), languages, (source, target), strict=True)
    }
    partial = path.with_suffix(".partial")
    pyarrow.parquet.write_table(pyarrow.table(columns), partial, row_group_size=PAIRS_OF_A_ROW_GROUP)
    os.replace(partial, path)


def write_corpus(arguments: BenchmarkArguments) -> tuple[list[Path], int]:
    """Writes the files that are not there yet; returns all of them, and how many were written."""
    languages = [
        make_words(1, [consonant + vowel for consonant in "bdfghklmnprst" for vowel in "aeiou"]),
        make_words(
            2, [onset + rhyme for onset in ("sch", *"bdfgklmnrstwz") for rhyme in ("en", "er", "ung", *"aeiou")]
        ),
    ]
    folder = Path(arguments.data_dir) / f"pairs-{arguments.pairs}-seed-{arguments.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    count = -(-arguments.pairs // PAIRS_OF_A_FILE)
    files = [folder / f"{index:05d}-of-{count:05d}.parquet" for index in range(count)]
    missing = [index for index, path in enumerate(files) if not path.exists()]
    for index in tqdm(missing, desc="Writing the corpus", unit="file", disable=arguments.disable_tqdm):
        pairs = min(PAIRS_OF_A_FILE, arguments.pairs - index * PAIRS_OF_A_FILE)
        write_file(files[index], pairs, (arguments.seed, index), languages)
    return files, len(missing)


def load_tokenizer(arguments: BenchmarkArguments, files: list[Path]) -> Path:
    """Trains a tokenizer on a part of the corpus, or finds the one of an earlier run; returns its folder."""
    folder = files[0].parent / f"tokenizer-{arguments.vocab_size}"
    if not (folder / "tokenizer_config.json").exists():
        sample = sample_pairs(stream_parallel_corpus(files=files), TOKENIZER_SAMPLE)
        texts = [*sample["source"], *sample["target"]]
        tokenizer = train_tokenizer(
            texts, vocab_size=arguments.vocab_size, length=len(texts), show_progress=not arguments.disable_tqdm
        )
        tokenizer.save_pretrained(folder)
    return folder


# Reading it


def peak_memory() -> float:
    """The most memory this process has had so far, in MiB."""
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def open_stream(
    arguments: BenchmarkArguments, files: list[Path], tokenizer: PreTrainedTokenizerBase
) -> StreamingTokenBatches:
    """The stream that training would read."""
    pairs = stream_parallel_corpus(files=files)
    tokenized = tokenize_stream(
        pairs, tokenizer, max_source_length=arguments.max_source_tokens, max_target_length=arguments.max_target_tokens
    )
    return StreamingTokenBatches(
        tokenized,
        max_source_tokens=arguments.max_source_tokens,
        max_target_tokens=arguments.max_target_tokens,
        window=arguments.window,
        seed=arguments.seed,
    )


def digest(batch: Any) -> str:
    """Tells one padded batch from any other."""
    parts = (batch[name].numpy().tobytes() for name in ("input_ids", "attention_mask", "labels"))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def read_pass(arguments: BenchmarkArguments, files: list[Path], tokenizer_folder: Path) -> Results:
    """Reads the corpus once; returns figures, and the positions to resume at with the batch that follows each."""
    started = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    stream = open_stream(arguments, files, tokenizer)
    pairs = tokens = 0
    first_batch = 0.0
    memory: list[Results] = []
    positions: list[Results] = []
    due = list(RESUME_AT)
    bar = tqdm(total=arguments.pairs, desc="Reading", unit="pair", unit_scale=True, disable=arguments.disable_tqdm)
    loader: DataLoader[Any] = DataLoader(stream, batch_size=None, collate_fn=DataCollatorForSeq2Seq(tokenizer))
    for batches, batch in enumerate(loader, start=1):
        if positions and "next_batch" not in positions[-1]:
            positions[-1]["next_batch"] = digest(batch)
        if batches == 1:
            first_batch = time.perf_counter() - started
        pairs += len(batch["labels"])
        tokens += int(batch["attention_mask"].sum()) + int((batch["labels"] != -100).sum())
        bar.update(len(batch["labels"]))
        done = pairs / arguments.pairs if arguments.batches is None else batches / arguments.batches
        while len(memory) < len(MEMORY_AT) and done >= MEMORY_AT[len(memory)]:
            memory.append({"at": MEMORY_AT[len(memory)], "pairs": pairs, "peak_mib": peak_memory()})
        if done >= 1:
            break
        if reached := [at for at in due if done >= at]:
            positions.append({"at": reached[-1], "pairs": pairs, "state": stream.state_dict()})
            due = [at for at in due if done < at]
    seconds = time.perf_counter() - started
    bar.close()
    return {
        "pairs": pairs,
        "batches": batches,
        "seconds": seconds,
        "pairs_per_second": pairs / seconds,
        "tokens_per_second": tokens / seconds,
        "padding_share": stream.padding_share,
        "seconds_to_first_batch": first_batch,
        "shards": stream.num_shards,
        "memory": memory,
        "memory_growth_mib": memory[-1]["peak_mib"] - memory[0]["peak_mib"],
        "positions": [position for position in positions if "next_batch" in position],
    }


def resume(
    arguments: BenchmarkArguments, files: list[Path], tokenizer_folder: Path, positions: list[Results]
) -> list[Results]:
    """Starts at each position; returns how long the first batch took, and whether it is the one that followed."""
    results = []
    for position in positions:
        started = time.perf_counter()
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
        stream = open_stream(arguments, files, tokenizer)
        stream.load_state_dict(json.loads(json.dumps(position["state"])))
        batch = DataCollatorForSeq2Seq(tokenizer)(next(iter(stream)))
        results.append(
            {
                "at": position["at"],
                "pairs": position["pairs"],
                "seconds_to_first_batch": time.perf_counter() - started,
                "same_batch": digest(batch) == position["next_batch"],
            }
        )
    return results


def in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function in a process that has done nothing before."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(function, *arguments).result()


# The report


def describe(results: Results) -> Iterator[str]:
    """What is printed."""
    corpus = results["corpus"]
    yield (
        f"corpus: {corpus['pairs']:,} pairs in {corpus['files']} files, {corpus['bytes'] / 2**20:,.0f} MiB of parquet "
        f"({corpus['files_written']} files written now, in {corpus['seconds']:.1f} s)"
    )
    reading = results["reading"]
    yield (
        f"read {reading['pairs']:,} pairs in {reading['batches']:,} batches in {reading['seconds']:.1f} s: "
        f"{reading['pairs_per_second']:,.0f} pairs/s, {reading['tokens_per_second']:,.0f} tokens/s without padding, "
        f"{reading['padding_share']:.1%} padding; first batch after {reading['seconds_to_first_batch']:.1f} s"
    )
    for mark in reading["memory"]:
        yield f"peak memory at {mark['at']:.0%} ({mark['pairs']:,} pairs): {mark['peak_mib']:,.0f} MiB"
    yield f"growth from {MEMORY_AT[0]:.0%} to {MEMORY_AT[-1]:.0%}: {reading['memory_growth_mib']:,.1f} MiB"
    for mark in results["resuming"]:
        outcome = "the batch that followed" if mark["same_batch"] else "ANOTHER BATCH than the one that followed"
        yield (
            f"resumed at {mark['at']:.0%} ({mark['pairs']:,} pairs): first batch after "
            f"{mark['seconds_to_first_batch']:.1f} s, {outcome}"
        )


def run(arguments: BenchmarkArguments) -> Results:
    """Measures, prints and writes."""
    started = time.perf_counter()
    files, written = write_corpus(arguments)
    seconds = time.perf_counter() - started
    tokenizer_folder = load_tokenizer(arguments, files)
    reading = in_own_process(read_pass, arguments, files, tokenizer_folder)
    resuming = in_own_process(resume, arguments, files, tokenizer_folder, reading.pop("positions"))
    results = {
        "arguments": asdict(arguments),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "versions": {name: version(name) for name in DISTRIBUTIONS},
        "corpus": {
            "pairs": arguments.pairs,
            "files": len(files),
            "bytes": sum(path.stat().st_size for path in files),
            "files_written": written,
            "seconds": seconds,
        },
        "reading": reading,
        "resuming": resuming,
    }
    print(*describe(results), sep="\n")
    if arguments.output_file:
        output_file = Path(arguments.output_file)
        output_file.parent.mkdir(parents=True, exist_ok=True)
        output_file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return results


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments (`argv`, else the command line's) and measure; ends with 1 if a batch is not the same."""
    logging.basicConfig(format="%(levelname)s: %(message)s")
    (arguments,) = make_parser().parse_args_into_dataclasses(args=argv)
    results = run(arguments)
    if not all(mark["same_batch"] for mark in results["resuming"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
