"""What one connection may do before it costs others anything: sizes and times of HTTP itself.

A request whose headers are too long or too slow is answered and its connection closed; so is one
whose body does not come. A client that takes nothing of its answer is dropped. Never looks at what
a request means.
"""

from __future__ import annotations

import asyncio
import resource
from dataclasses import replace

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from twinfire.gateway.direct_writer import DirectHttpProtocol
from twinfire.gateway.errors import Fault, HttpError, fault_of
from twinfire.gateway.settings import HttpLimits

_FILES_FOR_OURSELVES = 128
"""Of those that the system lets the process open: links, database, weights."""
_ABORT_AFTER_S = 2.0
"""How long a client that is told off has to take its answer."""


class GuardedHttpProtocol(DirectHttpProtocol):
    """One connection; `guarded_protocol` gives the class with its limits."""

    limits = HttpLimits()

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        """Count the connection, and wait for its first request."""
        self._fault: Fault | None = None
        self._head_bytes = 0
        self._in_head = True
        self._in_message = False
        self._deadline: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(503, "The server has too many connections.", "too_many_connections")
            return
        self._arm(self.limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget its timers."""
        self._disarm()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if not self._in_head or not self._in_message:
            return
        # What the parser keeps of a header that has no end yet it tells nobody.
        self._head_bytes += len(data)
        if self._head_bytes > 2 * self.limits.max_header_bytes:
            self._refuse_head()

    def on_message_begin(self) -> None:
        """A request's first byte."""
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._head_bytes = 0
        self._arm(self.limits.header_timeout_s)

    def on_url(self, url: bytes) -> None:
        """More of the request line."""
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """One whole header."""
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)
        if len(self.headers) > self.limits.max_headers:
            self._fault = self._head_fault()
            raise ValueError(self._fault.body.error.message)

    def on_headers_complete(self) -> None:
        """The body begins."""
        self._in_head = False
        self._head_bytes = 0
        self._arm(self.limits.body_timeout_s)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """All of the request is here."""
        self._in_message = False
        self._disarm()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or was refused while it was parsed."""
        self._tell(self._fault or fault_of(HttpError(400, msg, code="invalid_http")))

    def pause_writing(self) -> None:
        """The client does not take what is sent to it."""
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self.limits.stall_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > self.limits.max_header_bytes:
            self._fault = self._head_fault()
            raise ValueError(self._fault.body.error.message)

    def _head_fault(self) -> Fault:
        limits = self.limits
        return fault_of(
            HttpError(
                431,
                f"A request may have {limits.max_headers} headers and {limits.max_header_bytes} "
                "bytes of them.",
                code="headers_too_large",
            )
        )

    def _refuse_head(self) -> None:
        self._tell(self._head_fault())

    def _arm(self, timeout_s: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(timeout_s, self._too_slow)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            # It is we who do not read: an earlier request of the connection is being answered.
            self._arm(self.limits.body_timeout_s)
        elif not self._in_message:
            self.transport.close()
        else:
            self._refuse(408, "The request did not come in time.", "request_timeout")

    def _refuse(self, status: int, message: str, code: str) -> None:
        self._tell(fault_of(HttpError(status, message, code=code)))

    def _tell(self, fault: Fault) -> None:
        """Answer with `fault`, if nothing else is being answered, and close the connection."""
        self._disarm()
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = msgspec.json.encode(fault.body)
            head = (
                b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(STATUS_LINE[fault.status] + head % len(body) + body)
        self.transport.close()
        self.loop.call_later(_ABORT_AFTER_S, self.transport.abort)


def guarded_protocol(limits: HttpLimits) -> type[GuardedHttpProtocol]:
    """Return the protocol with `limits`, of which the system's own are the bound."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(16, num_files - _FILES_FOR_OURSELVES)
    own = replace(limits, max_connections=min(limits.max_connections, most))
    return type("GuardedHttpProtocol", (GuardedHttpProtocol,), {"limits": own})
