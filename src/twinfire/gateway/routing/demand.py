"""What one request needs of a worker, and who holds how much of its prefix already."""

from __future__ import annotations

from dataclasses import dataclass

from twinfire.gateway.routing.affinity import Home
from twinfire.gateway.routing.route import PdPolicy


@dataclass(slots=True)
class Demand:
    """Worked out once for each decision."""

    num_tokens: int
    """Of the context: prompt, and output of a resumed request."""
    block_size: int
    num_blocks: int
    """Of the context and the output that is expected."""
    num_expected_tokens: int
    """Output of each choice."""
    kv_bytes_per_block: int
    cached_blocks: dict[str, int]
    """Leading blocks held, or soon to be, by instance id; absent is none."""
    most_cached_blocks: int
    """The most that one worker holds already, so that others can pull them."""
    pd_policy: PdPolicy
    home: Home

    def uncached_tokens(self, instance_id: str) -> int:
        """Context tokens that a worker does not hold."""
        return self.num_tokens - self.cached_blocks.get(instance_id, 0) * self.block_size
