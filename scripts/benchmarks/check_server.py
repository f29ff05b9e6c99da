r"""Asks a real server nonsense and small things without end, and looks whether it goes on, in memory that is bounded.

    python scripts/benchmarks/check_server.py --model_name_or_path out/demo
    python scripts/benchmarks/check_server.py --model_name_or_path out/demo --num_nonsense 500 --num_small 2000

First come requests of which most cannot be answered: any size, encoding and type, broken JSON, deep nesting, bad HTTP,
clients that are slow, and clients that leave. Good ones are among them, whose answers must be right. Each has to be
answered, or its connection closed, within --patience seconds, without an error of the server (500). Then come small
requests over a few connections, and the server's memory at every tenth of them. The script fails, with status 1, if
anything was not so, or if memory grew by more than --max_growth megabytes after the first tenth. It ends the server.
"""

import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from server_tools import HOST, Answer, Connection, ServerProcess, ask_all, close, make_request, read_answer

from vanilla_transformer.commands.command_line import make_argument_parser

KINDS = ("json", "json", "json", "json", "form", "multipart", "multipart; boundary=x", "text", "none", "latin", "odd")
_CONTENT_TYPES = {
    "json": "application/json",
    "form": "application/x-www-form-urlencoded",
    "multipart": "multipart/form-data",
    "multipart; boundary=x": "multipart/form-data; boundary=x",
    "text": "text/plain",
    "none": "",
    "latin": "application/json; charset=latin-1",
    "odd": "\u00e4",
}


@dataclass
class CheckArguments:
    """What to ask, how often, and what is too much."""

    model_name_or_path: str = field(metadata={"help": "Folder of a model whose configuration names its languages."})
    engine: str = field(default="transformers", metadata={"help": "As of serve. Default: transformers."})
    num_nonsense: int = field(default=10_000, metadata={"help": "Requests that may be nonsense. Default: 10000."})
    num_small: int = field(default=100_000, metadata={"help": "Small requests. Default: 100000."})
    num_clients: int = field(default=16, metadata={"help": "Clients at once. Default: 16."})
    text: str = field(default="seven", metadata={"help": "The text of a small request. Default: seven."})
    patience: float = field(default=60.0, metadata={"help": "Seconds for an answer. Default: 60."})
    max_growth: float = field(default=50.0, metadata={"help": "Megabytes. Default: 50."})
    max_seconds: float = field(default=3600.0, metadata={"help": "Small requests end after that. Default: 3600."})
    seed: int = field(default=0, metadata={"help": "Of the nonsense. Default: 0."})

    def __post_init__(self) -> None:
        for name in ("num_nonsense", "num_small", "num_clients"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} is {getattr(self, name)}; it must be at least 1.")


class Nonsense(NamedTuple):
    """A request, and how it is sent: in parts with pauses between them; `leaves`: without waiting for an answer."""

    name: str
    parts: list[bytes]
    leaves: bool = False


def make_body(choose: random.Random, pair: dict[str, str], text: str) -> tuple[str, bytes]:
    """A body and what is wrong with it."""
    good = {"q": text, **pair}
    wrong: Any = choose.choice([None, 7, 1e99, True, {}, {"a": []}, [1], [None], [["a"]], "\ud800", "\0"])
    field_name = choose.choice(["q", "source", "target", "format", "alternatives", "api_key"])
    letters = "".join(chr(choose.choice([choose.randrange(32, 127), choose.randrange(0xD800)])) for _ in range(30))
    whole = json.dumps(good).encode()
    bodies = {
        "types": json.dumps({**good, field_name: wrong}).encode(),
        "missing": json.dumps({key: value for key, value in good.items() if key != field_name}).encode(),
        "long names": json.dumps({**good, "source": "x" * choose.randrange(4000)}).encode(),
        "cut JSON": whole[: choose.randrange(len(whole))],
        "noise": choose.randbytes(choose.randrange(1, 300)),
        "nested lists": b"[" * choose.choice([10, 10_000, 200_000]),
        "nested objects": b'{"q":' * choose.choice([10, 40_000]),
        "a long number": b'{"q": ' + b"9" * 5000 + b"}",
        "UTF-16": json.dumps(good).encode(choose.choice(["utf-16", "utf-32", "utf-16-be"])),
        "latin-1": json.dumps({**good, "q": "\u00e4"}, ensure_ascii=False).encode("latin-1"),
        "twice": b'{"q": "a", "q": "b", "source": "en", "target": "de"}',
        "too large": json.dumps({**good, "q": "abc " * 100_000}).encode(),
        "too long": json.dumps({**good, "q": text * 5000}).encode(),
        "many texts": json.dumps({**good, "q": [""] * choose.choice([1, 100, 20_000])}).encode(),
        "too many texts": json.dumps({**good, "q": [text] * 5000}).encode(),
        "letters": json.dumps({**good, "q": letters}, ensure_ascii=False).encode("utf-8", "surrogatepass"),
        "markup": json.dumps({**good, "q": "<b>" * choose.randrange(2000) + letters, "format": "html"}).encode(),
        "paths": json.dumps({**good, "source": "../../etc/passwd"}).encode(),
        "form": b"q=%ff&source=en&target=de",
        "many fields": b"&".join([b"q=a"] * 200),
        "null": b"null",
        "nothing": b"",
    }
    return choose.choice(list(bodies.items()))


