"""The decode side of hand-offs: takes blocks, has them read, checks them, and goes on decoding.

A state machine without sockets or threads. Whichever side ends a hand-off by a fault tells the
gateway and sends `Abort`; the side that receives `Abort` only lets go. Blocks that a read may
still write are never freed before that read has ended.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from twinfire.engine.step_report import GatewayOutput
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import (
    ALL_CHOICES,
    HandOffFailed,
    Peer,
    Reserve,
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
)
from twinfire.protocol.tokens import unpack_generations, unpack_ids
from twinfire.transfer.block_filler import BlockFiller
from twinfire.transfer.block_grants import BlockGrants
from twinfire.transfer.block_sums import sums_agree
from twinfire.transfer.connector import RemoteBlock
from twinfire.transfer.fault_points import FaultPoints
from twinfire.transfer.hand_off_table import SILENCE, HandOffTable
from twinfire.transfer.incoming import Incoming, Stage
from twinfire.transfer.ports import BlockBytes, BlockReader, Gateways, Peers, ReceivingEngine
from twinfire.transfer.reserves import EarlyOpen, Remembered
from twinfire.transfer.tombstones import Outcome, Tombstones
from twinfire.transfer.unmatched import Unmatched
from twinfire.transfer.verify_commit import check_commit, check_open

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
        draft: str,
        lease_s: float,
        clock: Callable[[], float],
        faults: FaultPoints,
    ) -> None:
        self._engine = engine
        self._peers = peers
        self._gateways = gateways
        self._accepted = accepted
        self._content = content
        self._bytes_per_block = bytes_per_block
        self._draft = draft
        self._lease_s = lease_s
        self._clock = clock
        self._faults = faults
        self._incoming: HandOffTable[Incoming] = HandOffTable(lease_s, clock)
        self._tombstones = Tombstones(clock)
        self._unmatched = Unmatched(peers, self._tombstones, self._match, self._refuse, clock)
        self._grants = BlockGrants(
            engine,
            peers,
            gateways,
            self._incoming,
            self._end,
            block_size=block_size,
            clock=clock,
            faults=faults,
        )
        self._filler = BlockFiller(
            reader, self._adopt_if_complete, self._fail, self._free, clock=clock, faults=faults
        )

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
                self._incoming.renew(keys)
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
        named = self._incoming.of_request(gateway_id, request_id)
        if choice != ALL_CHOICES:
            for incoming in named:
                incoming.cancelled_choices.append(choice)
            return
        for incoming in named:
            self._end(incoming, "cancelled")
        self._unmatched.end_all("cancelled", gateway_id, request_id)

    def gateway_lost(self, gateway_id: str) -> None:
        """Nobody waits for this gateway's requests any more."""
        for incoming in self._incoming.of_gateway(gateway_id):
            self._end(incoming, "the gateway is gone")
        self._unmatched.end_all("the gateway is gone", gateway_id)

    def peer_lost(self, instance_id: str, reason: str) -> None:
        """The link of a prefill worker is closed."""
        for incoming in self._incoming.of_peer(instance_id):
            self._fail(incoming, f"the link to the prefill worker: {reason}")
        self._unmatched.peer_lost(instance_id, f"the link to the prefill worker: {reason}")

    def fence(self, reason: str) -> None:
        """Let go of everything: this process stood still while others went on."""
        for incoming in self._incoming:
            self._fail(incoming, reason)
        self._unmatched.fence(reason)

    def pump(self) -> None:
        """Sweep leases and deadlines and serve who waits for room; to be called every pass."""
        self._sweep()
        self._grants.pump()

    def renewals(self) -> dict[str, tuple[HandOffKey, ...]]:
        """Return what is open by prefill worker."""
        return self._incoming.renewals()

    def _of(self, peer: Peer, key: HandOffKey) -> Incoming | None:
        """Return a hand-off with `peer` that has blocks; answer messages of any other."""
        incoming = self._incoming.get(key)
        if (
            incoming is not None
            and incoming.stage is Stage.RESERVED
            and incoming.peer.instance_id == peer.instance_id
        ):
            self._incoming.renew((key,))
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
        known = self._incoming.get(key)
        if known is not None and known.is_open:
            self._incoming.renew((key,))
        else:
            self._unmatched.open(peer, message)

    def _match(self, key: HandOffKey, reserve: Remembered, early: EarlyOpen) -> None:
        incoming = Incoming(key, reserve, early.peer, early.arrival_s)
        self._incoming.add(incoming)
        self._incoming.grant_lease(key)
        problem = check_open(early.message, early.peer, reserve)
        if problem is not None:
            self._fail(incoming, problem)
        elif not self._grants.ask(incoming):
            self._fail(incoming, "too many hand-offs wait for blocks at the decode worker")

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
            has_draft_kv = commit.draft == self._draft
            output = self._engine.adopt(
                key,
                commit.prompt,
                commit.first,
                has_draft_kv=has_draft_kv,
                draft_feature=commit.draft_feature,
            )
        except InvalidRequest as error:
            self._fail(incoming, f"the prefill worker's first tokens: {error}")
            return
        block_bytes = self._bytes_per_block if has_draft_kv else self._content.bytes_per_block
        times = incoming.times(self._clock(), block_bytes)
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
        if incoming.is_open:
            self._end(incoming, reason)
            self._refuse(incoming.key, reason, retry=retry)

    def _refuse(self, key: HandOffKey, reason: str, *, retry: bool = True) -> None:
        self._tombstones.add(key, "aborted")
        failure = HandOffFailed(key.request_id, key.attempt, reason, retry)
        self._gateways.send(key.gateway_id, failure)

    def _end(self, incoming: Incoming, reason: str) -> None:
        if incoming.is_open:
            self._peers.send(incoming.peer.instance_id, Abort(incoming.key, reason))
            self._let_go(incoming)

    def _let_go(self, incoming: Incoming) -> None:
        self._tombstones.add(incoming.key, "aborted")
        self._incoming.end_lease(incoming.key)
        self._grants.forget(incoming.key)
        if incoming.stage is Stage.RESERVED and incoming.num_reads:
            incoming.stage = Stage.QUARANTINED
        elif incoming.is_open:
            self._free(incoming)

    def _free(self, incoming: Incoming) -> None:
        self._engine.release_reservation(incoming.key)
        self._forget(incoming, "aborted")
        if incoming.acknowledge_abort:
            self._peers.send(incoming.peer.instance_id, AbortAck(incoming.key))

    def _forget(self, incoming: Incoming, outcome: Outcome) -> None:
        self._tombstones.add(incoming.key, outcome)
        self._incoming.remove(incoming.key)

    def _sweep(self) -> None:
        for incoming in self._incoming.silent():
            self._fail(incoming, f"the prefill worker: {SILENCE}")
            self._peers.drop(incoming.peer.instance_id, SILENCE)
        self._unmatched.sweep()
        for incoming in self._incoming.overdue():
            self._fail(incoming, "the request's time is over", retry=False)
        limit_s = self._clock() - self._lease_s
        for incoming in self._incoming:
            if incoming.stale_since_s is not None and incoming.stale_since_s <= limit_s:
                self._fail(incoming, "the prefill worker lost blocks and did not compute them anew")
