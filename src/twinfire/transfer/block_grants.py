"""Blocks for opened hand-offs: taken at once, or in turn while this worker is full."""

from __future__ import annotations

from collections.abc import Callable

from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import Rejected, Reserved
from twinfire.protocol.peer_messages import HandOffKey, Ticket
from twinfire.transfer.fair_queue import FairQueue
from twinfire.transfer.fault_points import FaultPoints
from twinfire.transfer.hand_off_table import HandOffTable
from twinfire.transfer.incoming import Incoming, Stage
from twinfire.transfer.ports import Gateways, Peers, ReceivingEngine

MAX_WAITING = 1024
RESERVE_RETRY_S = 0.02
"""How often a full worker looks whether there is room now."""


class BlockGrants:
    """`end(incoming, reason)` is called for a hand-off that can never have blocks here."""

    def __init__(
        self,
        engine: ReceivingEngine,
        peers: Peers,
        gateways: Gateways,
        hand_offs: HandOffTable[Incoming],
        end: Callable[[Incoming, str], None],
        *,
        block_size: int,
        clock: Callable[[], float],
        faults: FaultPoints,
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._gateways = gateways
        self._hand_offs = hand_offs
        self._end = end
        self._block_size = block_size
        self._clock = clock
        self._faults = faults
        self._queue = FairQueue(clock)
        self._next_retry_s = 0.0

    def ask(self, incoming: Incoming) -> bool:
        """Grant blocks now or as soon as there is room; False when too many wait already."""
        if len(self._queue) >= MAX_WAITING:
            return False
        # Whoever waits already goes first.
        if len(self._queue) or not self._try(incoming.key):
            self._faults.hit("receiver.waiting")
            self._queue.push(incoming.key, incoming.reserve.submit.priority)
        return True

    def forget(self, key: HandOffKey) -> None:
        """Wait no more; unknown keys are ignored."""
        self._queue.remove(key)

    def pump(self) -> None:
        """Serve who waits; to be called every pass."""
        if len(self._queue) and self._clock() >= self._next_retry_s:
            self._queue.serve(self._try)
            self._next_retry_s = self._clock() + RESERVE_RETRY_S

    def _try(self, key: HandOffKey) -> bool:
        """Take blocks for a hand-off; False when there is no room for it now."""
        incoming = self._hand_offs.get(key)
        if incoming is None or incoming.stage is not Stage.WAITING:
            return True
        submit = incoming.reserve.submit
        try:
            reservation = self._engine.reserve(key.gateway_id, submit)
        except InvalidRequest as error:
            self._end(incoming, error.message)
            self._gateways.send(
                key.gateway_id,
                Rejected(submit.request_id, error.message, param=error.param, code=error.code),
            )
            return True
        if reservation is None:
            return False
        incoming.grant(reservation, self._clock())
        num_cached = reservation.num_cached_blocks
        self._faults.hit("receiver.before_ticket")
        self._peers.send(incoming.peer.instance_id, Ticket(key, num_cached))
        cached_tokens = num_cached * self._block_size
        self._gateways.send(
            key.gateway_id, Reserved(submit.request_id, submit.attempt, cached_tokens)
        )
        self._faults.hit("receiver.after_ticket")
        return True
