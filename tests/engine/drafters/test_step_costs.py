"""The curve of step times: measured, followed, never falling."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfire.engine.drafters.step_costs import StepCosts


def line(num_rows: int) -> float:
    return 0.010 + 0.001 * num_rows


def calibrated(max_rows: int = 64) -> StepCosts:
    costs = StepCosts()
    costs.calibrate(line, max_rows)
    return costs


@pytest.mark.parametrize("max_rows", [2, 7, 16, 64, 1000])
def test_the_measured_curve_is_met_between_and_beyond_its_points(max_rows: int) -> None:
    costs = calibrated(max_rows)
    for num_rows in (1, 2, 3, 9, 40, 64, 100, 700):
        assert costs.seconds(num_rows) == pytest.approx(line(num_rows))
    assert costs.seconds(0) == 0.0


def test_calibration_asks_for_no_more_rows_than_there_can_be() -> None:
    asked: list[int] = []
    costs = StepCosts()
    costs.calibrate(lambda rows: asked.append(rows) or line(rows), max_rows=9)
    assert max(asked) == 9
    assert len(asked) < 40


@pytest.mark.parametrize("scale", [0.001, 1.0, 20.0, 1_000.0])
def test_calibration_of_slow_steps_measures_fewer(scale: float) -> None:
    spent: list[float] = []

    def measure(rows: int) -> float:
        spent.append(scale * line(rows))
        return spent[-1]

    costs = StepCosts()
    costs.calibrate(measure, 64, budget_s=1.0)
    needed_s = scale * sum(map(line, (1, 1, 2, 3, 4, 6, 8)))
    assert sum(spent) <= max(1.0 + scale * line(64), needed_s)
    for num_rows in (1, 5, 30, 100):
        assert costs.seconds(num_rows) == pytest.approx(scale * line(num_rows))


@given(
    st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 300), st.floats(1e-5, 2.0)), max_size=40),
)
def test_more_rows_never_cost_less(noise: list[float], steps: list[tuple[int, float]]) -> None:
    costs = StepCosts()
    costs.calibrate(lambda rows: noise[rows % len(noise)], 32)
    for num_rows, seconds in steps:
        costs.note(num_rows, seconds)
    curve = [costs.seconds(count) for count in range(300)]
    assert curve == sorted(curve)
    assert curve[1] > 0


def test_a_longer_context_moves_all_of_the_curve() -> None:
    costs = calibrated()
    for _ in range(1_000):
        costs.note(4, 3 * line(4))
    for num_rows in (1, 4, 32):
        assert costs.seconds(num_rows) == pytest.approx(3 * line(num_rows), rel=0.1)


def test_a_dearer_kind_of_row_moves_its_own_part() -> None:
    costs, chooser = calibrated(), random.Random(0)
    for _ in range(2_000):
        num_rows = chooser.choice([1, 8])
        costs.note(num_rows, line(num_rows) * (1.5 if num_rows == 8 else 1.0))
    ratio = costs.seconds(8) / costs.seconds(1)
    assert ratio == pytest.approx(1.5 * line(8) / line(1), rel=0.1)


def test_a_disturbed_measurement_makes_no_row_look_free() -> None:
    num_measured = {1: 0}

    def disturbed(rows: int) -> float:
        num_measured[rows] = num_measured.get(rows, 0) + 1
        return line(rows) * (3.0 if rows == 1 or num_measured[rows] == 1 else 1.0)

    costs = StepCosts()
    costs.calibrate(disturbed, 64, budget_s=10.0)
    assert costs.seconds(1) == costs.seconds(2) == pytest.approx(line(2))
    assert costs.seconds(8) == pytest.approx(line(8))


def test_one_slow_step_moves_little() -> None:
    costs = calibrated()
    costs.note(8, 100.0)
    costs.note(8, 0.0)
    assert costs.seconds(8) == pytest.approx(line(8), rel=0.05)


def test_before_calibration_every_row_costs_the_same_and_live_steps_are_taken() -> None:
    costs = StepCosts()
    assert costs.seconds(8) == pytest.approx(8 * costs.seconds(1))
    costs.note(1, 0.02)
    assert costs.seconds(1) == pytest.approx(0.02)
    assert costs.seconds(2) == pytest.approx(0.04)


def test_points_that_seem_to_cost_the_same_do_not_make_all_rows_beyond_them_free() -> None:
    costs = StepCosts()
    # A machine that was disturbed at each measurement of 48 rows.
    costs.calibrate(lambda rows: line(64) if rows == 48 else line(rows), 64)
    assert costs.seconds(48) == costs.seconds(64)
    assert costs.seconds(164) == pytest.approx(line(164))
