"""What every drafter is: it guesses tokens, and says how sure it is of each.

A wrong guess costs time, never a wrong token: the verifier draws every token from the model. A
drafter only reads the tokens it is shown, and keeps no state of a choice beyond its `ended` or
`forget`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

ChoiceKey = tuple[str, int, int]
"""Gateway id, request id, choice index."""


@dataclass(slots=True, eq=False)
class DraftContext:
    """One choice whose next token is to be drawn; the same object in every step of its life.

    `tokens` (type code "I") are prompt and output so far. They only grow, between calls, and a
    drafter never changes them. `tenant` is the cache salt: what is learned from one tenant's
    outputs is never shown to another. `prediction` are tokens the client expects as output.
    """

    key: ChoiceKey
    tokens: array[int]
    num_prompt_tokens: int
    tenant: str = ""
    prediction: Sequence[int] = ()
    limit: int = 0
    """Most drafts that are of use now."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens that follow a context, the nearest first."""

    token_ids: list[int]
    confidences: list[float]
    """[len(token_ids)] estimated chance that token i is accepted once all before it are."""
    source: str
    """Which drafter guessed: "ngram", "suffix", "eagle3"."""

    def first(self, count: int) -> Draft:
        """Return the first `count` tokens of it."""
        return Draft(self.token_ids[:count], self.confidences[:count], self.source)


def num_right(guessed: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many of the guesses, from the first on, are what was drawn in their place."""
    count = 0
    for guess, token_id in zip(guessed, drawn, strict=False):
        if guess != token_id:
            break
        count += 1
    return count


class Drafter(Protocol):
    """Guesses what follows."""

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """One draft per context, in their order, of at most `limit` tokens; empty for no guess."""

    def ended(self, context: DraftContext) -> None:
        """The choice is complete: learn its output for its tenant, drop the rest."""

    def forget(self, key: ChoiceKey) -> None:
        """The choice was cancelled, or goes on elsewhere: drop its state, learn nothing."""
