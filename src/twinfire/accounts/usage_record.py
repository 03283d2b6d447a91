"""One request's entry in the usage ledger: exactly what the client saw, and how it was served."""

from __future__ import annotations

import time
from typing import Literal

import msgspec

Outcome = Literal["finished", "failed", "cancelled"]
"""Cancelled: the client left before the end."""


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request that was admitted. Times in seconds, amounts in billionths of `currency`."""

    record_id: str
    """Unique; writing a record twice leaves one."""
    request_id: str
    """As the answer's `x-request-id` said."""
    account_id: str
    token_id: str
    """Empty where no token of an account was used."""
    endpoint: str
    """The request's path."""
    model: str
    """As the client called it."""
    started_s: float
    """Unix time of the request's arrival."""
    status: int
    """HTTP status of the answer; 499 where the client left before there was one."""
    outcome: Outcome
    finish: str
    """Finish reasons of the choices, each once, joined by commas; the fault's code of a failure."""
    num_input_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_reasoning_tokens: int
    price_nanos: int
    currency: str
    prefill_worker: str
    decode_worker: str
    route_reason: str
    queue_s: float
    """At the worker, before the first step."""
    ttft_s: float | None
    """None where no token came."""
    total_s: float

    @property
    def day(self) -> str:
        """The day on which it counts, in UTC."""
        return utc_day(self.started_s)


def utc_day(unix_s: float) -> str:
    """Return a day of UTC as YYYY-MM-DD."""
    return time.strftime("%Y-%m-%d", time.gmtime(unix_s))


def seconds_to_next_day(unix_s: float) -> float:
    """Return how long the day of UTC goes on."""
    return 86400.0 - unix_s % 86400.0
