"""Requests whose prompts other workers compute: blocks reserved here until they are adopted."""

from __future__ import annotations

from twinfire.engine.hand_off import Reservation
from twinfire.engine.request import Request
from twinfire.protocol.peer_messages import HandOffKey
from twinfire.scheduler.scheduler import Scheduler
from twinfire.scheduler.sequence import Sequence


class IncomingPrompts:
    """Reservations by key, and those that there was no room for yet.

    The sequences of neither are waiting or running in the scheduler. Unpacking and hashing a long
    prompt takes milliseconds, which a full worker must not spend at every look for room.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._block_size = scheduler.config.block_size
        self._reserved: dict[HandOffKey, tuple[Request, Sequence]] = {}
        self._waiting: dict[HandOffKey, tuple[Request, Sequence]] = {}

    def __len__(self) -> int:
        return len(self._reserved)

    def __contains__(self, key: HandOffKey) -> bool:
        return key in self._reserved

    def waiting(self, key: HandOffKey) -> tuple[Request, Sequence] | None:
        """Return what there was no room for at the last try."""
        return self._waiting.get(key)

    def wait(self, request: Request, sequence: Sequence) -> None:
        """Keep both for another try."""
        self._waiting[request.key] = request, sequence

    def reserve(self, request: Request, sequence: Sequence) -> Reservation | None:
        """Take the blocks of a request's tokens; None, keeping both, while there is no room."""
        if not self._scheduler.reserve(sequence):
            self.wait(request, sequence)
            return None
        self._waiting.pop(request.key, None)
        self._reserved[request.key] = request, sequence
        num_cached = sequence.num_computed_tokens // self._block_size
        return Reservation(request.key, tuple(sequence.block_ids), num_cached)

    def request(self, key: HandOffKey) -> Request:
        """Return the request of a reservation; KeyError if there is none."""
        return self._reserved[key][0]

    def take(self, key: HandOffKey) -> Sequence:
        """Forget a reservation whose blocks are filled; return its sequence, which may run."""
        _, sequence = self._reserved.pop(key)
        self._scheduler.adopt(sequence)
        return sequence

    def release(self, key: HandOffKey) -> None:
        """Free a reservation's blocks, or forget one that waits; unknown keys are ignored."""
        self._waiting.pop(key, None)
        _, sequence = self._reserved.pop(key, (None, None))
        if sequence is not None:
            self._scheduler.finish(sequence)
