"""Load in seconds, so that queues, caches, transfers and affinity can be compared.

    prompt on W   (W's uncomputed tokens + own uncached tokens) / W's prefill rate; the own part
                  counts again for those who come after it and for the streams it holds up on W
    pull          missing blocks' bytes / measured bytes per second, where less than computing them
    decode on W   expected tokens * W's step time at that occupancy / (1 - k)

k is the part of W's KV blocks in use with this request on it. 1 / (1 - k) = 1 + k / (1 - k) is the
queueing barrier that rises without bound as the cache fills.
"""

from __future__ import annotations

from collections.abc import Sequence

from twinfire.gateway.routing.demand import Demand
from twinfire.gateway.routing.routing_settings import RoutingSettings
from twinfire.gateway.routing.worker_state import WorkerState

_MIN_FREE = 0.01
_TRANSFER_MEMORY = 0.9
"""Weight of what was known when a transfer is measured."""


class CostModel:
    """Estimates for one pool; learns the speed of its links."""

    def __init__(self, settings: RoutingSettings) -> None:
        self._settings = settings
        self.bytes_per_s = settings.prior_transfer_bytes_per_s

    def observe_transfer(self, num_bytes: int, seconds: float) -> None:
        """Learn from KV that moved between two workers."""
        if num_bytes > 0 and seconds > 0:
            measured = num_bytes / seconds
            # Times are averaged, not rates: one fast transfer does not make up for a slow one.
            slowness = _TRANSFER_MEMORY / self.bytes_per_s + (1 - _TRANSFER_MEMORY) / measured
            self.bytes_per_s = 1 / slowness

    def transfer_s(self, num_blocks: int, demand: Demand) -> float:
        """Seconds that so many blocks are on the wire."""
        return num_blocks * demand.kv_bytes_per_block / self.bytes_per_s

    def pull_gain_s(self, worker: WorkerState, demand: Demand) -> float:
        """Seconds saved by pulling what another worker holds of the prefix; 0 when none are."""
        missing = demand.most_cached_blocks - demand.cached_blocks.get(worker.instance_id, 0)
        if missing < self._settings.min_pull_blocks:
            return 0.0
        computing_s = missing * demand.block_size / worker.prefill_tokens_per_s
        pulling_s = missing * self.transfer_s(1, demand) + self._settings.pull_overhead_s
        return max(computing_s - pulling_s, 0.0)

    def tokens_to_compute(self, worker: WorkerState, demand: Demand) -> int:
        """Context tokens that `worker` neither holds nor would gain by pulling, if it can."""
        if self.pull_gain_s(worker, demand):
            return demand.num_tokens - demand.most_cached_blocks * demand.block_size
        return demand.uncached_tokens(worker.instance_id)

    def compute_s(self, worker: WorkerState, demand: Demand) -> float:
        """Seconds until `worker`, if it did nothing else, would have the prompt's KV."""
        uncached = demand.uncached_tokens(worker.instance_id)
        return uncached / worker.prefill_tokens_per_s - self.pull_gain_s(worker, demand)

    def prompt_s(self, workers: Sequence[WorkerState], demand: Demand) -> list[float]:
        """Seconds until each has computed the prompt, with what that costs others."""
        get, size, num_tokens = demand.cached_blocks.get, demand.block_size, demand.num_tokens
        most, min_pull = demand.most_cached_blocks, self._settings.min_pull_blocks
        block_s, overhead_s = self.transfer_s(1, demand), self._settings.pull_overhead_s
        work_weight = 1 + self._settings.work_weight
        stream_weight = self._settings.interference_weight
        costs = []
        for worker in workers:
            rate = worker.prefill_tokens_per_s
            cached = get(worker.instance_id, 0)
            own_s = (num_tokens - cached * size) / rate
            missing = most - cached
            if missing >= min_pull and missing * (size / rate - block_s) > overhead_s:
                own_s -= missing * (size / rate - block_s) - overhead_s
            weight = work_weight
            if worker.role != "prefill":
                weight += stream_weight * worker.num_streams
            costs.append(worker.prefill.load / rate + weight * own_s)
        return costs

    def hand_off_s(
        self, workers: Sequence[WorkerState], compute_s: float, demand: Demand
    ) -> list[float]:
        """Seconds that giving the prompt to each adds to computing it elsewhere.

        Chunks move while the next is computed; the last one, and what the link is too slow for, is
        waited for.
        """
        get, size = demand.cached_blocks.get, demand.block_size
        num_blocks = -(-demand.num_tokens // size)
        block_s = self.transfer_s(1, demand)
        overhead_s = self._settings.hand_off_overhead_s
        costs = []
        for worker in workers:
            missing = num_blocks - get(worker.instance_id, 0)
            last = min(missing, worker.chunk_blocks)
            costs.append(overhead_s + max(last * block_s, missing * block_s - compute_s))
        return costs

    def decode_s(self, workers: Sequence[WorkerState], demand: Demand) -> list[float]:
        """Seconds of the expected answer on each, with the barrier."""
        num_tokens, added = max(demand.num_expected_tokens, 1), demand.num_blocks
        costs = []
        for worker in workers:
            num_blocks = worker.decode.load + added
            free = max(1 - num_blocks / worker.num_blocks, _MIN_FREE)
            step = worker.step_time
            costs.append(num_tokens * (step.base_s + step.slope_s * num_blocks) / free)
        return costs
