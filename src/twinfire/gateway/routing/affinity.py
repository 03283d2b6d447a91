"""Which workers a session is at home on, separately for prompts and for decoding.

A session that has been served is bound to its workers for a time. One that has not, here, is at
home where rendezvous hashing of its name says, so that gateways agree without telling each other.
A home is a preference: the policy leaves it when it costs too much.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from twinfire.gateway.routing.worker_state import WorkerState, rendezvous_seed

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Home:
    """Preferred workers of one session; None where all are as good."""

    prefill: WorkerState | None = None
    decode: WorkerState | None = None
    is_bound: bool = False
    """Whether the session was served there, which makes its cache likely."""


@dataclass(slots=True)
class _Binding:
    decode: str
    prefill: str | None
    expires_s: float


class SessionBindings:
    """Bounded; the sessions unused for longest are forgotten first."""

    def __init__(self, ttl_s: float, max_sessions: int) -> None:
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._bindings: OrderedDict[str, _Binding] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bindings)

    def bind(self, session: str, *, decode: str, prefill: str | None, now_s: float) -> None:
        """Remember who serves the session; without a prefill worker that of before stays."""
        known = self._bindings.pop(session, None)
        if prefill is None and known is not None:
            prefill = known.prefill
        self._bindings[session] = _Binding(decode, prefill, now_s + self._ttl_s)
        while len(self._bindings) > self._max_sessions:
            self._bindings.popitem(last=False)

    def home(
        self,
        session: str | None,
        prefill: Sequence[WorkerState],
        decode: Sequence[WorkerState],
        now_s: float,
    ) -> Home:
        """Return where the session is at home among these workers."""
        if session is None:
            return Home()
        binding = self._bindings.get(session)
        if binding is not None and binding.expires_s <= now_s:
            del self._bindings[session]
            binding = None
        bound_prefill = bound_decode = None
        if binding is not None:
            bound_prefill = _named(binding.prefill, prefill)
            bound_decode = _named(binding.decode, decode)
        return Home(
            bound_prefill or rendezvous(session, prefill),
            bound_decode or rendezvous(session, decode),
            bound_decode is not None,
        )


def rendezvous(session: str, workers: Sequence[WorkerState]) -> WorkerState | None:
    """Return the worker of the highest hash with the session; few move when workers come or go."""
    if not workers:
        return None
    name = rendezvous_seed(session)
    return max(workers, key=lambda worker: _mixed(name ^ worker.rendezvous_seed))


def _mixed(bits: int) -> int:
    """Spread 64 bits so that each of the result depends on all (the finaliser of splitmix64)."""
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _MASK
    return bits ^ bits >> 31


def _named(instance_id: str | None, workers: Sequence[WorkerState]) -> WorkerState | None:
    return next((one for one in workers if one.instance_id == instance_id), None)
