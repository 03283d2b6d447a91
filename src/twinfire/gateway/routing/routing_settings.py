"""Every number that routing can be told, with what it is when nobody says."""

from __future__ import annotations

from typing import Annotated

import msgspec

from twinfire.gateway.routing.route import PdPolicy

AtLeastZero = Annotated[float, msgspec.Meta(ge=0)]
AboveZero = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1)]
Part = Annotated[float, msgspec.Meta(gt=0, le=1)]


class RoutingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds. Priors hold until something has been measured."""

    pd_policy: PdPolicy = "auto"
    short_suffix_tokens: Count = 64
    """A prompt of which the decode worker lacks at most this is never handed over."""
    interference_weight: AtLeastZero = 0.5
    """What a second of waiting costs a running stream, beside a second of the new request's."""
    work_weight: AtLeastZero = 1.0
    """What a second of a worker's computing costs those who come after, in the same unit."""
    session_escape_s: AtLeastZero = 0.5
    """A session leaves its workers when they cost this much more than the best."""
    first_home_escape_s: AtLeastZero = 0.05
    """The same for a session that has not been served here yet and has nothing cached."""
    session_ttl_s: AboveZero = 3600.0
    max_sessions: PositiveCount = 100_000
    tie_s: AtLeastZero = 0.001
    """Costs nearer than this are equal, and the worker unused for longest is taken."""
    max_prefill_queue_s: AboveZero = 2.0
    """A worker with this much prompt work of a lane is given no more; it waits in the gateway."""
    max_kv_fill: Part = 0.95
    """Part of a worker's blocks that may be charged."""
    max_indexed_blocks: Count = 4_000_000
    """Blocks that the prefix index remembers, counted once per worker that holds them."""
    speculation_s: AtLeastZero = 2.0
    """How long a choice counts as a cache hit to come."""
    min_pull_blocks: Count = 4
    """Fewer blocks are not worth a pull."""
    pull_overhead_s: AtLeastZero = 0.005
    hand_off_overhead_s: AtLeastZero = 0.01
    """What a hand-off adds beside the bytes."""
    prior_prefill_tokens_per_s: AboveZero = 1000.0
    prior_decode_step_s: AboveZero = 0.02
    prior_output_tokens: PositiveCount = 256
    prior_transfer_bytes_per_s: AboveZero = 500e6
    ageing_s: AboveZero = 10.0
    """Waiting this long in the queue is worth one step of priority."""
    max_passed_s: AtLeastZero = 1.0
    """Nobody of its lane passes a request that has waited this long; nobody if it is for blocks."""
    max_queued_requests: Count = 1024
    max_queued_tokens: Count = 8_000_000
    no_worker_wait_s: AtLeastZero = 5.0
    """How long a queued request waits for a worker where there is none."""
