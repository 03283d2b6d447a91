"""The workers of a gateway that has no cluster: one a model, which the gateway itself started."""

from __future__ import annotations

from twinfire.gateway.cluster_control import (
    AbsentState,
    AbsentWorker,
    ClusterStatus,
    WorkerStatus,
    worker_status,
)
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
    return worker_status(
        info,
        next(iter(hosted.metrics.loads.values()), None),
        name=info.name or _NAME,
        model=hosted.model.names[0],
        supervised=True,
        draining=info.draining,
        restarts=0,
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
