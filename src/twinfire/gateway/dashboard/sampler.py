"""Everything that the dashboard shows of one moment, read from the gateway when it is asked for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from twinfire import __version__
from twinfire.accounts.prices import money
from twinfire.gateway.accounting.bill import Bill
from twinfire.gateway.cluster_control import ClusterStatus
from twinfire.gateway.dashboard.readings import Point, Reading, Totals, point
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.metrics import FirstTokenPart
from twinfire.gateway.request_log import FinishedRequest

PERCENTILE_WINDOW_S = 30.0
RATE_WINDOW_S = 5.0
_MAX_RUNNING_SHOWN = 50


class ModelNow(msgspec.Struct, frozen=True):
    """One model."""

    name: str
    point: Point
    totals: Totals


class RunningRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is being served."""

    request_id: str
    account: str
    endpoint: str
    model: str
    age_s: float
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None
    prefill_worker: str
    decode_worker: str
    route_reason: str


class LoggedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended; see `FinishedRequest`."""

    number: int
    """Counts from the gateway's start."""
    request_id: str
    account: str
    endpoint: str
    model: str
    started_s: float
    status: int
    outcome: str
    finish: str
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    price: str
    currency: str
    prefill_worker: str
    decode_worker: str
    route_reason: str
    attempts: int
    resumes: int
    ttft_s: float | None
    total_s: float
    first_token_parts: dict[FirstTokenPart, float]


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway now."""

    time_s: float
    """Unix time."""
    is_draining: bool
    models: list[ModelNow]
    cluster: ClusterStatus
    num_running: int
    running: list[RunningRequest]
    """The latest of them."""


class Frame(msgspec.Struct, frozen=True):
    """What is sent every second."""

    now: Moment
    finished: list[LoggedRequest]
    """Those that ended since the last frame."""


class PastMoment(msgspec.Struct, frozen=True):
    """The models at an earlier second, in the order of `Moment.models`."""

    time_s: float
    points: list[Point]


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a page begins with."""

    version: str = __version__
    model_names: list[str]
    """That a client may ask for."""
    uptime_s: float
    history: list[PastMoment]
    """Seconds at which somebody looked, the earliest first."""
    now: Moment
    finished: list[LoggedRequest]
    """The last requests, the earliest first."""


class Sampler:
    """Reads the gateway. Belongs to the event loop's thread."""

    def __init__(self, gateway: Gateway, status: Callable[[], ClusterStatus]) -> None:
        """`status` tells of the workers."""
        self._gateway = gateway
        self._status = status
        self._started_s = time.monotonic()
        self._readings: list[deque[Reading]] = [deque() for _ in gateway.models]

    def moment(self) -> Moment:
        """Return the state now. What is said of a time goes back as far as the last calls."""
        now_s = time.monotonic()
        gateway = self._gateway
        bills = sorted(gateway.open_bills, key=lambda bill: bill.arrival_s, reverse=True)
        return Moment(
            time_s=time.time(),
            is_draining=gateway.draining,
            models=self._models(now_s),
            cluster=self._status(),
            num_running=len(bills),
            running=[_running(bill, now_s) for bill in bills[:_MAX_RUNNING_SHOWN]],
        )

    def snapshot(self, history: list[PastMoment], now: Moment) -> Snapshot:
        """Return all that is known."""
        models = self._gateway.models
        return Snapshot(
            model_names=[*models.by_name, *self._gateway.external.by_name],
            uptime_s=time.monotonic() - self._started_s,
            history=history,
            now=now,
            finished=self.finished_after(0),
        )

    @property
    def num_finished(self) -> int:
        """Number of the last request that ended."""
        return self._gateway.requests.num_finished

    def finished_after(self, number: int) -> list[LoggedRequest]:
        """Return the requests after one, the earliest first."""
        requests = self._gateway.requests
        found = requests.after(number)
        first = requests.num_finished - len(found) + 1
        return [_logged(first + index, request) for index, request in enumerate(found)]

    def _models(self, now_s: float) -> list[ModelNow]:
        models = []
        for hosted, readings in zip(self._gateway.models, self._readings, strict=True):
            readings.append(Reading.of(hosted.metrics, now_s))
            while readings[0].time_s < now_s - PERCENTILE_WINDOW_S:
                readings.popleft()
            known = list(readings)
            now = point(known, RATE_WINDOW_S)
            models.append(ModelNow(hosted.model.names[0], now, known[-1].totals()))
        return models


def _running(bill: Bill, now_s: float) -> RunningRequest:
    meter, route = bill.meter, bill.route()
    return RunningRequest(
        request_id=bill.request_id,
        account=bill.identity.account.name,
        endpoint=bill.endpoint,
        model=bill.model,
        age_s=now_s - bill.arrival_s,
        input_tokens=meter.num_prompt_tokens if meter else 0,
        cached_tokens=meter.num_cached_tokens if meter else 0,
        output_tokens=meter.num_output_tokens if meter else 0,
        ttft_s=meter.ttft_s if meter else None,
        prefill_worker=(route.prefill or route.decode) if route else "",
        decode_worker=route.decode if route else "",
        route_reason=(route.reason or "") if route else "",
    )


def _logged(number: int, request: FinishedRequest) -> LoggedRequest:
    return LoggedRequest(
        number=number,
        request_id=request.request_id,
        account=request.account,
        endpoint=request.endpoint,
        model=request.model,
        started_s=request.started_s,
        status=request.status,
        outcome=request.outcome,
        finish=request.finish,
        input_tokens=request.num_input_tokens,
        cached_tokens=request.num_cached_tokens,
        output_tokens=request.num_output_tokens,
        reasoning_tokens=request.num_reasoning_tokens,
        price=money(request.price_nanos),
        currency=request.currency,
        prefill_worker=request.prefill_worker,
        decode_worker=request.decode_worker,
        route_reason=request.route_reason,
        attempts=request.num_attempts,
        resumes=request.num_resumes,
        ttft_s=request.ttft_s,
        total_s=request.total_s,
        first_token_parts=request.first_token_parts,
    )
