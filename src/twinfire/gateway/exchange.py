"""One HTTP exchange: a body read under a cap, then one JSON answer or one event stream.

Knows that the client may leave at any time: whoever works for the exchange is then cancelled.
Sends the 200 of a stream late, keeps silent streams alive, and turns any exception into the body
that fits how far the answer got. Never looks inside bodies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator

from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from twinfire.accounts.account import Account
from twinfire.gateway.accounting.bill import Bill
from twinfire.gateway.accounting.identity import OPEN_IDENTITY, Identity
from twinfire.gateway.direct_writer import direct_writer
from twinfire.gateway.errors import Fault, HttpError, fault_of
from twinfire.gateway.settings import GatewaySettings

DONE_EVENT = b"data: [DONE]\n\n"
_QUEUED = b": queued\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
QUEUED_COMMENTS_HEADER = "x-queued-comments"
"""`0` keeps the status open until the first event, however long that takes."""
_SHORTEST_CHECK_S = 0.01
_FAREWELL_LIMIT_S = 2.0
"""For the last event of an exchange that is ended from outside."""
_MAX_DISCARDED_BYTES = 64 * 1024 * 1024
"""Read and dropped of a body that is too long: clients look for an answer only after sending."""
_EVENT_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

log = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client left before its request was complete."""


