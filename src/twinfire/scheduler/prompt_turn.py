"""Whose prompt is computed first: whoever has waited longest for what it still needs.

Time is told in tokens of prompts that were computed. A prompt of few tokens that has waited for one
step of a long one has waited long for them, so short prompts pass long ones. Whoever is passed
waits on, and newcomers have not waited at all, so nobody is passed for ever; under overload all are
slowed down alike. The order is that of the highest response ratio (Brinch Hansen 1971), taken anew
for each step. What is left counts, so that of two of a length the one that has begun goes on, but
never as less than half: the end of a long prompt is still many short ones.
"""

from __future__ import annotations

START_TOKENS = 64
"""What a prompt counts beside its tokens: even one that is all but cached takes part of a step."""


class PromptClock:
    """The tokens of prompts that one scheduler has computed."""

    def __init__(self) -> None:
        self.now = 0


class PromptTurn:
    """The place of a prompt that came when it was made, of `num_uncached` tokens to compute."""

    __slots__ = ("_came_at", "_clock", "_num_uncached")

    def __init__(self, clock: PromptClock, num_uncached: float) -> None:
        """With infinitely many tokens it is never slowed down: turns are then as they came."""
        self._clock = clock
        self._came_at = clock.now
        self._num_uncached = max(0, num_uncached)

    def slowdown(self, num_left: int | None = None) -> float:
        """Return the tokens waited for each that is left to compute, all of its own if not told.

        The highest is first, then who came first.
        """
        own = self._num_uncached
        left = own if num_left is None else max(num_left, own / 2)
        return (self._clock.now - self._came_at) / (START_TOKENS + left)
