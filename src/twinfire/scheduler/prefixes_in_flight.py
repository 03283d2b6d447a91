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
        self._owners_at: dict[int, dict[bytes, Sequence]] = {}

    def add(self, sequence: Sequence, start: int, stop: int) -> None:
        """Note what tokens [start, stop) complete, if they complete a block that is not cached."""
        hashes, size = sequence.block_hashes, self._cache.block_size
        index = self._cache.first_missing(hashes, start // size, stop // size)
        if index is not None:
            self._owners_at.setdefault(index, {})[hashes[index]] = sequence

    def owner(self, sequence: Sequence) -> Sequence | None:
        """Return who computes the very next block of a waiting sequence, None if nobody does."""
        if not sequence.read_prefix_cache:
            return None
        limit = self._cache.max_hit_blocks(sequence.num_tokens)
        for index, owners in self._owners_at.items():
            if index < limit and (owner := owners.get(sequence.block_hashes[index])) is not None:
                return owner
        return None
