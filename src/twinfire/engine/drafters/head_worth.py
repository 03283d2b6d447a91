"""Whether a draft head brings more than it takes, by how many streams decode beside each other.

A step of many streams reads the weights once for all of them, so a token more costs little and is
worth little, while the head's time grows with the streams. What pays alone may not pay in a crowd.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

_RATE = 1 / 128
"""Of forgetting, per step."""
_TOKENS_BEFORE_DOUBT = 192
"""About one answer: drafts fail in runs, and who rests loses all sequences that run."""
_LEAST_STEPS_BEFORE_DOUBT = 24
_LEAST_WORTH = 0.8
"""Of what is spent, that must be saved; near 1 it is chance."""
_FIRST_REST_S = 2.0
_LONGEST_REST_S = 120.0


@dataclass(slots=True)
class _Record:
    """What came of steps with about so many streams."""

    saved_s: float = 0.0
    spent_s: float = 0.0
    num_steps: int = 0
    rest_s: float = _FIRST_REST_S
    resting_until_s: float = -1.0


class HeadWorth:
    """Keeps a record for 1, 2, 3 to 4, 5 to 8 ... streams."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: dict[int, _Record] = {}

    def pays(self, num_streams: int) -> bool:
        """Whether to draft for so many streams; a head that did not pay is tried again later."""
        return self._clock() >= self._record(num_streams).resting_until_s

    def note(self, num_streams: int, saved_s: float, spent_s: float) -> None:
        """Record a step: the seconds that accepted drafts saved, and all that drafts took."""
        record = self._record(num_streams)
        record.saved_s += _RATE * (saved_s - record.saved_s)
        record.spent_s += _RATE * (spent_s - record.spent_s)
        record.num_steps += 1
        num_steps = max(_LEAST_STEPS_BEFORE_DOUBT, _TOKENS_BEFORE_DOUBT // max(1, num_streams))
        if record.num_steps < num_steps:
            return
        if record.saved_s < _LEAST_WORTH * record.spent_s:
            record.resting_until_s = self._clock() + record.rest_s
            record.rest_s = min(2 * record.rest_s, _LONGEST_REST_S)
            record.saved_s = record.spent_s = 0.0
            record.num_steps = 0
        elif record.num_steps > 4 * num_steps:
            record.rest_s = _FIRST_REST_S

    def _record(self, num_streams: int) -> _Record:
        return self._records.setdefault(max(0, num_streams - 1).bit_length(), _Record())
