"""Wakes one thread that waits on sockets."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading


class Waker:
    """A descriptor that becomes readable when another thread has something to say.

    One thread waits on it; any thread notifies. A stop cannot be taken back.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._reader, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._closed = False
        self.stopped = False
        """Whether the thread is asked to end."""

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._reader.fileno()

    def notify(self) -> None:
        """Wake the thread."""
        with self._lock:
            if not self._closed:
                # A full buffer means that it has been woken already.
                with contextlib.suppress(BlockingIOError):
                    self._writer.send(b"\0")

    def stop(self) -> None:
        """Ask the thread to end."""
        self.stopped = True
        self.notify()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for a notice, and forget it; only the waiting thread calls this."""
        if self._selector.select(timeout_s):
            self.drain()

    def drain(self) -> None:
        """Forget the notices so far; only the waiting thread calls this."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        """Close the descriptors; later notices go nowhere."""
        with self._lock:
            self._closed = True
            self._selector.close()
            self._reader.close()
            self._writer.close()
