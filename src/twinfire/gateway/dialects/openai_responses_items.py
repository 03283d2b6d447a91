"""The response object and its output items, as `/v1/responses` answers them.

Every field of the published shape is always there, null where it has no value: clients generated
from that shape refuse objects that lack one.
"""

from __future__ import annotations

import secrets
from typing import Literal

import msgspec

from twinfire.gateway.dialects.json_body import JsonValue
from twinfire.gateway.dialects.responses import ChatTokenLogprob

RESPONSE_PREFIX = "resp_"
ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
RUNNING: tuple[ResponseStatus, ...] = ("queued", "in_progress")


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[JsonValue] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningPart(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """Text of a reasoning."""

    text: str


class MessageItem(msgspec.Struct, tag_field="type", tag="message"):
    """What the model said."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A function that the model calls; `arguments` is JSON, cut short where the item is."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """What the model thought."""

    id: str
    status: ItemStatus
    content: list[ReasoningPart]
    summary: list[JsonValue] = []
    encrypted_content: None = None


OutputItem = MessageItem | FunctionCallItem | ReasoningItem


class InputTokensDetails(msgspec.Struct):
    """Of the input tokens, those that nobody computed for this response."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """Of the output tokens, those of its reasoning."""

    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct):
    """What a response used."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponsesError(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens", "content_filter"]


class FunctionToolShown(msgspec.Struct, tag_field="type", tag="function"):
    """A tool as the response repeats it."""

    name: str
    description: str | None
    parameters: dict[str, JsonValue] | None
    strict: bool | None


class ReasoningShown(msgspec.Struct):
    """The reasoning's configuration as the response repeats it."""

    effort: str | None = None
    summary: str | None = None


class ResponseObject(msgspec.Struct, kw_only=True):
    """Answer of `/v1/responses`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    background: bool
    error: ResponsesError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningShown
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    presence_penalty: float
    frequency_penalty: float
    text: dict[str, JsonValue]
    tool_choice: JsonValue
    tools: list[FunctionToolShown]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponsesUsage | None = None
    user: str | None
    metadata: dict[str, str]


class DeletedResponse(msgspec.Struct):
    """Answer to the deletion of a response."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    """A page of the items that a response was made from."""

    object: Literal["list"] = "list"
    data: list[dict[str, JsonValue]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct):
    """Answer of `/v1/responses/input_tokens`."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


_SIDES = {"output": "o", "input": "i"}
_KINDS = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def new_response_id() -> str:
    """Return an id that nobody can guess."""
    return RESPONSE_PREFIX + secrets.token_hex(16)


def item_id(response_id: str, kind: str, side: Literal["output", "input"], index: int) -> str:
    """Return the id of an item, from which `response_of_item` finds its response again."""
    return f"{_KINDS[kind]}_{response_id.removeprefix(RESPONSE_PREFIX)}{_SIDES[side]}{index:04d}"


def response_of_item(id_of_item: str) -> str | None:
    """Return the id of the response that an item is of, None for an id that is not ours."""
    _, _, rest = id_of_item.partition("_")
    stem, mark, index = rest[:32], rest[32:33], rest[33:]
    if len(stem) != 32 or mark not in _SIDES.values() or not index.isdecimal():
        return None
    return RESPONSE_PREFIX + stem
