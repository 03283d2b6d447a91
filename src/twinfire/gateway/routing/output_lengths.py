"""How long answers of this model really are."""

from __future__ import annotations


class OutputLengths:
    """A running average over about the last `window` answers."""

    def __init__(self, prior_tokens: int, window: int = 256) -> None:
        self.mean_tokens = float(prior_tokens)
        self._count = 0
        self._window = window

    def observe(self, num_tokens: int) -> None:
        """Count one answer that ran to its end."""
        self._count = min(self._count + 1, self._window)
        self.mean_tokens += (num_tokens - self.mean_tokens) / self._count

    def expected(self, max_tokens: int, num_output_tokens: int = 0) -> int:
        """Tokens still to come of an answer that has `num_output_tokens`.

        `max_tokens` bounds the whole; an answer that has outlived the mean is expected to go on
        for as long as any other (lengths have no memory).
        """
        return max(min(max_tokens - num_output_tokens, round(self.mean_tokens)), 0)
