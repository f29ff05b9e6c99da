"""Several processes that translate for one server: each has the model, and its share of the threads."""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, NamedTuple

from transformers.utils import logging as transformers_logging

from .batches import Acceptance, BadTextError, BatchingTranslator, Job, LostError, NotReadyError

logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 60.0  # seconds between two tries to load the model

# Loads a model: given what wants to know of batches, its pairs of languages with their prefixes, and what translates.
Directions = dict[tuple[str, str], str]
Load = Callable[[Callable[[int, int], None]], tuple[Directions, BatchingTranslator]]


class _Part(NamedTuple):
    """Sentences of a job that one process translates."""

    job: Job
    first: int
    size: int


@dataclass
class _Worker:
    """A process, seen from outside."""

    process: BaseProcess
    connection: Connection
    parts: dict[int, _Part] = field(default_factory=dict)  # by number, until they are answered
    is_ready: bool = False

    @property
    def num_pending(self) -> int:
        return sum(part.size for part in self.parts.values())


def work(connection: Connection, load: Load, num_processes: int, level: int, shows_bars: bool) -> None:
    """What a process does: it answers parts of jobs by their numbers until the connection ends."""
    # Ctrl-C, and what systemd sends to all processes, are for the server, which then ends its processes in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    import torch

    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("vanilla_transformer").setLevel(level)
    if not shows_bars:
        transformers_logging.disable_progress_bar()

    torch.set_num_threads(max(1, torch.get_num_threads() // num_processes))
    # In a thread of its own, so that this one always takes what comes: neither side may wait for the other to read.
    messages: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
    sender = threading.Thread(target=_send_all, args=(connection, messages))
    sender.start()
    try:
        _answer_all(connection, load, lambda *message: messages.put(message))
    finally:
        messages.put(None)
        sender.join()


def _send_all(connection: Connection, messages: "SimpleQueue[tuple[Any, ...] | None]") -> None:
    with suppress(OSError):  # if the server has gone
        while (message := messages.get()) is not None:
            connection.send(message)


def _answer_all(connection: Connection, load: Load, send: Callable[..., None]) -> None:
    try:
        directions, translator = load(partial(send, "batch"))
    except Exception as error:
        is_users = isinstance(error, ValueError | OSError)
        send("failed", str(error) if is_users else f"{type(error).__name__}: {error}", is_users)
        return
    send("ready", directions)

    def answer(number: int, future: "Future[list[list[str]]]") -> None:
        error = future.exception()
        if error is None:
            send("found", number, future.result())
        else:
            if isinstance(error, LostError):
                os._exit(1)  # by which the server knows that another process is needed
            send("refused" if isinstance(error, BadTextError) else "error", number, str(error))

    try:
        while (message := connection.recv()) is not None:
            number, *asked = message
            translator.submit(*asked).add_done_callback(partial(answer, number))
    except EOFError:
        logger.error("The server has gone.")
    finally:
        translator.stop()


class TranslatingProcesses(Acceptance):
    """Translates for many clients at once, as `BatchingTranslator` does, in several processes.

    Sentences go to the process that has least to do. If one ends unasked, its sentences fail, and another is started;
    if that one cannot load the model, one more after a pause, and so on.

    Args:
        load: What each process calls to load the model.
        num_processes: How many.
        max_queue: The most sentences that are accepted and not yet translated.

    Attributes:
        directions: The model's pairs of languages, and what it wants before a source of each.
        on_batch: Is told of each batch: how many sentences and source tokens it has.

    Raises:
        ValueError: If the model cannot be loaded.
    """

    def __init__(self, load: Load, *, num_processes: int, max_queue: int) -> None:
        super().__init__(max_queue)
        self.load = load
        self.on_batch: Callable[[int, int], None] = lambda sentences, tokens: None
        self.directions: Directions = {}
        self._numbers = count()
        self._has_started = False
        self._failure: tuple[str, bool] | None = None  # to start
        self._workers = [self._start(num_processes, index) for index in range(num_processes)]
        self._threads = [threading.Thread(target=self._listen, args=(index,)) for index in range(num_processes)]
        for thread in self._threads:
            thread.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._failure or all(worker.is_ready for worker in self._workers))
                self._has_started = not self._failure
        except BaseException:  # Ctrl-C
            self.stop()
            raise
        if self._failure:
            self.stop()
            message, is_users = self._failure
            raise ValueError(message) if is_users else RuntimeError(message)

    def _start(self, num_processes: int, index: int) -> _Worker:
        # One process tells for all what there is to tell of a model.
        level = logging.getLogger("vanilla_transformer").getEffectiveLevel() if index == 0 else logging.ERROR
        shows_bars = index == 0 and transformers_logging.is_progress_bar_enabled()
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, self.load, num_processes, level, shows_bars), daemon=True)
        process.start()
        theirs.close()  # so that the end of the process is the end of the connection
        return _Worker(process, connection)

    @property
    def is_ready(self) -> bool:
        """Whether any process can translate."""
        return any(worker.is_ready for worker in self._workers)

    def _take(self, job: Job) -> None:
        ready = [worker for worker in self._workers if worker.is_ready]
        if not ready:
            raise NotReadyError("No process is ready to translate.")
        size = -(-len(job.sentences) // len(ready))
        for first in range(0, len(job.sentences), size):
            sentences = job.sentences[first : first + size]
            worker, number = min(ready, key=lambda each: each.num_pending), next(self._numbers)
            worker.parts[number] = _Part(job, first, len(sentences))
            with suppress(OSError):  # if the process has just ended, whoever listens to it knows what to do
                worker.connection.send((number, sentences, job.source_prefix))

    def _listen(self, index: int) -> None:
        """Takes what a process says, and starts another in its place if it ends too early."""
        pause = 0.0
        while True:
            worker = self._workers[index]
            try:
                while True:
                    self._read(worker, *worker.connection.recv())
            except (EOFError, OSError):
                pause = 0.0 if worker.is_ready else min(2 * pause + 1, _LONGEST_PAUSE)
                self._bury(worker)
            with self._changed:
                if self._stopping or (self._failure and not self._has_started):
                    return
                logger.error("A process that translates has ended (%s); another is started.", worker.process.exitcode)
                if self._changed.wait_for(lambda: self._stopping, pause):
                    return
                self._workers[index] = self._start(len(self._workers), index)

    def _read(self, worker: _Worker, kind: str, *message: Any) -> None:
        if kind == "batch":
            self.on_batch(*message)
        elif kind in ("ready", "failed"):
            with self._changed:
                if kind == "ready":
                    (self.directions,), worker.is_ready = message, True
                    if self._has_started:
                        logger.info("Process %d is ready to translate.", worker.process.pid)
                elif self._has_started:
                    logger.error("The model cannot be loaded again: %s", message[0])
                else:
                    self._failure = message
                self._changed.notify_all()
        else:
            number, found = message
            with self._changed:
                part = worker.parts.pop(number)
            if kind == "found":
                self._finish(part, found)
            else:
                self._fail(part, BadTextError(found) if kind == "refused" else RuntimeError(found))

    def _finish(self, part: _Part, translations: list[list[str]]) -> None:
        job = part.job
        with self._changed:
            self.pending -= part.size
            job.translations[part.first : part.first + part.size] = translations
            job.missing -= part.size
            is_whole = not job.missing
        if is_whole:
            job.future.set_result(job.translations)

    def _fail(self, part: _Part, error: Exception) -> None:
        with self._changed:
            self.pending -= part.size
            if not part.job.future.done():
                part.job.future.set_exception(error)

    def _bury(self, worker: _Worker) -> None:
        with self._changed:
            worker.is_ready = False
            parts = [*worker.parts.values()]
            worker.parts.clear()
        worker.connection.close()
        worker.process.join()
        for part in parts:
            self._fail(part, LostError("The process that translated has ended."))

    def stop(self) -> None:
        """Accepts nothing more, and returns when all that was accepted is translated."""
        with self._changed:
            if not self._stopping:
                self._stopping = True
                self._changed.notify_all()
                for worker in self._workers:
                    with suppress(OSError):
                        worker.connection.send(None)
        for thread in self._threads:
            thread.join()
