"""Seconds of a step by its number of rows: measured at start, then followed.

All of the curve follows live steps quickly by one factor, as contexts grow and the machine is
shared; each measured point follows slowly by itself, as rows that check guesses may cost other
than rows of more sequences. One slow step moves little.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_ROUNDS = 4
_NEEDED_ROWS = 8
"""Measured whatever it takes; what more rows cost follows from the last points otherwise."""
_FACTOR_RATE = 0.1
_POINT_RATE = 0.01
_POINT_KEPT = 0.999
"""What a point keeps of its own at each step: what lasts is the whole curve's in the end."""
_MOST_SURPRISE = 0.25
"""How far one step can seem off, as a logarithm."""


class StepCosts:
    """Before `calibrate` every row is taken to cost the same, so that no guess seems to pay."""

    def __init__(self) -> None:
        self._rows: list[int] = [1, 2]
        self._measured: list[float] = [1.0, 2.0]
        self._point_logs: list[float] = [0.0, 0.0]
        self._factor_log: float | None = None
        self._seconds: list[float] = []
        self._refresh()

    def calibrate(
        self, measure: Callable[[int], float], max_rows: int = 64, budget_s: float = 1.0
    ) -> None:
        """Measure the curve up to `max_rows`, by steps of so many rows that return their seconds.

        All measured steps together take about `budget_s`: a first round up to `max_rows`, which
        is at least 2, then more as time allows. The quickest of a few counts, and no more than
        steps of more rows took: what disturbs a step only makes it longer.
        """
        assert max_rows >= 2, "one point makes no curve"
        # The first steps of a process are slow in every way.
        spent_s = measure(1)
        least: dict[int, float] = {}
        # Round by round, so that what disturbs a while does not hit all of one point.
        for number in range(_ROUNDS):
            for count in [rows for rows in _ROWS if rows < max_rows] + [max_rows]:
                if spent_s > budget_s and (number > 0 or count > _NEEDED_ROWS):
                    break
                seconds = measure(count)
                spent_s += seconds
                least[count] = min(seconds, least.get(count, math.inf))
        self._rows = list(least)
        self._measured = _least_from_here(list(least.values()))
        self._point_logs = [0.0] * len(least)
        self._factor_log = 0.0
        self._refresh()

    def note(self, num_rows: int, seconds: float) -> None:
        """Follow a live step that computed nothing but rows of running sequences."""
        if seconds <= 0.0 or num_rows < 1:
            return
        surprise = math.log(seconds / self.seconds(num_rows))
        if self._factor_log is None:
            self._factor_log, surprise = surprise, 0.0
        surprise = max(-_MOST_SURPRISE, min(_MOST_SURPRISE, surprise))
        self._factor_log += _FACTOR_RATE * surprise
        right = min(bisect_left(self._rows, num_rows), len(self._rows) - 1)
        left = right if self._rows[right] <= num_rows else right - 1
        self._point_logs = [log * _POINT_KEPT for log in self._point_logs]
        for point in {left, right}:
            self._point_logs[point] += _POINT_RATE * surprise
        self._refresh()

    def seconds(self, num_rows: int) -> float:
        """Return what a step of so many rows takes; never less than one of fewer rows."""
        rows, seconds = self._rows, self._seconds
        if num_rows <= 0:
            return 0.0
        right = min(max(1, bisect_left(rows, num_rows)), len(rows) - 1)
        if rows[right - 1] == num_rows:
            return seconds[right - 1]
        if num_rows > rows[right]:
            return seconds[right] + self._slope_beyond() * (num_rows - rows[right])
        slope = (seconds[right] - seconds[right - 1]) / (rows[right] - rows[right - 1])
        return seconds[right] + slope * (num_rows - rows[right])

    def _slope_beyond(self) -> float:
        # Over the last half of the rows: two points beside each other may seem to cost the same by
        # chance, and then any number of rows beyond them would seem free.
        rows, seconds = self._rows, self._seconds
        left = max(0, bisect_right(rows, rows[-1] // 2) - 1)
        return (seconds[-1] - seconds[left]) / (rows[-1] - rows[left])

    def _refresh(self) -> None:
        factor = math.exp(self._factor_log or 0.0)
        followed = [
            measured * math.exp(log) * factor
            for measured, log in zip(self._measured, self._point_logs, strict=True)
        ]
        # Where points contradict each other, the middle between the two ways to agree.
        most = accumulate(followed, max)
        self._seconds = [
            (high + low) / 2 for high, low in zip(most, _least_from_here(followed), strict=True)
        ]


def _least_from_here(values: Sequence[float]) -> list[float]:
    """Return for each value the least of it and all behind it."""
    return list(accumulate(reversed(values), min))[::-1]
