"""Requests wait here while no worker can take them.

Bounded by requests and tokens. Served by priority, which rises with waiting, and in order of
arrival within; a request that fits may pass one that does not, but nobody of its lane passes the
first that has waited `max_passed_s`, and nobody at all if that waits for KV blocks, so that a huge
one gets its room. Woken by the router when load falls, never by polling. Whoever enters gets a
route, or an error by its deadline.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from twinfire.gateway.routing.lane import Lane
from twinfire.gateway.routing.route import AllBusy, NoWorker, Route, RouteRequest
from twinfire.gateway.routing.router import Router
from twinfire.protocol.errors import Overloaded, TwinfireError

_MAX_FAILURES = 4
"""Requests of one lane that a wake-up fails to place at most: a long queue costs little."""


@dataclass(order=True, slots=True)
class _Waiter:
    rank_s: float
    """Arrival, later by `ageing_s` for each step of priority: time alone brings everyone ahead."""
    number: int
    since_s: float = field(compare=False)
    request: RouteRequest = field(compare=False)
    num_blocks: int = field(compare=False)
    route: asyncio.Future[Route] = field(compare=False)
    lane: Lane | None = field(default=None, compare=False)
    """As its last try found it; None until somebody asks, and while there is no worker."""
    waits_for_blocks: bool = field(default=False, compare=False)
    no_worker_timer: asyncio.TimerHandle | None = field(default=None, compare=False)


class AdmissionQueue:
    """The way to a router for requests that may wait. Belongs to one event loop."""

    def __init__(self, router: Router, clock: Callable[[], float]) -> None:
        """`clock` must run like the loop's own."""
        self._router = router
        self._settings = router.settings
        self._clock = clock
        self._waiters: list[_Waiter] = []
        self._num_entered = 0
        self._is_woken = False
        self.num_tokens = 0
        """Context tokens of the requests that wait."""
        router.when_room(self._wake)

    def __len__(self) -> int:
        return len(self._waiters)

    async def enter(
        self, request: RouteRequest, deadline: float | None, *, reject_if_busy: bool = False
    ) -> Route:
        """Return a route, as soon as there is one.

        `deadline` is a reading of the clock, None for none. Raises InvalidRequest at once for what
        no worker could ever take; Overloaded when the queue is full, at the deadline, and instead
        of waiting with `reject_if_busy`; NoWorker when nobody serves the model for
        `no_worker_wait_s`. A caller that is cancelled owes nothing (await it
        directly: a task around it could end with a route that nobody takes).
        """
        self._router.check_can_ever_fit(request)
        waiter = self._waiter(request)
        may_go = self._may_go(waiter)
        if reject_if_busy:
            if may_go:
                return self._router.route(request)
            raise Overloaded("requests are queued already", self._retry_after_s(waiter))
        if may_go:
            route = self._try(waiter)
            if route is not None or waiter.route.done():
                return route or waiter.route.result()
        self._check_room(waiter)
        insort(self._waiters, waiter)
        self.num_tokens += request.num_context_tokens
        self._wake()
        try:
            return await self._first_of(waiter, deadline)
        finally:
            self._withdraw(waiter)

    def _waiter(self, request: RouteRequest) -> _Waiter:
        now_s = self._clock()
        self._num_entered += 1
        return _Waiter(
            rank_s=now_s + request.priority * self._settings.ageing_s,
            number=self._num_entered,
            since_s=now_s,
            request=request,
            num_blocks=self._router.num_blocks_wanted(request),
            route=asyncio.get_running_loop().create_future(),
        )

    def _may_go(self, waiter: _Waiter) -> bool:
        """Whether nobody ahead of it waits for what it may need."""
        for one in self._waiters:
            if waiter < one:
                return True
            if one.waits_for_blocks or self._lane(one) in (None, self._lane(waiter)):
                return False
        return True

    def _lane(self, waiter: _Waiter) -> Lane | None:
        if waiter.lane is None:
            waiter.lane = self._router.lane(waiter.request)
        return waiter.lane

    async def _first_of(self, waiter: _Waiter, deadline: float | None) -> Route:
        loop = asyncio.get_running_loop()
        timer = None
        if deadline is not None:
            remaining_s = max(deadline - self._clock(), 0.0)
            timer = loop.call_later(remaining_s, self._give_up, waiter)
        try:
            return await waiter.route
        except asyncio.CancelledError:
            route = waiter.route
            if route.done() and not route.cancelled() and route.exception() is None:
                route.result().charge.release(finished=False)
            raise
        finally:
            for one in (timer, waiter.no_worker_timer):
                if one is not None:
                    one.cancel()

    def _give_up(self, waiter: _Waiter) -> None:
        waited_s = self._clock() - waiter.since_s
        message = f"no worker was free within {waited_s:.1f} s"
        self._fail(waiter, Overloaded(message, self._retry_after_s(waiter)))

    def _give_up_without_worker(self, waiter: _Waiter, error: NoWorker) -> None:
        waiter.no_worker_timer = None
        if not self._router.pool.can_serve():
            self._fail(waiter, error)

    def _fail(self, waiter: _Waiter, error: TwinfireError) -> None:
        if not waiter.route.done():
            waiter.route.set_exception(error)

    def _check_room(self, waiter: _Waiter) -> None:
        tokens = self.num_tokens + waiter.request.num_context_tokens
        # An empty queue takes any request, or those above its limit would never be served.
        if self._waiters and (
            len(self._waiters) >= self._settings.max_queued_requests
            or tokens > self._settings.max_queued_tokens
        ):
            raise Overloaded("too many requests are queued", self._retry_after_s(waiter))

    def _retry_after_s(self, last: _Waiter) -> float:
        ahead = [one for one in self._waiters if one is not last]
        blocks = sum(one.num_blocks for one in ahead) + last.num_blocks
        tokens = sum(one.request.num_context_tokens for one in ahead)
        return self._router.retry_after_s(tokens + last.request.num_context_tokens, blocks)

    def _withdraw(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._remove(waiter)
            # Whoever could not pass it may go now.
            self._wake()

    def _remove(self, waiter: _Waiter) -> None:
        self._waiters.remove(waiter)
        self.num_tokens -= waiter.request.num_context_tokens

    def _wake(self) -> None:
        if self._waiters and not self._is_woken:
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._place)

    def _place(self) -> None:
        self._is_woken = False
        now_s = self._clock()
        num_failures: Counter[Lane | None] = Counter()
        closed: set[Lane | None] = set()
        for waiter in list(self._waiters):
            if waiter.route.done() or (closed and self._lane(waiter) in closed):
                continue
            route = self._try(waiter)
            if route is not None:
                self._remove(waiter)
                waiter.route.set_result(route)
                continue
            lane = self._lane(waiter)
            num_failures[lane] += 1
            has_waited_long = now_s - waiter.since_s >= self._settings.max_passed_s
            holds_others_back = has_waited_long and not waiter.route.done()
            if holds_others_back and waiter.waits_for_blocks:
                return
            if holds_others_back or num_failures[lane] >= _MAX_FAILURES:
                closed.add(lane)

    def _try(self, waiter: _Waiter) -> Route | None:
        try:
            return self._router.route(waiter.request)
        except AllBusy as busy:
            waiter.waits_for_blocks = busy.lane is None
            waiter.lane = busy.lane or waiter.lane
            return None
        except NoWorker as error:
            if waiter.request.exclude:
                self._fail(waiter, error)
            elif waiter.no_worker_timer is None:
                waiter.no_worker_timer = asyncio.get_running_loop().call_later(
                    self._settings.no_worker_wait_s, self._give_up_without_worker, waiter, error
                )
            return None
        except TwinfireError as error:
            self._fail(waiter, error)
            return None
