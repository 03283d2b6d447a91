"""Hand-offs of which only one half is known: the gateway's `Reserve` or the peer's `Open`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twinfire.protocol.messages import Peer, Submit
from twinfire.protocol.peer_messages import HandOffKey, Open

MAX_RESERVES = 1 << 14
"""Over all gateways; each remembers a prompt."""
MAX_EARLY_OPENS = 1 << 12
OPEN_PATIENCE_S = 1.0
"""How long an `Open` waits for its `Reserve`, which travels by way of the gateway."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """What the gateway said."""

    submit: Submit
    prefill_instance: str
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class EarlyOpen:
    """What the prefill worker said before the gateway."""

    peer: Peer
    message: Open
    arrival_s: float


class Reserves:
    """Both halves by key; nothing here holds a block."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reserves: dict[HandOffKey, Remembered] = {}
        self._opens: dict[HandOffKey, EarlyOpen] = {}

    def __len__(self) -> int:
        return len(self._reserves)

    @property
    def num_early_opens(self) -> int:
        """Opens that wait for the gateway's word."""
        return len(self._opens)

    def remember(self, key: HandOffKey, submit: Submit, prefill_instance: str) -> bool:
        """Keep a `Reserve`; False when there are too many."""
        if len(self._reserves) >= MAX_RESERVES and key not in self._reserves:
            return False
        deadline_s = None if submit.timeout_s is None else self._clock() + submit.timeout_s
        self._reserves.setdefault(key, Remembered(submit, prefill_instance, deadline_s))
        return True

    def wait(self, peer: Peer, message: Open) -> bool:
        """Keep an `Open`; False when there are too many."""
        if len(self._opens) >= MAX_EARLY_OPENS:
            return False
        self._opens.setdefault(message.key, EarlyOpen(peer, message, self._clock()))
        return True

    def take(self, key: HandOffKey) -> tuple[Remembered, EarlyOpen] | None:
        """Return and forget both halves, None while one is missing."""
        reserve, early = self._reserves.get(key), self._opens.get(key)
        if reserve is None or early is None:
            return None
        return self._reserves.pop(key), self._opens.pop(key)

    def forget(self, key: HandOffKey) -> EarlyOpen | None:
        """Drop both halves; return the `Open` that is to be answered."""
        self._reserves.pop(key, None)
        return self._opens.pop(key, None)

    def keys_of(self, gateway_id: str, request_id: int | None = None) -> list[HandOffKey]:
        """Return what a gateway announced: all, or the attempts of one request."""
        return [
            key
            for key in self.all_keys()
            if key.gateway_id == gateway_id and request_id in (None, key.request_id)
        ]

    def all_keys(self) -> set[HandOffKey]:
        """Return everything that is known."""
        return self._reserves.keys() | self._opens.keys()

    def drop_peer(self, instance_id: str) -> list[HandOffKey]:
        """Forget the opens of a peer that is gone, and return their keys."""
        keys = [key for key, open_ in self._opens.items() if open_.peer.instance_id == instance_id]
        for key in keys:
            del self._opens[key]
        return keys

    def overdue_opens(self) -> list[HandOffKey]:
        """Return the opens that have waited too long."""
        limit_s = self._clock() - OPEN_PATIENCE_S
        return [key for key, early in self._opens.items() if early.arrival_s <= limit_s]

    def overdue_reserves(self) -> list[HandOffKey]:
        """Return the reserves whose request's time is over."""
        now_s = self._clock()
        return [
            key
            for key, reserve in self._reserves.items()
            if reserve.deadline_s is not None and reserve.deadline_s <= now_s
        ]
