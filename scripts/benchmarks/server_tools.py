"""What the scripts that try the server share: the server as a process, and HTTP from many clients at once.

All of it stays on this machine: the server listens at 127.0.0.1, and nothing else is asked.
"""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

HOST = "127.0.0.1"


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]  # names in small letters
    body: bytes


class ServerProcess:
    """`vanilla-transformer serve` in a process of its own, until the end of a `with` block."""

    def __init__(self, options: Sequence[str]) -> None:
        command = [sys.executable, "-m", "vanilla_transformer", "serve", "--host", HOST, "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._output = cast(IO[str], self.process.stdout)
        # Read all the while, or the server would wait once the pipe is full.
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        line = self._output.readline()
        if not line:
            self.stop()
            raise ValueError(f"The server did not start: {''.join(self.log[-5:])}")
        self.port = int(line.split()[4].rpartition(":")[2])

    def _read_log(self) -> None:
        errors: Any = self.process.stderr
        with errors:
            self.log.extend(errors)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, seconds: float = 60.0) -> int:
        """Ends it by SIGTERM, or if that takes too long by force; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self._output.close()
        self._reader.join()
        return self.process.wait()

    @property
    def megabytes(self) -> float:
        """What it and its own processes hold in memory."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        texts = [Path(f"/proc/{each}/status").read_text() for each in (pid, *children)]
        lines = [line for text in texts for line in text.splitlines()]
        return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def make_request(path: str, fields: Any) -> bytes:
    """A request with JSON in it."""
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode() + body


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """One answer; an EOFError (IncompleteReadError) or ValueError says that none came."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError(f"The answer begins with {first[:50]!r}.")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Answer(int(rest[:3]), headers, await reader.readexactly(int(headers.get("content-length", 0))))


async def close(writer: asyncio.StreamWriter) -> None:
    """Closes a connection, whatever has become of it."""
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


class Connection:
    """A connection that is kept, and made anew where the server has closed it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> Answer:
        """Sends a request and waits for its answer."""
        is_kept = self._streams is not None
        if self._streams is None:
            self._streams = await asyncio.open_connection(HOST, self.port)
        reader, writer = self._streams
        try:
            writer.write(request)
            answer = await read_answer(reader)
        except BaseException as error:
            await self.close()
            # A server may close a connection that nobody has used for some time.
            if is_kept and (isinstance(error, ConnectionError) or getattr(error, "partial", None) == b""):
                return await self.ask(request)
            raise
        if answer.headers.get("connection", "").lower() == "close":
            await self.close()
        return answer

    async def close(self) -> None:
        """Closes the connection, if there is one."""
        if self._streams is not None:
            await close(self._streams[1])
            self._streams = None


async def ask_all(port: int, requests: Iterable[bytes], num_clients: int) -> list[Answer]:
    """Asks everything, from so many clients that each wait for an answer before they ask again; in no order."""
    remaining = iter(requests)
    answers: list[Answer] = []

    async def run() -> None:
        connection = Connection(port)
        for request in remaining:
            answers.append(await connection.ask(request))
        await connection.close()

    await asyncio.gather(*(run() for _ in range(num_clients)))
    return answers
