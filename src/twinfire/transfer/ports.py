"""What the state machines of hand-offs and pulls need of the worker around them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from twinfire.cache.kv_group import WireBuffer
from twinfire.engine.hand_off import BlockHold, PrefixImport, Reservation
from twinfire.engine.step_report import GatewayOutput
from twinfire.protocol.messages import (
    ALL_CHOICES,
    ChoiceDelta,
    Peer,
    PromptDone,
    Submit,
    ToGateway,
)
from twinfire.protocol.peer_messages import HandOffKey, PeerMessage
from twinfire.scheduler.prompt_turn import PromptTurn
from twinfire.transfer.connector import ReadFailed, RemoteBlock


class Peers(Protocol):
    """Links of one direction: those that this worker dialled, or those that it accepted."""

    def connect(self, peer: Peer) -> None:
        """Make sure that there is a link; what is sent meanwhile waits for it."""
        ...

    def send(self, instance_id: str, message: PeerMessage) -> None:
        """Send, or drop the message when there is no link. Never blocks."""
        ...

    def drop(self, instance_id: str, reason: str) -> None:
        """Close the link to a peer that has not been heard of for too long."""
        ...


class Gateways(Protocol):
    """Links to gateways."""

    def send(self, gateway_id: str, message: ToGateway) -> None:
        """Send, or drop the message when the gateway is gone. Never blocks."""
        ...


class BlockReader(Protocol):
    """Reads that report back where the state machines run."""

    def start(
        self,
        peer: Peer,
        remote: Sequence[RemoteBlock],
        local_ids: Sequence[int],
        on_end: Callable[[ReadFailed | None], None],
    ) -> None:
        """As `Connector.read`; `on_end` is called once and never from within this call."""
        ...


class SendingEngine(Protocol):
    """The prefill side of an engine."""

    @property
    def is_starved(self) -> bool:
        """Whether the last step computed nothing for want of blocks, though requests wait."""
        ...

    def turn(self, num_uncached: int) -> PromptTurn:
        """Return the turn of a prompt that comes now with so many tokens to compute."""
        ...

    def cancel(self, gateway_id: str, request_id: int, choice: int = ALL_CHOICES) -> None:
        """Stop one choice, or all of them; unknown ids are ignored."""
        ...

    def release_hold(self, key: HandOffKey) -> None:
        """Unpin what was computed for a hand-off; unknown keys are ignored."""
        ...


class ReceivingEngine(Protocol):
    """The decode side of an engine."""

    def reserve(self, gateway_id: str, message: Submit) -> Reservation | None:
        """Take the blocks of a prompt; InvalidRequest when it can never fit.

        None while there is no room: call again with the same message, or `release_reservation`.
        """
        ...

    def adopt(
        self,
        key: HandOffKey,
        prompt: PromptDone,
        first: Sequence[ChoiceDelta],
        *,
        has_draft_kv: bool = True,
        draft_feature: bytes = b"",
    ) -> GatewayOutput:
        """Go on from a prompt whose blocks are filled, a draft head's groups with them or not.

        `draft_feature` is `Commit`'s, of use to the same head alone.
        """
        ...

    def release_reservation(self, key: HandOffKey) -> None:
        """Free reserved blocks, or give up waiting; unknown keys are ignored."""
        ...

    def cancel(self, gateway_id: str, request_id: int, choice: int = ALL_CHOICES) -> None:
        """Stop one choice, or all of them; unknown ids are ignored."""
        ...


class PullingEngine(Protocol):
    """What an engine does for a prefix that another worker holds."""

    def begin_import(
        self, prompt: array[int], cache_salt: str, num_blocks: int
    ) -> PrefixImport | None:
        """Take blocks for what is missing of a prefix; None when nothing is or there is no room."""
        ...

    def import_hashes(self, import_id: int) -> list[bytes]:
        """Return the hashes of the blocks taken."""
        ...

    def finish_import(self, import_id: int, num_good_blocks: int) -> None:
        """Make the first so many findable and free the others."""
        ...


class HoldingEngine(Protocol):
    """What an engine does for a worker that pulls."""

    def hold_blocks(self, hashes: Sequence[bytes]) -> BlockHold:
        """Pin the leading blocks that are cached."""
        ...

    def release_block_hold(self, hold_id: int) -> None:
        """Unpin; unknown ids are ignored."""
        ...


class BlockBytes(Protocol):
    """Where the content of blocks is read for checks: the target's groups, which all workers have.

    What a draft head's groups hold can cost a draft and never a token.
    """

    @property
    def bytes_per_block(self) -> int:
        """Of the target's groups."""
        ...

    def export_blocks(self, block_ids: Sequence[int], into: WireBuffer) -> None:
        """Write blocks in the wire layout to `into`, which they fill."""
        ...
