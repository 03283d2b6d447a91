"""What the administration endpoints ask of the cluster behind a gateway."""

from __future__ import annotations

from typing import Protocol

import msgspec

from twinfire.protocol.messages import Role


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker of a pool."""

    name: str
    """As its supervisor calls it; the beginning of the instance id where somebody else does."""
    instance_id: str
    role: Role
    model: str
    host: str
    pid: int
    supervised: bool
    draining: bool
    running: int
    waiting: int
    prefill_tokens_waiting: int
    kv_blocks_used: int
    kv_blocks_held: int
    kv_blocks_total: int
    restarts: int


class ClusterStatus(msgspec.Struct, frozen=True):
    """All workers and what waits for them."""

    workers: tuple[WorkerStatus, ...]
    queued_requests: int
    queued_tokens: int
    routes: dict[str, int]
    """Requests by the reason of their route."""
    unready_reason: str | None = None


class ClusterControl(Protocol):
    """A cluster that can be looked at and changed. Faults of the caller are InvalidRequest."""

    def status(self) -> ClusterStatus:
        """Return the present state."""
        ...

    async def scale(self, role: Role, count: int, model: str | None) -> None:
        """Have `count` supervised workers of a role; returns when those that go have gone.

        `model` may be None where there is one.
        """
        ...

    def set_role(self, worker: str, role: Role) -> None:
        """Change what a worker, by name or instance id, is asked to do."""
        ...

    def drain(self, worker: str) -> None:
        """Give a worker nothing new and let it end."""
        ...
