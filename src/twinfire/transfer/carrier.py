"""How the content of blocks gets from one end of a link to the other.

Links, requests, order, timeouts and the checking of generations are the same for every connector
(`block_reader`, `block_server`); a carrier is what differs. It fills memory of its own on the
reading end, never KV memory.
"""

from __future__ import annotations

from typing import Protocol

from twinfire.transfer.connector import KvContent
from twinfire.transfer.data_stream import DataStream


class CarrierFailed(Exception):
    """Content could not be brought over; the link is of no use any more."""


class ContentReceiver(Protocol):
    """The reading end of one link."""

    @property
    def hello_data(self) -> bytes:
        """What the other end must know."""
        ...

    def receive(self, stream: DataStream, request_id: int, slot: int, num_bytes: int) -> memoryview:
        """Return the content that a reply announced, valid until `slot` is used again.

        Raises CarrierFailed, or StreamEnded.
        """
        ...

    def close(self, stream: DataStream | None) -> None:
        """Let go of the memory, and close the stream when nothing can be written to it any more.

        `stream` is None where there never was a link.
        """
        ...


class ContentSender(Protocol):
    """The serving end of one link."""

    def send(self, stream: DataStream, request_id: int, slot: int, content: KvContent) -> None:
        """Reply with content. Raises CarrierFailed, or StreamEnded."""
        ...

    def close(self) -> None:
        """Return when nothing of the reader's memory is being written any more."""
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

    def new_sender(self, hello_data: bytes) -> ContentSender:
        """Return the serving end for a reader; CarrierFailed when its hello makes no sense."""
        ...

    def close(self) -> None:
        """End what the carrier runs; every receiver and sender is closed."""
        ...
