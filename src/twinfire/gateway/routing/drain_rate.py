"""How fast KV blocks come back, over about the last half minute."""

from __future__ import annotations

import math
from collections.abc import Callable

_WINDOW_S = 30.0
_MIN_AGE_S = 1.0


class DrainRate:
    """A fading sum of the blocks given back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s = self._then_s = clock()
        self._sum = 0.0

    def observe(self, num_blocks: int) -> None:
        """Count blocks given back now."""
        self._fade()
        self._sum += num_blocks

    def seconds_for(self, num_blocks: int) -> float:
        """Seconds until so many more are free at the present rate; 0 while nothing is known."""
        self._fade()
        if self._sum < 1 or not num_blocks:
            return 0.0
        age_s = max(self._then_s - self._started_s, _MIN_AGE_S)
        window_s = _WINDOW_S * (1 - math.exp(-age_s / _WINDOW_S))
        return num_blocks * window_s / self._sum

    def _fade(self) -> None:
        now_s = self._clock()
        self._sum *= math.exp(-(now_s - self._then_s) / _WINDOW_S)
        self._then_s = now_s
