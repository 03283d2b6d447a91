"""The stream of moments: one sampling task for all who look, and none where nobody does."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager

from twinfire.gateway.dashboard.sampler import Frame, Moment, PastMoment, Sampler, Snapshot
from twinfire.gateway.errors import HttpError

MAX_VIEWERS = 32
_INTERVAL_S = 1.0
_HISTORY = 300


class Feed:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        is_ending: Callable[[], bool],
        interval_s: float = _INTERVAL_S,
    ) -> None:
        """`is_ending` says when streams shall end."""
        self._sampler = sampler
        self._is_ending = is_ending
        self._interval_s = interval_s
        self._history: deque[PastMoment] = deque(maxlen=_HISTORY)
        self._num_viewers = 0
        self._sampling: asyncio.Task[None] | None = None
        self._next: asyncio.Future[Moment] | None = None

    @property
    def is_sampling(self) -> bool:
        """Whether anything is done."""
        return self._sampling is not None

    def snapshot(self) -> Snapshot:
        """Return the state now."""
        return self._sampler.snapshot(list(self._history), self._sampler.moment())

    async def frames(self) -> AsyncGenerator[Snapshot | Frame, None]:
        """Yield a snapshot and then a frame a second. HttpError 429 for one viewer too many."""
        with self._viewer():
            seen = self._sampler.num_finished
            yield self.snapshot()
            while not self._is_ending():
                moment = await self._next_moment()
                finished = self._sampler.finished_after(seen)
                seen = self._sampler.num_finished
                yield Frame(moment, finished)

    @contextmanager
    def _viewer(self) -> Iterator[None]:
        if self._num_viewers >= MAX_VIEWERS:
            raise HttpError(429, f"{MAX_VIEWERS} dashboards are open already.", code="too_many")
        self._num_viewers += 1
        if self._sampling is None:
            self._next = asyncio.get_running_loop().create_future()
            self._sampling = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            self._num_viewers -= 1
            if not self._num_viewers:
                self._sampling.cancel()
                self._sampling = None

    async def _next_moment(self) -> Moment:
        assert self._next is not None, "nobody looks"
        # One viewer that leaves must not take the others' future with it.
        return await asyncio.shield(self._next)

    async def _sample(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._interval_s)
            assert self._next is not None, "set before sampling begins"
            done, self._next = self._next, loop.create_future()
            try:
                moment = self._sampler.moment()
            except Exception as error:
                # Each viewer is told, and looks again.
                done.set_exception(error)
                continue
            points = [model.point for model in moment.models]
            self._history.append(PastMoment(moment.time_s, points))
            done.set_result(moment)
