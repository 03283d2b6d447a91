"""Sequences that hold no blocks and wait to run, and the orders that rank all sequences.

A preempted sequence keeps the place that it was given on arrival, so it returns to the head without
any rule of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from twinfire.scheduler.prompt_turn import PromptClock
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


class WaitingQueue:
    """A set of sequences of which the one whose turn is next is taken first.

    Removal is O(1): the heap's entry is left behind and skipped later. The fair order changes with
    `clock`; the heap is then made anew at the next look.
    """

    def __init__(self, policy: Policy, clock: PromptClock) -> None:
        self._policy: Policy = policy
        self._clock = clock
        self._members: dict[Sequence, int] = {}
        self._entries: list[tuple[Rank, int, Sequence]] = []
        self._ordered_at = clock.now
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
        if self._is_in_order:
            heapq.heappush(self._entries, self._entry(sequence, self._pushes))

    def peek(self) -> Sequence | None:
        """Return the first sequence, None when the queue is empty."""
        if not self._is_in_order:
            self._ordered_at = self._clock.now
            self._entries = [self._entry(*member) for member in self._members.items()]
            heapq.heapify(self._entries)
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

    @property
    def _is_in_order(self) -> bool:
        return self._policy != "fair" or self._ordered_at == self._clock.now

    def _entry(self, sequence: Sequence, push: int) -> tuple[Rank, int, Sequence]:
        return turn_of(sequence, self._policy), push, sequence
