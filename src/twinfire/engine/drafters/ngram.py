"""Guesses what followed the last few tokens when they stood in the same text before.

Prompt lookup: what followed the longest match is taken as it stands; no counts, and no text but
the choice's own.
"""

from __future__ import annotations

from collections.abc import Sequence

from twinfire.engine.drafters.choice_index import ChoiceIndex, ChoiceIndexes, anchor_lengths
from twinfire.engine.drafters.drafter import ChoiceKey, Draft, DraftContext
from twinfire.engine.drafters.track_record import rising_confidences

_PLACES = 8
"""Places that are compared; all are of the newest."""


class NgramDrafter:
    """Owns an index for each running choice."""

    def __init__(self, min_match: int = 2, max_match: int = 8) -> None:
        """Matches of `min_match` to `max_match` tokens count; longer ones are cut."""
        self._max_match = max_match
        self._choices = ChoiceIndexes(anchor_lengths(min_match, max_match))

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Return one draft per context; empty where nothing was found again."""
        return [
            self._guess(choice, context)
            for choice, context in zip(self._choices.of(contexts), contexts, strict=True)
        ]

    def ended(self, context: DraftContext) -> None:
        """Drop the choice; nothing is learned from it."""
        self.forget(context.key)

    def forget(self, key: ChoiceKey) -> None:
        """Drop the choice."""
        self._choices.forget(key)

    def _guess(self, choice: ChoiceIndex, context: DraftContext) -> Draft:
        tokens = context.tokens
        places = choice.index.find(tokens[-self._max_match :], _PLACES, self._max_match)
        if not places or context.limit < 1:
            return Draft([], [], "ngram")
        # Of equally long ones the newest, which stands first: edited and repeated text follows
        # its newest form.
        length, place = max(places, key=lambda found: found[0])
        token_ids = list(tokens[place : place + context.limit])
        choice.record.expect(len(tokens), token_ids[0])
        rate = choice.record.hit_rate
        first = (length + 4.0 * rate) / (length + 5.0)
        return Draft(token_ids, rising_confidences(first, len(token_ids)), "ngram")
