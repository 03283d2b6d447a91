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
    prefix: list[int]
    """Blocks that were here already, kept because the others cannot be found without them."""
    taken: list[int]
    hashes: list[bytes]
    """Of the taken ones."""


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

        None when nothing is missing, when others need the room, or without a prefix cache.
        """
        if not self._scheduler.config.enable_prefix_cache:
            return None
        cache = self._tables.cache
        num_blocks = min(num_blocks, cache.max_hit_blocks(len(prompt)))
        hashes: list[bytes] = []
        start = prompt[: num_blocks * cache.block_size]
        cache.extend_hashes(hashes, start, cache_extra_key(salt=cache_salt))
        prefix = cache.find(hashes, len(prompt))
        missing = hashes[len(prefix) :]
        if not missing:
            return None
        self._tables.pin(prefix)
        taken = self._tables.take(len(missing), self._scheduler.num_spare_blocks())
        if taken is None:
            self._tables.unpin(prefix)
            return None
        self._num_ids += 1
        self._imports[self._num_ids] = _Import(prefix, taken, missing)
        return PrefixImport(self._num_ids, len(prefix), tuple(taken))

    def import_hashes(self, import_id: int) -> list[bytes]:
        """Return the hashes of the blocks taken, none for an unknown id."""
        found = self._imports.get(import_id)
        return found.hashes if found is not None else []

    def finish_import(self, import_id: int, num_good_blocks: int) -> None:
        """Make the first so many blocks findable and give all back; unknown ids are ignored."""
        found = self._imports.pop(import_id, None)
        if found is None:
            return
        num_good_blocks = min(num_good_blocks, len(found.taken))
        self._tables.cache.insert(found.taken, found.hashes, 0, num_good_blocks)
        self._tables.unpin(found.prefix + found.taken)

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
