"""Who a request belongs to, and in which order the regions are to be asked for it.

The order is computed from names alone (rendezvous hashing), so that every edge agrees without
telling the others, and a region that comes or goes moves only its own sessions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b, sha256

import msgspec

from twinfire.gateway.edge.region import Region
from twinfire.gateway.exchange import is_header_safe
from twinfire.gateway.routing.session import mint_session, read_session

_BODY_FIELD = b'"prompt_cache_key"'


class _KeyField(msgspec.Struct):
    prompt_cache_key: str | None = None


_DECODER = msgspec.json.Decoder(_KeyField)


@dataclass(frozen=True, slots=True)
class SessionKey:
    """`account` is a hash of the client's key: keys themselves are never kept or compared."""

    account: bytes
    session: str
    """Fit for a header."""

    def ranked(self, regions: Iterable[Region]) -> list[Region]:
        """Return the regions, the session's home first."""
        key = self.account + self.session.encode()
        return sorted(regions, key=lambda region: _score(region.name, key), reverse=True)


def session_key(headers: Mapping[str, str], body: bytes | None) -> SessionKey:
    """Return the key of a request; one that names no session gets a new one.

    `body` is None where it is not all here. InvalidRequest for a name that cannot be one.
    """
    in_body = _named_in_body(body) if body is not None and _BODY_FIELD in body else None
    session = read_session(headers, in_body) or mint_session()
    if not is_header_safe(session):
        session = sha256(session.encode()).hexdigest()
    return SessionKey(account_of(headers), session)


def account_of(headers: Mapping[str, str]) -> bytes:
    """Return the hash of the client's key, of nothing where it sends none."""
    key = headers.get("authorization") or headers.get("x-api-key") or ""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _named_in_body(body: bytes) -> str | None:
    try:
        return _DECODER.decode(body).prompt_cache_key
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # What is wrong with it is the gateway's to say.
        return None


def _score(name: str, key: bytes) -> bytes:
    return blake2b(key, digest_size=8, key=sha256(name.encode()).digest()).digest()
