"""The external models of one gateway: which requests are theirs, and whether they can be served.

Imports no HTTP client, so that a gateway without such models is ready as soon as ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from twinfire.gateway.exchange import Exchange
from twinfire.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from twinfire.gateway.external.external_pool import Admit, ExternalPool

Handler = Callable[[Exchange], Awaitable[None]]


class _Named(msgspec.Struct):
    model: str | None = None


_DECODER = msgspec.json.Decoder(_Named)


class ExternalModels:
    """All external models of one gateway, by their public names."""

    def __init__(
        self, pools: Sequence[ExternalPool] = (), aliases: Mapping[str, str] | None = None
    ) -> None:
        """`aliases` gives more names to models; those of others' models are left out.

        InvalidRequest when two models have a name in common.
        """
        self.pools = tuple(pools)
        self._by_name: dict[str, ExternalPool] = {}
        for pool in pools:
            for name in pool.names:
                if name in self._by_name:
                    raise InvalidRequest(f"two models are called `{name}`", "names")
                self._by_name[name] = pool
        named = dict(self._by_name)
        for alias, name in (aliases or {}).items():
            if name in named:
                self._by_name[alias] = named[name]

    def with_aliases(self, aliases: Mapping[str, str]) -> ExternalModels:
        """Return the same models with more names."""
        return ExternalModels(self.pools, aliases)

    @property
    def by_name(self) -> Mapping[str, ExternalPool]:
        """Every public name with its model, in order."""
        return self._by_name

    def unready_reasons(self) -> dict[str, str]:
        """Return the models that cannot be served, each with the reason."""
        reasons = {pool.names[0]: pool.unready_reason for pool in self.pools}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    async def start(self) -> None:
        """Begin to look after every model's engines."""
        await asyncio.gather(*(pool.start() for pool in self.pools))

    async def close(self) -> None:
        """Leave them alone."""
        await asyncio.gather(*(pool.close() for pool in self.pools))

    def before(
        self, path: str, own: Handler, admit: Admit, *, takes_unnamed: bool = False
    ) -> Handler:
        """Return a handler of `path` that leaves to `own` whatever names no external model.

        `admit` takes the limits of accounts. With `takes_unnamed` a request that names no model is
        for the one external model.
        """
        if not self.pools:
            return own
        unnamed = self.pools[0] if takes_unnamed else None

        async def handle(exchange: Exchange) -> None:
            name = _model_name(exchange.body)
            pool = self._by_name.get(name) if name else unnamed
            await (own(exchange) if pool is None else pool.handle(exchange, path, admit))

        return handle


def _model_name(body: bytes) -> str | None:
    """Return the name in a body, None where there is none; "" where that cannot be told."""
    try:
        return _DECODER.decode(body).model or None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # What is wrong with it is the handler's to say.
        return ""
