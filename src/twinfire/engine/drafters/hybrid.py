"""Two drafters as one: the first where it is sure enough, the second elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from twinfire.engine.drafters.calibration import Calibration
from twinfire.engine.drafters.drafter import ChoiceKey, Draft, DraftContext, Drafter


class HybridDrafter:
    """Takes the draft that more tokens are expected of, by what was seen of each source.

    The second drafter is one that costs a pass of a model, so it is asked only where the first
    promises no more than the second's drafts have brought.
    """

    def __init__(self, first: Drafter, second: Drafter, calibration: Calibration) -> None:
        """`calibration` is the one that verdicts are noted in (`DraftLengths.calibration`)."""
        self._first = first
        self._second = second
        self._calibration = calibration
        self._second_source = ""

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """Return one draft per context, each of one drafter."""
        drafts = self._first.propose(contexts)
        needed = self._calibration.mean_accepted(self._second_source)
        unsure = [
            number
            for number, draft in enumerate(drafts)
            if contexts[number].limit > 0
            and (not draft.token_ids or self._calibration.expected(draft) < needed)
        ]
        if not unsure:
            return drafts
        others = self._second.propose([contexts[number] for number in unsure])
        for number, other in zip(unsure, others, strict=True):
            if other.token_ids:
                self._second_source = other.source
            if self._calibration.expected(other) > self._calibration.expected(drafts[number]):
                drafts[number] = other
        return drafts

    def ended(self, context: DraftContext) -> None:
        """Tell both."""
        self._first.ended(context)
        self._second.ended(context)

    def forget(self, key: ChoiceKey) -> None:
        """Tell both."""
        self._first.forget(key)
        self._second.forget(key)
