"""What the administration endpoints ask of the cluster behind a gateway."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from twinfire.protocol.messages import Load, Role, WorkerInfo

EngineState = Literal["ready", "unhealthy", "paused"]
"""`paused`: it broke several requests in a row and gets one to try from time to time."""
AbsentState = Literal["starting", "restarting", "failed"]


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
    block_size: int = 0
    """Tokens of a KV block."""
    prefill_tokens_per_s: float = 0.0
    """Measured by the worker; 0 before the first prompt."""
    decode_step_s: float = 0.0
    """The same of a step that only decodes."""
    drafted: tuple[int, ...] = ()
    """Draft tokens verified since its start, by position; empty where it does not speculate."""
    accepted: tuple[int, ...] = ()
    """Those accepted."""


def worker_status(
    info: WorkerInfo,
    load: Load | None,
    *,
    name: str,
    model: str,
    supervised: bool,
    draining: bool,
    restarts: int,
) -> WorkerStatus:
    """Describe a worker by what it says of itself; `load` is None before its first report."""
    return WorkerStatus(
        name=name,
        instance_id=info.instance_id,
        role=info.role,
        model=model,
        host=info.host,
        pid=info.pid,
        supervised=supervised,
        draining=draining,
        running=load.running if load else 0,
        waiting=load.waiting if load else 0,
        prefill_tokens_waiting=load.prefill_tokens_waiting if load else 0,
        kv_blocks_used=load.kv_blocks_used if load else 0,
        kv_blocks_held=load.kv_blocks_held if load else 0,
        kv_blocks_total=info.num_kv_blocks,
        restarts=restarts,
        block_size=info.block_size,
        prefill_tokens_per_s=load.prefill_tokens_per_s if load else 0.0,
        decode_step_s=load.decode_step_s if load else 0.0,
        drafted=load.drafted if load else (),
        accepted=load.accepted if load else (),
    )


class AbsentWorker(msgspec.Struct, frozen=True):
    """A supervised worker that does not serve now."""

    name: str
    role: Role
    model: str
    state: AbsentState
    reason: str
    """Why it is not there; empty for one that starts for the first time."""
    restarts: int
    next_start_in_s: float | None
    """None where it is starting, and where it never will."""


class EngineStatus(msgspec.Struct, frozen=True):
    """One server of an external model. Counts are since the gateway's start."""

    model: str
    engine: str
    stage: Literal["prefill", "decode", "mixed"]
    url: str
    state: EngineState
    running: int
    tokens: int
    """Of what runs there for us, estimated."""
    requests: int
    failures: int


class ClusterStatus(msgspec.Struct, frozen=True):
    """All workers and what waits for them."""

    workers: tuple[WorkerStatus, ...]
    """Those that have joined."""
    queued_requests: int
    queued_tokens: int
    routes: dict[str, int]
    """Requests by the reason of their route."""
    unready_reason: str | None = None
    absent: tuple[AbsentWorker, ...] = ()
    engines: tuple[EngineStatus, ...] = ()
    """Those of external models."""


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
