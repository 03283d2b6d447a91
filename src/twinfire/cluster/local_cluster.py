"""The cluster behind one gateway, as its administration sees it: joined workers and our own."""

from __future__ import annotations

from twinfire.cluster.supervisor import Supervisor
from twinfire.gateway.backends.cluster_backend import ClusterBackend
from twinfire.gateway.backends.pool_member import PoolMember
from twinfire.gateway.cluster_control import ClusterStatus, WorkerStatus
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import Role

_SHORT_NAME_CHARS = 8


class LocalCluster:
    """A `ClusterControl` over a backend's pool and the supervisor of this machine's workers."""

    def __init__(self, backend: ClusterBackend, supervisor: Supervisor) -> None:
        self._backend = backend
        self._supervisor = supervisor

    def status(self) -> ClusterStatus:
        """Return the present state."""
        workers = sorted(map(self._describe, self._backend.registry), key=lambda one: one.name)
        admission = self._backend.admission
        reasons = self._backend.router.tallies.reasons
        return ClusterStatus(
            workers=tuple(workers),
            queued_requests=len(admission),
            queued_tokens=admission.num_tokens,
            routes={str(reason): count for reason, count in reasons.items()},
            unready_reason=self._backend.unready_reason,
        )

    async def scale(self, role: Role, count: int) -> None:
        """Have `count` supervised workers of a role; returns when those that go have gone."""
        await self._supervisor.scale(role, count)

    def set_role(self, worker: str, role: Role) -> None:
        """Change what a worker is asked to do."""
        self._backend.registry.set_role(self._instance(worker), role)

    def drain(self, worker: str) -> None:
        """Give a worker nothing new and let it end; one of ours is not started again."""
        instance_id = self._instance(worker)
        self._supervisor.retire(worker)
        self._backend.registry.drain(instance_id)

    def _describe(self, member: PoolMember) -> WorkerStatus:
        info, load = member.info, member.load
        slot = self._supervisor.slot_of(info.pid)
        return WorkerStatus(
            name=slot.name if slot else info.instance_id[:_SHORT_NAME_CHARS],
            instance_id=info.instance_id,
            role=info.role,
            model=info.model,
            host=info.host,
            pid=info.pid,
            supervised=slot is not None,
            draining=member.is_draining,
            running=load.running if load else 0,
            waiting=load.waiting if load else 0,
            prefill_tokens_waiting=load.prefill_tokens_waiting if load else 0,
            kv_blocks_used=load.kv_blocks_used if load else 0,
            kv_blocks_held=load.kv_blocks_held if load else 0,
            kv_blocks_total=info.num_kv_blocks,
            restarts=slot.num_restarts if slot else 0,
        )

    def _instance(self, worker: str) -> str:
        """Return the instance id of a worker's name or of the beginning of its id."""
        found = [
            status.instance_id
            for status in self.status().workers
            if worker == status.name or status.instance_id.startswith(worker)
        ]
        if not worker or len(found) != 1:
            known = ", ".join(status.name for status in self.status().workers) or "none"
            raise InvalidRequest(
                f"`{worker}` names {len(found)} workers; there are: {known}", param="worker"
            )
        return found[0]
