"""Where workers dial in: each connection proves the cluster's secret and becomes a link.

A connection that sends anything else is closed and nothing else happens. Which pool a worker joins
is decided by the model that it names once it is ready.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from pathlib import Path
from typing import cast

from twinfire.gateway.backends.pool_member import PoolMember
from twinfire.gateway.backends.worker_link import State, WorkerLink
from twinfire.gateway.backends.worker_registry import JoinRefused, WorkerRegistry, described
from twinfire.gateway.listening import AddressUnavailable, bind_socket
from twinfire.protocol.addresses import Address, TcpAddress, UnixAddress
from twinfire.protocol.link_auth import AuthError, LinkHandshake
from twinfire.protocol.messages import CacheEvents, Failed, Load, Loading, Ready, WorkerInfo
from twinfire.protocol.secret import check_exposed
from twinfire.protocol.tls import server_context
from twinfire.protocol.unix_sockets import listen_unix
from twinfire.protocol.worker_config import TlsFiles

HANDSHAKE_LIMIT_S = 5.0
MAX_UNPROVEN = 256
"""Connections that may be in their handshake at once; more are closed."""

log = logging.getLogger(__name__)


class WorkerListener:
    """Listens on any number of addresses for the workers of several pools."""

    def __init__(self, gateway_id: str, secret: bytes | None, tls: TlsFiles | None = None) -> None:
        self.gateway_id = gateway_id
        """Names this life of the gateway."""
        self._secret = secret
        self._tls = tls
        self._pools: dict[str, WorkerRegistry] = {}
        self._servers: list[asyncio.Server] = []
        self._socket_files: list[Path] = []
        self._unproven: set[_Unproven] = set()
        self._newcomers: set[_Newcomer] = set()

    def add_pool(self, registry: WorkerRegistry) -> None:
        """Let the workers of a model join `registry`."""
        self._pools[registry.model] = registry

    def pool_of(self, model: str) -> WorkerRegistry | None:
        """Return the pool of a model."""
        return self._pools.get(model)

    @property
    def pools(self) -> list[WorkerRegistry]:
        """Every pool."""
        return list(self._pools.values())

    async def listen(self, address: Address) -> Address:
        """Accept workers at `address` and return it with the port that was taken.

        AddressUnavailable when it is not to be had, InvalidRequest when it would be open to other
        hosts without a secret or certificates.
        """
        check_exposed(address, self._secret, self._tls)
        loop = asyncio.get_running_loop()
        if isinstance(address, UnixAddress):
            bound = _listen_unix(address.path)
            self._socket_files.append(Path(address.path))
            server = await loop.create_unix_server(self._accept, sock=bound)
        else:
            bound = bind_socket(address.host, address.port)
            address = TcpAddress(address.host, bound.getsockname()[1])
            context: ssl.SSLContext | None = server_context(self._tls) if self._tls else None
            server = await loop.create_server(
                self._accept,
                sock=bound,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_LIMIT_S if context else None,
            )
        self._servers.append(server)
        return address

    async def close(self) -> None:
        """Stop accepting and close what is not in a pool."""
        for server in self._servers:
            server.close()
        for connection in list(self._unproven):
            connection.close()
        for newcomer in list(self._newcomers):
            newcomer.link.close()
        for path in self._socket_files:
            path.unlink(missing_ok=True)

    def _accept(self) -> asyncio.Protocol:
        return _Unproven(self)

    def handshake(self) -> LinkHandshake:
        """Return this end's part of the proof for one connection."""
        return LinkHandshake(self._secret, initiator=False)

    def has_begun(self, connection: _Unproven) -> bool:
        """Count a connection in; False when too many are in their handshake."""
        if len(self._unproven) >= MAX_UNPROVEN:
            return False
        self._unproven.add(connection)
        return True

    def has_ended(self, connection: _Unproven) -> None:
        """Count a connection out: proven, or gone."""
        self._unproven.discard(connection)

    def welcome(self) -> WorkerLink:
        """Return the link that a proven connection becomes."""
        newcomer = _Newcomer(self)
        self._newcomers.add(newcomer)
        return newcomer.link

    def dismiss(self, newcomer: _Newcomer) -> None:
        """A worker's connection is closed."""
        self._newcomers.discard(newcomer)


