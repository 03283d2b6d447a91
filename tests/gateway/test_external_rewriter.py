"""The rewriter: any cut gives the same stream, and what needs no edit keeps its bytes."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfire.gateway.external.answer_edits import AnswerEdits, EngineError, NotJson
from twinfire.gateway.external.circuit_breaker import CircuitBreaker
from twinfire.gateway.external.sse_rewriter import SseRewriter


def edits(**more: object) -> AnswerEdits:
    settings: dict = {"answer_id": b'"x"', "model": b'"m"', "is_chat_stream": True}
    return AnswerEdits(**(settings | {"num_choices": 1} | more))


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def chunk(text: str, **delta: object) -> dict:
    return {"choices": [{"index": 0, "delta": {**delta, "content": text}}]}


USAGE = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
STREAM = (
    b": hello\n\n"
    + event(id="own", model="own", **chunk("Grüße ", role="assistant"))
    + event(id="own", model="own", **chunk("双子"))
    + b"event: x\r\ndata: "
    + json.dumps({"id": "own", "choices": [], "usage": USAGE}).encode()
    + b"\r\n\r\ndata: [DONE]\n\n"
)


@given(st.lists(st.integers(1, len(STREAM) - 1)))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    marks = [0, *sorted(set(cuts)), len(STREAM)]
    counted = edits(is_split=True, cached_tokens=3)
    rewriter = SseRewriter(counted)
    pieces = [rewriter.feed(STREAM[a:b]) for a, b in pairwise(marks)]
    assert all(piece == b"" or piece.endswith((b"\n\n", b"\r\n\r\n")) for piece in pieces)
    whole = SseRewriter(edits(is_split=True, cached_tokens=3))
    output = b"".join(pieces) + rewriter.finish()
    assert output == whole.feed(STREAM)
    assert rewriter.is_done
    assert "双子".encode() in output
    assert b"own" not in output
    assert b"usage" not in output
    assert b'"cached_tokens":3' in counted.closing_event()
    assert b"own" not in counted.closing_event()
    assert output.startswith(b": hello\n\n")


@given(st.text(), st.integers(1, 50))
def test_bytes_pass_through_when_nothing_changes(text: str, size: int) -> None:
    stream = event(id="x", model="m", **chunk(text, role="assistant")) + b": c\r\nretry: 1\r\n\r\n"
    rewriter = SseRewriter(edits())
    pieces = [rewriter.feed(stream[i : i + size]) for i in range(0, len(stream), size)]
    assert b"".join(pieces) == stream


def test_a_tail_without_its_blank_line_is_flushed() -> None:
    stream = event(id="x", **chunk("a", role="assistant"))
    rewriter = SseRewriter(edits())
    assert rewriter.feed(stream.rstrip()) == b""
    assert rewriter.finish() == stream
    assert not rewriter.is_done


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (event(error={"message": "no", "code": 503}), EngineError),
        (event(error="no"), EngineError),
        (event(id="x", choices=[{"delta": {}, "finish_reason": "error"}]), EngineError),
        (b"data: <html>\n\n", NotJson),
    ],
)
def test_a_failure_inside_a_stream_ends_it_after_what_was_good(
    bad: bytes, kind: type[Exception]
) -> None:
    good = event(id="x", model="m", **chunk("a", role="assistant"))
    rewriter = SseRewriter(edits())
    assert rewriter.feed(good + bad + good) == good
    assert isinstance(rewriter.failure, kind)
    assert rewriter.feed(good) == b""


def test_a_text_that_says_error_is_no_error() -> None:
    stream = event(id="x", **chunk('the word "error"', role="assistant"))
    assert SseRewriter(edits()).feed(stream) == stream


def test_a_count_that_nobody_made_is_not_told() -> None:
    usages = []
    for is_split in (True, False):
        one = edits(is_split=is_split)
        assert SseRewriter(one).feed(event(id="x", choices=[], usage=USAGE)) == b""
        usages.append(json.loads(one.closing_event()[6:])["usage"])
    assert usages == [{**USAGE, "prompt_tokens_details": None}, USAGE]


def test_usage_goes_only_to_those_who_ask() -> None:
    stream = event(id="x", **chunk("a", role="assistant"), usage=USAGE)
    assert SseRewriter(edits(shows_usage_so_far=True)).feed(stream) == stream
    without = json.loads(SseRewriter(edits()).feed(stream)[6:])
    assert without == {"id": "x", **chunk("a", role="assistant")}
    silent = edits(shows_usage=False)
    SseRewriter(silent).feed(event(id="x", choices=[], usage=USAGE))
    assert silent.closing_event() == b""
    assert silent.meter.billed_counts == (9, 8, 0, 0)


def test_each_choice_gets_its_role_once() -> None:
    rewriter = SseRewriter(edits(num_choices=2))
    roles = []
    for index in (0, 0, 1, 1):
        delta = {"index": index, "delta": {"content": "a"}}
        output = json.loads(rewriter.feed(event(id="x", choices=[delta]))[6:])
        roles.append(output["choices"][0]["delta"].get("role"))
    assert roles == ["assistant", None, "assistant", None]


def test_the_breaker_lets_one_trial_through_and_waits_longer_each_time() -> None:
    breaker = CircuitBreaker()
    for _ in range(breaker.FAILURES_TO_OPEN):
        assert breaker.allows(0)
        breaker.failed(0)
    assert not breaker.allows(0.5)
    assert breaker.allows(1)
    breaker.sent(1)
    assert not breaker.allows(1.5)
    breaker.failed(1.5)
    assert not breaker.allows(3)
    assert breaker.allows(3.5)
    breaker.succeeded()
    assert breaker.allows(0)
