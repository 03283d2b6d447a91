"""What the router is asked and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from twinfire.gateway.routing.lane import Lane
from twinfire.gateway.routing.route_charge import RouteCharge
from twinfire.protocol.errors import Overloaded, WorkerLost

PdPolicy = Literal["auto", "always", "never"]

RouteReason = Literal[
    "always",
    "cheaper",
    "decode_cheaper",
    "decode_idle",
    "never",
    "no_decode_worker",
    "no_prefill_worker",
    "prefill_busy",
    "short_suffix",
]
"""Why a prompt is computed where it is; a closed set, for a counter.

`always`, `cheaper`: by a prefill worker. All others: by the worker that decodes.
"""


class NoWorker(WorkerLost):
    """No worker of the pool may be asked: none is there, or all are excluded or draining."""


class AllBusy(Overloaded):
    """Every worker that could take the request is full; it may be asked again when one is not."""

    def __init__(self, message: str, retry_after_s: float, lane: Lane | None) -> None:
        """`lane` is the one that is full, None when it is KV blocks that are wanting."""
        super().__init__(message, retry_after_s)
        self.lane = lane


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """One attempt of one request."""

    num_prompt_tokens: int
    block_hashes: Sequence[bytes]
    """Chained hashes of the leading full blocks, of prompt and output so far, root first."""
    max_tokens: int
    """Output tokens allowed to each choice in all."""
    num_output_tokens: int = 0
    """Output so far of a resumed request, which has to be computed like its prompt."""
    affinity: str | None = None
    """Key of the session (`session`)."""
    exclude: frozenset[str] = frozenset()
    """Instance ids that must not be chosen."""
    priority: int = 0
    """Lower is served earlier."""
    pd_policy: PdPolicy | None = None
    """Overrides the router's own."""
    num_choices: int = 1
    request_id: int | None = None
    """As it will be sent, so that load reports can be told to include it (`Load.last_charge`)."""

    @property
    def num_context_tokens(self) -> int:
        """Tokens whose KV is needed before the next token can be drawn."""
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True, slots=True)
class PullHint:
    """Another worker holds more of the prefix than the one that computes the prompt."""

    holder: str
    """Its instance id."""
    num_blocks: int
    """Leading blocks that it is believed to hold."""


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes. Whoever gets one must release its charge, whatever happens."""

    decode: str
    """Instance id."""
    prefill: str | None
    """Instance id; None when the decode worker computes the prompt itself."""
    reason: RouteReason
    uncached_on_decode: int
    """Context tokens that the decode worker is believed not to hold."""
    uncached_on_prefill: int
    """The same of the prefill worker; of the decode worker when it does all of it."""
    num_to_compute: int
    """Context tokens that the worker that computes is expected to, when it has pulled."""
    pull: PullHint | None
    """For the worker that computes the prompt."""
    charge: RouteCharge
