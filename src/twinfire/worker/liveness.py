"""Whether this process stood still for so long that others have given up on it.

A thread that does little else ticks ten times a second. A gap longer than a lease means that the
whole process was stopped or the machine slept, not that one step was long; what was held for others
is theirs no more, and must be let go before anything else is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TICK_S = 0.1


def running_clock() -> float:
    """Return seconds that go on while the machine sleeps, where the system has such a clock."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class LivenessWatch:
    """Ticked by one thread, asked by another."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = running_clock) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._lock = threading.Lock()
        self._last_tick_s = clock()
        self._stood_still_s = 0.0

    def tick(self) -> bool:
        """Note that the process runs; False while a gap has not been dealt with."""
        with self._lock:
            self._note_gap()
            return self._stood_still_s == 0.0

    def take_gap_s(self) -> float:
        """Return how long the process stood still, once for each gap; 0 when it did not."""
        with self._lock:
            self._note_gap()
            gap_s, self._stood_still_s = self._stood_still_s, 0.0
            return gap_s

    def _note_gap(self) -> None:
        now_s = self._clock()
        gap_s = now_s - self._last_tick_s
        if gap_s > self._lease_s:
            self._stood_still_s = max(self._stood_still_s, gap_s)
        self._last_tick_s = now_s
