"""Stands between a reader and a peer, and lets only so many bytes of the peer's through."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from twinfire.protocol.addresses import TcpAddress, parse_address
from twinfire.protocol.messages import Peer

End = Literal["cut", "stall"]


class CuttingProxy:
    """`limit` bytes of each connection pass from the peer to the reader; then it is cut or stalls.

    A limit of None lets everything pass; it may be changed while connections are open.
    """

    def __init__(self, peer: Peer, limit: int | None, end: End) -> None:
        target = parse_address(peer.data)
        assert isinstance(target, TcpAddress)
        self._target = (target.host, target.port)
        self.limit = limit
        self.end = end
        self.num_links = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.peer = Peer(peer.instance_id, peer.control, f"tcp:127.0.0.1:{port}")
        self._sockets: list[socket.socket] = []
        self._start(self._accept)

    def cut(self) -> None:
        """Close every connection."""
        for connected in self._sockets:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _start(self, target: object, *args: object) -> None:
        threading.Thread(target=target, args=args, daemon=True).start()  # type: ignore[arg-type]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                reader, _ = self._listener.accept()
                peer = socket.create_connection(self._target)
                self._sockets += [reader, peer]
                self.num_links += 1
                self._start(self._forward, reader, peer, False)
                self._start(self._forward, peer, reader, True)

    def _forward(self, source: socket.socket, target: socket.socket, limited: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if limited and self.limit is not None:
                    data = data[: max(0, self.limit - passed)]
                target.sendall(data)
                passed += len(data)
                if limited and self.limit is not None and passed >= self.limit:
                    if self.end == "stall":
                        return
                    break
        for connected in (source, target):
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)


@contextmanager
def cutting_proxy(peer: Peer, limit: int | None = None, end: End = "cut") -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(peer, limit, end)
    try:
        yield proxy
    finally:
        proxy.close()
