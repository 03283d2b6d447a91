"""Which workers hold which KV blocks, as their cache events say.

A hash names a whole prefix and workers free children before parents, so what a worker holds of a
chain is a prefix of it; a lookup halves its way to where each worker's part ends instead of walking
thousands of hashes. Bounded per worker and in all: beyond that the blocks stored longest ago are
forgotten, and of a worker of which any were, prefixes are walked block by block. Sets of workers
are bit masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twinfire.protocol.messages import CacheEvents

HASH_BYTES = 32
_FIRST_SEQUENCES = (0, 1)


class _Holder:
    __slots__ = ("awaits_reset", "bit", "blocks", "max_blocks", "sequence")

    def __init__(self, bit: int, max_blocks: int) -> None:
        self.bit = bit
        self.max_blocks = max_blocks
        self.blocks: dict[bytes, None] = {}
        """In the order in which they were stored."""
        self.sequence: int | None = None
        self.awaits_reset = False


class PrefixIndex:
    """Answers how many leading blocks of a prompt each worker holds."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        """Of all workers together."""
        self.num_blocks = 0
        """Blocks held now, counted once for each worker that holds them."""
        self.num_gaps = 0
        self.num_forgotten = 0
        self._holders: dict[str, _Holder] = {}
        self._masks: dict[bytes, int] = {}
        self._names: dict[int, str] = {}
        self._forgetful = 0

    def add_worker(self, instance_id: str, max_blocks: int) -> None:
        """Expect events of a new instance that can hold `max_blocks`."""
        self.remove_worker(instance_id)
        bit = 1
        while bit in self._names:
            bit <<= 1
        self._names[bit] = instance_id
        self._holders[instance_id] = _Holder(bit, max_blocks)

    def remove_worker(self, instance_id: str) -> None:
        """Forget an instance and everything it held."""
        holder = self._holders.pop(instance_id, None)
        if holder is not None:
            self._clear(holder)
            del self._names[holder.bit]

    def observe(self, instance_id: str, events: CacheEvents) -> bool:
        """Apply events; False once when some were missed and all must be asked for anew.

        Until they come (`reset`) what is known stays, as a hint that may be out of date.
        """
        holder = self._holders.get(instance_id)
        if holder is None:
            return True
        if events.reset:
            self._clear(holder)
            holder.awaits_reset = False
        elif holder.awaits_reset:
            return True
        elif holder.sequence is None and events.sequence in _FIRST_SEQUENCES:
            pass
        elif holder.sequence is None or events.sequence > holder.sequence + 1:
            holder.awaits_reset = True
            self.num_gaps += 1
            return False
        elif events.sequence <= holder.sequence:
            return True
        holder.sequence = events.sequence
        for block_hash in _hashes(events.removed):
            self._forget(holder, block_hash)
        self._store(holder, events.stored)
        return True

    def lookup(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Return how many leading blocks each worker holds; those that hold none are absent."""
        depths: dict[str, int] = {}
        if not hashes:
            return depths
        mask = self._masks.get(hashes[0], 0)
        forgetful = mask & self._forgetful
        for bit in _bits(forgetful):
            depths[self._names[bit]] = self._walked(bit, hashes)
        self._halve(hashes, mask & ~forgetful, depths)
        return depths

    def _halve(self, hashes: Sequence[bytes], mask: int, depths: dict[str, int]) -> None:
        masks = self._masks
        # Every worker of `mask` holds more than `low` blocks' worth, none of it more than `high`.
        pending = [(mask, 0, len(hashes) - 1)] if mask else []
        while pending:
            mask, low, high = pending.pop()
            while low < high:
                middle = (low + high + 1) >> 1
                beyond = masks.get(hashes[middle], 0) & mask
                if beyond == mask:
                    low = middle
                elif beyond:
                    pending.append((beyond, middle, high))
                    mask ^= beyond
                    high = middle - 1
                else:
                    high = middle - 1
            for bit in _bits(mask):
                depths[self._names[bit]] = low + 1

    def _walked(self, bit: int, hashes: Sequence[bytes]) -> int:
        for depth, block_hash in enumerate(hashes):
            if not self._masks.get(block_hash, 0) & bit:
                return depth
        return len(hashes)

    def _store(self, holder: _Holder, stored: bytes) -> None:
        masks, blocks, bit = self._masks, holder.blocks, holder.bit
        before = len(blocks)
        for block_hash in _hashes(stored):
            blocks[block_hash] = None
            masks[block_hash] = masks.get(block_hash, 0) | bit
        self.num_blocks += len(blocks) - before
        while len(blocks) > holder.max_blocks:
            self._forget_oldest(holder)
        while self.num_blocks > self.max_blocks:
            self._forget_oldest(max(self._holders.values(), key=lambda one: len(one.blocks)))

    def _forget_oldest(self, holder: _Holder) -> None:
        self._forget(holder, next(iter(holder.blocks)))
        self.num_forgotten += 1
        self._forgetful |= holder.bit

    def _forget(self, holder: _Holder, block_hash: bytes) -> None:
        if block_hash not in holder.blocks:
            return
        del holder.blocks[block_hash]
        self.num_blocks -= 1
        remaining = self._masks[block_hash] & ~holder.bit
        if remaining:
            self._masks[block_hash] = remaining
        else:
            del self._masks[block_hash]

    def _clear(self, holder: _Holder) -> None:
        for block_hash in list(holder.blocks):
            self._forget(holder, block_hash)
        self._forgetful &= ~holder.bit


def _hashes(packed: bytes) -> Iterator[bytes]:
    for start in range(0, len(packed), HASH_BYTES):
        yield packed[start : start + HASH_BYTES]


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
