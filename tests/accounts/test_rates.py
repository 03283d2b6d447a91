"""Buckets, against a plain model of what they promise, in memory and in PostgreSQL."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfire.accounts.database import open_database
from twinfire.accounts.limits import NO_LIMITS, Limits
from twinfire.accounts.rates import LocalRates, Rates
from twinfire.accounts.shared_rates import SharedRates


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_minutes_worth_at_once_then_the_rate() -> None:
    clock = Clock()
    rates = LocalRates(clock)
    limits = Limits(requests_per_minute=3)
    lefts = [rates.take("a", limits, 5).requests_left for _ in range(3)]
    assert lefts == [2, 1, 0]
    refused = rates.take("a", limits, 5)
    assert refused.refused_by == "requests_per_minute"
    assert refused.retry_after_s == pytest.approx(20)
    assert refused.requests_full_s == pytest.approx(60)
    assert rates.take("b", limits, 5).refused_by is None
    clock.now_s += refused.retry_after_s + 0.001
    assert rates.take("a", limits, 5).refused_by is None
    assert rates.take("a", limits, 5).refused_by == "requests_per_minute"


def test_tokens_are_corrected_at_the_end_and_may_be_owed() -> None:
    clock = Clock()
    rates = LocalRates(clock)
    limits = Limits(tokens_per_minute=600)
    assert rates.take("a", limits, 500).tokens_left == 100
    refused = rates.take("a", limits, 200)
    assert (refused.refused_by, refused.retry_after_s) == ("tokens_per_minute", pytest.approx(10))
    rates.give_back("a", limits, 300)
    assert rates.take("a", limits, 400).tokens_left == 0
    rates.give_back("a", limits, -100)
    owed = rates.take("a", limits, 1)
    assert (owed.refused_by, owed.retry_after_s) == ("tokens_per_minute", pytest.approx(10.1))


@pytest.fixture(params=["local", "shared"])
def rates(request: pytest.FixtureRequest) -> Rates:
    if request.param == "local":
        return LocalRates()
    return SharedRates(open_database(request.getfixturevalue("postgres_database_url")), "g1")


def test_every_limit_refuses_and_takes_nothing_then(rates: Rates) -> None:
    for limits, name in (
        (Limits(concurrency=1), "concurrency"),
        (Limits(requests_per_minute=1), "requests_per_minute"),
        (Limits(tokens_per_minute=10), "tokens_per_minute"),
    ):
        assert rates.take(name, limits, 10).refused_by is None
        refused = rates.take(name, replace(limits, tokens_per_minute=10, requests_per_minute=1), 9)
        assert refused.refused_by is not None
        assert refused.retry_after_s >= 0.9
        assert rates.take(name, NO_LIMITS, 10).refused_by is None


def test_what_ends_makes_room(rates: Rates) -> None:
    limits = Limits(concurrency=2)
    assert [rates.take("a", limits, 1).refused_by for _ in range(3)] == [None, None, "concurrency"]
    rates.give_back("a", limits, 0)
    assert [rates.take("a", limits, 1).refused_by for _ in range(2)] == [None, "concurrency"]


def test_gateways_on_one_postgresql_share_their_rates(postgres_database_url: str) -> None:
    first = SharedRates(open_database(postgres_database_url), "g1")
    second = SharedRates(open_database(postgres_database_url), "g2")
    limits = Limits(requests_per_minute=20, concurrency=20)
    taken: list[str | None] = []

    def take(rates: SharedRates) -> None:
        for _ in range(15):
            taken.append(rates.take("a", limits, 1).refused_by)

    threads = [threading.Thread(target=take, args=(one,)) for one in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert taken.count(None) == 20
    first.heartbeat()
    only_running = Limits(concurrency=21)
    assert second.take("a", only_running, 1).refused_by is None
    assert second.take("a", only_running, 1).refused_by == "concurrency"
    first.leave()
    assert second.take("a", only_running, 1).refused_by is None


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50), st.integers(-20, 20)), max_size=40))
def test_over_any_time_no_more_than_a_minute_and_the_rate(
    steps: list[tuple[float, int, int]],
) -> None:
    clock = Clock()
    rates = LocalRates(clock)
    limits = Limits(requests_per_minute=10, tokens_per_minute=100, concurrency=3)
    start_s = clock.now_s
    num_taken = used = num_running = 0
    for passed_s, num_tokens, unused in steps:
        clock.now_s += passed_s
        state = rates.take("a", limits, num_tokens)
        if state.refused_by is None:
            num_taken += 1
            num_running += 1
            used += num_tokens
            assert num_running <= 3
        elif num_running:
            rates.give_back("a", limits, min(unused, used))
            used -= min(unused, used)
            num_running -= 1
        minutes = (clock.now_s - start_s) / 60
        assert num_taken <= 10 + 10 * minutes + 1e-6
        if unused >= 0:
            assert state.tokens_left is not None
            assert 0 <= state.tokens_left <= 100
