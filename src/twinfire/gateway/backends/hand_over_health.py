"""Which pairs of workers cannot hand prompts over just now, though each of them is well.

Where only the way between two workers is cut, every request over it would lose a try to finding
out. After a few failures in a row the pair is left alone for a while; then one may try again.
"""

from __future__ import annotations

from collections.abc import Callable

FAILURES_IN_A_ROW = 2
PAUSE_S = 5.0
_MAX_PAIRS = 4096


class HandOverHealth:
    """`clock` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failures: dict[tuple[str, str], int] = {}
        self._paused_until_s: dict[tuple[str, str], float] = {}

    def may_try(self, prefill: str, decode: str) -> bool:
        """Whether a prompt may be handed from `prefill` to `decode` (instance ids)."""
        pair = (prefill, decode)
        until_s = self._paused_until_s.get(pair)
        if until_s is None:
            return True
        if self._clock() < until_s:
            return False
        # One goes first; the others follow when it has come through.
        self._paused_until_s[pair] = self._clock() + PAUSE_S
        return True

    def succeeded(self, prefill: str, decode: str) -> None:
        """A prompt has come through."""
        if self._failures:
            self._failures.pop((prefill, decode), None)
            self._paused_until_s.pop((prefill, decode), None)

    def failed(self, prefill: str, decode: str) -> None:
        """A prompt could not be handed over."""
        pair = (prefill, decode)
        if len(self._failures) >= _MAX_PAIRS:
            # Of workers that are gone, nearly all of it.
            self._failures.clear()
            self._paused_until_s.clear()
        self._failures[pair] = self._failures.get(pair, 0) + 1
        if self._failures[pair] >= FAILURES_IN_A_ROW:
            self._paused_until_s[pair] = self._clock() + PAUSE_S
