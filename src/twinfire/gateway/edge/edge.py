"""The proxy itself: one request to the first region that takes it, and its answer untouched.

A request moves on to the next region only while nothing of an answer has been sent and nothing
can have been done for it: the region cannot be reached, or says 503 before any work. Whatever
breaks later is the client's to repeat.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from twinfire.gateway.edge.edge_metrics import EdgeMetrics
from twinfire.gateway.edge.edge_settings import EdgeSettings
from twinfire.gateway.edge.forwarded_headers import request_headers, response_headers
from twinfire.gateway.edge.region import Region
from twinfire.gateway.edge.request_body import BodyTooLong, RequestBody
from twinfire.gateway.edge.session_key import SessionKey, account_of, session_key
from twinfire.gateway.errors import HttpError, fault_of
from twinfire.gateway.health_watch import HealthWatch
from twinfire.gateway.metrics import CONTENT_TYPE
from twinfire.protocol.errors import InvalidRequest

_SERVER = "twinfire-edge"
_ADMIN_PATH = "/cluster/"
_AUTOMATIC_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_UNREACHED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)

log = logging.getLogger(__name__)


class Edge:
    """All state of one edge. Start and close it on its event loop."""

    def __init__(self, settings: EdgeSettings) -> None:
        self.regions = tuple(Region(address) for address in settings.regions)
        self.metrics = EdgeMetrics()
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        self._watch: HealthWatch | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The HTTP session to all gateways."""
        assert self._session is not None, "the edge was not started"
        return self._session

    async def start(self) -> None:
        """Begin to watch the regions; returns once each has been asked for its health."""
        settings = self._settings
        self._session = aiohttp.ClientSession(
            # Shorter than the gateways keep silent connections, so that none closes as we use it.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_connect=settings.connect_timeout_s,
                sock_read=settings.silence_timeout_s,
            ),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_AUTOMATIC_HEADERS,
        )
        self._watch = HealthWatch(
            self._session,
            self.regions,
            interval_s=settings.health_interval_s,
            timeout_s=settings.health_timeout_s,
        )
        await self._watch.start()

    async def close(self) -> None:
        """Leave the regions alone."""
        if self._watch is not None:
            await self._watch.close()
        await self.session.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request."""
        if request.path == "/health":
            return self._health()
        if request.path == "/metrics":
            return _own_response(200, self.metrics.render(self.regions), CONTENT_TYPE)
        try:
            return await self._forward(request)
        except HttpError as error:
            self.metrics.failed(error.code or "")
            fault = fault_of(error)
            return _own_response(fault.status, fault.encode(), headers=dict(fault.headers))

    def _health(self) -> web.Response:
        states = {region.name: region.health.is_healthy for region in self.regions}
        is_ready = any(states.values())
        body = {"status": "ok" if is_ready else "no region is healthy", "regions": states}
        return _own_response(200 if is_ready else 503, msgspec.json.encode(body))

    async def _forward(self, request: web.BaseRequest) -> web.StreamResponse:
        if not request.raw_path.startswith("/"):
            raise HttpError(400, "The request's target must be a path.", code="invalid_path")
        if request.path.startswith(_ADMIN_PATH):
            message = "A cluster is administered at its own gateway."
            raise HttpError(404, message, code="not_found")
        body = RequestBody(request.content, request.content_length, self._settings)
        await _begin(request, body)
        try:
            key, session = _key_of(request, body)
        except InvalidRequest as error:
            raise HttpError(400, error.message, code="invalid_session") from None
        upstream, region = await self._first_to_take(request, body, key, session)
        region.num_running += 1
        try:
            return await self._pass_on(request, upstream, region, session)
        finally:
            region.num_running -= 1
            upstream.close()

    async def _first_to_take(
        self, request: web.BaseRequest, body: RequestBody, key: SessionKey, session: str | None
    ) -> tuple[aiohttp.ClientResponse, Region]:
        """Return the head of an answer; HttpError when nobody gives one."""
        refusal: tuple[aiohttp.ClientResponse, Region] | None = None
        ranked = key.ranked(self.regions)
        fault = _no_answer(503, "no_region", "No region is healthy now.")
        try:
            for region in ranked:
                if not region.health.is_healthy:
                    self.metrics.passed_over(region, "unhealthy")
                    continue
                if not body.is_repeatable:
                    break
                try:
                    upstream = await self._ask(region, request, body, session)
                except _UNREACHED:
                    region.health.failed()
                    self.metrics.passed_over(region, "unreachable")
                    message = "The region's gateway cannot be reached."
                    fault = _no_answer(502, "region_unreachable", message)
                    continue
                if upstream.status != 503:
                    return upstream, region
                self.metrics.passed_over(region, "unavailable")
                if refusal is not None:
                    refusal[0].close()
                refusal = upstream, region
            if refusal is None:
                raise fault
            # The last refusal is told in the gateway's own words.
            answer, refusal = refusal, None
            return answer
        finally:
            if refusal is not None:
                refusal[0].close()

    async def _ask(
        self, region: Region, request: web.BaseRequest, body: RequestBody, session: str | None
    ) -> aiohttp.ClientResponse:
        headers = request_headers(
            request.raw_headers, request.remote or "", request.scheme, session
        )
        if body.length is not None and (body.length or request.content_length is not None):
            headers["content-length"] = str(body.length)
        whole = body.whole
        try:
            return await self.session.request(
                request.method,
                URL(region.url + request.raw_path, encoded=True),
                headers=headers,
                data=body.stream() if whole is None else whole or None,
                allow_redirects=False,
            )
        except _UNREACHED:
            raise
        except TimeoutError:
            message = "The region's gateway did not answer in time."
            raise HttpError(504, message, code="region_timeout") from None
        except BodyTooLong:
            raise _too_long(self._settings.max_body_bytes) from None
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error.__cause__, BodyTooLong):
                raise _too_long(self._settings.max_body_bytes) from None
            message = "The region's gateway ended the connection before it answered."
            raise _no_answer(502, "region_failed", message) from None

    async def _pass_on(
        self,
        request: web.BaseRequest,
        upstream: aiohttp.ClientResponse,
        region: Region,
        session: str | None,
    ) -> web.StreamResponse:
        headers = response_headers(upstream.raw_headers, region.name, session)
        headers.setdefault("server", _SERVER)
        response = web.StreamResponse(
            status=upstream.status, reason=upstream.reason, headers=headers
        )
        num_bytes = 0
        await response.prepare(request)
        try:
            while piece := await upstream.content.readany():
                num_bytes += len(piece)
                await response.write(piece)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # A clean end would tell the client that the answer is complete.
            log.warning("the answer from region %s was cut: %s", region.name, error)
            self.metrics.failed("answer_cut")
            if request.transport is not None:
                request.transport.abort()
            return response
        await response.write_eof()
        self.metrics.answered(region, upstream.status, num_bytes)
        if upstream.content.is_eof():
            upstream.release()
        return response


async def _begin(request: web.BaseRequest, body: RequestBody) -> None:
    if request.headers.get("expect", "").lower() == "100-continue":
        assert request.transport is not None
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    try:
        await body.begin()
    except BodyTooLong:
        raise _too_long(body.limit) from None


def _key_of(request: web.BaseRequest, body: RequestBody) -> tuple[SessionKey, str | None]:
    """Return what a request is hashed by, and the session that goes down and back.

    Reading is nobody's session: it goes by account alone.
    """
    if request.method != "POST":
        return SessionKey(account_of(request.headers), ""), None
    key = session_key(request.headers, body.whole)
    return key, key.session


def _too_long(limit: int) -> HttpError:
    message = f"The request body is longer than the limit of {limit} bytes."
    # Some of the body may be unread.
    headers = (("connection", "close"),)
    return HttpError(413, message, code="request_too_large", headers=headers)


def _no_answer(status: int, code: str, message: str) -> HttpError:
    return HttpError(status, message, code=code, headers=(("retry-after", "1"),))


def _own_response(
    status: int,
    body: bytes,
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    own = {"content-type": content_type, "server": _SERVER}
    return web.Response(status=status, body=body, headers={**own, **(headers or {})})
