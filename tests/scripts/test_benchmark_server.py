"""benchmark_server.py with a tiny model: all figures are there, and what is wrong with a server is seen in them."""

import asyncio
import importlib
import json
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest
from letters import TOKENIZER, make_letters_model

for _name in ("fastapi", "fastapi_offline", "uvicorn", "prometheus_client", "python_multipart", "sentencex", "babel"):
    pytest.importorskip(_name, reason=f"the server needs {_name}: pip install 'vanilla-transformer[serve]'")

benchmark: Any = importlib.import_module("benchmark_server")
tools: Any = importlib.import_module("server_tools")


def start_thread(serve: Any, *arguments: Any) -> tuple[Any, threading.Thread]:
    connection, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=serve, args=(*arguments, theirs), daemon=True)
    thread.start()
    return connection, thread


def test_all_is_measured_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "start_process", start_thread)
    make_letters_model(langs=["en", "de"]).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "test.txt").write_text("abc\n\nhgfe\nd\n", encoding="utf-8")
    options = ["--test_file", str(tmp_path / "test.txt"), "--max_lines", "20", "--rounds", "1", "--clients", "4"]
    options += ["--singles", "3", "--seconds", "1", "--max_queue", "50", "--output_file", str(tmp_path / "out.json")]
    benchmark.main(["--model_name_or_path", str(tmp_path), *options])
    results = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"]
    served, bare = results["single_milliseconds"]
    assert results["latency_ratio"] == served / bare
    ((clients, file, few),) = results["throughput"]
    assert (results["throughput_ratio"], results["server_ratio"]) == (clients / file, clients / few)
    for name in ("half_load", "twice_the_load"):
        found = results[name]
        assert found["requests"] == found["answered"] + found["refused"]
        assert found["refused"] == found["refused_with_retry_after"]
        assert found["answered"] > 0
    assert "| one client's median to the model's | " in capsys.readouterr().out


def test_answers_that_are_none_are_not_measured() -> None:
    good, busy = tools.Answer(200, {}, b""), tools.Answer(503, {"retry-after": "1"}, b"")
    benchmark.check_answers([good, good], 2)
    with pytest.raises(RuntimeError, match=r"1 of 2 requests failed: \[503\]"):
        benchmark.check_answers([good, busy], 2)


def test_a_load_is_described_by_what_became_of_it() -> None:
    good, busy = tools.Answer(200, {}, b""), tools.Answer(503, {"retry-after": "1"}, b"")
    found = [(number / 100, good) for number in range(100)] + [(9.0, busy), (9.0, tools.Answer(503, {}, b""))]
    described = benchmark.describe_load([*found, (0.0, tools.Answer(500, {}, b""))])
    expected = {"requests": 103, "answered": 100, "refused": 2, "refused_with_retry_after": 1, "other": 1}
    assert {name: described[name] for name in expected} == expected
    assert described["median_milliseconds"] == pytest.approx(495)
    assert described["p95_milliseconds"] == pytest.approx(950)


def test_a_load_does_not_wait_for_answers() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(2**16):
            arrived.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.5)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async def run() -> list[tuple[float, Any]]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await benchmark.load(port, [tools.make_request("/", {})], 50.0, 1.0)

    arrived: list[float] = []
    found = asyncio.run(run())
    assert 25 < len(found) == len(arrived) < 90
    assert all(seconds >= 0.5 for seconds, _ in found)
