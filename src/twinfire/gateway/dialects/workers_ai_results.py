"""Answers of `/ai/run`: an envelope whose result is read by clients of older and newer models.

The result is OpenAI's completion object, as newer models give it, with the native fields of older
ones beside it; no client reads both.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Raw, UnsetType

from twinfire.gateway.dialects.chat import chat_response
from twinfire.gateway.dialects.chat_answer import AnsweredToolCall, ChatAnswer
from twinfire.gateway.dialects.chat_job import ChatJob
from twinfire.gateway.dialects.json_body import JsonValue
from twinfire.gateway.dialects.responses import ChatResponse
from twinfire.gateway.dialects.workers_ai_input import asks_for_json

_ENVELOPE_HEAD = b'{"result":'
_ENVELOPE_TAIL = b',"success":true,"errors":[],"messages":[]}'


class NativeToolCall(msgspec.Struct):
    """A call that the model asks for."""

    name: str
    arguments: JsonValue
    """An object; the text itself where the model's JSON is broken or cut."""
    id: str


class NativeFields(msgspec.Struct):
    """What a result has in the native shape."""

    response: JsonValue
    """The text; an object or a list where JSON was asked for. Never a bare number."""
    tool_calls: list[NativeToolCall] | UnsetType = UNSET


class RunResult(ChatResponse, kw_only=True):
    """The result of `/ai/run`."""

    response: JsonValue
    tool_calls: list[NativeToolCall] | UnsetType = UNSET


class RunAnswer(msgspec.Struct):
    """The envelope of `/ai/run`."""

    result: RunResult
    success: bool = True
    errors: list[str] = []
    messages: list[str] = []


def envelope(result: bytes) -> bytes:
    """Return a success with a result that is encoded already."""
    return _ENVELOPE_HEAD + result + _ENVELOPE_TAIL


def run_result(job: ChatJob, answer: ChatAnswer) -> bytes:
    """Return the result of a whole answer as JSON."""
    first = answer.choices[0]
    native = NativeFields(
        response=_response(first.content, as_json=asks_for_json(job.request)),
        tool_calls=native_tool_calls(first.tool_calls) or UNSET,
    )
    completion = msgspec.json.encode(chat_response(job, answer))
    return completion[:-1] + b"," + msgspec.json.encode(native)[1:]


def native_tool_calls(calls: Sequence[AnsweredToolCall]) -> list[NativeToolCall]:
    """Return calls in the native shape."""
    return [
        NativeToolCall(call.name, _json_value(call.arguments, b"{") or call.arguments, call.call_id)
        for call in calls
    ]


def _response(text: str | None, *, as_json: bool) -> JsonValue:
    if text is None or not as_json:
        return text
    return _json_value(text, b"{[") or text


def _json_value(text: str, starts: bytes) -> Raw | None:
    """Return a text as the JSON that it is, digits untouched; None when it is no such value."""
    encoded = text.strip().encode("utf-8", "surrogatepass")
    if not encoded or encoded[0] not in starts:
        return None
    try:
        msgspec.json.decode(encoded)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return Raw(encoded)
