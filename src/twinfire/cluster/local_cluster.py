"""The cluster behind one gateway, as its administration sees it.

Workers that have joined, places for our own that are empty, and the engines of external models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from twinfire.cluster.model_pools import ModelPools
from twinfire.cluster.worker_slot import WorkerSlot
from twinfire.gateway.backends.pool_member import PoolMember
from twinfire.gateway.cluster_control import (
    AbsentState,
    AbsentWorker,
    ClusterStatus,
    EngineStatus,
    WorkerStatus,
    worker_status,
)
from twinfire.gateway.external.external_models import ExternalModels
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import Role

if TYPE_CHECKING:
    from twinfire.gateway.external.engine_server import EngineServer
    from twinfire.gateway.external.external_pool import ExternalPool


class LocalCluster:
    """A `ClusterControl` over the pools of this machine's cluster."""

    def __init__(self, pools: Sequence[ModelPools], external: ExternalModels | None = None) -> None:
        self._pools = pools
        self._external = external or ExternalModels()

    def status(self) -> ClusterStatus:
        """Return the present state."""
        routes: Counter[str] = Counter()
        for pools in self._pools:
            routes.update(map(str, pools.backend.router.tallies.reasons.elements()))
        reasons = [pools.backend.unready_reason for pools in self._pools]
        reasons += self._external.unready_reasons().values()
        queues = [pools.backend.admission for pools in self._pools]
        return ClusterStatus(
            workers=tuple(status for _, status in self._workers()),
            queued_requests=sum(map(len, queues)),
            queued_tokens=sum(queue.num_tokens for queue in queues),
            routes=dict(routes),
            unready_reason="; ".join(filter(None, reasons)) or None,
            absent=tuple(
                _describe_absent(pools, role, slot)
                for pools in self._pools
                for role, slot in pools.supervisor.absent()
            ),
            engines=tuple(
                _describe_engine(pool, server)
                for pool in self._external.pools
                for server in pool.servers
            ),
        )

    async def scale(self, role: Role, count: int, model: str | None) -> None:
        """Have `count` supervised workers of a role; returns when those that go have gone."""
        await self._pools_of(model).supervisor.scale(role, count)

    def set_role(self, worker: str, role: Role) -> None:
        """Change what a worker is asked to do."""
        pools, status = self._find(worker)
        pools.backend.registry.set_role(status.instance_id, role)

    def drain(self, worker: str) -> None:
        """Give a worker nothing new and let it end; one of ours is not started again."""
        pools, status = self._find(worker)
        pools.backend.registry.drain(status.instance_id)
        if status.supervised:
            pools.supervisor.retire(status.name)

    def _pools_of(self, model: str | None) -> ModelPools:
        found = [pools for pools in self._pools if model is None or model in pools.names]
        if len(found) != 1:
            known = ", ".join(pools.names[0] for pools in self._pools)
            raise InvalidRequest(f"say which model: there are {known}", param="model")
        return found[0]

    def _workers(self) -> list[tuple[ModelPools, WorkerStatus]]:
        workers = [
            (pools, _describe(pools, member))
            for pools in self._pools
            for member in pools.backend.registry
        ]
        return sorted(workers, key=lambda found: found[1].name)

    def _find(self, worker: str) -> tuple[ModelPools, WorkerStatus]:
        """Return the worker of a name, or of the beginning of an instance id."""
        workers = self._workers()
        found = [
            (pools, status)
            for pools, status in workers
            if worker and (worker == status.name or status.instance_id.startswith(worker))
        ]
        if len(found) != 1:
            known = ", ".join(status.name for _, status in workers) or "none"
            raise InvalidRequest(
                f"`{worker}` names {len(found)} workers; there are: {known}", param="worker"
            )
        return found[0]


def _describe(pools: ModelPools, member: PoolMember) -> WorkerStatus:
    slot = pools.supervisor.slot_of(member.info)
    return worker_status(
        member.info,
        member.load,
        name=pools.supervisor.name_of(member.info),
        model=pools.names[0],
        supervised=slot is not None,
        draining=member.is_draining,
        restarts=slot.num_restarts if slot else 0,
    )


def _describe_absent(pools: ModelPools, role: Role, slot: WorkerSlot) -> AbsentWorker:
    state: AbsentState = "starting"
    reason = "" if slot.last_exit is None else f"the last one exited with status {slot.last_exit}"
    if slot.failure is not None:
        state, reason = "failed", slot.failure
    elif slot.next_start_in_s is not None:
        state = "restarting"
    return AbsentWorker(
        name=slot.name,
        role=role,
        model=pools.names[0],
        state=state,
        reason=reason,
        restarts=slot.num_restarts,
        next_start_in_s=slot.next_start_in_s,
    )


def _describe_engine(pool: ExternalPool, server: EngineServer) -> EngineStatus:
    return EngineStatus(
        model=pool.names[0],
        engine=pool.engine,
        stage=server.stage,
        url=server.url,
        state=server.state,
        running=server.ledger.num_entries,
        tokens=server.ledger.load,
        requests=server.num_requests,
        failures=server.failures.total(),
    )
