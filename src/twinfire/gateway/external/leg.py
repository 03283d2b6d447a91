"""One HTTP request at one engine: sent, answered, read piece by piece, and always closed.

Every fault of the transport or the engine leaves as `LegFailed`, sorted by what may be done about
it. Whoever opens a leg closes it; closing an unfinished one makes the engine abort its work.
"""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

import aiohttp
import msgspec

from twinfire.gateway.errors import STATUS_TYPES, HttpError
from twinfire.gateway.external.engine_server import EnginePool, EngineServer
from twinfire.gateway.external.external_table import ExternalTable
from twinfire.protocol.errors import TwinfireError
from twinfire.protocol.key_file import load_key

_MAX_ERROR_BYTES = 1 << 20
_OVERLOADED = (429, 503)
_KEY_REFUSED = (401, 403)


class FaultKind(Enum):
    """What a failed leg tells of its server."""

    UNREACHED = "unreached"
    """Nothing was sent."""
    OVERLOADED = "overloaded"
    """Refused before any work, for want of room."""
    REFUSED = "refused"
    """The request is wrong; it would be wrong elsewhere."""
    BROKEN = "broken"
    """It may have begun, and its work is lost."""


class LegFailed(TwinfireError):
    """A leg ended without its answer. `status` is what a client would be told."""

    may_go_on = False
    """Whether the whole request is worth another attempt, as against this leg alone."""

    def __init__(
        self,
        kind: FaultKind,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def http_error(self) -> HttpError:
        """Return it as the client sees it."""
        status = self.status
        if status not in STATUS_TYPES:
            status = 400 if status < 500 else 503
        retry = (("retry-after", "1"),) if status in _OVERLOADED else ()
        return HttpError(status, self.message, param=self.param, code=self.code, headers=retry)


class EngineClient:
    """The HTTP session to all engines of one model. Start and close it on its event loop."""

    def __init__(self, table: ExternalTable) -> None:
        """InvalidRequest when the key's file cannot be read."""
        self._table = table
        self._api_key = (
            None if table.api_key_file is None else load_key(table.api_key_file, "the engines' key")
        )
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open session."""
        assert self._session is not None, "the client was not started"
        return self._session

    def start(self) -> None:
        """Open the session."""
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(_note_sent)
        headers = {}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=self._table.connect_timeout_s,
                sock_read=self._table.silence_timeout_s,
            ),
            read_bufsize=1 << 18,
            trace_configs=[trace],
        )

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()


async def _note_sent(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceRequestHeadersSentParams,
) -> None:
    leg = context.trace_request_ctx
    if leg is not None:
        leg.is_sent = True


class Leg:
    """Charged to its server from construction to `close`."""

    def __init__(
        self, client: EngineClient, pool: EnginePool, server: EngineServer, num_tokens: int
    ) -> None:
        self.server = server
        self.is_sent = False
        """Whether the engine may know of the request."""
        self._client = client
        self._entry = pool.charge(server, num_tokens)
        self._response: aiohttp.ClientResponse | None = None

    @property
    def is_answered(self) -> bool:
        """Whether the head of a good answer is here."""
        return self._response is not None

    async def open(self, path: str, body: bytes, request_id: str) -> None:
        """Send the request and wait for the head of a good answer."""
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        try:
            response = await self._client.session.post(
                self.server.url + path,
                data=body,
                headers=headers,
                allow_redirects=False,
                trace_request_ctx=self,
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._lost(error) from None
        if response.status == 200:
            self._response = response
            return
        try:
            content = await response.content.read(_MAX_ERROR_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError):
            content = b""
        finally:
            response.close()
        raise self._answered_badly(response.status, content)

    async def read_piece(self) -> bytes:
        """Return what has arrived since the last piece, b"" at the end of the answer."""
        assert self._response is not None, "the leg is not open"
        try:
            piece = await self._response.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._lost(error) from None
        return piece

    async def read_all(self) -> bytes:
        """Return the whole answer."""
        pieces = []
        while piece := await self.read_piece():
            pieces.append(piece)
        self.server.breaker.succeeded()
        return b"".join(pieces)

    def close(self) -> None:
        """End the leg; an answer that is not complete is aborted."""
        self._entry.close()
        if self._response is not None:
            # Returns the connection to the pool when the answer is complete.
            if self._response.content.is_eof():
                self._response.release()
            else:
                self._response.close()

    def broken(self, message: str) -> LegFailed:
        """Count a fault against the server and return it."""
        self.server.failed()
        return self._failed(LegFailed(FaultKind.BROKEN, 503, message, code="engine_failed"))

    def refused(self, status: int, message: str) -> LegFailed:
        """Count a request that the engine found wrong and return the fault."""
        return self._failed(LegFailed(FaultKind.REFUSED, status, message))

    def _failed(self, failure: LegFailed) -> LegFailed:
        self.server.failures[failure.kind.value] += 1
        return failure

    def _lost(self, error: Exception) -> LegFailed:
        if self.is_sent:
            return self.broken("The engine ended the connection before its answer was complete.")
        self.server.failed()
        message = "The engine cannot be reached."
        return self._failed(LegFailed(FaultKind.UNREACHED, 503, message, code="engine_unreachable"))

    def _answered_badly(self, status: int, content: bytes) -> LegFailed:
        message, param, code = _error_fields(content)
        message = message or f"The engine answered {status}."
        if status in _KEY_REFUSED:
            # Ours is wrong, of which the client must not conclude that its own is.
            return self.broken("The engine does not accept the gateway's key.")
        if status in _OVERLOADED:
            kind = FaultKind.OVERLOADED
        elif 400 <= status < 500:
            kind = FaultKind.REFUSED
            self.server.breaker.succeeded()
        else:
            kind = FaultKind.BROKEN
            self.server.failed()
        return self._failed(LegFailed(kind, status, message, param=param, code=code))


class _ErrorFields(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: object = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorFields | None = None
    message: str = ""
    """Where older engines have it."""


def _error_fields(content: bytes) -> tuple[str, str | None, str | None]:
    try:
        answer = msgspec.json.decode(content, type=_ErrorAnswer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "", None, None
    fields = answer.error or _ErrorFields(message=answer.message)
    code = fields.code if isinstance(fields.code, str) else None
    return fields.message, fields.param, code
