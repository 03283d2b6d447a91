"""What a worker's other threads tell the one that runs the engine."""

from __future__ import annotations

import queue
from dataclasses import dataclass

from twinfire.protocol.messages import Peer, WorkerCommand
from twinfire.protocol.peer_messages import PeerMessage
from twinfire.transfer.block_reads import ReadEnded


@dataclass(frozen=True, slots=True)
class GatewayJoined:
    """A gateway can be sent to."""

    gateway_id: str


@dataclass(frozen=True, slots=True)
class FromGateway:
    """A message with the id of its sender."""

    gateway_id: str
    message: WorkerCommand


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """A gateway's link is closed; nobody waits for its requests any more."""

    gateway_id: str


@dataclass(frozen=True, slots=True)
class FromPeer:
    """A message of another worker."""

    peer: Peer
    message: PeerMessage
    dialled: bool
    """Whether it came on a link that this worker opened."""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A link with another worker is closed, or could not be opened."""

    instance_id: str
    reason: str
    dialled: bool


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what runs, take nothing new, end."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End now."""


InboxItem = (
    GatewayJoined | FromGateway | GatewayLost | FromPeer | PeerLost | ReadEnded | Drain | Stop
)
Inbox = queue.SimpleQueue[InboxItem]
