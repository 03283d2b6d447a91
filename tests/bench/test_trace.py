import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfire.bench.trace import TraceError, TraceRequest, read_trace, scale_trace


def test_the_mooncake_form(tmp_path):
    path = tmp_path / "t.jsonl"
    lines = [
        {"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [0, 9]},
        {"timestamp": 0, "input_length": 10, "output_length": 7, "hash_ids": [0]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert read_trace(path) == [TraceRequest(0.0, 10, 7, (0,)), TraceRequest(1.5, 600, 5, (0, 9))]


def test_the_azure_form(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.2299600,3180,8\n"
    )
    first, second = read_trace(path)
    assert (first.input_tokens, first.output_tokens, first.arrival_s) == (4808, 10, 0.0)
    assert second.arrival_s == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "ContextTokens"),
        ('{"timestamp": 1}\n', "line 1"),
        ('{"timestamp":0,"input_length":1,"output_length":1}\n{oops\n', "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, content, message):
    path = tmp_path / "t"
    path.write_text(content)
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TraceError, match="nowhere"):
        read_trace(tmp_path / "nowhere")


def test_scaling_by_hand():
    trace = [TraceRequest(10.0, 1000, 100, (1,)), TraceRequest(14.0, 5000, 800, (1, 2))]
    scaled, done = scale_trace(trace, max_model_len=1000, length_scale=0.5, time_scale=0.25)
    assert scaled == [TraceRequest(0.0, 500, 50, (1,)), TraceRequest(1.0, 750, 250, (1, 2))]
    assert (done.inputs_clipped, done.outputs_clipped) == (1, 1)
    assert (done.input_tokens_before, done.input_tokens_after) == (6000, 1250)
    assert "x 0.25" in done.sentence()
    assert "x 0.5, then clipped to a window of 1000 tokens" in done.sentence()


def test_an_output_that_fits_a_shorter_prompt_is_not_clipped():
    scaled, done = scale_trace([TraceRequest(0, 5000, 100)], max_model_len=1000, length_scale=1.0)
    assert scaled == [TraceRequest(0.0, 900, 100)]
    assert (done.inputs_clipped, done.outputs_clipped) == (1, 0)


traces = st.lists(
    st.builds(TraceRequest, st.floats(0, 1e4), st.integers(0, 200_000), st.integers(0, 4000)),
    min_size=1,
    max_size=40,
)


@given(traces, st.integers(64, 8192), st.none() | st.floats(0.001, 4))
def test_every_scaled_request_fits(trace, window, length_scale):
    trace = sorted(trace, key=lambda request: request.arrival_s)
    scaled, done = scale_trace(trace, max_model_len=window, length_scale=length_scale)
    for request in scaled:
        assert request.output_tokens >= 1
        assert request.input_tokens >= 1
        assert request.input_tokens + request.output_tokens <= window
    assert scaled[0].arrival_s == 0.0
    assert done.requests_kept == len(trace)
    if length_scale is None:
        assert done.length_scale <= 1.0
