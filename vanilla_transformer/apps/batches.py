"""Sentences of many clients, translated together: one thread a model, and a queue that does not grow beyond a bound."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from vanilla_transformer.inference.continuous import ContinuousBatch
from vanilla_transformer.inference.translate import Translation, Translator, length_limit, one_line
from vanilla_transformer.model.pipeline_vanilla_transformer import map_by_length

logger = logging.getLogger(__name__)

_WORTH_JOINING = 8  # how many times fewer sentences than the batch has may join it without waiting


class QueueFullError(Exception):
    """There is no place for these sentences now."""


class NotReadyError(QueueFullError):
    """Nothing translates now; it may again after a while."""


class LostError(RuntimeError):
    """What translated the sentences has ended; they may be sent again."""


class StoppedError(Exception):
    """The server is ending and takes no more."""


class BadTextError(ValueError):
    """A text that cannot be translated, whenever it is sent."""


@dataclass(eq=False)
class Job:
    """The sentences of one request, and their translations as they come."""

    sentences: list[str]
    source_prefix: str = ""  # what the model wants before each
    future: "Future[list[list[str]]]" = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.translations: list[list[str]] = [[]] * len(self.sentences)
        self.missing = len(self.sentences)


@dataclass(eq=False)
class _Sentence:
    job: Job
    position: int
    token_ids: list[int]
    since: float  # when it came, by the monotonic clock


class Acceptance:
    """Accepts sentences to translate while fewer than `max_queue` are pending; the same for threads and processes."""

    def __init__(self, max_queue: int) -> None:
        self.max_queue = max_queue
        self.pending = 0  # sentences that are accepted and not yet translated
        self._changed = threading.Condition()
        self._stopping = False

    @property
    def is_ready(self) -> bool:
        """Whether what is accepted will be translated."""
        return True

    def submit(self, sentences: Sequence[str], source_prefix: str = "") -> "Future[list[list[str]]]":
        """Accepts all of the sentences or none; each one's translations, best first, come in the same order."""
        job = Job(list(sentences), source_prefix)
        if not job.sentences:
            job.future.set_result([])
            return job.future
        if len(job.sentences) > self.max_queue:
            raise BadTextError(
                f"The request has {len(job.sentences)} sentences; it must have at most {self.max_queue}."
            )
        with self._changed:
            if self._stopping:
                raise StoppedError("The server is ending.")
            if self.pending + len(job.sentences) > self.max_queue:
                raise QueueFullError(f"{self.pending} sentences are waiting, of at most {self.max_queue}.")
            self._take(job)
            self.pending += len(job.sentences)
        return job.future

    def _take(self, job: Job) -> None:
        """Takes what is accepted, while the lock is held."""
        raise NotImplementedError

    def stop(self) -> None:
        """Accepts nothing more, and returns when all that was accepted is translated."""
        raise NotImplementedError

    def _release(self, count: int) -> None:
        with self._changed:
            self.pending -= count


class Direction:
    """One of the pairs of languages of a model, whose sentences are translated together with those of all others."""

    def __init__(self, translator: Acceptance, source_prefix: str = "") -> None:
        self.translator = translator
        self.source_prefix = source_prefix  # tells the model the languages
        self.pending = 0  # sentences of this pair
        self._lock = threading.Lock()

    @property
    def is_ready(self) -> bool:
        """Whether what is accepted will be translated."""
        return self.translator.is_ready

    def submit(self, sentences: Sequence[str]) -> "Future[list[list[str]]]":
        """As `Acceptance.submit`."""
        future = self.translator.submit(sentences, self.source_prefix)
        self._count(len(sentences))
        future.add_done_callback(lambda _: self._count(-len(sentences)))
        return future

    def _count(self, number: int) -> None:
        with self._lock:
            self.pending += number

    def stop(self) -> None:
        """Stops the model, with all of its pairs."""
        self.translator.stop()


