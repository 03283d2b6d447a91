"""The prefill side of hand-offs: who is opened next, what has been announced, what is still held.

A state machine without sockets or threads. Whichever side ends a hand-off by a fault tells the
gateway and sends `Abort`; the side that receives `Abort` only lets go. So every hand-off is
reported once, whatever is lost, and every message may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable

from twinfire.engine.hand_off import BlocksComputed, HandOffEnded, HandOffEvent, PromptComputed
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import ALL_CHOICES, HandOff, HandOffFailed, Peer, Rejected, Submit
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
from twinfire.protocol.tokens import count_ids, pack_generations, pack_ids
from twinfire.scheduler.prompt_turn import PromptTurn
from twinfire.transfer.block_sums import block_sums
from twinfire.transfer.fault_points import FaultPoints
from twinfire.transfer.hand_off_table import SILENCE, HandOffTable
from twinfire.transfer.outgoing import Outgoing, Stage
from twinfire.transfer.ports import BlockBytes, Gateways, Peers, SendingEngine
from twinfire.transfer.prompt_digest import prompt_digest

MAX_AHEAD = 1
"""Prompts before the next one when its blocks are asked for: enough to keep the engine busy."""
MAX_UNGRANTED = 8
"""Hand-offs that may wait for blocks elsewhere while others are opened past them."""
GRANT_PATIENCE_S = 0.05
"""A hand-off without its ticket for so long does not count as ahead: its decode worker is full."""
STARVED_PATIENCE_S = 1.0
"""An engine that finds no blocks for so long gives a hand-off up."""


class HandOffSender:
    """Hand-offs that this worker computes.

    `admit(gateway_id, submit, turn)` gives a prompt to the engine; when the engine refuses it,
    `refused` is to be called. `num_waiting()` counts what the engine has queued. With `content`
    each block's crc32 is sent along.
    """

    def __init__(
        self,
        engine: SendingEngine,
        peers: Peers,
        gateways: Gateways,
        admit: Callable[[str, Submit, PromptTurn], None],
        num_waiting: Callable[[], int],
        *,
        lease_s: float,
        clock: Callable[[], float],
        faults: FaultPoints,
        draft: str,
        content: BlockBytes | None = None,
    ) -> None:
        """`draft` is that of this worker's fingerprint."""
        self._engine = engine
        self._peers = peers
        self._gateways = gateways
        self._admit = admit
        self._num_waiting = num_waiting
        self._clock = clock
        self._faults = faults
        self._draft = draft
        self._content = content
        self._outgoing: HandOffTable[Outgoing] = HandOffTable(lease_s, clock)
        self._starved_since_s: float | None = None

    def __len__(self) -> int:
        return len(self._outgoing)

    @property
    def num_queued_tokens(self) -> int:
        """Tokens to compute of prompts that the engine does not know of yet."""
        return sum(
            outgoing.num_uncached
            for outgoing in self._outgoing
            if outgoing.stage in (Stage.QUEUED, Stage.OPEN)
        )

    def submit(self, gateway_id: str, submit: Submit, hand_off: HandOff) -> None:
        """Queue a prompt; a repeated one changes nothing."""
        key = HandOffKey(gateway_id, submit.request_id, submit.attempt)
        if key in self._outgoing:
            return
        deadline_s = None if submit.timeout_s is None else self._clock() + submit.timeout_s
        num_uncached = hand_off.num_uncached_tokens
        if num_uncached is None:
            num_uncached = count_ids(submit.prompt)
        num_uncached = max(0, num_uncached)
        turn = self._engine.turn(num_uncached)
        outgoing = Outgoing(key, submit, hand_off.decode, deadline_s, num_uncached, turn)
        self._outgoing.add(outgoing)
        self._faults.hit("sender.queued")

    def received(self, peer: Peer, message: PeerMessage) -> None:
        """A decode worker says something."""
        match message:
            case Renew(keys):
                self._outgoing.renew(keys)
            case Ticket(key):
                self._on_ticket(peer, key)
            case Done(key):
                if (outgoing := self._of(peer, key)) is not None:
                    self._forget(outgoing)
                    self._faults.hit("sender.after_done")
            case Abort(key):
                if (outgoing := self._of(peer, key)) is not None:
                    self._forget(outgoing)
                self._peers.send(peer.instance_id, AbortAck(key))
            case _:
                # AbortAck has nothing left to free here; other messages are a holder's.
                pass

    def engine_event(self, event: HandOffEvent) -> None:
        """The engine got on with a prompt, or ended it."""
        outgoing = self._outgoing.get(event.key)
        if outgoing is None:
            self._engine.release_hold(event.key)
            return
        match event:
            case BlocksComputed():
                self._announce(outgoing, event)
            case PromptComputed():
                self._commit(outgoing, event)
            case HandOffEnded(key, reason, refusal):
                if refusal is not None:
                    self.refused(key.gateway_id, outgoing.submit, refusal)
                else:
                    self._fail(outgoing, reason)

    def refused(self, gateway_id: str, submit: Submit, error: InvalidRequest) -> None:
        """The engine does not take the prompt."""
        outgoing = self._outgoing.get(HandOffKey(gateway_id, submit.request_id, submit.attempt))
        if outgoing is None:
            return
        self._abort(outgoing, error.message)
        self._gateways.send(
            gateway_id,
            Rejected(submit.request_id, error.message, param=error.param, code=error.code),
        )

    def cancel(self, gateway_id: str, request_id: int, choice: int = ALL_CHOICES) -> None:
        """The gateway wants a choice no more, or all of them; unknown ids are ignored."""
        for outgoing in self._outgoing.of_request(gateway_id, request_id):
            if choice == ALL_CHOICES:
                self._abort(outgoing, "cancelled")
            elif outgoing.stage in (Stage.QUEUED, Stage.OPEN):
                outgoing.cancelled_choices.append(choice)
            else:
                self._engine.cancel(gateway_id, request_id, choice)

    def gateway_lost(self, gateway_id: str) -> None:
        """Nobody waits for this gateway's requests any more."""
        for outgoing in self._outgoing.of_gateway(gateway_id):
            self._abort(outgoing, "the gateway is gone")

    def peer_lost(self, instance_id: str, reason: str) -> None:
        """The link to a decode worker is closed, or could not be opened."""
        for outgoing in self._outgoing.of_peer(instance_id):
            if outgoing.is_open:
                self._fail(outgoing, f"the link to the decode worker: {reason}")

    def fence(self, reason: str) -> None:
        """Let go of everything: this process stood still while others went on."""
        for outgoing in self._outgoing:
            self._fail(outgoing, reason)

    def pump(self) -> None:
        """Sweep leases and deadlines and open what is next; to be called every pass."""
        self._sweep()
        while (outgoing := self._next_queued()) is not None and self._may_open(outgoing):
            self._open(outgoing)

    def renewals(self) -> dict[str, tuple[HandOffKey, ...]]:
        """Return what is open by decode worker."""
        return self._outgoing.renewals()

    def _of(self, peer: Peer, key: HandOffKey) -> Outgoing | None:
        """Return the hand-off if it is one with `peer`, and note that it has been heard of."""
        outgoing = self._outgoing.get(key)
        if outgoing is None or outgoing.peer.instance_id != peer.instance_id:
            return None
        self._outgoing.renew((key,))
        return outgoing

    def _sweep(self) -> None:
        # All hand-offs with a peer that says nothing end together, in `peer_lost`.
        for outgoing in self._outgoing.silent():
            self._fail(outgoing, f"the decode worker: {SILENCE}")
            self._peers.drop(outgoing.peer.instance_id, SILENCE)
        for outgoing in self._outgoing.overdue():
            self._fail(outgoing, "the request's time is over", retry=False)
        self._give_way()

    def _give_way(self) -> None:
        """Let one hand-off go where none can be computed, the one that was opened last.

        It holds blocks on its decode worker while it waits for blocks here. Two workers that send
        prompts to each other would else wait for each other until the requests' time is over.
        """
        now_s = self._clock()
        if not self._engine.is_starved:
            self._starved_since_s = None
        elif self._starved_since_s is None:
            self._starved_since_s = now_s
        elif now_s - self._starved_since_s > STARVED_PATIENCE_S:
            self._starved_since_s = now_s
            computing = [one for one in self._outgoing if one.stage is Stage.COMPUTING]
            computing.sort(key=lambda one: one.opened_s)
            if computing:
                self._fail(computing[-1], "the prefill worker finds no blocks for the prompt")

    def _next_queued(self) -> Outgoing | None:
        queued = (one for one in self._outgoing if one.stage is Stage.QUEUED)
        # The first of equals: those of one turn go as they came.
        return min(
            queued, key=lambda one: (one.submit.priority, -one.turn.slowdown()), default=None
        )

    def _may_open(self, next_one: Outgoing) -> bool:
        now_s, num_ahead, num_ungranted = self._clock(), 0, 0
        for outgoing in self._outgoing:
            # Those of later turns are passed, begun or not.
            is_ahead = outgoing.turn.slowdown() >= next_one.turn.slowdown()
            if outgoing.stage is Stage.OPEN:
                num_ungranted += 1
                num_ahead += is_ahead and now_s - outgoing.opened_s < GRANT_PATIENCE_S
            elif outgoing.stage is Stage.COMPUTING:
                num_ahead += is_ahead
        if num_ahead > MAX_AHEAD or num_ungranted >= MAX_UNGRANTED:
            return False
        return self._num_waiting() <= MAX_AHEAD

    def _open(self, outgoing: Outgoing) -> None:
        self._faults.hit("sender.before_open")
        outgoing.stage, outgoing.opened_s = Stage.OPEN, self._clock()
        self._outgoing.grant_lease(outgoing.key)
        self._peers.connect(outgoing.peer)
        self._peers.send(outgoing.peer.instance_id, Open(outgoing.key, outgoing.num_prompt_tokens))
        self._faults.hit("sender.after_open")

    def _on_ticket(self, peer: Peer, key: HandOffKey) -> None:
        outgoing = self._of(peer, key)
        if outgoing is None:
            self._peers.send(peer.instance_id, Abort(key, "this hand-off is over"))
            return
        if outgoing.stage is not Stage.OPEN:
            return
        self._faults.hit("sender.after_ticket")
        outgoing.stage = Stage.COMPUTING
        self._admit(key.gateway_id, outgoing.submit, outgoing.turn)
        for choice in outgoing.cancelled_choices:
            self._engine.cancel(key.gateway_id, key.request_id, choice)

    def _announce(self, outgoing: Outgoing, event: BlocksComputed) -> None:
        self._faults.hit("sender.chunk_ready")
        for offset, block_id in enumerate(event.block_ids):
            outgoing.block_ids[event.first_block + offset] = block_id
        self._peers.send(
            outgoing.peer.instance_id,
            ChunkReady(
                outgoing.key,
                event.first_block,
                pack_ids(event.block_ids),
                pack_generations(event.generations),
            ),
        )

    def _commit(self, outgoing: Outgoing, event: PromptComputed) -> None:
        self._faults.hit("sender.before_commit")
        outgoing.stage = Stage.COMMITTED
        self._peers.send(
            outgoing.peer.instance_id,
            Commit(
                outgoing.key,
                prompt_digest(outgoing.submit),
                event.num_prompt_blocks,
                event.prompt,
                event.first,
                self._block_sums(outgoing, event.num_prompt_blocks),
                self._draft,
                event.draft_feature,
            ),
        )
        self._faults.hit("sender.after_commit")

    def _block_sums(self, outgoing: Outgoing, num_blocks: int) -> bytes:
        if self._content is None:
            return b""
        return block_sums(self._content, [outgoing.block_ids[i] for i in range(num_blocks)])

    def _fail(self, outgoing: Outgoing, reason: str, *, retry: bool = True) -> None:
        """End a hand-off by a fault that was found here."""
        self._abort(outgoing, reason)
        key = outgoing.key
        failure = HandOffFailed(key.request_id, key.attempt, reason, retry)
        self._gateways.send(key.gateway_id, failure)

    def _abort(self, outgoing: Outgoing, reason: str) -> None:
        if outgoing.is_open:
            self._peers.send(outgoing.peer.instance_id, Abort(outgoing.key, reason))
        self._forget(outgoing)

    def _forget(self, outgoing: Outgoing) -> None:
        key = outgoing.key
        if self._outgoing.remove(key) is None:
            return
        if outgoing.stage is Stage.COMPUTING:
            self._engine.cancel(key.gateway_id, key.request_id)
        self._engine.release_hold(key)