def _send_strangely(choose: random.Random, name: str, head: bytes, body: bytes) -> Nonsense:
    """A request that comes slowly, or as no HTTP, or whose client leaves."""
    whole = head + b"\r\n\r\n" + body
    cut = choose.randrange(len(whole))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:5], body[5:]) if part)
    odd = {
        "cut": Nonsense("cut", [whole[:cut]], leaves=True),
        "left": Nonsense("left", [whole], leaves=True),
        "slow": Nonsense(f"slow, {name}", [whole[:cut], whole[cut : cut + 1], whole[cut + 1 :]]),
        "no HTTP": Nonsense("no HTTP", [choose.randbytes(choose.randrange(1, 400)) + b"\r\n\r\n"], leaves=True),
        "chunks": Nonsense(f"chunks, {name}", [head + b"\r\nTransfer-Encoding: chunked\r\n\r\n", chunks, b"0\r\n\r\n"]),
        "bad chunks": Nonsense("bad chunks", [head + b"\r\nTransfer-Encoding: chunked\r\n\r\n", b"zz\r\n"]),
        "bad length": Nonsense("bad length", [head + b"\r\nContent-Length: -7\r\n\r\n", body]),
        "two lengths": Nonsense("two lengths", [head + b"\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"]),
        "huge head": Nonsense("huge head", [head + b"\r\nA: " + b"a" * 100_000 + b"\r\n\r\n"], leaves=True),
        "many heads": Nonsense("many heads", [head + b"\r\nA: b" * 3000 + b"\r\n\r\n"], leaves=True),
    }
    return choose.choice(list(odd.values()))


def make_nonsense(choose: random.Random, pair: dict[str, str], text: str = "seven") -> Nonsense:
    """A request most likely to be refused."""
    name, body = make_body(choose, pair, text)
    kind = _CONTENT_TYPES[choose.choice(KINDS)]
    method = choose.choice(["POST"] * 60 + ["PUT", "GET", "DELETE", "HEAD", "OPTIONS", "BREW"])
    path = choose.choice(
        ["/translate"] * 30 + ["/detect"] * 9 + ["/languages", "/metrics", "/docs", "/..%2f..%2fetc/passwd", "*"]
    )
    head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Type: {kind}".encode("latin-1")
    if choose.random() < 0.2:
        return _send_strangely(choose, name, head, body)
    return Nonsense(name, [head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body])


