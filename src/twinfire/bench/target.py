"""Which server is talked to, and how. Plain data, cheap to import: the command line needs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from twinfire.bench.request import Api, JsonValue

DEFAULT_TIMEOUT_S = 600.0
SESSION_HEADER = "x-session-affinity"


@dataclass(frozen=True, slots=True)
class Target:
    """Which server, how to address it."""

    url: str
    """With or without a trailing `/v1`."""
    model: str | None = None
    """None takes the first of `/v1/models`."""
    api: Api = "chat"
    api_key: str | None = None
    session_header: str = SESSION_HEADER
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Of one whole request."""
    extra_body: Mapping[str, JsonValue] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """The URL that `/health` and `/v1/...` are appended to."""
        return self.url.rstrip("/").removesuffix("/v1")
