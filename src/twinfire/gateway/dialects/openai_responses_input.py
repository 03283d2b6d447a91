"""From the items of `/v1/responses` to the messages of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from twinfire.gateway.dialects.openai_responses_items import item_id
from twinfire.gateway.dialects.openai_responses_requests import InputItem, InputPart
from twinfire.gateway.dialects.requests import ContentPart, Message
from twinfire.protocol.errors import InvalidRequest

Located = tuple[str, InputItem]
"""An item with the name that a fault gives it."""

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
    "item_reference": ("id",),
}


def checked_items(given: str | Sequence[InputItem] | None) -> list[Located]:
    """Return the request's items, each with its type; InvalidRequest names what is wrong."""
    if given is None:
        return []
    if isinstance(given, str):
        return [("input", InputItem(type="message", role="user", content=given))]
    items: list[Located] = []
    for index, item in enumerate(given):
        param = f"input[{index}]"
        kind = item.type or ("item_reference" if item.role is None and item.id else "message")
        if kind not in _NEEDED:
            raise InvalidRequest(
                f"`{param}` is of type {kind[:80]!r}; this server takes {', '.join(_NEEDED)}.",
                param,
                "unsupported",
            )
        for name in _NEEDED[kind]:
            if getattr(item, name) is None:
                raise InvalidRequest(f"`{param}.{name}` is required.", f"{param}.{name}")
        for name in ("content", "output"):
            _check_parts(getattr(item, name), f"{param}.{name}")
        items.append((param, msgspec.structs.replace(item, type=kind)))
    return items


def named_items(items: Sequence[InputItem], response_id: str) -> list[InputItem]:
    """Return the items as they are kept: with ids of our own where they have none."""
    kept: list[InputItem] = []
    for index, item in enumerate(items):
        kind = item.type or "message"
        content: str | list[InputPart] | None = item.content
        if kind == "message" and isinstance(content, str):
            part = "output_text" if item.role == "assistant" else "input_text"
            content = [InputPart(type=part, text=content)]
        own_id = item.id or item_id(response_id, kind, "input", index)
        status = item.status or (None if kind == "reasoning" else "completed")
        kept.append(msgspec.structs.replace(item, id=own_id, status=status, content=content))
    return kept


def conversation_of(instructions: str | None, items: Sequence[InputItem]) -> list[Message]:
    """Return the messages. A turn of the assistant is one, whatever items it came as."""
    messages: list[Message] = []
    turn = _AssistantTurn(messages.append)
    for item in items:
        if item.type == "reasoning":
            turn.add_reasoning(_reasoning_text(item))
        elif item.type == "function_call":
            turn.add_call(item)
        elif item.type == "message" and item.role == "assistant":
            turn.add_text(_text_of(item.content))
        else:
            turn.end()
            messages.append(_message(item))
    turn.end()
    if instructions:
        _prepend(instructions, messages)
    return messages


class _AssistantTurn:
    """Gathers what an assistant said, thought and called before anybody else spoke."""

    def __init__(self, emit: Callable[[Message], None]) -> None:
        self._emit = emit
        self._start()

    def _start(self) -> None:
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[dict[str, object]] = []

    def add_reasoning(self, text: str) -> None:
        """Thinking after speech opens another turn of the model."""
        if self._texts or self._calls:
            self.end()
        if text:
            self._reasoning.append(text)

    def add_text(self, text: str) -> None:
        """Speech after a call opens another turn of the model."""
        if self._calls:
            self.end()
        self._texts.append(text)

    def add_call(self, item: InputItem) -> None:
        """Add a function call."""
        function = {"name": item.name, "arguments": item.arguments}
        self._calls.append({"id": item.call_id, "type": "function", "function": function})

    def end(self) -> None:
        """Emit the turn, if it said anything; reasoning alone is nothing to go on from."""
        if self._texts or self._calls:
            message = {
                "role": "assistant",
                "content": "".join(self._texts) if self._texts else None,
                "tool_calls": self._calls or None,
                "reasoning_content": "\n".join(self._reasoning) or None,
            }
            self._emit(msgspec.convert(message, Message))
        self._start()


def _message(item: InputItem) -> Message:
    if item.type == "function_call_output":
        return Message(role="tool", content=_text_of(item.output), tool_call_id=item.call_id)
    assert item.role is not None, "the item was checked"
    content = item.content
    if isinstance(content, list):
        parts = [ContentPart(type="text", text=_part_text(part)) for part in content]
        return Message(role=item.role, content=parts)
    return Message(role=item.role, content=content)


def _prepend(instructions: str, messages: list[Message]) -> None:
    """Put the instructions first, in one message with those of the input.

    Many templates allow one system message, and only at the start.
    """
    first = messages[0] if messages else None
    if first is not None and first.role in ("system", "developer"):
        rest = first.content
        text = rest if isinstance(rest, str) else "\n".join(p.text or "" for p in rest or ())
        messages[0] = Message(role=first.role, content=f"{instructions}\n\n{text}")
    else:
        messages.insert(0, Message(role="system", content=instructions))


def _reasoning_text(item: InputItem) -> str:
    content = item.content
    if isinstance(content, str):
        return content
    return "\n".join(_part_text(part) for part in content or item.summary or ())


def _text_of(content: str | list[InputPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(map(_part_text, content))


def _part_text(part: InputPart) -> str:
    return (part.refusal if part.type == "refusal" else part.text) or ""


def _check_parts(content: str | list[InputPart] | None, param: str) -> None:
    if content is None or isinstance(content, str):
        return
    for index, part in enumerate(content):
        where = f"{param}[{index}]"
        if part.type not in _TEXT_PARTS:
            raise InvalidRequest(
                f"`{where}` is of type {part.type[:80]!r}; this model takes text only.", where
            )
        if (part.refusal if part.type == "refusal" else part.text) is None:
            raise InvalidRequest(f"`{where}` has no text.", where)
