"""Whether a server that is asked for its health from time to time may be given work."""

from __future__ import annotations

FAILURES_TO_LEAVE = 2
"""In a row; one lost check is no reason to move everybody's work."""


class HealthRecord:
    """Not healthy before the first good check."""

    __slots__ = ("_num_failures", "is_healthy")

    def __init__(self) -> None:
        self.is_healthy = False
        self._num_failures = 0

    def passed(self) -> None:
        """The server answered well, which makes it healthy at once."""
        self._num_failures = 0
        self.is_healthy = True

    def failed(self) -> None:
        """A check, or a request in its place, found the server unreachable or not ready."""
        self._num_failures += 1
        if self._num_failures >= FAILURES_TO_LEAVE:
            self.is_healthy = False
