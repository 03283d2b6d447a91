"""From a request of `/v1/messages` to the chat completion that answers it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from twinfire.gateway.dialects.anthropic_requests import (
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    CountTokensRequest,
    MessagesRequest,
)
from twinfire.gateway.dialects.requests import ChatRequest, Message
from twinfire.protocol.errors import InvalidRequest

CHAT_PARTS = {".function.parameters": ".input_schema", ".function.": "."}
CHAT_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""Fields of the chat completion with what a client of this dialect calls them."""
_NOT_SERVED = ("mcp_servers", "container")
_ROLE_BLOCKS = {
    "user": ("text", "document", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
_NEEDED = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
    "document": ("source",),
}


def chat_request(request: CountTokensRequest) -> ChatRequest:
    """Return the chat completion; InvalidRequest names what cannot be served."""
    for name in _NOT_SERVED:
        if getattr(request, name):
            raise InvalidRequest(f"`{name}` is not supported by this server.", name, "unsupported")
    messages = conversation_of(request)
    fields = _tool_fields(request.tools or (), request.tool_choice)
    fields |= _thinking_fields(request)
    if isinstance(request, MessagesRequest):
        fields |= _sampling_fields(request)
    if messages and messages[-1].role == "assistant":
        # The answer goes on from where its message stops.
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    present = {name: value for name, value in fields.items() if value is not None}
    try:
        chat = msgspec.convert({**present, "model": request.model, "messages": []}, ChatRequest)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"The request cannot be served: {error}") from None
    chat.messages = messages
    return chat


def conversation_of(request: CountTokensRequest) -> list[Message]:
    """Return the messages, the system's first; results of tools become messages of their own."""
    if not request.messages:
        raise InvalidRequest("`messages` must not be empty.", "messages")
    messages: list[Message] = []
    if request.system:
        blocks = _checked(request.system, "system", "system")
        messages.append(Message(role="system", content=_text(blocks)))
    for index, message in enumerate(request.messages):
        param = f"messages[{index}].content"
        blocks = _checked(message.content, message.role, param)
        if message.role == "assistant":
            messages.append(_assistant(blocks))
        elif message.role == "system":
            messages.append(Message(role="system", content=_text(blocks)))
        else:
            messages += _user(message, blocks)
    return messages


def _sampling_fields(request: MessagesRequest) -> dict[str, object]:
    return {
        "max_completion_tokens": request.max_tokens,
        "stop": request.stop_sequences or None,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "user": request.metadata.user_id if request.metadata else None,
        "prompt_cache_key": request.metadata.user_id if request.metadata else None,
    }


def _thinking_fields(request: CountTokensRequest) -> dict[str, object]:
    fields: dict[str, object] = {}
    if request.thinking is not None:
        thinks = request.thinking.type != "disabled"
        fields["chat_template_kwargs"] = {"enable_thinking": thinks}
    config = request.output_config
    format = (config.format if config else None) or request.output_format
    if format is not None:
        schema = {"name": "answer", "schema": format.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if config is not None:
        fields["reasoning_effort"] = config.effort
    return fields


def _tool_fields(
    tools: Sequence[AnthropicTool], choice: AnthropicToolChoice | None
) -> dict[str, object]:
    if not tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise InvalidRequest("`tool_choice` needs `tools`.", "tool_choice")
        return {}
    fields: dict[str, object] = {
        "tools": [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    }
    if choice is None:
        return fields
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if choice.type == "tool":
        if choice.name not in {tool.name for tool in tools}:
            raise InvalidRequest(
                f"`tool_choice` names `{(choice.name or '')[:80]}`, which is not in `tools`.",
                "tool_choice",
            )
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        fields["tool_choice"] = "required" if choice.type == "any" else choice.type
    return fields


def _function(tool: AnthropicTool, param: str) -> dict[str, object]:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"`{param}.type` is {tool.type[:80]!r}; this server hosts no tools, only tools "
            "with an `input_schema` are supported.",
            f"{param}.type",
            "unsupported",
        )
    if tool.input_schema is None:
        raise InvalidRequest(f"`{param}.input_schema` is required.", f"{param}.input_schema")
    function: dict[str, object] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _assistant(blocks: Sequence[Block]) -> Message:
    texts = [block.text or "" for block in blocks if block.type == "text"]
    thoughts = [block.thinking or "" for block in blocks if block.type == "thinking"]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {
                "name": block.name,
                "arguments": msgspec.json.encode(block.input).decode(),
            },
        }
        for block in blocks
        if block.type == "tool_use"
    ]
    message = {
        "role": "assistant",
        "content": "".join(texts) if texts or not calls else None,
        "tool_calls": calls or None,
        "reasoning_content": "\n".join(thoughts) or None,
    }
    return msgspec.convert(message, Message)


def _user(message: AnthropicMessage, blocks: Sequence[Block]) -> list[Message]:
    """Return the results of tools and what the user says, in their order."""
    messages: list[Message] = []
    said: list[str] = []
    for block in blocks:
        if block.type == "tool_result":
            if said:
                messages.append(Message(role="user", content="\n".join(said)))
                said = []
            result = Message(role="tool", content=_result(block), tool_call_id=block.tool_use_id)
            messages.append(result)
        else:
            said.append(_block_text(block))
    if said or not messages:
        messages.append(Message(role="user", content="\n".join(said)))
    return messages


def _result(block: Block) -> str:
    content = block.content
    if content is None or isinstance(content, str):
        return content or ""
    return _text(content)


def _text(blocks: Sequence[Block]) -> str:
    return "\n".join(map(_block_text, blocks))


def _block_text(block: Block) -> str:
    if block.type == "document":
        data = (block.source or {}).get("data")
        return data if isinstance(data, str) else ""
    return block.text or ""


def _checked(content: str | list[Block], role: str, param: str) -> list[Block]:
    """Return the content as blocks; InvalidRequest names the first that cannot be served."""
    if isinstance(content, str):
        return [Block(type="text", text=content)]
    for index, block in enumerate(content):
        where = f"{param}[{index}]"
        if block.type not in _ROLE_BLOCKS[role]:
            raise InvalidRequest(
                f"`{where}` is of type {block.type[:80]!r}; this model takes "
                f"{', '.join(_ROLE_BLOCKS[role])} from a {role}.",
                where,
            )
        for name in _NEEDED.get(block.type, ()):
            if getattr(block, name) is None:
                raise InvalidRequest(f"`{where}.{name}` is required.", f"{where}.{name}")
        if block.type == "document" and (block.source or {}).get("type") != "text":
            raise InvalidRequest(f"`{where}.source` must be of type `text`.", f"{where}.source")
        if isinstance(block.content, list):
            _checked(block.content, "system", f"{where}.content")
    return content
