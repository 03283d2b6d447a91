"""A connected socket whose waits end early: by silence, by a deadline, or by another thread.

One thread owns a stream and all that it does with it blocks; stopping the stream's waker from any
other thread ends whatever it waits for. TLS or not makes no difference to the caller.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from twinfire.transfer.waker import Waker

R = TypeVar("R")
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class StreamEnded(Exception):
    """Nothing more goes over the stream; the message says why."""


class DataStream:
    """`timeout_s` bounds each wait for the other end to do anything at all."""

    def __init__(self, connected: socket.socket, waker: Waker, timeout_s: float) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._waker = waker
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._unread = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(connected, _READ)
        self._selector.register(waker, _READ)
        self._waited_for = _READ

    def limit_time(self, seconds: float | None) -> None:
        """Let everything from now on take so long in all; None lifts the limit."""
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def start_tls(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        """Encrypt from here on; StreamEnded when either end refuses the other."""
        self._selector.unregister(self._socket)
        secured = context.wrap_socket(
            self._socket, server_side=server_side, do_handshake_on_connect=False
        )
        self._socket = secured
        self._selector.register(secured, self._waited_for)
        self._when_ready(secured.do_handshake, _READ)

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it; StreamEnded otherwise."""
        with memoryview(data).cast("B") as view:
            sent = 0
            while sent < len(view):
                sent += self._when_ready(partial(self._socket.send, view[sent:]), _WRITE)

    def receive_into(self, view: memoryview) -> None:
        """Fill all of it; StreamEnded otherwise."""
        filled = min(len(self._unread), len(view))
        view[:filled] = self._unread[:filled]
        self._unread = self._unread[filled:]
        while filled < len(view):
            got = self._when_ready(partial(self._socket.recv_into, view[filled:]), _READ)
            if got == 0:
                raise StreamEnded("the other end closed the link")
            filled += got

    def receive(self, num_bytes: int) -> bytes:
        """Return exactly so many bytes; StreamEnded otherwise."""
        content = bytearray(num_bytes)
        self.receive_into(memoryview(content))
        return bytes(content)

    def receive_some(self, max_bytes: int) -> bytes:
        """Return what is there, waiting for the first byte; empty when the other end closed."""
        return self._when_ready(partial(self._socket.recv, max_bytes), _READ)

    def unread(self, data: bytes) -> None:
        """Give back what was received too much."""
        self._unread = data + self._unread

    def wait_while_idle(self) -> bool:
        """Wait, however long, until the waker is notified; False if the other end closed first.

        StreamEnded when it sent something instead, which nobody asked for.
        """
        while True:
            for key, _ in self._select(_READ, None):
                if key.fileobj is self._waker:
                    self._waker.drain()
                    return True
            try:
                if self._unread or self._socket.recv(1):
                    raise StreamEnded("the other end sent what it was not asked for")
                return False
            except (BlockingIOError, ssl.SSLWantReadError):
                continue
            except OSError:
                return False

    def wait_readable(self) -> None:
        """Wait, however long, until something can be received."""
        pending = self._socket.pending() if isinstance(self._socket, ssl.SSLSocket) else 0
        while not (self._unread or pending):
            for key, _ in self._select(_READ, None):
                if key.fileobj is self._waker:
                    self._check_waker()
                else:
                    return

    def check_wanted(self) -> None:
        """Raise StreamEnded if another thread has stopped the waker."""
        if self._waker.stopped:
            raise StreamEnded("the connector let go of the link")

    def close(self) -> None:
        """Close the socket; the waker stays its owner's."""
        self._selector.close()
        self._socket.close()

    def _when_ready(self, operation: Callable[[], R], event: int) -> R:
        silent_until = time.monotonic() + self._timeout_s
        while True:
            # Before the attempt too, so that a stream that is always ready can be stopped.
            self.check_wanted()
            try:
                return operation()
            except BlockingIOError:
                self._wait(event, silent_until)
            except ssl.SSLWantReadError:
                self._wait(_READ, silent_until)
            except ssl.SSLWantWriteError:
                self._wait(_WRITE, silent_until)
            except ssl.SSLError as error:
                raise StreamEnded(f"TLS failed: {error.reason or error}") from None
            except OSError as error:
                raise StreamEnded(f"the link broke: {error.strerror or error}") from None

    def _wait(self, event: int, silent_until: float) -> None:
        while True:
            until = silent_until if self._deadline is None else min(silent_until, self._deadline)
            left_s = until - time.monotonic()
            if left_s <= 0:
                if until == silent_until:
                    raise StreamEnded(f"the other end said nothing for {self._timeout_s:g} s")
                raise StreamEnded("the other end took too long to introduce itself")
            for key, _ in self._select(event, left_s):
                if key.fileobj is self._waker:
                    self._check_waker()
                else:
                    return

    def _check_waker(self) -> None:
        self._waker.drain()
        self.check_wanted()

    def _select(
        self, event: int, timeout_s: float | None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        if event != self._waited_for:
            self._selector.modify(self._socket, event)
            self._waited_for = event
        return self._selector.select(timeout_s)
