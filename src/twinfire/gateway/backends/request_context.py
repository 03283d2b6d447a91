"""What a backend is told of a request beside its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from twinfire.gateway.routing.route import PdPolicy


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Everything may be left out."""

    affinity: str | None = None
    """Key of the session; later requests of the same one go where its cache is."""
    deadline_s: float | None = None
    """Reading of the event loop's clock after which the request ends with an error."""
    reject_if_busy: bool = False
    """Whether it is refused where it would have to wait for a worker."""
    pd_policy: PdPolicy | None = None
    """Overrides the cluster's own."""
    prediction: bytes = b""
    """What the client expects as output (u32 ids); only whoever decodes has use for it."""
    account: str = ""
    """Who pays; for logs and metrics only."""


NO_CONTEXT = RequestContext()
