"""`--otlp-endpoint URL`: where traces of requests go."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol
from urllib.parse import urlsplit

from twinfire.protocol.errors import InvalidRequest

_NAME = "otlp-endpoint"


class _Arguments(Protocol):
    def add_argument(self, name: str, /, *, metavar: str, help: str) -> object: ...


def add_tracing_argument(parser: _Arguments) -> None:
    """Declare the option."""
    parser.add_argument(
        f"--{_NAME}",
        metavar="URL",
        help="send OpenTelemetry traces of requests to this OTLP/HTTP collector, such as "
        "http://127.0.0.1:4318 (needs twinfire[otel])",
    )


def checked_endpoint(url: str | None) -> str | None:
    """Return the URL; InvalidRequest for what is none, and where OpenTelemetry is missing."""
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_http = False
    if not is_http:
        raise InvalidRequest(f"--{_NAME} takes an http:// or https:// URL, got {url!r}", _NAME)
    packages = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
    if not all(map(_is_installed, packages)):
        raise InvalidRequest(f"--{_NAME} needs `pip install 'twinfire[otel]'`", _NAME)
    return url


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
