"""What `/v1/messages` answers, faults included.

Every field of the published shape is always there, null where it has no value.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from twinfire.gateway.dialects.chat_job import ChatJob
from twinfire.gateway.dialects.json_body import JsonValue
from twinfire.gateway.dialects.responses import Usage
from twinfire.gateway.errors import Fault
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.text.answer_parts import AnswerFinish

StopReason = Literal[
    "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
]

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Of statuses; all others are an `api_error`."""


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """What the model said."""

    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model thought. Clients send it back only with a signature, which nobody checks."""

    thinking: str
    signature: str


class DirectCaller(msgspec.Struct, frozen=True, tag_field="type", tag="direct"):
    """The model itself; programs that call tools are not run here."""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool that the model uses."""

    id: str
    name: str
    input: dict[str, JsonValue]
    caller: DirectCaller = DirectCaller()


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct):
    """Of the output tokens, those of thinking."""

    thinking_tokens: int


class AnthropicUsage(msgspec.Struct):
    """What a message used. The prompt has `input_tokens` and those read from the cache."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    cache_creation_input_tokens: int = 0
    cache_creation: None = None
    inference_geo: None = None
    server_tool_use: None = None
    service_tier: Literal["standard"] = "standard"


class MessageAnswer(msgspec.Struct, kw_only=True):
    """Answer of `/v1/messages`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None
    usage: AnthropicUsage


class TokenCount(msgspec.Struct):
    """Answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class AnthropicError(msgspec.Struct):
    """The inside of an error body."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct):
    """The body of every answer that is not a success."""

    error: AnthropicError
    request_id: str
    type: Literal["error"] = "error"


def anthropic_usage(usage: Usage) -> AnthropicUsage:
    """Return a chat completion's usage as this dialect writes it."""
    num_cached = usage.prompt_tokens_details.cached_tokens
    return AnthropicUsage(
        input_tokens=usage.prompt_tokens - num_cached,
        cache_read_input_tokens=num_cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
    )


def stop_reason(
    job: ChatJob, finish: AnswerFinish, stopped_by: str | int | None
) -> tuple[StopReason, str | None]:
    """Return why a message ended, and the stop sequence that ended it."""
    if finish == "length":
        has_bound = job.request.max_completion_tokens is not None
        return ("max_tokens" if has_bound else "model_context_window_exceeded"), None
    if finish == "tool_calls":
        return "tool_use", None
    if isinstance(stopped_by, str):
        return "stop_sequence", stopped_by
    return "end_turn", None


def speak_anthropic(exchange: Exchange) -> None:
    """Make the faults of an exchange those of this dialect."""

    def body(fault: Fault) -> bytes:
        kind = _ERROR_TYPES.get(fault.status, "api_error")
        error = AnthropicError(kind, fault.body.error.message)
        return msgspec.json.encode(AnthropicErrorBody(error, exchange.request_id))

    def event(fault: Fault) -> bytes:
        return b"event: error\ndata: " + body(fault) + b"\n\n"

    exchange.fault_body = body
    exchange.fault_writer = event
    exchange.answer_headers.append(("request-id", exchange.request_id))
