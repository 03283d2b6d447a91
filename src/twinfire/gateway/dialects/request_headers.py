"""What a request's headers ask for beside its body, and what the answer's headers tell."""

from __future__ import annotations

import asyncio
import math

from twinfire.gateway.backends.request_context import RequestContext
from twinfire.gateway.backends.route_record import RouteRecord
from twinfire.gateway.dialects.requests import SamplingFields
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.routing.session import (
    SESSION_RESPONSE_HEADERS,
    mint_session,
    read_session,
)
from twinfire.protocol.errors import InvalidRequest

TIMEOUT_HEADER = "x-request-timeout-ms"
"""How long the client is willing to wait for all of the answer."""
GATEWAY_TIMEOUT_HEADER = "cf-aig-request-timeout"
"""The same under the name that clients of Workers AI send."""
REJECT_HEADER = "x-reject-if-busy"
"""`1` asks for a 429 instead of waiting for a worker."""
ROUTE_HEADER = "twinfire-route"
"""`1` asks for headers that tell how the request was served."""

_MAX_DIGITS = 12
"""Of a number in a header."""


def request_context(exchange: Exchange, request: SamplingFields | None = None) -> RequestContext:
    """Return what the headers say, and the body where it can too; the answer names the session.

    Without a `request` the body is somebody else's to read.
    """
    cache_key = request.prompt_cache_key if request else None
    session = read_session(exchange.headers, cache_key) or mint_session()
    exchange.answer_headers += [(name, session) for name in SESSION_RESPONSE_HEADERS]
    asked_in_body = request is not None and request.reject_if_busy is True
    reject_if_busy = asked_in_body or exchange.headers.get(REJECT_HEADER) == "1"
    return RequestContext(
        affinity=session, deadline_s=_deadline_s(exchange), reject_if_busy=reject_if_busy
    )


def show_route(exchange: Exchange, route: RouteRecord | None) -> None:
    """Add the headers that tell of a route, once and where the client asked for them."""
    asked = exchange.headers.get(ROUTE_HEADER) == "1"
    shown = any(name.startswith(ROUTE_HEADER) for name, _ in exchange.answer_headers)
    if route is None or not asked or shown:
        return
    told = {
        "decode": route.decode,
        "prefill": route.prefill or route.decode,
        "reason": route.reason or "",
        "cached-tokens": str(route.cached_tokens),
        "attempts": str(route.num_attempts),
    }
    exchange.answer_headers += [(f"{ROUTE_HEADER}-{name}", value) for name, value in told.items()]


def _deadline_s(exchange: Exchange) -> float | None:
    """Return when the request's time is over on the loop's clock, None for never."""
    name = TIMEOUT_HEADER if TIMEOUT_HEADER in exchange.headers else GATEWAY_TIMEOUT_HEADER
    text = exchange.headers.get(name)
    limit_s = exchange.settings.limits.max_request_s
    if text is None:
        timeout_s = limit_s
    elif text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS and int(text) > 0:
        timeout_s = min(int(text) / 1000, limit_s or math.inf)
    else:
        raise InvalidRequest(f"`{name}` must be a whole number of milliseconds above 0.", name)
    return None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
