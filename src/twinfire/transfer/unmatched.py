"""Hand-offs that have only been announced, or only been opened, and how those end.

The two halves may come in either order. What is over is known by its tombstone, and a half that
comes afterwards is answered and not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from twinfire.protocol.messages import Peer, Reserve
from twinfire.protocol.peer_messages import Abort, HandOffKey, Open
from twinfire.transfer.ports import Peers
from twinfire.transfer.reserves import EarlyOpen, Remembered, Reserves
from twinfire.transfer.tombstones import Tombstones


class Refuse(Protocol):
    """Ends a hand-off by telling its gateway."""

    def __call__(self, key: HandOffKey, reason: str, *, retry: bool = True) -> None:
        """Say why, and whether another attempt could succeed."""
        ...


class Unmatched:
    """`matched` is called with both halves, which are forgotten here."""

    def __init__(
        self,
        peers: Peers,
        tombstones: Tombstones,
        matched: Callable[[HandOffKey, Remembered, EarlyOpen], None],
        refuse: Refuse,
        clock: Callable[[], float],
    ) -> None:
        self._peers = peers
        self._tombstones = tombstones
        self._matched = matched
        self._refuse = refuse
        self._reserves = Reserves(clock)

    @property
    def num_reserves(self) -> int:
        """Hand-offs that were announced and not yet opened."""
        return len(self._reserves)

    @property
    def num_opens(self) -> int:
        """Hand-offs that were opened and not yet announced."""
        return self._reserves.num_early_opens

    def reserve(self, key: HandOffKey, message: Reserve) -> None:
        """A gateway announces a hand-off."""
        if self._tombstones.outcome(key) is not None:
            return
        if self._reserves.remember(key, message.submit, message.prefill_instance):
            self._match(key)
        else:
            self._refuse(key, "too many hand-offs are announced to the decode worker")

    def open(self, peer: Peer, message: Open) -> None:
        """A prefill worker opens one."""
        key = message.key
        if self._tombstones.outcome(key) is not None:
            self._peers.send(peer.instance_id, Abort(key, "this hand-off is over"))
        elif self._reserves.wait(peer, message):
            self._match(key)
        else:
            self._peers.send(peer.instance_id, Abort(key, "too many hand-offs are open here"))
            self._refuse(key, "too many hand-offs are open at the decode worker")

    def forget(self, key: HandOffKey) -> None:
        """The prefill worker has ended it."""
        self._reserves.forget(key)

    def end_all(self, reason: str, gateway_id: str, request_id: int | None = None) -> None:
        """Nobody waits for these any more: all of a gateway, or the attempts of one request."""
        for key in self._reserves.keys_of(gateway_id, request_id):
            self._end(key, reason)

    def peer_lost(self, instance_id: str, reason: str) -> None:
        """The link of a prefill worker is closed."""
        for key in self._reserves.drop_peer(instance_id):
            self._refuse(key, reason)

    def fence(self, reason: str) -> None:
        """End everything."""
        for key in self._reserves.all_keys():
            self._end(key, reason)
            self._refuse(key, reason)

    def sweep(self) -> None:
        """End what has waited too long."""
        for key in self._reserves.overdue_opens():
            reason = "the gateway has not announced this hand-off to the decode worker"
            self._end(key, reason)
            self._refuse(key, reason)
        for key in self._reserves.overdue_reserves():
            self._end(key, "the request's time is over")
            self._refuse(key, "the request's time is over", retry=False)

    def _match(self, key: HandOffKey) -> None:
        both = self._reserves.take(key)
        if both is not None:
            self._matched(key, *both)

    def _end(self, key: HandOffKey, reason: str) -> None:
        self._tombstones.add(key, "aborted")
        early = self._reserves.forget(key)
        if early is not None:
            self._peers.send(early.peer.instance_id, Abort(key, reason))
