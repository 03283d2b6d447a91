"""Running an edge on a socket, and ending it without cutting anybody off."""

from __future__ import annotations

import asyncio
import signal
import socket

from aiohttp import web

from twinfire.gateway.edge.edge import Edge

_IDLE_CONNECTION_S = 75
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class EdgeServer:
    """One edge on one bound socket, which it closes at its end."""

    def __init__(self, edge: Edge, bound: socket.socket, drain_timeout_s: float = 30.0) -> None:
        self.started = asyncio.Event()
        """Set once connections are accepted."""
        self._edge = edge
        self._socket = bound
        self._drain_timeout_s = drain_timeout_s
        self._stop = asyncio.Event()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        host, port, *_ = self._socket.getsockname()
        return host, port

    def stop(self) -> None:
        """Take no new connections and let running requests end, up to the limit."""
        self._stop.set()

    async def serve(self, *, handle_signals: bool = False) -> None:
        """Serve until `stop` is called, or SIGTERM or SIGINT comes."""
        loop = asyncio.get_running_loop()
        if handle_signals:
            for number in _STOP_SIGNALS:
                loop.add_signal_handler(number, self.stop)
        await self._edge.start()
        server = web.Server(
            self._edge.handle,
            # A client that leaves takes its request with it.
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=_IDLE_CONNECTION_S,
        )
        runner = web.ServerRunner(server, shutdown_timeout=self._drain_timeout_s)
        try:
            await runner.setup()
            await web.SockSite(runner, self._socket, backlog=2048).start()
            self.started.set()
            await self._stop.wait()
        finally:
            await runner.cleanup()
            await self._edge.close()
            if handle_signals:
                for number in _STOP_SIGNALS:
                    loop.remove_signal_handler(number)
