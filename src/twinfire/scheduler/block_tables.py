"""Which blocks each sequence holds, and when they may go back to the pool.

Knows of one step in flight: what a sequence held when the step was planned stays allocated until
the step ends, because the runner may still read or write it. So does the source of a block copy,
from the fork that asks for it to the end of the step that makes it. Decides nothing about who runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from twinfire.cache.block_hash import HashChain
from twinfire.cache.block_pool import BlockPool
from twinfire.cache.prefix_cache import PrefixCache
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class _Copy:
    source: int
    """Referenced until the copy has been made or dropped."""
    destination: int
    """In the block table of `sequence`."""
    sequence: Sequence


class BlockTables:
    """The pool and prefix cache of one scheduler, applied to its sequences."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.pool = BlockPool(config.num_blocks)
        self.cache = PrefixCache(self.pool, HashChain(config.block_size, config.hash_seed))
        self._step_in_flight = False
        self._pending_copies: list[_Copy] = []
        self._copies_in_flight: list[_Copy] = []
        # A dict with no values: those released during the step, in order.
        self._held_until_step_ends: dict[Sequence, None] = {}
        self._pinned: Counter[int] = Counter()

    @property
    def num_pinned(self) -> int:
        """Blocks that are held for somebody who is no sequence."""
        return len(self._pinned)

    def pin(self, block_ids: Iterable[int]) -> None:
        """Hold blocks for somebody who is no sequence, beside whoever holds them."""
        block_ids = list(block_ids)
        self.pool.touch(block_ids)
        self._pinned.update(block_ids)

    def take(self, count: int, num_spare: int) -> list[int] | None:
        """Hand out pinned blocks, or None when fewer than `num_spare` would be left."""
        if count + num_spare > self.pool.num_free:
            return None
        blocks = self.pool.allocate(count)
        assert blocks is not None, "room was checked before"
        self._pinned.update(blocks)
        return blocks

    def unpin(self, block_ids: Iterable[int]) -> None:
        """Undo `pin` or `take`."""
        block_ids = list(block_ids)
        for block_id in block_ids:
            assert self._pinned[block_id] > 0, f"block {block_id} is not pinned"
            self._pinned[block_id] -= 1
            if not self._pinned[block_id]:
                del self._pinned[block_id]
        self.pool.free(block_ids)

    def num_missing(self, sequence: Sequence) -> int:
        """Return the blocks that a sequence needs, beyond those it has, for all its tokens."""
        return max(0, self._config.blocks_for(sequence.num_tokens) - len(sequence.block_ids))

    def extend_hashes(self, sequence: Sequence) -> None:
        """Hash the full blocks of the sequence's tokens that have no hash yet."""
        self.cache.extend_hashes(sequence.block_hashes, sequence.tokens, sequence.cache_extra)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks that the sequence may start from, good until the next change."""
        if not (self._config.enable_prefix_cache and sequence.read_prefix_cache):
            return []
        return self.cache.find(sequence.block_hashes, sequence.num_tokens)

    def num_uncached(self, sequence: Sequence) -> int:
        """Return the tokens that a sequence without blocks would have to compute now."""
        return sequence.num_tokens - len(self.find_prefix(sequence)) * self._config.block_size

    def fits(self, sequence: Sequence, prefix: list[int], num_spare: int) -> bool:
        """Whether a sequence without blocks fits, all its tokens, leaving `num_spare` blocks."""
        num_new = self._config.blocks_for(sequence.num_tokens) - len(prefix)
        taken = num_new + self.pool.num_unreferenced(prefix)
        return taken + num_spare <= self.pool.num_free

    def start(self, sequence: Sequence, prefix: list[int]) -> None:
        """Give a sequence without blocks its cached prefix."""
        assert not sequence.block_ids, f"{sequence.key} starts with blocks"
        self.pool.touch(prefix)
        sequence.block_ids = prefix
        sequence.num_computed_tokens = len(prefix) * self._config.block_size

    def grow(self, sequence: Sequence, num_tokens: int, num_spare: int = 0) -> bool:
        """Make room for the first `num_tokens` tokens, or return False with nothing changed.

        `num_spare` blocks are left free where new ones have to be taken.
        """
        num_blocks = len(sequence.block_ids)
        if num_tokens <= num_blocks * self._config.block_size:
            return True
        num_new = self._config.blocks_for(num_tokens) - num_blocks
        if num_new + num_spare > self.pool.num_free:
            return False
        blocks = self.pool.allocate(num_new)
        if blocks is None:
            return False
        sequence.block_ids += blocks
        return True

    def advance(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Record that KV exists for so many tokens; full blocks can be found from now on."""
        size = self._config.block_size
        first, stop = sequence.num_computed_tokens // size, num_computed_tokens // size
        sequence.num_computed_tokens = num_computed_tokens
        if sequence.num_tokens >= (len(sequence.block_hashes) + 1) * size:
            self.extend_hashes(sequence)
        if stop > first and self._config.enable_prefix_cache:
            self.cache.insert(sequence.block_ids, sequence.block_hashes, first, stop)

    def release(self, sequence: Sequence) -> None:
        """Take back all blocks: now, or when the step in flight ends."""
        sequence.num_computed_tokens = 0
        if self._step_in_flight:
            self._held_until_step_ends[sequence] = None
        else:
            self._drop_copies_to(sequence)
            self._free_blocks_of(sequence)

    def share(self, parent: Sequence, child: Sequence, num_spare: int) -> bool:
        """Let `child` start from the computed prompt of `parent`.

        Full blocks are shared. A partly filled one is copied in the next step, as both will write
        into theirs. False, with nothing changed, when nothing is computed or the child's tokens do
        not fit, leaving `num_spare` blocks.
        """
        # A prompt token whose logits the child still needs is computed into a block of its own.
        num_shared = min(parent.num_prompt_tokens, parent.num_computed_tokens, child.num_tokens - 1)
        num_full, num_in_tail = divmod(num_shared, self._config.block_size)
        num_new = self._config.blocks_for(child.num_tokens) - num_full
        if num_shared <= 0 or num_new + num_spare > self.pool.num_free:
            return False
        self.start(child, parent.block_ids[:num_full])
        if num_in_tail:
            grown = self.grow(child, num_shared)
            assert grown, "room was checked before"
            source = self._origin_of(parent.block_ids[num_full])
            self.pool.touch([source])
            self._pending_copies.append(_Copy(source, child.block_ids[num_full], child))
        child.num_computed_tokens = num_shared
        return True

    def filled_blocks(self, sequence: Sequence) -> list[int]:
        """Return where the content of a sequence's blocks is until the next step begins.

        That is elsewhere than in `block_ids` for a copy that has not been made yet.
        """
        return [self._origin_of(block_id) for block_id in sequence.block_ids]

    def begin_step(self) -> list[tuple[int, int]]:
        """Return the copies that the step must make, as (source, destination)."""
        assert not self._step_in_flight
        self._step_in_flight = True
        self._copies_in_flight, self._pending_copies = self._pending_copies, []
        return [(copy.source, copy.destination) for copy in self._copies_in_flight]

    def end_step(self) -> None:
        """Free what was kept for the step alone."""
        self._step_in_flight = False
        if self._copies_in_flight:
            self.pool.free([copy.source for copy in self._copies_in_flight])
            self._copies_in_flight = []
        for sequence in self._held_until_step_ends:
            self._free_blocks_of(sequence)
        self._held_until_step_ends.clear()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every reference is one of these sequences' or a copy's."""
        self.pool.check_integrity()
        expected: Counter[int] = Counter()
        for sequence in {*sequences, *self._held_until_step_ends}:
            expected.update(sequence.block_ids)
            if sequence not in self._held_until_step_ends:
                self._check_sequence(sequence)
        expected.update(self._pinned)
        for copy in (*self._pending_copies, *self._copies_in_flight):
            expected[copy.source] += 1
            assert copy.destination in copy.sequence.block_ids, "a copy outlived its destination"
        for block_id in range(self.pool.num_blocks):
            count = self.pool.ref_count(block_id)
            assert count == expected[block_id], f"block {block_id}: {count} references leak"

    def _check_sequence(self, sequence: Sequence) -> None:
        size = self._config.block_size
        blocks, computed = sequence.block_ids, sequence.num_computed_tokens
        assert len(set(blocks)) == len(blocks), f"{sequence.key} holds a block twice"
        assert computed <= len(blocks) * size, f"{sequence.key} has computed tokens without blocks"
        assert len(sequence.block_hashes) == sequence.num_tokens // size, "hashes lag behind tokens"
        for index, block_id in enumerate(blocks):
            expected = None
            if self._config.enable_prefix_cache and (index + 1) * size <= computed:
                expected = sequence.block_hashes[index]
            assert self.pool.hash_of(block_id) == expected, f"block {block_id} is misnamed"

    def _free_blocks_of(self, sequence: Sequence) -> None:
        self.pool.free(sequence.block_ids)
        sequence.block_ids = []

    def _drop_copies_to(self, sequence: Sequence) -> None:
        if not self._pending_copies:
            return
        dropped = [copy.source for copy in self._pending_copies if copy.sequence is sequence]
        self._pending_copies = [
            copy for copy in self._pending_copies if copy.sequence is not sequence
        ]
        self.pool.free(dropped)

    def _origin_of(self, block_id: int) -> int:
        """Follow a copy that has not been made yet to where the content is now."""
        for copy in self._pending_copies:
            if copy.destination == block_id:
                return copy.source
        return block_id
