"""What an account has left of its rates: token buckets and a count of what runs.

`Rates` is the interface; `LocalRates` keeps them in this process, `shared_rates` in a database for
several gateways. A request takes its share before it starts and corrects it at its end, so that
a bucket may be in debt and the next request waits that out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from twinfire.accounts.limits import Limits

_S_PER_MINUTE = 60.0
_LEAST_WAIT_S = 1.0
"""For a request's turn where only its forerunners' end would help."""


@dataclass(frozen=True, slots=True)
class RateState:
    """Where an account stands after a try. What has no limit is None."""

    refused_by: str | None
    """Name of the limit that refused; None when the share was taken."""
    retry_after_s: float = 0.0
    requests_left: int | None = None
    requests_full_s: float = 0.0
    """Seconds until the bucket is full again."""
    tokens_left: int | None = None
    tokens_full_s: float = 0.0


class Rates(Protocol):
    """Takes and gives back. Whether it blocks, `blocks` says."""

    blocks: bool
    """Whether an event loop has to call it from a thread."""

    def take(self, account_id: str, limits: Limits, num_tokens: int) -> RateState:
        """Take one request of `num_tokens`, or nothing."""
        ...

    def give_back(self, account_id: str, limits: Limits, num_tokens: int) -> None:
        """End a request: `num_tokens` of what it took were not used; below 0, more were."""
        ...


@dataclass(slots=True)
class Levels:
    """An account's buckets; each holds a minute's worth at most."""

    requests: float
    tokens: float
    updated_s: float
    num_running: int = 0

    @classmethod
    def full(cls, limits: Limits, now_s: float) -> Levels:
        """Return full buckets."""
        return cls(limits.requests_per_minute or 0, limits.tokens_per_minute or 0, now_s)

    def take(self, limits: Limits, num_tokens: int, now_s: float) -> RateState:
        """Refill, then take one request of `num_tokens` if every limit allows it."""
        self.refill(limits, now_s)
        waits: dict[str, float] = {}
        if limits.concurrency is not None and self.num_running >= limits.concurrency:
            waits["concurrency"] = _LEAST_WAIT_S
        if limits.requests_per_minute is not None and self.requests < 1:
            waits["requests_per_minute"] = _wait_s(1 - self.requests, limits.requests_per_minute)
        if limits.tokens_per_minute is not None and self.tokens < num_tokens:
            missing = num_tokens - self.tokens
            waits["tokens_per_minute"] = _wait_s(missing, limits.tokens_per_minute)
        if not waits:
            self.requests -= 1
            self.tokens -= num_tokens
            self.num_running += 1
        longest = max(waits, key=lambda name: waits[name], default=None)
        return self._state(limits, longest, waits.get(longest or "", 0.0))

    def give_back(self, limits: Limits, num_tokens: int, now_s: float) -> None:
        """Correct what a request took."""
        self.refill(limits, now_s)
        self.num_running = max(0, self.num_running - 1)
        self.tokens = min(self.tokens + num_tokens, limits.tokens_per_minute or 0)

    def refill(self, limits: Limits, now_s: float) -> None:
        """Let the time since the last look flow in."""
        passed = max(0.0, now_s - self.updated_s) / _S_PER_MINUTE
        self.updated_s = max(now_s, self.updated_s)
        per_minute = limits.requests_per_minute or 0
        self.requests = min(per_minute, self.requests + passed * per_minute)
        per_minute = limits.tokens_per_minute or 0
        self.tokens = min(per_minute, self.tokens + passed * per_minute)

    def _state(self, limits: Limits, refused_by: str | None, retry_after_s: float) -> RateState:
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        return RateState(
            refused_by,
            retry_after_s,
            None if requests is None else max(0, math.floor(self.requests)),
            0.0 if requests is None else _wait_s(requests - self.requests, requests),
            None if tokens is None else max(0, math.floor(self.tokens)),
            0.0 if tokens is None else _wait_s(tokens - self.tokens, tokens),
        )


def _wait_s(missing: float, per_minute: int) -> float:
    return missing / per_minute * _S_PER_MINUTE


@dataclass(slots=True)
class LocalRates:
    """The rates of one process. Not for several threads at once."""

    clock_s: Callable[[], float] = time.monotonic
    blocks: bool = field(default=False, init=False)
    _levels: dict[str, Levels] = field(default_factory=dict, init=False)

    def take(self, account_id: str, limits: Limits, num_tokens: int) -> RateState:
        """Take one request of `num_tokens`, or nothing."""
        now_s = self.clock_s()
        levels = self._levels.get(account_id)
        if levels is None:
            levels = self._levels[account_id] = Levels.full(limits, now_s)
        return levels.take(limits, num_tokens, now_s)

    def give_back(self, account_id: str, limits: Limits, num_tokens: int) -> None:
        """End a request."""
        levels = self._levels.get(account_id)
        if levels is not None:
            levels.give_back(limits, num_tokens, self.clock_s())
