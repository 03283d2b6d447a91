import json

import pytest

from twinfire.bench.stream_events import (
    Finished,
    StreamFault,
    TextDelta,
    TokenIds,
    Usage,
    parse_chunk,
)


@pytest.mark.parametrize(
    ("payload", "events"),
    [
        ('{"choices":[{"delta":{"role":"assistant","content":""}}]}', []),
        (
            '{"choices":[{"delta":{"content":"a"},"finish_reason":null}],"usage":null}',
            [TextDelta("a")],
        ),
        ('{"choices":[{"text":"a","finish_reason":"stop"}]}', [TextDelta("a"), Finished("stop")]),
        (
            '{"choices":[{"text":"ab","token_ids":[5,6]}]}',
            [TextDelta("ab"), TokenIds(2)],
        ),
        (
            '{"choices":[{"delta":{"reasoning_content":"hm"}}]}',
            [TextDelta("hm", "reasoning")],
        ),
        (
            '{"choices":[{"delta":{"reasoning":"hm","content":"a"}}]}',
            [TextDelta("hm", "reasoning"), TextDelta("a")],
        ),
        (
            '{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}',
            [Usage(3, 2, None)],
        ),
        (
            '{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,'
            '"prompt_tokens_details":{"cached_tokens":0}}}',
            [Usage(3, 2, 0)],
        ),
    ],
)
def test_chunks_become_events(payload, events):
    assert parse_chunk(payload) == events


@pytest.mark.parametrize(
    ("payload", "kind", "message"),
    [
        ('{"error":{"message":"boom","code":500}}', "server_error", "boom"),
        ('{"error":"plain"}', "server_error", "plain"),
        ("{not json", "malformed", "not json"),
        ('{"hello":1}', "malformed", "neither choices nor usage"),
        ('{"choices":[{"delta":{"content":7}}]}', "malformed", "content"),
        ('{"choices":[{"delta":' * 100_000, "malformed", "recursion"),
    ],
)
def test_faults_are_named(payload, kind, message):
    with pytest.raises(StreamFault, match=message) as caught:
        parse_chunk(payload)
    assert caught.value.kind == kind


def test_guesses_are_read_from_the_usage():
    details = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}
    usage = {"prompt_tokens": 3, "completion_tokens": 9, "completion_tokens_details": details}
    chunk = json.dumps({"choices": [], "usage": usage})
    assert parse_chunk(chunk) == [Usage(3, 9, accepted_tokens=5, rejected_tokens=2)]
