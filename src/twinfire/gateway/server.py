"""Running the application on a socket, and ending it without cutting anybody off.

Asked to stop, the server answers 503 to whatever is new, lets running requests finish up to a
limit, then closes. Asked twice, it ends them with an error at once. Installs signal handlers only
when told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import ssl
from collections.abc import Generator

import uvicorn
from starlette.applications import Starlette

from twinfire.gateway.app import gateway_of
from twinfire.gateway.http_guard import guarded_protocol
from twinfire.gateway.settings import TlsPair
from twinfire.protocol.errors import InvalidRequest

_BACKLOG = 2048
_IDLE_CONNECTION_S = 75
_CLOSE_LIMIT_S = 5
"""For answers that are complete to reach their clients."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class GatewayServer:
    """One application on one bound socket, which it closes at its end."""

    def __init__(self, app: Starlette, bound: socket.socket) -> None:
        self.started = asyncio.Event()
        """Set once connections are accepted."""
        self._gateway = gateway_of(app)
        self._socket = bound
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        settings = self._gateway.settings
        config = uvicorn.Config(
            app,
            http=guarded_protocol(settings.http),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=math.ceil(settings.http.idle_timeout_s),
            timeout_graceful_shutdown=_CLOSE_LIMIT_S,
        )
        if settings.tls is not None:
            config.load()
            config.ssl = tls_context(settings.tls)
        self._uvicorn = _Uvicorn(config, self.started)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        host, port, *_ = self._socket.getsockname()
        return host, port

    def stop(self) -> None:
        """Begin to drain; called again, end what still runs."""
        if self._stop.is_set():
            self._hurry.set()
        self._gateway.start_drain()
        self._stop.set()

    async def serve(self, *, handle_signals: bool = False) -> None:
        """Serve until `stop` is called, or SIGTERM or SIGINT comes; return when drained."""
        loop = asyncio.get_running_loop()
        if handle_signals:
            for number in _STOP_SIGNALS:
                loop.add_signal_handler(number, self.stop)
        await self._gateway.start_background()
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._socket]))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await self._gateway.drain(self._hurry)
        finally:
            stopping.cancel()
            self._uvicorn.should_exit = True
            await serving
            await self._gateway.close()
            if handle_signals:
                for number in _STOP_SIGNALS:
                    loop.remove_signal_handler(number)


def tls_context(files: TlsPair) -> ssl.SSLContext:
    """Return the settings of a server with a certificate; InvalidRequest names bad files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An encrypted key would otherwise be asked for on the terminal.
        context.load_cert_chain(files.certificate, files.key, password=b"")
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"{files.certificate} and {files.key} are no certificate with its key: {error}",
            "tls-cert",
        ) from None
    return context


class _Uvicorn(uvicorn.Server):
    """Leaves signals to its owner and says when it listens."""

    def __init__(self, config: uvicorn.Config, listening: asyncio.Event) -> None:
        super().__init__(config)
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
