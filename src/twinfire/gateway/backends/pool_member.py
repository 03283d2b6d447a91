"""One worker that has joined: its description, its link, its last report."""

from __future__ import annotations

from twinfire.gateway.backends.liveness import Liveness
from twinfire.gateway.backends.worker_link import WorkerLink
from twinfire.protocol.messages import Load, WorkerInfo


class PoolMember:
    """A worker's life in a pool, for as long as its link is open."""

    def __init__(self, info: WorkerInfo, link: WorkerLink, now_s: float) -> None:
        self.info = info
        """Its newest description; role and draining are in it."""
        self.link = link
        self.joined_s = now_s
        """On the event loop's clock."""
        self.load: Load | None = None
        self.liveness = Liveness(now_s, link.step)
        self.is_draining = info.draining

    @property
    def instance_id(self) -> str:
        """Names this life of the process."""
        return self.info.instance_id

    @property
    def has_work(self) -> bool:
        """Whether it has something to compute, as far as this gateway knows."""
        load = self.load
        return bool(self.link.num_in_flight or (load and (load.running or load.waiting)))
