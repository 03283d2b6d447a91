"""How long something is held for somebody who may be gone.

A table of ends by key, on the caller's clock. Knows nothing of what is held: whoever sweeps frees.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

RENEWALS_PER_LEASE = 6
"""So many renewals may be lost or late before a lease ends."""

K = TypeVar("K", bound=Hashable)


class Leases(Generic[K]):
    """Leases of one length."""

    def __init__(self, length_s: float, clock: Callable[[], float]) -> None:
        self._length_s = length_s
        self._clock = clock
        self._end_s: dict[K, float] = {}

    def __len__(self) -> int:
        return len(self._end_s)

    def __contains__(self, key: K) -> bool:
        return key in self._end_s

    def grant(self, key: K) -> None:
        """Begin a lease, or begin it anew."""
        self._end_s[key] = self._clock() + self._length_s

    def renew(self, keys: Iterable[K]) -> None:
        """Prolong the leases that exist; others stay unknown."""
        end_s = self._clock() + self._length_s
        for key in keys:
            if key in self._end_s:
                self._end_s[key] = end_s

    def release(self, key: K) -> None:
        """End a lease; nothing happens when there is none."""
        self._end_s.pop(key, None)

    def ended(self) -> list[K]:
        """Return the keys whose time is over; they stay until released."""
        now_s = self._clock()
        return [key for key, end_s in self._end_s.items() if end_s <= now_s]
