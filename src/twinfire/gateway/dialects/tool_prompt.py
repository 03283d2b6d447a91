"""Tools for models whose chat template knows none: described in words, calls and results as text.

The form is that of Hermes and Qwen 2.5, which most such models have seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_INSTRUCTIONS = """
</tools>

For each function call, return a JSON object with the function's name and its arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""

TemplateMessage = dict[str, object]


def with_tools_described(
    messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, object]]
) -> list[TemplateMessage]:
    """Return the conversation with its tools in the system prompt, and past calls as text."""
    told = [_in_words(message) for message in messages]
    if not tools:
        return told
    lines = "\n".join(msgspec.json.encode(tool).decode() for tool in tools)
    section = _INTRODUCTION + lines + _INSTRUCTIONS
    if told and told[0]["role"] == "system":
        told[0] = _with_text_after(told[0], "\n\n" + section)
    else:
        told.insert(0, {"role": "system", "content": section})
    return told


def _in_words(message: TemplateMessage) -> TemplateMessage:
    if message["role"] in ("tool", "function"):
        response: TemplateMessage = {"role": "user", "content": "<tool_response>\n"}
        response = _with_text_after(response, _text(message["content"]))
        return _with_text_after(response, "\n</tool_response>")
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    told = {key: value for key, value in message.items() if key != "tool_calls"}
    for call in calls:
        function = call.get("function", {})
        written = {"name": function.get("name"), "arguments": function.get("arguments")}
        json = msgspec.json.encode(written).decode()
        separator = "\n" if told["content"] else ""
        told = _with_text_after(told, f"{separator}<tool_call>\n{json}\n</tool_call>")
    return told


def _with_text_after(message: TemplateMessage, text: str) -> TemplateMessage:
    content = message["content"]
    if isinstance(content, list):
        return {**message, "content": [*content, {"type": "text", "text": text}]}
    return {**message, "content": f"{content}{text}"}


def _text(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content)
    return str(content)
