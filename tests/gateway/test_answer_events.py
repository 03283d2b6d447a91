"""Writers of the Responses and Messages dialects over every sequence of parts."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from support.gateway_server import byte_text_side
from support.scripted_backend import ScriptedBackend
from twinfire.gateway.dialects.anthropic_stream import MessageWriter, whole_message
from twinfire.gateway.dialects.chat_answer import AnsweredChoice, AnsweredToolCall, ChatAnswer
from twinfire.gateway.dialects.chat_job import ChatJob
from twinfire.gateway.dialects.generate import usage as usage_of
from twinfire.gateway.dialects.openai_responses_object import begun_response
from twinfire.gateway.dialects.openai_responses_requests import ResponsesRequest
from twinfire.gateway.dialects.openai_responses_stream import ResponseWriter
from twinfire.gateway.dialects.requests import ChatRequest
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.hosted_model import HostedModel, HostedModels
from twinfire.gateway.served_model import ServedModel
from twinfire.gateway.settings import GatewaySettings
from twinfire.gateway.text.answer_parts import (
    AnswerDelta,
    AnswerFinish,
    AnswerPart,
    ContentText,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from twinfire.gateway.text.choice_text import TextOptions
from twinfire.gateway.text.stop_strings import StopStrings
from twinfire.gateway.text_generation import GenerationJob, PromptReady
from twinfire.protocol.sampling import SamplingParams

Turn = tuple[str, str, list[str]]
"""Reasoning, content and the arguments of each call."""


def job() -> ChatJob:
    async def make() -> ChatJob:
        backend = ScriptedBackend()
        hosted = HostedModel.of(ServedModel(("tiny",), byte_text_side()), backend)
        gateway = Gateway(GatewaySettings(), HostedModels([hosted]))
        return ChatJob(
            gateway=gateway,
            request=ChatRequest(messages=[], max_completion_tokens=5),
            model=gateway.ready_model("tiny"),
            generation=GenerationJob(
                prompts=[array("I", [1, 2])],
                sampling=[SamplingParams(max_tokens=5, seed=1)],
                text=TextOptions(StopStrings([])),
            ),
            answer_id="msg_1",
            created_s=0,
            echoed="",
            num_top_logprobs=None,
        )

    return asyncio.run(make())


JOB = job()
USAGE = usage_of(7, 5, 2, 1)
PIECES = st.lists(st.text(min_size=1, max_size=4), max_size=3)
TURNS = st.tuples(PIECES, PIECES, st.lists(PIECES, max_size=3))


def parts_of(turn: tuple[list[str], list[str], list[list[str]]]) -> list[AnswerPart]:
    reasoning, content, calls = turn
    parts: list[AnswerPart] = [ReasoningText(text) for text in reasoning]
    parts += [ContentText(text) for text in content]
    for index, pieces in enumerate(calls):
        parts.append(ToolCallStart(index, f"call_{index}", f"tool{index}"))
        parts += [ToolCallArguments(index, text) for text in pieces]
    return parts


def whole(turn: tuple[list[str], list[str], list[list[str]]], finish: AnswerFinish) -> ChatAnswer:
    reasoning, content, calls = turn
    answered = [
        AnsweredToolCall(f"call_{index}", f"tool{index}", "".join(pieces))
        for index, pieces in enumerate(calls)
    ]
    choice = AnsweredChoice(
        index=0,
        content="".join(content) or None,
        reasoning="".join(reasoning) or None,
        tool_calls=answered,
        finish_reason=finish,
        stop_reason=None,
    )
    return ChatAnswer([choice], USAGE, None)


def decoded(frames: bytes) -> list[dict[str, Any]]:
    events = []
    for frame in frames.decode().split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def response_writer() -> ResponseWriter:
    request = ResponsesRequest(input="x")
    return ResponseWriter(begun_response("resp_" + "0" * 32, request, JOB), JOB)


@settings(max_examples=60, deadline=None)
@given(TURNS, st.sampled_from(["stop", "length", "tool_calls"]))
def test_response_events_build_up_to_the_response(turn: Any, finish: AnswerFinish) -> None:
    writer = response_writer()
    frames = writer.prompt_ready(PromptReady(0, None), USAGE)
    for part in parts_of(turn):
        frames += writer.delta(AnswerDelta(0, [part]))
    frames += writer.delta(AnswerDelta(0, [], finish_reason=finish))
    frames += writer.end(USAGE)
    events = decoded(frames)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    texts: dict[str, str] = {}
    done: list[dict[str, Any]] = []
    open_id = None
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert open_id is None
            assert event["output_index"] == len(done)
            open_id = event["item"]["id"]
            texts[open_id] = ""
        elif kind.endswith(".delta"):
            assert event["item_id"] == open_id
            texts[event["item_id"]] += event["delta"]
        elif kind == "response.output_item.done":
            assert event["item"]["id"] == open_id
            open_id = None
            done.append(event["item"])
    final = events[-1]["response"]
    assert open_id is None
    assert final["output"] == done
    assert events[-1]["type"] == f"response.{final['status']}"
    assert final["status"] == ("incomplete" if finish == "length" else "completed")
    for item in done:
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert texts[item["id"]] == text
    collected = response_writer().collected(whole(turn, finish))
    assert json.loads(json.dumps(final["output"])) == json.loads(encoded(collected.output))
    assert final["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}


@settings(max_examples=60, deadline=None)
@given(TURNS, st.sampled_from(["stop", "length", "tool_calls"]))
def test_message_events_build_up_to_the_message(turn: Any, finish: AnswerFinish) -> None:
    writer = MessageWriter(JOB)
    frames = writer.prompt_ready(PromptReady(0, None), USAGE)
    for part in parts_of(turn):
        frames += writer.delta(AnswerDelta(0, [part]))
    frames += writer.delta(AnswerDelta(0, [], finish_reason=finish))
    frames += writer.end(USAGE)
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in decoded(frames):
        kind = event["type"]
        if kind == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            is_open = True
            blocks.append({**event["content_block"], "json": ""})
        elif kind == "content_block_delta":
            assert is_open
            assert event["index"] == len(blocks) - 1
            block, delta = blocks[-1], event["delta"]
            block["text"] = block.get("text", "") + delta.get("text", "")
            block["thinking"] = block.get("thinking", "") + delta.get("thinking", "")
            block["json"] += delta.get("partial_json", "")
        elif kind == "content_block_stop":
            is_open = False
    message = json.loads(encoded(whole_message(JOB, whole(turn, finish))))
    assert not is_open
    assert [block["type"] for block in blocks] == [block["type"] for block in message["content"]]
    for block, expected in zip(blocks, message["content"], strict=True):
        for name in ("text", "thinking", "id", "name"):
            if name in expected:
                assert block[name] == expected[name]
        if expected["type"] == "tool_use":
            assert expected["input"] == _object(block["json"])
    ended = decoded(frames)[-2]
    assert ended["delta"]["stop_reason"] == message["stop_reason"]
    assert ended["usage"] == message["usage"]


def encoded(value: object) -> bytes:
    return msgspec.json.encode(value)


def _object(text: str) -> object:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
