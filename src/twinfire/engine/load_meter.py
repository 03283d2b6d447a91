"""How fast an engine has been lately, measured step by step."""

from __future__ import annotations

import statistics
from collections import deque

from twinfire.scheduler.step_plan import StepPlan

_NUM_STEPS = 16
_MIN_PREFILL_TOKENS = 64
"""Steps that compute fewer say little of the rate at which prompts are computed."""


class LoadMeter:
    """Medians over the last steps of each kind, so that one slow step does not tell."""

    def __init__(self) -> None:
        self._prefill_rates: deque[float] = deque(maxlen=_NUM_STEPS)
        self._decode_steps_s: deque[float] = deque(maxlen=_NUM_STEPS)

    def note(self, plan: StepPlan, elapsed_s: float) -> None:
        """Record a step, which must not be empty."""
        # More than one token of a sequence are a prompt's, or are computed again like one.
        counts = (piece.known_end - piece.start for piece in plan.slices)
        num_prefill_tokens = sum(count for count in counts if count > 1)
        if num_prefill_tokens == 0:
            self._decode_steps_s.append(elapsed_s)
        elif num_prefill_tokens >= _MIN_PREFILL_TOKENS and elapsed_s > 0:
            self._prefill_rates.append(num_prefill_tokens / elapsed_s)

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 before the first such step."""
        return statistics.median(self._prefill_rates) if self._prefill_rates else 0.0

    @property
    def decode_step_s(self) -> float:
        """Seconds of a step that only decodes; 0 before the first."""
        return statistics.median(self._decode_steps_s) if self._decode_steps_s else 0.0
