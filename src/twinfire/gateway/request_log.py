"""What has become of the last requests: a bounded list, and whoever else wants to hear.

Holds counts and times, never what was asked or answered. A request costs one small object here;
nothing is done for a token.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from twinfire.gateway.metrics import FirstTokenPart

if TYPE_CHECKING:
    from twinfire.accounts.usage_record import UsageRecord
    from twinfire.gateway.accounting.bill import Bill
    from twinfire.gateway.exchange import Exchange

_CAPACITY = 256
_CLIENT_LEFT_STATUS = 499
_ADMIN = "/cluster/"

log = logging.getLogger(__name__)


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request and its end. Times in seconds; workers by instance id, "" for none."""

    request_id: str
    account: str
    """The account's name."""
    endpoint: str
    model: str
    started_s: float
    """Unix time."""
    status: int
    """499 where the client left before there was one."""
    outcome: str
    """finished, failed or cancelled."""
    finish: str
    """Finish reasons of the choices; the fault's code of a failure."""
    total_s: float
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    price_nanos: int = 0
    currency: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    route_reason: str = ""
    num_attempts: int = 0
    num_resumes: int = 0
    ttft_s: float | None = None
    first_token_parts: dict[FirstTokenPart, float] = {}
    """Parts of `ttft_s`; empty where no token came."""
    traceparent: str = ""
    """The client's trace, as its header named it."""


Observer = Callable[[FinishedRequest], None]


class RequestLog:
    """The last requests of a gateway. Belongs to the event loop's thread."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self.num_finished = 0
        """All of them, which numbers the last one."""
        self._last: deque[FinishedRequest] = deque(maxlen=capacity)
        self._observers: list[Observer] = []

    def report_to(self, observer: Observer) -> None:
        """Tell `observer` of every request from now on."""
        self._observers.append(observer)

    def after(self, number: int) -> list[FinishedRequest]:
        """Return those with a higher number that are still known, the earliest first."""
        num_new = min(max(self.num_finished - number, 0), len(self._last))
        return list(islice(self._last, len(self._last) - num_new, None))

    def add_billed(self, bill: Bill, record: UsageRecord) -> None:
        """Take a request that a model was to compute for."""
        meter, route = bill.meter, bill.route()
        self._add(
            FinishedRequest(
                request_id=record.request_id,
                account=bill.identity.account.name,
                endpoint=record.endpoint,
                model=record.model,
                started_s=record.started_s,
                status=record.status,
                outcome=record.outcome,
                finish=record.finish,
                total_s=record.total_s,
                num_input_tokens=record.num_input_tokens,
                num_cached_tokens=record.num_cached_tokens,
                num_output_tokens=record.num_output_tokens,
                num_reasoning_tokens=record.num_reasoning_tokens,
                price_nanos=record.price_nanos,
                currency=record.currency,
                prefill_worker=record.prefill_worker,
                decode_worker=record.decode_worker,
                route_reason=record.route_reason,
                num_attempts=route.num_attempts if route else 0,
                num_resumes=route.num_resumes if route else 0,
                ttft_s=record.ttft_s,
                first_token_parts=dict(meter.first_token_parts) if meter else {},
                traceparent=bill.traceparent,
            )
        )

    def add_unbilled(self, exchange: Exchange) -> None:
        """Take a request that has no bill: refused before it was admitted, or somebody else's."""
        is_of_interest = exchange.body or exchange.fault
        if exchange.bill is not None or not is_of_interest or exchange.path.startswith(_ADMIN):
            return
        fault, status = exchange.fault, exchange.status
        total_s = time.monotonic() - exchange.arrival_s
        outcome = "failed" if fault else "cancelled" if status is None else "finished"
        detail = fault.body.error if fault else None
        self._add(
            FinishedRequest(
                request_id=exchange.request_id,
                account=exchange.account.name,
                endpoint=exchange.path,
                model="",
                started_s=time.time() - total_s,
                status=status or _CLIENT_LEFT_STATUS,
                outcome=outcome,
                finish=(detail.code or detail.type) if detail else "",
                total_s=total_s,
                traceparent=exchange.headers.get("traceparent", ""),
            )
        )

    def _add(self, request: FinishedRequest) -> None:
        self.num_finished += 1
        self._last.append(request)
        for observer in self._observers:
            try:
                observer(request)
            except Exception:
                # Whoever watches must never break what is watched.
                log.exception("an observer of requests failed")
