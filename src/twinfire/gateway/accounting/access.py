"""Which requests may come in: tokens of accounts, the server's own keys, or everybody.

Keeps all accounts and live tokens in memory, so that a check costs a hash and a look-up and a flood
of wrong tokens never reaches the database; a change there is seen within two seconds. Never logs a
key, and compares only digests, whose bytes a caller cannot choose.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Sequence
from hashlib import sha256

from starlette.datastructures import Headers

from twinfire.accounts.account_store import AccountsSnapshot, AccountStore
from twinfire.accounts.api_token import is_well_formed
from twinfire.accounts.database import DatabaseUnavailable
from twinfire.gateway.accounting.access_mode import AccessMode
from twinfire.gateway.accounting.identity import OPEN_IDENTITY, OPERATOR_IDENTITY, Identity
from twinfire.gateway.errors import HttpError

MISSING_KEY = "The API key is missing or wrong; send it as `Authorization: Bearer KEY`."
_POLL_S = 1.0
_LEAST_RELOAD_GAP_S = 0.2
"""For tokens that look right and are not known: they may be a moment old."""

log = logging.getLogger(__name__)


class Access:
    """Finds out whose a request is. Belongs to the event loop; `store` is used on threads."""

    def __init__(self, store: AccountStore, mode: AccessMode, keys: Sequence[str]) -> None:
        self._store = store
        self._mode = mode
        self._key_digests = [sha256(key.encode()).digest() for key in keys]
        self._snapshot = AccountsSnapshot(-1, {}, {})
        self._checked_s = float("-inf")
        self._reloading = asyncio.Lock()
        self._polling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read everything; DatabaseUnavailable when that is not possible."""
        self._snapshot = await asyncio.to_thread(self._store.snapshot)
        self._polling = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Stop looking for changes."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)

    @property
    def is_open(self) -> bool:
        """Whether a request without a token is served."""
        if self._mode == "auto":
            return not self._key_digests and not self._snapshot.tokens
        return self._mode == "open"

    async def identify(self, headers: Headers) -> Identity:
        """Return who sent `headers`; 401 when they name nobody."""
        secret = secret_of(headers)
        if secret:
            identity = self._known(secret)
            looks_right = identity is None and is_well_formed(secret)
            if looks_right:
                await self._reload()
                identity = self._known(secret)
            if identity is not None:
                return identity
            if looks_right:
                raise unauthorized("The token is unknown, revoked or expired.")
        if self.is_open:
            return OPEN_IDENTITY
        raise unauthorized(MISSING_KEY)

    def _known(self, secret: str) -> Identity | None:
        digest = sha256(secret.encode("latin-1")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._key_digests]
        if any(matches):
            return OPERATOR_IDENTITY
        token = self._snapshot.tokens.get(digest)
        if token is None or not token.is_live(time.time()):
            return None
        account = self._snapshot.accounts[token.account_id]
        if account.disabled:
            raise HttpError(403, "The account is disabled.", code="account_disabled")
        return Identity(account, token.id)

    async def _reload(self) -> None:
        """Read what has changed until now, together with whoever else asks."""
        asked_s = time.monotonic()
        async with self._reloading:
            if self._checked_s > asked_s:
                return
            await asyncio.sleep(self._checked_s + _LEAST_RELOAD_GAP_S - time.monotonic())
            self._checked_s = time.monotonic()
            revision = await asyncio.to_thread(self._store.revision)
            if revision != self._snapshot.revision:
                self._snapshot = await asyncio.to_thread(self._store.snapshot)

    async def _poll(self) -> None:
        is_lost = False
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await self._reload()
            except DatabaseUnavailable as error:
                # What is known goes on being served: an outage must not lock everybody out.
                if not is_lost:
                    log.warning("accounts are as they were: %s", error)
                is_lost = True
            else:
                is_lost = False


def secret_of(headers: Headers) -> str:
    """Return the key or token that a request shows, "" for none."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and secret.strip():
        return secret.strip()
    # Clients of Anthropic's API have a header of their own.
    return headers.get("x-api-key", "").strip()


def unauthorized(message: str) -> HttpError:
    """Return the fault of a request that names nobody."""
    return HttpError(
        401, message, code="invalid_api_key", headers=(("www-authenticate", "Bearer"),)
    )
