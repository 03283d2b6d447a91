"""The index against a search of the whole text."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from twinfire.engine.drafters.suffix_index import SuffixIndex

EVERY = 1 << 20
ANCHORS = (1, 2, 4)

texts = st.lists(st.integers(0, 3), max_size=120)


def naive_find(
    tokens: list[int], first: int, stop: int, suffix: list[int], max_length: int
) -> list[tuple[int, int]]:
    for anchor in reversed(ANCHORS):
        if anchor > len(suffix):
            continue
        found = []
        for place in range(stop, first + anchor - 1, -1):
            length = 0
            while (
                length < min(max_length, len(suffix), place - first)
                and tokens[place - length - 1] == suffix[len(suffix) - length - 1]
            ):
                length += 1
            if length >= anchor:
                found.append((length, place))
        if found:
            return found
    return []


@given(texts, st.lists(st.integers(1, 70)), st.lists(st.integers(0, 3), max_size=12), st.data())
def test_every_place_is_found_and_no_other(
    text: list[int], pieces: list[int], suffix: list[int], data: st.DataObject
) -> None:
    tokens = array("I", text)
    index = SuffixIndex(tokens, ANCHORS)
    for piece in [*pieces, len(text)]:
        index.add_until(min(index.num_added + piece, len(text)))
        index.first_token = data.draw(st.integers(index.first_token, index.num_added))
        found = index.find(array("I", suffix), EVERY, 8)
        assert found == naive_find(text, index.first_token, index.num_added, suffix, 8)


@given(texts, st.lists(st.integers(0, 3), max_size=12), st.data())
def test_dropping_moves_every_place(
    text: list[int], suffix: list[int], data: st.DataObject
) -> None:
    index = SuffixIndex(array("I", text), ANCHORS)
    index.add_until(len(text))
    dropped = data.draw(st.integers(0, len(text)))
    index.first_token = dropped
    before = index.find(array("I", suffix), EVERY, 8)
    index.drop(dropped)
    after = index.find(array("I", suffix), EVERY, 8)
    assert after == [(length, place - dropped) for length, place in before]
    assert list(index.tokens) == text[dropped:]


def test_the_newest_places_come_first_and_tables_grow() -> None:
    index = SuffixIndex(array("I"), ANCHORS)
    for number in range(3_000):
        index.tokens.extend([7, 8, number % 50 + 10])
        if number % 100 == 0:
            index.add_until(len(index.tokens))
    index.add_until(len(index.tokens))
    found = index.find(array("I", [30, 7, 8]), 3, 2)
    assert found == [(2, 8_999), (2, 8_996), (2, 8_993)]
    longer = index.find(array("I", [7, 8, 30, 7, 8]), 3, 8)
    assert [length for length, _ in longer] == [5, 5, 5]
    assert all(index.tokens[place - 3] == 30 for _, place in longer)


def test_one_piece_or_many_make_the_same_index() -> None:
    text = array("I", ((number * number) % 97 % 5 for number in range(5_000)))
    whole, pieces = SuffixIndex(text, ANCHORS, len(text)), SuffixIndex(text, ANCHORS)
    whole.add_until(len(text))
    for stop in range(0, len(text) + 1, 8):
        pieces.add_until(stop)
    pieces.add_until(len(text))
    for end in range(1, 60):
        suffix = text[:end]
        assert whole.find(suffix, 40, 16) == pieces.find(suffix, 40, 16)
