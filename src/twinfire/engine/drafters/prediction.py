"""Guesses from what a client says the output will be (OpenAI's `prediction`).

The prediction is followed while the output says the same. After another word the place is found
again by the last tokens of the output: the longest match, and of equal ones the next after the
place where they parted, as edits leave most of a text in its order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from twinfire.engine.drafters.drafter import ChoiceKey, Draft, DraftContext
from twinfire.engine.drafters.suffix_index import SuffixIndex
from twinfire.engine.drafters.track_record import TrackRecord, rising_confidences

_ANCHORS = (2, 4, 8)
_MAX_LENGTH = 32
_PLACES = 16
_START_TRUST = 0.8
"""A client predicts because it knows."""


class PredictionDrafter:
    """Owns a place in its prediction for each running choice that has one."""

    def __init__(self) -> None:
        self._followers: dict[ChoiceKey, _Follower] = {}

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Return one draft per context; empty where there is no prediction, or it is left."""
        return [self._guess(context) for context in contexts]

    def ended(self, context: DraftContext) -> None:
        """Drop the choice; a prediction says nothing of other requests."""
        self.forget(context.key)

    def forget(self, key: ChoiceKey) -> None:
        """Drop the choice."""
        self._followers.pop(key, None)

    def _guess(self, context: DraftContext) -> Draft:
        if not len(context.prediction):
            return Draft([], [], "prediction")
        follower = self._followers.get(context.key)
        if follower is None:
            follower = self._followers[context.key] = _Follower(context)
        return follower.guess(context)


class _Follower:
    """Where in its prediction an output stands."""

    def __init__(self, context: DraftContext) -> None:
        self._prediction = array("I", context.prediction)
        self._index = SuffixIndex(self._prediction, _ANCHORS, len(self._prediction))
        self._num_followed = context.num_prompt_tokens
        self._place: int | None = 0
        self._parted_at = 0
        self._run = 0
        """Tokens that were the same in a row."""
        self._record = TrackRecord(_START_TRUST)

    def guess(self, context: DraftContext) -> Draft:
        self._record.judge(context.tokens)
        self._follow(context.tokens)
        if self._place is None:
            self._find_again(context)
        place = self._place
        if place is None or context.limit < 1 or place >= len(self._prediction):
            return Draft([], [], "prediction")
        token_ids = list(self._prediction[place : place + context.limit])
        self._record.expect(len(context.tokens), token_ids[0])
        first = (self._run + 10.0 * self._record.hit_rate) / (self._run + 10.5)
        return Draft(token_ids, rising_confidences(first, len(token_ids)), "prediction")

    def _follow(self, tokens: array[int]) -> None:
        prediction = self._prediction
        for token in tokens[self._num_followed :]:
            place = self._place
            if place is not None:
                if place < len(prediction) and prediction[place] == token:
                    self._place, self._run = place + 1, self._run + 1
                else:
                    self._place, self._parted_at, self._run = None, place, 0
        self._num_followed = len(tokens)

    def _find_again(self, context: DraftContext) -> None:
        # Piece by piece would gain nothing: a prediction is no longer than an answer.
        self._index.add_until(len(self._prediction) - 1)
        num_output_tokens = len(context.tokens) - context.num_prompt_tokens
        suffix = context.tokens[-min(num_output_tokens, _MAX_LENGTH) :]
        found = self._index.find(suffix, _PLACES, _MAX_LENGTH)
        if found:
            parted = self._parted_at
            self._run, self._place = max(
                found, key=lambda one: (one[0], one[1] > parted, -abs(one[1] - parted))
            )
