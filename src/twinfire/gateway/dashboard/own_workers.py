"""The workers of a gateway that has no cluster: one a model, which the gateway itself started."""

from __future__ import annotations

from twinfire.gateway.cluster_control import AbsentState, AbsentWorker, ClusterStatus, WorkerStatus
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.hosted_model import HostedModel

_LOADING = "loading"
_NAME = "worker"


def own_workers_status(gateway: Gateway) -> ClusterStatus:
    """Return them in the shape of a cluster's, without routes and a queue."""
    workers = [_present(one) for one in gateway.models]
    absent = [_absent(one) for one in gateway.models]
    return ClusterStatus(
        workers=tuple(one for one in workers if one is not None),
        queued_requests=0,
        queued_tokens=0,
        routes={},
        unready_reason=gateway.unready_reason,
        absent=tuple(one for one in absent if one is not None),
    )


def _present(hosted: HostedModel) -> WorkerStatus | None:
    info = hosted.backend.worker_info
    if info is None:
        return None
    load = next(iter(hosted.metrics.loads.values()), None)
    return WorkerStatus(
        name=info.name or _NAME,
        instance_id=info.instance_id,
        role=info.role,
        model=hosted.model.names[0],
        host=info.host,
        pid=info.pid,
        supervised=True,
        draining=info.draining,
        running=load.running if load else 0,
        waiting=load.waiting if load else 0,
        prefill_tokens_waiting=load.prefill_tokens_waiting if load else 0,
        kv_blocks_used=load.kv_blocks_used if load else 0,
        kv_blocks_held=load.kv_blocks_held if load else 0,
        kv_blocks_total=info.num_kv_blocks,
        restarts=0,
        block_size=info.block_size,
        prefill_tokens_per_s=load.prefill_tokens_per_s if load else 0.0,
        decode_step_s=load.decode_step_s if load else 0.0,
    )


def _absent(hosted: HostedModel) -> AbsentWorker | None:
    reason = hosted.backend.unready_reason
    if reason is None:
        return None
    state: AbsentState = "starting" if reason.startswith(_LOADING) else "restarting"
    return AbsentWorker(
        name=_NAME,
        role="mixed",
        model=hosted.model.names[0],
        state=state,
        reason=reason,
        restarts=0,
        next_start_in_s=None,
    )
