from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from twinfire.cache.block_pool import BlockPool


def state_of(pool: BlockPool, names: list[bytes]) -> tuple[object, ...]:
    blocks = range(pool.num_blocks)
    return (
        pool.num_free,
        [pool.ref_count(block) for block in blocks],
        [pool.hash_of(block) for block in blocks],
        [pool.block_generation(block) for block in blocks],
        [pool.find(name) for name in names],
    )


def allocate(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def fill(pool: BlockPool, names: list[bytes]) -> list[int]:
    blocks = allocate(pool, len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.register(block, name)
    return blocks


def test_every_block_can_be_handed_out_once():
    pool = BlockPool(5)
    assert sorted(allocate(pool, 3) + allocate(pool, 2)) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.num_used == 5
    pool.check_integrity()


def test_a_failed_allocation_changes_nothing():
    """E9."""
    pool = BlockPool(4)
    pool.free(fill(pool, [b"a", b"b"]))
    allocate(pool, 1)
    before = state_of(pool, [b"a", b"b"])
    assert pool.allocate(4) is None
    assert state_of(pool, [b"a", b"b"]) == before
    pool.check_integrity()


def test_what_was_never_handed_out_is_known():
    pool = BlockPool(6)
    assert pool.num_handed_out == 0
    assert pool.allocate(3) is not None
    assert pool.num_handed_out == 3
    pool.free([0, 1, 2])
    pool.allocate(2)
    assert pool.num_handed_out == 3, "blocks without content are reused first"
    pool.allocate(0)
    pool.allocate(4)
    assert pool.num_handed_out == 6


def test_free_content_is_found_until_its_block_is_handed_out_again():
    """E12: an evicted block that is still in the map gives a sequence another's content."""
    pool = BlockPool(2)
    blocks = fill(pool, [b"a", b"b"])
    pool.free(blocks)
    assert [pool.find(b"a"), pool.find(b"b")] == blocks
    allocate(pool, 2)
    assert [pool.find(b"a"), pool.find(b"b")] == [None, None]
    pool.check_integrity()


def test_the_end_of_a_prefix_is_reused_before_its_beginning():
    pool = BlockPool(3)
    blocks = fill(pool, [b"a", b"b", b"c"])
    pool.free(blocks)
    assert [allocate(pool, 1)[0] for _ in range(3)] == blocks[::-1]


def test_blocks_without_content_are_reused_before_cached_ones():
    pool = BlockPool(3)
    cached = fill(pool, [b"a"])
    pool.free(cached)
    plain = allocate(pool, 2)
    assert cached[0] not in plain
    pool.free(plain)
    assert allocate(pool, 2) == plain
    assert pool.find(b"a") == cached[0]


def test_use_makes_a_block_the_last_to_be_reused():
    pool = BlockPool(3)
    first, second, third = (fill(pool, [name])[0] for name in (b"a", b"b", b"c"))
    for block in (first, second, third):
        pool.free([block])
    pool.touch([first])
    pool.free([first])
    assert allocate(pool, 3) == [second, third, first]


def test_touching_a_free_block_takes_it_and_a_used_one_only_counts():
    pool = BlockPool(2)
    (block,) = fill(pool, [b"a"])
    pool.free([block])
    assert pool.num_unreferenced([block]) == 1
    pool.touch([block])
    pool.touch([block])
    assert (pool.ref_count(block), pool.num_free) == (2, 1)
    assert pool.num_unreferenced([block]) == 0
    pool.free([block])
    assert pool.num_free == 1
    pool.free([block])
    assert pool.num_free == 2
    pool.check_integrity()


def test_equal_content_may_lie_in_two_blocks():
    pool = BlockPool(2)
    (first,), (second,) = fill(pool, [b"a"]), fill(pool, [b"a"])
    pool.free([first])
    assert allocate(pool, 1) == [first]
    assert pool.find(b"a") == second
    pool.check_integrity()


def test_a_generation_rises_exactly_when_a_block_is_handed_out():
    pool = BlockPool(1)
    (block,) = allocate(pool, 1)
    generation = pool.block_generation(block)
    pool.register(block, b"a")
    pool.free([block])
    pool.touch([block])
    pool.free([block])
    assert pool.block_generation(block) == generation
    allocate(pool, 1)
    assert pool.block_generation(block) == generation + 1


def test_misuse_is_caught():
    pool = BlockPool(2)
    (block,) = fill(pool, [b"a"])
    with pytest.raises(AssertionError, match="changed its content"):
        pool.register(block, b"b")
    pool.free([block])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([block])
    with pytest.raises(AssertionError, match="is registered but free"):
        pool.register(block, b"a")
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockPool(0)


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model that keeps its free blocks in a plain list. E33."""

    holders: list[list[int]]
    free_order: list[int]
    names: dict[int, bytes]

    @initialize(num_blocks=st.integers(1, 12))
    def make(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.free_order = [*range(num_blocks)]
        self.holders = []
        self.names = {}

    def _references(self, block: int) -> int:
        return sum(holder.count(block) for holder in self.holders)

    @rule(count=st.integers(0, 13))
    def allocate(self, count):
        blocks = self.pool.allocate(count)
        if count > len(self.free_order):
            assert blocks is None
            return
        assert blocks == self.free_order[:count]
        del self.free_order[:count]
        for block in blocks:
            self.names.pop(block, None)
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data):
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.free(holder)
        for block in reversed(holder):
            if self._references(block) == 0 and block not in self.free_order:
                self.free_order.insert(len(self.free_order) if block in self.names else 0, block)

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def touch(self, name):
        block = self.pool.find(name)
        assert (block is None) == (name not in self.names.values())
        if block is not None:
            assert self.names[block] == name
            self.pool.touch([block])
            self.holders.append([block])
            if block in self.free_order:
                self.free_order.remove(block)

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def register(self, data, name):
        held = sorted({block for holder in self.holders for block in holder})
        block = data.draw(st.sampled_from(held))
        if block not in self.names:
            self.pool.register(block, name)
            self.names[block] = name

    @invariant()
    def agrees_with_the_model(self):
        self.pool.check_integrity()
        assert self.pool.num_free == len(self.free_order)
        for block in range(self.pool.num_blocks):
            assert self.pool.ref_count(block) == self._references(block)
            assert self.pool.hash_of(block) == self.names.get(block)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
