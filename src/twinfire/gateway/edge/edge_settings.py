"""What an operator may choose about an edge. Times in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from twinfire.gateway.exchange import is_header_safe
from twinfire.protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class RegionAddress:
    """A region's name and its gateway."""

    name: str
    url: str
    """Scheme, host and port, without a path."""


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """Everything but the listening address."""

    regions: tuple[RegionAddress, ...]
    health_interval_s: float = 2.0
    health_timeout_s: float = 2.0
    connect_timeout_s: float = 3.0
    silence_timeout_s: float = 660.0
    """A gateway that sends nothing for so long has failed; longer than a request may wait there."""
    max_body_bytes: int = 16 * 1024 * 1024
    max_repeatable_bytes: int = 1024 * 1024
    """A longer body is streamed, and cannot be sent twice once that has begun."""
    drain_timeout_s: float = 30.0


def parse_region(text: str) -> RegionAddress:
    """Return the region of `NAME=URL`; InvalidRequest says what is wrong."""
    name, found, url = text.partition("=")
    parts = urlsplit(url)
    if not found or not name or not is_header_safe(name):
        raise InvalidRequest(f"`{text}` is not a region: write NAME=URL", "region")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"the region `{name}` needs an http(s) URL, not `{url}`", "region")
    if parts.path.rstrip("/") or parts.query:
        raise InvalidRequest(f"the URL of the region `{name}` must not have a path", "region")
    return RegionAddress(name, f"{parts.scheme}://{parts.netloc}")


def check_regions(regions: tuple[RegionAddress, ...]) -> None:
    """Raise InvalidRequest when a name is used twice."""
    names = [region.name for region in regions]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"the region `{name}` is named twice", "region")
