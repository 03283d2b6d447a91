"""The page's files, as they are in the package, and the headers that confine them.

The page may load nothing from anywhere else, run no inline script or style, and be framed by
nobody. The files hold no data, so they are for everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from twinfire.gateway.errors import HttpError
from twinfire.gateway.exchange import Exchange

_FOLDER = Path(__file__).parent / "static"
_PAGE = "index.html"
_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
SECURITY_HEADERS = (
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("permissions-policy", "camera=(), geolocation=(), microphone=()"),
)


class Assets:
    """The handlers. The files are read when somebody first asks for one."""

    def __init__(self) -> None:
        self._files: Mapping[str, tuple[bytes, str]] = {}

    async def page(self, exchange: Exchange) -> None:
        """`GET /dashboard`."""
        await self._send(exchange, _PAGE)

    async def slashed_page(self, exchange: Exchange) -> None:
        """`GET /dashboard/`: the page's links are relative to the path without a slash."""
        await exchange.answer(b"", 308, (("location", "../dashboard"), *SECURITY_HEADERS))

    async def file(self, exchange: Exchange) -> None:
        """`GET /dashboard/static/{name}`."""
        await self._send(exchange, exchange.path_params["name"])

    async def _send(self, exchange: Exchange, name: str) -> None:
        if not self._files:
            self._files = _read_all()
        if name not in self._files:
            raise HttpError(404, "The dashboard has no such file.")
        body, tag = self._files[name]
        headers = (("etag", tag), ("cache-control", "no-cache"), *SECURITY_HEADERS)
        content_type = _CONTENT_TYPES[Path(name).suffix]
        if exchange.headers.get("if-none-match") == tag:
            await exchange.answer(b"", 304, headers, content_type)
        else:
            await exchange.answer(body, 200, headers, content_type)


def _read_all() -> dict[str, tuple[bytes, str]]:
    files = {path.name: path.read_bytes() for path in _FOLDER.iterdir() if path.is_file()}
    return {
        name: (body, f'"{sha256(body).hexdigest()[:20]}"')
        for name, body in files.items()
        if Path(name).suffix in _CONTENT_TYPES
    }
