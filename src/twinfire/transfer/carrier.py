"""How the content of blocks gets from one end of a link to the other.

Links, requests, order, timeouts and the checking of generations are the same for every connector
(`block_reader`, `block_server`); a carrier is what differs. It fills memory of its own on the
reading end, never KV memory.
"""

from __future__ import annotations

from typing import Protocol

from twinfire.transfer.data_stream import DataStream


class CarrierFailed(Exception):
    """Content could not be brought over; the link is of no use any more."""


class ContentReceiver(Protocol):
    """The reading end of one link."""

    @property
    def needs_confirmation(self) -> bool:
        """Whether content is good only once the serving end has said that it still held it."""
        ...

    def open(self, offer_data: bytes) -> None:
        """Hear the other end's `offer_data`; CarrierFailed when it makes no sense."""
        ...

    def receive(self, stream: DataStream, slot: int, num_bytes: int) -> memoryview:
        """Return the content that a reply announced, valid until `slot` is used again.

        Raises CarrierFailed, or StreamEnded.
        """
        ...

    def close(self) -> None:
        """Let go of the memory, once nothing is written to it any more."""
        ...


class ContentSender(Protocol):
    """The serving end of one link."""

    @property
    def offer_data(self) -> bytes:
        """What the reading end must know."""
        ...

    def place(self, slot: int, num_bytes: int) -> memoryview:
        """Return where to pack what is to be sent to `slot`; valid until the next call for it."""
        ...

    def send(self, stream: DataStream, request_id: int, slot: int, num_bytes: int) -> None:
        """Reply with what has been packed. Raises CarrierFailed, or StreamEnded."""
        ...

    def confirmed(self, slot: int) -> None:
        """The reader has received what was sent to `slot`."""
        ...

    def close(self) -> None:
        """Let go of the memory; a reader that still takes from it gets no confirmation."""
        ...


class Carrier(Protocol):
    """Makes both ends; safe to call from any thread."""

    @property
    def name(self) -> str:
        """Both ends of a link must have the same."""
        ...

    def new_receiver(self) -> ContentReceiver:
        """Return the reading end of a link to be made; CarrierFailed when there is no room."""
        ...

    def new_sender(self) -> ContentSender:
        """Return the serving end for a reader; CarrierFailed when there is no room."""
        ...

    def close(self) -> None:
        """End what the carrier runs; every receiver and sender is closed."""
        ...
