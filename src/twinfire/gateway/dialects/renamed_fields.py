"""Faults of a chat completion told to clients of dialects that call its fields otherwise."""

from __future__ import annotations

from collections.abc import Mapping

from twinfire.protocol.errors import InvalidRequest


def renamed(
    error: InvalidRequest, names: Mapping[str, str], parts: Mapping[str, str]
) -> InvalidRequest:
    """Return `error` with fields called by other names, in its text and in its parameter.

    `parts` are replaced inside longer names too, such as `.function.` of a tool.
    """
    message, param = error.message, error.param
    for chat_part, part in parts.items():
        message = message.replace(chat_part, part)
        param = param and param.replace(chat_part, part)
    for chat_name, name in names.items():
        message = message.replace(f"`{chat_name}`", f"`{name}`")
        if param == chat_name:
            param = name
    return InvalidRequest(message, param, error.code)
