"""What is known of hand-offs that are over, so that late messages of them change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from twinfire.protocol.peer_messages import HandOffKey

LIFETIME_S = 60.0
MAX_TOMBSTONES = 1 << 16

Outcome = Literal["accepted", "aborted"]


class Tombstones:
    """Outcomes by key, kept for a minute and never more than a limit."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stones: dict[HandOffKey, tuple[Outcome, float]] = {}

    def add(self, key: HandOffKey, outcome: Outcome) -> None:
        """Remember how `key` ended; the first outcome stands."""
        self._forget_old()
        self._stones.setdefault(key, (outcome, self._clock()))

    def outcome(self, key: HandOffKey) -> Outcome | None:
        """Return how `key` ended, None when that is not known."""
        stone = self._stones.get(key)
        return stone[0] if stone else None

    def _forget_old(self) -> None:
        limit_s = self._clock() - LIFETIME_S
        # Entries are in the order of their times, so the oldest come first.
        while self._stones:
            key = next(iter(self._stones))
            if self._stones[key][1] > limit_s and len(self._stones) < MAX_TOMBSTONES:
                return
            del self._stones[key]
