from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.routing_workers import chain
from twinfire.gateway.routing.prefix_index import PrefixIndex
from twinfire.gateway.routing.speculative_index import SpeculativeIndex
from twinfire.protocol.messages import CacheEvents

NAMES = ["a", "b", "c"]
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


def stored(sequence: int, hashes: list[bytes], *, reset: bool = False) -> CacheEvents:
    return CacheEvents(sequence, stored=b"".join(hashes), reset=reset)


def index_of(*names: str, max_blocks: int = 1_000, per_worker: int = 1_000) -> PrefixIndex:
    index = PrefixIndex(max_blocks)
    for name in names:
        index.add_worker(name, per_worker)
    return index


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), PROMPTS, st.integers(0, 3)), max_size=25), PROMPTS
)
def test_lookups_agree_with_a_model_of_prefixes(
    steps: list[tuple[str, list[int], int]], asked: list[int]
) -> None:
    """Workers compute whole prompts, free from the tail, leave and come back."""
    index = index_of(*NAMES)
    held: dict[str, set[bytes]] = {name: set() for name in NAMES}
    sequences = dict.fromkeys(NAMES, 0)
    for name, prompt, what in steps:
        hashes = chain(*prompt)
        if what == 0:
            index.add_worker(name, 1_000)
            held[name], sequences[name] = set(), 0
        elif what == 1:
            # Freed with everything that hangs on it.
            gone = {one for one in held[name] if hashes[-1].lstrip(b"0") in one}
            held[name] -= gone
            assert index.observe(name, CacheEvents(sequences[name], removed=b"".join(gone)))
            sequences[name] += 1
        else:
            held[name] |= set(hashes)
            assert index.observe(name, stored(sequences[name], hashes))
            sequences[name] += 1
    hashes = chain(*asked)
    expected = {}
    for name in NAMES:
        depth = next((i for i, one in enumerate(hashes) if one not in held[name]), len(hashes))
        if depth:
            expected[name] = depth
    assert index.lookup(hashes) == expected
    assert index.num_blocks == sum(map(len, held.values()))


def test_hits_end_where_the_prefix_first_breaks_even_after_forgetting() -> None:
    index = index_of("a", per_worker=6)
    index.observe("a", stored(0, chain(1, 2, 3, 4)))
    index.observe("a", stored(1, chain(9, 8, 7, 6)))
    assert index.num_blocks == 6
    assert index.num_forgotten == 2
    assert index.lookup(chain(1, 2, 3, 4)) == {}
    assert index.lookup(chain(9, 8, 7, 6)) == {"a": 4}
    # The root comes back, the second block does not: the hit ends there.
    index.observe("a", CacheEvents(2, removed=b"".join(chain(9, 8, 7, 6))))
    index.observe("a", stored(3, chain(1)))
    assert index.lookup(chain(1, 2, 3, 4)) == {"a": 1}


def test_the_total_is_bounded_at_the_cost_of_who_holds_most() -> None:
    index = index_of("a", "b", max_blocks=10)
    index.observe("b", stored(0, chain(5, 6)))
    index.observe("a", stored(0, chain(*range(20))))
    assert index.num_blocks == 10
    assert index.lookup(chain(5, 6)) == {"b": 2}


def test_a_gap_is_told_once_and_healed_by_a_reset() -> None:
    index = index_of("a")
    assert index.observe("a", stored(0, chain(1)))
    assert not index.observe("a", stored(2, chain(3)))
    assert index.observe("a", stored(3, chain(4)))
    assert index.lookup(chain(4)) == {}
    assert index.lookup(chain(1)) == {"a": 1}
    assert index.observe("a", stored(4, chain(2), reset=True))
    assert index.lookup(chain(1)) == {}
    assert index.lookup(chain(2)) == {"a": 1}
    assert index.observe("a", stored(5, chain(3)))
    assert index.lookup(chain(3)) == {"a": 1}
    assert index.num_gaps == 1


def test_a_repeated_event_changes_nothing_and_a_late_first_one_is_a_gap() -> None:
    index = index_of("a", "b")
    index.observe("a", stored(0, chain(1)))
    index.observe("a", CacheEvents(1, removed=chain(1)[0]))
    assert index.observe("a", stored(0, chain(1)))
    assert index.lookup(chain(1)) == {}
    assert not index.observe("b", stored(7, chain(1)))
    assert index.observe("nobody", stored(3, chain(1)))


def test_a_worker_that_leaves_takes_its_blocks_along() -> None:
    index = index_of("a", "b")
    for name in "ab":
        index.observe(name, stored(0, chain(1, 2)))
    index.remove_worker("a")
    index.remove_worker("a")
    assert index.lookup(chain(1, 2)) == {"b": 2}
    index.add_worker("c", 10)
    assert index.lookup(chain(1, 2)) == {"b": 2}
    assert index.num_blocks == 2


@given(PROMPTS, PROMPTS, st.integers(0, 4))
def test_a_choice_counts_as_a_hit_until_its_time_is_over(
    first: list[int], second: list[int], known: int
) -> None:
    recent = SpeculativeIndex(2.0)
    recent.insert(chain(*first), "w", 10.0)
    shared = next(
        (i for i, pair in enumerate(zip(first, second)) if pair[0] != pair[1]),  # noqa: B905
        min(len(first), len(second)),
    )
    truth = min(known, shared)
    depths = {"w": truth} if truth else {}
    recent.raise_depths(chain(*second), depths, 11.9)
    assert depths.get("w", 0) == shared
    depths = {}
    recent.raise_depths(chain(*second), depths, 12.0)
    assert not depths
    assert len(recent) == 0


def test_choices_that_are_remembered_are_bounded() -> None:
    recent = SpeculativeIndex(2.0)
    for number in range(1_000):
        recent.insert(chain(1, number), f"w{number}", 10.0)
    assert len(recent) <= 32
    recent.insert([], "w", 20.0)
    assert len(recent) == 0


@pytest.mark.parametrize("depths", [[0, 1, 5, 5, 40], [64, 64, 64], [63, 1, 62]])
def test_many_workers_at_many_depths(depths: list[int]) -> None:
    names = [f"w{number}" for number in range(len(depths))]
    index = index_of(*names)
    hashes = chain(*range(64))
    for name, depth in zip(names, depths, strict=True):
        index.observe(name, stored(0, hashes[:depth]))
    found = index.lookup(hashes)
    assert [found.get(name, 0) for name in names] == depths
