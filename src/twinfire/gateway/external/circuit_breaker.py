"""Keeps requests away from a server that breaks them, and tries it again from time to time.

Only faults of the server itself count. Overload, bad requests and clients that leave do not: a
breaker that counts those shuts every server at the busiest moment.
"""

from __future__ import annotations


class CircuitBreaker:
    """Times in seconds, on any one clock."""

    FAILURES_TO_OPEN = 3
    """In a row."""
    FIRST_PAUSE_S = 1.0
    LONGEST_PAUSE_S = 30.0

    __slots__ = ("_closed_again_s", "_num_failures", "_pause_s")

    def __init__(self) -> None:
        self._num_failures = 0
        self._pause_s = self.FIRST_PAUSE_S
        self._closed_again_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the server broke too many requests in a row, and none has gone well since."""
        return self._num_failures >= self.FAILURES_TO_OPEN

    def allows(self, now_s: float) -> bool:
        """Whether a request may be sent now."""
        return not self.is_open or now_s >= self._closed_again_s

    def sent(self, now_s: float) -> None:
        """A request goes out: while open it is the only trial until it has been judged."""
        if self.is_open:
            self._closed_again_s = now_s + self._pause_s

    def succeeded(self) -> None:
        """The server did its part."""
        self._num_failures = 0
        self._pause_s = self.FIRST_PAUSE_S

    def failed(self, now_s: float) -> None:
        """The server broke a request."""
        self._num_failures += 1
        if self._num_failures > self.FAILURES_TO_OPEN:
            self._pause_s = min(self._pause_s * 2, self.LONGEST_PAUSE_S)
        self._closed_again_s = now_s + self._pause_s
