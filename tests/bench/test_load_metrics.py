import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfire.bench.load_metrics import (
    Objectives,
    e2e_ms,
    itl_gaps_ms,
    load_metrics,
    tpot_ms,
    ttft_ms,
)
from twinfire.bench.request import user_request
from twinfire.bench.request_record import Recorder
from twinfire.bench.stream_events import Finished, StreamFault, TextDelta, Usage


def record(start_s, text_at_s, *, tokens=None, end_s=None, fault=None, prompt=10, max_tokens=8):
    recorder = Recorder(user_request("x", max_tokens), start_s)
    for at_s in text_at_s:
        recorder.add(TextDelta("t"), at_s)
    if tokens is not None:
        recorder.add(Usage(prompt, tokens, 4), 0.0)
    return recorder.finish(end_s if end_s is not None else text_at_s[-1], fault)


def test_latencies_by_hand():
    # Sent at 1.0; text at 1.5, 1.6, 1.9: four tokens in three arrivals.
    seen = record(1.0, [1.5, 1.6, 1.9], tokens=4)
    assert ttft_ms(seen) == pytest.approx(500)
    assert itl_gaps_ms(seen) == pytest.approx([100, 300])
    assert tpot_ms(seen) == pytest.approx(400 / 3)
    assert e2e_ms(seen) == pytest.approx(900)


def test_the_finish_is_the_last_piece_of_an_answer():
    recorder = Recorder(user_request("x", 8), 0.0)
    recorder.add(TextDelta("t"), 1.0)
    recorder.add(Finished("stop"), 1.5)
    recorder.add(Usage(1, 2), 9.0)
    seen = recorder.finish(9.5)
    assert e2e_ms(seen) == pytest.approx(1500)
    assert tpot_ms(seen) == pytest.approx(500)


def test_text_that_arrives_at_once_is_one_arrival():
    seen = record(0.0, [1.0, 1.0, 2.0], tokens=3)
    assert itl_gaps_ms(seen) == pytest.approx([1000])
    assert seen.num_chunks == 3


def test_a_window_keeps_the_gaps_that_overlap_it():
    seen = record(0.0, [1.0, 2.0, 3.0, 4.0, 5.0], tokens=5)
    assert itl_gaps_ms(seen, (2.5, 3.5)) == pytest.approx([1000, 1000])
    assert itl_gaps_ms(seen, (9.0, 10.0)) == []


def test_rates_and_goodput_by_hand():
    records = [
        record(0.0, [0.1, 0.2, 0.3], tokens=3),
        record(0.0, [1.0, 2.0, 3.0], tokens=3),
        record(1.0, [1.1], end_s=4.0, fault=StreamFault("dropped", "gone")),
    ]
    metrics = load_metrics(records, Objectives(ttft_ms=200.0, itl_ms=150.0))
    assert metrics.duration_s == pytest.approx(4.0)
    assert (metrics.requests, metrics.completed) == (3, 2)
    assert metrics.errors_by_kind == {"dropped": 1}
    assert metrics.output_tokens_per_s == pytest.approx(6 / 4)
    assert metrics.total_tokens_per_s == pytest.approx(26 / 4)
    assert metrics.requests_per_s == pytest.approx(2 / 4)
    assert metrics.goodput_per_s == pytest.approx(1 / 4)
    assert metrics.goodput_share == pytest.approx(1 / 3)
    assert metrics.cached_tokens == 8
    assert metrics.ended_early == 2
    assert metrics.ttft_ms is not None
    assert metrics.ttft_ms.count == 2


def test_without_objectives_there_is_no_goodput():
    assert load_metrics([record(0.0, [1.0], tokens=1)], Objectives()).goodput_per_s is None


def test_without_usage_tokens_are_chunks():
    metrics = load_metrics([record(0.0, [1.0, 2.0])], Objectives())
    assert (metrics.output_tokens, metrics.without_usage) == (2, 1)
    assert metrics.cached_tokens is None


def test_no_records_are_no_division_by_zero():
    metrics = load_metrics([], Objectives(ttft_ms=1.0))
    assert metrics.requests_per_s == 0.0
    assert metrics.goodput_share is None


def test_an_answer_without_any_token_is_an_error():
    assert Recorder(user_request("x", 8), 0.0).finish(1.0).error_kind == "empty"


@given(
    st.floats(0.001, 10),
    st.lists(st.floats(0.001, 10), min_size=1, max_size=30),
    st.integers(1, 5),
)
def test_gaps_and_ttft_add_up_to_the_whole(first_s, gaps_s, tokens_per_arrival):
    times_s = [first_s]
    for gap_s in gaps_s:
        times_s.append(times_s[-1] + gap_s)
    tokens = tokens_per_arrival * len(times_s)
    seen = record(0.0, times_s, tokens=tokens, max_tokens=tokens)
    first_ms, per_token_ms = ttft_ms(seen), tpot_ms(seen)
    assert first_ms is not None
    assert per_token_ms is not None
    assert first_ms + sum(itl_gaps_ms(seen)) == pytest.approx(e2e_ms(seen))
    assert first_ms + per_token_ms * (tokens - 1) == pytest.approx(e2e_ms(seen))
    metrics = load_metrics([seen], Objectives())
    assert metrics.tokens_per_arrival == pytest.approx(tokens_per_arrival)
    assert not metrics.ended_early
