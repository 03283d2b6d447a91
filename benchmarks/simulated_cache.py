"""A paged KV cache of a simulated worker: blocks by number, prefixes by name, LRU.

Names are of units of 512 tokens (16 blocks), which is what the traces know of contents. Every
change becomes cache events with a hash per block, as a real worker sends them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from twinfire.protocol.messages import CacheEvents

BLOCK_TOKENS = 32
UNIT_BLOCKS = 16
UNIT_TOKENS = BLOCK_TOKENS * UNIT_BLOCKS


def unit_hashes(unit: int) -> list[bytes]:
    """The hashes of a unit's blocks; the trace's names are chained, so these are."""
    return [unit.to_bytes(16, "little") + block.to_bytes(16, "little") for block in range(16)]


class Lease:
    """Blocks of one request: named units it shares, and blocks of its own."""

    __slots__ = ("num_own_blocks", "units")

    def __init__(self, units: list[int], num_own_blocks: int) -> None:
        self.units = units
        self.num_own_blocks = num_own_blocks


class SimulatedCache:
    """`num_blocks` blocks; those of nobody keep their contents until they are needed."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_overflows = 0
        """Times that running requests grew beyond the memory; a real worker would preempt."""
        self._users: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._num_own_blocks = 0
        self._stored: list[int] = []
        self._removed: list[int] = []
        self._sequence = 0

    @property
    def num_used_blocks(self) -> int:
        return len(self._users) * UNIT_BLOCKS + self._num_own_blocks

    def num_hit_units(self, units: Sequence[int]) -> int:
        users, unused = self._users, self._unused
        for depth, unit in enumerate(units):
            if unit not in users and unit not in unused:
                return depth
        return len(units)

    def has(self, unit: int) -> bool:
        return unit in self._users or unit in self._unused

    def acquire(self, units: Sequence[int], num_blocks: int) -> Lease | None:
        """Take blocks for a request, sharing what is here of `units`; None without room."""
        hit = list(units[: self.num_hit_units(units)])
        own = num_blocks - len(hit) * UNIT_BLOCKS
        revived = sum(unit in self._unused for unit in hit) * UNIT_BLOCKS
        if self.num_used_blocks + revived + own > self.num_blocks:
            return None
        for unit in hit:
            self._share(unit)
        self._num_own_blocks += own
        self._make_room()
        return Lease(hit, own)

    def register(self, lease: Lease, unit: int) -> None:
        """A unit of the lease has been filled; it can be found from now on."""
        if not self.has(unit):
            self._users[unit] = 0
            self._stored.append(unit)
        self._share(unit)
        lease.units.append(unit)
        lease.num_own_blocks -= UNIT_BLOCKS
        self._num_own_blocks -= UNIT_BLOCKS

    def grow(self, lease: Lease) -> None:
        """Give the lease one more block."""
        lease.num_own_blocks += 1
        self._num_own_blocks += 1
        self._make_room()

    def release(self, lease: Lease) -> None:
        """Take back everything; children become the oldest of what is kept."""
        self._num_own_blocks -= lease.num_own_blocks
        for unit in reversed(lease.units):
            self._users[unit] -= 1
            if not self._users[unit]:
                del self._users[unit]
                self._unused[unit] = None
        self._make_room()

    def take_events(self) -> CacheEvents | None:
        """What changed since the last call."""
        if not (self._stored or self._removed):
            return None
        stored = b"".join(b"".join(unit_hashes(unit)) for unit in self._stored)
        removed = b"".join(b"".join(unit_hashes(unit)) for unit in self._removed)
        self._stored, self._removed = [], []
        self._sequence += 1
        return CacheEvents(self._sequence, stored=stored, removed=removed)

    def _share(self, unit: int) -> None:
        self._unused.pop(unit, None)
        self._users[unit] = self._users.get(unit, 0) + 1

    def _make_room(self) -> None:
        while self.num_used_blocks + len(self._unused) * UNIT_BLOCKS > self.num_blocks:
            if not self._unused:
                self.num_overflows += 1
                return
            unit, _ = self._unused.popitem(last=False)
            if unit in self._stored:
                self._stored.remove(unit)
            else:
                self._removed.append(unit)
