"""From a request of `/v1/responses` to the chat completion that answers it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from twinfire.gateway.dialects.openai_responses_requests import (
    SAME_IN_CHAT,
    ResponsesRequest,
    ResponsesTool,
    ResponsesToolChoice,
    TextFormat,
)
from twinfire.gateway.dialects.renamed_fields import renamed
from twinfire.gateway.dialects.requests import ChatRequest, Message
from twinfire.protocol.errors import InvalidRequest

LOGPROBS_INCLUDED = "message.output_text.logprobs"
_INCLUDABLE = (
    LOGPROBS_INCLUDED,
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
)
"""All but the first ask for what no answer here has."""
_NOT_SERVED = ("conversation", "prompt", "context_management")
_MAX_METADATA = 16
_MAX_METADATA_KEY_CHARS = 64
_MAX_METADATA_VALUE_CHARS = 512
_MAX_TOOL_NAME_CHARS = 256

_CHAT_PARTS = {".function.": "."}
_CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of the chat completion with what a client of this dialect calls them."""


def check_request(request: ResponsesRequest) -> None:
    """Raise InvalidRequest naming the first field that is wrong whatever the model is."""
    for name in _NOT_SERVED:
        if getattr(request, name):
            raise InvalidRequest(f"`{name}` is not supported by this server.", name, "unsupported")
    if request.input is None and request.previous_response_id is None:
        raise InvalidRequest("`input` is required.", "input")
    if request.background and request.store is False:
        raise InvalidRequest(
            "`background` needs `store`: the answer can only be fetched from there.", "background"
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("`stream_options` needs `stream` to be true.", "stream_options")
    for included in request.include or ():
        if included not in _INCLUDABLE:
            known = ", ".join(_INCLUDABLE)
            raise InvalidRequest(
                f"`include` holds {included[:80]!r}, which is none of {known}.", "include"
            )
    _check_metadata(request.metadata or {})


def chat_request(request: ResponsesRequest, messages: list[Message]) -> ChatRequest:
    """Return the chat completion; InvalidRequest for tools or a format that cannot be served."""
    tools, choice = _tools_and_choice(request)
    fields: dict[str, object] = {name: getattr(request, name) for name in SAME_IN_CHAT}
    fields |= {
        "messages": [],
        "max_completion_tokens": request.max_output_tokens,
        "stream": request.stream,
        "response_format": _response_format(request.text.format if request.text else None),
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "tools": [_function(tool) for tool in tools] or None,
        "tool_choice": choice if tools else None,
    }
    if not tools:
        fields["parallel_tool_calls"] = None
    if LOGPROBS_INCLUDED in (request.include or ()):
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    present = {name: value for name, value in fields.items() if value is not None}
    present["rejectIfBusy"] = present.pop("reject_if_busy", None)
    try:
        chat = msgspec.convert(present, ChatRequest)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"The request cannot be served: {error}") from None
    chat.messages = messages
    return chat


def in_words_of_responses(error: InvalidRequest) -> InvalidRequest:
    """Return a fault of the chat completion with the names that this dialect's fields have."""
    return renamed(error, _CHAT_NAMES, _CHAT_PARTS)


def _tools_and_choice(
    request: ResponsesRequest,
) -> tuple[Sequence[ResponsesTool], object]:
    tools = request.tools or []
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    choice = request.tool_choice
    if isinstance(choice, ResponsesToolChoice):
        return _chosen(tools, choice)
    if choice == "required" and not tools:
        raise InvalidRequest(
            "`tool_choice` is `required`, but there are no `tools`.", "tool_choice"
        )
    return tools, choice


def _check_tool(tool: ResponsesTool, param: str) -> None:
    if tool.type != "function":
        raise InvalidRequest(
            f"`{param}.type` is {tool.type[:80]!r}; this server hosts no tools, only `function` "
            "is supported.",
            f"{param}.type",
            "unsupported",
        )
    if not tool.name or len(tool.name) > _MAX_TOOL_NAME_CHARS:
        raise InvalidRequest(
            f"`{param}.name` must have 1 to {_MAX_TOOL_NAME_CHARS} characters.", f"{param}.name"
        )


def _chosen(
    tools: Sequence[ResponsesTool], choice: ResponsesToolChoice
) -> tuple[Sequence[ResponsesTool], object]:
    names = {tool.name for tool in tools}
    if choice.type == "function":
        if choice.name not in names:
            raise InvalidRequest(
                f"`tool_choice` names `{(choice.name or '')[:80]}`, which is not in `tools`.",
                "tool_choice",
            )
        return tools, {"type": "function", "function": {"name": choice.name}}
    if choice.type != "allowed_tools":
        raise InvalidRequest(
            f"`tool_choice` is of type {choice.type[:80]!r}; `function` and `allowed_tools` are "
            "supported.",
            "tool_choice",
            "unsupported",
        )
    allowed = [tool.name for tool in choice.tools or ()]
    if not allowed or not set(allowed) <= names:
        raise InvalidRequest(
            "`tool_choice.tools` must hold at least one tool, and none that is not in `tools`.",
            "tool_choice",
        )
    # The prompt keeps all tools, so that it stays the one that is cached.
    functions = [{"type": "function", "function": {"name": name}} for name in allowed]
    named = {"mode": choice.mode or "auto", "tools": functions}
    return tools, {"type": "allowed_tools", "allowed_tools": named}


def _function(tool: ResponsesTool) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name}
    for name in ("description", "parameters", "strict"):
        value = getattr(tool, name)
        if value is not None:
            function[name] = value
    return {"type": "function", "function": function}


def _response_format(format: TextFormat | None) -> dict[str, object] | None:
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return {"type": "json_object"}
    if format.schema is None:
        raise InvalidRequest("`text.format.schema` is required.", "text.format.schema")
    schema: dict[str, object] = {"name": format.name or "answer", "schema": format.schema}
    for name in ("description", "strict"):
        value = getattr(format, name)
        if value is not None:
            schema[name] = value
    return {"type": "json_schema", "json_schema": schema}


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > _MAX_METADATA:
        raise InvalidRequest(
            f"`metadata` has {len(metadata)} entries; the limit is {_MAX_METADATA}.", "metadata"
        )
    for key, value in metadata.items():
        if len(key) > _MAX_METADATA_KEY_CHARS or len(value) > _MAX_METADATA_VALUE_CHARS:
            raise InvalidRequest(
                f"`metadata` may have keys of {_MAX_METADATA_KEY_CHARS} and values of "
                f"{_MAX_METADATA_VALUE_CHARS} characters; `{key[:80]}` is longer.",
                "metadata",
            )
