"""Signs of life of one worker: that frames come, and that its engine gets on.

The engine's own counter counts, not the messages: a link's thread answers for an engine that is
stuck.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LivenessLimits:
    """When a worker counts as lost."""

    silent_s: float = 3.0
    """Without any frame; workers send one each second."""
    stall_s: float = 60.0
    """With work, and without the engine's counter moving. The counter moves once a step, and a step
    of a thousand prompt tokens takes a slow or crowded machine tens of seconds."""
    sweep_s: float = 0.25
    """How often is looked."""


class Liveness:
    """What has been seen of one worker."""

    def __init__(self, now_s: float, step: int) -> None:
        self._heard_s = now_s
        self._step = step
        self._step_s = now_s

    @property
    def heard_s(self) -> float:
        """When something was last known to have come."""
        return self._heard_s

    def excuse(self, seconds: float) -> None:
        """Do not count a time in which the gateway itself could not listen."""
        self._heard_s += seconds
        self._step_s += seconds

    def problem(
        self, now_s: float, *, was_heard: bool, step: int, has_work: bool, limits: LivenessLimits
    ) -> str | None:
        """Take what came since the last look; return why the worker is given up, if it is."""
        if was_heard:
            self._heard_s = now_s
        if step != self._step or not has_work:
            self._step = step
            self._step_s = now_s
        if now_s - self._heard_s > limits.silent_s:
            return f"the worker said nothing for {limits.silent_s:g} s"
        if now_s - self._step_s > limits.stall_s:
            return f"the worker's engine stood still for {limits.stall_s:g} s with work to do"
        return None
