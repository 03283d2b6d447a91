"""Sequences that hold no blocks and wait to run, and the orders that rank all sequences.

A preempted sequence keeps the place that it was given on arrival, so it returns to the head without
any rule of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol

from twinfire.scheduler.scheduler_config import Policy
from twinfire.scheduler.sequence import Sequence, Status

Rank = tuple[float, int, int]

_MIN_ENTRIES_TO_COMPACT = 64


def rank_of(sequence: Sequence, policy: Policy) -> Rank:
    """Return a sequence's place among those that hold blocks: lower is preempted later.

    Choices of one request share its arrival and follow each other by number.
    """
    priority = sequence.priority if policy == "priority" else 0
    return priority, sequence.arrival, sequence.key[2]


def turn_of(sequence: Sequence, policy: Policy) -> Rank:
    """Return a sequence's place among prompts now: lower is computed earlier."""
    if policy == "fair":
        assert sequence.turn is not None, f"{sequence.key} was not submitted"
        num_left = sequence.num_tokens - sequence.num_computed_tokens
        has_begun = sequence.status is Status.RUNNING
        slowdown = sequence.turn.slowdown(num_left if has_begun else None)
        return -slowdown, sequence.arrival, sequence.key[2]
    return rank_of(sequence, policy)


class WaitingQueue(Protocol):
    """A set of sequences of which the one whose turn is next is taken first."""

    def __len__(self) -> int: ...

    def __contains__(self, sequence: Sequence) -> bool: ...

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in no particular order."""
        ...

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that is not in the queue."""
        ...

    def peek(self) -> Sequence | None:
        """Return the first sequence, None when the queue is empty."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        ...


def waiting_queue(policy: Policy) -> WaitingQueue:
    """Return an empty queue."""
    return FairQueue() if policy == "fair" else RankedQueue(policy)


class FairQueue:
    """By the order of the fair policy, which changes while they wait: so each look is at all."""

    def __init__(self) -> None:
        # A dict with no values: a set that keeps its order.
        self._members: dict[Sequence, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in no particular order."""
        return iter(self._members)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that is not in the queue."""
        assert sequence not in self._members, f"{sequence.key} waits already"
        self._members[sequence] = None

    def peek(self) -> Sequence | None:
        """Return the first sequence, None when the queue is empty."""
        return min(self._members, key=lambda one: turn_of(one, "fair"), default=None)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        del self._members[sequence]


class RankedQueue:
    """By ranks that stay. A removed one's entry is left behind in a heap and skipped later."""

    def __init__(self, policy: Policy) -> None:
        self._policy: Policy = policy
        self._members: dict[Sequence, int] = {}
        self._entries: list[tuple[Rank, int, Sequence]] = []
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in no particular order."""
        return iter(self._members)

    def push(self, sequence: Sequence) -> None:
        """Add a sequence that is not in the queue."""
        assert sequence not in self._members, f"{sequence.key} waits already"
        self._pushes += 1
        self._members[sequence] = self._pushes
        heapq.heappush(self._entries, (rank_of(sequence, self._policy), self._pushes, sequence))

    def peek(self) -> Sequence | None:
        """Return the first sequence, None when the queue is empty."""
        while self._entries:
            _, push, sequence = self._entries[0]
            if self._members.get(sequence) == push:
                return sequence
            heapq.heappop(self._entries)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        del self._members[sequence]
        if len(self._entries) > _MIN_ENTRIES_TO_COMPACT + 2 * len(self._members):
            self._entries = [
                entry for entry in self._entries if self._members.get(entry[2]) == entry[1]
            ]
            heapq.heapify(self._entries)
