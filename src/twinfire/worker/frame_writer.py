"""Frames to one connection, written by whichever thread has them.

A step's tokens leave the engine's thread by one system call, without the link thread waking up for
them. What the socket does not take at once goes through the event loop, and so does all that
follows until that is written, which keeps the order. Never blocks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading

log = logging.getLogger(__name__)


class FrameWriter:
    """One connection's outgoing side. `write` may be called anywhere, the rest on the loop."""

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, max_unread_bytes: int
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._max_unread_bytes = max_unread_bytes
        # A descriptor of its own: the loop may close the transport's while another thread writes.
        descriptor = os.dup(transport.get_extra_info("socket").fileno())
        self._socket: socket.socket | None = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()
        """Held by whoever writes to the socket or changes what decides where frames go."""
        self._num_queued = 0
        """Frames that the loop has yet to be given."""
        self._encrypts = transport.get_extra_info("ssl_object") is not None
        """Only the transport can; it has to be given everything."""
        self._through_loop = self._encrypts
        transport.set_write_buffer_limits(high=0)

    @property
    def unread_bytes(self) -> int:
        """Bytes that the peer has not taken."""
        return self._transport.get_write_buffer_size()

    def write(self, frame: bytes) -> None:
        """Send or queue a frame; nothing happens once the connection is closed."""
        with self._lock:
            if self._socket is None:
                return
            if not self._through_loop:
                num_sent = _send_now(self._socket, frame)
                if num_sent == len(frame):
                    return
                frame = frame[num_sent:]
                self._through_loop = True
            self._num_queued += 1
            self._loop.call_soon_threadsafe(self._write_on_loop, frame)

    def flushed(self) -> None:
        """The transport has written all it had."""
        with self._lock:
            self._through_loop = self._encrypts or self._num_queued > 0

    def close(self) -> None:
        """Close the connection after what is queued and buffered has been written."""
        if self._num_queued:
            self._loop.call_soon(self._transport.close)
        else:
            self._transport.close()

    def closed(self) -> None:
        """The connection is gone."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def _write_on_loop(self, frame: bytes) -> None:
        with self._lock:
            self._num_queued -= 1
        if self._transport.is_closing():
            return
        self._transport.write(frame)
        if self.unread_bytes > self._max_unread_bytes:
            log.warning("dropping a link: the other end does not read")
            self._transport.abort()
        elif not self.unread_bytes:
            self.flushed()


def _send_now(connection: socket.socket, frame: bytes) -> int:
    """Return how much the socket took; all of it when the connection is broken."""
    try:
        return connection.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except BlockingIOError:
        return 0
    except OSError:
        # The loop sees it too and ends the link.
        return len(frame)
