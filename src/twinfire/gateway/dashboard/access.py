"""Who may see the dashboard's data.

From any host whoever shows the administrator's key or an administrator's token. Where there is no
administrator's key, clients on this host too, with what other paths need of them.
"""

from __future__ import annotations

import hmac
from hashlib import sha256

from twinfire.gateway.accounting.access import secret_of, unauthorized
from twinfire.gateway.errors import HttpError
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.loopback import is_loopback

_NEEDS_KEY = (
    "Sign in with the administrator's key, or with a token of an account that is an administrator."
)
_ONLY_HERE = (
    "Clients on other hosts need an administrator's token, or the key in `admin_key_file` where "
    "the gateway has one."
)
_LOCAL_NAMES = frozenset(("localhost", "ip6-localhost"))


class DashboardAccess:
    """Lets exchanges through or refuses them."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        key = gateway.settings.admin_key
        self._key_digest = None if key is None else sha256(key.encode()).digest()

    async def check(self, exchange: Exchange) -> None:
        """HttpError 401 or 403 for whoever may not see anything."""
        if self._shows_key(exchange):
            return
        is_here = self._key_digest is None and is_loopback(exchange.client_host)
        if not secret_of(exchange.headers) and not is_here:
            raise unauthorized(_NEEDS_KEY if self._key_digest else _ONLY_HERE)
        identity = await self._gateway.accounting.identify(exchange.headers)
        account = identity.account
        if account.has_row:
            if not account.is_admin:
                raise HttpError(403, "The token's account is no administrator.", code="no_admin")
            return
        if not is_here:
            raise unauthorized(_NEEDS_KEY if self._key_digest else _ONLY_HERE)
        # A page of another site whose name leads to this host must not read what its visitor may.
        if not account.is_admin and not _is_local_name(exchange.headers.get("host", "")):
            raise HttpError(
                403, "Without a key the dashboard is at `localhost` only.", code="wrong_host"
            )

    def _shows_key(self, exchange: Exchange) -> bool:
        if self._key_digest is None:
            return False
        # Digests have one length, so comparing them tells nothing of the key's.
        digest = sha256(secret_of(exchange.headers).encode("latin-1")).digest()
        return hmac.compare_digest(digest, self._key_digest)


def _is_local_name(host: str) -> bool:
    """Whether a `host` header means this host, whatever the port."""
    name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower() in _LOCAL_NAMES or is_loopback(name)
