"""Load in seconds, so that queues, caches, transfers and affinity can be compared.

    prompt on W   (W's uncomputed tokens + own uncached tokens) / W's prefill rate,
                  the own part times (1 + weight * streams that it holds up on W)
    pull          missing blocks' bytes / measured bytes per second, where less than computing them
    decode on W   expected tokens * W's step time at that occupancy / (1 - k)

k is the part of W's KV blocks in use with this request on it. 1 / (1 - k) = 1 + k / (1 - k) is the
queueing barrier that rises without bound as the cache fills.
"""

from __future__ import annotations

from twinfire.gateway.routing.demand import Demand
from twinfire.gateway.routing.routing_settings import RoutingSettings
from twinfire.gateway.routing.worker_state import WorkerState

_MAX_FILL = 0.99
_TRANSFER_MEMORY = 0.9
"""Weight of what was known when a transfer is measured."""
_CHUNK_BLOCKS = 32
"""Blocks of a prompt's last chunk where the worker does not say."""


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
        pulling_s = self._settings.pull_overhead_s + self.transfer_s(missing, demand)
        return max(computing_s - pulling_s, 0.0)

    def compute_s(self, worker: WorkerState, demand: Demand) -> float:
        """Seconds until `worker`, if it did nothing else, would have the prompt's KV."""
        cached = demand.cached_blocks.get(worker.instance_id, 0)
        uncached = demand.num_tokens - cached * demand.block_size
        seconds = uncached / worker.prefill_tokens_per_s
        if demand.most_cached_blocks > cached:
            seconds -= self.pull_gain_s(worker, demand)
        return seconds

    def prompt_s(self, worker: WorkerState, demand: Demand) -> float:
        """Seconds until `worker` has computed the prompt, with what it costs streams there."""
        own_s = self.compute_s(worker, demand)
        streams = worker.num_streams
        if streams:
            own_s *= 1 + self._settings.interference_weight * streams
        return worker.prefill.load / worker.prefill_tokens_per_s + own_s

    def hand_off_s(self, decode: WorkerState, compute_s: float, demand: Demand) -> float:
        """Seconds that giving the prompt to `decode` adds to computing it elsewhere.

        Chunks move while the next is computed; the last one, and what the link is too slow for, is
        waited for.
        """
        held = demand.cached_blocks.get(decode.instance_id, 0)
        missing = -(-demand.num_tokens // demand.block_size) - held
        chunk = decode.info.max_num_batched_tokens // demand.block_size or _CHUNK_BLOCKS
        last_s = self.transfer_s(min(missing, chunk), demand)
        hidden_s = max(self.transfer_s(missing, demand) - compute_s, 0.0)
        return self._settings.hand_off_overhead_s + max(last_s, hidden_s)

    def decode_s(self, worker: WorkerState, demand: Demand) -> float:
        """Seconds of the expected answer on `worker`, with the barrier."""
        num_blocks = worker.decode.load + demand.num_blocks
        fill = min(num_blocks / worker.num_blocks, _MAX_FILL)
        step = worker.step_time
        step_s = step.base_s + step.slope_s * num_blocks
        return max(demand.num_expected_tokens, 1) * step_s / (1 - fill)
