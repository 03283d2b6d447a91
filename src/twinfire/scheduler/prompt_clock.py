"""The time that a fair order of prompts is told by: tokens of prompts computed so far.

A prompt's turn is when it would be done had it started alone when it came. So a short one goes
before a long one that began earlier, if it would be done first; and whatever comes once a prompt's
own length has been computed since it came goes behind it. The order is that of virtual finish
times in fair queueing (Demers, Keshav, Shenker 1989).
"""

from __future__ import annotations

START_TOKENS = 64
"""What a prompt counts beside its tokens, so that those that are all but cached are not free."""


class PromptClock:
    """Counts what one scheduler plans."""

    def __init__(self) -> None:
        self._now = 0

    def turn(self, num_uncached: int) -> int:
        """Return the turn of a prompt that comes now with so many tokens to compute."""
        return self._now + START_TOKENS + num_uncached

    def started(self) -> None:
        """Count the start of a prompt."""
        self._now += START_TOKENS

    def computed(self, num_tokens: int) -> None:
        """Count tokens of prompts."""
        self._now += num_tokens
