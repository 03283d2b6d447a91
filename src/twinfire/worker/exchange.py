"""What a worker does with other workers: hand-offs both ways, pulls both ways, and their leases.

Routes messages to the state machines by the direction of the link they came on: on a link that this
worker dialled it computes or pulls, on one that it accepted it decodes or holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from twinfire.engine.hand_off import HandOffEvent
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.messages import (
    ALL_CHOICES,
    Rejected,
    Reserve,
    Submit,
)
from twinfire.protocol.peer_messages import HandOffKey, Renew
from twinfire.transfer.block_reads import BlockReads, ReadEnded
from twinfire.transfer.connector import Connector
from twinfire.transfer.fault_points import FaultPoints
from twinfire.transfer.hand_off_receiver import Accepted, HandOffReceiver
from twinfire.transfer.hand_off_sender import HandOffSender
from twinfire.transfer.ports import (
    BlockBytes,
    Gateways,
    HoldingEngine,
    Peers,
    PullingEngine,
    ReceivingEngine,
    SendingEngine,
)
from twinfire.transfer.prefix_holder import PrefixHolder
from twinfire.transfer.prefix_pull import PrefixPuller
from twinfire.worker.admission import Admission, SubmitEngine
from twinfire.worker.heartbeat import Heartbeat
from twinfire.worker.inbox import FromPeer, PeerLost


class Prefixes(PullingEngine, HoldingEngine, Protocol):
    """Both sides of pulls."""


class ExchangeEngine(SubmitEngine, SendingEngine, ReceivingEngine, Protocol):
    """All that an exchange asks of an engine."""

    @property
    def prefixes(self) -> Prefixes:
        """Cached blocks that are exchanged."""
        ...

    def take_hand_off_events(self) -> list[HandOffEvent]:
        """Return what happened to hand-offs since the last call."""
        ...


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """Sizes and times."""

    block_size: int
    bytes_per_block: int
    draft: str
    """Of this worker's fingerprint."""
    lease_s: float
    checksums: bool


class Exchange:
    """The state machines of one worker; everything but `post` runs on the engine's thread."""

    def __init__(
        self,
        engine: ExchangeEngine,
        connector: Connector,
        content: BlockBytes,
        dialled: Peers,
        accepted: Peers,
        gateways: Gateways,
        post: Callable[[ReadEnded], None],
        on_accepted: Accepted,
        num_waiting: Callable[[], int],
        heartbeat: Heartbeat,
        settings: ExchangeSettings,
        *,
        clock: Callable[[], float],
        faults: FaultPoints,
    ) -> None:
        self._engine = engine
        self._connector = connector
        self._gateways = gateways
        self._heartbeat = heartbeat
        self._reads = BlockReads(connector, post)
        self._puller = PrefixPuller(
            engine.prefixes, dialled, self._reads, clock=clock, faults=faults
        )
        self._holder = PrefixHolder(
            engine.prefixes, accepted, lease_s=settings.lease_s, clock=clock, faults=faults
        )
        self._admission = Admission(engine, self._puller, self._refused)
        self._sender = HandOffSender(
            self._admission,
            dialled,
            gateways,
            self._admission.submit,
            num_waiting,
            draft=settings.draft,
            lease_s=settings.lease_s,
            clock=clock,
            faults=faults,
            content=content if settings.checksums else None,
        )
        self._receiver = HandOffReceiver(
            engine,
            accepted,
            gateways,
            self._reads,
            on_accepted,
            content=content,
            block_size=settings.block_size,
            bytes_per_block=settings.bytes_per_block,
            draft=settings.draft,
            lease_s=settings.lease_s,
            clock=clock,
            faults=faults,
        )

    @property
    def is_active(self) -> bool:
        """Whether anything is under way with another worker, or may end by its lease."""
        return bool(
            len(self._sender)
            or len(self._receiver)
            or self._receiver.num_remembered
            or len(self._puller)
            or len(self._holder)
        )

    @property
    def num_open(self) -> int:
        """Hand-offs on both sides."""
        return len(self._sender) + len(self._receiver)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait here and not in the engine."""
        return self._sender.num_queued_tokens

    def submit(self, gateway_id: str, submit: Submit) -> None:
        """Compute a request here, or its prompt for another worker."""
        if submit.hand_off is not None:
            self._sender.submit(gateway_id, submit, submit.hand_off)
        else:
            self._admission.submit(gateway_id, submit)

    def reserve(self, gateway_id: str, message: Reserve) -> None:
        """Expect a hand-off."""
        self._receiver.reserve(gateway_id, message)

    def cancel(self, gateway_id: str, request_id: int, choice: int = ALL_CHOICES) -> None:
        """Stop one choice or all of a request, wherever it is."""
        self._sender.cancel(gateway_id, request_id, choice)
        self._receiver.cancel(gateway_id, request_id, choice)
        self._admission.cancel(gateway_id, request_id, choice)

    def gateway_lost(self, gateway_id: str) -> None:
        """Drop what was a gateway's."""
        self._sender.gateway_lost(gateway_id)
        self._receiver.gateway_lost(gateway_id)
        self._admission.gateway_lost(gateway_id)

    def received(self, item: FromPeer) -> None:
        """Another worker says something."""
        peer, message = item.peer, item.message
        if item.dialled:
            self._puller.received(peer, message)
            self._sender.received(peer, message)
        else:
            self._receiver.received(peer, message)
            self._holder.received(peer, message)

    def peer_lost(self, item: PeerLost) -> None:
        """A link with another worker is closed: what went over it has failed."""
        if item.dialled:
            self._sender.peer_lost(item.instance_id, item.reason)
            self._puller.peer_lost(item.instance_id)
        else:
            self._receiver.peer_lost(item.instance_id, item.reason)
            self._holder.peer_lost(item.instance_id)
        self._connector.forget(item.instance_id)

    def read_ended(self, item: ReadEnded) -> None:
        """The connector is done with a read."""
        self._reads.ended(item)

    def after_step(self) -> None:
        """Pass on what the engine did for hand-offs."""
        for event in self._engine.take_hand_off_events():
            self._sender.engine_event(event)

    def pump(self) -> None:
        """Sweep and go on; to be called every pass."""
        self._sender.pump()
        self._receiver.pump()
        self._puller.pump()
        self._holder.pump()
        self._heartbeat.renewals = (
            _renewals(self._sender.renewals(), self._puller.renewals()),
            _renewals(self._receiver.renewals(), {}),
        )

    def fence(self, reason: str) -> None:
        """Let go of everything held for others: they have given up on this worker."""
        self._sender.fence(reason)
        self._receiver.fence(reason)
        self._puller.fence()
        self._holder.release_all()

    def close(self) -> None:
        """End the connector."""
        self._connector.close()

    def _refused(self, gateway_id: str, submit: Submit, error: InvalidRequest) -> None:
        if submit.hand_off is not None:
            self._sender.refused(gateway_id, submit, error)
        else:
            self._gateways.send(gateway_id, rejection(submit, error))


def rejection(submit: Submit, error: InvalidRequest) -> Rejected:
    """Return what a gateway is told of a request that cannot run."""
    return Rejected(submit.request_id, error.message, param=error.param, code=error.code)


def _renewals(
    keys: dict[str, tuple[HandOffKey, ...]], pull_ids: dict[str, tuple[int, ...]]
) -> dict[str, Renew]:
    return {
        instance_id: Renew(keys.get(instance_id, ()), pull_ids.get(instance_id, ()))
        for instance_id in keys.keys() | pull_ids.keys()
    }
