"""How a request was served: by whom, in how many tries, and where the time to its first token went.

Filled by the generation as it goes; read by whoever answers the client or counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinfire.gateway.routing.route import RouteReason
from twinfire.protocol.messages import HandOffTimes


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """Seconds from the submission to the first tokens, in parts that add up to `total_s`."""

    gateway_queue_s: float
    """Waiting in the gateway for a worker, hashing included."""
    lost_s: float
    """Tries that failed before the one that succeeded."""
    prefill_queue_s: float
    """At the worker that computed the prompt, before its first step."""
    prefill_s: float
    transfer_s: float
    """What moving the blocks added after the prompt was computed."""
    decode_queue_s: float
    """Waiting for blocks on the decode worker, and its acceptance of the hand-off."""
    first_decode_s: float
    """The rest: messages between the parts, and the step that they waited for."""

    @property
    def total_s(self) -> float:
        """All of it."""
        return (
            self.gateway_queue_s
            + self.lost_s
            + self.prefill_queue_s
            + self.prefill_s
            + self.transfer_s
            + self.decode_queue_s
            + self.first_decode_s
        )


@dataclass(slots=True)
class RouteRecord:
    """One request's way. Worker fields are of the try that gave the first token."""

    decode: str = ""
    """Instance id of the worker that decodes; empty until one has accepted."""
    prefill: str | None = None
    """Instance id of another worker that computed the prompt."""
    reason: RouteReason | None = None
    cached_tokens: int = 0
    """Prompt tokens that nobody computed for this request."""
    pulled_tokens: int = 0
    """Of these, those that came from another worker's cache."""
    hand_off: HandOffTimes | None = None
    first_token: FirstTokenTimes | None = None
    num_attempts: int = 0
    """Tries of all choices together, the successful one included."""
    num_resumes: int = 0
    """Choices that went on elsewhere after their worker was lost."""
    num_hand_overs: int = 0
    """Choices that were handed over anew after a preemption."""
