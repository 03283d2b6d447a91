from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from twinfire.gateway.text.stop_strings import StopScanner, StopStrings

TEXT = st.text(alphabet="ab\n", max_size=24)
STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


def naive_stop(text: str, stops: list[str]) -> tuple[str, str] | None:
    """(text before, stop) of the stop that ends first, the longest of equals."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return None


def scan(pieces: list[str], scanner: StopScanner) -> list[str]:
    shown: list[str] = []
    for piece in pieces:
        shown.append(scanner.feed(piece))
        if scanner.matched is not None:
            return shown
    return [*shown, scanner.flush()]


def pieces_of(text: str, points: list[int]) -> list[str]:
    marks = sorted([0, *(point % (len(text) + 1) for point in points), len(text)])
    return [text[start:end] for start, end in pairwise(marks)]


@given(TEXT, STOPS, st.lists(st.integers(0, 100), max_size=24), st.booleans())
@example("aab", ["ab", "aab"], [1, 2], False)
@example("abab\n", ["abab\n", "b\n"], list(range(5)), False)
def test_every_split_shows_the_same_text_and_stops_at_the_same_place(
    text: str, stops: list[str], points: list[int], include: bool
) -> None:
    scanner = StopScanner(StopStrings(stops), include)
    shown = "".join(scan(pieces_of(text, points), scanner))
    expected = naive_stop(text, stops)
    if expected is None:
        assert (shown, scanner.matched) == (text, None)
    else:
        before, stop = expected
        assert (shown, scanner.matched) == (before + (stop if include else ""), stop)


@given(TEXT, STOPS)
def test_what_is_held_back_may_still_become_a_stop(text: str, stops: list[str]) -> None:
    scanner = StopScanner(StopStrings(stops))
    shown = ""
    for position, character in enumerate(text):
        shown += scanner.feed(character)
        if scanner.matched is not None:
            return
        held = text[len(shown) : position + 1]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_unarmed_stop_is_text() -> None:
    scanner = StopScanner(StopStrings(["END"]))
    assert scanner.feed("an END", armed=False) + scanner.feed(" and END") == "an END and "
    assert scanner.matched == "END"


def test_stop_that_begins_unarmed_counts_where_it_ends() -> None:
    scanner = StopScanner(StopStrings(["END"]))
    assert scanner.feed("xEN", armed=False) == "x"
    assert scanner.feed("D", armed=True) == ""
    assert scanner.matched == "END"
