"""Asking other servers for their health, for as long as they may be given work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Protocol

import aiohttp

from twinfire.gateway.health_record import HealthRecord

log = logging.getLogger(__name__)


class WatchedServer(Protocol):
    """A server and where its answers are noted. Its address may change while it is watched."""

    health: HealthRecord
    url: str
    """Without a path."""

    @property
    def title(self) -> str:
        """What the log calls it."""
        ...


class HealthWatch:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        servers: Sequence[WatchedServer],
        *,
        interval_s: float,
        timeout_s: float,
    ) -> None:
        self._session = session
        self._servers = servers
        self._interval_s = interval_s
        self._limit = aiohttp.ClientTimeout(total=timeout_s)
        self._watches: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to watch; returns once each server has been asked."""
        await asyncio.gather(*map(self._check, self._servers))
        self._watches = [asyncio.create_task(self._watch(server)) for server in self._servers]

    async def close(self) -> None:
        """Ask no more."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)

    async def _watch(self, server: WatchedServer) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            was_healthy = server.health.is_healthy
            await self._check(server)
            if server.health.is_healthy != was_healthy:
                state = "healthy" if server.health.is_healthy else "not healthy"
                log.warning("%s is %s", server.title, state)

    async def _check(self, server: WatchedServer) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._session.get(server.url + "/health", timeout=self._limit) as response:
                if response.status == 200:
                    server.health.passed()
                    return
        server.health.failed()
