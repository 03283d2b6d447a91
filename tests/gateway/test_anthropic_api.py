"""`/v1/messages` through the anthropic client, over a socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic, APIStatusError, BadRequestError, NotFoundError, RateLimitError

from support.gateway_server import MODEL, RunningGateway
from support.raw_http import open_post, read_until, request
from support.scripted_backend import say
from twinfire.protocol.errors import Overloaded

PATH = "/v1/messages"
HI: dict[str, Any] = {"role": "user", "content": "hi"}
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "messages": [HI]}


@pytest.fixture
def claude(gateway: RunningGateway) -> Iterator[Anthropic]:
    with Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        yield client


def prompt_of(gateway: RunningGateway) -> str:
    """What the model was asked, without its control tokens."""
    return bytes(token for token in gateway.backend.submitted[-1][0] if token < 256).decode()


def events_of(body: bytes) -> list[dict[str, Any]]:
    frames = body.decode().split("\n\n")
    assert frames[-1] == ""
    events = []
    for frame in frames[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def test_text(gateway: RunningGateway, claude: Anthropic) -> None:
    gateway.backend.script = say("hello there")
    gateway.backend.cached_tokens = 3
    message = claude.messages.create(**ASK, system="be kind")
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert [block.to_dict() for block in message.content] == [
        {"type": "text", "text": "hello there", "citations": None}
    ]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert prompt_of(gateway) == "system\nbe kinduser\nhiassistant\n"
    usage = message.usage
    assert usage.cache_read_input_tokens == 3
    assert usage.input_tokens + 3 == len(gateway.backend.submitted[-1][0])
    assert usage.output_tokens == len("hello there") + 1


def test_stream_builds_up_to_the_whole_message(gateway: RunningGateway, claude: Anthropic) -> None:
    gateway.backend.script = say("hello there")
    gateway.backend.cached_tokens = 3
    whole = claude.messages.create(**ASK)
    with claude.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == "hello there"
        streamed = stream.get_final_message()
    assert streamed.to_dict(exclude_unset=True)["usage"] == whole.to_dict()["usage"]
    assert (streamed.content[0].text, streamed.stop_reason) == ("hello there", "end_turn")  # type: ignore[union-attr]


def test_order_of_events(gateway: RunningGateway) -> None:
    gateway.backend.script = say("hé")
    answer = request(gateway.server.address, "POST", PATH, {**ASK, "stream": True})
    events = events_of(answer.body)
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[2]["content_block"] == {"type": "text", "text": "", "citations": None}
    assert events[3] == {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": "h"},
    }


@pytest.mark.parametrize(
    ("extra", "reason", "sequence", "text"),
    [
        ({"max_tokens": 4}, "max_tokens", None, "a lo"),
        ({"stop_sequences": ["long"]}, "stop_sequence", "long", "a "),
        ({}, "end_turn", None, "a long story"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_reasons_to_stop(
    gateway: RunningGateway,
    claude: Anthropic,
    extra: dict[str, Any],
    reason: str,
    sequence: str | None,
    text: str,
    stream: bool,
) -> None:
    gateway.backend.script = say("a long story")
    if stream:
        with claude.messages.stream(**{**ASK, **extra}) as events:
            message: Any = events.get_final_message()
    else:
        message = claude.messages.create(**{**ASK, **extra})
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
    assert message.content[0].text == text


def test_bound_beyond_the_window_is_the_window(gateway: RunningGateway, claude: Anthropic) -> None:
    gateway.backend.script = say("x" * 600)
    message = claude.messages.create(**{**ASK, "max_tokens": 2_000})
    assert message.stop_reason == "model_context_window_exceeded"
    sampling = gateway.backend.submitted[-1][1]
    assert sampling.max_tokens == 512 - len(gateway.backend.submitted[-1][0])
    with pytest.raises(BadRequestError, match="context is 512 tokens"):
        claude.messages.create(**{**ASK, "messages": [{"role": "user", "content": "x" * 600}]})


def test_every_field_of_the_published_shape_is_there(gateway: RunningGateway) -> None:
    message = request(gateway.server.address, "POST", PATH, ASK).json()
    assert set(message) >= {
        *("id", "type", "role", "model", "content", "stop_reason", "stop_sequence"),
        *("stop_details", "container", "usage"),
    }
    usage = message["usage"]
    assert isinstance(usage, dict)
    assert set(usage) >= {
        *("input_tokens", "output_tokens", "cache_read_input_tokens", "service_tier"),
        *("cache_creation_input_tokens", "cache_creation", "inference_geo", "server_tool_use"),
    }


def test_blocks_become_one_conversation(gateway: RunningGateway, claude: Anthropic) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "question", **cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "answer"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "result"}],
                },
                {"type": "text", "text": "more"},
            ],
        },
    ]
    system = [{"type": "text", "text": "one", **cached}, {"type": "text", "text": "two"}]
    claude.messages.create(**{**ASK, "messages": messages, "system": system})
    assert prompt_of(gateway) == (
        "system\none\ntwouser\nquestionassistant\nanswertool\nresultuser\nmoreassistant\n"
    )


def test_answer_goes_on_from_the_assistants_words(
    gateway: RunningGateway, claude: Anthropic
) -> None:
    messages = [HI, {"role": "assistant", "content": "The answer is"}]
    claude.messages.create(**{**ASK, "messages": messages})
    assert prompt_of(gateway) == "user\nhiassistant\nThe answer is"


def test_count_tokens(gateway: RunningGateway, claude: Anthropic) -> None:
    counted = claude.messages.count_tokens(model=MODEL, messages=[HI], system="be kind")  # type: ignore[list-item]
    claude.messages.create(**ASK, system="be kind")
    assert counted.input_tokens == len(gateway.backend.submitted[-1][0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": None}, "`max_tokens`"),
        ({"messages": []}, "`messages`"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "type": "web_search_20250305"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "`tool_choice`"),
        ({"mcp_servers": [{"url": "x"}]}, "`mcp_servers`"),
        ({"stop_sequences": [""]}, "`stop_sequences`"),
        ({"temperature": 3.0}, "`temperature`"),
    ],
)
def test_fault_names_the_field(
    gateway: RunningGateway, change: dict[str, Any], message: str
) -> None:
    body = {name: value for name, value in {**ASK, **change}.items() if value is not None}
    for stream in (False, True):
        answer = request(gateway.server.address, "POST", PATH, {**body, "stream": stream})
        told = answer.json()
        assert answer.status == 400
        assert told["type"] == "error"
        assert told["request_id"] == answer.headers["request-id"]
        error = told["error"]
        assert isinstance(error, dict)
        assert error["type"] == "invalid_request_error"
        assert message in error["message"]


def test_faults_have_the_clients_types(gateway: RunningGateway, claude: Anthropic) -> None:
    with pytest.raises(NotFoundError):
        claude.messages.create(**{**ASK, "model": "nobody"})
    gateway.backend.refusal = Overloaded("full", retry_after_s=2.5)
    with pytest.raises(RateLimitError) as raised:
        claude.messages.create(**ASK)
    assert raised.value.response.headers["retry-after"] == "3"
    wrong_type = request(
        gateway.server.address, "POST", PATH, b"x", headers={"content-type": "text/plain"}
    )
    assert wrong_type.status == 415
    assert wrong_type.json()["type"] == "error", "also where the handler never saw the request"


def test_failure_in_a_stream_is_an_error_event(gateway: RunningGateway, claude: Anthropic) -> None:
    gateway.backend.script = say("a long story")
    gateway.backend.fails_after = 3
    with pytest.raises(APIStatusError, match="died"), claude.messages.stream(**ASK) as stream:
        list(stream)
    answer = request(gateway.server.address, "POST", PATH, {**ASK, "stream": True})
    last = events_of(answer.body)[-1]
    assert last["type"] == "error"
    assert last["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_ends_the_generation(gateway: RunningGateway, stream: bool) -> None:
    gateway.backend.script = say("a long story")
    gateway.backend.holds_after = 3
    connection = open_post(gateway.server.address, PATH, {**ASK, "stream": stream})
    gateway.run(gateway.backend.holding.wait())
    if stream:
        read_until(connection, b"text_delta")
    connection.close()
    gateway.run(gateway.backend.idle.wait(), timeout_s=1)
    assert gateway.backend.num_running == 0
