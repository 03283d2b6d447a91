"""The ASGI application behind every route: key, content type and body checks around a handler."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256

from starlette.types import Receive, Scope, Send

from twinfire.gateway.accounting.access import MISSING_KEY, secret_of, unauthorized
from twinfire.gateway.accounting.identity import OPERATOR_IDENTITY
from twinfire.gateway.errors import HttpError
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway

Handler = Callable[[Exchange], Awaitable[None]]


class Endpoint:
    """Serves one route. `guarded` routes want to know who calls, and count as work.

    `keys` open this route in place of the gateway's tokens. `speak` sets how the route's dialect
    tells faults, before there can be any.
    """

    def __init__(
        self,
        gateway: Gateway,
        handler: Handler,
        *,
        guarded: bool,
        speak: Callable[[Exchange], None] | None = None,
        keys: Sequence[str] | None = None,
    ) -> None:
        self._speak = speak
        self._gateway = gateway
        self._handler = handler
        self._guarded = guarded
        self._key_digests = (
            None if keys is None else [sha256(key.encode()).digest() for key in keys]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one exchange."""
        exchange = Exchange(scope, receive, send, self._gateway.settings)
        if self._speak is not None:
            self._speak(exchange)
        reads_body = scope["method"] == "POST"
        try:
            if self._guarded:
                await self._identify(exchange)
                self._gateway.enter(exchange)
            await exchange.run(self._read_and_handle if reads_body else self._handler)
        except HttpError as error:
            await exchange.fail(error)
        finally:
            self._gateway.leave(exchange)

    async def _read_and_handle(self, exchange: Exchange) -> None:
        await exchange.read_body()
        if exchange.body:
            _check_content_type(exchange)
        await self._handler(exchange)

    async def _identify(self, exchange: Exchange) -> None:
        if self._key_digests is None:
            accounting = self._gateway.accounting
            exchange.identity = await accounting.identify(exchange.headers)
            if "account_id" in exchange.path_params:
                accounting.check_account(exchange, exchange.path_params["account_id"])
            return
        # Digests have one length, so comparing them tells nothing of the keys'.
        digest = sha256(secret_of(exchange.headers).encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._key_digests]
        if not any(matches):
            raise unauthorized(MISSING_KEY)
        exchange.identity = OPERATOR_IDENTITY


def _check_content_type(exchange: Exchange) -> None:
    content_type = exchange.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    is_json = media_type == "application/json" or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
    if media_type and not is_json:
        message = f"The content type is `{media_type}`; only `application/json` is understood."
        raise HttpError(415, message[:200])
