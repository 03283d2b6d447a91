"""Tools, reasoning and structured output through the Responses and Messages clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel

from support.byte_tokenizer import VOCAB_SIZE, ByteTokenizer, plain_template
from support.gateway_server import MODEL, RunningGateway, running_gateway, tiny_config
from support.raw_http import request
from support.scripted_backend import say
from twinfire.artifacts.token_grammar import TokenGrammar
from twinfire.gateway.served_model import TextSide
from twinfire.gateway.text.answer_formats import ParserChoice

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}{{ call.function.arguments.city }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION: dict[str, Any] = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
FILES: dict[str, Any] = {"type": "function", "name": "list_files", "parameters": {}}
TOOL: dict[str, Any] = {"name": "get_weather", "input_schema": SCHEMA}
ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@pytest.fixture(scope="module")
def own() -> Iterator[RunningGateway]:
    parsers = ParserChoice("auto", "think")
    text = TextSide.load(ByteTokenizer(), plain_template(TEMPLATE), tiny_config(), parsers)
    with running_gateway(text=text) as gateway:
        yield gateway


@pytest.fixture
def client(own: RunningGateway) -> Iterator[OpenAI]:
    own.backend.tokens_per_step = 1
    with OpenAI(base_url=own.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(own: RunningGateway) -> Iterator[Anthropic]:
    own.backend.tokens_per_step = 1
    with Anthropic(base_url=own.url, api_key="none", max_retries=0) as client:
        yield client


def prompt_of(gateway: RunningGateway) -> str:
    return ByteTokenizer().decode(gateway.backend.submitted[-1][0], True)


def obeys(gateway: RunningGateway, text: str) -> bool:
    """Whether the last request's grammar takes `text` as a whole answer."""
    grammar = gateway.backend.submitted[-1][1].grammar
    assert grammar is not None
    matcher = TokenGrammar(ByteTokenizer(), VOCAB_SIZE).compile(grammar).matcher()
    return all(map(matcher.accept, text.encode())) and matcher.may_end


@pytest.mark.parametrize("tokens_per_step", [1, 7, 500])
def test_responses_round_trip(own: RunningGateway, client: OpenAI, tokens_per_step: int) -> None:
    own.backend.tokens_per_step = tokens_per_step
    own.backend.script = say("<think>Where?</think>Let me look." + CALL)
    first = client.responses.create(model=MODEL, input="weather?", tools=[FUNCTION])
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    reasoning, _, call = first.output
    assert reasoning.content[0].text == "Where?"  # type: ignore[union-attr]
    assert first.output_text.strip() == "Let me look."
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("get_weather", json.loads(ARGUMENTS))
    assert first.status == "completed"
    assert first.usage is not None
    assert first.usage.output_tokens_details.reasoning_tokens > 0
    own.backend.script = say("It rains.")
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    second = client.responses.create(
        model=MODEL, input=output, tools=[FUNCTION], previous_response_id=first.id
    )
    assert second.output_text == "It rains."
    by_id = prompt_of(own)
    assert "<tool_call>get_weatherParis</tool_call>" in by_id
    assert by_id.endswith("tool\nrainassistant\n")
    # The same conversation sent whole, as clients without a store do, is the same prompt.
    items: Any = [{"role": "user", "content": "weather?"}]
    items += [item.to_dict() for item in first.output] + output
    client.responses.create(model=MODEL, input=items, tools=[FUNCTION], store=False)
    assert prompt_of(own) == by_id


def test_responses_stream_of_a_call(own: RunningGateway, client: OpenAI) -> None:
    own.backend.script = say(CALL)
    with client.responses.stream(model=MODEL, input="weather?", tools=[FUNCTION]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds.index("response.output_item.added") < kinds.index(
        "response.function_call_arguments.delta"
    )
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == json.loads(ARGUMENTS)
    assert [item.type for item in final.output] == ["function_call"]


def test_responses_cut_call_is_incomplete(own: RunningGateway, client: OpenAI) -> None:
    own.backend.script = say(CALL)
    cut = client.responses.create(
        model=MODEL, input="x", tools=[FUNCTION], max_output_tokens=len(CALL) - 20
    )
    assert cut.status == "incomplete"
    assert cut.output[-1].status == "incomplete"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "get_weather"}],
        },
    ],
)
def test_responses_forced_choice(own: RunningGateway, client: OpenAI, choice: Any) -> None:
    own.backend.script = say(CALL)
    client.responses.create(model=MODEL, input="x", tools=[FUNCTION, FILES], tool_choice=choice)
    assert "get_weather list_files" in prompt_of(own), "the prompt keeps every tool"
    assert not obeys(own, "no call")
    files = CALL.replace("get_weather", "list_files").replace(ARGUMENTS, "{}")
    assert obeys(own, files) == (choice == "required")


def test_responses_parse_with_a_pydantic_model(own: RunningGateway, client: OpenAI) -> None:
    class Place(BaseModel):
        city: str

    own.backend.script = say(ARGUMENTS)
    parsed = client.responses.parse(model=MODEL, input="where?", text_format=Place)
    assert parsed.output_parsed == Place(city="Paris")
    assert obeys(own, ARGUMENTS)
    assert not obeys(own, '{"town": "Paris"}')


def test_responses_unsupported_schema_is_named(own: RunningGateway) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "https://example.org/s.json"}}}
    body: dict[str, object] = {
        "input": "x",
        "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}},
    }
    answer = request(own.server.address, "POST", "/v1/responses", body)
    assert (answer.status, answer.error()["param"]) == (400, "text.format")


@pytest.mark.parametrize("stream", [False, True])
def test_messages_round_trip(own: RunningGateway, claude: Anthropic, stream: bool) -> None:
    own.backend.script = say("<think>Where?</think>Let me look." + CALL)
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "tools": [TOOL]}
    history: list[Any] = [{"role": "user", "content": "weather?"}]
    if stream:
        with claude.messages.stream(**ask, messages=history) as events:
            message: Any = events.get_final_message()
    else:
        message = claude.messages.create(**ask, messages=history)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    thinking, text, use = message.content
    assert (thinking.thinking, text.text.strip()) == ("Where?", "Let me look.")
    assert (use.name, use.input) == ("get_weather", json.loads(ARGUMENTS))
    assert message.stop_reason == "tool_use"
    own.backend.script = say("It rains.")
    history += [
        {"role": "assistant", "content": [block.to_dict() for block in message.content]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "rain"}],
        },
    ]
    answer = claude.messages.create(**ask, messages=history)
    assert answer.content[0].text == "It rains."
    assert "<tool_call>get_weatherParis</tool_call>" in prompt_of(own)
    assert prompt_of(own).endswith("tool\nrainassistant\n")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_messages_forced_choice(own: RunningGateway, claude: Anthropic, choice: Any) -> None:
    own.backend.script = say(CALL)
    choice = {**choice, "disable_parallel_tool_use": True}
    claude.messages.create(
        model=MODEL,
        max_tokens=200,
        tools=[TOOL],  # type: ignore[list-item]
        tool_choice=choice,
        messages=[{"role": "user", "content": "x"}],
    )
    assert not obeys(own, "no call")
    assert obeys(own, CALL)
    assert not obeys(own, CALL + CALL)


def test_messages_wrong_schema_is_named_as_clients_call_it(own: RunningGateway) -> None:
    body: dict[str, object] = {
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"name": "f", "input_schema": {"type": "string"}}],
    }
    answer = request(own.server.address, "POST", "/v1/messages", body).json()
    assert "tools[0].input_schema" in answer["error"]["message"]  # type: ignore[index]
