from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from twinfire.gateway.tallies import HistogramTally

BOUNDS = (0.1, 0.5, 1, 2.5, 16384)


@given(st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0, 1e6))))
def test_a_tally_is_exposed_as_the_librarys_histogram(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = HistogramTally("twinfire:x", "Help", "tiny", BOUNDS, ours)
    histogram = Histogram("twinfire:x", "Help", ("model_name",), buckets=BOUNDS, registry=theirs)
    for value in values:
        tally.observe(value)
        histogram.labels("tiny").observe(value)
    histogram.labels("tiny")
    expected = [line for line in generate_latest(theirs).splitlines() if b"_created" not in line]
    assert generate_latest(ours).splitlines() == expected
