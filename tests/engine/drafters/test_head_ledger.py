"""A draft head runs where it saves more time than it takes."""

from __future__ import annotations

import random

import pytest

from twinfire.engine.drafters.head_ledger import HeadLedger
from twinfire.engine.drafters.step_costs import StepCosts

HEAD_S = 0.001


def step_s(num_rows: int) -> float:
    return 0.01 * (1.0 + 0.05 * (num_rows - 1))


def ledger() -> HeadLedger:
    costs = StepCosts()
    costs.calibrate(step_s, 256)
    return HeadLedger(costs)


def run(
    one: HeadLedger, num_sequences: int, chance: float, num_steps: int = 3_000
) -> tuple[float, float]:
    """Return (speed relative to no head, share of the last steps with the head)."""
    chooser = random.Random(0)
    took_s, tokens, last = 0.0, 0, 0
    for number in range(num_steps):
        accepted = 0
        took_s += step_s(num_sequences)
        if one.is_worth(num_sequences):
            accepted = sum(chooser.random() < chance for _ in range(num_sequences))
            rows_s = step_s(2 * num_sequences) - step_s(num_sequences)
            took_s += HEAD_S * num_sequences + rows_s
            one.note(num_sequences, num_sequences, accepted, HEAD_S * num_sequences)
            last += number >= num_steps // 2
        tokens += num_sequences + accepted
    off_s = tokens / num_sequences * step_s(num_sequences)
    return off_s / took_s, last / (num_steps / 2)


@pytest.mark.parametrize("num_sequences", [1, 4, 32])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.3, 0.7, 1.0])
def test_a_head_is_never_much_slower_than_none(num_sequences: int, chance: float) -> None:
    speed, _ = run(ledger(), num_sequences, chance)
    assert speed > 0.97


def test_a_head_that_pays_runs_always_and_one_that_does_not_nearly_never() -> None:
    assert run(ledger(), 1, 0.8)[1] == 1.0
    assert run(ledger(), 1, 0.0)[1] < 0.1


def test_sizes_of_batches_are_judged_apart() -> None:
    one = ledger()
    assert run(one, 1, 0.5)[1] == 1.0
    assert run(one, 32, 0.5)[1] < 0.1
    assert run(one, 1, 0.5)[1] == 1.0


def test_a_head_that_became_good_is_found_out() -> None:
    one = ledger()
    assert run(one, 1, 0.0)[1] < 0.1
    assert run(one, 1, 0.9)[1] > 0.9
    assert run(one, 1, 0.0)[1] < 0.2
