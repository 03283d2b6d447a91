"""How many guessed tokens of each draft are worth their rows.

What is maximised is work per second of the step, by measured costs and learned chances. Every row
that the step has anyway counts as one token of work, so that guesses also give way to prompts that
are computed beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

from twinfire.engine.drafters.calibration import Calibration
from twinfire.engine.drafters.drafter import Draft
from twinfire.engine.drafters.step_costs import StepCosts

_LEAST_GAIN = 1.02
"""What guesses must promise over none: less is within the error of costs and chances."""
_TRIAL_SHARE = 0.005
"""Of all time, for guesses that do not seem to pay, so that a source can recover."""
_MOST_SAVED_STEPS = 2.0
"""Time saved for trials, in steps; more would be spent in a burst."""


class DraftLengths:
    """Chooses, and learns from what became of the guesses."""

    def __init__(self, costs: StepCosts, max_drafts: int, *, is_adaptive: bool = True) -> None:
        """At most `max_drafts` tokens of a draft; all of them always if not `is_adaptive`."""
        self.calibration = Calibration()
        self._costs = costs
        self._max_drafts = max_drafts
        self._is_adaptive = is_adaptive
        self._trial_s = 0.0

    def choose(
        self, drafts: Sequence[Draft], num_other_rows: int, num_free_rows: int | None = None
    ) -> list[int]:
        """Return [drafts] how many tokens of each to check in a step.

        Each draft's sequence has a row of its own anyway; `num_other_rows` are all further ones.
        At most `num_free_rows` tokens of all drafts are chosen; None sets no limit.
        """
        if not self._is_adaptive:
            return [min(len(draft.token_ids), self._max_drafts) for draft in drafts]
        lengths = [0] * len(drafts)
        offers = self._offers(drafts)[:num_free_rows]
        if not offers:
            return lengths
        num_rows = len(drafts) + num_other_rows
        least_s = self._costs.seconds(num_rows)
        best_rate, best_count, gain = _LEAST_GAIN * num_rows / least_s, 0, 0.0
        for count, (chance, _) in enumerate(offers, start=1):
            gain += chance
            rate = (num_rows + gain) / self._costs.seconds(num_rows + count)
            if rate > best_rate:
                best_rate, best_count = rate, count
        for _, number in offers[:best_count]:
            lengths[number] += 1
        self._trial_s = min(self._trial_s + _TRIAL_SHARE * least_s, _MOST_SAVED_STEPS * least_s)
        if best_count < len(offers):
            taken = num_rows + best_count
            extra_s = self._costs.seconds(taken + 1) - self._costs.seconds(taken)
            if extra_s <= self._trial_s:
                self._trial_s -= extra_s
                lengths[offers[best_count][1]] += 1
        return lengths

    def note_verdict(self, source: str, confidences: Sequence[float], num_accepted: int) -> None:
        """Learn that of tokens judged with these confidences the first `num_accepted` were right.

        The token drawn behind the last checked one judges one more for nothing, also where none
        was checked: pass its confidence too.
        """
        self.calibration.note(source, confidences, num_accepted)

    def _offers(self, drafts: Sequence[Draft]) -> list[tuple[float, int]]:
        """Return (chance to be accepted, draft) of every token, the likeliest first.

        A token is never likelier than the one before it, and sorting keeps the order of equal
        ones, so that any first part of the list holds first parts of drafts.
        """
        offers: list[tuple[float, int]] = []
        for number, draft in enumerate(drafts):
            chance = 1.0
            for value in self.calibration.chances(draft)[: self._max_drafts]:
                chance *= min(value, 1.0)
                offers.append((chance, number))
        offers.sort(key=lambda offer: -offer[0])
        return offers
