"""One admitted request on its way to its usage record, of which there is exactly one.

Reads what the meter counts, which is what the client is told; `settle` commits before the client
sees the end, `close` books whatever had no such end.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from twinfire.accounts.prices import ModelPrice
from twinfire.accounts.usage_record import Outcome, UsageRecord
from twinfire.gateway.accounting.identity import Identity

if TYPE_CHECKING:
    from twinfire.gateway.accounting.meter import Meter
    from twinfire.gateway.backends.route_record import RouteRecord

_CLIENT_LEFT_STATUS = 499
_REFUSED_STATUSES = (400, 404, 413, 422, 429)
_MAX_TEXT_CHARS = 300


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a request was admitted for."""

    num_tokens: int
    price_nanos: int


@dataclass(slots=True, eq=False)
class Bill:
    """Open until it is settled or closed, whichever is first."""

    identity: Identity
    request_id: str
    endpoint: str
    model: str
    price: ModelPrice
    currency: str
    reserved: Reservation
    shows_cost: bool
    """Whether the client asked for its cost."""
    commit: Callable[[UsageRecord], Awaitable[None]]
    submit: Callable[[UsageRecord], None]
    release: Callable[[Bill, int], None]
    """Gives back the limits; gets the tokens that were used."""
    ended: Callable[[Bill, UsageRecord], None] = lambda bill, record: None
    """Hears of the end, of a request that has no record too."""
    traceparent: str = ""
    """The client's trace, as its header named it."""
    arrival_s: float = field(default_factory=time.monotonic)
    """On the monotonic clock."""
    meter: Meter | None = None
    route: Callable[[], RouteRecord | None] = lambda: None
    record_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_open: bool = True

    def follow(self, meter: Meter, route: Callable[[], RouteRecord | None]) -> None:
        """Bill what `meter` counts from now on."""
        self.meter = meter
        self.route = route

    async def settle(self) -> None:
        """Commit the record of a request that has finished; DatabaseUnavailable when that fails."""
        meter = self.meter
        assert meter is not None, "what has not begun cannot have finished"
        record = self._record("finished", 200, ",".join(sorted(meter.finish_reasons)))
        try:
            await self.commit(record)
        except asyncio.CancelledError:
            # The client left while its record was on the way: a second one would be the same again.
            self._end(record)
            raise
        if self.shows_cost:
            meter.cost_nanos = record.price_nanos
        self._end(record)

    def close(self, status: int | None, fault: str | None) -> None:
        """Book what was seen of a request that was not settled.

        `status` None: the client left before there was one. `fault` None: it left.
        """
        if not self.is_open:
            return
        outcome: Outcome = "cancelled" if fault is None else "failed"
        record = self._record(outcome, status or _CLIENT_LEFT_STATUS, fault or "")
        if status not in _REFUSED_STATUSES:
            # What the workers had no room for, or found wrong, never began.
            self.submit(record)
        self._end(record)

    def _end(self, record: UsageRecord) -> None:
        self.is_open = False
        meter = self.meter
        self.release(self, 0 if meter is None else meter.num_billed_tokens)
        self.ended(self, record)

    def _record(self, outcome: Outcome, status: int, finish: str) -> UsageRecord:
        meter, route = self.meter, self.route()
        total_s = time.monotonic() - self.arrival_s
        num_input, num_cached, num_output, num_reasoning = (
            (0, 0, 0, 0) if meter is None else meter.billed_counts
        )
        return UsageRecord(
            record_id=self.record_id,
            request_id=self.request_id,
            account_id=self.identity.account.id,
            token_id=self.identity.token_id,
            endpoint=_clean(self.endpoint),
            model=_clean(self.model),
            started_s=time.time() - total_s,
            status=status,
            outcome=outcome,
            finish=_clean(finish),
            num_input_tokens=num_input,
            num_cached_tokens=num_cached,
            num_output_tokens=num_output,
            num_reasoning_tokens=num_reasoning,
            price_nanos=self.price.nanos(num_input, num_cached, num_output),
            currency=self.currency,
            prefill_worker="" if route is None else route.prefill or route.decode,
            decode_worker="" if route is None else route.decode,
            route_reason="" if route is None else route.reason or "",
            queue_s=0.0 if meter is None else meter.queue_s,
            ttft_s=None if meter is None else meter.ttft_s,
            total_s=total_s,
        )


def _clean(text: str) -> str:
    """Return text that every database takes."""
    return text[:_MAX_TEXT_CHARS].replace("\0", "").encode("utf-8", "replace").decode()
