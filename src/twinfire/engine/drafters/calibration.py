"""What a drafter's confidence is worth, learned from verdicts and slowly forgotten.

Each source says how sure it is in its own way. Here its confidences are grouped, and each group's
share of accepted tokens is what counts, for all positions of a draft and for each kind of
position; what a group has not seen is taken from the wider one, first of all from the confidence
itself times how right the source has been on the whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from twinfire.engine.drafters.drafter import Draft

_EDGES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.96, 0.98)
_POSITION_EDGES = (1, 2, 4, 8)
_SOURCE_DOUBT = 4.0
"""Tokens of good behaviour that a source is credited with at first."""
_GROUP_DOUBT = 4.0
"""Verdicts that what is known of the wider group counts like."""
_POSITION_DOUBT = 8.0
_KEPT = 1.0 - 1.0 / 256.0
"""What of the earlier verdicts remains at each new one."""


class Calibration:
    """One table for each source."""

    def __init__(self) -> None:
        self._sources: dict[str, _Source] = {}

    def chances(self, draft: Draft) -> list[float]:
        """Return [tokens] the chance that each token is accepted once all before it are."""
        source = self._sources.get(draft.source)
        if source is None:
            return draft.confidences
        return [source.chance(place, value) for place, value in enumerate(draft.confidences)]

    def expected(self, draft: Draft) -> float:
        """Return how many tokens of the draft are expected to be accepted."""
        expected, chance = 0.0, 1.0
        for value in self.chances(draft):
            chance *= value
            expected += chance
        return expected

    def mean_accepted(self, source: str) -> float:
        """Return how many tokens of a draft were accepted lately; 1 of a source not seen yet."""
        known = self._sources.get(source)
        return known.brought.share(1.0, _SOURCE_DOUBT) if known is not None else 1.0

    def note(self, source: str, confidences: Sequence[float], num_accepted: int) -> None:
        """Learn that of the tokens checked with these confidences so many were accepted."""
        if not confidences:
            return
        known = self._sources.get(source)
        if known is None:
            known = self._sources[source] = _Source()
        known.note(confidences, num_accepted)


class _Tally:
    """Accepted and expected out of all, the latest counting most."""

    __slots__ = ("accepted", "tried")

    def __init__(self) -> None:
        self.accepted = 0.0
        self.tried = 0.0

    def add(self, accepted: float, weight: float) -> None:
        self.accepted = self.accepted * _KEPT + accepted
        self.tried = self.tried * _KEPT + weight

    def share(self, prior: float, doubt: float) -> float:
        return (self.accepted + prior * doubt) / (self.tried + doubt)


class _Source:
    def __init__(self) -> None:
        self._whole = _Tally()
        """Accepted over the sum of confidences, so that its share is a factor."""
        self._groups = [_Tally() for _ in range(len(_EDGES) + 1)]
        self._positions = [
            [_Tally() for _ in range(len(_EDGES) + 1)] for _ in range(len(_POSITION_EDGES) + 1)
        ]
        self.brought = _Tally()
        """Accepted tokens over drafts."""

    def chance(self, place: int, confidence: float) -> float:
        group = bisect_right(_EDGES, confidence)
        factor = self._whole.share(1.0, _SOURCE_DOUBT)
        wider = self._groups[group].share(min(1.0, confidence * factor), _GROUP_DOUBT)
        tally = self._positions[bisect_right(_POSITION_EDGES, place)][group]
        return tally.share(wider, _POSITION_DOUBT)

    def note(self, confidences: Sequence[float], num_accepted: int) -> None:
        # What stands behind the first rejected token was never judged.
        for place, confidence in enumerate(confidences[: num_accepted + 1]):
            is_accepted = place < num_accepted
            group = bisect_right(_EDGES, confidence)
            self._whole.add(is_accepted, confidence)
            self._groups[group].add(is_accepted, 1.0)
            self._positions[bisect_right(_POSITION_EDGES, place)][group].add(is_accepted, 1.0)
        self.brought.add(num_accepted, 1.0)
