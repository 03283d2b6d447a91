"""Which requests have run out of time."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from twinfire.engine.request_table import RequestKey


class Deadlines:
    """A heap; entries of requests that ended are skipped when their time comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, RequestKey, float]] = []

    def add(self, key: RequestKey, arrival_s: float, timeout_s: float) -> None:
        """Note that the request that arrived at `arrival_s` has `timeout_s` from then on."""
        heapq.heappush(self._heap, (arrival_s + timeout_s, key, arrival_s))

    def expired(self, now_s: float) -> Iterator[tuple[RequestKey, float]]:
        """Yield and forget what has run out of time: the key and when its request arrived."""
        while self._heap and self._heap[0][0] <= now_s:
            _, key, arrival_s = heapq.heappop(self._heap)
            yield key, arrival_s