class _Unproven(asyncio.Protocol):
    """A connection until the other end has proved that it knows the secret."""

    def __init__(self, listener: WorkerListener) -> None:
        self._listener = listener
        self._handshake = listener.handshake()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A loop's transports need not derive from asyncio's; uvloop's do not.
        self._transport = cast(asyncio.Transport, transport)
        if not self._listener.has_begun(self):
            self._transport.abort()
            return
        self._transport.write(self._handshake.start())
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HANDSHAKE_LIMIT_S, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        try:
            step = self._handshake.feed(data)
        except AuthError as error:
            log.warning("closing a connection to the workers' address: %s", error)
            transport.close()
            return
        transport.write(step.to_send)
        if step.done:
            self._end()
            link = self._listener.welcome()
            transport.set_protocol(link)
            link.connection_made(transport)
            if step.rest:
                link.data_received(step.rest)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        self._listener.has_ended(self)
        if self._timer is not None:
            self._timer.cancel()


class _Newcomer:
    """A proven connection: not in a pool until its worker is ready, then one of its members."""

    def __init__(self, listener: WorkerListener) -> None:
        self._listener = listener
        self._pool: WorkerRegistry | None = None
        self._member: PoolMember | None = None
        self._early_load: Load | None = None
        """Reported before the worker said that it is ready; an idle one reports no more."""
        self.link = WorkerLink(
            listener.gateway_id,
            on_state=self._on_state,
            on_load=self._on_load,
            on_closed=self._on_closed,
            on_cache=self._on_cache,
        )

    def _on_state(self, state: State) -> None:
        match state:
            case Loading(stage):
                for pool in self._listener.pools:
                    pool.heard_loading(self.link, stage)
            case Ready(info):
                self._forget_loading()
                self._on_ready(info)
            case Failed(message):
                self._forget_loading(message)

    def _on_ready(self, info: WorkerInfo) -> None:
        if self._pool is not None and self._member is not None:
            if info.instance_id == self._member.instance_id:
                self._pool.change(self._member, info)
            else:
                self.link.refuse("a link belongs to one worker")
            return
        pool = self._listener.pool_of(info.model)
        if pool is None:
            served = ", ".join(sorted(one.model for one in self._listener.pools)) or "nothing"
            self.link.refuse(f"this gateway serves {served}, not {info.model}")
            return
        try:
            self._member = pool.join(info, self.link)
        except JoinRefused as error:
            log.warning("refusing %s: %s", described(info), error)
            self.link.refuse(str(error))
            return
        self._pool = pool
        if self._early_load is not None:
            pool.observe_load(self._member, self._early_load)

    def _on_load(self, load: Load) -> None:
        if self._pool is not None and self._member is not None:
            self._pool.observe_load(self._member, load)
        else:
            self._early_load = load

    def _on_cache(self, events: CacheEvents) -> None:
        if self._pool is not None and self._member is not None:
            self._pool.observe_cache(self._member, events)

    def _on_closed(self) -> None:
        self._forget_loading()
        self._listener.dismiss(self)
        if self._pool is not None and self._member is not None:
            self._pool.leave(self._member, self.link.failure or "its link closed")

    def _forget_loading(self, problem: str | None = None) -> None:
        for pool in self._listener.pools:
            pool.forget_loading(self.link, problem)


def _listen_unix(path: str) -> socket.socket:
    try:
        return listen_unix(path)
    except OSError as error:
        raise AddressUnavailable(f"cannot listen on unix:{path}: {error.strerror}") from None