class BatchingTranslator(Acceptance):
    """Translates for many clients at once, in a thread of its own.

    Where `ContinuousBatch` can be had, sentences join a batch as they come, and are answered as each of them ends.
    Otherwise a batch has the sentence that waits longest and those of like length, as many as `translator` puts into
    one. While nothing is being translated, a sentence waits for others, for at most `max_wait` seconds, and no longer
    than until as many requests have come as were answered last: one client alone never waits.

    Args:
        translator: What encodes and translates; only this thread uses it.
        max_queue: The most sentences that are accepted and not yet translated.
        max_wait: In seconds.
        max_tokens: The most tokens of a sentence, special ones included.
        on_batch: Is told of each batch: how many sentences and source tokens it has.
    """

    def __init__(
        self,
        translator: Translator,
        *,
        max_queue: int,
        max_wait: float,
        max_tokens: int,
        on_batch: Callable[[int, int], None] = lambda sentences, tokens: None,
    ) -> None:
        super().__init__(max_queue)
        self.translator = translator
        self.max_wait = max_wait
        self.max_tokens = max_tokens
        self.on_batch = on_batch
        self._new: deque[Job] = deque()
        self._waiting: list[_Sentence] = []  # oldest first; the thread's own
        self._answered = 0  # requests, with the last batch
        self._has_failed = False
        self._continuous: ContinuousBatch[_Sentence] | None = None
        with suppress(ValueError):
            self._continuous = ContinuousBatch(translator)
        self._thread = threading.Thread(target=self._work, name="translating")
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether what is accepted will be translated."""
        return not self._has_failed

    def _take(self, job: Job) -> None:
        if self._has_failed:
            raise NotReadyError("The model can translate no more.")
        self._new.append(job)
        self._changed.notify()

    def stop(self) -> None:
        """Accepts nothing more, and returns when all that was accepted is translated."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        try:
            self._translate_all()
        except Exception:  # a device that is lost, say: nothing is translated any more, and nobody may wait for it
            logger.exception("The model can translate no more.")
            with self._changed:
                self._has_failed = True
                sentences = [*self._waiting, *(self._continuous.keys if self._continuous is not None else [])]
                jobs = dict.fromkeys([*self._new, *(sentence.job for sentence in sentences)])
            for job in jobs:
                if not job.future.done():
                    self._release(job.missing)
                    job.future.set_exception(LostError("The model can translate no more."))

    def _translate_all(self) -> None:
        while True:
            jobs = self._take_jobs()
            if not jobs and not self._waiting and not self._continuous:  # nor is anything in the batch
                return
            for job in jobs:
                self._encode(job)
            if self._continuous is not None:
                self._go_on(self._continuous)
            elif self._waiting:
                self._translate(self._take_batch())

    def _go_on(self, batch: ContinuousBatch[_Sentence]) -> None:
        """Lets sentences join the batch, and finds one more token of each that is in it."""
        joining = self._find_joining(batch)
        found: Mapping[_Sentence, list[Translation]] = {}
        try:
            if joining:
                batch.add({sentence: sentence.token_ids for sentence in joining})
            if batch:
                found = batch.step()
        except Exception as error:
            failed = list(dict.fromkeys([*batch.keys, *joining]))
            others, self._waiting = self._waiting, [*failed, *self._waiting]  # nobody is lost if the next line fails
            batch.clear()
            self._waiting = others
            self._try_each(failed, error)
            return
        if joining:
            self.on_batch(len(joining), sum(len(sentence.token_ids) for sentence in joining))
        if found:
            self._deliver(found)

    def _find_joining(self, batch: ContinuousBatch[_Sentence]) -> list[_Sentence]:
        """Those that have waited longest; a few wait for others, so that an encoder's run serves more than one."""
        size, count = len(batch), 0
        longest = max((len(sentence.token_ids) for sentence in batch.keys), default=0)
        for sentence in self._waiting:
            longest = max(longest, len(sentence.token_ids))
            if size + count >= self.translator.fits(longest):
                break
            count += 1
        joining = self._waiting[:count]
        is_early = joining and time.monotonic() - joining[0].since < self.max_wait
        if is_early and len(joining) * _WORTH_JOINING < size:
            return []
        self._waiting = self._waiting[len(joining) :]
        return joining

    def _take_jobs(self) -> list[Job]:
        """What has come; waits for something while there is nothing to do."""
        with self._changed:
            if not self._waiting and not self._continuous:
                self._changed.wait_for(lambda: self._new or self._stopping)
                # Those who have just been answered may well ask again: their sentences are better together.
                end = time.monotonic() + self.max_wait
                while len(self._new) < self._answered and not self._stopping and (left := end - time.monotonic()) > 0:
                    self._changed.wait(left)
            jobs = list(self._new)
            self._new.clear()
        return jobs

    def _encode(self, job: Job) -> None:
        try:
            encoded = self.translator.encode(job.sentences, 1, job.source_prefix)
            longest = max(map(len, encoded))
            if longest > self.max_tokens:
                raise BadTextError(f"A sentence has {longest} tokens; it must have at most {self.max_tokens}.")
        except Exception as error:
            self._fail(job, error)
            return
        now = time.monotonic()
        for position, token_ids in enumerate(encoded):
            if token_ids:
                self._waiting.append(_Sentence(job, position, token_ids, now))
            else:
                self._translate([_Sentence(job, position, token_ids, now)])

    def _take_batch(self) -> list[_Sentence]:
        """The batch that holds the oldest sentence: the first that is made of those that wait."""
        taken: list[_Sentence] = []
        remaining = iter(self._waiting)

        def read(count: int) -> list[tuple[int, _Sentence]]:
            return [(len(sentence.token_ids), sentence) for sentence in islice(remaining, count)]

        def take(batch: list[_Sentence]) -> list[_Sentence]:
            taken.extend(batch)
            return batch

        next(map_by_length(take, read, fits=self.translator.fits, window_size=len(self._waiting)))
        chosen = set(map(id, taken))
        self._waiting = [sentence for sentence in self._waiting if id(sentence) not in chosen]
        return taken

    def _translate(self, batch: list[_Sentence]) -> None:
        try:
            found = self.translator.run([sentence.token_ids for sentence in batch])
        except Exception as error:
            if len(batch) > 1:
                self._try_each(batch, error)
            elif not batch[0].job.future.done():
                logger.exception("A sentence could not be translated.")
                self._fail(batch[0].job, error)
            return
        self.on_batch(len(batch), sum(len(sentence.token_ids) for sentence in batch))
        self._deliver(dict(zip(batch, found, strict=True)))

    def _try_each(self, failed: list[_Sentence], error: Exception) -> None:
        """One client's sentence must not cost others theirs."""
        logger.warning("A batch failed (%s: %s); each of its sentences is tried.", type(error).__name__, error)
        for sentence in failed:
            self._translate([sentence])

    def _deliver(self, found: Mapping[_Sentence, list[Translation]]) -> None:
        self._answered = 0
        for sentence, translations in found.items():
            job, position = sentence.job, sentence.position
            if not job.future.done():
                job.translations[position] = [one_line(each.text) for each in translations]
                job.missing -= 1
                self._release(1)
                if not job.missing:
                    self._answered += 1
                    job.future.set_result(job.translations)

    def _fail(self, job: Job, error: Exception) -> None:
        self._waiting = [sentence for sentence in self._waiting if sentence.job is not job]
        self._release(job.missing)
        job.future.set_exception(error)


def find_max_tokens(model: Any, tokenizer: Any, given: int | None) -> int:
    """The most tokens of a sentence: what was given, or the least of what is known of model and tokenizer, or 1024.

    It is never more than the model has positions for.
    """
    wanted = given or min(1024, getattr(model.config, "max_position_embeddings", None) or 1024)
    return min(wanted, length_limit(tokenizer, given, model) or wanted)
