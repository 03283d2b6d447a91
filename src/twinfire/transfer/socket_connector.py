"""The connector that needs nothing but sockets: blocks travel over the link itself.

Works between any two systems, on one host over a Unix socket and across hosts over TCP.
"""

from __future__ import annotations

from twinfire.cache.kv_group import KvLayout
from twinfire.protocol.addresses import Address
from twinfire.protocol.worker_config import TlsFiles
from twinfire.transfer.connector import Connector, KvMemory
from twinfire.transfer.data_stream import DataStream
from twinfire.transfer.data_wire import CONTENT, send_reply, slot_bytes
from twinfire.transfer.link_connector import READ_TIMEOUT_S, LinkConnector


class SocketReceiver:
    """Receives into one buffer, as blocks are unpacked before the next ones are taken in."""

    needs_confirmation = False

    def __init__(self, max_bytes: int) -> None:
        self._buffer = memoryview(bytearray(max_bytes))

    def open(self, offer_data: bytes) -> None:
        """Nothing needs to be known."""

    def receive(self, stream: DataStream, slot: int, num_bytes: int) -> memoryview:
        """Return the content that follows the reply."""
        content = self._buffer[:num_bytes]
        stream.receive_into(content)
        return content

    def close(self) -> None:
        """Nothing is written but by `receive`."""


class SocketSender:
    """Sends blocks behind the reply, from one buffer, as they are gone when it is used again."""

    offer_data = b""

    def __init__(self) -> None:
        self._buffer = memoryview(b"")

    def place(self, slot: int, num_bytes: int) -> memoryview:
        """Return where to pack."""
        if num_bytes > len(self._buffer):
            self._buffer = memoryview(bytearray(num_bytes))
        return self._buffer[:num_bytes]

    def send(self, stream: DataStream, request_id: int, slot: int, num_bytes: int) -> None:
        """Reply with what has been packed."""
        send_reply(stream, request_id, CONTENT, num_bytes)
        stream.send(self._buffer[:num_bytes])

    def confirmed(self, slot: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""


class SocketCarrier:
    """Makes both ends; implements `Carrier`."""

    name = "socket"

    def __init__(self, layout: KvLayout) -> None:
        self._max_bytes = slot_bytes(layout)

    def new_receiver(self) -> SocketReceiver:
        """Return the reading end of a link."""
        return SocketReceiver(self._max_bytes)

    def new_sender(self) -> SocketSender:
        """Return the serving end of a link."""
        return SocketSender()

    def close(self) -> None:
        """Nothing runs."""


def socket_connector(
    memory: KvMemory,
    *,
    instance_id: str,
    listen: Address,
    secret: bytes | None,
    tls: TlsFiles | None,
    timeout_s: float = READ_TIMEOUT_S,
) -> Connector:
    """Return a connector of sockets; raises as `LinkConnector` does."""
    return LinkConnector(
        memory,
        SocketCarrier(memory.kv_layout),
        instance_id=instance_id,
        listen=listen,
        secret=secret,
        tls=tls,
        timeout_s=timeout_s,
    )
