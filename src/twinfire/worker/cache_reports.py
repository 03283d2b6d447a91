"""Tells gateways which blocks can be found here, so that they route by what workers hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from twinfire.protocol.messages import CacheEvents
from twinfire.worker.gateway_links import GatewayLinks

PERIOD_S = 0.05
"""Steps closer than this are reported together."""


class CachingEngine(Protocol):
    """An engine that says what its prefix cache holds."""

    def take_cache_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return hashes stored and removed since the last call."""
        ...

    def cached_hashes(self) -> list[bytes]:
        """Return all hashes that can be found."""
        ...


class CacheReports:
    """Numbers and sends the events of one worker's life."""

    def __init__(
        self, engine: CachingEngine, gateways: GatewayLinks, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._gateways = gateways
        self._clock = clock
        self._sequence = 0
        self._next_s = 0.0

    def pump(self, *, at_once: bool = False) -> None:
        """Report what has changed, unless that was done a moment ago."""
        if not at_once and self._clock() < self._next_s:
            return
        self._next_s = self._clock() + PERIOD_S
        stored, removed = self._engine.take_cache_events()
        if stored or removed:
            self._sequence += 1
            self._gateways.broadcast(
                CacheEvents(self._sequence, b"".join(stored), b"".join(removed))
            )

    def send_all(self, gateway_id: str) -> None:
        """Tell one gateway everything anew."""
        self.pump(at_once=True)
        stored = b"".join(self._engine.cached_hashes())
        self._gateways.send(gateway_id, CacheEvents(self._sequence, stored, reset=True))
