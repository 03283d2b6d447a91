from __future__ import annotations

import random

import pytest

from support.token_model import token_array
from twinfire.scheduler.prompt_turn import PromptClock, PromptTurn
from twinfire.scheduler.sequence import Sequence
from twinfire.scheduler.waiting_queue import WaitingQueue


def sequence(arrival: int, priority: int = 0, choice: int = 0) -> Sequence:
    return Sequence(
        key=("gateway", arrival, choice),
        tokens=token_array([1]),
        num_prompt_tokens=1,
        max_total_tokens=2,
        priority=priority,
        arrival=arrival,
    )


def drain(queue: WaitingQueue) -> list[Sequence]:
    drained: list[Sequence] = []
    while (first := queue.peek()) is not None:
        queue.remove(first)
        drained.append(first)
    return drained


def test_fcfs_is_by_arrival_then_choice():
    queue = WaitingQueue("fcfs", PromptClock())
    members = [sequence(2), sequence(1, 9, 1), sequence(1, 9, 0), sequence(3)]
    for member in members:
        queue.push(member)
    assert drain(queue) == [members[2], members[1], members[0], members[3]]


def test_priority_comes_before_arrival():
    queue = WaitingQueue("priority", PromptClock())
    members = [sequence(1, 5), sequence(2, -1), sequence(3, 5)]
    for member in members:
        queue.push(member)
    assert drain(queue) == [members[1], members[0], members[2]]


def test_one_that_comes_back_takes_its_old_place():
    queue = WaitingQueue("fcfs", PromptClock())
    first, second = sequence(1), sequence(2)
    for member in (first, second):
        queue.push(member)
    queue.remove(first)
    queue.push(first)
    queue.remove(second)
    queue.push(second)
    assert len(queue) == 2
    assert drain(queue) == [first, second]


def test_removal_from_the_middle_leaves_the_rest_in_order_and_no_garbage():
    queue = WaitingQueue("fcfs", PromptClock())
    members = [sequence(arrival) for arrival in range(1000)]
    for member in members:
        queue.push(member)
    removed = random.Random(1).sample(members, 990)
    for member in removed:
        queue.remove(member)
    assert len(queue._entries) < 100
    assert all(member not in queue for member in removed)
    assert drain(queue) == [member for member in members if member not in set(removed)]


def test_coming_and_going_leaves_no_garbage():
    queue = WaitingQueue("fcfs", PromptClock())
    first, second = sequence(1), sequence(2)
    queue.push(first)
    for _ in range(1000):
        queue.push(second)
        queue.remove(second)
    assert len(queue._entries) < 100
    assert drain(queue) == [first]


def test_equal_ranks_do_not_compare_sequences():
    queue = WaitingQueue("fcfs", PromptClock())
    one, other = sequence(1), sequence(1)
    queue.push(one)
    queue.push(other)
    assert drain(queue) == [one, other]


def test_a_member_is_not_added_twice():
    queue = WaitingQueue("fcfs", PromptClock())
    member = sequence(1)
    queue.push(member)
    with pytest.raises(AssertionError, match="waits already"):
        queue.push(member)


def test_the_fair_order_changes_while_they_wait():
    clock = PromptClock()
    queue = WaitingQueue("fair", clock)
    long, short = sequence(1), sequence(2)
    long.turn = PromptTurn(clock, 1000)
    clock.now += 100
    short.turn = PromptTurn(clock, 10)
    queue.push(short)
    queue.push(long)
    assert queue.peek() is long
    clock.now += 10
    assert queue.peek() is short
    queue.remove(short)
    assert drain(queue) == [long]
    assert short not in queue
    assert len(queue) == 0
