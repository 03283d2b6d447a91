"""How long a decode step takes at a given occupancy, learnt from what the worker reports.

A line through (KV blocks in use, step time), by least squares with weights that fade: old steps
count half after `HALF_LIFE` reports. Until occupancies differ, their mean is all that is known.
"""

from __future__ import annotations

HALF_LIFE = 500
_FADE = 0.5 ** (1 / HALF_LIFE)
_MIN_SPREAD = 0.02
"""Standard deviation of the occupancy over its mean, below which no slope is believed."""


class StepTime:
    """Seconds of a step as `base_s + slope_s * blocks`."""

    __slots__ = ("_weight", "_x", "_xx", "_xy", "_y", "base_s", "slope_s")

    def __init__(self, prior_s: float) -> None:
        self.base_s = prior_s
        self.slope_s = 0.0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, num_blocks: int, step_s: float) -> None:
        """Learn from one report."""
        self._weight = self._weight * _FADE + 1
        share = 1 / self._weight
        dx, dy = num_blocks - self._x, step_s - self._y
        self._x += share * dx
        self._y += share * dy
        self._xx = (1 - share) * (self._xx + share * dx * dx)
        self._xy = (1 - share) * (self._xy + share * dx * dy)
        slope = 0.0
        if self._xx > (_MIN_SPREAD * self._x) ** 2 and self._xx > 0:
            # No step gets faster by more context, and none takes less than nothing.
            slope = min(max(self._xy / self._xx, 0.0), self._y / self._x if self._x else 0.0)
        self.slope_s = slope
        self.base_s = self._y - slope * self._x
