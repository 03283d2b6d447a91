"""Tool calls, reasoning and JSON in the native shapes, over a scripted backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.byte_tokenizer import ByteTokenizer, plain_template
from support.gateway_server import MODEL, RunningGateway, running_gateway, tiny_config
from support.raw_http import Answer, request
from support.scripted_backend import say
from twinfire.gateway.served_model import TextSide
from twinfire.gateway.settings import GatewaySettings
from twinfire.gateway.text.answer_formats import ParserChoice

KIMI = "@cf/moonshotai/kimi-k2.5"
FLAT = {
    "name": "get_weather",
    "description": "What it is like outside.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
NESTED = {"type": "function", "function": FLAT}
ARGUMENTS = '{"city": "Paris", "big": 12345678901234567890}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
BODY: dict[str, object] = {"messages": [{"role": "user", "content": "weather?"}]}
SCHEMA = {"type": "object", "properties": {"n": {"type": "number"}}}


@pytest.fixture(scope="module")
def own() -> Iterator[RunningGateway]:
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
        "{% for message in messages %}<|start|>{{ message['content'] }}<|end|>{% endfor %}"
    )
    side = TextSide.load(
        ByteTokenizer(), plain_template(template), tiny_config(), ParserChoice("hermes", "think")
    )
    with running_gateway(GatewaySettings(aliases={KIMI: MODEL}), text=side) as gateway:
        yield gateway


def run(gateway: RunningGateway, model: str = MODEL, **fields: object) -> Answer:
    return request(gateway.server.address, "POST", f"/ai/run/{model}", {**BODY, **fields})


def result(answer: Answer) -> dict[str, Any]:
    body: dict[str, Any] = answer.json()
    assert answer.status == 200, body
    return body["result"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("tool", [FLAT, NESTED])
def test_a_call_is_told_in_both_shapes(own: RunningGateway, tool: dict[str, object]) -> None:
    own.backend.script = say(CALL)
    answer = result(run(own, tools=[tool]))
    [native] = answer["tool_calls"]
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert (native["name"], native["id"]) == ("get_weather", call["id"])
    assert native["arguments"] == json.loads(call["function"]["arguments"])
    assert native["arguments"]["big"] == 12345678901234567890
    assert answer["response"] is None
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("tokens_per_step", [1, 3, 1000])
@pytest.mark.parametrize("name", [MODEL, KIMI])
def test_streamed_calls_come_name_first(
    own: RunningGateway, name: str, tokens_per_step: int
) -> None:
    own.backend.script, own.backend.tokens_per_step = say(CALL), tokens_per_step
    *events, done = run(own, name, tools=[FLAT], stream=True).events()
    assert done == "[DONE]"
    calls: dict[int, dict[str, Any]] = {}
    finishes = []
    for event in events:
        assert isinstance(event, dict)
        chosen = event["choices"][0] if event.get("choices") else event
        delta = chosen.get("delta", chosen)
        if chosen.get("finish_reason"):
            finishes.append(chosen["finish_reason"])
        for call in delta.get("tool_calls") or []:
            if call.get("id"):
                assert call["type"] == "function"
                calls[call["index"]] = {"name": call["function"]["name"], "arguments": ""}
            calls[call["index"]]["arguments"] += call["function"].get("arguments") or ""
    assert finishes == ["tool_calls"]
    assert [(call["name"], call["arguments"]) for call in calls.values()] == [
        ("get_weather", ARGUMENTS)
    ]
    assert events[-1] == {"response": "", "usage": events[-1]["usage"]}  # type: ignore[index,call-overload]


def test_reasoning_is_apart_from_the_text(own: RunningGateway) -> None:
    own.backend.script = say("<think>hm</think>yes")
    answer = result(run(own))
    assert answer["response"] == "yes"
    assert answer["choices"][0]["message"]["reasoning_content"] == "hm"
    events: list[Any] = run(own, stream=True).events()
    assert "".join(event.get("reasoning_content", "") for event in events[:-1]) == "hm"
    assert "".join(event.get("response", "") for event in events[:-1]) == "yes"


@pytest.mark.parametrize(
    "asked",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    ],
)
def test_json_is_a_value_where_it_was_asked_for(
    own: RunningGateway, asked: dict[str, object]
) -> None:
    text = '{"n": 1.50, "big": 12345678901234567890123}'
    own.backend.script = say(text)
    answer = run(own, response_format=asked)
    assert b'"response":' + text.encode() in answer.body
    assert result(answer)["choices"][0]["message"]["content"] == text
    assert own.backend.submitted[-1][1].grammar is not None
    # Cut before its end it is no JSON, and stays what it is.
    assert result(run(own, response_format=asked, max_tokens=5))["response"] == text[:5]
    events: list[Any] = run(own, response_format=asked, stream=True).events()
    assert "".join(event.get("response", "") for event in events[:-1]) == text


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"tools": [FLAT], "tool_choice": "must"}, 8001, "tool_choice"),
        ({"tools": [{**FLAT, "description": False}]}, 8001, "tools"),
        ({"tools": "get_weather"}, 8001, "tools"),
        ({"tools": [1]}, 8001, "tools"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"type": "object", "unevaluatedProperties": False},
                }
            },
            5025,
            "unevaluatedProperties",
        ),
        ({"response_format": {"type": "xml"}}, 5006, "response_format"),
        ({"response_format": 1}, 5006, "response_format"),
    ],
)
def test_what_is_wrong_has_its_number(
    own: RunningGateway, fields: dict[str, object], code: int, words: str
) -> None:
    answer = run(own, **fields)
    body: Any = answer.json()
    assert (answer.status, body["errors"][0]["code"]) == (400, code), body
    assert words in body["errors"][0]["message"]
