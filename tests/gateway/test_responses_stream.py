"""The events of a response: their order, their numbers, and what they build up to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import APIError, OpenAI

from support.gateway_server import MODEL, RunningGateway
from support.raw_http import request
from support.scripted_backend import say

PATH = "/v1/responses"


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Every event, whose name has to be the type in its data."""
    frames = body.decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    events = []
    for frame in frames[:-2]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_order(gateway: RunningGateway) -> None:
    gateway.backend.script = say("hé\n\n")
    answer = request(gateway.server.address, "POST", PATH, {"input": "hi", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.body)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 4,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[2]["item"]["content"] == []
    final = events[-1]["response"]
    assert final["output"] == [events[-2]["item"]]
    assert final["output"][0]["content"][0]["text"] == "hé\n\n" == events[-4]["text"]
    assert final["usage"]["output_tokens"] == 6


def test_streamed_and_whole_are_the_same(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.script = say("same")
    whole = client.responses.create(model=MODEL, input="hi")
    with client.responses.stream(model=MODEL, input="hi") as stream:
        streamed = stream.get_final_response()

    def plain(response: Any) -> Any:
        fields = response.to_dict()
        for name in ("id", "created_at", "completed_at"):
            fields.pop(name)
        for item in fields["output"]:
            item.pop("id")
            for part in item["content"]:
                part.pop("parsed", None)
        return fields

    assert plain(streamed) == plain(whole)


def test_streamed_response_is_stored_before_its_last_event(
    gateway: RunningGateway, client: OpenAI
) -> None:
    for event in client.responses.create(model=MODEL, input="hi", stream=True):
        if event.type == "response.completed":
            stored = client.responses.retrieve(event.response.id)
            assert stored == event.response


def test_empty_answer_still_has_a_message(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.script = say("")
    response = client.responses.create(model=MODEL, input="hi")
    assert response.output_text == ""
    assert [item.type for item in response.output] == ["message"]


def test_log_probabilities(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.script = say("abc")
    arguments: dict[str, Any] = {
        "model": MODEL,
        "input": "hi",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    response = client.responses.create(**arguments)
    logprobs = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs).startswith("abc")
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)
    deltas = [
        event.logprobs[0].token
        for event in client.responses.create(**arguments, stream=True)
        if event.type == "response.output_text.delta"
    ]
    assert deltas == ["a", "b", "c"]


def test_failure_in_a_stream_is_a_failed_response(gateway: RunningGateway, client: OpenAI) -> None:
    gateway.backend.script = say("a long story")
    gateway.backend.fails_after = 3
    answer = request(gateway.server.address, "POST", PATH, {"input": "hi", "stream": True})
    last = events_of(answer.body)[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert last["response"]["output"][0]["content"][0]["text"] == "a l"
    assert client.responses.retrieve(last["response"]["id"]).status == "failed"
    with pytest.raises(APIError):
        client.responses.create(model=MODEL, input="hi")
