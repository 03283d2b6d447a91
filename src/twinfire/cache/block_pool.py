"""The KV blocks of a worker, by number: who uses them, what they hold, which is reused next.

Every block is usable; there is no null block. A block with no references is on the free list and
keeps its content and hash until it is handed out again: the free list is the cache. Never touches
the bytes of a block and never knows whose sequence holds it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class BlockPool:
    """`num_blocks` blocks, reference counted.

    The free list is doubly linked through two index arrays, so that taking any block out is O(1).
    It is in order of reuse: blocks without a hash first, as reusing them loses nothing, then hashed
    ones, least recently used first. Several blocks may hold the same content under one hash, so
    that a sequence's blocks never have to be exchanged.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}; it must be at least 1")
        self.num_blocks = num_blocks
        self._end = num_blocks  # Index of the list's sentinel: before the head, after the tail.
        self._next = array("i", [*range(1, num_blocks + 1), 0])
        self._prev = array("i", [self._end, *range(num_blocks)])
        self._num_free = num_blocks
        self.num_handed_out = 0
        """The highest id that was ever handed out, and one: those above were never written."""
        self._ref_counts = array("i", [0]) * num_blocks
        self._generations = array("q", [0]) * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        # Dicts with no values: sets that keep the order of registration.
        self._blocks_of_hash: dict[bytes, dict[int, None]] = {}
        # Hashes whose presence differs from what was last told, and whether they are here now.
        self._changes: dict[bytes, bool] = {}

    @property
    def num_free(self) -> int:
        """Blocks without references, those that hold reusable content included."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self._num_free

    def ref_count(self, block_id: int) -> int:
        """Return how many references a block has."""
        return self._ref_counts[block_id]

    def block_generation(self, block_id: int) -> int:
        """Return a number that rises each time the block is handed out.

        A reader that finds it unchanged after reading has read one owner's content.
        """
        return self._generations[block_id]

    def hash_of(self, block_id: int) -> bytes | None:
        """Return the hash that a block's content was registered under, None if it was not."""
        return self._hashes[block_id]

    def num_unreferenced(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks are free, which is what touching them would take."""
        ref_counts = self._ref_counts
        return sum(1 for block_id in block_ids if ref_counts[block_id] == 0)

    def allocate(self, count: int) -> list[int] | None:
        """Hand out `count` blocks with one reference each, or None, with nothing changed.

        Content that the blocks still held can no longer be found from here on.
        """
        if count > self._num_free:
            return None
        taken: list[int] = []
        block_id = self._next[self._end]
        for _ in range(count):
            if self._hashes[block_id] is not None:
                self._forget(block_id)
            self._ref_counts[block_id] = 1
            self._generations[block_id] += 1
            taken.append(block_id)
            block_id = self._next[block_id]
        self._next[self._end] = block_id
        self._prev[block_id] = self._end
        self._num_free -= count
        if taken:
            self.num_handed_out = max(self.num_handed_out, max(taken) + 1)
        return taken

    def touch(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block, taking it off the free list if it had none."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                before, after = self._prev[block_id], self._next[block_id]
                self._next[before] = after
                self._prev[after] = before
                self._num_free -= 1
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop a reference to each block of a sequence, given in the sequence's order.

        Goes through them in reverse, so that the end of a prefix is reused before its beginning,
        without which the end could not be found anyway.
        """
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} was freed twice"
            self._ref_counts[block_id] = count
            if count == 0:
                if self._hashes[block_id] is None:
                    self._link(block_id, self._end, self._next[self._end])
                else:
                    self._link(block_id, self._prev[self._end], self._end)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Make a referenced block, full and computed, findable by its content's hash."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is registered but free"
        known = self._hashes[block_id]
        assert known in (None, block_hash), f"block {block_id} changed its content while in use"
        self._hashes[block_id] = block_hash
        blocks = self._blocks_of_hash.get(block_hash)
        if blocks is None:
            blocks = self._blocks_of_hash[block_hash] = {}
            self._note_change(block_hash, present=True)
        blocks[block_id] = None

    def find(self, block_hash: bytes) -> int | None:
        """Return a block with this content, None if there is none."""
        blocks = self._blocks_of_hash.get(block_hash)
        return next(iter(blocks)) if blocks else None

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes that can be found now and could not at the last call, and those lost.

        A hash counts as found while at least one block has it.
        """
        stored = [name for name, present in self._changes.items() if present]
        removed = [name for name, present in self._changes.items() if not present]
        self._changes.clear()
        return stored, removed

    def findable_hashes(self) -> list[bytes]:
        """Return all hashes that can be found, in the order of their registration."""
        return list(self._blocks_of_hash)

    def forget_free(self) -> None:
        """Make what free blocks hold unfindable; blocks in use keep their hashes."""
        for block_id, name in enumerate(self._hashes):
            if name is not None and self._ref_counts[block_id] == 0:
                self._forget(block_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless list, counts and hashes agree. O(num_blocks)."""
        free: set[int] = set()
        before, block_id = self._end, self._next[self._end]
        while block_id != self._end:
            assert self._prev[block_id] == before, f"links around block {block_id} disagree"
            assert block_id not in free, f"the free list visits block {block_id} twice"
            free.add(block_id)
            before, block_id = block_id, self._next[block_id]
        assert self._prev[self._end] == before, "the free list's tail is wrong"
        assert len(free) == self._num_free, f"{len(free)} free blocks, counted {self._num_free}"
        for block_id, count in enumerate(self._ref_counts):
            assert count >= 0, f"block {block_id} has {count} references"
            assert (count == 0) == (block_id in free), f"block {block_id} is half free"
        hashed = {(block, name) for block, name in enumerate(self._hashes) if name is not None}
        listed = {
            (block, name) for name, blocks in self._blocks_of_hash.items() for block in blocks
        }
        assert hashed == listed, "blocks and the map of hashes disagree"
        assert all(self._blocks_of_hash.values()), "a hash without blocks was kept"

    def _link(self, block_id: int, before: int, after: int) -> None:
        self._next[before] = self._prev[after] = block_id
        self._prev[block_id], self._next[block_id] = before, after
        self._num_free += 1

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        assert block_hash is not None
        blocks = self._blocks_of_hash[block_hash]
        del blocks[block_id]
        if not blocks:
            del self._blocks_of_hash[block_hash]
            self._note_change(block_hash, present=False)
        self._hashes[block_id] = None

    def _note_change(self, block_hash: bytes, *, present: bool) -> None:
        # A second change since the last report undoes the first.
        if self._changes.pop(block_hash, None) is None:
            self._changes[block_hash] = present
