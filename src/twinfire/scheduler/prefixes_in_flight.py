"""Prefix blocks that the step being planned, or a prompt that has begun, will have computed soon.

Lets a burst of requests with one prompt compute it once: a waiting sequence whose very next block
is among these does better to wait a step and find it cached.
"""

from __future__ import annotations

from twinfire.cache.prefix_cache import PrefixCache
from twinfire.scheduler.sequence import Sequence


class PrefixesInFlight:
    """The next block that each sequence being computed completes, by its index and hash.

    A hash names all blocks before it too, and those are cached already. So a sequence with the same
    hash at the same index would compute exactly that block next.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._hashes_at: dict[int, set[bytes]] = {}

    def add(self, sequence: Sequence, start: int, stop: int) -> None:
        """Note what tokens [start, stop) complete, if they complete a block that is not cached."""
        hashes, size = sequence.block_hashes, self._cache.block_size
        index = self._cache.first_missing(hashes, start // size, stop // size)
        if index is not None:
            self._hashes_at.setdefault(index, set()).add(hashes[index])

    def help(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence would soon find one more block of its own prefix cached.

        It waits for no more than that prefix, which another sequence computes in its own turn.
        """
        if not sequence.read_prefix_cache:
            return False
        limit = self._cache.max_hit_blocks(sequence.num_tokens)
        return any(
            index < limit and sequence.block_hashes[index] in hashes
            for index, hashes in self._hashes_at.items()
        )
