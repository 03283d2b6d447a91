"""How often the guesses made for one choice came true lately, whether they were checked or not."""

from __future__ import annotations

from array import array

_MEMORY = 0.9
"""Weight of what was known when one more guess is judged."""

_DOUBT_KEPT = 0.9
"""Of the doubt in a token, what is left for the next, once that one was right."""


def rising_confidences(first: float, count: int) -> list[float]:
    """Return [count] confidences along a text that is copied: what was right goes on being so."""
    return [1.0 - (1.0 - first) * _DOUBT_KEPT**depth for depth in range(count)]


class TrackRecord:
    """Judges the first token of each draft by the token that came."""

    __slots__ = ("_guess", "_place", "hit_rate")

    def __init__(self, start: float = 0.3) -> None:
        """`start` is the hit rate before anything was judged."""
        self.hit_rate = start
        """Share of guesses that were right, the latest counting most."""
        self._guess = -1
        self._place = 0

    def expect(self, place: int, token_id: int) -> None:
        """Remember what was guessed for the position `place`."""
        self._place, self._guess = place, token_id

    def judge(self, tokens: array[int]) -> None:
        """Look at what came, once `tokens` have grown."""
        if self._guess < 0 or self._place >= len(tokens):
            return
        is_hit = tokens[self._place] == self._guess
        self.hit_rate += (1.0 - _MEMORY) * (is_hit - self.hit_rate)
        self._guess = -1
