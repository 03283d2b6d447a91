"""An exchange without a client, for work that is done for nobody who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.types import Message

from twinfire.gateway.exchange import Exchange
from twinfire.gateway.settings import GatewaySettings


def detached_exchange(settings: GatewaySettings, path: str, headers: Mapping[str, str]) -> Exchange:
    """Return an exchange whose client never leaves and never hears anything."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
    }
    return Exchange(scope, _never, _refuse, settings)


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets this event")


async def _refuse(message: Message) -> None:
    raise AssertionError("there is nobody to answer")
