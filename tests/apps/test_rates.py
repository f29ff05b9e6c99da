"""Rates: how many requests are admitted, when the next one is, and how much memory that takes."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vanilla_transformer.apps.rates import RateLimiter, find_network


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(st.integers(1, 20), st.lists(st.floats(0, 90), min_size=1, max_size=80))
def test_no_minute_has_twice_as_many_and_waiting_helps(per_minute: int, pauses: list[float]) -> None:
    clock = Clock()
    limiter = RateLimiter(per_minute, clock=clock)
    admitted: list[float] = []
    for pause in pauses:
        clock.now += pause
        wait = limiter.admit("a")
        assert 0 <= wait <= 60 / per_minute + 1e-6
        if wait == 0:
            admitted.append(clock.now)
    assert all(sum(start <= time < start + 60 for time in admitted) <= 2 * per_minute for start in admitted)
    if wait := limiter.admit("a"):
        clock.now += wait / 2
        assert limiter.admit("a") > 0
        clock.now += wait / 2 + 1e-3
        assert limiter.admit("a") == 0


def test_a_client_has_its_requests_at_once_and_no_other_is_concerned() -> None:
    clock = Clock()
    limiter = RateLimiter(4, clock=clock)
    assert [limiter.admit("a") for _ in range(6)] == pytest.approx([0, 0, 0, 0, 15, 15])
    assert limiter.admit("b") == 0
    clock.now += 15
    assert [limiter.admit("a") for _ in range(2)] == pytest.approx([0, 15])
    clock.now += 600
    assert [limiter.admit("a") for _ in range(5)] == pytest.approx([0, 0, 0, 0, 15])


def test_clients_without_end_take_memory_that_ends() -> None:
    clock = Clock()
    limiter = RateLimiter(1, max_clients=1000, clock=clock)
    for number in range(2000):
        limiter.admit(str(number))
    tracemalloc.start()
    for number in range(2000, 50_000):
        limiter.admit(str(number))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(limiter) == 1000
    assert grown < 200_000
    assert limiter.admit("49999") > 0
    clock.now += 61
    assert limiter.admit("a") == 0
    assert len(limiter) == 1, "those who may ask again anyway are forgotten"


def test_a_network_of_version_6_is_one_client() -> None:
    assert find_network("192.0.2.7") == "192.0.2.7"
    assert find_network("2001:db8::1") == find_network("2001:db8:0:0:ff::7%eth0") == "2001:db8::/64"
    assert find_network("2001:db8:0:1::1") != find_network("2001:db8::1")
    assert find_network("::ffff:192.0.2.7") == "192.0.2.7"
    assert find_network("testclient") == "testclient"
