"""Stands between workers and a gateway, so that the links between them can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading

from twinfire.protocol.addresses import Address, UnixAddress, parse_address


class LinkRelay:
    """Passes on all bytes of each connection to `listen`, both ways, until it is cut."""

    def __init__(self, listen: str, target: str) -> None:
        self._target = parse_address(target)
        self._listener = _bound(parse_address(listen))
        self._listener.listen()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Close every connection; new ones are taken."""
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End for good."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = _unconnected(self._target)
            try:
                far.connect(_place(self._target))
            except OSError:
                near.close()
                far.close()
                continue
            self._sockets += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=_forward, args=pair, daemon=True).start()


def _forward(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def _unconnected(address: Address) -> socket.socket:
    return socket.socket(
        socket.AF_UNIX if isinstance(address, UnixAddress) else socket.AF_INET, socket.SOCK_STREAM
    )


def _bound(address: Address) -> socket.socket:
    bound = _unconnected(address)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(_place(address))
    return bound


def _place(address: Address) -> str | tuple[str, int]:
    return address.path if isinstance(address, UnixAddress) else (address.host, address.port)
