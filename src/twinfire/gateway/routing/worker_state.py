"""What the gateway knows of one worker's life.

A process that comes back is another instance and gets another state; charges keep the state that
they were put on, so that old ones never touch the new.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from twinfire.gateway.routing.lane import Lane
from twinfire.gateway.routing.ledger import Ledger, LedgerEntry, LedgerShare
from twinfire.gateway.routing.step_time import StepTime
from twinfire.protocol.messages import Load, WorkerInfo

ACKNOWLEDGE_AFTER_S = 1.0
"""A charge whose request id cannot tell (a retry, or none given) counts as reported after this."""

_CHUNK_BLOCKS = 32
"""Where the worker does not say."""


class _Unacknowledged:
    __slots__ = ("charged_s", "entry", "request_id")

    def __init__(self, entry: LedgerEntry, request_id: int | None, charged_s: float) -> None:
        self.entry = entry
        self.request_id = request_id
        self.charged_s = charged_s


class WorkerState:
    """Ledgers, measured speeds and standing of one instance."""

    __slots__ = (
        "_short_prompts",
        "_unacknowledged",
        "awaited_lanes",
        "chunk_blocks",
        "decode",
        "draining",
        "info",
        "instance_id",
        "last_charge",
        "last_used",
        "num_blocks",
        "num_reported_running",
        "prefill",
        "prefill_tokens_per_s",
        "rendezvous_seed",
        "role",
        "step_time",
        "step_tokens",
    )

    def __init__(self, info: WorkerInfo, prior_step_s: float) -> None:
        self.info = info
        self.instance_id = info.instance_id
        self.rendezvous_seed = rendezvous_seed(info.instance_id)
        self.role = info.role
        self.draining = False
        self.num_blocks = info.num_kv_blocks
        self.chunk_blocks = info.max_num_batched_tokens // info.block_size or _CHUNK_BLOCKS
        """Blocks of a prompt that one step computes at most."""
        self.step_tokens = info.max_num_batched_tokens or self.chunk_blocks * info.block_size
        """Tokens of a prompt that one step computes at most."""
        self.prefill = Ledger()
        """Uncomputed prompt tokens, queued and running."""
        self.decode = Ledger()
        """KV blocks in use, with what our requests are expected to grow by."""
        self.prefill_tokens_per_s = 0.0
        """Measured; 0 before the first prompt."""
        self.step_time = StepTime(prior_step_s)
        self.num_reported_running = 0
        self.awaited_lanes: set[Lane] = set()
        """Lanes in which a prompt was refused."""
        self.last_charge = 0
        self.last_used = 0
        """Number of the router's choice that took it last."""
        self._short_prompts = LedgerShare()
        self._unacknowledged: list[_Unacknowledged] = []

    @property
    def num_streams(self) -> int:
        """Requests that would be held up by a prompt computed here."""
        if self.role == "prefill":
            return 0
        reported, own = self.num_reported_running, self.decode.num_entries
        return reported if reported > own else own

    def lane(self, num_to_compute: int) -> Lane:
        """Return the lane of a prompt of which the worker has to compute so many tokens."""
        return "short" if num_to_compute <= self.step_tokens else "long"

    def queued_tokens(self, lane: Lane) -> int:
        """Uncomputed prompt tokens of one lane; what others put here counts as long."""
        short = min(self._short_prompts.charged, self.prefill.load)
        return short if lane == "short" else self.prefill.load - short

    def charge_prefill(self, tokens: int, request_id: int | None, now_s: float) -> LedgerEntry:
        """Charge prompt tokens that the worker is about to be sent."""
        is_short = self.lane(tokens) == "short"
        entry = self.prefill.open(tokens, self._short_prompts if is_short else None)
        covered = request_id is not None and request_id <= self.last_charge
        known_id = None if covered else request_id
        self._unacknowledged.append(_Unacknowledged(entry, known_id, now_s))
        return entry

    def observe_load(self, load: Load, now_s: float) -> None:
        """Take a report; everything else of its frame must have been applied before."""
        self.last_charge = max(self.last_charge, load.last_charge)
        if self._unacknowledged:
            self._unacknowledged = list(self._still_unacknowledged(now_s))
        self.prefill.report(load.prefill_tokens_waiting)
        self.decode.report(load.kv_blocks_used)
        self.num_reported_running = load.running
        if load.prefill_tokens_per_s > 0:
            self.prefill_tokens_per_s = load.prefill_tokens_per_s
        if load.decode_step_s > 0:
            self.step_time.observe(load.kv_blocks_used, load.decode_step_s)

    def _still_unacknowledged(self, now_s: float) -> Iterable[_Unacknowledged]:
        for waiting in self._unacknowledged:
            if waiting.request_id is not None:
                known = waiting.request_id <= self.last_charge
            else:
                known = now_s - waiting.charged_s >= ACKNOWLEDGE_AFTER_S
            if known:
                waiting.entry.see(waiting.entry.charged)
            elif waiting.entry.charged:
                yield waiting


def rendezvous_seed(name: str) -> int:
    """Return 64 bits of a name, the same in every process."""
    encoded = name.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(encoded, digest_size=8).digest())
