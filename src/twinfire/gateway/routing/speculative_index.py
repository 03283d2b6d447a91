"""Who will hold a prefix soon: what was just routed, before any cache event says so.

Requests that share a prefix come in bursts; without this each of a burst goes to another worker. A
record is the request's own list of hashes, kept for a short time, so that remembering costs nothing
per block. Chained hashes make the common part of two requests a matter of halving.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

MAX_PER_ROOT = 32


class _Recent:
    __slots__ = ("expires_s", "hashes", "holder")

    def __init__(self, hashes: Sequence[bytes], holder: str, expires_s: float) -> None:
        self.hashes = hashes
        self.holder = holder
        self.expires_s = expires_s


class SpeculativeIndex:
    """The last few choices of each root block, for `ttl_s`."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._by_root: dict[bytes, deque[_Recent]] = {}
        self._in_order: deque[tuple[float, bytes]] = deque()

    def __len__(self) -> int:
        return sum(len(recent) for recent in self._by_root.values())

    def insert(self, hashes: Sequence[bytes], holder: str, now_s: float) -> None:
        """Remember that `holder` will have computed `hashes`."""
        self._expire(now_s)
        if hashes:
            record = _Recent(hashes, holder, now_s + self._ttl_s)
            self._by_root.setdefault(hashes[0], deque(maxlen=MAX_PER_ROOT)).append(record)
            self._in_order.append((record.expires_s, hashes[0]))

    def raise_depths(self, hashes: Sequence[bytes], depths: dict[str, int], now_s: float) -> None:
        """Raise in `depths` what the recent choices promise above it."""
        self._expire(now_s)
        for record in self._by_root.get(hashes[0], ()) if hashes else ():
            known, promised = depths.get(record.holder, 0), record.hashes
            # Chained: when the next block differs, nothing beyond it is shared.
            if known < len(hashes) and known < len(promised) and hashes[known] == promised[known]:
                depths[record.holder] = _common_length(hashes, promised, known + 1)

    def _expire(self, now_s: float) -> None:
        while self._in_order and self._in_order[0][0] <= now_s:
            _, root = self._in_order.popleft()
            recent = self._by_root.get(root)
            while recent and recent[0].expires_s <= now_s:
                recent.popleft()
            if not recent:
                self._by_root.pop(root, None)


def _common_length(left: Sequence[bytes], right: Sequence[bytes], at_least: int) -> int:
    low, high = at_least, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) >> 1
        if left[middle - 1] == right[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
