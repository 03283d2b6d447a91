import asyncio
import contextlib

import pytest

from support.openai_server import TEMPLATE_TOKENS, Behaviour, fake_server
from twinfire.bench.client import Client, ServerUnusable
from twinfire.bench.load_metrics import itl_gaps_ms, ttft_ms
from twinfire.bench.request import GenerationRequest, Message, user_request
from twinfire.bench.stream_events import TextDelta
from twinfire.bench.target import Target


async def measured(behaviour, request=None, **target):
    async with fake_server(behaviour) as server, Client(Target(server.url, **target)) as client:
        return await client.measure(request or user_request("one two three", 4)), server


def run(behaviour, request=None, **target):
    return asyncio.run(measured(behaviour, request, **target))


def test_a_chat_request_and_its_answer():
    record, server = run(Behaviour(cached_tokens=2), api_key="secret")
    assert record.error_kind is None
    assert (record.prompt_tokens, record.completion_tokens) == (3 + TEMPLATE_TOKENS, 4)
    assert (record.cached_tokens, record.finish_reason) == (2, "length")
    assert record.answer == " word" * 4
    (body,) = server.bodies
    assert body == {
        "model": "fake",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "one two three"}],
        "max_tokens": 4,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_completions_extra_fields_and_the_session_header():
    request = GenerationRequest(
        (Message("system", "be kind"), Message("user", "hi")), 3, session="s-1"
    )
    extra = {"top_k": 5, "stream_options": None, "max_tokens": 2}
    record, server = run(
        None, request, api="completions", extra_body=extra, session_header="x-session-id"
    )
    assert server.bodies == [
        {
            "model": "fake",
            "stream": True,
            "prompt": "be kind\n\nhi",
            "max_tokens": 2,
            "top_k": 5,
        }
    ]
    assert server.headers[0]["x-session-id"] == "s-1"
    assert record.completion_tokens is None
    assert record.output_tokens == 2


def test_times_are_those_of_the_clock_when_each_chunk_comes():
    now_s = [100.0]
    gates = [asyncio.Event() for _ in range(3)]
    steps = iter(zip([0.25, 0.5, 1.0], gates, strict=True))

    def next_chunk() -> None:
        advance_s, gate = next(steps, (0.0, gates[-1]))
        now_s[0] += advance_s
        gate.set()

    async def scenario():
        behaviour = Behaviour(gate=lambda number, chunk: gates[chunk], on_request=next_chunk)
        async with (
            fake_server(behaviour) as server,
            Client(Target(server.url), clock=lambda: now_s[0]) as client,
        ):
            return await client.measure(user_request("hello", 3), on_text=next_chunk)

    record = asyncio.run(scenario())
    assert ttft_ms(record) == pytest.approx(250)
    assert itl_gaps_ms(record) == pytest.approx([500, 1000])


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (Behaviour(status=500), "http_500"),
        (Behaviour(status=429), "http_429"),
        (Behaviour(drop_after_chunks=2), "dropped"),
        (Behaviour(finish_reason=None, done=False), "incomplete"),
        (Behaviour(content_type="text/html", raw_chunks=[b"<html>"]), "malformed"),
        (Behaviour(raw_chunks=[b"garbage\n\n"]), "malformed"),
        (Behaviour(raw_chunks=[b"data: {]\n\n"]), "malformed"),
        (Behaviour(raw_chunks=[b"data: \xff\n\n"]), "malformed"),
        (Behaviour(raw_chunks=[b'data: {"error":{"message":"oom"}}\n\n']), "server_error"),
        (Behaviour(raw_chunks=[b"data: [DONE]\n\n"]), "empty"),
        (Behaviour(raw_chunks=[]), "incomplete"),
        (
            Behaviour(
                raw_chunks=[b'data: {"choices":[{"text":"a","finish_reason":"stop"}]}\n\nda']
            ),
            "incomplete",
        ),
    ],
)
def test_faults_are_recorded_by_kind(behaviour, kind):
    record, _ = run(behaviour)
    assert record.error_kind == kind
    assert not record.completed


def test_an_error_body_is_quoted():
    record, _ = run(Behaviour(status=500))
    assert record.error_message == "scripted failure"


def test_text_before_a_drop_is_kept():
    record, _ = run(Behaviour(drop_after_chunks=2))
    assert record.num_chunks == 2


@pytest.mark.parametrize("finish", [None, "stop"])
def test_done_or_finish_reason_ends_an_answer(finish):
    record, _ = run(Behaviour(finish_reason=finish, done=finish is None))
    assert record.completed
    assert record.finish_reason == finish


def test_a_server_that_stops_early_is_noticed():
    record, _ = run(Behaviour(end_after_tokens=2))
    assert record.ended_early
    record, _ = run(Behaviour())
    assert not record.ended_early


def test_a_request_that_outlasts_the_limit_is_a_timeout():
    never = asyncio.Event
    record, _ = run(Behaviour(gate=lambda number, chunk: never()), timeout_s=0.2)
    assert record.error_kind == "timeout"


def test_nobody_listening_is_refused_and_no_model_is_unusable():
    async def scenario():
        async with fake_server() as server:
            url = server.url
        async with Client(Target(url, model="m")) as client:
            record = await client.measure(user_request("x", 1))
        async with Client(Target(url)) as client:
            with pytest.raises(ServerUnusable, match="cannot be reached"):
                await client.measure(user_request("x", 1))
        return record

    assert asyncio.run(scenario()).error_kind == "refused"


def test_closing_the_stream_disconnects():
    async def scenario():
        gates = [asyncio.Event(), asyncio.Event()]
        gates[0].set()
        behaviour = Behaviour(gate=lambda number, chunk: gates[min(chunk, 1)])
        async with fake_server(behaviour) as server, Client(Target(server.url)) as client:
            stream = client.stream(user_request("x", 8))
            async with contextlib.aclosing(stream):
                async for _, event in stream:
                    assert isinstance(event, TextDelta)
                    break
            await asyncio.wait_for(server.disconnected.wait(), 10)
            assert server.in_flight == 0

    asyncio.run(scenario())


def test_a_url_may_end_in_v1():
    assert Target("http://h:1/v1/").root == Target("http://h:1").root == "http://h:1"


def test_the_window_is_read_from_the_model_list():
    async def scenario():
        async with fake_server() as server, Client(Target(server.url)) as client:
            return await client.model()

    card = asyncio.run(scenario())
    assert (card.id, card.max_model_len) == ("fake", 4096)
