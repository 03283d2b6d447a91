"""The backend of one model served by a cluster's workers."""

from __future__ import annotations

from array import array

from twinfire.gateway.backends.cluster_pool import ClusterPool
from twinfire.gateway.backends.cluster_request import ClusterRequest
from twinfire.gateway.backends.liveness import LivenessLimits
from twinfire.gateway.backends.pd_generation import PdGeneration
from twinfire.gateway.backends.request_context import NO_CONTEXT, RequestContext
from twinfire.gateway.backends.worker_registry import WorkerRegistry
from twinfire.gateway.routing.admission import AdmissionQueue
from twinfire.gateway.routing.router import Router
from twinfire.protocol.errors import WorkerLost
from twinfire.protocol.messages import Fingerprint, WorkerInfo
from twinfire.protocol.sampling import SamplingParams


class ClusterBackend:
    """A `Backend` whose workers dial in: give its `registry` to a `WorkerListener`."""

    def __init__(
        self,
        model: str,
        router: Router,
        hash_seed: bytes,
        *,
        expected: Fingerprint | None = None,
        limits: LivenessLimits | None = None,
    ) -> None:
        """`model` is what the workers serve (`WorkerInfo.model`).

        `hash_seed` is derived from the cluster's secret as the workers' is; empty where there is
        none, and caches are then unknown to the router. The router's clock must run like the event
        loop's. Workers must match `expected`, or the first of them.
        """
        self.router = router
        self.registry = WorkerRegistry(model, router, expected, limits or LivenessLimits())
        self._pool = ClusterPool(self.registry, router, hash_seed)
        self.tallies = self._pool.tallies
        """Counts for the metrics."""

    @property
    def admission(self) -> AdmissionQueue:
        """Where requests wait for a worker."""
        return self._pool.admission

    @property
    def worker_info(self) -> WorkerInfo | None:
        """A description that fits every worker, None while there is none."""
        return self.registry.worker_info

    @property
    def unready_reason(self) -> str | None:
        """Why no request can be served now, None when one can."""
        return self.registry.unready_reason

    def start(self) -> None:
        """Begin to watch the workers; needs the running loop."""
        self.registry.start()

    async def close(self) -> None:
        """Close the workers' links; what still runs ends with WorkerLost."""
        await self.registry.close()

    def submit(
        self,
        prompt: array[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        context: RequestContext = NO_CONTEXT,
    ) -> PdGeneration:
        """Send a request; WorkerLost when no worker is there to take it."""
        if self.registry.worker_info is None:
            raise WorkerLost(self.registry.unready_reason or "no worker is ready")
        request = ClusterRequest.of(prompt, sampling, priority, cache_salt, context)
        return PdGeneration(self._pool, request)
