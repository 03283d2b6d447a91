"""Whether a draft head pays: by virtual seconds, for each number of streams by itself."""

from __future__ import annotations

import pytest

from twinfire.engine.drafters.head_worth import HeadWorth


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def steps(worth: HeadWorth, count: int, saved_s: float, spent_s: float, num_streams: int) -> int:
    """Note up to `count` steps, while it pays; return how many."""
    for number in range(count):
        if not worth.pays(num_streams):
            return number
        worth.note(num_streams, saved_s, spent_s)
    return count


def rest_s(worth: HeadWorth, clock: Clock, num_streams: int) -> float:
    """Wait until the head is tried again."""
    started_s = clock.now_s
    while not worth.pays(num_streams):
        clock.now_s += 0.25
    return clock.now_s - started_s


def test_a_head_is_tried_before_anything_is_known_and_for_a_while(clock: Clock) -> None:
    worth = HeadWorth(clock)
    assert all(worth.pays(num_streams) for num_streams in (0, 1, 7, 500))
    assert steps(worth, 500, 0.001, 0.002, 1) == 192
    # Steps of more streams say more.
    assert steps(worth, 500, 0.001, 0.002, 4) == 48
    assert steps(worth, 500, 0.001, 0.002, 100) == 24


def test_a_head_that_pays_never_rests(clock: Clock) -> None:
    assert steps(HeadWorth(clock), 5000, 0.002, 0.001, 1) == 5000


def test_a_few_bad_steps_among_good_ones_put_no_head_to_rest(clock: Clock) -> None:
    worth = HeadWorth(clock)
    assert steps(worth, 100, 0.003, 0.001, 1) == 100
    assert steps(worth, 5, 0.0, 0.005, 1) == 5
    assert steps(worth, 100, 0.003, 0.001, 1) == 100


def test_each_trial_that_fails_makes_the_next_rest_longer_up_to_a_bound(clock: Clock) -> None:
    worth = HeadWorth(clock)
    rests = []
    for _ in range(9):
        assert steps(worth, 500, 0.001, 0.002, 1) == 192
        rests.append(rest_s(worth, clock, 1))
    assert rests == [2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 120.0, 120.0, 120.0]


def test_a_trial_that_lasts_makes_the_next_rest_short_again(clock: Clock) -> None:
    worth = HeadWorth(clock)
    for _ in range(4):
        steps(worth, 500, 0.001, 0.002, 1)
        rest_s(worth, clock, 1)
    assert steps(worth, 800, 0.002, 0.001, 1) == 800
    assert steps(worth, 800, 0.0, 0.002, 1) < 400
    assert rest_s(worth, clock, 1) == 2.0


def test_a_crowd_puts_the_head_to_rest_for_crowds_alone(clock: Clock) -> None:
    worth = HeadWorth(clock)
    steps(worth, 100, 0.001, 0.002, 7)
    assert [count for count in range(1, 20) if not worth.pays(count)] == [5, 6, 7, 8]
