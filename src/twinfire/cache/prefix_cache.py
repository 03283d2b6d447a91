"""Finds the computed blocks that a sequence starts with.

A hit is contiguous from block 0 and leaves at least the last token to compute, because its logits
are needed. Owns no blocks: what it returns is only a number until the pool's `touch` holds it, so
a hit must never be remembered from one attempt to the next.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from twinfire.cache.block_hash import HashChain
from twinfire.cache.block_pool import BlockPool


class PrefixCache:
    """Content lookup in one pool. Hash blocks and physical blocks are the same by construction."""

    def __init__(self, pool: BlockPool, chain: HashChain) -> None:
        self._pool = pool
        self._chain = chain
        self.block_size = chain.block_size

    def extend_hashes(self, hashes: list[bytes], tokens: array[int], extra: bytes) -> None:
        """Append the hashes of the full blocks of `tokens` that `hashes` lacks."""
        self._chain.extend(hashes, tokens, extra)

    def max_hit_blocks(self, num_tokens: int) -> int:
        """Return how many leading blocks of a sequence may come from the cache."""
        return (num_tokens - 1) // self.block_size

    def find(self, hashes: Sequence[bytes], num_tokens: int) -> list[int]:
        """Return the blocks of the longest cached prefix of a sequence of `num_tokens` tokens."""
        found: list[int] = []
        for index in range(min(len(hashes), self.max_hit_blocks(num_tokens))):
            block_id = self._pool.find(hashes[index])
            if block_id is None:
                break
            found.append(block_id)
        return found

    def first_missing(self, hashes: Sequence[bytes], start: int, stop: int) -> int | None:
        """Return the first index in [start, stop) whose block is not cached, None if all are."""
        for index in range(start, stop):
            if self._pool.find(hashes[index]) is None:
                return index
        return None

    def insert(
        self, block_ids: Sequence[int], hashes: Sequence[bytes], start: int, stop: int
    ) -> None:
        """Make a sequence's blocks [start, stop), all full and computed, findable."""
        for index in range(start, stop):
            self._pool.register(block_ids[index], hashes[index])
