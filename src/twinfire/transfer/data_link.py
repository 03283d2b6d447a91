"""A link between two connectors: who is at the other end, and that both keep blocks alike.

Both ends prove the cluster's secret, over TLS where there are certificates, then say which life of
which worker they are. A reader also says whom it means: whoever else listens at that address by now
is no peer of its.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from twinfire.cache.kv_group import KvLayout
from twinfire.protocol.addresses import Address, TcpAddress
from twinfire.protocol.link_auth import HANDSHAKE_BYTES, LinkHandshake
from twinfire.protocol.tls import client_context, server_context
from twinfire.protocol.worker_config import TlsFiles
from twinfire.transfer.data_stream import DataStream, StreamEnded
from twinfire.transfer.data_wire import receive_message, send_message
from twinfire.transfer.waker import Waker

DATA_VERSION = 2
"""Raised whenever anything that connectors say to each other changes shape."""
INTRODUCTION_TIMEOUT_S = 10.0
"""How long the beginning of a link may take in all."""
MAX_HELLO_BYTES = 256 * 1024


class LinkRefused(Exception):
    """The other end is not the peer that was meant, or cannot exchange blocks with this one."""


@dataclass(frozen=True, slots=True)
class LinkSecurity:
    """What a link must prove, and how it is encrypted."""

    secret: bytes | None
    client_tls: ssl.SSLContext | None
    server_tls: ssl.SSLContext | None

    @classmethod
    def of(cls, secret: bytes | None, tls: TlsFiles | None) -> LinkSecurity:
        """Read the certificates; InvalidRequest names a file that is no good."""
        if tls is None:
            return cls(secret, None, None)
        return cls(secret, client_context(tls), server_context(tls))


class LinkHello(msgspec.Struct, frozen=True, array_like=True):
    """The first message of each side."""

    version: int
    carrier: str
    """How blocks travel: both ends must do it in the same way."""
    instance_id: str
    """Of the sender."""
    meant_id: str
    """Whom the sender wants to talk to; empty in an answer."""
    kv_layout: str
    """Of the target's groups."""
    data: bytes = b""
    """What the carrier tells its other end."""
    draft: str = ""
    """The sender's draft groups, which travel where the other end has the same ones."""


_HELLO_DECODER = msgspec.msgpack.Decoder(LinkHello)


def layout_text(layout: KvLayout) -> str:
    """Return what must be equal for blocks to mean the same on both ends."""
    groups = ",".join(group.text for group in layout.groups)
    return f"{groups};{layout.block_size}"


def open_link(
    address: Address, security: LinkSecurity, hello: LinkHello, waker: Waker, timeout_s: float
) -> tuple[DataStream, LinkHello]:
    """Connect to the peer that `hello` means; StreamEnded, AuthError or LinkRefused otherwise."""
    stream = DataStream(_connect(address, timeout_s), waker, timeout_s)
    try:
        stream.limit_time(INTRODUCTION_TIMEOUT_S)
        if security.client_tls is not None and isinstance(address, TcpAddress):
            stream.start_tls(security.client_tls, server_side=False)
        _prove(stream, LinkHandshake(security.secret, initiator=True))
        send_message(stream, hello)
        answer = receive_message(stream, _HELLO_DECODER, MAX_HELLO_BYTES)
        if answer.instance_id != hello.meant_id:
            raise LinkRefused(f"{address} is another worker now than the one that was meant")
        _check_alike(hello, answer)
        stream.limit_time(None)
    except BaseException:
        stream.close()
        raise
    return stream, answer


def accept_link(
    stream: DataStream, security: LinkSecurity, answer: Callable[[], LinkHello], *, tls: bool
) -> LinkHello:
    """Receive a reader and return its hello; refuse one as `open_link` does.

    Does not close the stream. `answer` is called once the reader has proved that it belongs to the
    cluster.
    """
    stream.limit_time(INTRODUCTION_TIMEOUT_S)
    if tls and security.server_tls is not None:
        stream.start_tls(security.server_tls, server_side=True)
    _prove(stream, LinkHandshake(security.secret, initiator=False))
    reader = receive_message(stream, _HELLO_DECODER, MAX_HELLO_BYTES)
    hello = answer()
    # Answered first, so that the reader can say itself what is wrong.
    send_message(stream, hello)
    if reader.meant_id != hello.instance_id:
        raise LinkRefused("the reader means another worker")
    _check_alike(hello, reader)
    stream.limit_time(None)
    return reader


def _connect(address: Address, timeout_s: float) -> socket.socket:
    try:
        if isinstance(address, TcpAddress):
            connected = socket.create_connection((address.host, address.port), timeout_s)
            tune_tcp(connected)
            return connected
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(timeout_s)
            connected.connect(address.path)
        except OSError:
            connected.close()
            raise
        return connected
    except OSError as error:
        raise StreamEnded(f"cannot connect: {error.strerror or error}") from None


def tune_tcp(connected: socket.socket) -> None:
    """Send at once, and notice a host that is gone although nothing is being sent."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        with contextlib.suppress(AttributeError, OSError):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _prove(stream: DataStream, handshake: LinkHandshake) -> None:
    stream.send(handshake.start())
    while True:
        received = stream.receive_some(HANDSHAKE_BYTES)
        if not received:
            raise handshake.closed()
        step = handshake.feed(received)
        stream.send(step.to_send)
        if step.done:
            stream.unread(step.rest)
            return


def _check_alike(ours: LinkHello, theirs: LinkHello) -> None:
    for what, our, their in (
        ("versions", str(ours.version), str(theirs.version)),
        ("connectors", ours.carrier, theirs.carrier),
        ("blocks", ours.kv_layout, theirs.kv_layout),
    ):
        if our != their:
            raise LinkRefused(f"the ends have different {what}: {our} here, {their} there")
