"""check_server.py with a real server in a process of its own, and with servers that do everything wrong."""

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest
from letters import TOKENIZER, make_letters_model

for _name in ("fastapi", "fastapi_offline", "uvicorn", "prometheus_client", "python_multipart", "sentencex", "babel"):
    pytest.importorskip(_name, reason=f"the server needs {_name}: pip install 'vanilla-transformer[serve]'")

check_server: Any = importlib.import_module("check_server")


def test_a_server_survives_nonsense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_letters_model(langs=["en", "de"]).save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    options = ["--num_nonsense", "400", "--num_small", "100", "--text", "abc", "--num_clients", "4"]
    check_server.main(["--model_name_or_path", str(tmp_path), *options])
    output = capsys.readouterr().out
    assert "100 small requests: " in output
    for status in ("200: ", "400: ", "405: ", "413: ", "415: ", "left: "):
        assert status in output, output
    assert output.endswith("No request was left unanswered, and none made the server fail.\n")


GOOD = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("later", "problem"),
    [
        (b"HTTP/1.1 500 Oh\r\ncontent-length: 2\r\n\r\nno", ": 500 b'no'"),
        (b"HTTP/1.1 503 Oh\r\ncontent-length: 0\r\n\r\n", ": 503 b''"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]", "a good request got 200 b'[]'"),
        (b"nonsense\r\n\r\n", "ValueError The answer begins with 'nonsense'"),
        (b"HTTP/1.1 200 OK\r\n", "TimeoutError"),
    ],
)
def test_what_is_wrong_is_seen(later: bytes, problem: str, tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(2**20):
                answered.append(1)
                writer.write(GOOD if len(answered) == 1 else later)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def run() -> list[str]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            options = {"num_nonsense": 21, "num_clients": 1, "patience": 0.1}
            arguments = check_server.CheckArguments(str(tmp_path), **options)
            _, problems = await check_server.send_nonsense(arguments, port, {"source": "en", "target": "de"})
            return problems

    answered: list[int] = []
    found = asyncio.run(run())
    assert any(problem in each for each in found), found
