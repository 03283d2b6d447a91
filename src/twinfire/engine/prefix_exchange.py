"""Cached blocks that go to other workers and come from them, beside any request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from twinfire.cache.block_hash import cache_extra_key
from twinfire.engine.hand_off import BlockHold, PrefixImport
from twinfire.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class _Import:
    block_ids: list[int]
    hashes: list[bytes]


class PrefixExchange:
    """Imports and holds of one engine's cache."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._tables = scheduler.tables
        self._imports: dict[int, _Import] = {}
        self._holds: dict[int, tuple[int, ...]] = {}
        self._num_ids = 0

    def begin_import(
        self, prompt: array[int], cache_salt: str, num_blocks: int
    ) -> PrefixImport | None:
        """Take blocks for the part of the first `num_blocks` that is not cached here.

        None when nothing is missing, or when running sequences need the room.
        """
        cache = self._tables.cache
        num_blocks = min(num_blocks, cache.max_hit_blocks(len(prompt)))
        hashes: list[bytes] = []
        start = prompt[: num_blocks * cache.block_size]
        cache.extend_hashes(hashes, start, cache_extra_key(salt=cache_salt))
        first = cache.first_missing(hashes, 0, len(hashes))
        if first is None:
            return None
        taken = self._tables.take(len(hashes) - first, self._scheduler.num_spare_blocks())
        if taken is None:
            return None
        self._num_ids += 1
        self._imports[self._num_ids] = _Import(taken, hashes[first:])
        return PrefixImport(self._num_ids, first, tuple(taken))

    def import_hashes(self, import_id: int) -> list[bytes]:
        """Return the hashes of an import's blocks; KeyError for an id that is not open."""
        return self._imports[import_id].hashes

    def finish_import(self, import_id: int, num_good_blocks: int) -> None:
        """Make the first so many blocks findable and give all back; unknown ids are ignored."""
        taken = self._imports.pop(import_id, None)
        if taken is None:
            return
        self._tables.cache.insert(taken.block_ids, taken.hashes, 0, num_good_blocks)
        self._tables.unpin(taken.block_ids)

    def hold_blocks(self, hashes: Sequence[bytes]) -> BlockHold:
        """Pin the leading blocks that are cached here, possibly none."""
        pool = self._tables.pool
        blocks: list[int] = []
        for name in hashes:
            block_id = pool.find(name)
            if block_id is None:
                break
            blocks.append(block_id)
        self._tables.pin(blocks)
        self._num_ids += 1
        self._holds[self._num_ids] = tuple(blocks)
        generations = tuple(map(pool.block_generation, blocks))
        return BlockHold(self._num_ids, tuple(blocks), generations)

    def release_block_hold(self, hold_id: int) -> None:
        """Unpin; unknown ids are ignored."""
        self._tables.unpin(self._holds.pop(hold_id, ()))
