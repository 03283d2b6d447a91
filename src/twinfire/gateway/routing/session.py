"""The name of a session: what a client may send, and what we mint for one that sends none.

A minted name is random and means nothing, so any gateway can serve it: where the session lives is
computed from the name (`affinity`). A request's own id is never taken for a session.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from twinfire.protocol.errors import InvalidRequest

SESSION_HEADERS = ("x-session-affinity", "x-session-id")
"""Read in this order; the body's `prompt_cache_key` comes last."""
SESSION_RESPONSE_HEADERS = ("cf-session-affinity", "x-session-affinity")
MAX_SESSION_CHARS = 256
_MINTED_BYTES = 18


def read_session(headers: Mapping[str, str], prompt_cache_key: str | None = None) -> str | None:
    """Return the session that the client names, None when it names none.

    `headers` has lower-case names. InvalidRequest when a name is too long or not printable.
    """
    for header in SESSION_HEADERS:
        name = headers.get(header, "").strip()
        if name:
            return _checked(name, header)
    return _checked(prompt_cache_key, "prompt_cache_key") if prompt_cache_key else None


def mint_session() -> str:
    """Return a new name that nobody can guess, fit for a header and a URL."""
    return secrets.token_urlsafe(_MINTED_BYTES)


def _checked(name: str, param: str) -> str:
    if len(name) > MAX_SESSION_CHARS:
        raise InvalidRequest(
            f"{param} has {len(name)} characters; the limit is {MAX_SESSION_CHARS}", param=param
        )
    if not name.isprintable():
        raise InvalidRequest(f"{param} has characters that cannot be printed", param=param)
    return name
