"""The promises of conftest.py."""

import asyncio
import socket
import urllib.request
from pathlib import Path

import hypothesis
import pytest
import torch
from conftest import RunPython
from hypothesis import strategies as st

_ELSEWHERE = "192.0.2.1"  # reserved for documentation: nobody answers there
_BLOCKED = "tests may not use the network, but something wants to reach"


def test_other_machines_are_refused() -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as connection, pytest.raises(RuntimeError, match=_BLOCKED):
        connection.connect(("2001:db8::1", 443))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as connection, pytest.raises(RuntimeError, match=_BLOCKED):
        connection.sendto(b"hello", (_ELSEWHERE, 53))
    for reach in (
        lambda: socket.getaddrinfo("host.invalid", 443),
        lambda: socket.gethostbyname("host.invalid"),
        lambda: urllib.request.urlopen(f"http://{_ELSEWHERE}/", timeout=1),
        lambda: asyncio.run(asyncio.open_connection(_ELSEWHERE, 443)),
    ):
        with pytest.raises(RuntimeError, match=_BLOCKED):
            reach()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_this_machine_can_be_reached(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection((host, server.getsockname()[1]), timeout=10) as connection:
            connection.sendall(b"hello")
        accepted, _ = server.accept()
        with accepted:
            assert accepted.recv(5) == b"hello"


def test_processes_started_by_tests_are_blocked_too(run_python: RunPython) -> None:
    program = f"import socket; socket.create_connection(({_ELSEWHERE!r}, 443), timeout=1)"
    assert _BLOCKED in run_python("-c", program, returncode=1).stderr


def test_home_and_caches_lie_outside_the_users_home(run_python: RunPython) -> None:
    from huggingface_hub import constants

    scratch = Path.home().parent
    assert scratch.name.startswith("vanilla-transformer-tests-")
    assert Path(constants.HF_HUB_CACHE).is_relative_to(scratch)
    assert constants.HF_HUB_OFFLINE
    assert run_python("-c", "import pathlib; print(pathlib.Path.home())").stdout.strip() == str(Path.home())


@pytest.mark.parametrize("repetition", [1, 2])
def test_each_test_starts_from_the_same_seed(repetition: int) -> None:
    drawn = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3)), f"repetition {repetition} drew something else"


def test_each_example_of_hypothesis_draws_the_same_tensors() -> None:
    drawn = []

    @hypothesis.given(st.integers())
    @hypothesis.settings(max_examples=5, database=None)
    def draw(_: int) -> None:
        drawn.append(torch.rand(3))

    draw()
    assert len(drawn) > 1
    assert all(torch.equal(tensor, drawn[0]) for tensor in drawn)
