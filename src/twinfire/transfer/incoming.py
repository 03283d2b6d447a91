"""One hand-off on the decode side: what is known of it and how far its blocks are."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from twinfire.engine.hand_off import Reservation
from twinfire.protocol.messages import HandOffTimes, Peer
from twinfire.protocol.peer_messages import Commit, HandOffKey
from twinfire.transfer.incoming_blocks import IncomingBlocks
from twinfire.transfer.reserves import Remembered


class Stage(Enum):
    """Where an incoming hand-off is."""

    WAITING = auto()
    """For room."""
    RESERVED = auto()
    """It has blocks; they are being filled."""
    QUARANTINED = auto()
    """Over, but reads into its blocks have not ended."""


@dataclass(slots=True)
class Incoming:
    """`blocks` and `reservation` exist from RESERVED on."""

    key: HandOffKey
    reserve: Remembered
    peer: Peer
    opened_s: float
    stage: Stage = Stage.WAITING
    reservation: Reservation | None = None
    blocks: IncomingBlocks = field(default_factory=lambda: IncomingBlocks(0, 0))
    commit: Commit | None = None
    granted_s: float = 0.0
    committed_s: float = 0.0
    complete_s: float = 0.0
    stale_since_s: float | None = None
    """Since when a block is missing that its owner has to announce again."""
    num_reads: int = 0
    """Reads under way."""
    acknowledge_abort: bool = False
    cancelled_choices: list[int] = field(default_factory=list)

    @property
    def deadline_s(self) -> float | None:
        """When the request's time is over."""
        return self.reserve.deadline_s

    @property
    def is_open(self) -> bool:
        """Whether the prefill worker goes on with it."""
        return self.stage is not Stage.QUARANTINED

    def grant(self, reservation: Reservation, now_s: float) -> None:
        """It has blocks, to be filled from now on."""
        self.stage = Stage.RESERVED
        self.reservation = reservation
        self.granted_s = self.complete_s = now_s
        self.blocks = IncomingBlocks(len(reservation.block_ids), reservation.num_cached_blocks)

    def times(self, now_s: float, bytes_per_block: int) -> HandOffTimes:
        """Return what the hand-off took, its first tokens being sent now."""
        return HandOffTimes(
            prefill_instance=self.peer.instance_id,
            reserve_wait_s=self.granted_s - self.opened_s,
            transfer_s=max(0.0, self.complete_s - self.committed_s),
            accept_s=now_s - max(self.complete_s, self.committed_s),
            num_blocks=self.blocks.num_read,
            num_bytes=self.blocks.num_read * bytes_per_block,
        )
