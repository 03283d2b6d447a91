"""Guesses from text that stood before: the choice's own, and past outputs of its tenant.

After SuffixDecoding (arXiv 2411.04975): the longest suffix that was seen before is looked up, and
the most frequent of what followed is taken token by token, with counts as confidence. Instead of
its trees the index is one of hashed anchors, which finds the same places and takes a few tens of
bytes a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from twinfire.engine.drafters.choice_index import ChoiceIndex, ChoiceIndexes, anchor_lengths
from twinfire.engine.drafters.drafter import ChoiceKey, Draft, DraftContext
from twinfire.engine.drafters.past_outputs import SEPARATOR, PastOutputs
from twinfire.engine.drafters.suffix_index import SuffixIndex
from twinfire.engine.drafters.track_record import TrackRecord

_PLACES = 12
"""Earlier places whose continuations are compared."""
_LENGTH_FACTOR = 4
"""A draft is at most so many times as long as what was found again."""
_LEAST_CHANCE = 0.02
"""Tokens that are less likely to be reached and right are not guessed."""


class SuffixDrafter:
    """Owns an index for each running choice and the tenants' past outputs."""

    def __init__(
        self, min_match: int = 1, tree_depth: int = 64, tree_tokens: int = 1 << 18
    ) -> None:
        """`tree_tokens` bounds what is kept of each tenant's outputs; 0 keeps nothing."""
        self._anchors = anchor_lengths(min_match, tree_depth)
        self._max_length = tree_depth
        self._past = PastOutputs(self._anchors, tree_tokens)
        self._choices = ChoiceIndexes(self._anchors)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Return one draft per context; empty where nothing was found again."""
        return [
            self._guess(choice, context)
            for choice, context in zip(self._choices.of(contexts), contexts, strict=True)
        ]

    def ended(self, context: DraftContext) -> None:
        """Learn the output for the tenant; drop the choice."""
        self.forget(context.key)
        self._past.learn(context.tenant, context.tokens, context.num_prompt_tokens)

    def forget(self, key: ChoiceKey) -> None:
        """Drop the choice."""
        self._choices.forget(key)

    def _guess(self, choice: ChoiceIndex, context: DraftContext) -> Draft:
        suffix = context.tokens[-self._max_length :]
        best = _continue(choice.index, suffix, context.limit, self._max_length, choice.record)
        past = self._past.index(context.tenant)
        if past is not None:
            other = _continue(past, suffix, context.limit, self._max_length, choice.record)
            if _expected(other.confidences) > _expected(best.confidences):
                best = other
        if best.token_ids:
            choice.record.expect(len(context.tokens), best.token_ids[0])
        return best


def _continue(
    index: SuffixIndex, suffix: array[int], limit: int, max_length: int, record: TrackRecord
) -> Draft:
    """Follow what most often came after the places where `suffix` was found."""
    places = index.find(suffix, _PLACES, max_length)
    token_ids: list[int] = []
    confidences: list[float] = []
    if places:
        longest = max(length for length, _ in places)
        # A longer match is worth more than several short ones.
        votes = [(place, (length / longest) ** 2) for length, place in places]
        doubt = 1.5 * (1.05 - record.hit_rate)
        chance = 1.0
        for depth in range(min(limit, _LENGTH_FACTOR * longest)):
            token, weight, total = _vote(index.tokens, votes, depth)
            if token == SEPARATOR:
                break
            confidence = weight / (total + doubt / (0.25 + 0.5 * (longest + depth)))
            chance *= confidence
            if chance < _LEAST_CHANCE:
                break
            token_ids.append(token)
            confidences.append(confidence)
            votes = [vote for vote in votes if _at(index.tokens, vote[0] + depth) == token]
    return Draft(token_ids, confidences, "suffix")


def _vote(
    tokens: array[int], votes: Sequence[tuple[int, float]], depth: int
) -> tuple[int, float, float]:
    """Return the token that most weight is for, its weight, and all weight."""
    weights: dict[int, float] = {}
    total = 0.0
    for place, weight in votes:
        token = _at(tokens, place + depth)
        weights[token] = weights.get(token, 0.0) + weight
        total += weight
    # Of equal ones the first, which is the newest.
    best = max(weights, key=weights.__getitem__)
    return best, weights[best], total


def _at(tokens: array[int], place: int) -> int:
    return tokens[place] if place < len(tokens) else SEPARATOR


def _expected(confidences: Sequence[float]) -> float:
    """Return how many tokens are expected to be accepted."""
    expected, chance = 0.0, 1.0
    for confidence in confidences:
        chance *= confidence
        expected += chance
    return expected
