"""The text of each running choice, indexed as it grows, in pieces that hold up no step."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from twinfire.engine.drafters.drafter import ChoiceKey, DraftContext
from twinfire.engine.drafters.suffix_index import SuffixIndex
from twinfire.engine.drafters.track_record import TrackRecord

_PIECE_TOKENS = 1 << 15
"""Most tokens that one call adds to indexes: some ten milliseconds of a long prompt."""


class ChoiceIndex:
    """One running choice: where its tokens stood before, and how guesses from there did."""

    __slots__ = ("index", "record")

    def __init__(self, context: DraftContext, anchors: Sequence[int]) -> None:
        self.index = SuffixIndex(context.tokens, anchors, len(context.tokens))
        self.record = TrackRecord()

    def catch_up(self, tokens: array[int], budget: int) -> int:
        """Add what is new, at most `budget` tokens; return how many."""
        self.record.judge(tokens)
        before = self.index.num_added
        # The end itself is no place: nothing follows it yet.
        self.index.add_until(min(len(tokens) - 1, before + budget))
        return self.index.num_added - before


class ChoiceIndexes:
    """Of all running choices, by key."""

    def __init__(self, anchors: Sequence[int]) -> None:
        self._anchors = anchors
        self._choices: dict[ChoiceKey, ChoiceIndex] = {}

    def __len__(self) -> int:
        return len(self._choices)

    def of(self, contexts: Sequence[DraftContext]) -> Iterator[ChoiceIndex]:
        """Yield each one's index. Long new text is found after a few more calls."""
        budget = _PIECE_TOKENS
        for context in contexts:
            choice = self._choices.get(context.key)
            if choice is None or choice.index.tokens is not context.tokens:
                choice = self._choices[context.key] = ChoiceIndex(context, self._anchors)
            budget -= choice.catch_up(context.tokens, budget)
            yield choice

    def forget(self, key: ChoiceKey) -> None:
        """Drop the choice, if it is known."""
        self._choices.pop(key, None)


def anchor_lengths(min_match: int, max_match: int) -> tuple[int, ...]:
    """Return the lengths to index for matches from `min_match` to `max_match` tokens."""
    longer = (length for length in (2, 4, 8) if min_match < length <= max_match)
    return (min_match, *longer)
