"""What the requests of one model share: its workers, its router, its queue, its counters."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from twinfire.cache.block_hash import HashChain, cache_extra_key
from twinfire.gateway.backends.cluster_request import ClusterRequest
from twinfire.gateway.backends.flow_tallies import FlowTallies
from twinfire.gateway.backends.hand_over_health import HandOverHealth
from twinfire.gateway.backends.prompt_hashes import hash_blocks
from twinfire.gateway.backends.worker_registry import WorkerRegistry
from twinfire.gateway.routing.admission import AdmissionQueue
from twinfire.gateway.routing.router import Router


class ClusterPool:
    """Belongs to the event loop's thread."""

    def __init__(self, registry: WorkerRegistry, router: Router, hash_seed: bytes) -> None:
        """`hash_seed` is that of the workers' block hashes; empty where they share none."""
        self.registry = registry
        self.router = router
        self.admission = AdmissionQueue(router, time.monotonic)
        self.tallies = FlowTallies()
        self.hand_overs = HandOverHealth(time.monotonic)
        self._hash_seed = hash_seed
        self._chains: dict[int, HashChain] = {}
        self._request_ids = itertools.count(1)

    def next_request_id(self) -> int:
        """Return an id that no try of any request on any link of this pool has had."""
        return next(self._request_ids)

    def chain(self) -> HashChain | None:
        """Return what names the pool's blocks, None where nobody here can."""
        info = self.registry.worker_info
        if info is None or not self._hash_seed:
            return None
        size = info.block_size
        if size not in self._chains:
            self._chains[size] = HashChain(size, self._hash_seed)
        return self._chains[size]

    async def block_hashes(self, request: ClusterRequest, choices: Sequence[int]) -> list[bytes]:
        """Return the hashes of the blocks of the prompt and of what one choice has output."""
        hashes: list[bytes] = []
        chain = self.chain()
        if chain is not None:
            extra = cache_extra_key(salt=request.cache_salt)
            await hash_blocks(chain, hashes, request.tokens_so_far(choices), extra)
        return hashes
