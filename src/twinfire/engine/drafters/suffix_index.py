"""Where the last tokens of a sequence stood before: an index that grows with the text.

Hash chains, as compressors use them: for each of a few anchor lengths a table of buckets holds
the latest place, and every place the one before it in its bucket. Chains may mix different
anchors, so each place is compared token by token, and a chain is walked from the newest place on,
so that the newest are found first. What was written before `first_token` is forgotten at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15
_FEWEST_BITS = 8
_MOST_BITS = 20
_SCALAR_TOKENS = 24
"""Up to so many new tokens a loop is faster than numpy."""
_CHAIN_STEPS = 4
"""Places that are looked at in a chain, for each that is asked for."""


class SuffixIndex:
    """Finds earlier places of a text's last tokens.

    A place is the position of the token that follows them. `tokens` is shared with the caller,
    who may only append to it; `add_until` says how much of it may be found.
    """

    def __init__(self, tokens: array[int], anchors: Sequence[int], num_expected: int = 0) -> None:
        """`anchors` are ascending lengths; the first is the shortest match that is ever found.

        With more than `num_expected` tokens the tables are made anew, larger.
        """
        self.tokens = tokens
        self.first_token = 0
        """Places before it, and matches that begin before it, are not found."""
        self.num_added = 0
        self._chains = tuple(_Chain(length, num_expected) for length in anchors)

    def add_until(self, stop: int) -> None:
        """Make places up to `stop` findable; `stop` is at most the number of tokens."""
        if stop > self.num_added:
            for chain in self._chains:
                chain.add(self.tokens, self.num_added, stop)
            self.num_added = stop

    def find(self, suffix: array[int], limit: int, max_length: int) -> list[tuple[int, int]]:
        """Return up to `limit` places as (length, place), the newest first.

        All end with the longest anchor that was found at all. `length` is how many of the last
        tokens of `suffix` are the same before the place, at most `max_length`.
        """
        for chain in reversed(self._chains):
            if chain.length <= len(suffix):
                found = self._walk(chain, suffix, limit, max_length)
                if found:
                    return found
        return []

    def drop(self, num_tokens: int) -> None:
        """Delete so many of the oldest tokens; every place moves to the front by as many."""
        del self.tokens[:num_tokens]
        self.first_token = max(0, self.first_token - num_tokens)
        stop, self.num_added = self.num_added - num_tokens, 0
        self._chains = tuple(_Chain(chain.length, stop) for chain in self._chains)
        self.add_until(stop)

    def _walk(
        self, chain: _Chain, suffix: array[int], limit: int, max_length: int
    ) -> list[tuple[int, int]]:
        tokens, length = self.tokens, chain.length
        anchor = suffix[-length:]
        earliest = self.first_token + length
        found: list[tuple[int, int]] = []
        place = chain.latest(anchor)
        for _ in range(limit * _CHAIN_STEPS):
            if place < earliest:
                break
            if tokens[place - length : place] == anchor:
                found.append((self._match_length(suffix, place, length, max_length), place))
                if len(found) == limit:
                    break
            place = chain.before[place]
        return found

    def _match_length(self, suffix: array[int], place: int, length: int, max_length: int) -> int:
        tokens, end = self.tokens, len(suffix)
        most = min(max_length, end, place - self.first_token)
        while length < most and tokens[place - length - 1] == suffix[end - length - 1]:
            length += 1
        return length


class _Chain:
    """The places of one anchor length."""

    __slots__ = ("_bits", "_latest", "before", "length")

    def __init__(self, length: int, num_expected: int) -> None:
        self.length = length
        self.before: array[int] = array("i")
        """[places added] the place before it in the same bucket; 0 for none."""
        self._bits = min(_MOST_BITS, max(_FEWEST_BITS, num_expected.bit_length()))
        self._latest: array[int] = array("i", bytes(4 << self._bits))

    def latest(self, anchor: array[int]) -> int:
        value = 0
        for token in anchor:
            value = (value * _FACTOR + token + 1) & _MASK
        return self._latest[((value * _FACTOR) & _MASK) >> (64 - self._bits)]

    def add(self, tokens: array[int], start: int, stop: int) -> None:
        """Add the places above `start` and up to `stop`; all up to `start` are there."""
        if stop > 2 << self._bits and self._bits < _MOST_BITS:
            self._bits = min(_MOST_BITS, max(self._bits + 2, stop.bit_length()))
            self._latest = array("i", bytes(4 << self._bits))
            del self.before[:]
            start = 0
        if start == 0:
            # No anchor ends before the first token.
            self.before.append(0)
        if stop - start > _SCALAR_TOKENS:
            self._add_many(tokens, start, stop)
            return
        for place in range(start + 1, stop + 1):
            if place < self.length:
                self.before.append(0)
                continue
            value = 0
            for token in tokens[place - self.length : place]:
                value = (value * _FACTOR + token + 1) & _MASK
            bucket = ((value * _FACTOR) & _MASK) >> (64 - self._bits)
            self.before.append(self._latest[bucket])
            self._latest[bucket] = place

    def _add_many(self, tokens: array[int], start: int, stop: int) -> None:
        first = max(start + 1, self.length)
        self.before.extend([0] * (min(first, stop + 1) - start - 1))
        if first > stop:
            return
        buckets = self._buckets(np.frombuffer(tokens, dtype=np.uint32)[first - self.length : stop])
        # Sorting keeps the order of equal ones: the neighbour to the left is the one before.
        order = _stable_order(buckets, self._bits)
        sorted_buckets = buckets[order]
        is_first = np.ones(len(order), dtype=np.bool_)
        np.not_equal(sorted_buckets[1:], sorted_buckets[:-1], out=is_first[1:])
        latest = np.frombuffer(self._latest, dtype=np.int32)
        places = (order + first).astype(np.int32)
        before = np.empty(len(order), dtype=np.int32)
        before[1:] = places[:-1]
        before[is_first] = latest[sorted_buckets[is_first]]
        is_last = np.append(is_first[1:], np.True_)
        latest[sorted_buckets[is_last]] = places[is_last]
        in_order = np.empty(len(order), dtype=np.int32)
        in_order[order] = before
        self.before.frombytes(in_order.tobytes())

    def _buckets(self, tokens: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        """Return [n - length + 1] the bucket of every anchor in `tokens` [n]."""
        count = len(tokens) - self.length + 1
        values = np.zeros(count, dtype=np.uint64)
        wide = tokens.astype(np.uint64) + np.uint64(1)
        for offset in range(self.length):
            values *= np.uint64(_FACTOR)
            values += wide[offset : offset + count]
        values *= np.uint64(_FACTOR)
        return values >> np.uint64(64 - self._bits)


def _stable_order(buckets: npt.NDArray[np.uint64], bits: int) -> npt.NDArray[np.intp]:
    """Return the stable order of [n] `buckets`, by the radix sort that numpy has for 16 bits."""
    order = np.argsort((buckets & np.uint64(0xFFFF)).astype(np.uint16), kind="stable")
    if bits <= 16:
        return order
    high = (buckets >> np.uint64(16)).astype(np.uint16)
    return order[np.argsort(high[order], kind="stable")]
