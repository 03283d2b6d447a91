"""The hand-offs of one side, and how long each is held for a peer that may be gone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from twinfire.protocol.messages import Peer
from twinfire.protocol.peer_messages import HandOffKey
from twinfire.transfer.lease import Leases

SILENCE = "it said nothing for the length of a lease"


class HandOffState(Protocol):
    """What both sides know of a hand-off."""

    @property
    def key(self) -> HandOffKey:
        """Its name."""
        ...

    @property
    def peer(self) -> Peer:
        """The worker on the other side."""
        ...

    @property
    def deadline_s(self) -> float | None:
        """When the request's time is over."""
        ...

    @property
    def is_open(self) -> bool:
        """Whether the peer holds something for it, and has to hear that it goes on."""
        ...


H = TypeVar("H", bound=HandOffState)


class HandOffTable(Generic[H]):
    """By key, in the order of their coming. Everything returned may be changed while it is used."""

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._leases: Leases[HandOffKey] = Leases(lease_s, clock)
        self._by_key: dict[HandOffKey, H] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: HandOffKey) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[H]:
        return iter(list(self._by_key.values()))

    def get(self, key: HandOffKey) -> H | None:
        """Return the hand-off of a key."""
        return self._by_key.get(key)

    def add(self, hand_off: H) -> None:
        """List one; it has no lease yet."""
        self._by_key[hand_off.key] = hand_off

    def remove(self, key: HandOffKey) -> H | None:
        """Forget one and its lease; None when there is none."""
        self._leases.release(key)
        return self._by_key.pop(key, None)

    def of_request(self, gateway_id: str, request_id: int) -> list[H]:
        """Return the attempts of one request."""
        return [one for one in self.of_gateway(gateway_id) if one.key.request_id == request_id]

    def of_gateway(self, gateway_id: str) -> list[H]:
        """Return what a gateway waits for."""
        return [one for one in self if one.key.gateway_id == gateway_id]

    def of_peer(self, instance_id: str) -> list[H]:
        """Return what is shared with a worker."""
        return [one for one in self if one.peer.instance_id == instance_id]

    def grant_lease(self, key: HandOffKey) -> None:
        """Hold it for as long as a lease lasts."""
        self._leases.grant(key)

    def renew(self, keys: Iterable[HandOffKey]) -> None:
        """The peer has been heard of; leases that do not exist stay unknown."""
        self._leases.renew(keys)

    def end_lease(self, key: HandOffKey) -> None:
        """Nothing is held for the peer any more."""
        self._leases.release(key)

    def renewals(self) -> dict[str, tuple[HandOffKey, ...]]:
        """Return what is open by peer."""
        keys: dict[str, list[HandOffKey]] = defaultdict(list)
        for one in self._by_key.values():
            if one.is_open:
                keys[one.peer.instance_id].append(one.key)
        return {instance_id: tuple(found) for instance_id, found in keys.items()}

    def silent(self) -> Iterator[H]:
        """Yield those whose lease has ended, unless an earlier one took them along."""
        for key in self._leases.ended():
            self._leases.release(key)
            hand_off = self._by_key.get(key)
            if hand_off is not None:
                yield hand_off

    def overdue(self) -> list[H]:
        """Return those whose request's time is over."""
        now_s = self._clock()
        return [one for one in self if one.deadline_s is not None and one.deadline_s <= now_s]