class Exchange:
    """One request and its answer. `body` is empty until `read_body`."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, settings: GatewaySettings
    ) -> None:
        self.headers = Headers(scope=scope)
        self.path: str = scope.get("path", "")
        self.path_params: dict[str, str] = scope.get("path_params", {})
        self.query = QueryParams(scope.get("query_string", b""))
        self.client_host: str = (scope.get("client") or ("", 0))[0]
        self.answer_headers: list[tuple[str, str]] = []
        """Sent with the answer, be it whole or a stream; add to it before the answer starts."""
        self.fault_status: Callable[[Fault], int] = _own_status
        """The status of a fault; a dialect may have its own."""
        self.fault_body: Callable[[Fault], bytes] = Fault.encode
        """How a fault's body looks; a dialect may shape its own."""
        self.fault_writer: Callable[[Fault], bytes] | None = None
        """All events that end a running stream with a fault; None for an error and `[DONE]`."""
        self.before_last_events: Callable[[], Awaitable[None]] | None = None
        """Awaited before a stream's last events leave, of which a client may make use at once."""
        self.status: int | None = None
        """Of the answer, once it has one."""
        self.fault: Fault | None = None
        """What the client was told of, if anything went wrong."""
        self.generates = False
        """Whether a model computes for it."""
        self.identity: Identity = OPEN_IDENTITY
        """Who sent it; set before its handler runs."""
        self.bill: Bill | None = None
        """Of what a model computes for it."""
        self.arrival_s = time.monotonic()
        self.settings = settings
        self.body = b""
        self.client_request_id = _header_request_id(self.headers, settings)
        self.request_id = self.client_request_id or uuid.uuid4().hex
        self._receive = receive
        self._body_read = asyncio.Event()
        if scope["method"] != "POST":
            self._body_read.set()
        self._send = send
        self._writer = direct_writer(scope)
        self._may_start_after_s: float | None = None
        self._stream_started = False
        self._has_events = False
        self._answered = False
        self._last_sent_s = 0.0
        self._abort: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    @property
    def account(self) -> Account:
        """Whose request it is."""
        return self.identity.account

    def open_bill(self, bill: Bill) -> None:
        """Have `bill` closed at the end, if nobody settles it before."""
        self.close_bill(None)
        self.bill = bill

    def close_bill(self, error: BaseException | None) -> None:
        """Book what was seen of a request that ended by `error` and not as it should."""
        bill = self.bill
        if bill is None or not bill.is_open:
            return
        if self._abort.done():
            error = self._abort.result()
        started = 200 if self._stream_started else None
        if not isinstance(error, Exception) or isinstance(error, ClientGone):
            bill.close(started, None)
            return
        fault = fault_of(error)
        detail = fault.body.error
        bill.close(started or self.fault_status(fault), detail.code or detail.type)

    async def read_body(self) -> None:
        """Read the whole body; 413 when it is longer than the limit, which is never kept."""
        limit = self.settings.limits.max_body_bytes
        chunks: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            num_bytes += len(chunk)
            if num_bytes <= limit:
                chunks.append(chunk)
            elif num_bytes > limit + _MAX_DISCARDED_BYTES:
                raise _too_large(limit)
            else:
                chunks.clear()
            if not message.get("more_body", False):
                break
        if num_bytes > limit:
            raise _too_large(limit)
        self.body = b"".join(chunks)
        self._body_read.set()

    async def run(self, work: Callable[[Exchange], Awaitable[None]]) -> None:
        """Do `work`, cancelled when the client leaves or `abort` is called."""
        task = asyncio.ensure_future(self._guarded(work))
        watch = asyncio.ensure_future(self._client_left())
        try:
            while not (task.done() or watch.done() or self._abort.done()):
                await asyncio.wait(
                    (task, watch, self._abort),
                    timeout=self._next_check_s(),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                await self._keep_alive()
        finally:
            watch.cancel()
            if not task.done():
                task.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)
        if self._abort.done():
            # A client that does not read its stream would hold up the server's end.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.fail(self._abort.result()), _FAREWELL_LIMIT_S)
        self.close_bill(None)

    def abort(self, error: Exception) -> None:
        """Make the exchange end with `error`."""
        if not self._abort.done():
            self._abort.set_result(error)

    async def answer(
        self,
        body: bytes,
        status: int = 200,
        headers: Iterable[tuple[str, str]] = (),
        content_type: str = "application/json",
    ) -> None:
        """Send a whole answer."""
        self._answered = True
        self.status = status
        raw_headers = [
            (b"content-type", content_type.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", self.request_id.encode()),
            *_raw_headers(self.answer_headers),
            *_raw_headers(headers),
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": raw_headers})
        await self._send({"type": "http.response.body", "body": body})

    def allow_early_start(self) -> None:
        """Every fault of the request is found: a long wait from here on may send the 200.

        Not to a client that would rather learn of later faults by the status.
        """
        if self.headers.get(QUEUED_COMMENTS_HEADER) != "0":
            self._may_start_after_s = time.monotonic() + self.settings.accept_wait_s

    async def send_events(self, frames: bytes) -> None:
        """Send whole server-sent events, the 200 before the first of them."""
        self._has_events = True
        await self._send_frames(frames)

    def takes_events(self) -> bool:
        """Whether `write_events` may be called now: the stream runs and the client keeps up."""
        writer = self._writer
        return writer is not None and self._stream_started and writer.is_ready()

    def write_events(self, frames: bytes) -> None:
        """Send whole server-sent events of a stream that takes them."""
        assert self._writer is not None, "`takes_events` was not asked"
        self._has_events = True
        self._last_sent_s = time.monotonic()
        self._writer.write(frames)

    async def end_events(self, frames: bytes, *, done_event: bool = True) -> None:
        """Send the last events, `[DONE]` where the dialect has it, and end the answer."""
        await self._start_stream()
        if self.before_last_events is not None:
            await self.before_last_events()
        self._answered = True
        body = frames + DONE_EVENT if done_event else frames
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: Exception) -> None:
        """Tell the client of `error`, as a status while that is possible, else as an event."""
        if self._answered:
            return
        fault = self.fault = fault_of(error)
        if fault.is_ours:
            log.error("request %s failed", self.request_id, exc_info=error)
        if not self._stream_started:
            status = self.fault_status(fault)
            await self.answer(self.fault_body(fault), status, fault.headers)
        elif self.fault_writer is None:
            await self.end_events(error_event(fault))
        else:
            await self.end_events(self.fault_writer(fault), done_event=False)

    async def _guarded(self, work: Callable[[Exchange], Awaitable[None]]) -> None:
        try:
            await work(self)
        except ClientGone:
            return
        except Exception as error:
            await self.fail(error)

    async def _send_frames(self, frames: bytes) -> None:
        await self._start_stream()
        self._last_sent_s = time.monotonic()
        await self._send({"type": "http.response.body", "body": frames, "more_body": True})

    async def _start_stream(self) -> None:
        if self._stream_started:
            return
        self._stream_started = True
        self.status = 200
        headers = [
            *_EVENT_STREAM_HEADERS,
            (b"x-request-id", self.request_id.encode()),
            *_raw_headers(self.answer_headers),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _client_left(self) -> None:
        # Until then the messages belong to whoever reads the body.
        await self._body_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _next_check_s(self) -> float:
        if self._stream_started:
            return self.settings.keep_alive_s
        if self._may_start_after_s is None:
            return self.settings.accept_wait_s
        return max(_SHORTEST_CHECK_S, self._may_start_after_s - time.monotonic())

    async def _keep_alive(self) -> None:
        if self._answered:
            return
        now_s = time.monotonic()
        if self._stream_started:
            is_due = now_s - self._last_sent_s >= self.settings.keep_alive_s
        else:
            is_due = self._may_start_after_s is not None and now_s >= self._may_start_after_s
        if is_due:
            await self._send_frames(_KEEP_ALIVE if self._has_events else _QUEUED)


def _own_status(fault: Fault) -> int:
    return fault.status


def _raw_headers(headers: Iterable[tuple[str, str]]) -> Iterator[tuple[bytes, bytes]]:
    return ((name.encode(), value.encode("latin-1")) for name, value in headers)


def error_event(fault: Fault) -> bytes:
    """Return a fault as a server-sent event."""
    return b"data: " + fault.encode() + b"\n\n"


def is_header_safe(text: str) -> bool:
    """Whether `text` may go into a header as it is."""
    return text.isascii() and text.isprintable()


def _header_request_id(headers: Headers, settings: GatewaySettings) -> str | None:
    value = headers.get("x-request-id", "")
    if value and is_header_safe(value) and len(value) <= settings.limits.max_request_id_chars:
        return value
    return None


def _too_large(limit: int) -> HttpError:
    # Some of the body may be unread, so the connection cannot carry another request.
    message = f"The request body is longer than the limit of {limit} bytes."
    return HttpError(413, message, headers=(("connection", "close"),))
