"""The holder's side of prefix pulls: blocks pinned for others, each under a lease."""

from __future__ import annotations

from collections.abc import Callable

from twinfire.protocol.messages import Peer
from twinfire.protocol.peer_messages import (
    PeerMessage,
    PullDone,
    PullGrant,
    PullRequest,
    Renew,
)
from twinfire.protocol.tokens import pack_generations, pack_ids
from twinfire.transfer.fault_points import FaultPoints
from twinfire.transfer.lease import Leases
from twinfire.transfer.ports import HoldingEngine, Peers

HASH_BYTES = 32
MAX_GRANTS_PER_PEER = 64

_GrantKey = tuple[str, int]


class PrefixHolder:
    """Grants of this worker."""

    def __init__(
        self,
        engine: HoldingEngine,
        peers: Peers,
        *,
        lease_s: float,
        clock: Callable[[], float],
        faults: FaultPoints,
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._faults = faults
        self._leases: Leases[_GrantKey] = Leases(lease_s, clock)
        self._hold_ids: dict[_GrantKey, int] = {}

    def __len__(self) -> int:
        return len(self._hold_ids)

    def received(self, peer: Peer, message: PeerMessage) -> None:
        """A puller says something."""
        match message:
            case PullRequest(pull_id, hashes):
                self._grant(peer, pull_id, hashes)
            case PullDone(pull_id):
                self._release((peer.instance_id, pull_id))
            case Renew(_, pull_ids):
                self._leases.renew((peer.instance_id, pull_id) for pull_id in pull_ids)
            case _:
                pass

    def peer_lost(self, instance_id: str) -> None:
        """The link of a puller is closed."""
        for key in list(self._hold_ids):
            if key[0] == instance_id:
                self._release(key)

    def release_all(self) -> None:
        """Unpin everything."""
        for key in list(self._hold_ids):
            self._release(key)

    def pump(self) -> None:
        """Unpin what nobody has renewed; to be called every pass."""
        for key in self._leases.ended():
            self._release(key)

    def _grant(self, peer: Peer, pull_id: int, hashes: bytes) -> None:
        key = (peer.instance_id, pull_id)
        if key in self._hold_ids:
            return
        num_held = sum(holder == peer.instance_id for holder, _ in self._hold_ids)
        if num_held >= MAX_GRANTS_PER_PEER or len(hashes) % HASH_BYTES:
            self._peers.send(peer.instance_id, PullGrant(pull_id, b"", b""))
            return
        names = [hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES)]
        hold = self._engine.hold_blocks(names)
        self._hold_ids[key] = hold.hold_id
        self._leases.grant(key)
        self._faults.hit("holder.before_grant")
        self._peers.send(
            peer.instance_id,
            PullGrant(pull_id, pack_ids(hold.block_ids), pack_generations(hold.generations)),
        )
        self._faults.hit("holder.after_grant")

    def _release(self, key: _GrantKey) -> None:
        self._leases.release(key)
        hold_id = self._hold_ids.pop(key, None)
        if hold_id is not None:
            self._engine.release_block_hold(hold_id)
