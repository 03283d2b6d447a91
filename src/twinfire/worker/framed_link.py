"""One connection of a worker: a proof of the cluster's secret, then messages in frames.

What cannot be from a healthy peer (a wrong proof, a frame too long, garbage) closes this connection
and does nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Generic, Protocol, TypeVar, cast

from twinfire.protocol.framing import FrameDecoder, FrameError
from twinfire.protocol.link_auth import AuthError, LinkHandshake
from twinfire.worker.frame_writer import FrameWriter

MAX_UNREAD_BYTES = 32 * 1024 * 1024
"""What may wait for one peer before it is dropped."""
HANDSHAKE_LIMIT_S = 5.0
UNACKNOWLEDGED_LIMIT_MS = 10_000
"""After so long without an answer of the other host's TCP a link counts as closed."""

log = logging.getLogger(__name__)

M = TypeVar("M")
M_contra = TypeVar("M_contra", contravariant=True)


class LinkHandler(Protocol[M_contra]):
    """What happens on a link, told on its loop. A FrameError raised in `received` closes it."""

    def opened(self) -> None:
        """The other end has proved itself; frames may be written."""
        ...

    def received(self, message: M_contra) -> None:
        """A message has come."""
        ...

    def closed(self, reason: str) -> None:
        """The link is gone, or never came to be; called once."""
        ...


class FramedLink(asyncio.Protocol, Generic[M]):
    """A connection. `attach` a handler before it is made; without `handshake` it opens at once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        decoder: FrameDecoder[M],
        handshake: LinkHandshake | None = None,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        self._loop = loop
        self._decoder = decoder
        self._handshake = handshake
        self._max_unread_bytes = max_unread_bytes
        self._handler: LinkHandler[M] | None = None
        self._transport: asyncio.Transport | None = None
        self._writer: FrameWriter | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reason = ""

    def attach(self, handler: LinkHandler[M]) -> None:
        """Say who is to be told."""
        self._handler = handler

    @property
    def unread_bytes(self) -> int:
        """Bytes written that the other end has not taken."""
        return self._writer.unread_bytes if self._writer else 0

    def write(self, frame: bytes) -> None:
        """Send a frame, from any thread; who leaves too much unread is dropped."""
        if self._writer is not None:
            self._writer.write(frame)

    def close(self, reason: str = "closed here") -> None:
        """Close after what is buffered has been written."""
        self._reason = reason
        if self._writer is not None:
            self._writer.close()

    def abort(self, reason: str) -> None:
        """Close at once."""
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with the proof."""
        # A loop's transports need not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._writer = FrameWriter(self._transport, self._loop, self._max_unread_bytes)
        _notice_lost_hosts(self._transport)
        if self._handshake is None:
            self._opened()
            return
        self._writer.write(self._handshake.start())
        self._timer = self._loop.call_later(
            HANDSHAKE_LIMIT_S, self.abort, "the other end did not prove itself in time"
        )

    def data_received(self, data: bytes) -> None:
        """Decode and hand over."""
        try:
            if self._handshake is not None:
                data = self._prove(data)
            if data and self._handshake is None:
                for message in self._decoder.feed(data):
                    assert self._handler is not None
                    self._handler.received(message)
        except (FrameError, AuthError) as error:
            log.warning("closing a link: %s", error)
            self.close(str(error))

    def resume_writing(self) -> None:
        """All that was buffered is written."""
        if self._writer is not None:
            self._writer.flushed()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the handler."""
        if self._timer is not None:
            self._timer.cancel()
        if self._writer is not None:
            self._writer.closed()
        if self._handler is not None:
            self._handler.closed(self._reason or self._reason_of_peer(exc))

    def _reason_of_peer(self, exc: Exception | None) -> str:
        if exc is None and self._handshake is not None:
            return str(self._handshake.closed())
        return (str(exc) if exc else "") or "the other end closed the link"

    def _prove(self, data: bytes) -> bytes:
        """Go on with the proof and return what came behind it."""
        assert self._handshake is not None
        step = self._handshake.feed(data)
        if step.to_send:
            self.write(step.to_send)
        if step.done:
            self._handshake = None
            if self._timer is not None:
                self._timer.cancel()
            self._opened()
        return step.rest

    def _opened(self) -> None:
        if self._handler is not None:
            self._handler.opened()


def _notice_lost_hosts(transport: asyncio.Transport) -> None:
    connection = transport.get_extra_info("socket")
    if connection.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_LIMIT_MS)
