"""A server whose model is in several processes: who translates, who waits, and what happens when one of them dies."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from letters import TOKENIZER, make_letters_model

# ruff: noqa: E402 (what the server needs may be missing)
for _name in ("fastapi", "fastapi_offline", "uvicorn", "prometheus_client", "python_multipart", "sentencex", "babel"):
    pytest.importorskip(_name, reason=f"the server needs {_name}: pip install 'vanilla-transformer[serve,test]'")
pytest.importorskip("libretranslatepy")

from libretranslatepy import LibreTranslateAPI
from starlette.testclient import TestClient

from vanilla_transformer.apps.batches import BadTextError, Direction, QueueFullError, StoppedError
from vanilla_transformer.apps.server import Metrics, make_app
from vanilla_transformer.apps.workers import TranslatingProcesses
from vanilla_transformer.commands.serve import ServingArguments, load_translator
from vanilla_transformer.inference.loading import load_model_and_tokenizer
from vanilla_transformer.inference.translate import translate

TEXTS = [first + second + third for first in "abcd" for second in "efgh" for third in "abcd"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained model."""
    path = tmp_path_factory.mktemp("model")
    make_letters_model(langs=["en", "de"]).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return str(path)


def start(folder: str, num_processes: int = 2, **options: Any) -> TranslatingProcesses:
    arguments = ServingArguments([folder], **options)  # type: ignore[arg-type]
    (one,) = arguments.divide()
    return TranslatingProcesses(partial(load_translator, arguments, one), num_processes=num_processes, max_queue=64)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def running(folder: str) -> Iterator[TranslatingProcesses]:
    translator = start(folder, max_source_length=20)
    yield translator
    translator.stop()


@pytest.fixture(scope="module")
def expected(folder: str) -> list[list[str]]:
    model, tokenizer = load_model_and_tokenizer(folder)
    return [[text] for text in translate(model, tokenizer, TEXTS, progress=False)]


def test_a_job_is_divided_and_put_together(running: TranslatingProcesses, expected: list[list[str]]) -> None:
    batches: list[tuple[int, int]] = []
    running.on_batch = lambda sentences, tokens: batches.append((sentences, tokens))
    assert running.directions == {("en", "de"): ""}
    assert running.submit(TEXTS).result(60) == expected
    assert running.submit([]).result(0) == []
    assert running.submit(["", TEXTS[5], " "]).result(60) == [[""], expected[5], [""]]
    assert running.pending == 0
    assert sum(sentences for sentences, _ in batches) >= len(TEXTS)


def test_many_clients_get_their_own(running: TranslatingProcesses, expected: list[list[str]]) -> None:
    with ThreadPoolExecutor(16) as pool:
        found = pool.map(lambda text: running.submit([text]).result(60)[0], TEXTS)
        assert list(found) == expected
    assert all(not worker.parts for worker in running._workers)


def test_what_cannot_be_accepted_is_refused(running: TranslatingProcesses) -> None:
    with pytest.raises(BadTextError, match="65 sentences; it must have at most 64"):
        running.submit(["a"] * 65)
    with pytest.raises(BadTextError, match="A sentence has 42 tokens; it must have at most 20"):
        running.submit(["a", "b" * 40, "c"]).result(60)
    wait_until(lambda: running.pending == 0)  # the other process still had one of those sentences
    waiting = running.submit(TEXTS)
    with pytest.raises(QueueFullError):
        running.submit(TEXTS)
    waiting.result(60)
    assert running.pending == 0


def test_a_process_that_dies_fails_its_own_sentences_and_another_takes_its_place(
    running: TranslatingProcesses, expected: list[list[str]]
) -> None:
    first, second = running._workers
    os.kill(first.process.pid or 0, signal.SIGSTOP)  # so that it has something to do when it dies
    lost: list[Any] = []
    found: list[Any] = []
    for text in TEXTS[:8]:
        is_first = first.num_pending <= second.num_pending
        (lost if is_first else found).append(running.submit([text]))
    assert lost
    first.process.kill()
    for future in lost:
        with pytest.raises(RuntimeError, match="has ended"):
            future.result(60)
    for future in found:
        assert future.result(60)
    wait_until(lambda: all(worker.is_ready for worker in running._workers))
    assert running._workers[0].process.pid != first.process.pid
    assert running._workers[1] is second
    assert running.submit(TEXTS).result(60) == expected
    assert running.pending == 0


def test_a_model_that_cannot_be_loaded_again_is_tried_again(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    moving, away = tmp_path / "model", tmp_path / "away"
    shutil.copytree(folder, moving)
    translator = start(str(moving), num_processes=1)
    try:
        assert translator.is_ready
        moving.rename(away)
        translator._workers[0].process.kill()
        wait_until(lambda: not translator.is_ready)
        with pytest.raises(QueueFullError, match="No process is ready"):
            translator.submit(["a"])
        answer = TestClient(make_app({("en", "de"): Direction(translator)}, Metrics())).get("/health")
        assert (answer.status_code, answer.json()) == (503, {"status": "failed", "languages": ["en to de"]})
        wait_until(lambda: "cannot be loaded again" in caplog.text)
        away.rename(moving)
        wait_until(lambda: translator.is_ready)
        assert translator.submit(["a"]).result(60)
    finally:
        translator.stop()


def test_what_was_accepted_is_translated_before_the_end(folder: str, expected: list[list[str]]) -> None:
    translator = start(folder)
    future = translator.submit(TEXTS)
    translator.stop()
    assert future.result(0) == expected
    assert [worker.process.exitcode for worker in translator._workers] == [0, 0]
    with pytest.raises(StoppedError):
        translator.submit(["a"])


def test_a_model_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path / "nothing")):
        start(str(tmp_path / "nothing"), num_processes=1)


def test_the_command_ends_in_order(folder: str, expected: list[list[str]]) -> None:
    """SIGTERM to all processes, as systemd sends it: those of the model wait for the server to end them."""
    options = ["--model_name_or_path", folder, "--workers", "2", "--port", "0"]
    command = [sys.executable, "-m", "vanilla_transformer", "serve", *options]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, **pipes)
    try:
        assert process.stdout is not None
        client = LibreTranslateAPI(process.stdout.readline().split()[4])
        assert [[client.translate(text, "en", "de")] for text in TEXTS[:4]] == expected[:4]
        with ThreadPoolExecutor(16) as pool:
            asked = [pool.submit(client.translate, text, "en", "de") for text in TEXTS[:16]]
            wait([asked[0]])
            os.killpg(process.pid, signal.SIGTERM)
            rest, errors = process.communicate(timeout=60)
        assert (process.returncode, rest) == (0, "The server has ended; what it accepted is answered.\n"), errors
        # Others came too late for a server that takes no more. The system resets a connection that nobody has read from
        # when the socket is closed.
        answers = [future.exception() or future.result() for future in asked]
        assert all(
            answer == text or any(reason in str(answer) for reason in ("503", "refused", "reset by peer"))
            for answer, [text] in zip(answers, expected, strict=False)
        )
        assert errors.count("The engine for") == 1, "each process tells the same"
    finally:
        process.kill()
        process.communicate()
