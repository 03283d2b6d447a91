"""Tool calls and reasoning through the real openai client, over a scripted backend."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from typing import ClassVar

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from support.answer_vectors import VECTORS, Vector
from support.byte_tokenizer import (
    END_ID,
    PLAIN_TEMPLATE,
    START_ID,
    VOCAB_SIZE,
    ByteTokenizer,
    plain_template,
)
from support.gateway_server import MODEL, RunningGateway, running_gateway, tiny_config
from support.raw_http import request
from support.scripted_backend import ScriptedBackend, say, worker_info
from twinfire.artifacts.token_grammar import TokenGrammar
from twinfire.gateway.served_model import TextSide
from twinfire.gateway.text.answer_formats import ParserChoice

USER = [{"role": "user", "content": "weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "What it is like outside.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "hourly": {"type": "boolean"},
                "places": {"type": "array", "items": {"type": "string"}},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
    },
}
FILES = {"type": "function", "function": {"name": "list_files"}}
TOOLS = [WEATHER, FILES]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ARGUMENTS = '{"city": "Paris"}'

TOOL_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif %}"
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}{{ call.function.arguments.city }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined %}<think>{{ '' if enable_thinking else '</think>' }}"
    "{% endif %}{% endif %}"
)


def text_side(template: str = TOOL_TEMPLATE, tools: str = "auto") -> TextSide:
    parsers = ParserChoice(tools, "think")
    return TextSide.load(ByteTokenizer(), plain_template(template), tiny_config(), parsers)


@pytest.fixture(scope="module")
def own() -> Iterator[RunningGateway]:
    with running_gateway(text=text_side()) as gateway:
        yield gateway


@pytest.fixture
def calling(own: RunningGateway) -> Iterator[OpenAI]:
    own.backend.tokens_per_step = 1
    with OpenAI(base_url=own.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def last_prompt(gateway: RunningGateway) -> str:
    return ByteTokenizer().decode(gateway.backend.submitted[-1][0], False)


def ask(client: OpenAI, **fields: object) -> ChatCompletion:
    fields = {"messages": USER, "tools": TOOLS, **fields}
    return client.chat.completions.create(model=MODEL, **fields)  # type: ignore[call-overload, no-any-return]


def ask_stream(client: OpenAI, **fields: object) -> list[ChatCompletionChunk]:
    fields = {"messages": USER, "tools": TOOLS, "stream": True, **fields}
    return list(client.chat.completions.create(model=MODEL, **fields))  # type: ignore[call-overload]


def put_together(
    chunks: list[ChatCompletionChunk], index: int = 0
) -> tuple[str, str, list[list[str]], str | None]:
    """(content, reasoning, [id, name, arguments] of each call, finish reason) of a choice."""
    content, reasoning, calls, finish = "", "", [], None
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            delta = choice.delta
            content += delta.content or ""
            extra = delta.model_extra or {}
            assert extra.get("reasoning") == extra.get("reasoning_content")
            reasoning += extra.get("reasoning_content") or ""
            for call in delta.tool_calls or []:
                assert call.function is not None
                if call.id is not None:
                    assert call.index == len(calls)
                    assert call.type == "function"
                    assert call.function.name
                    calls.append([call.id, call.function.name, ""])
                calls[call.index][2] += call.function.arguments or ""
            finish = choice.finish_reason or finish
    return content, reasoning, calls, finish


def test_round_trip(own: RunningGateway, calling: OpenAI) -> None:
    own.backend.script = say("Let me look.\n" + CALL)
    answer = ask(calling)
    message = answer.choices[0].message
    assert message.content == "Let me look."
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    assert call.id.startswith("call_")
    assert last_prompt(own).startswith("get_weather list_files ")
    own.backend.script = say("Sunny.")
    result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
    answer = ask(calling, messages=[*USER, message, result])
    assert answer.choices[0].message.content == "Sunny."
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert "<tool_call>get_weatherParis</tool_call>" in last_prompt(own)
    assert "<|start|>tool\nsun<|end|>" in last_prompt(own)


@pytest.mark.parametrize("tokens_per_step", [1, 3, 1000])
def test_stream_and_whole_answer_are_the_same(
    own: RunningGateway, calling: OpenAI, tokens_per_step: int
) -> None:
    own.backend.script = say(f"<think>\nHm, Päris.\n</think>\n\nLet me look.\n{CALL}\n{CALL}")
    own.backend.tokens_per_step = tokens_per_step
    for choice in ask(calling, n=2).choices:
        assert choice.message.content == "Let me look."
        assert (choice.message.model_extra or {})["reasoning_content"] == "Hm, Päris."
        calls = [
            (call.function.name, call.function.arguments) for call in choice.message.tool_calls
        ]  # type: ignore[union-attr]
        assert calls == [("get_weather", ARGUMENTS)] * 2
    chunks = ask_stream(calling, n=2)
    ids: set[str] = set()
    for index in range(2):
        content, reasoning, streamed, finish = put_together(chunks, index)
        assert (content, reasoning, finish) == ("Let me look.", "Hm, Päris.", "tool_calls")
        assert [call[1:] for call in streamed] == [["get_weather", ARGUMENTS]] * 2
        ids |= {call[0] for call in streamed}
    assert len(ids) == 4


@pytest.mark.parametrize(
    "vector", [each for each in VECTORS if each.format == "hermes"], ids=lambda each: each.name
)
def test_cut_at_every_token(own: RunningGateway, calling: OpenAI, vector: Vector) -> None:
    """A token is a byte here, so characters are cut, too."""
    if vector.inside_reasoning:
        pytest.skip("the prompt decides that")
    own.backend.script = say(vector.text)
    limit = len(vector.text.encode()) if vector.stops == "length" else None
    content, reasoning, calls, finish = put_together(ask_stream(calling, max_tokens=limit))
    assert (content, reasoning, finish) == (vector.content, vector.reasoning, vector.finish)
    assert [tuple(call[1:]) for call in calls] == list(vector.calls)


def test_usage_counts_reasoning_tokens_exactly(own: RunningGateway, calling: OpenAI) -> None:
    thought = "wörld"
    own.backend.script = say(f"<think>{thought}</think>ok")
    for step in (1, 4, 100):
        own.backend.tokens_per_step = step
        answer = ask(calling, tools=openai.NOT_GIVEN)
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens == len(thought.encode())
        chunks = ask_stream(calling, n=2, stream_options={"include_usage": True})
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens_details is not None
        counted = chunks[-1].usage.completion_tokens_details.reasoning_tokens
        assert counted == 2 * len(thought.encode())


def test_reasoning_may_be_hidden(own: RunningGateway, calling: OpenAI) -> None:
    own.backend.script = say("<think>secret</think>ok")
    fields = {"extra_body": {"include_reasoning": False}}
    message = ask(calling, **fields).choices[0].message
    assert message.content == "ok"
    assert "reasoning_content" not in (message.model_extra or {})
    assert put_together(ask_stream(calling, **fields))[:2] == ("ok", "")


def test_the_prompt_decides_whether_the_answer_begins_with_reasoning(
    own: RunningGateway, calling: OpenAI
) -> None:
    own.backend.script = say("hm</think>ok")
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    message = ask(calling, extra_body=on).choices[0].message
    assert (message.content, (message.model_extra or {})["reasoning"]) == ("ok", "hm")
    message = ask(calling, reasoning_effort="high").choices[0].message
    assert message.content == "ok"
    own.backend.script = say("ok <think> no")
    for fields in (
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"reasoning_effort": "none"},
    ):
        message = ask(calling, **fields).choices[0].message
        assert last_prompt(own).endswith("</think>")
        assert message.content == "ok <think> no"


def test_none_keeps_the_prompt_and_reads_no_calls(own: RunningGateway, calling: OpenAI) -> None:
    own.backend.script = say(CALL)
    ask(calling)
    with_auto = last_prompt(own)
    answer = ask(calling, tool_choice="none")
    assert last_prompt(own) == with_auto, "another beginning would cost the cached prompt"
    assert "list_files" in with_auto
    assert answer.choices[0].message.content == CALL
    assert answer.choices[0].finish_reason == "stop"
    assert put_together(ask_stream(calling, tool_choice="none"))[:2] == (CALL, "")
    assert own.backend.submitted[-1][1].bad_words == ()


class WithCallTokens(ByteTokenizer):
    """A vocabulary in which the marks of a call are tokens, in place of two others."""

    marks: ClassVar = {"<tool_call>": START_ID, "</tool_call>": END_ID}

    def encode(self, text: str, add_special_tokens: bool = True) -> array[int]:
        if text in self.marks:
            return array("I", [self.marks[text]])
        return super().encode(text, add_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        texts = {token: mark.encode() for mark, token in self.marks.items()}
        return texts.get(token_id) or super().token_bytes(token_id)


def test_none_lets_nobody_begin_a_call_where_that_takes_a_token() -> None:
    text = TextSide.load(
        WithCallTokens(), plain_template(TOOL_TEMPLATE), tiny_config(), ParserChoice("hermes")
    )
    with (
        running_gateway(text=text) as gateway,
        OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        extra = {"bad_words": ["x"]}
        ask(client, tool_choice="none", extra_body=extra)
        words = gateway.backend.submitted[-1][1].bad_words
        assert {(START_ID,), (END_ID,), (ord("x"),)} <= set(words)
        ask(client, extra_body=extra)
        assert (START_ID,) not in gateway.backend.submitted[-1][1].bad_words


def test_one_call_where_parallel_ones_are_not_wanted(own: RunningGateway, calling: OpenAI) -> None:
    own.backend.script = say(CALL * 3)
    (call,) = ask(calling, parallel_tool_calls=False).choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.arguments == ARGUMENTS


def test_a_cut_call_says_length(own: RunningGateway, calling: OpenAI) -> None:
    own.backend.script = say(CALL)
    cut = CALL.index("Paris") + 2
    choice = ask(calling, max_tokens=cut).choices[0]
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.arguments == '{"city": "Pa'
    assert choice.message.content is None


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "list_files"}),
        ({"type": "function", "function": {"name": "list_files"}}, {"list_files"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "get_weather"}}],
                },
            },
            {"get_weather"},
        ),
    ],
)
def test_forced_calls_are_held_to_a_grammar(
    own: RunningGateway, calling: OpenAI, choice: object, names: set[str]
) -> None:
    own.backend.script = say(CALL)
    ask(calling, tool_choice=choice)
    grammar = own.backend.submitted[-1][1].grammar
    assert grammar is not None
    assert {name for name in ("get_weather", "list_files") if name in grammar.text} == names
    assert "thinking" in grammar.text, "what the model thinks is free"
    ask(calling, tool_choice="auto")
    assert own.backend.submitted[-1][1].grammar is None


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"guided_regex": "a/b\\/c"}},
        {"extra_body": {"guided_choice": ["start", "b"]}},
    ],
)
def test_an_answer_in_a_form_may_be_a_call_first(
    own: RunningGateway, calling: OpenAI, form: dict[str, object]
) -> None:
    own.backend.script = say(CALL)
    answer = ask(calling, **form)
    assert answer.choices[0].finish_reason == "tool_calls"
    grammar = own.backend.submitted[-1][1].grammar
    assert grammar is not None
    assert "start: calls | answer" in grammar.text


def test_workers_ai_and_legacy_shapes(own: RunningGateway, calling: OpenAI) -> None:
    own.backend.script = say(CALL)
    flat = [{"name": "get_weather", "description": "w", "parameters": {"type": "object"}}]
    assert ask(calling, tools=flat).choices[0].message.tool_calls
    fields = {"tools": openai.NOT_GIVEN, "functions": flat, "function_call": "auto"}
    answer = ask(calling, **fields)
    called = answer.choices[0].message.function_call
    assert called is not None
    assert (called.name, called.arguments) == ("get_weather", ARGUMENTS)
    assert answer.choices[0].finish_reason == "function_call"
    chunks = ask_stream(calling, **fields)
    deltas = [chunk.choices[0].delta.function_call for chunk in chunks]
    assert next(each.name for each in deltas if each is not None) == "get_weather"
    assert "".join(each.arguments or "" for each in deltas if each is not None) == ARGUMENTS
    assert chunks[-1].choices[0].finish_reason == "function_call"
    history = [
        *USER,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "sun"},
    ]
    ask(calling, messages=history)
    assert "<tool_call>f" in last_prompt(own)
    assert "<|start|>tool\nsun" in last_prompt(own)


def test_reasoning_of_earlier_turns_reaches_the_template(
    own: RunningGateway, calling: OpenAI
) -> None:
    for name in ("reasoning", "reasoning_content"):
        ask(calling, messages=[*USER, {"role": "assistant", "content": [], name: "so"}, *USER])
        assert "<think>so</think>" in last_prompt(own)


def test_token_details_of_calls(own: RunningGateway, calling: OpenAI) -> None:
    """All tokens are told, once, whatever part of the answer they became."""
    text = f"<think>a</think>b{CALL}"
    own.backend.script = say(text)
    fields = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    choice = ask(calling, **fields).choices[0]
    ids = (choice.model_extra or {})["token_ids"]
    assert bytes(ids[:-1]) == text.encode()
    chunks = ask_stream(calling, **fields)
    streamed = [
        token
        for chunk in chunks
        for choice in chunk.choices
        for token in (choice.model_extra or {}).get("token_ids", ())
    ]
    assert streamed == ids


def test_a_template_without_tools_is_told_of_them_in_words() -> None:
    def backend() -> ScriptedBackend:
        return ScriptedBackend(worker_info=worker_info(4096))

    with running_gateway(text=text_side(PLAIN_TEMPLATE), make_backend=backend) as gateway:
        gateway.backend.script = say(CALL)
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
        body = {
            "messages": [
                {"role": "system", "content": "Be brief."},
                *USER,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "9"}]},
            ],
            "tools": TOOLS,
        }
        answer = request(gateway.server.address, "POST", "/v1/chat/completions", body).json()
        prompt = last_prompt(gateway)
    assert "Be brief.\n\n# Tools" in prompt
    assert json.dumps("What it is like outside.") in prompt
    assert '<tool_call>\n{"name":"f","arguments":{"x":1}}\n</tool_call>' in prompt
    assert "<|start|>user\n<tool_response>\n9\n</tool_response>" in prompt
    assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_no_parser_leaves_calls_in_the_text_and_forces_none() -> None:
    with running_gateway(text=text_side(tools="none")) as gateway:
        gateway.backend.script = say(CALL)
        body: dict[str, object] = {"messages": USER, "tools": TOOLS}
        path = "/v1/chat/completions"
        answer = request(gateway.server.address, "POST", path, body).json()
        assert answer["choices"][0]["message"]["content"] == CALL
        refused = request(gateway.server.address, "POST", path, {**body, "tool_choice": "required"})
        assert refused.status == 400
        assert refused.error()["param"] == "tool_choice"


def accepted(gateway: RunningGateway, text: str) -> bool:
    """Whether the grammar of the last request takes all of `text` as a whole output."""
    grammar = gateway.backend.submitted[-1][1].grammar
    assert grammar is not None
    matcher = TokenGrammar(ByteTokenizer(), VOCAB_SIZE).compile(grammar).matcher()
    return all(matcher.accept(token) for token in text.encode()) and matcher.may_end


def test_grammars_leave_reasoning_free_and_hold_the_answer(
    own: RunningGateway, calling: OpenAI
) -> None:
    own.backend.script = say(CALL)
    ask(calling, tool_choice="required")
    for text in (CALL, "<think>So { be it.\n</think>" + CALL, f"{CALL}\n{CALL}"):
        assert accepted(own, text), text
    for text in ("Sure.", "<think>So</think>Sure.", "<think>" + CALL, "", f"x{CALL}"):
        assert not accepted(own, text), text
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    ask(calling, tool_choice="required", extra_body=thinking)
    assert accepted(own, "So.</think>" + CALL)
    assert not accepted(own, CALL)
    ask(calling, tool_choice="required", reasoning_effort="none")
    assert accepted(own, CALL)
    assert not accepted(own, "<think>So.</think>" + CALL)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": 1}', "a"),
        ({"extra_body": {"guided_regex": r"a/b\/c|d"}}, "a/b/c", "a"),
        ({"extra_body": {"guided_choice": ["start", "b"]}}, "start", "c"),
    ],
)
def test_an_answer_is_in_its_form_or_a_call(
    own: RunningGateway, calling: OpenAI, form: dict[str, object], good: str, bad: str
) -> None:
    own.backend.script = say(CALL)
    ask(calling, **form)
    for text in (good, CALL, f"<think>hm</think>{good}", f"<think>hm</think>{CALL}"):
        assert accepted(own, text), text
    assert not accepted(own, bad)
    ask(calling, tools=openai.NOT_GIVEN, **form)
    assert accepted(own, good)
    assert not accepted(own, CALL)
