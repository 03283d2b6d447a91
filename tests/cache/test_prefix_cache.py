from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from support.naive_prefix_cache import NaivePrefixCache
from twinfire.cache.block_hash import HashChain
from twinfire.cache.block_pool import BlockPool
from twinfire.cache.prefix_cache import PrefixCache


class Fixture:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, HashChain(block_size, b"seed"))

    def hashes(self, tokens: list[int], extra: bytes = b"") -> list[bytes]:
        hashes: list[bytes] = []
        self.cache.extend_hashes(hashes, array("I", tokens), extra)
        return hashes

    def find(self, tokens: list[int], extra: bytes = b"") -> list[int]:
        return self.cache.find(self.hashes(tokens, extra), len(tokens))

    def compute(self, tokens: list[int], extra: bytes = b"") -> list[int]:
        hashes = self.hashes(tokens, extra)
        blocks = self.pool.allocate(-(-len(tokens) // self.cache.block_size))
        assert blocks is not None
        self.cache.insert(blocks, hashes, 0, len(hashes))
        return blocks


def test_a_hit_leaves_the_last_token_to_compute():
    """E10: a prompt of exactly k cached blocks hits k - 1, as its last logits are needed."""
    cached = Fixture(8, 4)
    blocks = cached.compute([*range(12)])
    assert cached.find([*range(12)]) == blocks[:2]
    assert cached.find([*range(13)]) == blocks[:3]
    assert cached.find([0]) == []


def test_a_hit_is_contiguous_from_the_first_block():
    cached = Fixture(8, 2)
    hashes = cached.hashes([1, 2, 3, 4, 5, 6])
    blocks = cached.pool.allocate(3)
    assert blocks is not None
    cached.cache.insert(blocks, hashes, 1, 3)
    assert cached.find([1, 2, 3, 4, 5, 6, 7]) == []
    cached.cache.insert(blocks, hashes, 0, 1)
    assert cached.find([1, 2, 3, 4, 5, 6, 7]) == blocks


def test_only_full_blocks_are_found():
    cached = Fixture(8, 4)
    blocks = cached.compute([*range(7)])
    assert cached.find([*range(9)]) == blocks[:1]


def test_another_tenants_blocks_are_not_found():
    cached = Fixture(8, 2)
    cached.compute([1, 2, 3, 4], b"tenant a")
    assert cached.find([1, 2, 3, 4], b"tenant b") == []
    assert cached.find([1, 2, 3, 4]) == []


def test_an_evicted_prefix_is_not_found():
    """E12."""
    cached = Fixture(3, 2)
    cached.pool.free(cached.compute([1, 2, 3, 4]))
    assert len(cached.find([1, 2, 3, 4, 5])) == 2
    cached.compute([9, 9, 9, 9])
    assert len(cached.find([1, 2, 3, 4, 5])) == 1
    cached.compute([8, 8])
    assert cached.find([1, 2, 3, 4, 5]) == []


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=25),
)
def test_hits_equal_those_of_a_cache_that_compares_tokens(block_size, prompts):
    """E14 and E33: for every block size, with blocks evicted as others need them."""
    cached = Fixture(16, block_size)
    naive = NaivePrefixCache(block_size)
    for tokens in prompts:
        prefix = cached.find(tokens)
        assert len(prefix) == naive.num_hit_blocks(tokens)
        cached.pool.touch(prefix)
        rest = cached.pool.allocate(-(-len(tokens) // block_size) - len(prefix))
        assert rest is not None
        naive.forget(rest)
        hashes = cached.hashes(tokens)
        cached.cache.insert(prefix + rest, hashes, len(prefix), len(hashes))
        naive.insert(prefix + rest, tokens)
        cached.pool.free(prefix + rest)
        cached.pool.check_integrity()
