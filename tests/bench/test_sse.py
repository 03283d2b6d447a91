from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfire.bench.sse import SseDecoder, SseError

STREAM = (
    b': queued\n\ndata: {"a": 1}\n\nevent: x\r\ndata:two\r\n\r\n'
    b"data: first\ndata: second\n\ndata: \xc3\xa9\r\rdata: [DONE]\n\n"
)
PAYLOADS = ['{"a": 1}', "two", "first\nsecond", "é", "[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_payloads_do_not_depend_on_how_the_stream_is_cut(cuts):
    decoder = SseDecoder()
    bounds = [0, *sorted(cuts), len(STREAM)]
    received = []
    for start, end in pairwise(bounds):
        received += decoder.feed(STREAM[start:end])
    assert received == PAYLOADS
    assert not decoder.has_partial_event


def test_a_stream_that_ends_inside_an_event_is_known():
    decoder = SseDecoder()
    assert decoder.feed(b"data: half") == []
    assert decoder.has_partial_event


@pytest.mark.parametrize("bad", [b"<html>no</html>\n", b"data: \xff\xfe\n\n"])
def test_what_is_no_event_stream_is_refused(bad):
    with pytest.raises(SseError):
        SseDecoder().feed(bad)


def test_an_endless_event_is_refused():
    decoder = SseDecoder(max_event_bytes=1000)
    with pytest.raises(SseError, match="1000"):
        decoder.feed((b"data: " + b"x" * 100 + b"\n") * 20)