async def send(port: int, nonsense: Nonsense) -> Answer | None:
    """Sends nonsense and returns the answer; None where the server closed the connection instead, or nobody waits."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        for number, part in enumerate(nonsense.parts):
            await asyncio.sleep(0.05 if number else 0.0)
            writer.write(part)
            await writer.drain()
        if nonsense.leaves:
            return None
        is_head = nonsense.parts[0].startswith(b"HEAD")
        return await (read_head(reader) if is_head else read_answer(reader))
    except (EOFError, ConnectionError):
        return None
    finally:
        await close(writer)


async def read_head(reader: asyncio.StreamReader) -> Answer:
    """An answer without its body, which HEAD does not get."""
    head = await reader.readuntil(b"\r\n\r\n")
    return Answer(int(head.split()[1]), {}, b"")


async def send_nonsense(arguments: CheckArguments, port: int, pair: dict[str, str]) -> tuple[Counter[str], list[str]]:
    """Sends all of the nonsense; returns how often each answer came, and what was wrong."""
    choose = random.Random(arguments.seed)
    counts: Counter[str] = Counter()
    problems: list[str] = []
    (expected,) = await ask_all(port, [make_request("/translate", {"q": arguments.text, **pair})], 1)
    remaining = iter(range(arguments.num_nonsense))

    async def check_good(connection: Connection) -> None:
        answer = await connection.ask(make_request("/translate", {"q": arguments.text, **pair}))
        if answer.status == 503 and "retry-after" in answer.headers:
            return
        if answer.body != expected.body:
            problems.append(f"a good request got {answer.status} {answer.body[:80]!r}")

    async def run() -> None:
        connection = Connection(port)
        for number in remaining:
            nonsense = make_nonsense(choose, pair, arguments.text)
            try:
                async with asyncio.timeout(arguments.patience):
                    answer = await send(port, nonsense)
                    if number % 10 == 0:
                        await check_good(connection)
            except (TimeoutError, OSError, EOFError, ValueError) as error:
                problems.append(f"{nonsense.name}: {type(error).__name__} {error}")
                continue
            counts[str(answer.status) if answer else "left" if nonsense.leaves else "closed"] += 1
            refuses = answer and (answer.status == 501 or (answer.status == 503 and "retry-after" in answer.headers))
            if answer and answer.status >= 500 and not refuses:
                problems.append(f"{nonsense.name}: {answer.status} {answer.body[:80]!r}")
        await connection.close()

    await asyncio.gather(*(run() for _ in range(arguments.num_clients)))
    return counts, problems


def ask_small_things(arguments: CheckArguments, server: ServerProcess, pair: dict[str, str]) -> tuple[int, list[float]]:
    """Sends the small requests; returns how many were answered well, and the megabytes after every tenth of them."""
    request = make_request("/translate", {"q": arguments.text, **pair})
    start, done = time.monotonic(), 0
    megabytes: list[float] = []
    for part in range(10):
        count = arguments.num_small * (part + 1) // 10 - arguments.num_small * part // 10
        if time.monotonic() - start > arguments.max_seconds:
            break
        answers = asyncio.run(ask_all(server.port, [request] * count, arguments.num_clients))
        done += sum(answer.status == 200 for answer in answers)
        megabytes.append(server.megabytes)
        print(f"{done} small requests: {megabytes[-1]:.1f} MB", flush=True)
    return done, megabytes


def check(arguments: CheckArguments) -> list[str]:
    """Does all of it, prints what came out, and returns what was wrong."""
    with ServerProcess(["--model_name_or_path", arguments.model_name_or_path, "--engine", arguments.engine]) as server:
        request = f"GET /languages HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()
        (answer,) = asyncio.run(ask_all(server.port, [request], 1))
        first = next(each for each in json.loads(answer.body) if each["targets"])
        pair = {"source": first["code"], "target": first["targets"][0]}
        start = time.monotonic()
        counts, problems = asyncio.run(send_nonsense(arguments, server.port, pair))
        print(f"{arguments.num_nonsense} requests of nonsense in {time.monotonic() - start:.0f} s:")
        print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())), flush=True)
        done, megabytes = ask_small_things(arguments, server, pair)
        if len(megabytes) == 10 and done != arguments.num_small:
            problems.append(f"{arguments.num_small - done} small requests were not answered with 200")
        grown = max(megabytes) - megabytes[0]
        print(f"memory after the first tenth: {megabytes[0]:.1f} MB, and {grown:.1f} MB more at most since then")
        if grown > arguments.max_growth:
            problems.append(f"memory grew by {grown:.1f} MB, more than {arguments.max_growth:g}")
        if status := server.stop():
            problems.append(f"the server ended with status {status}")
        problems += [line.rstrip() for line in server.log if "Traceback" in line or "ERROR" in line]
    return problems


make_parser = partial(make_argument_parser, CheckArguments, __doc__)


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments (`argv`, else the command line's), ask, and fail if something was wrong."""
    parser = make_parser()
    try:
        (arguments,) = parser.parse_args_into_dataclasses(args=argv)
        problems = check(arguments)
    except ValueError as error:
        parser.error(str(error))
    for problem, count in Counter(problems).most_common(20):
        print(f"WRONG ({count} times): {problem}")
    if problems:
        sys.exit(1)
    print("No request was left unanswered, and none made the server fail.")


if __name__ == "__main__":
    main()
