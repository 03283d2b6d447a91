"""Counts of what happens with every token or step, kept as plain numbers until they are scraped.

prometheus_client takes a lock and walks the buckets at each observation. Here one thread observes
and renders, and an observation is a search and two additions.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class HistogramTally(Collector):
    """A histogram of one model. `bounds` rise and include their own value."""

    def __init__(
        self,
        name: str,
        text: str,
        model_name: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._text = text
        self._model_name = model_name
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        """Count one value, or several that are equal."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        """Return the histogram as it is now."""
        family = HistogramMetricFamily(self._name, self._text, labels=("model_name",))
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == math.inf else str(bound), total))
        family.add_metric((self._model_name,), buckets, self._sum)
        return (family,)
