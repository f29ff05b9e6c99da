r"""Measures a server against the model that it serves: throughput, latency, and what it does under load.

    python scripts/benchmarks/benchmark_server.py --model_name_or_path out/my-model --test_file test.en
    python scripts/benchmarks/benchmark_server.py --model_name_or_path out/my-ct2 --engine ctranslate2 --num_beams 4

All in one run, with the same engine and the same settings, in processes that take turns:

- Throughput: --clients clients send one sentence at a time, against `translate` on a file of the same sentences; and
  against the model that is called with --clients sentences at a time as they come, which no server can beat.
- Latency: one client, against the model that is called in a loop, sentence by sentence in turns.
- Half load: requests come at random times, half as many a second as the server answered before; the 95th percentile.
- Twice the load: as many again as it can answer; how many are answered, and how many refused with 503 and Retry-After.

The clients run on the same machine, so they take a part of the processor, which counts against the server.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection as Pipe
from typing import Any

from benchmark_tools import check_at_least_one, start_process, write_report
from server_tools import Answer, Connection, ServerProcess, ask_all, make_request

from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.data.lines import read_lines
from vanilla_transformer.export.engines import EngineArguments
from vanilla_transformer.inference.translate import Translator, translate

Sentences = str | list[str] | tuple[str, ...]
DISTRIBUTIONS = ("vanilla-transformer", "transformers", "torch", "ctranslate2", "onnxruntime", "fastapi", "uvicorn")


@dataclass
class BenchmarkArguments:
    """What to serve, and how much of what to ask."""

    model_name_or_path: str = field(metadata={"help": "A model whose configuration names its languages."})
    test_file: str | None = field(
        default=None, metadata={"help": "UTF-8 text, one sentence per line. Default: the built-in corpus."}
    )
    engine: str = field(default="transformers", metadata={"help": "As of translate. Default: transformers."})
    num_beams: int = field(default=1, metadata={"help": "Beams. Default: 1."})
    max_lines: int = field(default=1000, metadata={"help": "Sentences of a round. Default: 1000."})
    rounds: int = field(default=3, metadata={"help": "Of each side of the throughput, in turns. Default: 3."})
    clients: int = field(default=32, metadata={"help": "Clients at once. Default: 32."})
    singles: int = field(default=200, metadata={"help": "Sentences that one client sends. Default: 200."})
    seconds: float = field(default=20.0, metadata={"help": "Of half load and of twice the load. Default: 20."})
    max_queue: int = field(default=256, metadata={"help": "Of the server. Default: 256."})
    workers: int = field(default=1, metadata={"help": "Processes of the server. Default: 1."})
    output_file: str | None = field(default=None, metadata={"help": "JSON file for the figures."})

    def __post_init__(self) -> None:
        check_at_least_one(
            self, ("num_beams", "max_lines", "rounds", "clients", "singles", "seconds", "max_queue", "workers")
        )


def read_sentences(arguments: BenchmarkArguments) -> list[str]:
    """The sentences of a round, repeated where they are too few.

    Raises:
        ValueError: If there are none.
    """
    if arguments.test_file is not None:
        lines = read_lines(arguments.test_file)
    else:
        from vanilla_transformer.data.numbers_and_dates import numbers_and_dates

        lines = numbers_and_dates(source_lang="en", target_lang="de", split="test")["source"]
    lines = [line.strip() for line in lines if line.strip()]
    if not lines:
        raise ValueError(f"--test_file is {arguments.test_file}, which has no sentences.")
    return (lines * (arguments.max_lines // len(lines) + 1))[: arguments.max_lines]


def serve_bare(arguments: BenchmarkArguments, pipe: Pipe) -> None:
    """The process of the model: sends the seconds that it takes for what comes.

    A list of sentences is a file, a tuple is translated by so many sentences as there are clients, a string by itself.
    """
    options: dict[str, Any] = {"engine": arguments.engine, "num_beams": arguments.num_beams}
    model, tokenizer, settings = EngineArguments(arguments.model_name_or_path, **options).load()
    translator = Translator(model, tokenizer, **settings)
    pair = model.config.langs
    pipe.send((pair[0], pair[1]))
    while (sentences := pipe.recv()) is not None:
        start = time.perf_counter()
        if isinstance(sentences, str):
            translator.run(translator.encode([sentences], 1))
        elif isinstance(sentences, tuple):
            for first in range(0, len(sentences), arguments.clients):
                translate(model, tokenizer, sentences[first : first + arguments.clients], progress=False, **settings)
        else:
            translate(model, tokenizer, sentences, progress=False, **settings)
        pipe.send(time.perf_counter() - start)


def check_answers(answers: list[Answer], count: int) -> None:
    """Refuses to measure answers that are none."""
    failed = [answer.status for answer in answers if answer.status != 200]
    if failed or len(answers) != count:
        raise RuntimeError(f"{len(failed)} of {count} requests failed: {sorted(set(failed))}.")


def measure_clients(port: int, requests: list[bytes], clients: int) -> float:
    """The seconds in which so many clients get all their answers."""
    start = time.perf_counter()
    answers = asyncio.run(ask_all(port, requests, clients))
    seconds = time.perf_counter() - start
    check_answers(answers, len(requests))
    return seconds


async def compare_latency(
    port: int, sentences: list[str], make: Callable[[str], bytes], measure_one: Callable[[str], float]
) -> tuple[list[float], list[float]]:
    """Seconds of each sentence, from the server and from the model, in turns."""
    connection = Connection(port)
    served, bare = [], []
    for sentence in sentences:
        request = make(sentence)
        start = time.perf_counter()
        answer = await connection.ask(request)
        served.append(time.perf_counter() - start)
        check_answers([answer], 1)
        bare.append(measure_one(sentence))
    await connection.close()
    return served, bare


async def load(port: int, requests: list[bytes], rate: float, seconds: float) -> list[tuple[float, Answer]]:
    """Sends requests at random times, `rate` a second on average, whatever becomes of those before.

    Returns the seconds from the time at which each was due to its answer, and the answer.
    """
    choose = random.Random(0)
    free: list[Connection] = []
    found: list[tuple[float, Answer]] = []
    tasks: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()

    async def ask(request: bytes, due: float) -> None:
        connection = free.pop() if free else Connection(port)
        answer = await connection.ask(request)
        found.append((loop.time() - due, answer))
        free.append(connection)

    start = due = loop.time()
    while due - start < seconds:
        await asyncio.sleep(max(0.0, due - loop.time()))
        tasks.add(asyncio.create_task(ask(choose.choice(requests), due)))
        due += choose.expovariate(rate)
    await asyncio.gather(*tasks)
    for connection in free:
        await connection.close()
    return found


def describe_load(found: list[tuple[float, Answer]]) -> dict[str, Any]:
    """What became of the requests of a load."""
    seconds = sorted(each for each, answer in found if answer.status == 200)
    refused = [answer for _, answer in found if answer.status == 503]
    return {
        "requests": len(found),
        "answered": len(seconds),
        "refused": len(refused),
        "refused_with_retry_after": sum("retry-after" in answer.headers for answer in refused),
        "other": len(found) - len(seconds) - len(refused),
        "median_milliseconds": 1000 * statistics.median(seconds) if seconds else None,
        "p95_milliseconds": 1000 * seconds[int(0.95 * len(seconds))] if seconds else None,
    }


def measure(arguments: BenchmarkArguments, sentences: list[str]) -> dict[str, Any]:
    """Does all of it, and returns the figures."""
    names = ("model_name_or_path", "engine", "num_beams", "max_queue", "workers")
    options = [f"--{name}={getattr(arguments, name)}" for name in names]
    pipe, process = start_process(serve_bare, arguments)
    languages = dict(zip(("source", "target"), pipe.recv(), strict=True))

    def make(sentence: str) -> bytes:
        return make_request("/translate", {"q": sentence, **languages})

    def measure_bare(sentences: Sentences) -> float:
        pipe.send(sentences)
        return float(pipe.recv())

    requests = list(map(make, sentences))
    with ServerProcess([*options, "--no_split_sentences"]) as server:
        port = server.port
        throughput = []
        for number in range(arguments.rounds + 1):
            seconds = measure_clients(port, requests, arguments.clients)
            found = [seconds, measure_bare(sentences), measure_bare(tuple(sentences))]
            if number:  # the first time is for what is loaded at the first use
                throughput.append([len(sentences) / each for each in found])
                text = "{:.1f} sentences/s from the server, {:.1f} in a file, {:.1f} a few at a time"
                print(text.format(*throughput[-1]), flush=True)
        singles = sentences[: arguments.singles]
        served, bare = asyncio.run(compare_latency(port, singles, make, measure_bare))
        capacity = statistics.median(each for each, *_ in throughput)
        half = asyncio.run(load(port, requests, capacity / 2, arguments.seconds))
        double = asyncio.run(load(port, requests, capacity * 2, arguments.seconds))
        megabytes = server.megabytes
    pipe.send(None)
    process.join()
    return {
        "throughput": throughput,
        "throughput_ratio": statistics.median(served / file for served, file, _ in throughput),
        "server_ratio": statistics.median(served / few for served, _, few in throughput),
        "single_milliseconds": [1000 * statistics.median(each) for each in (served, bare)],
        "latency_ratio": statistics.median(served) / statistics.median(bare),
        "half_load": describe_load(half),
        "twice_the_load": describe_load(double),
        "megabytes": megabytes,
    }


def make_table(results: dict[str, Any]) -> str:
    """The figures as Markdown, each with its bar."""
    half, double = results["half_load"], results["twice_the_load"]
    rows = [
        ("clients' throughput to a file's", f"{results['throughput_ratio']:.2f}", "at least 0.80"),
        ("clients' throughput to the model's, a few at a time", f"{results['server_ratio']:.2f}", ""),
        ("one client's median to the model's", f"{results['latency_ratio']:.2f}", "at most 1.15"),
        ("95th percentile at half load, ms", f"{half['p95_milliseconds'] or float('nan'):.0f}", "below 300"),
        (
            "refused at twice the load",
            f"{double['refused']} of {double['requests']}, {double['refused_with_retry_after']} with Retry-After",
            "all of them with it",
        ),
        ("neither answered nor refused", f"{half['other'] + double['other']}", "0"),
    ]
    return "\n".join(["| what | measured | bar |", "|---|---:|---:|", *(f"| {' | '.join(row)} |" for row in rows)])


make_parser = partial(make_argument_parser, BenchmarkArguments, __doc__)


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments (`argv`, else the command line's), measure, and print a table."""
    parser = make_parser()
    try:
        (arguments,) = parser.parse_args_into_dataclasses(args=argv)
        sentences = read_sentences(arguments)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    results = measure(arguments, sentences)
    print(
        f"\n{arguments.clients} clients, {arguments.num_beams} beams, {arguments.engine}, {arguments.workers} workers\n"
    )
    print(make_table(results))
    write_report(arguments.output_file, "benchmark_server.py", argv, DISTRIBUTIONS, arguments, results)


if __name__ == "__main__":
    main()
