import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfire.bench.distribution import distribution, median, percentile

numbers = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60)


def test_percentiles_by_hand():
    # Rank of P90 among 5: 0.9 * 4 = 3.6, so 0.4 * 40 + 0.6 * 100.
    described = distribution([100.0, 10.0, 20.0, 40.0, 30.0])
    assert described is not None
    assert (described.p50, described.min, described.max) == (30.0, 10.0, 100.0)
    assert described.p90 == pytest.approx(76.0)
    assert described.p99 == pytest.approx(97.6)
    assert described.mean == pytest.approx(40.0)
    assert described.count == 5


def test_one_number_is_every_percentile():
    assert distribution([7.0]) == distribution([7.0, 7.0, 7.0][:1])
    assert percentile([7.0], 99) == 7.0


def test_no_numbers_have_no_distribution():
    assert distribution([]) is None


@given(numbers, st.floats(0, 100))
def test_percentile_equals_numpys(values, percent):
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(numbers)
def test_order_statistics_are_ordered(values):
    described = distribution(values)
    assert described is not None
    ladder = [described.min, described.p50, described.p90, described.p99, described.max]
    assert ladder == sorted(ladder)
    assert described.min <= described.mean <= described.max
    assert median(values) == described.p50
