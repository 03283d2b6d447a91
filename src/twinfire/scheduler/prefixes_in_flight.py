"""Prefix blocks that the step being planned will have computed when it ends.

Lets a burst of requests with one prompt compute it once: a waiting sequence whose very next block
is among these does better to wait a step and find it cached.
"""

from __future__ import annotations

from twinfire.cache.prefix_cache import PrefixCache
from twinfire.scheduler.sequence import Sequence
from twinfire.scheduler.step_plan import Slice


class PrefixesInFlight:
    """The first new block that each planned slice completes, by its index and hash.

    A hash names all blocks before it too, and those are cached already. So a sequence with the same
    hash at the same index would compute exactly that block next.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._hashes_at: dict[int, set[bytes]] = {}

    def add(self, piece: Slice) -> None:
        """Note what a planned slice completes, if it completes a block that is not cached."""
        hashes, size = piece.sequence.block_hashes, self._cache.block_size
        index = self._cache.first_missing(hashes, piece.start // size, piece.known_end // size)
        if index is not None:
            self._hashes_at.setdefault(index, set()).add(hashes[index])

    def help(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence would find one more block cached after this step.

        Each step that it waits for this reason leaves one more block of its own prefix in the
        cache, so it waits no longer than computing that prefix takes.
        """
        if not sequence.read_prefix_cache:
            return False
        limit = self._cache.max_hit_blocks(sequence.num_tokens)
        return any(
            index < limit and sequence.block_hashes[index] in hashes
            for index, hashes in self._hashes_at.items()
        )
