"""Stop strings in a growing text.

A Knuth-Morris-Pratt automaton per stop string advances character by character, so the outcome does
not depend on how the text was cut into tokens: the stop that ends earliest wins, the longest among
equals. Text that may still become a stop string is held back, and no more than that.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request, prepared once for all of its choices."""

    __slots__ = ("failures", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        # Longest first, so that the first match found at a character is the one that counts.
        self.stops = tuple(sorted(set(stops), key=len, reverse=True))
        self.failures = tuple(_failure_table(stop) for stop in self.stops)

    def __bool__(self) -> bool:
        return bool(self.stops)


class StopScanner:
    """Watches the text of one choice."""

    __slots__ = ("_held", "_include", "_states", "_stops", "matched")

    def __init__(self, stops: StopStrings, include_stop_in_output: bool = False) -> None:
        self._stops = stops
        self._include = include_stop_in_output
        self._states = [0] * len(stops.stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; nothing may be fed after that."""

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Return the text that may be shown now; a stop that ends in `text` counts if `armed`."""
        if not text:
            return ""
        pending = self._held + text
        num_held = len(self._held)
        for position, character in enumerate(text):
            stop = self._advance(character)
            if stop is not None and armed:
                end = num_held + position + 1
                self.matched = stop
                self._held = ""
                return pending[: end if self._include else end - len(stop)]
        hold = max(self._states, default=0)
        shown = len(pending) - hold
        self._held = pending[shown:]
        return pending[:shown]

    def flush(self) -> str:
        """Return what was held back; the text has ended."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Move every automaton by one character; return the longest stop that ends here."""
        found: str | None = None
        states = self._states
        for index, stop in enumerate(self._stops.stops):
            failures = self._stops.failures[index]
            state = states[index]
            while state and stop[state] != character:
                state = failures[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                found = found or stop
                state = failures[state - 1]
            states[index] = state
        return found


def _failure_table(pattern: str) -> tuple[int, ...]:
    """Length of the longest proper border of each prefix of `pattern`."""
    table = [0] * len(pattern)
    border = 0
    for position in range(1, len(pattern)):
        while border and pattern[position] != pattern[border]:
            border = table[border - 1]
        if pattern[position] == pattern[border]:
            border += 1
        table[position] = border
    return tuple(table)
