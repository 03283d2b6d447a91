"""Whether a draft head is worth computing at all, by what it cost and brought lately.

How many of its guesses are checked is decided once they are there; by then the head's own passes
are paid for. So its time is booked against the time that its accepted tokens saved, for each size
of batch, and where it loses it rests and is tried again now and then.
"""

from __future__ import annotations

from twinfire.engine.drafters.step_costs import StepCosts

_TRIAL_SHARE = 0.01
"""Of all time, for steps with a head that loses."""
_TRIAL_STEPS = 32
"""Steps of a trial: one alone says little."""
_KEPT = 1.0 - 1.0 / 256.0
"""What of the earlier balance remains at each step."""
_CREDIT_STEPS = 16
"""Steps that a head may cost all of its time before it is judged."""


class HeadLedger:
    """Asked before each step, told after it."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._accounts: dict[int, _Account] = {}

    def is_worth(self, num_sequences: int) -> bool:
        """Return whether to compute the head for a step of so many sequences."""
        return self._account(num_sequences).decide(self._costs.seconds(num_sequences))

    def note(self, num_sequences: int, num_checked: int, num_accepted: int, head_s: float) -> None:
        """Book a step that the head was computed for, which took it `head_s` seconds.

        `num_checked` of its guesses took a row and `num_accepted` of them were right. An accepted
        token saves the sequence's share of a step without guesses.
        """
        alone_s = self._costs.seconds(num_sequences)
        rows_s = self._costs.seconds(num_sequences + num_checked) - alone_s
        self._account(num_sequences).book(
            saved_s=num_accepted * alone_s / max(1, num_sequences), spent_s=head_s + rows_s
        )

    def _account(self, num_sequences: int) -> _Account:
        return self._accounts.setdefault(num_sequences.bit_length(), _Account())


class _Account:
    """Of one size of batch."""

    def __init__(self) -> None:
        self._balance_s = 0.0
        self._weight = 0.0
        self._trial_steps_left = _CREDIT_STEPS
        self._budget_s = 0.0

    def decide(self, step_s: float) -> bool:
        if self._trial_steps_left > 0:
            self._trial_steps_left -= 1
            return True
        if self._balance_s >= 0.0:
            return True
        loss_s = -self._balance_s / max(1.0, self._weight)
        self._budget_s += _TRIAL_SHARE * step_s
        if self._budget_s < _TRIAL_STEPS * loss_s:
            return False
        self._budget_s = 0.0
        # What was lost long ago must not outweigh what the trial shows.
        self._balance_s, self._weight = -loss_s, 1.0
        self._trial_steps_left = _TRIAL_STEPS - 1
        return True

    def book(self, saved_s: float, spent_s: float) -> None:
        self._balance_s = self._balance_s * _KEPT + saved_s - spent_s
        self._weight = self._weight * _KEPT + 1.0
