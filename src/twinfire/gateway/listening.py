"""An address to listen on and a loop to run: all that a server needs before its libraries are in.

Imports none of them, so that a worker can be started first.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Coroutine
from typing import TypeVar

from twinfire.protocol.errors import TwinfireError

T = TypeVar("T")


class AddressUnavailable(TwinfireError):
    """The server cannot listen where it was told to; the message says where and why."""


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket bound to (`host`, `port`), port 0 for any; AddressUnavailable otherwise."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise AddressUnavailable(f"the host '{host}' is not known: {error.strerror}") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            message = f"port {port} on {host} is taken; choose another with --port"
        else:
            message = f"cannot listen on {host}:{port}: {error.strerror}"
        raise AddressUnavailable(message) from None
    return bound


def run_event_loop(main: Coroutine[object, object, T]) -> T:
    """Run `main` on the fastest event loop there is, and return its result."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
