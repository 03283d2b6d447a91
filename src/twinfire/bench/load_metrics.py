"""The definitions of every metric, and their computation from request records.

In meaning the same as in vLLM's and NVIDIA's clients. Per completed request, with t0 = the request
sent, t1 = the first text received, tn = the last piece received and n output tokens by usage:

* TTFT = t1 - t0: queueing, prompt processing and the way there and back.
* TPOT = (tn - t1) / (n - 1): mean time per output token after the first (genai-perf's ITL).
* ITL = each gap between two arrivals of text of one stream, over all streams: what a reader
  sees stall. An arrival may carry several tokens, so read it beside TPOT and tokens per arrival.
* E2E = tn - t0.

Rates divide by the run's duration, from the first request sent to the last one over. Only completed
requests count in latencies and rates; goodput counts those that also met every objective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from twinfire.bench.distribution import Distribution, distribution
from twinfire.bench.request_record import RequestRecord

MS_PER_S = 1e3
Window = tuple[float, float]


class Objectives(msgspec.Struct, frozen=True):
    """Service-level objectives of one request, in ms; None asks nothing."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    """Of the request's mean inter-token latency (TPOT), as genai-perf judges it."""
    e2e_ms: float | None = None

    @property
    def any(self) -> bool:
        """Whether there is anything to meet."""
        return (self.ttft_ms, self.itl_ms, self.e2e_ms) != (None, None, None)

    def met_by(self, record: RequestRecord) -> bool:
        """Whether a request completed within every limit; one without a second token has no ITL."""
        pairs = (
            (self.ttft_ms, ttft_ms(record)),
            (self.itl_ms, tpot_ms(record)),
            (self.e2e_ms, e2e_ms(record)),
        )
        return record.completed and all(
            limit is None or value is None or value <= limit for limit, value in pairs
        )


class LoadMetrics(msgspec.Struct, frozen=True):
    """Everything reported of one set of requests. Rates are per second of `duration_s`."""

    duration_s: float
    requests: int
    completed: int
    errors_by_kind: dict[str, int]
    ended_early: int
    """Answers shorter than the fixed length that was asked for."""
    without_usage: int
    """Answers whose tokens had to be counted as chunks."""
    prompt_tokens: int
    cached_tokens: int | None
    """None when the server never said."""
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and output."""
    goodput_per_s: float | None
    """Requests per second that met every objective; None without objectives."""
    goodput_share: float | None
    """Those over all requests, failed ones included."""
    tokens_per_arrival: float | None
    prompt_tokens_each: Distribution | None
    output_tokens_each: Distribution | None
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None


def ttft_ms(record: RequestRecord) -> float | None:
    """Time to first token; None when no text came."""
    if not record.chunk_times_s:
        return None
    return (record.chunk_times_s[0] - record.started_s) * MS_PER_S


def tpot_ms(record: RequestRecord) -> float | None:
    """Mean time per output token after the first; None below two tokens."""
    if record.output_tokens < 2 or not record.chunk_times_s:
        return None
    spent_s = record.last_s - record.chunk_times_s[0]
    return spent_s / (record.output_tokens - 1) * MS_PER_S


def e2e_ms(record: RequestRecord) -> float:
    """From the request sent to the last piece of its answer."""
    return (record.last_s - record.started_s) * MS_PER_S


def itl_gaps_ms(record: RequestRecord, window: Window | None = None) -> list[float]:
    """Gaps between successive arrivals of text; with a window, those that overlap it."""
    return [
        (later - earlier) * MS_PER_S
        for earlier, later in pairwise(record.chunk_times_s)
        if window is None or (later > window[0] and earlier < window[1])
    ]


def load_metrics(
    records: Sequence[RequestRecord],
    objectives: Objectives,
    window: Window | None = None,
) -> LoadMetrics:
    """Summarise records. `window` (clock readings) restricts ITL to the gaps inside it."""
    done = [record for record in records if record.completed]
    good = sum(objectives.met_by(record) for record in done)
    duration_s = _duration_s(records)
    prompt_tokens = sum(record.prompt_tokens or 0 for record in done)
    output_tokens = sum(record.output_tokens for record in done)
    arrivals = sum(len(record.chunk_times_s) for record in done)
    cached = [record.cached_tokens for record in done if record.cached_tokens is not None]

    def per_s(amount: float) -> float:
        return amount / duration_s if duration_s > 0 else 0.0

    return LoadMetrics(
        duration_s=duration_s,
        requests=len(records),
        completed=len(done),
        errors_by_kind=dict(Counter(r.error_kind for r in records if r.error_kind is not None)),
        ended_early=sum(record.ended_early for record in done),
        without_usage=sum(record.completion_tokens is None for record in done),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(cached) if cached else None,
        output_tokens=output_tokens,
        requests_per_s=per_s(len(done)),
        output_tokens_per_s=per_s(output_tokens),
        total_tokens_per_s=per_s(prompt_tokens + output_tokens),
        goodput_per_s=per_s(good) if objectives.any else None,
        goodput_share=good / len(records) if objectives.any and records else None,
        tokens_per_arrival=output_tokens / arrivals if arrivals else None,
        prompt_tokens_each=distribution(
            [float(r.prompt_tokens) for r in done if r.prompt_tokens is not None]
        ),
        output_tokens_each=distribution([float(record.output_tokens) for record in done]),
        ttft_ms=_described(ttft_ms(record) for record in done),
        itl_ms=distribution([gap for record in done for gap in itl_gaps_ms(record, window)]),
        tpot_ms=_described(tpot_ms(record) for record in done),
        e2e_ms=_described(e2e_ms(record) for record in done),
    )


def _described(values: Iterable[float | None]) -> Distribution | None:
    return distribution([value for value in values if value is not None])


def _duration_s(records: Sequence[RequestRecord]) -> float:
    if not records:
        return 0.0
    return max(record.ended_s for record in records) - min(record.started_s for record in records)
