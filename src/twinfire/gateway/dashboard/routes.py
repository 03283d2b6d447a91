"""`/dashboard`: the page, its files, and the data behind them."""

from __future__ import annotations

from contextlib import aclosing

import msgspec
from starlette.routing import Route

from twinfire.gateway.cluster_control import ClusterControl
from twinfire.gateway.dashboard.access import DashboardAccess
from twinfire.gateway.dashboard.assets import SECURITY_HEADERS, Assets
from twinfire.gateway.dashboard.feed import Feed
from twinfire.gateway.dashboard.own_workers import own_workers_status
from twinfire.gateway.dashboard.sampler import Sampler, Snapshot
from twinfire.gateway.dashboard.usage_view import usage_view
from twinfire.gateway.endpoint import Endpoint, Handler
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway

_DATA_HEADERS = (("cache-control", "no-store"), *SECURITY_HEADERS)
_DEFAULT_DAYS = "1"


class DashboardData:
    """The handlers of data, one method each."""

    def __init__(self, gateway: Gateway, cluster: ClusterControl | None) -> None:
        self._gateway = gateway
        self._access = DashboardAccess(gateway)
        status = (lambda: own_workers_status(gateway)) if cluster is None else cluster.status
        self._feed = Feed(Sampler(gateway, status), is_ending=lambda: gateway.draining)

    async def snapshot(self, exchange: Exchange) -> None:
        """`GET /dashboard/api/snapshot`: all that the page shows, once."""
        await self._access.check(exchange)
        await exchange.answer(msgspec.json.encode(self._feed.snapshot()), headers=_DATA_HEADERS)

    async def stream(self, exchange: Exchange) -> None:
        """`GET /dashboard/api/stream`: the same, and what has changed every second."""
        await self._access.check(exchange)
        exchange.answer_headers += SECURITY_HEADERS
        async with aclosing(self._feed.frames()) as frames:
            async for frame in frames:
                name = b"snapshot" if isinstance(frame, Snapshot) else b"frame"
                data = msgspec.json.encode(frame)
                await exchange.send_events(b"event: " + name + b"\ndata: " + data + b"\n\n")
        await exchange.end_events(b"", done_event=False)

    async def usage(self, exchange: Exchange) -> None:
        """`GET /dashboard/api/usage?days=7`: sums over the last days."""
        await self._access.check(exchange)
        days = exchange.query.get("days", _DEFAULT_DAYS)
        view = await usage_view(self._gateway.accounting, days)
        await exchange.answer(msgspec.json.encode(view), headers=_DATA_HEADERS)


def dashboard_routes(gateway: Gateway, cluster: ClusterControl | None) -> list[Route]:
    """Return the routes; without a `cluster` the gateway's own workers are shown.

    Handlers check who calls by themselves, and are no work that a drain waits for.
    """
    assets, data = Assets(), DashboardData(gateway, cluster)

    def route(path: str, handler: Handler) -> Route:
        return Route(path, Endpoint(gateway, handler, guarded=False), methods=["GET"])

    return [
        route("/dashboard", assets.page),
        route("/dashboard/", assets.slashed_page),
        route("/dashboard/static/{name}", assets.file),
        route("/dashboard/api/snapshot", data.snapshot),
        route("/dashboard/api/stream", data.stream),
        route("/dashboard/api/usage", data.usage),
    ]
