"""The decode side of hand-offs: takes blocks, has them read, checks them, and goes on decoding.

A state machine without sockets or threads. Whichever side ends a hand-off by a fault tells the
gateway and sends `Abort`; the side that receives `Abort` only lets go. Blocks that a read may
still write are never freed before that read has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import msgspec

from twinfire.engine.step_report import GatewayOutput
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import (
    ALL_CHOICES,
    HandOffFailed,
    Peer,
    Rejected,
    Reserve,
    Reserved,
)
from twinfire.protocol.peer_messages import (
    Abort,
    AbortAck,
    ChunkReady,
    Commit,
    Done,
    HandOffKey,
    Open,
    PeerMessage,
    Renew,
    Ticket,
)
from twinfire.protocol.tokens import unpack_generations, unpack_ids
from twinfire.transfer.block_filler import BlockFiller
from twinfire.transfer.block_sums import sums_agree
from twinfire.transfer.connector import RemoteBlock
from twinfire.transfer.fair_queue import FairQueue
from twinfire.transfer.fault_points import FaultPoints
from twinfire.transfer.incoming import Incoming, Stage
from twinfire.transfer.incoming_blocks import IncomingBlocks
from twinfire.transfer.lease import Leases
from twinfire.transfer.ports import BlockBytes, BlockReader, Gateways, Peers, ReceivingEngine
from twinfire.transfer.reserves import EarlyOpen, Remembered
from twinfire.transfer.tombstones import Outcome, Tombstones
from twinfire.transfer.unmatched import Unmatched
from twinfire.transfer.verify_commit import check_commit, check_open

MAX_WAITING = 1024
RESERVE_RETRY_S = 0.02
"""How often a full worker looks whether there is room now."""

Accepted = Callable[[str, GatewayOutput], None]


class HandOffReceiver:
    """Hand-offs that this worker will decode.

    `accepted(gateway_id, output)` is called with the first tokens, to be sent at once.
    """

    def __init__(
        self,
        engine: ReceivingEngine,
        peers: Peers,
        gateways: Gateways,
        reader: BlockReader,
        accepted: Accepted,
        *,
        content: BlockBytes,
        block_size: int,
        bytes_per_block: int,
        lease_s: float,
        clock: Callable[[], float],
        faults: FaultPoints,
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._gateways = gateways
        self._accepted = accepted
        self._content = content
        self._block_size = block_size
        self._bytes_per_block = bytes_per_block
        self._lease_s = lease_s
        self._clock = clock
        self._faults = faults
        self._leases: Leases[HandOffKey] = Leases(lease_s, clock)
        self._tombstones = Tombstones(clock)
        self._unmatched = Unmatched(peers, self._tombstones, self._match, self._refuse, clock)
        self._queue = FairQueue(clock)
        self._filler = BlockFiller(
            reader, self._adopt_if_complete, self._fail, self._free, clock=clock, faults=faults
        )
        self._incoming: dict[HandOffKey, Incoming] = {}
        self._next_retry_s = 0.0

    def __len__(self) -> int:
        """Hand-offs that hold blocks, wait for some, or wait for their gateway's word."""
        return len(self._incoming) + self._unmatched.num_opens

    @property
    def num_remembered(self) -> int:
        """Hand-offs that were announced and not yet opened."""
        return self._unmatched.num_reserves

    def reserve(self, gateway_id: str, message: Reserve) -> None:
        """A gateway announces a hand-off."""
        submit = message.submit
        key = HandOffKey(gateway_id, submit.request_id, submit.attempt)
        if key not in self._incoming:
            self._faults.hit("receiver.reserve")
            self._unmatched.reserve(key, message)

    def received(self, peer: Peer, message: PeerMessage) -> None:
        """A prefill worker says something."""
        match message:
            case Renew(keys):
                self._leases.renew(keys)
            case Open():
                self._on_open(peer, message)
            case ChunkReady():
                if (incoming := self._of(peer, message.key)) is not None:
                    self._on_chunk(incoming, message)
            case Commit():
                if (incoming := self._of(peer, message.key)) is not None:
                    self._on_commit(incoming, message)
            case Abort(key):
                self._on_abort(peer, key)
            case _:
                # AbortAck: the peer holds nothing any more, as was assumed; others are a puller's.
                pass

    def cancel(self, gateway_id: str, request_id: int, choice: int = ALL_CHOICES) -> None:
        """The gateway wants a choice no more, or all of them; unknown ids are ignored."""
        named = [
            incoming
            for incoming in self._incoming.values()
            if (incoming.key.gateway_id, incoming.key.request_id) == (gateway_id, request_id)
        ]
        if choice != ALL_CHOICES:
            for incoming in named:
                incoming.cancelled_choices.append(choice)
            return
        for incoming in named:
            self._end(incoming, "cancelled")
        self._unmatched.end_all("cancelled", gateway_id, request_id)

    def gateway_lost(self, gateway_id: str) -> None:
        """Nobody waits for this gateway's requests any more."""
        for incoming in list(self._incoming.values()):
            if incoming.key.gateway_id == gateway_id:
                self._end(incoming, "the gateway is gone")
        self._unmatched.end_all("the gateway is gone", gateway_id)

    def peer_lost(self, instance_id: str, reason: str) -> None:
        """The link of a prefill worker is closed."""
        for incoming in list(self._incoming.values()):
            if incoming.peer.instance_id == instance_id:
                self._fail(incoming, f"the link to the prefill worker: {reason}")
        self._unmatched.peer_lost(instance_id, f"the link to the prefill worker: {reason}")

    def fence(self, reason: str) -> None:
        """Let go of everything: this process stood still while others went on."""
        for incoming in list(self._incoming.values()):
            self._fail(incoming, reason)
        self._unmatched.fence(reason)

    def pump(self) -> None:
        """Sweep leases and deadlines and serve who waits for room; to be called every pass."""
        self._sweep()
        if len(self._queue) and self._clock() >= self._next_retry_s:
            self._queue.serve(self._try_reserve)
            self._next_retry_s = self._clock() + RESERVE_RETRY_S

    def renewals(self) -> dict[str, tuple[HandOffKey, ...]]:
        """Return what is open by prefill worker."""
        keys: dict[str, list[HandOffKey]] = defaultdict(list)
        for incoming in self._incoming.values():
            if incoming.stage is not Stage.QUARANTINED:
                keys[incoming.peer.instance_id].append(incoming.key)
        return {instance_id: tuple(found) for instance_id, found in keys.items()}

    def _of(self, peer: Peer, key: HandOffKey) -> Incoming | None:
        """Return a hand-off with `peer` that has blocks; answer messages of any other."""
        incoming = self._incoming.get(key)
        if (
            incoming is not None
            and incoming.stage is Stage.RESERVED
            and incoming.peer.instance_id == peer.instance_id
        ):
            self._leases.renew((key,))
            return incoming
        outcome = self._tombstones.outcome(key)
        if outcome == "accepted":
            self._peers.send(peer.instance_id, Done(key))
        else:
            self._peers.send(peer.instance_id, Abort(key, "this hand-off is not open here"))
            if outcome is None and incoming is None:
                self._refuse(key, "the decode worker does not know this hand-off")
        return None

    # Opening

    def _on_open(self, peer: Peer, message: Open) -> None:
        self._faults.hit("receiver.open")
        key = message.key
        if key in self._incoming and self._incoming[key].stage is not Stage.QUARANTINED:
            self._leases.renew((key,))
        else:
            self._unmatched.open(peer, message)

    def _match(self, key: HandOffKey, reserve: Remembered, early: EarlyOpen) -> None:
        incoming = Incoming(key, reserve, early.peer, early.arrival_s)
        self._incoming[key] = incoming
        self._leases.grant(key)
        problem = check_open(early.message, early.peer, reserve)
        if problem is not None:
            self._fail(incoming, problem)
        elif len(self._queue) >= MAX_WAITING:
            self._fail(incoming, "too many hand-offs wait for blocks at the decode worker")
        # Whoever waits already goes first.
        elif len(self._queue) or not self._try_reserve(key):
            self._faults.hit("receiver.waiting")
            self._queue.push(key, reserve.submit.priority)

    def _try_reserve(self, key: HandOffKey) -> bool:
        """Take blocks for a hand-off; False when there is no room for it now."""
        incoming = self._incoming.get(key)
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
        self._grant(incoming, len(reservation.block_ids), reservation.num_cached_blocks)
        incoming.reservation = reservation
        self._faults.hit("receiver.before_ticket")
        ticket = Ticket(key, reservation.num_cached_blocks)
        self._peers.send(incoming.peer.instance_id, ticket)
        cached_tokens = reservation.num_cached_blocks * self._block_size
        self._gateways.send(
            key.gateway_id, Reserved(submit.request_id, submit.attempt, cached_tokens)
        )
        self._faults.hit("receiver.after_ticket")
        return True

    def _grant(self, incoming: Incoming, num_blocks: int, num_cached: int) -> None:
        incoming.stage = Stage.RESERVED
        incoming.granted_s = incoming.complete_s = self._clock()
        incoming.blocks = IncomingBlocks(num_blocks, num_cached)

    # Filling

    def _on_chunk(self, incoming: Incoming, message: ChunkReady) -> None:
        try:
            ids = unpack_ids(message.block_ids)
            generations = unpack_generations(message.generations)
            blocks = [RemoteBlock(*pair) for pair in zip(ids, generations, strict=True)]
            incoming.blocks.announce(message.first_block, blocks)
        except ValueError as error:
            self._fail(incoming, f"the prefill worker announced what cannot be: {error}")
            return
        if not incoming.blocks.has_lost_some:
            incoming.stale_since_s = None
        self._filler.read_more(incoming)

    # Ending

    def _on_commit(self, incoming: Incoming, commit: Commit) -> None:
        if incoming.commit is not None:
            return
        self._faults.hit("receiver.commit")
        assert incoming.reservation is not None
        num_blocks = len(incoming.reservation.block_ids)
        problem = check_commit(commit, incoming.reserve.submit, num_blocks)
        if problem is None and incoming.blocks.is_waiting_for_news:
            problem = "the prefill worker committed blocks that it has not announced"
        if problem is not None:
            self._fail(incoming, problem)
            return
        incoming.commit, incoming.committed_s = commit, self._clock()
        self._adopt_if_complete(incoming)

    def _adopt_if_complete(self, incoming: Incoming) -> None:
        commit, reservation = incoming.commit, incoming.reservation
        if commit is None or reservation is None or not incoming.blocks.complete:
            return
        if commit.block_sums and not sums_agree(
            self._content, commit.block_sums, reservation.block_ids, incoming.blocks.read_indices
        ):
            self._fail(incoming, "a block's content changed on its way")
            return
        self._faults.hit("receiver.before_adopt")
        key = incoming.key
        try:
            output = self._engine.adopt(key, commit.prompt, commit.first)
        except InvalidRequest as error:
            self._fail(incoming, f"the prefill worker's first tokens: {error}")
            return
        times = incoming.times(self._clock(), self._bytes_per_block)
        output.prompts = [
            msgspec.structs.replace(prompt, hand_off=times) for prompt in output.prompts
        ]
        self._accepted(key.gateway_id, output)
        self._faults.hit("receiver.after_accept")
        for choice in incoming.cancelled_choices:
            self._engine.cancel(key.gateway_id, key.request_id, choice)
        self._forget(incoming, "accepted")
        self._peers.send(incoming.peer.instance_id, Done(key))

    def _on_abort(self, peer: Peer, key: HandOffKey) -> None:
        incoming = self._incoming.get(key)
        if incoming is not None and incoming.peer.instance_id == peer.instance_id:
            incoming.acknowledge_abort = True
            self._let_go(incoming)
        elif incoming is None:
            if self._tombstones.outcome(key) is None:
                self._unmatched.forget(key)
                self._tombstones.add(key, "aborted")
            self._peers.send(peer.instance_id, AbortAck(key))

    def _fail(self, incoming: Incoming, reason: str, *, retry: bool = True) -> None:
        """End a hand-off by a fault that was found here."""
        if incoming.stage is not Stage.QUARANTINED:
            self._end(incoming, reason)
            self._refuse(incoming.key, reason, retry=retry)

    def _refuse(self, key: HandOffKey, reason: str, *, retry: bool = True) -> None:
        self._tombstones.add(key, "aborted")
        failure = HandOffFailed(key.request_id, key.attempt, reason, retry)
        self._gateways.send(key.gateway_id, failure)

    def _end(self, incoming: Incoming, reason: str) -> None:
        if incoming.stage is not Stage.QUARANTINED:
            self._peers.send(incoming.peer.instance_id, Abort(incoming.key, reason))
            self._let_go(incoming)

    def _let_go(self, incoming: Incoming) -> None:
        self._tombstones.add(incoming.key, "aborted")
        self._leases.release(incoming.key)
        self._queue.remove(incoming.key)
        if incoming.stage is Stage.RESERVED and incoming.num_reads:
            incoming.stage = Stage.QUARANTINED
        elif incoming.stage is not Stage.QUARANTINED:
            self._free(incoming)

    def _free(self, incoming: Incoming) -> None:
        self._engine.release_reservation(incoming.key)
        self._forget(incoming, "aborted")
        if incoming.acknowledge_abort:
            self._peers.send(incoming.peer.instance_id, AbortAck(incoming.key))

    def _forget(self, incoming: Incoming, outcome: Outcome) -> None:
        self._tombstones.add(incoming.key, outcome)
        self._leases.release(incoming.key)
        self._incoming.pop(incoming.key, None)

    def _sweep(self) -> None:
        for key in self._leases.ended():
            incoming = self._incoming.get(key)
            self._leases.release(key)
            if incoming is not None:
                silence = "it said nothing for the length of a lease"
                self._fail(incoming, f"the prefill worker: {silence}")
                self._peers.drop(incoming.peer.instance_id, silence)
        self._unmatched.sweep()
        now_s = self._clock()
        for incoming in list(self._incoming.values()):
            deadline_s, stale_s = incoming.reserve.deadline_s, incoming.stale_since_s
            if deadline_s is not None and deadline_s <= now_s:
                self._fail(incoming, "the request's time is over", retry=False)
            elif stale_s is not None and stale_s + self._lease_s <= now_s:
                self._fail(incoming, "the prefill worker lost blocks and did not compute them anew")
