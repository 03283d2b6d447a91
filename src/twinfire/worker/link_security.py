"""What a worker's links are protected by, and how connections are made with it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from twinfire.protocol.addresses import Address, TcpAddress, UnixAddress
from twinfire.protocol.link_auth import LinkHandshake
from twinfire.protocol.secret import check_exposed, load_secret
from twinfire.protocol.tls import client_context, server_context
from twinfire.protocol.unix_sockets import listen_unix
from twinfire.protocol.worker_config import TlsFiles, WorkerConfig

CONNECT_LIMIT_S = 3.0

ProtocolFactory = Callable[[], asyncio.BaseProtocol]


@dataclass(frozen=True, slots=True)
class LinkSecurity:
    """The secret and, over TCP, the certificates."""

    secret: bytes | None = None
    tls: TlsFiles | None = None

    def handshake(self, *, initiator: bool) -> LinkHandshake:
        """Return this end's part of the proof for one link."""
        return LinkHandshake(self.secret, initiator=initiator)

    async def connect(self, address: Address, factory: ProtocolFactory) -> None:
        """Connect; OSError or TimeoutError when that fails.

        InvalidRequest when others could listen to an unprotected link.
        """
        check_exposed(address, self.secret, self.tls)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_LIMIT_S):
            if isinstance(address, UnixAddress):
                await loop.create_unix_connection(factory, address.path)
            else:
                context = client_context(self.tls) if self.tls else None
                await loop.create_connection(factory, address.host, address.port, ssl=context)

    def bind(self, address: Address) -> BoundSocket:
        """Take an address, where callers wait until it is served; OSError when it cannot be had.

        A socket file that a process left behind is replaced. InvalidRequest as for `connect`.
        """
        check_exposed(address, self.secret, self.tls)
        if isinstance(address, UnixAddress):
            return BoundSocket(listen_unix(address.path), address, None)
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.create_server((address.host, address.port), family=family)
        actual = TcpAddress(address.host, listener.getsockname()[1])
        return BoundSocket(listener, actual, server_context(self.tls) if self.tls else None)


@dataclass(frozen=True, slots=True)
class BoundSocket:
    """An address that is taken."""

    listener: socket.socket
    address: Address
    """With the port that the system chose."""
    context: ssl.SSLContext | None

    async def serve(self, factory: ProtocolFactory) -> None:
        """Accept connections, until the running loop ends."""
        loop = asyncio.get_running_loop()
        if isinstance(self.address, UnixAddress):
            await loop.create_unix_server(factory, sock=self.listener)
        else:
            await loop.create_server(factory, sock=self.listener, ssl=self.context)


def link_security(config: WorkerConfig) -> LinkSecurity:
    """Return what the configuration asks for; InvalidRequest names a file that is no good."""
    secret = load_secret(config.secret_file) if config.secret_file else None
    return LinkSecurity(secret, config.tls)
