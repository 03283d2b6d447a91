"""Sends requests for external models to them, and all others to the gateway's own handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from twinfire.gateway.exchange import Exchange
from twinfire.gateway.external.external_pool import ExternalPool
from twinfire.protocol.errors import InvalidRequest

Handler = Callable[[Exchange], Awaitable[None]]


class _Named(msgspec.Struct):
    model: str | None = None


_DECODER = msgspec.json.Decoder(_Named)


class ExternalModels:
    """All external models of one gateway, by their public names."""

    def __init__(self, pools: Sequence[ExternalPool]) -> None:
        """InvalidRequest when two models have a name in common."""
        self.pools = tuple(pools)
        self._by_name: dict[str, ExternalPool] = {}
        for pool in pools:
            for name in pool.names:
                if name in self._by_name:
                    raise InvalidRequest(f"two models are called `{name}`", "names")
                self._by_name[name] = pool

    async def start(self) -> None:
        """Begin to look after every model's engines."""
        await asyncio.gather(*(pool.start() for pool in self.pools))

    async def close(self) -> None:
        """Leave them alone."""
        await asyncio.gather(*(pool.close() for pool in self.pools))

    def before(self, path: str, own: Handler) -> Handler:
        """Return a handler of `path` that leaves to `own` whatever names no external model."""

        async def handle(exchange: Exchange) -> None:
            pool = self._by_name.get(_model_name(exchange.body))
            await (own(exchange) if pool is None else pool.handle(exchange, path))

        return handle


def _model_name(body: bytes) -> str:
    try:
        return _DECODER.decode(body).model or ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # What is wrong with it is the handler's to say.
        return ""
