"""A batch, its requests and what became of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BatchStatus = Literal["queued", "running", "done", "cancelled", "expired"]


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a batch may be and how it is computed. Times in seconds."""

    max_body_bytes: int = 10_000_000
    max_requests: int = 10_000
    max_open_requests: int = 100_000
    """Requests of one account that have no result yet, over all its batches."""
    max_reference_chars: int = 1024
    expires_s: float = 24 * 3600.0
    """From its arrival; what has no result by then never gets one."""
    keep_results_s: float = 24 * 3600.0
    """From its end to its removal."""
    lease_s: float = 20.0
    """How long a request stays with a gateway that is not heard of."""
    poll_s: float = 1.0
    """How often to look for requests that other gateways took in or left behind."""
    max_attempts: int = 5
    """Of a request at whose attempts the worker or the engine failed."""
    retry_s: float = 0.5
    """Before the second attempt; each wait is twice the one before, as a worker needs to start."""
    share_alone: float = 0.5
    """Of the workers' sequences, for batches when nobody else is served."""
    share_beside: float = 1 / 16
    """The same while others are served; at least one."""


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch as it is taken in."""

    batch_id: str
    account_id: str
    model: str
    bodies: tuple[bytes, ...]
    """JSON, as the client sent each request."""
    references: tuple[str | None, ...]
    """The client's own names of the requests."""


@dataclass(frozen=True, slots=True)
class ClaimedRequest:
    """A request that this gateway is to compute."""

    batch_id: str
    account_id: str
    model: str
    number: int
    body: bytes
    num_attempts: int
    """Earlier ones that failed."""

    @property
    def key(self) -> tuple[str, int]:
        """What names it."""
        return self.batch_id, self.number


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What became of one request."""

    is_success: bool
    result: bytes
    """JSON."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One request with its outcome."""

    number: int
    reference: str | None
    outcome: RequestOutcome


@dataclass(frozen=True, slots=True)
class BatchState:
    """A batch by now."""

    batch_id: str
    model: str
    status: BatchStatus
    num_requests: int
    num_finished: int
