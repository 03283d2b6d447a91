"""Which headers go on, in either direction: all but those that are about one connection."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from multidict import CIMultiDict

_HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "upgrade"),
        *("proxy-authenticate", "proxy-authorization", "transfer-encoding"),
    }
)
SESSION_HEADER = "x-session-affinity"
REGION_HEADER = "x-twinfire-region"

RawHeaders = Iterable[tuple[bytes, bytes]]


def request_headers(
    raw: RawHeaders, client_host: str, scheme: str, session: str | None
) -> CIMultiDict[str]:
    """Return what the gateway gets; `session` replaces what the client named, if not None."""
    headers: CIMultiDict[str] = CIMultiDict()
    forwarded = [client_host] if client_host else []
    host = ""
    for name, value in _end_to_end(raw):
        match name.lower():
            case "host":
                host = value
            case "x-forwarded-for":
                forwarded.insert(len(forwarded) - bool(client_host), value)
            case "expect" | "content-length":
                pass
            case _:
                headers.add(name, value)
    if session is not None:
        headers[SESSION_HEADER] = session
    if forwarded:
        headers["x-forwarded-for"] = ", ".join(forwarded)
    headers.setdefault("x-forwarded-proto", scheme)
    if host:
        headers.setdefault("x-forwarded-host", host)
    return headers


def response_headers(raw: RawHeaders, region: str, session: str | None) -> CIMultiDict[str]:
    """Return what the client gets."""
    headers = CIMultiDict(_end_to_end(raw))
    headers[REGION_HEADER] = region
    if session is not None:
        headers.setdefault(SESSION_HEADER, session)
    return headers


def _end_to_end(raw: RawHeaders) -> Iterator[tuple[str, str]]:
    pairs = [(_text(name), _text(value)) for name, value in raw]
    named = [value for name, value in pairs if name.lower() == "connection"]
    dropped = _HOP_BY_HOP | {one.strip().lower() for value in named for one in value.split(",")}
    return ((name, value) for name, value in pairs if name.lower() not in dropped)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
