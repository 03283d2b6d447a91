"""Who gets the next free blocks of a full worker: gateways take turns.

Inside a gateway the lowest priority number goes first, then the earliest. A request that does not
fit may be passed by a few smaller ones, but not once it has waited for long.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

from twinfire.protocol.peer_messages import HandOffKey

MAX_PASSED = 4
"""How far behind its gateway's first a request may be and still be tried."""
STARVING_S = 2.0
"""A request that has waited for so long is tried alone until it fits."""

_Entry = tuple[int, int, float, HandOffKey]


class FairQueue:
    """Hand-offs that wait for blocks."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[str, list[_Entry]] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def push(self, key: HandOffKey, priority: int) -> None:
        """Wait from now on."""
        entry = (priority, self._num_pushed, self._clock(), key)
        insort(self._waiting.setdefault(key.gateway_id, []), entry)
        self._num_pushed += 1

    def remove(self, key: HandOffKey) -> None:
        """Wait no more; unknown keys are ignored."""
        entries = self._waiting.get(key.gateway_id, [])
        entries[:] = [entry for entry in entries if entry[3] != key]
        if not entries:
            self._waiting.pop(key.gateway_id, None)

    def serve(self, attempt: Callable[[HandOffKey], bool]) -> None:
        """Call `attempt` for whoever is next, until nobody fits.

        It returns whether the request is done with; such requests leave the queue.
        """
        while self._waiting:
            starving = self._starving()
            gateways = [starving.gateway_id] if starving else list(self._waiting)
            if not any(self._serve_gateway(gateway_id, attempt) for gateway_id in gateways):
                return

    def _starving(self) -> HandOffKey | None:
        heads = [entries[0] for entries in self._waiting.values()]
        oldest = min(heads, key=lambda entry: entry[2])
        return oldest[3] if self._clock() - oldest[2] > STARVING_S else None

    def _serve_gateway(self, gateway_id: str, attempt: Callable[[HandOffKey], bool]) -> bool:
        entries = self._waiting.get(gateway_id, [])
        starving = self._clock() - entries[0][2] > STARVING_S if entries else False
        for entry in entries[: 1 if starving else 1 + MAX_PASSED]:
            if attempt(entry[3]):
                self.remove(entry[3])
                # Whoever was served goes behind the other gateways.
                if (left := self._waiting.pop(gateway_id, None)) is not None:
                    self._waiting[gateway_id] = left
                return True
        return False
