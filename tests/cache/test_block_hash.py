from __future__ import annotations

import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfire.cache.block_hash import HashChain, cache_extra_key

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def hashes_of(chain: HashChain, tokens: list[int], extra: bytes = b"") -> list[bytes]:
    hashes: list[bytes] = []
    chain.extend(hashes, array("I", tokens), extra)
    return hashes


@given(TOKENS, st.integers(1, 9), st.data())
def test_extending_in_any_parts_gives_the_hashes_of_the_whole(tokens, block_size, data):
    chain = HashChain(block_size, b"seed")
    grown: list[bytes] = []
    length = 0
    while length < len(tokens):
        length = data.draw(st.integers(length + 1, len(tokens)))
        chain.extend(grown, array("I", tokens[:length]))
        assert len(grown) == length // block_size
    assert grown == hashes_of(chain, tokens)


@given(TOKENS, TOKENS, st.integers(1, 5))
def test_two_hashes_are_equal_exactly_where_all_tokens_so_far_are(first, second, block_size):
    chain = HashChain(block_size, b"seed")
    pairs = zip(hashes_of(chain, first), hashes_of(chain, second), strict=False)
    for index, (one, other) in enumerate(pairs):
        end = (index + 1) * block_size
        assert (one == other) == (first[:end] == second[:end])


def test_extending_a_hashed_sequence_reads_only_its_new_blocks():
    chain = HashChain(4, b"seed")
    tokens = array("I", range(8))
    hashes = hashes_of(chain, [*range(8)])
    tokens[0] = 99
    tokens.extend(range(8, 12))
    chain.extend(hashes, tokens)
    assert hashes == hashes_of(chain, [*range(12)])


def test_seeds_and_block_sizes_separate_chains():
    tokens = [*range(8)]
    hashes = [
        hashes_of(HashChain(size, seed), tokens)[0] for size in (2, 4) for seed in (b"a", b"b")
    ]
    assert len(set(hashes)) == 4


def test_a_configured_seed_gives_the_same_hashes_in_every_process():
    assert hashes_of(HashChain(2, b"cluster"), [1, 2]) == hashes_of(
        HashChain(2, b"cluster"), [1, 2]
    )


def test_without_a_seed_hashes_cannot_be_predicted():
    """E13: a chain that starts from a known value lets a client craft another's prefix."""
    assert hashes_of(HashChain(2), [1, 2]) != hashes_of(HashChain(2), [1, 2])


def test_equal_strings_of_two_kinds_differ():
    """E13: an adapter named like another tenant's salt must not share its blocks."""
    keys = [
        cache_extra_key(salt="x"),
        cache_extra_key(adapter="x"),
        cache_extra_key(draft_head="x"),
        cache_extra_key(),
    ]
    chain = HashChain(2, b"seed")
    assert len(set(keys)) == 4
    assert len({hashes_of(chain, [1, 2], key)[0] for key in keys}) == 4


@given(st.lists(st.text(max_size=6), min_size=6, max_size=6))
def test_extra_keys_are_equal_only_for_equal_parts(parts):
    first, second = parts[:3], parts[3:]
    keys = [cache_extra_key(salt=a, adapter=b, draft_head=c) for a, b, c in (first, second)]
    assert (keys[0] == keys[1]) == (first == second)


def test_any_json_string_is_a_salt():
    assert cache_extra_key(salt="\ud800") != cache_extra_key(salt="\udfff")


def test_extra_is_part_of_every_block():
    chain = HashChain(2, b"seed")
    plain, salted = hashes_of(chain, [1, 2, 3, 4]), hashes_of(chain, [1, 2, 3, 4], b"salt")
    assert not set(plain) & set(salted)
    resumed = plain[:1]
    chain.extend(resumed, array("I", [1, 2, 3, 4]), b"salt")
    assert resumed[1] != plain[1]


def test_hashes_of_a_long_prompt_are_distinct():
    hashes = hashes_of(HashChain(4, b"seed"), [7] * 400)
    assert all(one != other for one, other in itertools.pairwise(hashes))
    assert len(set(hashes)) == 100


def test_a_block_size_below_one_is_refused():
    with pytest.raises(ValueError, match="block_size is 0"):
        HashChain(0)
