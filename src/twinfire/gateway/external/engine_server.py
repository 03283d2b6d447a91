"""One engine's server as the gateway knows it, and the choice among several by tokens.

No tokenizer is at hand, so that load is counted in estimated tokens of our own requests; an entry
lives exactly as long as its leg.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from itertools import count
from urllib.parse import urlsplit

from twinfire.gateway.cluster_control import EngineState
from twinfire.gateway.external.circuit_breaker import CircuitBreaker
from twinfire.gateway.external.external_table import EngineStage
from twinfire.gateway.health_record import HealthRecord
from twinfire.gateway.routing.ledger import Ledger, LedgerEntry

HOME_ESCAPE_TOKENS = 8192
"""How much more work a session's home may have than the least busy engine."""


class EngineServer:
    """One address. It takes requests once a health check has passed."""

    def __init__(self, url: str, stage: EngineStage, bootstrap_port: int = 0) -> None:
        self.url = url.rstrip("/")
        self.stage = stage
        self.host = urlsplit(url).hostname or ""
        self.bootstrap_port = bootstrap_port
        self.ledger = Ledger()
        self.breaker = CircuitBreaker()
        self.last_used = 0
        self.health = HealthRecord()
        self.num_requests = 0
        """Sent there since the start."""
        self.failures: Counter[str] = Counter()
        """Of these, what did not get a good answer, by the kind of fault."""

    @property
    def title(self) -> str:
        """What the log calls it."""
        return f"the engine at {self.url}"

    @property
    def state(self) -> EngineState:
        """What it may be given now."""
        if not self.health.is_healthy:
            return "unhealthy"
        return "paused" if self.breaker.is_open else "ready"

    def is_available(self) -> bool:
        """Whether a request may go there now."""
        return self.health.is_healthy and self.breaker.allows(time.monotonic())

    def failed(self) -> None:
        """It broke a request."""
        self.breaker.failed(time.monotonic())


class EnginePool:
    """Servers of one stage."""

    def __init__(self, servers: Iterable[EngineServer]) -> None:
        self.servers: Sequence[EngineServer] = tuple(servers)
        self._uses = count(1)

    def has_available(self) -> bool:
        """Whether anybody could take a request."""
        return any(one.is_available() for one in self.servers)

    def choose(
        self, excluded: Collection[EngineServer] = (), session: str | None = None
    ) -> EngineServer | None:
        """Return the server with the fewest tokens, of equals the one unused for longest.

        A named session stays at its home, where its cache is, while that is not much busier.
        """
        able = [one for one in self.servers if one not in excluded and one.is_available()]
        least = min(able, key=lambda one: (one.ledger.load, one.last_used), default=None)
        if session is None or least is None:
            return least
        home = max(able, key=lambda one: _score(one.url, session))
        is_much_busier = home.ledger.load > least.ledger.load + HOME_ESCAPE_TOKENS
        return least if is_much_busier else home

    def charge(self, server: EngineServer, num_tokens: int) -> LedgerEntry:
        """Count a request that goes to `server`; close the entry when its leg ends."""
        server.last_used = next(self._uses)
        server.num_requests += 1
        server.breaker.sent(time.monotonic())
        return server.ledger.open(num_tokens)


def _score(url: str, session: str) -> bytes:
    return blake2b(f"{url} {session}".encode(), digest_size=8).digest()
