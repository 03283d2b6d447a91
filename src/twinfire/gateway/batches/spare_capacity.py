"""How many queued requests of a model may be computed now, beside those that people wait for."""

from __future__ import annotations

from collections.abc import Callable

from twinfire.gateway.backends.cluster_backend import ClusterBackend
from twinfire.gateway.batches.batch import BatchLimits
from twinfire.gateway.hosted_model import HostedModel


class SpareCapacity:
    """Reads what the gateway and its router know anyway; asks nobody.

    `num_served` is the number of requests in the gateway that somebody waits for.
    """

    def __init__(self, limits: BatchLimits, num_served: Callable[[], int]) -> None:
        self._limits = limits
        self._num_served = num_served

    def num_requests(self, hosted: HostedModel, num_running: int) -> int:
        """Return how many queued requests may run at once; `num_running` do.

        Fewer than run when somebody waits for a worker: the newest are then to be put back.
        """
        worker = hosted.backend.worker_info
        if worker is None or hosted.unready_reason is not None:
            return 0
        num_seats, num_others, is_awaited = worker.max_num_seqs, self._num_served(), False
        if isinstance(hosted.backend, ClusterBackend):
            workers = [one for one in hosted.backend.router.workers() if one.role != "prefill"]
            num_seats = sum(one.info.max_num_seqs for one in workers)
            # Other gateways' requests are among those that workers report.
            num_others = sum(one.num_streams for one in workers) - num_running
            is_awaited = bool(len(hosted.backend.admission))
        if is_awaited or num_others >= num_seats:
            return 0
        share = self._limits.share_beside if num_others > 0 else self._limits.share_alone
        return min(max(1, int(share * num_seats)), num_seats - max(0, num_others))
