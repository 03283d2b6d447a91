"""Percentiles and means of a sample of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class Distribution(msgspec.Struct, frozen=True):
    """What a report says of a sample; all but `count` in the sample's unit."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Return a percentile (0 to 100) of sorted numbers, linear between neighbours.

    The value at fractional rank `percent / 100 * (n - 1)`, which is numpy's default definition.
    """
    rank = percent / 100 * (len(ascending) - 1)
    lower = math.floor(rank)
    upper = min(lower + 1, len(ascending) - 1)
    low, high = ascending[lower], ascending[upper]
    return min(max(low + (high - low) * (rank - lower), low), high)


def median(values: Sequence[float]) -> float:
    """Return the middle of at least one number, in any order."""
    return percentile(sorted(values), 50)


def distribution(values: Sequence[float]) -> Distribution | None:
    """Describe numbers in any order; None when there are none."""
    if not values:
        return None
    ascending = sorted(values)
    mean = math.fsum(ascending) / len(ascending)
    return Distribution(
        count=len(ascending),
        mean=min(max(mean, ascending[0]), ascending[-1]),
        min=ascending[0],
        p50=percentile(ascending, 50),
        p90=percentile(ascending, 90),
        p99=percentile(ascending, 99),
        max=ascending[-1],
    )
