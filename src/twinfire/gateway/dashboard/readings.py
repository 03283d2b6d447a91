"""What a model's metrics say at one moment, and what two such moments say of the time between.

Percentiles come from histograms: inside a bucket values count as evenly spread, as Prometheus'
`histogram_quantile` does it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import msgspec
from prometheus_client.core import Metric

from twinfire.gateway.metrics import Metrics

_QUANTILES = (0.5, 0.9, 0.99)


class Collectable(Protocol):
    """A counter or a histogram of one model."""

    def collect(self) -> Iterable[Metric]:
        """Return it as it is now."""
        ...


class Percentiles(msgspec.Struct, frozen=True):
    """Of a time in seconds."""

    p50: float
    p90: float
    p99: float


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One model at one second. What nothing has been measured of is None."""

    running: int
    waiting: int
    kv_fill: float
    """Share of the KV blocks in use."""
    output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    """Of prompts that were done, cached tokens included."""
    cached_share: float | None
    """Of the prompt tokens."""
    ttft_s: Percentiles | None
    itl_s: Percentiles | None


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Of one model since the gateway's start."""

    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    requests: int
    """Whose first token came."""
    ttft_s: Percentiles | None
    itl_s: Percentiles | None


@dataclass(frozen=True, slots=True)
class Buckets:
    """How many values there were up to each bound, all values up to infinity."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    @property
    def num_values(self) -> float:
        """All of them."""
        return self.counts[-1] if self.counts else 0.0

    def since(self, earlier: Buckets) -> Buckets:
        """Return those that came after `earlier`."""
        counts = zip(self.counts, earlier.counts, strict=True)
        return Buckets(self.bounds, tuple(now - then for now, then in counts))

    def percentiles(self) -> Percentiles | None:
        """Return estimates; None where there are no values."""
        if not self.num_values:
            return None
        return Percentiles(*(self._quantile(share) for share in _QUANTILES))

    def _quantile(self, share: float) -> float:
        rank = share * self.num_values
        for (low, before), (high, count) in pairwise(
            zip((0.0, *self.bounds), (0.0, *self.counts), strict=True)
        ):
            if count >= rank and count > before:
                if high == math.inf:
                    return low
                return low + (high - low) * (rank - before) / (count - before)
        return self.bounds[-2]


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters of one model. `time_s` is on the monotonic clock."""

    time_s: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int
    ttft: Buckets
    itl: Buckets
    running: int
    waiting: int
    kv_fill: float

    @classmethod
    def of(cls, metrics: Metrics, time_s: float) -> Reading:
        """Read a model's metrics."""
        loads = metrics.loads.values()
        num_blocks = sum(load.kv_blocks_total for load in loads)
        num_used = sum(load.kv_blocks_used for load in loads)
        return cls(
            time_s=time_s,
            output_tokens=metrics.num_generated_tokens,
            prompt_tokens=int(_value(metrics.prompt_tokens)),
            cached_tokens=int(_value(metrics.prompt_tokens_cached)),
            ttft=_buckets(metrics.ttft),
            itl=_buckets(metrics.inter_token),
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            kv_fill=num_used / num_blocks if num_blocks else 0.0,
        )

    def totals(self) -> Totals:
        """Return what there has been in all."""
        return Totals(
            output_tokens=self.output_tokens,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            requests=int(self.ttft.num_values),
            ttft_s=self.ttft.percentiles(),
            itl_s=self.itl.percentiles(),
        )


def point(readings: Sequence[Reading], rate_window_s: float) -> Point:
    """Return the last of `readings`; times and shares are of all the time since the first of them.

    Rates are of the last `rate_window_s`.
    """
    first, last = readings[0], readings[-1]
    recent = next(one for one in readings if one.time_s >= last.time_s - rate_window_s)
    elapsed_s = last.time_s - recent.time_s
    prompt_tokens = last.prompt_tokens - first.prompt_tokens
    cached_tokens = last.cached_tokens - first.cached_tokens
    return Point(
        running=last.running,
        waiting=last.waiting,
        kv_fill=last.kv_fill,
        output_tokens_per_s=_rate(last.output_tokens - recent.output_tokens, elapsed_s),
        prompt_tokens_per_s=_rate(last.prompt_tokens - recent.prompt_tokens, elapsed_s),
        cached_share=cached_tokens / prompt_tokens if prompt_tokens else None,
        ttft_s=last.ttft.since(first.ttft).percentiles(),
        itl_s=last.itl.since(first.itl).percentiles(),
    )


def _rate(count: int, elapsed_s: float) -> float | None:
    return count / elapsed_s if elapsed_s > 0 else None


def _value(counter: Collectable) -> float:
    (metric,) = counter.collect()
    return next(sample.value for sample in metric.samples if sample.name.endswith("_total"))


def _buckets(histogram: Collectable) -> Buckets:
    (metric,) = histogram.collect()
    pairs = [
        (float(sample.labels["le"]), sample.value)
        for sample in metric.samples
        if sample.name.endswith("_bucket")
    ]
    return Buckets(tuple(bound for bound, _ in pairs), tuple(count for _, count in pairs))
