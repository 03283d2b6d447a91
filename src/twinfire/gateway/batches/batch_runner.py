"""Computes queued requests: takes as many from the store as there is room for, and no more.

A request that somebody waits for comes first: while one does, queued ones that run are put back.
What was running when a gateway died is computed again by the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from twinfire.gateway.batches.batch import BatchLimits, ClaimedRequest, RequestOutcome
from twinfire.gateway.batches.batch_store import BatchStore
from twinfire.gateway.batches.spare_capacity import SpareCapacity
from twinfire.gateway.errors import GenerationFailed
from twinfire.gateway.hosted_model import HostedModel, HostedModels
from twinfire.protocol.errors import Overloaded, TwinfireError, WorkerLost

_LOOK_S = 0.1
"""Between two looks at how much room there is, while requests run or wait."""
_SWEEP_S = 60.0
_MAX_WAIT_S = 30.0
"""Of a request that was refused, before it is looked at again."""
_RENEWALS_PER_LEASE = 3

log = logging.getLogger(__name__)


class Answerer(Protocol):
    """Knows what requests mean."""

    async def answer(self, request: ClaimedRequest) -> RequestOutcome:
        """Compute a request; its own faults are outcomes.

        Raises Overloaded, WorkerLost and GenerationFailed, after which it may be tried again.
        """
        ...

    def failure(self, request: ClaimedRequest, error: Exception) -> RequestOutcome:
        """Return the outcome of a request that is given up."""
        ...


@dataclass(slots=True)
class _Running:
    request: ClaimedRequest
    hosted: HostedModel
    task: asyncio.Task[None] = field(init=False)
    is_leaving: bool = False
    """Whether it is being put back."""

    def put_back(self) -> None:
        """Stop it; once, since a second time would stop its return to the store."""
        if not self.is_leaving:
            self.is_leaving = True
            self.task.cancel()


class BatchRunner:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        models: HostedModels,
        store: BatchStore,
        capacity: SpareCapacity,
        answerer: Answerer,
        limits: BatchLimits,
    ) -> None:
        self._models = models
        self._store = store
        self._capacity = capacity
        self._answerer = answerer
        self._limits = limits
        self._running: dict[tuple[str, int], _Running] = {}
        self._wake = asyncio.Event()
        self._may_have_more = True
        """Whether the store may hold requests that nobody computes."""
        self._next_poll_s = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_running(self) -> int:
        """Queued requests that are computed now."""
        return len(self._running)

    def start(self) -> None:
        """Begin; needs the running loop."""
        self._tasks = [
            asyncio.create_task(self._forever(work))
            for work in (self._pull, self._keep_leases, self._sweep)
        ]

    def wake(self) -> None:
        """Look at the store now: there is something new."""
        self._may_have_more = True
        self._wake.set()

    async def stop(self) -> None:
        """Put back what runs, and end."""
        for task in self._tasks:
            task.cancel()
        running = list(self._running.values())
        for one in running:
            one.put_back()
        await asyncio.gather(*self._tasks, *(one.task for one in running), return_exceptions=True)

    async def _forever(self, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await work()
            except TwinfireError as error:
                log.warning("queued requests: %s", error)
                await asyncio.sleep(self._limits.poll_s)

    async def _pull(self) -> None:
        """Compare what runs with what may, once, and wait."""
        loop = asyncio.get_running_loop()
        if loop.time() >= self._next_poll_s:
            self._may_have_more = True
            self._next_poll_s = loop.time() + self._limits.poll_s
        for hosted in self._models:
            mine = [
                one for one in self._running.values() if one.hosted is hosted and not one.is_leaving
            ]
            allowed = self._capacity.num_requests(hosted, len(mine))
            for one in mine[allowed:]:
                one.put_back()
            if len(mine) < allowed and self._may_have_more:
                await self._claim(hosted, allowed - len(mine))
        is_busy = self._running or self._may_have_more
        wait_s = _LOOK_S if is_busy else max(self._next_poll_s - loop.time(), 0.0)
        with contextlib.suppress(TimeoutError):
            # `wait_for` may take a cancellation for the event.
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        self._wake.clear()

    async def _claim(self, hosted: HostedModel, count: int) -> None:
        names = [name for name, one in self._models.by_name.items() if one is hosted]
        claimed = await asyncio.to_thread(self._store.claim, names, count)
        self._may_have_more = len(claimed) == count
        for request in claimed:
            running = _Running(request, hosted)
            running.task = asyncio.create_task(self._run(request))
            running.task.add_done_callback(partial(self._ended, request.key))
            self._running[request.key] = running

    def _ended(self, key: tuple[str, int], _: asyncio.Task[None]) -> None:
        self._running.pop(key, None)
        self.wake()

    async def _run(self, request: ClaimedRequest) -> None:
        try:
            outcome = await self._answerer.answer(request)
        except asyncio.CancelledError:
            await self._release(request, failed=False)
        except Overloaded as error:
            await self._release(request, failed=False, wait_s=min(error.retry_after_s, _MAX_WAIT_S))
        except (WorkerLost, GenerationFailed) as error:
            await self._failed(request, error)
        except Exception as error:
            log.exception("request %d of batch %s failed", request.number, request.batch_id)
            await self._failed(request, error)
        else:
            await self._finish(request, outcome)

    async def _failed(self, request: ClaimedRequest, error: Exception) -> None:
        if request.num_attempts + 1 >= self._limits.max_attempts:
            await self._finish(request, self._answerer.failure(request, error))
        else:
            wait_s = self._limits.retry_s * 2**request.num_attempts
            await self._release(request, failed=True, wait_s=wait_s)

    async def _finish(self, request: ClaimedRequest, outcome: RequestOutcome) -> None:
        try:
            await asyncio.to_thread(self._store.finish, request, outcome)
        except TwinfireError as error:
            # Its lease runs out, and it is computed again.
            log.warning("a queued request's result could not be kept: %s", error)

    async def _release(self, request: ClaimedRequest, *, failed: bool, wait_s: float = 0.0) -> None:
        try:
            await asyncio.to_thread(self._store.release, request, failed=failed, wait_s=wait_s)
        except TwinfireError as error:
            log.warning("a queued request could not be put back: %s", error)

    async def _keep_leases(self) -> None:
        await asyncio.sleep(self._limits.lease_s / _RENEWALS_PER_LEASE)
        if not self._running:
            return
        unwanted = await asyncio.to_thread(self._store.renew, list(self._running))
        for key in unwanted:
            if key in self._running:
                self._running[key].put_back()

    async def _sweep(self) -> None:
        await asyncio.to_thread(self._store.remove_old)
        await asyncio.sleep(_SWEEP_S)
