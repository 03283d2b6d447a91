"""Writing the body of a running response without a coroutine per piece.

ASGI has only an awaitable `send`; through it a token costs four coroutines. The server's HTTP
protocol puts a `DirectWriter` into the scope, which writes where that would not have to wait and
says where it would: then the answer goes through `send`, which waits for a slow client.
"""

from __future__ import annotations

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_EXTENSION = "twinfire.direct_writer"


class DirectWriter:
    """The body of one response."""

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport

    def is_ready(self) -> bool:
        """Whether a chunk of the body may be written now: begun, not ended, nothing held up."""
        cycle = self._cycle
        return bool(
            cycle.chunked_encoding
            and not self._flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
        )

    def write(self, content: bytes) -> None:
        """Write one chunk, not empty."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(content), content))


class DirectHttpProtocol(HttpToolsProtocol):
    """Uvicorn's protocol, with a writer in the scope of each request."""

    def on_headers_complete(self) -> None:
        """Add the writer before the application's task gets to run."""
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["extensions"] = {_EXTENSION: {"writer": DirectWriter(self.cycle)}}


def direct_writer(scope: Scope) -> DirectWriter | None:
    """Return the writer of a request, None behind another server."""
    extension = scope.get("extensions", {}).get(_EXTENSION)
    return None if extension is None else extension["writer"]
